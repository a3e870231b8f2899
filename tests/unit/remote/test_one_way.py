"""Reads and writes by the only path to a namespace, for which a channel takes a short way."""

from __future__ import annotations

import pytest

from agent.pool.late_answers import wait_for
from agent.remote import channel as channel_module
from agent.remote.pending_request import PendingRequest
from nvmeof.errors import QueueFull
from nvmeof.wire.status import Status
from tests.support.sim.two_paths import BLOCK, NGUID, PathQueue, TwoPaths

A, B = b"\x35" * BLOCK, b"\x53" * BLOCK


def one_path(monkeypatch: pytest.MonkeyPatch, seed: int) -> TwoPaths:
    """Whose channel can only send by its short way."""
    rig = TwoPaths(monkeypatch, seed, 1)

    def not_here(*_: object, **__: object) -> bool:
        raise AssertionError("by the long way")

    monkeypatch.setattr(channel_module.WorkerChannel, "_send_by", not_here)
    rig.channel.connect_ahead()
    return rig


def put(rig: TwoPaths, block: int, *contents: bytes) -> PendingRequest:
    pending = rig.channel.write(0, block * BLOCK, contents)
    rig.channel.run(wait_for(rig.channel, pending, rig.clock.now + 1.0))
    return pending


@pytest.mark.interpreted
def test_what_was_written_is_read(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    rig = one_path(monkeypatch, seed)
    assert put(rig, 3, A, B).fault is None
    assert rig.flash.blocks == {3: A, 4: B}
    into = memoryview(bytearray(BLOCK))
    pending = rig.channel.read(0, 4 * BLOCK, into)
    assert rig.channel.run(wait_for(rig.channel, pending, rig.clock.now + 1.0)) is None
    assert into == B
    tally = rig.channel.tallies[""]
    assert (tally.flash_bytes_written, tally.flash_bytes_read) == (2 * BLOCK, BLOCK)
    assert rig.channel.unflushed(0) is not None, "no flush has followed"


@pytest.mark.interpreted
def test_a_write_that_nobody_waits_for_any_more_keeps_others_from_its_place(
    monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    rig = one_path(monkeypatch, seed)
    rig.paths[0].answers = False
    assert put(rig, 3, A).fault == "no answer in time"
    rig.paths[0].answers = True
    assert put(rig, 4, B).fault is None, "another place"
    assert put(rig, 3, B).fault == channel_module.FENCED


@pytest.mark.interpreted
def test_a_write_whose_path_dies_keeps_others_from_its_place(
    monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    rig = TwoPaths(monkeypatch, seed, 1)
    rig.channel.connect_ahead()
    pending = rig.channel.write(0, 3 * BLOCK, [A])
    rig.paths[0].lose()
    rig.channel.run(wait_for(rig.channel, pending, rig.clock.now + 1.0))
    assert pending.unreachable
    assert put(rig, 3, B).fault == channel_module.FENCED


@pytest.mark.interpreted
def test_nothing_is_written_to_a_namespace_of_another_pool(
    monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    rig = TwoPaths(monkeypatch, seed, 1)
    rig.channel.connect_ahead()
    rig.fabric.taken = {NGUID: "another"}
    assert "another" in (put(rig, 3, A).fault or "")
    assert not rig.flash.blocks


@pytest.mark.interpreted
def test_a_write_that_did_not_go_out_fences_nothing(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    rig = one_path(monkeypatch, seed)

    def full(*_: object, **__: object) -> None:
        raise QueueFull("all of its commands are under way")

    with monkeypatch.context() as patched:
        patched.setattr(PathQueue, "submit", full)
        assert "under way" in (put(rig, 3, A).fault or "")
    assert put(rig, 3, B).fault is None
    assert rig.flash.blocks == {3: B}


@pytest.mark.interpreted
def test_a_write_that_its_path_refuses_goes_by_one_that_has_come_meanwhile(
    monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    rig = TwoPaths(monkeypatch, seed)
    other, rig.enclosures[1].session = rig.enclosures[1].session, None
    rig.fabric.refresh()
    rig.channel.connect_ahead()
    rig.paths[0].refusal = Status.ANA_INACCESSIBLE
    pending = rig.channel.write(0, 3 * BLOCK, [A])
    rig.enclosures[1].session = other
    rig.fabric.refresh()
    assert rig.channel.run(wait_for(rig.channel, pending, rig.clock.now + 1.0)) is None
    assert rig.flash.blocks == {3: A}
    assert rig.paths[1].queues


@pytest.mark.interpreted
def test_commands_that_were_given_up_have_their_places_in_the_queue(
    monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """A batch that counted on them would have writes refused, one of them for each late answer of before."""
    rig = one_path(monkeypatch, seed)
    (queue,) = rig.paths[0].queues
    # Many may hang at one drive of an enclosure, and its others go on.
    for depth, abandoned, takes in ((64, 0, 64), (64, 3, 61), (64, 60, 32), (1, 1, 1)):
        queue.depth, queue.abandoned = depth, abandoned
        assert rig.channel.queue_depth() == takes
