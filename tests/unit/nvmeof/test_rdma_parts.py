"""The send queue, registered buffers, and whom a controller lets in: the parts below the NVMe/RDMA queues."""

from __future__ import annotations

import mmap
import random

import pytest

from nvmeof.controller.rdma_queue import RdmaSettings, judge_request
from nvmeof.controller.settings import ControllerSettings
from nvmeof.rdma.buffers import SPARE_BYTES, RegisteredBuffers, address_of, gather
from nvmeof.rdma.send_queue import SIGNAL_EVERY, SendQueue
from nvmeof.rdma.work import Access, Send, Span, Work, Write, describe_status
from nvmeof.wire.rdma import ConnectRequest, RejectStatus, UnacceptableRequest
from tests.support.nvme.memory_verbs import Station

SPAN = Span(0x1000, 16, 7)


def send(signaled: bool) -> Send:
    return Send(2 << 32, SPAN, signaled)


def test_at_least_one_chain_of_some_is_signaled_and_nothing_overtakes() -> None:
    """A device that completes in order and at random times; never more than `room` on it."""
    dice = random.Random(35)
    room = 4 * SIGNAL_EVERY
    sends = SendQueue(room)
    device: list[Work] = []
    through: list[int] = []
    put = 0
    while len(through) < 500:
        if put < 500 and dice.random() < 0.7:
            number = put
            chain: tuple[Work, ...] = (send(sends.signal_due),)
            if dice.random() < 0.5:
                chain = (Write(4 << 32, SPAN, 0, 0), *chain)
            sends.put(*chain, then=lambda number=number: through.append(number))  # type: ignore[misc]
            put += 1
        device += sends.take()
        assert len(device) <= room
        if dice.random() < 0.5 or put == 500:
            for position, work in enumerate(device):
                if work.signaled:
                    del device[: position + 1]
                    sends.completed()
                    break
            else:
                if put == 500 and not sends.pending:
                    # The last few were not signaled, and nobody needs to know of them.
                    break
    assert through == sorted(through)
    assert len(through) > 500 - SIGNAL_EVERY
    sends.abandon()
    assert len(through) == 500
    assert sends.idle


def test_a_send_queue_that_could_lock_itself_up_is_refused() -> None:
    with pytest.raises(ValueError):
        SendQueue(SIGNAL_EVERY)


def test_slices_of_registered_memory_are_found() -> None:
    station = Station("here")
    buffers = RegisteredBuffers(station, Access.LOCAL_WRITE)
    memory = memoryview(mmap.mmap(-1, 1 << 16))
    assert buffers.find(memory) is None
    region = buffers.register(memory)
    place = buffers.find(memory[4096:8192])
    assert place is not None
    assert place.span == Span(address_of(memory) + 4096, 4096, region.lkey)
    assert buffers.find(memoryview(bytes(16))) is None
    assert buffers.find(b"bytes") is None
    assert buffers.find(memoryview(bytearray(1 << 17))) is None
    buffers.forget(memory)
    assert buffers.find(memory) is None
    assert not station.regions


def test_loans_are_used_again_and_the_spare_ones_are_bounded() -> None:
    station = Station("here")
    buffers = RegisteredBuffers(station, Access.LOCAL_WRITE)
    first = buffers.borrow(5000)
    assert len(first.view) == 5000
    assert first.place.span.length == 5000
    buffers.give_back(first)
    second = buffers.borrow(8192)
    assert second.region is first.region
    loans = [second] + [buffers.borrow(1 << 20) for _ in range(40)]
    assert buffers.lent_bytes == 8192 + (40 << 20)
    for loan in loans:
        buffers.give_back(loan)
    assert buffers.lent_bytes == 0
    assert sum(len(region.view) for region, _ in station.regions.values()) <= SPARE_BYTES


def test_gather() -> None:
    into = bytearray(10)
    gather([b"ab", bytearray(b"cde"), memoryview(b"fg")], memoryview(into))
    assert into == b"abcdefg\0\0\0"


@pytest.mark.parametrize(
    ("request_", "host_reads", "status"),
    [
        (ConnectRequest(65, 32, 32), 1, RejectStatus.INVALID_QUEUE_ID),
        (ConnectRequest(0, 32, 1), 1, RejectStatus.INVALID_HSQSIZE),
        (ConnectRequest(1, 200, 129), 1, RejectStatus.INVALID_HSQSIZE),
        (ConnectRequest(1, 0, 32), 1, RejectStatus.INVALID_HRQSIZE),
        (ConnectRequest(1, 32, 32), 0, RejectStatus.INVALID_IRD),
    ],
)
def test_whom_a_controller_refuses(request_: ConnectRequest, host_reads: int, status: RejectStatus) -> None:
    with pytest.raises(UnacceptableRequest) as caught:
        judge_request(request_, RdmaSettings(), max_io_queues=64, host_reads=host_reads)
    assert caught.value.status is status
    judge_request(ConnectRequest(64, 32, 128), RdmaSettings(), max_io_queues=64, host_reads=1)


def test_settings() -> None:
    narrowed = RdmaSettings(in_capsule_bytes=8192).narrow(ControllerSettings(in_capsule_bytes=1 << 20))
    assert (narrowed.in_capsule_bytes, narrowed.max_queue_entries) == (8192, 128)
    for wrong in ({"in_capsule_bytes": 17}, {"max_queue_entries": 8}, {"max_reads": 0}):
        with pytest.raises(ValueError):
            RdmaSettings(**wrong)


def test_status_words() -> None:
    assert describe_status(10) == "remote access error"
    assert describe_status(77) == "completion status 77"
