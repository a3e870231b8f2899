"""A wait in slices tries other paths as one whole wait does: neither sooner, nor not at all."""

from __future__ import annotations

import pytest

from agent.pool.late_answers import wait_for
from agent.pool.steps import Pending, Steps, Wait
from agent.pool.volume.side_by_side import Part, Parts
from agent.remote.path_choice import SHARE_MOST_SECONDS
from tests.support.sim.two_paths import BLOCK, TwoPaths

WHOLE = 5.0


def slices(pending: Pending, clock_now: float, seconds: float, count: int) -> Steps[bool]:
    came = False
    for number in range(count):
        came = yield Wait(pending, clock_now + (number + 1) * seconds, None, clock_now + WHOLE)
        if came:
            break
    return came


def test_a_silent_path_is_left_after_its_share_of_the_whole(
    monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    rig = TwoPaths(monkeypatch, seed)
    rig.flash.blocks[3] = b"\x35" * BLOCK
    rig.paths[0].answers = False
    began, into = rig.clock.now, memoryview(bytearray(BLOCK))
    pending = rig.channel.read(0, 3 * BLOCK, into)
    before = int(SHARE_MOST_SECONDS / 0.01) - 2
    assert not rig.channel.run(slices(pending, began, 0.01, before)), "not before"
    assert rig.channel.run(slices(pending, rig.clock.now, 0.01, 5))
    assert into == rig.flash.blocks[3]
    assert rig.clock.now < began + SHARE_MOST_SECONDS + 0.05


def test_a_path_that_died_is_left_by_a_look_that_waits_for_nothing(
    monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    rig = TwoPaths(monkeypatch, seed)
    rig.flash.blocks[3] = b"\x35" * BLOCK
    into = memoryview(bytearray(BLOCK))
    pending = rig.channel.read(0, 3 * BLOCK, into)
    rig.paths[0].lose()
    assert rig.channel.run(slices(pending, rig.clock.now, 0.0, 3))
    assert pending.fault is None
    assert into == rig.flash.blocks[3]


def test_parts_go_on_by_another_path(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    rig = TwoPaths(monkeypatch, seed)
    rig.paths[0].answers = False
    channel, began = rig.channel, rig.clock.now
    causes: list[object] = []

    def part(number: int) -> Part:
        pending = channel.read(0, number * BLOCK, memoryview(bytearray(BLOCK)))
        causes.append((yield from wait_for(channel, pending, began + WHOLE)))

    def whole() -> Steps[None]:
        parts = Parts(channel)
        for number in range(4):
            parts.start(0, part(number))
        while len(parts):
            yield from parts.go_on(may_grow=False)

    channel.run(whole())
    assert causes == [None] * 4
    assert rig.clock.now < began + 2 * SHARE_MOST_SECONDS
