"""A worker that waits tells the others of its door, also where nobody rests when it begins to wait."""

from __future__ import annotations

import threading

import pytest

from agent.host_os.workers_on_duty import Roster
from agent.pool.late_answers import wait_for
from agent.pool.steps import Acquire, Steps
from tests.support.sim.two_paths import BLOCK, TwoPaths


def at_a_request(monkeypatch: pytest.MonkeyPatch, seed: int) -> tuple[TwoPaths, Roster]:
    """A channel whose worker is at a small request, while another reads and none rests."""
    rig, roster = TwoPaths(monkeypatch, seed), Roster(2)
    first, second = roster.workers
    assert first.ready()
    first.began(is_long=False)
    roster.reading, second.is_reading = 1, True
    rig.channel.duty = first
    return rig, roster


def test_nobody_rests_for_a_get_of_a_drive_that_does_not_answer(
    monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    rig, roster = at_a_request(monkeypatch, seed)
    for path in rig.paths:
        path.answers = False
    pending = rig.channel.read(0, 3 * BLOCK, memoryview(bytearray(BLOCK)))
    assert rig.channel.run(wait_for(rig.channel, pending, rig.clock.now + 0.05)) is not None
    assert roster.small == 0


def test_nobody_rests_for_a_request_that_waits_for_a_lock(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    rig, roster = at_a_request(monkeypatch, seed)
    held = threading.Lock()

    def acquire() -> Steps[bool]:
        return (yield Acquire(held, rig.clock.now))

    assert rig.channel.run(acquire())
    assert roster.small == 1, "it was free"
    assert not rig.channel.run(acquire())
    assert roster.small == 0
