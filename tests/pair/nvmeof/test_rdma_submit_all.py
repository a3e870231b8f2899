"""Commands that leave together by an RDMA queue: where not all can, and where the pair breaks amid them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest

from nvmeof import errors
from nvmeof.host import commands
from nvmeof.host.command import Command
from nvmeof.rdma.work import Access, Done, Receive, Region, Work
from nvmeof.transport.rdma_connect import RdmaLink
from nvmeof.transport.rdma_queue import Linked, RdmaHostQueue
from tests.support.nvme.nvme_ends import LBA
from tests.support.nvme.rdma_ends import RdmaBench, RdmaPair

DEPTH = 4


class PairLink:
    """A link whose queue pair lies in memory. `breaks_at`: the post, from 1 on, that the device refuses."""

    def __init__(self, pair: RdmaPair) -> None:
        self.pair = pair
        self.posts = 0
        self.breaks_at = 0
        self.ended = False

    def post(self, receives: Iterable[Receive], work: Iterable[Work]) -> None:
        self.posts += 1
        if self.posts == self.breaks_at:
            raise errors.ConnectionLost("the queue pair is in error")
        self.pair.near.post(receives, work)

    def take(self) -> Sequence[Done]:
        return self.pair.near.take_done()

    def break_off(self) -> None:
        self.pair.wire.cut()

    def close(self) -> None:
        self.ended = True


class Rig:
    def __init__(self, *, windows: bool) -> None:
        self.bench = RdmaBench(windows=windows)
        self.pair = self.bench.io(DEPTH)
        self.link = PairLink(self.pair)
        facts = SimpleNamespace(max_transfer=1 << 20)
        self.queue = RdmaHostQueue(cast("Any", SimpleNamespace(facts=facts)), 1, DEPTH)
        self.queue._linked = Linked(cast(RdmaLink, self.link), self.pair.queue, self.pair.buffers)

    def writes(self, count: int) -> list[Command]:
        return [commands.write(1, number, 1, [bytes([number + 1]) * LBA]) for number in range(count)]

    def is_written(self, number: int) -> bool:
        return self.bench.storage[1].memory[number * LBA] == number + 1


@pytest.fixture(params=[True, False], ids=["windows", "plain keys"])
def rig(request: pytest.FixtureRequest) -> Rig:
    return Rig(windows=request.param)


def test_those_that_have_an_id_are_carried_out_though_nobody_waits(rig: Rig) -> None:
    sent = rig.writes(DEPTH + 2)
    with pytest.raises(errors.QueueFull):
        rig.queue.submit_all(sent)
    assert [command.cid >= 0 for command in sent] == [True] * DEPTH + [False] * 2
    assert not rig.pair.queue.to_post
    rig.pair.settle()
    assert [rig.is_written(number) for number in range(DEPTH + 2)] == [True] * DEPTH + [False] * 2
    rig.queue.submit_all(sent[DEPTH:])
    rig.pair.settle()
    assert all(command.status == 0 for command in sent)


def test_a_pair_that_breaks_with_their_post_loses_all_that_have_an_id(rig: Rig) -> None:
    """None is left that somebody would wait for, or whose memory the controller still reads."""
    rig.link.breaks_at = 1
    sent = rig.writes(3)
    rig.queue.submit_all(sent)
    assert not rig.queue.alive
    assert all(command.done and command.lost for command in sent)
    assert rig.link.ended
    assert not rig.pair.buffers.lent_bytes
    with pytest.raises(errors.ConnectionLost):
        rig.queue.submit_all(rig.writes(1))


def test_one_given_up_whose_memory_is_the_owners_takes_the_others_with_it(rig: Rig) -> None:
    """A value is sealed into registered memory, and its directory is not."""
    slot = memoryview(bytearray(8 * LBA))
    rig.queue.register(slot)
    rig.pair.far.hold = True  # the controller is busy
    sent = [commands.write(1, 16, 8, [slot]), *rig.writes(2)]
    rig.queue.submit_all(sent)
    rig.queue.abandon(sent[1])
    assert rig.queue._linked is not None, "its data are in a loan"
    rig.queue.abandon(sent[0])
    assert rig.queue.needs_reconnect
    assert sent[2].lost
    assert sent[0].orphaned
    assert sent[1].orphaned
    assert not rig.pair.buffers.lent_bytes


def test_a_device_that_registers_no_more_memory_keeps_no_place_of_the_queue(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuses(view: memoryview, access: Access) -> Region:
        raise errors.ConnectionLost("cannot register")

    with monkeypatch.context() as patched:
        patched.setattr(rig.pair.near, "register", refuses)
        for _ in range(DEPTH + 1):
            (short,) = rig.writes(1)
            long = commands.write(1, 32, 64, [bytes(64 * LBA)])
            lent = rig.pair.buffers.lent_bytes
            with pytest.raises(errors.ConnectionLost):
                rig.queue.submit_all([short, long])
            assert (short.cid >= 0, long.cid) == (True, -1)
            assert rig.pair.buffers.lent_bytes == lent
            assert not rig.pair.queue.to_post, "the first has left, though nobody waits for it"
            rig.pair.settle()
            assert short.status == 0
    sent = rig.writes(DEPTH)
    rig.queue.submit_all(sent)
    rig.pair.settle()
    assert all(command.status == 0 for command in sent)
