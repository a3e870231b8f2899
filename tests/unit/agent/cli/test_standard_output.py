"""Standard output that nobody reads, that is full, or that is closed: one answer of all verbs."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

_G35 = (sys.executable, "-P", "-m", "agent.cli")


@pytest.mark.parametrize(
    "words",
    [
        ["claims"],
        ["claims", "--json"],
        ["sim", "--pod", "one", "--requests", "4", "--rows", "recompute"],
        ["sim", "--pod", "one", "--requests", "4", "--rows", "recompute", "--json"],
        ["config", "reference"],
        ["trace", "generate", "--requests", "10000000"],
    ],
)
def test_a_verb_ends_alike_whether_or_not_its_output_is_read(words: list[str]) -> None:
    """`g35 claims --json | head -1` was a failure, and `g35 claims | head -1` none. What makes lines without
    an end ends."""
    reads, writes = os.pipe()
    os.close(reads)
    try:
        done = subprocess.run([*_G35, *words], stdout=writes, stderr=subprocess.PIPE, text=True, timeout=60)
    finally:
        os.close(writes)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("words", [["config", "unit"], ["claims", "--json"]])
def test_an_output_that_is_full_is_an_error(words: list[str]) -> None:
    """Where it is seen only as the verb ends, too."""
    with open("/dev/full", "w") as full:
        done = subprocess.run([*_G35, *words], stdout=full, stderr=subprocess.PIPE, text=True, timeout=60)
    assert done.returncode == 1
    assert done.stderr.splitlines() == [
        "error: No space left on device", "hint: make room there, or name another place",
    ]  # fmt: skip


def test_a_closed_output_is_an_error() -> None:
    """The next file that is opened would have its number."""
    command = ["/bin/sh", "-c", '"$@" >&-', "sh", *_G35, "config", "unit"]
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True, timeout=60)
    assert done.returncode == 1
    assert "error: standard output is closed" in done.stderr
