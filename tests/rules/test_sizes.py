"""Files that can be read at one sitting."""

from __future__ import annotations

from pathlib import Path

from tests.support.rungs.tree import text_files

LINES_MAX = 500
ONE_IDEA_LINES_MAX = 800
ONE_IDEA = "\n# One idea in one file: "
"""Begins the line by which a longer file says why to split it would cut a class or an API module apart."""


def test_no_program_file_is_longer_than_one_sitting(repository: Path) -> None:
    long = {
        name: text.count("\n")
        for name, text in text_files(repository)
        if (name.endswith((".py", ".sh")) or name.startswith(".ci/") or name == "Makefile")
        and text.count("\n") > (ONE_IDEA_LINES_MAX if ONE_IDEA in text else LINES_MAX)
    }
    assert not long


def test_no_large_file_is_in_the_repository(repository: Path) -> None:
    from tests.support.rungs.tree import tracked_files

    large = [str(path) for path in tracked_files(repository) if path.stat().st_size > 1 << 20]
    assert not large
