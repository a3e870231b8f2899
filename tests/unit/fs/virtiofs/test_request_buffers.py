"""A chain as a request: what is copied, what is taken where it lies, and where the answer goes."""

from __future__ import annotations

import errno
from typing import NamedTuple

import pytest

from agent.fs.fuse.abi import Opcode
from agent.fs.interface import FACE_FILES, FACE_KV, FACE_SHIFT
from agent.fs.virtiofs.device import takes_scattered
from agent.fs.virtiofs.request_buffers import DIRECT_RUN_BYTES_LEAST, RequestBuffers
from agent.inline.scatter import Scatter, Target
from tests.support.fs.fuse_records import InHeader, OutHeader, ReadIn, WriteIn

VALUE = FACE_KV << FACE_SHIFT | 99_999
FILE = FACE_FILES << FACE_SHIFT | 7
TRANSFER = 1 << 20


class Taken(NamedTuple):
    message: memoryview
    received: int
    data: memoryview
    room: Target


def memory(size: int, fill: int = 0) -> memoryview:
    return memoryview(bytearray([fill]) * size)


def runs(*sizes: int) -> list[memoryview]:
    return [memory(size, number + 1) for number, size in enumerate(sizes)]


def request(opcode: int, body: bytes, node: int = VALUE) -> memoryview:
    header = InHeader(40 + len(body), opcode, 77, node, 0, 0, 0).encode()
    return memoryview(bytearray(header + body))


def read_of(size: int, node: int = VALUE) -> list[memoryview]:
    whole = request(Opcode.READ, ReadIn(1, 0, size).encode(), node)
    return [whole[:40], whole[40:]]


def answer(size: int) -> bytes:
    return OutHeader(16 + size, 0, 77).encode()


@pytest.fixture
def buffers() -> RequestBuffers:
    return RequestBuffers(TRANSFER, takes_scattered)


def test_arguments_are_ours_before_anybody_looks(buffers: RequestBuffers) -> None:
    chain = read_of(4096)
    taken = Taken(*buffers.take(chain, runs(16, 4096)))
    chain[1][:] = bytes(40)
    assert taken.received == 80
    assert ReadIn.decode_untrusted(taken.message, 40).size == 4096
    assert not buffers.bytes_copied


def test_a_read_into_one_run_is_in_the_guests_memory(buffers: RequestBuffers) -> None:
    writable = runs(16, 8192)
    taken = Taken(*buffers.take(read_of(8192), writable))
    assert isinstance(taken.room, memoryview)
    assert taken.room.obj is writable[1].obj
    taken.room[:5] = b"value"
    assert buffers.put([answer(5), taken.room[:5]]) == 21
    assert bytes(writable[1][:6]) == b"value\x02"
    assert OutHeader.decode_untrusted(writable[0]).length == 21
    assert not buffers.bytes_copied


def test_a_read_into_long_runs_is_scattered_and_not_copied(buffers: RequestBuffers) -> None:
    long = DIRECT_RUN_BYTES_LEAST
    writable = runs(16, long, 2 * long)
    taken = Taken(*buffers.take(read_of(3 * long), writable))
    assert isinstance(taken.room, Scatter)
    assert taken.room.runs == writable[1:]
    assert buffers.put([answer(3 * long)]) == 16 + 3 * long
    assert not buffers.bytes_copied


@pytest.mark.parametrize(
    ("node", "size"), [(VALUE, DIRECT_RUN_BYTES_LEAST // 2), (FILE, DIRECT_RUN_BYTES_LEAST)]
)
def test_short_runs_and_files_are_copied_and_counted(buffers: RequestBuffers, node: int, size: int) -> None:
    writable = runs(16, size, size)
    taken = Taken(*buffers.take(read_of(2 * size, node), writable))
    assert isinstance(taken.room, memoryview)
    taken.room[:] = b"\xaa" * (2 * size)
    assert buffers.put([answer(size + 1), taken.room[: size + 1]]) == 17 + size
    assert bytes(writable[1]) == b"\xaa" * size
    assert bytes(writable[2][:2]) == b"\xaa\x03"
    assert buffers.bytes_copied == size + 1


def test_the_data_of_a_write_lie_where_the_guest_has_them(buffers: RequestBuffers) -> None:
    head = request(Opcode.WRITE, WriteIn(1, 0, 6000, 0).encode())
    data = memory(6000, 9)
    taken = Taken(*buffers.take([head[:40], head[40:], data], runs(24)))
    assert taken.data.obj is data.obj
    assert len(taken.message) == 80
    assert taken.received == 6080
    assert not buffers.bytes_copied


def test_scattered_data_of_a_write_are_gathered_and_counted(buffers: RequestBuffers) -> None:
    head = request(Opcode.WRITE, WriteIn(1, 0, 300, 0).encode())
    whole = memoryview(bytearray(bytes(head) + b"a" * 100))
    taken = Taken(*buffers.take([whole, memory(200, 9)], runs(24)))
    assert bytes(taken.data) == b"a" * 100 + b"\x09" * 200
    assert buffers.bytes_copied == 300


def test_a_write_longer_than_a_transfer_is_cut(buffers: RequestBuffers) -> None:
    head = request(Opcode.WRITE, WriteIn(1, 0, 2 * TRANSFER, 0).encode())
    taken = Taken(*buffers.take([head, memory(TRANSFER), memory(TRANSFER)], runs(24)))
    assert len(taken.data) == TRANSFER


def test_headers_in_odd_pieces(buffers: RequestBuffers) -> None:
    whole = request(Opcode.LOOKUP, b"name\0")
    pieces = [whole[at : at + 7] for at in range(0, len(whole), 7)]
    writable = runs(3, 10, 40)
    taken = Taken(*buffers.take(pieces, writable))
    assert bytes(taken.message) == bytes(whole)
    assert buffers.put([answer(37), b"b" * 37]) == 53
    assert OutHeader.decode_untrusted(b"".join(writable)).unique == 77
    assert bytes(writable[2][3:]) == b"b" * 37


@pytest.mark.parametrize("sizes", [(), (15,), (16, 9)])
def test_too_little_room(buffers: RequestBuffers, sizes: tuple[int, ...]) -> None:
    buffers.take([request(Opcode.GETATTR, bytes(16))], runs(*sizes))
    assert buffers.put([answer(10), bytes(10)]) is None


def test_a_request_that_is_none(buffers: RequestBuffers) -> None:
    taken = Taken(*buffers.take([memory(39, 1)], runs(16)))
    assert (taken.received, len(taken.message)) == (39, 39)
    assert buffers.take([], [])[1] == 0
    refusal = OutHeader(16, -errno.EIO, 0).encode()
    assert buffers.put([refusal]) is None
