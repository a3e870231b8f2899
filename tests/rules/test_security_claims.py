"""What docs/security.md names as proof of a claim is there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

_NAME = re.compile(r"`(test_\w+)`")
_PLACE = re.compile(r"`(tests/[\w/.-]+)`")
_ROW = re.compile(r"^\|(.+)\|$", re.MULTILINE)


@pytest.fixture(scope="module")
def page(repository: Path) -> str:
    return (repository / "docs/security.md").read_text()


def _tables(page: str) -> list[list[list[str]]]:
    """Tables whose last column is `shown by`, as rows of cells; the heading first."""
    tables: list[list[list[str]]] = []
    for block in re.split(r"\n(?!\|)", page):
        rows = [[cell.strip() for cell in row.split("|")] for row in _ROW.findall(block)]
        if rows and rows[0][-1] == "shown by":
            tables.append(rows)
    return tables


def test_tables_are_found() -> None:
    page = "text\n| a | shown by |\n| --- | --- |\n| x | `test_y` |\n\n| b | c |\n| --- | --- |\n| 1 | 2 |\n"
    assert _tables(page) == [[["a", "shown by"], ["---", "---"], ["x", "`test_y`"]]]


def test_every_test_that_is_named_exists(repository: Path, page: str) -> None:
    named = set(_NAME.findall(page))
    assert len(named) > 40
    tests = "\n".join(path.read_text() for path in sorted((repository / "tests").rglob("*.py")))
    defined = set(re.findall(r"^\s*(?:async )?def (test_\w+)", tests, re.MULTILINE))
    assert not named - defined


def test_every_place_that_is_named_exists(repository: Path, page: str) -> None:
    assert not [place for place in _PLACE.findall(page) if not (repository / place).exists()]


def test_every_claim_names_what_shows_it(page: str) -> None:
    tables = _tables(page)
    assert len(tables) >= 4
    for rows in tables:
        for row in rows[2:]:
            assert len(row) == len(rows[0]), row
            assert _NAME.search(row[-1]) or _PLACE.search(row[-1]), f"nothing shows: {row[0]}"
