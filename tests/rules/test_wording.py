"""What must not stand in the tree: promises, placeholders, and places of one machine."""

from __future__ import annotations

import re
from pathlib import Path

from tests.support.rungs.tree import ROOMS, text_files

_PROMISES = re.compile(r"\b(TODO|FIXME|XXX|HACK)\b|\bNotImplementedError\b|raise NotImplemented\b")
_PLACES = re.compile(r"/work/|\.\./shared\b")
_DOCSTRING = re.compile(r'(?:#.*\n)*\s*r?"""\s*[^\s"]')
"""How each program begins: with lines of comment, or none, and its docstring."""
_THIS_FILE = "tests/rules/test_wording.py"


def _found(repository: Path, pattern: re.Pattern[str], *, skip: tuple[str, ...]) -> list[str]:
    return [
        f"{name}:{number}: {line.strip()[:100]}"
        for name, text in text_files(repository)
        if not name.startswith(skip) and name != _THIS_FILE
        for number, line in enumerate(text.splitlines(), 1)
        if pattern.search(line)
    ]


def test_nothing_is_left_for_later(repository: Path) -> None:
    # The numbers of an mktemp template are no promise, so only programs and documents are looked at.
    found = _found(repository, _PROMISES, skip=("tests/vectors/",))
    assert not [line for line in found if "XXXXXX" not in line]


def test_nothing_depends_on_the_place_where_it_was_written(repository: Path) -> None:
    found = _found(repository, _PLACES, skip=("tests/",))
    assert not found


def test_every_program_file_says_what_it_is(repository: Path) -> None:
    silent = [
        name
        for name, text in text_files(repository)
        if name.endswith(".py")
        and name.split("/")[0] in (*ROOMS, "tests")
        and text.strip()
        and not _DOCSTRING.match(text)
    ]
    assert not silent
