"""The reference of states, made from the tables by which the code changes them.

    python -m tests.support.rungs.state_tables > docs/reference/states.md

A table is a module's `LEGAL`: each state with the states that may follow, or pairs of them.
tests/rules/test_docs.py compares the page with what this makes.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import Any

from tests.support.rungs.tree import ROOMS, text_files

ROOT = Path(__file__).parents[3]
_TABLE = re.compile(r"^(LEGAL(?:_[A-Z]+)?)\b[^=\n]*= ", re.MULTILINE)
_CHANGE = re.compile(r"\bstate (?:not )?in LEGAL\[self\.state\]|\(self\._?state, state\) (?:not )?in LEGAL")
"""The one place that sets a state asks the table."""
HEAD = """\
# States

Made from the tables in the code by `python -m tests.support.rungs.state_tables`.
"""
REFUSED = "The code refuses every other change."
"""Of a table by which a state is changed."""


def tables() -> list[tuple[str, str, Mapping[Enum, list[Enum]]]]:
    """(path, name of the enumeration, what may follow each state), by path."""
    found = []
    for path, text in sorted(text_files(ROOT)):
        if path.endswith(".py") and path.split("/")[0] in ROOMS:
            module = (
                importlib.import_module(path.removesuffix(".py").replace("/", "."))
                if _TABLE.search(text)
                else None
            )
            for name in _TABLE.findall(text):
                followers = _followers(getattr(module, name))
                found.append((path, type(next(iter(followers))).__name__, followers))
    return found


def _followers(table: Any) -> dict[Enum, list[Enum]]:
    """`table` maps a state to states, or is a set of (state, state)."""
    if isinstance(table, Mapping):
        pairs = {(state, to) for state, following in table.items() for to in following}
        states = type(next(iter(table)))
    else:
        pairs = set(table)
        states = type(next(iter(pairs))[0])
    return {state: [to for to in states if (state, to) in pairs] for state in states}


def said(state: Enum) -> str:
    """A state in words: its value where that is a text, else its name."""
    return state.value if isinstance(state.value, str) else state.name.lower().replace("_", " ")


def guard(path: str, texts: Mapping[str, str]) -> str:
    """What keeps the table of a file, in a sentence. Raises LookupError for a table that nothing keeps."""
    module = path.removesuffix(".py").replace("/", ".")
    users = [
        other
        for other, text in texts.items()
        if other == path or re.search(rf"from {re.escape(module)} import [^)\n]*\bLEGAL\b", text)
    ]
    if any(_CHANGE.search(texts[each]) for each in users if each.split("/")[0] in ROOMS):
        return REFUSED
    tests = [each for each in users if each.startswith("tests/unit/")]
    if not tests:
        raise LookupError(f"nothing keeps LEGAL of {path}")
    return f"The code computes the state. A test shows that no other change happens: `{tests[0]}`."


def reference() -> str:
    page = [HEAD]
    texts = {path: text for path, text in text_files(ROOT) if path.endswith(".py")}
    for path, name, followers in tables():
        rows = [
            f"| {said(state)} | {', '.join(map(said, to)) or '(the end)'} |"
            for state, to in followers.items()
        ]
        page.append(
            "\n".join(
                [
                    f"## `{name}`, {path}\n\n{guard(path, texts)}\n",
                    "| state | may be followed by |",
                    "| --- | --- |",
                    *rows,
                    "",
                ]
            )
        )
    return "\n".join(page)


if __name__ == "__main__":
    print(reference(), end="")
