"""Reads and writes of a call that leave together, and answers that are counted without a wait."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from agent.pool.late_answers import wait_for
from agent.pool.steps import Pending, Steps, Wait
from agent.remote import channel as channel_module
from agent.remote.channel import WorkerChannel
from agent.remote.long_waits import PATIENCE_LEAST, LongWaits
from agent.remote.pending_request import PendingRequest
from nvmeof.errors import QueueFull
from nvmeof.host.command import Command
from nvmeof.host.namespaces import NamespaceInfo
from nvmeof.wire.status import Status
from tests.support.sim.two_paths import BLOCK, NGUID, PathQueue, TwoPaths

OTHER = bytes(reversed(NGUID))


class TwoNamespaces(TwoPaths):
    """Both on one flash, whose blocks they share."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, seed: int, count: int = 1) -> None:
        super().__init__(monkeypatch, seed, count)
        self.fabric.adopt([NGUID, OTHER])
        self.sends: list[int] = []
        """Commands in each send."""
        submit_all, sends = PathQueue.submit_all, self.sends

        def counted(queue: PathQueue, commands: Sequence[Command], *, more: bool = False) -> None:
            sends.append(len(commands))
            submit_all(queue, commands, more=more)

        monkeypatch.setattr(PathQueue, "submit_all", counted)
        self.channel.connect_ahead()

    @staticmethod
    def _seen() -> tuple[NamespaceInfo, ...]:
        return tuple(
            NamespaceInfo(nsid, nguid, 1 << 20, BLOCK, ana_group=1)
            for nsid, nguid in enumerate((NGUID, OTHER), 1)
        )

    def wait_for(self, pending: Pending) -> object:
        """Why it is a miss; None where it is none."""
        return self.channel.run(wait_for(self.channel, pending, self.clock.now + 1.0))

    def write(self, *places: tuple[int, int]) -> list[PendingRequest]:
        """Blocks, by namespace and number, which hold their number."""
        return self.channel.write_many(
            [(namespace, block * BLOCK, [bytes([block]) * BLOCK]) for namespace, block in places]
        )

    def answer(self, pending: Pending) -> None:
        """Everything that is under way is answered, and nobody has waited for it."""
        assert isinstance(pending, PendingRequest)
        assert pending.queue is not None
        assert pending.queue.wait(pending.commands[0], self.clock.now + 1.0)


@pytest.fixture
def rig(monkeypatch: pytest.MonkeyPatch, seed: int) -> TwoNamespaces:
    return TwoNamespaces(monkeypatch, seed)


@pytest.mark.interpreted
@pytest.mark.parametrize("paths", [1, 2])
def test_what_was_written_together_is_read_together(
    monkeypatch: pytest.MonkeyPatch, seed: int, paths: int
) -> None:
    rig = TwoNamespaces(monkeypatch, seed, paths)
    places = [(0, 7), (1, 3), (0, 5), (1, 9), (0, 6)]
    writes = rig.write(*places)
    assert [rig.wait_for(pending) for pending in writes] == [None] * 5
    views = [memoryview(bytearray(BLOCK)) for _ in places]
    reads = rig.channel.read_many(
        [(namespace, block * BLOCK, view) for (namespace, block), view in zip(places, views, strict=True)]
    )
    assert [rig.wait_for(pending) for pending in reads] == [None] * 5
    assert [view[0] for view in views] == [7, 3, 5, 9, 6], "in the order in which they were asked for"
    tally = rig.channel.tallies[""]
    assert (tally.flash_bytes_written, tally.flash_bytes_read) == (5 * BLOCK, 5 * BLOCK)
    # With a path more, each may have to go by another one, and leaves by itself.
    assert rig.sends == ([3, 2, 3, 2] if paths == 1 else [1] * 10)


@pytest.mark.interpreted
def test_a_write_longer_than_a_command_and_none_at_all(rig: TwoNamespaces) -> None:
    most = PathQueue.max_transfer
    (long,) = rig.channel.write_many([(0, 0, [bytes([1]) * (most + BLOCK)])])
    assert rig.wait_for(long) is None
    assert len(long.commands) == 2
    assert len(rig.fabric.unflushed._states[NGUID].open) == 1, "it is one write"
    assert rig.channel.write_many([]) == []
    assert rig.channel.read_many([]) == []


@pytest.mark.interpreted
def test_a_queue_without_room_takes_some_and_the_others_were_not_sent(
    rig: TwoNamespaces, monkeypatch: pytest.MonkeyPatch
) -> None:
    submit = PathQueue.submit

    def two_at_most(queue: PathQueue, command: Command, *, more: bool = False) -> None:
        if len(queue.in_flight) >= 2:
            raise QueueFull("2 commands are in flight")
        submit(queue, command, more=more)

    with monkeypatch.context() as patched:
        patched.setattr(PathQueue, "submit", two_at_most)
        writes = rig.write((0, 1), (0, 2), (0, 3), (0, 4))
    assert [pending.fault for pending in writes] == [None, None, *["2 commands are in flight"] * 2]
    assert [rig.wait_for(pending) is None for pending in writes] == [True, True, False, False]
    assert sorted(rig.flash.blocks) == [1, 2]
    assert rig.channel.tallies[""].flash_bytes_written == 2 * BLOCK
    assert [rig.wait_for(pending) for pending in rig.write((0, 3), (0, 4))] == [None, None], "no fence"


@pytest.mark.interpreted
def test_a_request_whose_commands_do_not_all_fit_is_not_begun(
    rig: TwoNamespaces, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To begin it and give it up would break a queue pair of RDMA, and lose what is under way there."""
    size, abandoned = 2 * PathQueue.max_transfer, list[Command]()
    monkeypatch.setattr(PathQueue, "abandon", lambda _, command: abandoned.append(command))
    first, second = memoryview(bytearray(size)), memoryview(bytearray(size))
    with monkeypatch.context() as patched:
        patched.setattr(PathQueue, "depth", 3)
        fits, does_not = rig.channel.read_many([(0, 0, first), (0, 0, second)])
    assert (fits.fault, does_not.fault) == (None, "the queue has no room for 2 commands")
    assert (len(fits.commands), does_not.commands, abandoned) == (2, (), [])
    assert does_not.unreachable
    assert rig.wait_for(fits) is None


@pytest.mark.interpreted
def test_only_what_is_fenced_is_refused(rig: TwoNamespaces) -> None:
    rig.paths[0].answers = False
    (late,) = rig.write((0, 2))
    rig.wait_for(late)
    rig.paths[0].answers = True
    first, fenced, last = rig.write((0, 1), (0, 2), (0, 3))
    assert fenced.fault == channel_module.FENCED
    assert (rig.wait_for(first), rig.wait_for(last)) == (None, None)


@pytest.mark.interpreted
def test_a_path_that_dies_fences_all_that_left_together(rig: TwoNamespaces) -> None:
    writes = rig.write((0, 1), (0, 2), (1, 3))
    rig.paths[0].lose()
    for pending in writes:
        assert rig.channel.arrived([pending], 0) == 0, "it is no good answer"
        rig.wait_for(pending)
        assert pending.unreachable
    assert [pending.fault for pending in rig.write((0, 1), (0, 2), (1, 3))] == [channel_module.FENCED] * 3


@pytest.mark.interpreted
def test_a_write_of_many_that_its_path_refuses_goes_by_one_that_has_come_meanwhile(
    monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    rig = TwoNamespaces(monkeypatch, seed, 2)
    other, rig.enclosures[1].session = rig.enclosures[1].session, None
    rig.fabric.refresh()
    rig.channel.connect_ahead()
    rig.paths[0].refusal = Status.ANA_INACCESSIBLE
    writes = rig.write((0, 1), (0, 2))
    assert rig.sends == [2]
    rig.enclosures[1].session = other
    rig.fabric.refresh()
    rig.answer(writes[0])
    assert rig.channel.arrived(writes, 0) == 0, "another path has them"
    assert [rig.wait_for(pending) for pending in writes] == [None, None]
    assert rig.flash.blocks == {1: bytes([1]) * BLOCK, 2: bytes([2]) * BLOCK}


# -- answers that nobody has waited for ------------------------------------------------------------------


@pytest.mark.interpreted
def test_answers_are_counted_up_to_the_first_that_is_not_there(rig: TwoNamespaces) -> None:
    health = rig.fabric.health
    writes = rig.write((0, 1), (0, 2))
    rig.answer(writes[0])
    later = rig.write((0, 3), (1, 4))
    assert rig.channel.arrived([*writes, *later], 0) == 2
    assert (health[0].answers, health[1].answers) == (2, 0)
    assert rig.channel.arrived([*writes, *later], 2) == 2, "nothing has come since"
    assert health[0].answers == 2
    rig.answer(later[0])
    assert rig.channel.arrived([*writes, *later], 2) == 4
    assert (health[0].answers, health[1].answers) == (3, 1)
    assert rig.channel.arrived([], 0) == 0


@pytest.mark.interpreted
def test_an_answer_that_was_counted_is_not_counted_again(rig: TwoNamespaces) -> None:
    (write,) = rig.write((0, 1))
    rig.answer(write)
    for _ in range(2):
        assert rig.channel.arrived([write], 0) == 1
        rig.channel.took(write)
    assert rig.wait_for(write) is None
    assert rig.fabric.health[0].answers == 1


@pytest.mark.interpreted
def test_an_error_is_left_to_who_looks_at_it(rig: TwoNamespaces) -> None:
    views = [memoryview(bytearray(BLOCK)) for _ in range(2)]
    good, bad = rig.channel.read_many([(0, 0, views[0]), (0, BLOCK, views[1])])
    bad.commands[0].end(Status.UNRECOVERED_READ_ERROR)
    assert rig.channel.arrived([bad, good], 0) == 0
    assert rig.fabric.health[0].answers == 0
    rig.channel.took(bad)
    assert (rig.fabric.health[0].answers, rig.fabric.health[0].errors) == (1, 1)


@pytest.mark.interpreted
def test_a_read_with_another_path_is_not_counted_so(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    rig = TwoNamespaces(monkeypatch, seed, 2)
    (read,) = rig.channel.read_many([(0, 0, memoryview(bytearray(BLOCK)))])
    rig.answer(read)
    assert read.done
    assert rig.channel.arrived([read], 0) == 0
    rig.channel.took(read)
    assert rig.fabric.health[0].answers == 1


@pytest.mark.interpreted
@pytest.mark.parametrize("by", ["took", "arrived"])
def test_an_answer_that_is_counted_ends_a_long_wait(rig: TwoNamespaces, by: str) -> None:
    """As one that was waited for does: the worker's place is free for another."""
    waits = LongWaits(2, PATIENCE_LEAST)
    rig.channel.share_waits(waits)

    def steps(channel: WorkerChannel) -> Steps[Any]:
        channel.gives_way()
        rig.paths[0].answers = False
        (write,) = rig.write((0, 1))
        assert not (yield Wait(write, rig.clock.now + 4 * PATIENCE_LEAST))
        assert not waits.has_room(), "it waited long, and has the only place"
        rig.paths[0].answers = True
        rig.answer(write)
        if by == "took":
            channel.took(write)
        else:
            assert channel.arrived([write], 0) == 1
        return waits.has_room()

    assert rig.channel.run(steps(rig.channel))
