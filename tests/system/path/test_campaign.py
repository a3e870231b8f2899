"""`make campaign` itself, as short as it says something: it ends well, and so does one that is cut off."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import pytest

from tests.support.leaks import mounts_below
from tests.support.needs import needs_mount
from tests.support.processes import Processes, mark_this_run, strays

HEAD = ["fault", "injected", "wrong", "lost", "hung"]
CAMPAIGN = (sys.executable, "-m", "tests.support.campaign")
DAMAGING = (
    "relay: flip", "relay: drop", "relay: truncate", "relay: duplicate", "relay: reorder", "relay: mixed",
    "drive with errors", "flips at rest", "flips of values on reads", "misplaced writes",
    "writer by path killed",
)  # fmt: skip
"""Faults with tests of their own, which `make campaign` has all of: so few seconds are for what is left."""


@needs_mount
@pytest.mark.timeout(300)
@pytest.mark.parametrize("seconds", [20, pytest.param(60, marks=pytest.mark.nightly)])
def test_a_minute_of_it_or_less(processes: Processes, repository: Path, seconds: int) -> None:
    without = [word for kind in DAMAGING for word in ("--without", kind)]
    run = processes.start([*CAMPAIGN, "--seconds", str(seconds), *without], folder=repository)
    assert run.process.wait(270) == 0, run.output
    said = run.output.splitlines()
    (head,) = (at for at, line in enumerate(said) if line.split() == HEAD)
    (sums,) = (at for at, line in enumerate(said) if line.startswith("all "))
    assert sums - head > 3, "kinds of faults; on a slow machine each takes long"
    assert said[sums].split()[2:] == ["0", "0", "0"]
    assert "campaign: good" in run.output


@needs_mount
@pytest.mark.nightly  # `make run` and `g35 up` are interrupted each time
@pytest.mark.timeout(120)
def test_an_interrupted_one_leaves_nothing(processes: Processes, repository: Path, tmp_path: Path) -> None:
    before = strays(mark_this_run()).keys()
    temporary = {"TMPDIR": str(tmp_path)}
    run = processes.start([*CAMPAIGN, "--seconds", "600"], folder=repository, environment=temporary)
    run.wait_for_line("campaign: 1", 60)
    run.stop(60, signal.SIGINT)
    assert run.process.returncode == 130
    assert strays(mark_this_run()).keys() <= before
    assert not mounts_below(tmp_path)
    assert not list(tmp_path.glob("g35-campaign-*"))


def test_wrong_seconds_are_2(processes: Processes, repository: Path) -> None:
    run = processes.start([*CAMPAIGN, "--seconds", "0"], folder=repository)
    assert run.process.wait(60) == 2
    assert "from 1 second to a week" in run.output
