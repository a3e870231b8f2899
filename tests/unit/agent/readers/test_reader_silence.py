"""A reader that says nothing is late, and hangs where no thread of it runs or wants to, or after long."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from agent.service.reader_silence import (
    ASLEEP_SECONDS,
    LATE_SECONDS,
    SILENT_SECONDS,
    TURN_SECONDS,
    Activity,
    Silence,
    activity_of,
)

PID = 17
TURN = 0.1


class Machine:
    """A process as /proc shows it, and a thread that listens to it every TURN."""

    def __init__(self, proc: Path) -> None:
        self.proc, self.now = proc, 100.0
        self.states, self.ticks = ["S", "S"], [7, 3]
        self.silence = Silence(PID, self.now, proc)
        self.show()

    def show(self) -> None:
        for number, (state, ticks) in enumerate(zip(self.states, self.ticks, strict=True)):
            folder = self.proc / f"{PID}/task/{PID + number}"
            folder.mkdir(parents=True, exist_ok=True)
            words = ["0"] * 10 + [str(ticks), "2"] + ["0"] * 37
            (folder / "stat").write_text(f"{PID + number} (a (thread) {number}) {state} {' '.join(words)}\n")

    def pass_time(self, seconds: float) -> None:
        for _ in range(round(seconds / TURN)):
            self.now += TURN
            self.silence.look(self.now)

    def seconds_until_it_hangs(self) -> float:
        began = self.now
        while not self.silence.hangs:
            self.pass_time(TURN)
        return self.now - began


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_one_that_tells_is_neither_late_nor_hangs(machine: Machine) -> None:
    for _ in range(100):
        machine.pass_time(LATE_SECONDS / 2)
        machine.silence.end(machine.now)
        assert not machine.silence.is_late
        assert not machine.silence.hangs


@pytest.mark.parametrize("state", ["S", "T"])
def test_one_of_which_no_thread_runs_hangs_after_four_seconds(machine: Machine, state: str) -> None:
    machine.states = [state, state]
    machine.show()
    machine.pass_time(LATE_SECONDS + TURN)
    assert machine.silence.is_late
    assert not machine.silence.hangs
    took = LATE_SECONDS + TURN + machine.seconds_until_it_hangs()
    assert LATE_SECONDS + ASLEEP_SECONDS <= took <= LATE_SECONDS + ASLEEP_SECONDS + 3 * TURN


@pytest.mark.parametrize("state", ["R", "D", "t", "Z"])
def test_one_that_waits_for_a_processor_or_a_disk_has_longer(machine: Machine, state: str) -> None:
    machine.states[1] = state
    machine.show()
    assert machine.seconds_until_it_hangs() == pytest.approx(SILENT_SECONDS, abs=2 * TURN)


def test_one_whose_threads_use_time_has_longer(machine: Machine) -> None:
    while not machine.silence.hangs:
        machine.ticks[0] += 1
        machine.show()
        machine.pass_time(ASLEEP_SECONDS / 2)
    assert machine.silence.seconds >= SILENT_SECONDS


def test_one_that_ran_a_moment_ago_is_asleep_from_then_on(machine: Machine) -> None:
    machine.pass_time(3)
    machine.ticks[0] += 1
    machine.show()
    assert machine.seconds_until_it_hangs() == pytest.approx(ASLEEP_SECONDS, abs=2 * TURN)


def test_one_of_which_nothing_can_be_told_has_longer(machine: Machine) -> None:
    (machine.proc / f"{PID}/task/{PID}/stat").write_text("nonsense")
    assert machine.seconds_until_it_hangs() == pytest.approx(SILENT_SECONDS, abs=2 * TURN)
    assert activity_of(PID + 1, machine.proc) is None
    for number in range(2):
        (machine.proc / f"{PID}/task/{PID + number}/stat").write_text(f"1 (a) S {'0 ' * 49}\n")
    assert activity_of(PID, machine.proc) is None, "no time of a processor is counted here"


def test_one_that_starts_is_not_looked_at(machine: Machine) -> None:
    for _ in range(30):
        machine.now += TURN
        machine.silence.look(machine.now, is_starting=True)
    assert machine.silence.is_late
    machine.pass_time(ASLEEP_SECONDS - TURN)
    assert not machine.silence.hangs


def test_a_listener_that_was_stopped_itself_blames_nobody(machine: Machine) -> None:
    machine.now += 3600
    machine.silence.look(machine.now)
    assert machine.silence.seconds == TURN_SECONDS
    assert not machine.silence.is_late
    machine.now -= 1
    machine.silence.look(machine.now)
    assert machine.silence.seconds == TURN_SECONDS


def test_activity_of_a_process_is_that_of_all_its_threads(machine: Machine) -> None:
    assert activity_of(PID, machine.proc) == Activity(True, 7 + 2 + 3 + 2)
    machine.states[1] = "R"
    machine.show()
    assert activity_of(PID, machine.proc) == Activity(False, 14)
    own = activity_of(os.getpid())
    assert own is not None
    assert not own.is_asleep
