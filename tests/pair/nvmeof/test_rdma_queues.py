"""I/O between our NVMe/RDMA host and controller: every flow of data, keys, credits, late answers, broken
peers.
"""

from __future__ import annotations

import itertools
import mmap
import random

import pytest

from nvmeof.controller.rdma_queue import RdmaSettings
from nvmeof.errors import LocalProtocolError, QueueFull
from nvmeof.host import commands
from nvmeof.host.command import Command
from nvmeof.rdma.work import BindWindow, Invalidate, Read, Send, Write
from nvmeof.wire.identify import SGLS_KEYED
from nvmeof.wire.sqe import DatasetRange
from nvmeof.wire.status import Status
from tests.support.nvme import more_commands
from tests.support.nvme.nvme_ends import LBA, same
from tests.support.nvme.rdma_ends import RdmaBench, RdmaPair


@pytest.fixture(params=[True, False], ids=["windows", "plain keys"])
def bench(request: pytest.FixtureRequest) -> RdmaBench:
    return RdmaBench(windows=request.param)


def memory(size: int) -> memoryview:
    return memoryview(mmap.mmap(-1, size))


def test_the_controller_says_what_a_host_of_rdma_needs(bench: RdmaBench) -> None:
    facts = bench.facts
    assert facts.identify.sgls & SGLS_KEYED
    assert facts.in_capsule_bytes == 4096
    assert facts.capabilities.max_queue_entries == 127
    # Connect's data on the admin queue came by RDMA READ, as the kernel sends them; nothing was in a capsule.
    assert isinstance(bench.admin.far.executed[0], Read)
    assert all(work.span.length == 64 for work in bench.admin.near.executed if isinstance(work, Send))


@pytest.mark.parametrize("blocks", [1, 2, 40, 256])
@pytest.mark.parametrize("registered", [True, False])
def test_write_then_read(bench: RdmaBench, blocks: int, registered: bool) -> None:
    """In the capsule (one block) and by RDMA READ; into memory of the owner's, and through a loan."""
    pair = bench.io()
    size = blocks * LBA
    data = random.Random(blocks).randbytes(size)
    out, into = memory(size), memory(size)
    out[:] = data
    if registered:
        pair.buffers.register(out)
        pair.buffers.register(into)
    pair.far.executed.clear()
    pair.near.executed.clear()
    assert pair.run(commands.write(1, 3, blocks, [out])).status == 0
    assert same(bench.storage[1].memory[3 * LBA : 3 * LBA + size], data)
    reads = [work for work in pair.far.executed if isinstance(work, Read)]
    assert len(reads) == (0 if blocks == 1 else 1)
    command = pair.run(commands.read(1, 3, blocks, into))
    assert command.status == 0
    assert command.received == size
    assert same(into, data)
    # The payload never had a stop on the controller's side: it came from and went to the drive itself.
    drive = [region for region, _ in pair.far.regions.values() if len(region.view) == 1024 * LBA]
    moved = [work.span.lkey for work in pair.far.executed if isinstance(work, Read | Write)]
    assert set(moved) == {drive[0].lkey}
    keys = [work.rkey for work in pair.far.executed if isinstance(work, Read | Write)]
    if bench.windows:
        binds = [work.rkey for work in pair.near.executed if isinstance(work, BindWindow)]
        assert binds == keys
        assert not pair.near.bound
    assert pair.buffers.lent_bytes == _idle_loans(pair)


def _idle_loans(pair: RdmaPair) -> int:
    """Loans of a queue without commands: capsules and answers."""
    capsules = 1 << (pair.queue.depth * (64 + pair.queue.in_capsule_bytes) - 1).bit_length()
    return capsules + 4096


def test_parts_and_bytes_are_gathered(bench: RdmaBench) -> None:
    pair = bench.io()
    data = random.Random(2).randbytes(8 * LBA)
    parts = [data[:100], memoryview(data)[100:LBA], bytearray(data[LBA:])]
    assert pair.run(commands.write(1, 0, 8, parts)).status == 0
    assert pair.run(commands.write(1, 8, 1, [data[:7], data[7:LBA]])).status == 0
    assert same(bench.storage[1].memory[: 9 * LBA], data + data[:LBA])


@pytest.mark.parametrize("blocks", [1, 3, 256])
def test_a_drive_whose_bytes_lie_nowhere_in_memory(bench: RdmaBench, blocks: int) -> None:
    """One in a file: loans on the controller's side, which come back."""
    bench.storage[1].direct = False
    pair = bench.io()
    before = pair.media.lent_bytes
    data = random.Random(blocks).randbytes(blocks * LBA)
    assert pair.run(commands.write(1, 3, blocks, [data])).status == 0
    assert same(bench.storage[1].memory[3 * LBA : (3 + blocks) * LBA], data)
    for _ in range(20):
        command = pair.run(commands.read(1, 3, blocks, memory(len(data))))
        assert same(command.data_in, data)
    assert pair.run(more_commands.compare(1, 3, blocks, [data])).status == 0
    assert pair.run(commands.read(1, 1024, 1, memory(LBA))).status == Status.LBA_OUT_OF_RANGE
    assert pair.media.lent_bytes == before
    pair.controller.connection_lost()
    assert pair.media.lent_bytes == 0


def test_the_other_commands(bench: RdmaBench) -> None:
    pair = bench.io()
    data = random.Random(1).randbytes(8 * LBA)
    pair.run(commands.write(1, 0, 8, [data]))
    assert pair.run(commands.flush(1)).status == 0
    assert pair.run(more_commands.compare(1, 0, 8, [data])).status == 0
    assert pair.run(more_commands.compare(1, 0, 1, [data[:LBA]])).status == 0
    assert pair.run(more_commands.compare(1, 0, 8, [data[:-1], b"?"])).status == Status.COMPARE_FAILURE
    assert pair.run(more_commands.write_zeroes(1, 2, 2)).status == 0
    assert pair.run(more_commands.dataset_management(1, [DatasetRange(6, 2)])).status == 0
    expected = data[: 2 * LBA] + bytes(2 * LBA) + data[4 * LBA : 6 * LBA] + bytes(2 * LBA)
    assert same(bench.storage[1].memory[: 8 * LBA], expected)


@pytest.mark.parametrize(
    ("make", "status"),
    [
        (lambda: commands.read(1, 1024, 1, memory(LBA)), Status.LBA_OUT_OF_RANGE),
        (lambda: commands.write(1, 1024, 64, [bytes(64 * LBA)]), Status.LBA_OUT_OF_RANGE),
        (lambda: commands.write(1, 1024, 1, [bytes(LBA)]), Status.LBA_OUT_OF_RANGE),
        (lambda: commands.read(1, 0, 2, memory(LBA)), Status.DATA_SGL_LENGTH_INVALID),
        (lambda: commands.read(9, 0, 1, memory(LBA)), Status.INVALID_NAMESPACE),
        (lambda: commands.flush(9), Status.INVALID_NAMESPACE),
        (lambda: Command("odd", 0x7E, 1), Status.INVALID_OPCODE),
    ],
)
def test_wrong_input_has_its_status(bench: RdmaBench, make: object, status: Status) -> None:
    pair = bench.io()
    assert callable(make)
    assert pair.run(make()).status == status
    assert pair.run(commands.read(1, 0, 1, memory(LBA))).status == 0
    assert not pair.near.bound


def test_many_at_once_and_no_more_than_the_depth(bench: RdmaBench) -> None:
    """More than the credits are never out, in whatever order the answers come."""
    pair = bench.io(depth=8)
    storage = bench.storage[1]
    data = random.Random(3).randbytes(200 * 2 * LBA)
    running: list[Command] = []
    for n in range(200):
        while True:
            try:
                pair.submit(commands.write(1, 2 * n, 2, [data[n * 2 * LBA : (n + 1) * 2 * LBA]]))
                break
            except QueueFull:
                pair.settle()
    pair.settle()
    assert same(storage.memory[: len(data)], data)
    storage.held = True
    running = [pair.submit(commands.read(1, n, 1, memory(LBA))) for n in range(8)]
    with pytest.raises(QueueFull):
        pair.submit(commands.flush(1))
    pair.settle()
    assert not any(command.done for command in running)
    storage.held = False
    bench.target.poke()
    pair.settle()
    assert all(command.status == 0 for command in running)
    assert pair.far.starved == pair.near.starved == 0
    assert pair.queue.in_flight == 0


def test_reads_of_the_host_are_bounded() -> None:
    bench = RdmaBench(settings=RdmaSettings(max_reads=2, in_capsule_bytes=0))
    pair = bench.io(depth=16)
    data = [random.Random(n).randbytes(LBA) for n in range(16)]
    for n, each in enumerate(data):
        pair.submit(commands.write(1, n, 1, [each]))
    pair.far.hold = True
    pair.settle()
    assert sum(isinstance(work, Read) for work in pair.far.work) == 2
    pair.far.hold = False
    pair.settle()
    assert same(bench.storage[1].memory[: 16 * LBA], b"".join(data))


# --- keys --------------------------------------------------------------------------


@pytest.mark.parametrize("once", [False, True])
def test_windows_are_bound_again_or_serve_once(once: bool) -> None:
    """pyverbs cannot tell a window its new key, so there no window may be bound twice."""
    pair = RdmaBench().io(depth=2, windows_serve_once=once)
    for _ in range(600):
        assert pair.run(commands.read(1, 0, 2, memory(2 * LBA))).status == 0
    keys = [work.rkey for work in pair.near.executed if isinstance(work, BindWindow)]
    bases = {key & ~0xFF for key in keys}
    assert len(keys) == 600
    assert len(bases) == (600 if once else 1)
    assert all(one != other for one, other in itertools.pairwise(keys))


def test_an_answer_without_invalidation_waits_for_ours() -> None:
    """A controller may ignore 4Fh (as one does that answers an error before it has looked at the SGL)."""
    bench = RdmaBench()
    pair = bench.io()
    pair.far.hold = True
    command = pair.submit(commands.read(1, 0, 16, memory(16 * LBA)))
    pair.settle()
    send = pair.far.work.pop()
    assert isinstance(send, Send)
    assert send.invalidate is not None
    pair.far.work.append(send._replace(invalidate=None))
    pair.far.hold = False
    pair.near.hold = True
    pair.settle()
    assert not command.done, "the window is still open"
    assert pair.queue.in_flight == 0
    pair.near.hold = False
    pair.settle()
    assert command.status == 0
    assert any(isinstance(work, Invalidate) for work in pair.near.executed)
    assert not pair.near.bound


def test_an_answer_that_invalidates_another_key_ends_the_queue() -> None:
    bench = RdmaBench()
    pair = bench.io()
    pair.far.hold = True
    first = pair.submit(commands.read(1, 0, 1, memory(LBA)))
    second = pair.submit(commands.read(1, 1, 1, memory(LBA)))
    pair.settle()
    sends = [work for work in pair.far.work if isinstance(work, Send)]
    pair.far.work.clear()
    pair.far.work.append(sends[0]._replace(invalidate=sends[1].invalidate))
    pair.far.hold = False
    pair.settle()
    assert pair.error is not None
    assert first.lost
    assert second.lost


def test_a_key_is_for_its_command_alone() -> None:
    """After its end the controller reaches nothing with it, and is told so by the loss of the queue pair."""
    bench = RdmaBench()
    pair = bench.io()
    into = memory(16 * LBA)
    pair.buffers.register(into)
    pair.run(commands.read(1, 0, 16, into))
    write = next(work for work in pair.far.executed if isinstance(work, Write))
    into[:] = b"\xaa" * len(into)
    pair.far.post((), [write])
    pair.settle()
    assert same(into, b"\xaa" * len(into))
    assert pair.near.error
    assert pair.far.error


def test_a_wrong_key_ends_the_queue_pair_and_nothing_else(bench: RdmaBench) -> None:
    pair, other = bench.io(qid=1), bench.io(qid=2)
    command = pair.submit(commands.write(1, 0, 16, [bytes(16 * LBA)]))
    pair.far.hold = True
    pair.settle()
    read = pair.far.work.pop()
    assert isinstance(read, Read)
    pair.far.work.append(read._replace(rkey=read.rkey ^ 0xFF00))
    pair.far.hold = False
    pair.settle()
    assert command.lost
    assert pair.controller.finished
    assert pair.controller.end_reason == "read: remote access error"
    assert other.run(commands.flush(1)).status == 0


# --- commands that nobody waits for ---------------------------------------------------


def test_a_late_answer_into_a_loan_is_swallowed(bench: RdmaBench) -> None:
    pair = bench.io(depth=2)
    storage = bench.storage[1]
    storage.held = True
    into = memory(LBA)
    into[:] = b"\xaa" * LBA
    command = pair.submit(commands.read(1, 0, 1, into))
    pair.settle()
    assert not pair.queue.abandon(command), "the queue can go on"
    assert (pair.queue.oldest_abandoned(), pair.queue.abandoned) == (0.0, 1)
    pair.submit(commands.flush(1))
    with pytest.raises(QueueFull):
        pair.submit(commands.flush(1))
    storage.held = False
    bench.target.poke()
    pair.settle()
    assert not command.done
    assert same(into, b"\xaa" * LBA)
    assert (pair.queue.oldest_abandoned(), pair.queue.abandoned) == (None, 0)
    assert pair.queue.in_flight == 0
    assert pair.buffers.lent_bytes == _idle_loans(pair)


@pytest.mark.parametrize("late", ["write", "read"])
def test_the_buffer_of_an_abandoned_command_is_safe_once_the_pair_is_broken(
    bench: RdmaBench, late: str
) -> None:
    """The controller's RDMA comes after the owner has his buffer back, and finds the queue pair in error."""
    pair = bench.io()
    shared = memory(64 * LBA)
    pair.buffers.register(shared)
    pair.far.hold = True
    if late == "write":
        command = commands.read(1, 0, 64, shared)
    else:
        command = commands.write(1, 0, 64, [shared])
    pair.submit(command)
    bystander = pair.submit(commands.flush(1))
    pair.settle()
    assert any(isinstance(work, Write | Read) for work in pair.far.work)
    assert pair.queue.abandon(command), "the owner must break the pair"
    # The host's end only: the controller has not heard of it.
    pair.near.flush()
    pair.ended += pair.queue.fail("a command was abandoned")
    assert bystander.lost
    assert not command.done
    # Now the memory is another request's.
    shared[:] = b"\x55" * len(shared)
    bench.storage[1].memory[:] = bytes(len(bench.storage[1].memory))
    pair.far.hold = False
    pair.settle()
    assert same(shared, b"\x55" * len(shared))
    assert b"\x55" not in bench.storage[1].memory


def test_abandoned_while_its_window_is_being_closed() -> None:
    bench = RdmaBench()
    pair = bench.io()
    shared = memory(16 * LBA)
    pair.buffers.register(shared)
    pair.far.hold = True
    command = pair.submit(commands.read(1, 0, 16, shared))
    pair.settle()
    send = pair.far.work.pop()
    assert isinstance(send, Send)
    pair.far.work.append(send._replace(invalidate=None))
    pair.near.hold, pair.far.hold = True, False
    pair.settle()
    assert pair.queue.abandon(command)
    pair.near.hold = False
    pair.settle()
    assert not command.done
    assert pair.error is None


# --- peers that do wrong, and ends -------------------------------------------------------


def test_what_a_host_may_not_do(bench: RdmaBench) -> None:
    pair = bench.io()
    with pytest.raises(LocalProtocolError):
        pair.submit(commands.read(1, 0, 1, memoryview(bytearray(1 << 24))))
    command = pair.run(commands.flush(1))
    with pytest.raises(LocalProtocolError):
        pair.submit(command)
    with pytest.raises(LocalProtocolError):
        pair.queue.abandon(commands.flush(1))
    pair.break_pair("enough")
    assert pair.queue.fail("again") == []
    with pytest.raises(LocalProtocolError):
        pair.submit(commands.flush(1))


def test_disconnect_is_answered_before_the_end(bench: RdmaBench) -> None:
    pair = bench.io()
    assert pair.run(more_commands.disconnect()).status == 0
    assert pair.controller.finished
    assert pair.controller.end_reason == "the host disconnected"
    pair.controller.connection_lost()
    pair.controller.connection_lost()
    assert bench.io().run(commands.flush(1)).status == 0


def test_no_connect_within_its_time(bench: RdmaBench) -> None:
    pair = RdmaPair(bench, 2, 8, windows=False)
    assert pair.controller.deadline() == 10.0
    bench.now = 10.0
    pair.settle()
    assert pair.controller.finished


def test_a_reset_closes_io_queues(bench: RdmaBench) -> None:
    pair = bench.io()
    bench.target.controllers[0].configure(0)
    pair.settle()
    assert pair.controller.finished
    assert not bench.admin.controller.finished
