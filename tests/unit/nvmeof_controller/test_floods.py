"""A host that sends without end and reads nothing: what its queue holds stays bounded, and it is ended."""

from __future__ import annotations

import itertools
from collections import deque

import pytest

from nvmeof.controller.target import Target
from nvmeof.controller.tcp_queue import OUTPUT_LIMIT
from nvmeof.rdma.work import Access, Done, Receive, Work
from nvmeof.tcp.pdu import CapsuleCmd
from nvmeof.wire.cqe import Cqe, decode_cqe_untrusted
from nvmeof.wire.fabrics import PropertyAccess
from nvmeof.wire.properties import Property
from nvmeof.wire.sqe import AdminOpcode, IoOpcode, Sqe
from nvmeof.wire.status import Status
from tests.support.nvme.entries import encode_entry, fabrics_entry, keyed, transport
from tests.support.nvme.heap_storage import HeapStorage
from tests.support.nvme.pdus import encode_pdu
from tests.support.nvme.raw_host import RawHost, make_target, open_admin, open_io
from tests.support.nvme.rdma_ends import RdmaBench, RdmaPair

ENTRIES = 32


def capsule(sqe: Sqe) -> bytes:
    return b"".join(encode_pdu(CapsuleCmd(sqe, 0)))


def reading(cid: int, blocks: int = 1) -> Sqe:
    return Sqe(IoOpcode.READ, cid, 1, transport(blocks * 4096), cdw12=blocks - 1)


def pour(host: RawHost, data: bytes) -> None:
    """Send, and read nothing."""
    rest = memoryview(data)
    while rest and not host.queue.ending:
        buffer = host.queue.next_buffer()
        count = min(len(buffer), len(rest))
        buffer[:count] = rest[:count]
        host.queue.received(count, host.now)
        rest = rest[count:]


def held(host: RawHost) -> int:
    """Commands and answers that a queue holds."""
    queue = host.queue
    return len(queue._runnable) + len(queue._in_flight) + len(queue._output) + len(queue._arrivals)


@pytest.fixture
def storage() -> HeapStorage:
    return HeapStorage()


def flooded(target: Target, storage: HeapStorage) -> RawHost:
    """An I/O queue with a command in flight, and unread answers up to the limit."""
    _, io = open_io(target, sqsize=ENTRIES - 1)
    storage.held = True
    pour(io, capsule(reading(1)))
    storage.held = False
    while io.queue._output_bytes < OUTPUT_LIMIT and not io.queue.ending:
        pour(io, capsule(reading(2)))
    return io


def test_ids_in_flight_do_not_let_a_host_send_more_than_the_queue_has(storage: HeapStorage) -> None:
    target, _ = make_target(storage)
    io = flooded(target, storage)
    before = held(io)
    for _ in range(10_000):
        pour(io, capsule(reading(1)))
    assert io.queue.ending
    assert held(io) <= before + ENTRIES
    assert target.overfull == 1
    assert io.queue.end_reason == f"more than {ENTRIES} commands in flight"


def test_no_kind_of_command_lets_it() -> None:
    """Each kind that is answered, refused or parked, without end by a host that reads nothing."""
    storage = HeapStorage()
    target, _ = make_target(storage)
    kinds = [
        lambda cid: Sqe(AdminOpcode.KEEP_ALIVE, cid, 0, transport(0)),
        lambda cid: Sqe(AdminOpcode.ASYNC_EVENT_REQUEST, cid, 0, transport(0)),
        lambda cid: Sqe(AdminOpcode.ABORT, cid, 0, transport(0), cdw10=cid << 16),
        lambda cid: Sqe(AdminOpcode.IDENTIFY, cid, 0, transport(4096), cdw10=1),
        lambda cid: Sqe(0xFE, cid, 0, transport(0)),
    ]
    for kind in kinds:
        host, _ = open_admin(target)
        for cid in itertools.islice(itertools.cycle(range(1000)), 20_000):
            pour(host, capsule(kind(cid)))
            if host.queue.ending:
                break
        assert host.queue.ending, kind(0)
        assert host.queue._output_bytes < OUTPUT_LIMIT + 8192
        assert len(host.queue._runnable) + len(host.queue._in_flight) <= 2 * ENTRIES


def test_r2ts_are_bounded_by_the_queue(storage: HeapStorage) -> None:
    target, _ = make_target(storage)
    _, io = open_io(target, sqsize=ENTRIES - 1)
    for cid in range(1000):
        pour(io, capsule(Sqe(IoOpcode.WRITE, cid, 1, transport(4096))))
    assert io.queue.ending
    assert len(io.queue._transfers) == ENTRIES


def test_a_host_that_repeats_an_id_and_reads_its_answers_goes_on(storage: HeapStorage) -> None:
    target, _ = make_target(storage)
    _, io = open_io(target, sqsize=ENTRIES - 1)
    storage.held = True
    io.submit(reading(1))
    for _ in range(10 * ENTRIES):
        assert io.status(reading(1)) == Status.COMMAND_ID_CONFLICT
    assert not io.queue.ending
    assert target.overfull == 0


class RawRdmaHost:
    """Sends over a queue pair of `rdma_ends` whatever a test wants, and acknowledges what it wants."""

    def __init__(self, pair: RdmaPair) -> None:
        self._pair = pair
        self.receives: deque[Receive] = deque(pair.far.receives)
        self.posted: list[Work] = []

    def send(self, sqe: Sqe) -> None:
        receive = self.receives.popleft()
        place = self._pair.far.local(receive.span, Access.LOCAL_WRITE)
        assert place is not None
        place[:64] = encode_entry(sqe)
        self._pair.controller.completed(Done(receive.work_id, 0, 64), self._pair.bench.now)
        self.take()

    def take(self) -> None:
        self.receives.extend(self._pair.controller.take_receives())
        self.posted.extend(self._pair.controller.sends.take())

    def acknowledge(self) -> None:
        """All that was sent has arrived."""
        posted, self.posted = self.posted, []
        for work in posted:
            if work.signaled:
                self._pair.controller.completed(Done(work.work_id), self._pair.bench.now)
        self.take()

    def answer(self) -> Cqe:
        """The completion that was sent last."""
        place = self._pair.far.local(self.posted[-1].span, Access(0))  # type: ignore[union-attr]
        assert place is not None
        return decode_cqe_untrusted(place)


@pytest.mark.parametrize("same_id", [True, False])
def test_over_rdma_a_host_that_takes_no_answer_is_heard_no_more(same_id: bool) -> None:
    """Its device acknowledges nothing, so no SEND of ours is ever through."""
    bench = RdmaBench()
    pair = bench.io(depth=16)
    controller, host = pair.controller, RawRdmaHost(pair)
    bench.storage[1].held = True
    host.send(Sqe(IoOpcode.FLUSH, 7, 1, keyed(0, 0, 0)))
    heard = 0
    while host.receives and heard < 5_000:
        host.send(Sqe(IoOpcode.FLUSH if same_id else 0xFE, 7 if same_id else 100 + heard, 1, keyed(0, 0, 0)))
        heard += 1
    assert not host.receives
    assert controller.end_reason is None
    assert len(controller.sends._waiting) == controller.entries - 1
    # Once it takes them, it may send as much again.
    host.acknowledge()
    assert not controller.sends._waiting
    assert len(host.receives) == controller.entries - 1


# --- an id of an event request is used again ---------------------------------------------------------------


def test_a_fabrics_command_may_take_the_id_of_an_event_request() -> None:
    """SPDK's host ends with a Property Get under the id of an event request that it does not wait for."""
    target, subsystem = make_target(HeapStorage())
    host, _ = open_admin(target)
    host.submit(Sqe(AdminOpcode.ASYNC_EVENT_REQUEST, 9, 0, transport(0)))
    host.submit(Sqe(AdminOpcode.ASYNC_EVENT_REQUEST, 10, 0, transport(0)))
    assert host.property_get(Property.CSTS) == 1  # under id 9
    # The event goes to the one that is still waited for.
    target.remove_namespace(subsystem, 1)
    host.run()
    assert host.answer()[0].cid == 10
    assert host.status(Sqe(AdminOpcode.KEEP_ALIVE, 9, 0, transport(0))) == 0


def test_no_other_command_may() -> None:
    target, _ = make_target(HeapStorage())
    host, _ = open_admin(target)
    host.submit(Sqe(AdminOpcode.ASYNC_EVENT_REQUEST, 9, 0, transport(0)))
    for sqe in (Sqe(AdminOpcode.KEEP_ALIVE, 9, 0, transport(0)), Sqe(0x0C, 9, 0, transport(0))):
        assert host.status(sqe) == Status.COMMAND_ID_CONFLICT


def test_over_rdma_too() -> None:
    bench = RdmaBench()
    host = RawRdmaHost(bench.admin)
    receives = len(host.receives)
    host.send(Sqe(AdminOpcode.ASYNC_EVENT_REQUEST, 900, 0, keyed(0, 0, 0)))
    assert len(host.receives) == receives - 1
    asking = fabrics_entry(PropertyAccess(Property.CSTS, 4), cid=900)
    host.send(asking._replace(sgl=keyed(0, 0, 0)))
    answer = host.answer()
    assert (answer.cid, answer.status, answer.result) == (900, 0, 1)
    # The event request holds no receive any more.
    assert len(host.receives) == receives
