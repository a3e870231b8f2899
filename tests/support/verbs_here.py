"""Verbs of g35 in the test's own process: to start another takes a second, and ten in the lab's guest."""

from __future__ import annotations

from agent.cli.main import main


def status_of(*words: str) -> int:
    """Run a verb to its end; its exit status."""
    try:
        return main(words)
    except SystemExit as leaving:
        return int(leaving.code or 0)
