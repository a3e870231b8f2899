"""I/O commands of a controller: what they do, and the status of each that is wrong."""

from __future__ import annotations

import pytest

from nvmeof.controller.settings import ControllerSettings
from nvmeof.controller.storage import StorageError
from nvmeof.controller.subsystem import Namespace
from nvmeof.tcp.pdu import NO_DIGESTS, R2T, C2HData, CapsuleCmd, CapsuleResp, H2CData
from nvmeof.wire.sgl import SglDescriptor
from nvmeof.wire.sqe import AdminOpcode, DatasetRange, IoOpcode, Sqe
from nvmeof.wire.status import Status
from tests.support.nvme.entries import encode_ranges, in_capsule, keyed, transport
from tests.support.nvme.heap_storage import HeapStorage
from tests.support.nvme.pdus import encode_header, encode_pdu
from tests.support.nvme.raw_host import RawHost, make_target, open_io

BLOCK = 4096


def read(slba: int, blocks: int = 1, *, nsid: int = 1, cid: int = 1) -> Sqe:
    return Sqe(IoOpcode.READ, cid, nsid, transport(blocks * BLOCK), slba & 0xFFFFFFFF, slba >> 32, blocks - 1)


def write(slba: int, blocks: int = 1, *, inside: bool = False, cid: int = 2, cdw12: int = 0) -> Sqe:
    sgl = in_capsule(blocks * BLOCK) if inside else transport(blocks * BLOCK)
    return Sqe(IoOpcode.WRITE, cid, 1, sgl, slba, 0, blocks - 1 | cdw12)


def pattern(blocks: int) -> bytes:
    return b"".join(bytes([number + 1]) * BLOCK for number in range(blocks))


@pytest.fixture(params=[True, False], ids=["memory", "file-like"])
def storage(request: pytest.FixtureRequest) -> HeapStorage:
    return HeapStorage(600, direct=request.param)


def make_io(*storages: HeapStorage, settings: ControllerSettings | None = None) -> tuple[RawHost, RawHost]:
    target, _ = make_target(*storages, settings=settings)
    return open_io(target)


@pytest.mark.parametrize("inside", [True, False])
def test_what_is_written_is_read(storage: HeapStorage, inside: bool) -> None:
    _, io = make_io(storage)
    data = pattern(3)
    assert io.status(write(5, 3, inside=inside), data) == 0
    assert storage.memory[5 * BLOCK : 8 * BLOCK] == data
    cqe, back = io.command(read(4, 5))
    assert cqe.status == 0
    assert back == bytes(BLOCK) + data + bytes(BLOCK)


def test_a_mebibyte_and_a_header_block_come_in_one_pdu(storage: HeapStorage) -> None:
    _, io = make_io(storage)
    io.submit(read(0, 257))
    (pdu, data) = io.pdus.pop()
    assert pdu == C2HData(1, 0, 257 * BLOCK, last=True, success=True)
    assert len(data) == 257 * BLOCK


def test_success_stands_for_a_completion_only_without_flow_control() -> None:
    target, _ = make_target(HeapStorage())
    _, io = open_io(target, cattr=0)
    io.submit(read(0))
    (data, _), (completion, _) = io.pdus
    assert isinstance(data, C2HData)
    assert data.last
    assert not data.success
    assert isinstance(completion, CapsuleResp)
    assert completion.cqe.sqhd == 2  # Connect was the first command


def test_flow_control_goes_round_the_queue() -> None:
    target, _ = make_target(HeapStorage())
    _, io = open_io(target, cattr=0, sqsize=3)
    heads = [io.command(Sqe(IoOpcode.FLUSH, 1, 1, transport(0)))[0].sqhd for _ in range(6)]
    assert heads == [2, 3, 0, 1, 2, 3]


def test_an_r2t_asks_for_everything_and_data_may_come_in_pieces(storage: HeapStorage) -> None:
    _, io = make_io(storage)
    io.submit(write(0, 4, cid=9))
    (request, _) = io.pdus.pop()
    assert isinstance(request, R2T)
    assert (request.cid, request.offset, request.length) == (9, 0, 4 * BLOCK)
    data = pattern(4)
    for start, end in ((0, 4), (4, 8192), (8192, 16384)):
        io.send_pdu(H2CData(9, request.ttag, start, end - start, end == 16384), data[start:end])
    assert io.answer()[0].status == 0
    assert storage.memory[: 4 * BLOCK] == data


def test_what_lay_in_a_socket_while_a_drive_hung_is_not_written_once_the_queue_has_to_end() -> None:
    """Two writes come at one time, and the first hangs until the host is gone."""

    class Hanging(HeapStorage):
        def write(self, offset: int, data: memoryview, *, placed: bool) -> None:
            super().write(offset, data, placed=placed)
            io.queue.session.close("the host is gone")

    storage = Hanging(direct=False)
    _, io = make_io(storage)
    both = [
        b"".join(encode_pdu(CapsuleCmd(write(slba, inside=True, cid=slba), BLOCK), NO_DIGESTS, 4, (data,)))
        for slba, data in ((1, b"a" * BLOCK), (2, b"b" * BLOCK))
    ]
    io.send(b"".join(both))
    assert storage.memory[: 3 * BLOCK] == bytes(BLOCK) + b"a" * BLOCK + bytes(BLOCK)


@pytest.mark.parametrize("blocks", [2, 3, 4])
def test_each_of_many_writes_that_one_receive_brings_keeps_its_own_data(
    storage: HeapStorage, blocks: int
) -> None:
    """All of them are placed before the first is carried out, and a medium of a file names no place."""
    _, io = make_io(storage)
    size, count = blocks * BLOCK, 9
    values = [bytes([number + 1]) * size for number in range(count)]
    capsules = [
        encode_pdu(
            CapsuleCmd(write(number * blocks, blocks, inside=True, cid=number), size), NO_DIGESTS, 4, (data,)
        )
        for number, data in enumerate(values)
    ]
    io.send(b"".join(part for capsule in capsules for part in capsule))
    assert [pdu.cqe.status for pdu, _ in io.pdus if isinstance(pdu, CapsuleResp)] == [0] * count
    assert storage.memory[: count * size] == b"".join(values)


def test_two_writes_at_once_may_send_their_data_in_turns(storage: HeapStorage) -> None:
    _, io = make_io(storage)
    io.submit(write(0, 2, cid=1))
    io.submit(write(2, 2, cid=2))
    first, second = (pdu for pdu, _ in io.pdus)
    assert isinstance(first, R2T)
    assert isinstance(second, R2T)
    assert first.ttag != second.ttag
    io.pdus.clear()
    for offset in (0, BLOCK):
        last = offset == BLOCK
        io.send_pdu(H2CData(2, second.ttag, offset, BLOCK, last), b"b" * BLOCK)
        io.send_pdu(H2CData(1, first.ttag, offset, BLOCK, last), b"a" * BLOCK)
    assert {pdu.cqe.cid for pdu, _ in io.pdus if isinstance(pdu, CapsuleResp)} == {1, 2}
    assert storage.memory[: 4 * BLOCK] == b"a" * 2 * BLOCK + b"b" * 2 * BLOCK


def test_compare(storage: HeapStorage) -> None:
    _, io = make_io(storage)
    data = pattern(2)
    io.command(write(0, 2), data)
    compare = Sqe(IoOpcode.COMPARE, 3, 1, transport(2 * BLOCK), 0, 0, 1)
    assert io.status(compare, data) == 0
    assert io.status(compare, data[:-1] + b"x") == Status.COMPARE_FAILURE
    assert io.status(Sqe(IoOpcode.COMPARE, 3, 1, in_capsule(BLOCK), 0, 0, 0), data[:BLOCK]) == 0


def test_flush_write_zeroes_and_deallocate(storage: HeapStorage) -> None:
    other = HeapStorage(4)
    _, io = make_io(storage, other)
    storage.memory[:] = b"x" * len(storage.memory)
    assert io.status(Sqe(IoOpcode.FLUSH, 1, 1, transport(0))) == 0
    assert (storage.flushes, other.flushes) == (1, 0)
    assert io.status(Sqe(IoOpcode.FLUSH, 1, 0xFFFFFFFF, transport(0))) == 0
    assert (storage.flushes, other.flushes) == (2, 1)
    assert io.status(Sqe(IoOpcode.WRITE_ZEROES, 1, 1, transport(0), 1, 0, 1)) == 0
    assert storage.memory[: 4 * BLOCK] == b"x" * BLOCK + bytes(2 * BLOCK) + b"x" * BLOCK
    ranges = encode_ranges(DatasetRange(3, 1), DatasetRange(10, 2))
    deallocate = Sqe(IoOpcode.DATASET_MANAGEMENT, 1, 1, in_capsule(32), 1, 1 << 2)
    assert io.status(deallocate, ranges) == 0
    assert storage.memory[3 * BLOCK : 4 * BLOCK] == bytes(BLOCK)
    assert storage.memory[9 * BLOCK : 13 * BLOCK] == b"x" * BLOCK + bytes(2 * BLOCK) + b"x" * BLOCK
    assert io.status(write(0, cdw12=1 << 30), pattern(1)) == 0
    assert storage.flushes == 3, "forced unit access"


def test_ranges_are_checked_before_one_is_touched(storage: HeapStorage) -> None:
    _, io = make_io(storage)
    storage.memory[:] = b"x" * len(storage.memory)
    ranges = encode_ranges(DatasetRange(0, 1), DatasetRange(599, 2))
    sqe = Sqe(IoOpcode.DATASET_MANAGEMENT, 1, 1, transport(32), 1, 1 << 2)
    assert io.status(sqe, ranges) == Status.LBA_OUT_OF_RANGE
    assert storage.memory[:BLOCK] == b"x" * BLOCK
    hint = Sqe(IoOpcode.DATASET_MANAGEMENT, 1, 1, transport(16), 0, 1)
    assert io.status(hint, encode_ranges(DatasetRange(0, 1))) == 0
    assert storage.memory[:BLOCK] == b"x" * BLOCK


@pytest.mark.parametrize("inside", [True, False])
def test_a_list_of_ranges_may_be_longer_than_what_is_used(storage: HeapStorage, inside: bool) -> None:
    """Linux always sends room for 256 ranges; what is in the rest of it means nothing."""
    _, io = make_io(storage)
    storage.memory[:] = b"x" * len(storage.memory)
    data = encode_ranges(DatasetRange(1, 1)).ljust(4096, b"\xff")
    for length, status in ((4096, 0), (4112, Status.DATA_SGL_LENGTH_INVALID)):
        sgl = in_capsule(length) if inside else transport(length)
        sqe = Sqe(IoOpcode.DATASET_MANAGEMENT, 1, 1, sgl, 0, 1 << 2)
        assert io.status(sqe, data.ljust(length, b"y")) == status
    short = Sqe(IoOpcode.DATASET_MANAGEMENT, 1, 1, transport(16), 1, 1 << 2)
    assert io.status(short, data[:16]) == Status.DATA_SGL_LENGTH_INVALID
    assert storage.memory[: 3 * BLOCK] == b"x" * BLOCK + bytes(BLOCK) + b"x" * BLOCK


@pytest.mark.parametrize(
    ("sqe", "status"),
    [
        (read(600), Status.LBA_OUT_OF_RANGE),
        (read(599, 2), Status.LBA_OUT_OF_RANGE),
        (read((1 << 64) - 1, 2), Status.LBA_OUT_OF_RANGE),
        (read(0, nsid=2), Status.INVALID_NAMESPACE),
        (read(0, nsid=0), Status.INVALID_NAMESPACE),
        (read(0, nsid=0xFFFFFFFF), Status.INVALID_NAMESPACE),
        (read(0, 513), Status.INVALID_FIELD),
        (write(0, 513), Status.INVALID_FIELD),
        (write(599, 2), Status.LBA_OUT_OF_RANGE),
        (write(0, cdw12=1 << 20), Status.INVALID_FIELD),
        (Sqe(IoOpcode.COMPARE, 1, 1, transport(513 * BLOCK), 0, 0, 512), Status.INVALID_FIELD),
        (Sqe(IoOpcode.WRITE_ZEROES, 1, 1, transport(0), 599, 0, 1), Status.LBA_OUT_OF_RANGE),
        (Sqe(0x04, 1, 1, transport(0)), Status.INVALID_OPCODE),
        (Sqe(0x7E, 1, 1, transport(0)), Status.INVALID_OPCODE),
        (Sqe(0x7E, 1, 99, transport(0)), Status.INVALID_OPCODE),
        (Sqe(IoOpcode.FLUSH, 1, 99, transport(0)), Status.INVALID_NAMESPACE),
        (Sqe(IoOpcode.READ, 1, 1, transport(512)), Status.DATA_SGL_LENGTH_INVALID),
        (Sqe(IoOpcode.READ, 1, 1, in_capsule(BLOCK)), Status.SGL_TYPE_INVALID),
        (Sqe(IoOpcode.READ, 1, 1, keyed(0x1000, BLOCK, 7)), Status.SGL_TYPE_INVALID),
        (Sqe(IoOpcode.READ, 1, 1, SglDescriptor(0, BLOCK, 2, 0)), Status.SGL_TYPE_INVALID),
        (Sqe(IoOpcode.READ, 1, 1, SglDescriptor(0, BLOCK, 5, 0)), Status.SGL_TYPE_INVALID),
        (Sqe(IoOpcode.WRITE, 1, 1, in_capsule(BLOCK)), Status.DATA_SGL_LENGTH_INVALID),
        (Sqe(IoOpcode.READ, 1, 1, transport(BLOCK), flags=0x41), Status.INVALID_FIELD),
        (Sqe(IoOpcode.READ, 1, 1, transport(BLOCK), flags=0x80), Status.INVALID_FIELD),
    ],
)
def test_wrong_commands(storage: HeapStorage, sqe: Sqe, status: int) -> None:
    _, io = make_io(storage)
    cqe, data = io.command(sqe)
    assert (cqe.status, data) == (status, b"")
    assert cqe.do_not_retry
    assert not storage.admitted
    assert io.status(read(0)) == 0


@pytest.mark.parametrize(
    ("sqe", "status"),
    [
        (Sqe(IoOpcode.WRITE, 1, 1, in_capsule(BLOCK, 4)), Status.SGL_OFFSET_INVALID),
        (Sqe(IoOpcode.WRITE, 1, 1, in_capsule(2 * BLOCK), 0, 0, 1), Status.DATA_SGL_LENGTH_INVALID),
        (Sqe(IoOpcode.WRITE, 1, 1, in_capsule(BLOCK), 0, 0, 1), Status.DATA_SGL_LENGTH_INVALID),
        (Sqe(IoOpcode.WRITE, 1, 1, transport(BLOCK)), Status.INVALID_FIELD),
        (Sqe(IoOpcode.WRITE, 1, 9, in_capsule(BLOCK)), Status.INVALID_NAMESPACE),
        (Sqe(IoOpcode.WRITE, 1, 1, in_capsule(BLOCK), 600), Status.LBA_OUT_OF_RANGE),
        (Sqe(0x7E, 1, 1, in_capsule(BLOCK)), Status.INVALID_OPCODE),
    ],
)
def test_the_data_of_a_refused_capsule_are_read_and_dropped(
    storage: HeapStorage, sqe: Sqe, status: int
) -> None:
    _, io = make_io(storage)
    io.submit(sqe, b"z" * BLOCK)
    assert io.answer()[0].status == status
    assert not any(storage.memory)
    assert io.status(write(0, inside=True), pattern(1)) == 0


def test_a_failing_medium(storage: HeapStorage) -> None:
    _, io = make_io(storage)
    storage.failure = StorageError(Status.UNRECOVERED_READ_ERROR, "planted")
    cqe, data = io.command(read(0))
    assert (cqe.status, cqe.do_not_retry, data) == (Status.UNRECOVERED_READ_ERROR, False, b"")
    storage.failure = StorageError(Status.WRITE_FAULT, "planted", do_not_retry=True)
    cqe, _ = io.command(write(0), pattern(1))
    assert (cqe.status, cqe.do_not_retry) == (Status.WRITE_FAULT, True)


@pytest.mark.expects_log("command with opcode")
def test_a_bug_ends_one_command_only(storage: HeapStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    _, io = make_io(storage)

    def broken(*_: object) -> memoryview:
        raise ZeroDivisionError

    monkeypatch.setattr(storage, "read", broken)
    assert io.status(read(0)) == Status.INTERNAL_ERROR
    assert io.status(write(0), pattern(1)) == 0


# --- slow and hung drives ----------------------------------------


def test_a_slow_drive_holds_up_nobody_else(storage: HeapStorage) -> None:
    fast = HeapStorage(8)
    admin, io = make_io(storage, fast)
    storage.delay = 0.5
    io.submit(read(0, cid=1))
    assert not io.pdus
    assert io.queue.deadline() == 100.5
    assert io.status(read(0, nsid=2, cid=2)) == 0
    assert admin.status(Sqe(AdminOpcode.KEEP_ALIVE, 1, 0, transport(0))) == 0
    io.run(100.4)
    assert not io.pdus
    io.run(100.5)
    assert io.answer()[0].cid == 1
    assert len(storage.admitted) == 1, "a command is admitted once"


def test_a_hung_drive_answers_when_it_is_healed(storage: HeapStorage) -> None:
    target, _ = make_target(storage)
    _, io = open_io(target)
    storage.held = True
    io.submit(read(0, cid=1))
    io.submit(write(0, inside=True, cid=2), pattern(1))
    io.run(1000.0)
    assert not io.pdus
    storage.held = False
    target.poke()
    assert io.woken
    io.run(1000.0)
    cids = {pdu.cid if isinstance(pdu, C2HData) else pdu.cqe.cid for pdu, _ in io.pdus}  # type: ignore[union-attr]
    assert cids == {1, 2}


def test_a_command_on_a_hung_drive_can_be_aborted(storage: HeapStorage) -> None:
    admin, io = make_io(storage)
    storage.held = True
    io.submit(read(0, cid=33))
    abort = Sqe(AdminOpcode.ABORT, 1, 0, transport(0), cdw10=1 | 33 << 16)
    assert admin.command(abort)[0].result == 0
    assert io.woken
    io.run()
    assert io.answer()[0].status == Status.ABORT_REQUESTED
    assert admin.command(abort)[0].result == 1, "it has ended, so it cannot be aborted"
    storage.held = False
    io.run()
    assert not io.pdus
    assert io.status(read(0, cid=33)) == 0


def test_commands_in_flight_on_a_removed_drive_fail(storage: HeapStorage) -> None:
    target, subsystem = make_target(storage)
    _, io = open_io(target)
    storage.held = True
    io.submit(read(0, cid=1))
    target.remove_namespace(subsystem, 1)
    io.run()
    assert io.answer()[0].status == Status.INVALID_NAMESPACE
    assert io.status(read(0)) == Status.INVALID_NAMESPACE
    storage.held = False
    target.attach(subsystem, Namespace(1, storage))
    assert io.status(read(0)) == 0


def test_a_namespace_that_came_back_does_not_answer_old_commands(storage: HeapStorage) -> None:
    target, subsystem = make_target(storage)
    _, io = open_io(target)
    storage.delay = 5.0
    io.submit(read(0, cid=1))
    target.remove_namespace(subsystem, 1)
    target.attach(subsystem, Namespace(1, HeapStorage()))
    io.run(106.0)
    assert io.answer()[0].status == Status.INVALID_NAMESPACE


# --- bounds ------------------------------------------------------


def test_a_command_id_in_use_is_refused(storage: HeapStorage) -> None:
    _, io = make_io(storage)
    storage.held = True
    io.submit(read(0, cid=1))
    assert io.status(read(1, cid=1)) == Status.COMMAND_ID_CONFLICT
    assert len(storage.admitted) == 1


def test_more_commands_than_the_queue_has_end_the_connection(storage: HeapStorage) -> None:
    target, _ = make_target(storage)
    _, io = open_io(target, sqsize=3)
    storage.held = True
    for cid in range(4):
        io.submit(read(0, cid=cid))
    assert not io.queue.ending
    io.submit(read(0, cid=9))
    assert io.termination().fatal_error_status == 2


def test_a_host_that_does_not_read_is_not_served_from_memory(storage: HeapStorage) -> None:
    _, io = make_io(storage)
    commands = b"".join(encode_header(CapsuleCmd(read(0, 257, cid=cid))) for cid in range(20))
    rest = memoryview(commands)
    while rest:
        buffer = io.queue.next_buffer()
        count = min(len(buffer), len(rest))
        buffer[:count] = rest[:count]
        io.queue.received(count, io.now)
        rest = rest[count:]
    assert len(storage.admitted) == 1, "the others wait until the first answer is out"
    io.collect()
    assert len(io.pdus) == 20


def test_short_answers_may_wait_while_data_are_certain_to_come(storage: HeapStorage) -> None:
    _, io = make_io(storage)
    data = bytes(3 * BLOCK)
    capsules = [CapsuleCmd(write(at, 3, inside=True, cid=at), len(data)) for at in (0, 4)]
    stream = b"".join(b"".join(encode_pdu(capsule, data=(data,))) for capsule in capsules)
    buffer = io.queue.next_buffer()
    assert len(buffer) >= len(stream)
    cut = len(stream) - 1000
    buffer[:cut] = stream[:cut]
    assert not io.queue.may_hold_answers, "there are none"
    io.queue.received(cut, io.now)
    assert io.queue.has_outgoing
    assert io.queue.may_hold_answers
    assert io.queue.payload_left == 1000
    io.queue.session.close("time is up")
    assert not io.queue.may_hold_answers, "there is something else to do"
    io.queue.session.close_reason = None
    io.queue.next_buffer()[:] = stream[cut:]
    io.queue.received(1000, io.now)
    assert not io.queue.may_hold_answers, "nothing is certain to come any more"
    io.collect()
    assert len(io.pdus) == 2


def test_a_host_that_never_reads_does_not_hold_a_connection_that_has_ended(storage: HeapStorage) -> None:
    target, subsystem = make_target(storage)
    admin, io = open_io(target)
    buffer = io.queue.next_buffer()
    buffer[:72] = encode_header(CapsuleCmd(read(0, 257)))
    io.queue.received(72, io.now)
    assert io.queue.outgoing()
    admin.queue.connection_lost()
    io.queue.run(200.0)
    assert io.queue.ending
    assert not io.queue.finished, "what is under way may still leave"
    assert io.queue.deadline() == 205.0
    io.queue.run(204.9)
    assert not io.queue.finished
    io.queue.run(205.0)
    assert io.queue.finished
    assert subsystem.namespaces
