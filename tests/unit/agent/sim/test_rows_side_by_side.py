"""Rows of an experiment in processes of their own: the same outcome, and none is left."""

from __future__ import annotations

import multiprocessing
import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from agent.errors import G35Error, UserError
from agent.sim.experiment import Experiment, play
from agent.sim.pod_plan import PodPlan
from agent.sim.rows_side_by_side import play_side_by_side

ROWS = ("g35", "recompute", "lustre-dpu")


@pytest.fixture(autouse=True)
def _two_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: {0, 1})


def test_the_same_as_one_after_the_other() -> None:
    experiment = Experiment(PodPlan(gpus=8), requests=40, rows=ROWS)
    heard: dict[str, int] = {}
    together, alone = play_side_by_side(experiment, heard.__setitem__), play(experiment)
    assert [row.name for row in together.rows] == list(ROWS)
    assert [row.digest for row in together.rows] == [row.digest for row in alone.rows]
    assert together.load == alone.load
    assert set(heard) <= set(ROWS)
    assert len(together.row_cpu_seconds) == len(ROWS)
    assert together.cpu_seconds == sum(together.row_cpu_seconds) > 0
    assert together.memory_bytes > 0
    assert not multiprocessing.active_children()


def test_what_is_wrong_with_a_trace_is_told_as_ever(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text('{"timestamp": 0, "input_length": 0, "output_length": 0, "hash_ids": []}\n')
    experiment = Experiment(PodPlan(gpus=8), requests=40, rows=ROWS, trace=trace)
    with pytest.raises(UserError) as alone:
        play(experiment)
    with pytest.raises(UserError, match="no request was played") as together:
        play_side_by_side(experiment, lambda _row, _count: None)
    assert (str(together.value), together.value.advice) == (str(alone.value), alone.value.advice)


def test_a_row_that_is_killed_is_told_and_the_others_end() -> None:
    """Linux does so where memory runs out. Nobody is to wait for a row that will not come."""

    def kill_one(_row: str, _count: int) -> None:
        os.kill(multiprocessing.active_children()[0].pid or 0, signal.SIGKILL)

    experiment = Experiment(PodPlan(gpus=8), requests=3000, rows=ROWS)
    with pytest.raises(G35Error, match="was ended from outside: SIGKILL") as told:
        play_side_by_side(experiment, kill_one)
    assert "memory" in told.value.advice
    assert not multiprocessing.active_children()


def test_what_a_row_raises_comes_with_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise ZeroDivisionError("of a row")

    monkeypatch.setattr("agent.sim.rows_side_by_side.play_row", broken)
    with pytest.raises(ZeroDivisionError, match="of a row") as told:
        play_side_by_side(Experiment(PodPlan(gpus=8), requests=40, rows=ROWS), lambda _row, _count: None)
    assert "in broken" in told.value.__notes__[0]


_PLAYS = """
import os
os.sched_getaffinity = lambda _pid: {0, 1}
from agent.sim.experiment import Experiment
from agent.sim.pod_plan import PodPlan
from agent.sim.rows_side_by_side import play_side_by_side
import multiprocessing
def tell(_row, _count):
    print(*(each.pid for each in multiprocessing.active_children()), flush=True)
play_side_by_side(Experiment(PodPlan(gpus=8), requests=100_000, rows=("g35", "g3")), tell)
"""


def test_rows_end_with_a_parent_that_is_killed() -> None:
    with subprocess.Popen([sys.executable, "-c", _PLAYS], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        rows = [os.pidfd_open(int(pid)) for pid in parent.stdout.readline().split()]
        parent.kill()
    assert len(rows) == 2
    for row in rows:
        # Readable once the process has ended.
        assert select.select([row], [], [], 30)[0]
        os.close(row)


def test_who_gives_up_leaves_no_process() -> None:
    def tired(_row: str, _count: int) -> None:
        raise KeyboardInterrupt

    experiment = Experiment(PodPlan(gpus=8), requests=3000, rows=ROWS)
    with pytest.raises(KeyboardInterrupt):
        play_side_by_side(experiment, tired)
    assert not multiprocessing.active_children()
