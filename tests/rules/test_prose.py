"""Plain English, as far as a program can judge it: in documents, docstrings and comments."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.rungs.tree import ROOMS, Program, programs, text_files

LONGEST_SENTENCE = 40
"""Words. docs/contributing.md asks for 25 as a rule."""
OLD_TEXT = ("CHANGELOG.md", "docs/decisions/")
"""What was written at a time and stays as it was."""

_CODE_BLOCK = re.compile(r"^(```|~~~).*?^\1", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\[([^\]]*)\]\([^)]*\)")
_CODE = re.compile(r"`+[^`]*`+")
_LINE_START = re.compile(r"^\s*(?:[*-] |\d+\. |#+ |>)")
_COLUMNS = re.compile(r"\S {2,}\S")
"""A row of a layout: words in columns."""
_END = re.compile(r"(?<=[.!?])[)\"'*]*\s+")
_END_OF_NOTE = re.compile(r"(?<=[.!?:;])[)\"'*]*\s+")
"""A cell of a table, and a row of a layout, may be a list of notes."""
_MANNERED = re.compile(r"\bAs of (?:`|the |a )|\b[Ww]hoever\b|\b[Ww]hat came\b")


def blocks(text: str, end: re.Pattern[str] = _END) -> Iterator[tuple[str, re.Pattern[str]]]:
    """Paragraphs, list items, headings and table cells, each with what ends a sentence there."""
    paragraph: list[str] = []
    for line in [*_CODE_BLOCK.sub("", text).splitlines(), ""]:
        if line.startswith("    ") and not paragraph:
            continue  # a picture, or code
        is_table = line.lstrip().startswith("|") or _COLUMNS.search(line) is not None
        if not line.strip() or is_table or _LINE_START.match(line):
            yield " ".join(paragraph), end
            paragraph = []
        if is_table:
            yield from ((cell, _END_OF_NOTE) for cell in line.split("|"))
        elif line.strip():
            paragraph.append(line.strip())


def sentences(text: str, end: re.Pattern[str] = _END) -> Iterator[str]:
    for block, ends in blocks(text, end):
        yield from ends.split(_CODE.sub("x", _LINK.sub(r"\1", block)))


def faults(text: str, end: re.Pattern[str] = _END) -> list[str]:
    long = [s for s in sentences(text, end) if len(s.split()) > LONGEST_SENTENCE]
    return [s[:90] for s in long] + [found[0] for found in _MANNERED.finditer(text)]


def prose_of(program: Program) -> str:
    """Docstrings (with those of constants) and comments of their own lines; neighbours are one paragraph."""
    found = []
    for node in program.nodes(ast.Expr):
        if isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            found.append("\n" + inspect.cleandoc(node.value.value) + "\n")
    in_texts = {
        line
        for kind in (ast.Constant, ast.JoinedStr)
        for each in program.nodes(kind)
        for line in range(each.lineno + 1, (each.end_lineno or each.lineno) + 1)
    }
    last = 0
    for number, line in enumerate(program.text.split("\n"), 1):
        if (said := line.lstrip()).startswith("#") and number not in in_texts:
            if number != last + 1:
                found.append("")
            found.append(said.removeprefix("#"))
            last = number
    return "\n".join(found)


def test_a_long_sentence_is_found_and_a_table_cell_is_one_by_itself() -> None:
    long = " ".join(["word"] * 41)
    assert faults(f"A start. {long}.\n") == [f"{long}."[:90]]
    assert not faults(f"| {long[:100]} | {long[:100]} |\n* {long[:120]}\n* {long[:120]}\n")
    halves = f"{long[:120]}; {long[:120]}"
    assert faults(f"{halves}.\n") == [f"{halves}."[:90]]
    assert not faults(f"| {halves} |\n"), "a cell may be a list of notes"
    assert faults("As of `Volume`.") == ["As of `"]


def test_documents(repository: Path) -> None:
    found = {
        name: faults(text)
        for name, text in text_files(repository)
        if name.endswith(".md") and not name.startswith(OLD_TEXT)
    }
    assert not {name: wrong for name, wrong in found.items() if wrong}


@pytest.mark.parametrize("room", ROOMS)
def test_docstrings_and_comments(repository: Path, room: str) -> None:
    found = {
        name: faults(prose_of(program))
        for name, program in programs(repository).items()
        if name.split("/")[0] == room
    }
    assert not {name: wrong for name, wrong in found.items() if wrong}
