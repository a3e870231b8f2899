"""Who answers a mount while the process that serves it is away. A pair of sockets plays /dev/fuse."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Iterator

import pytest

from agent.fs.doors.stand_in import StandIn
from agent.fs.fuse.abi import IN_HEADER, INIT_FLAGS2, INIT_IN, INIT_OUT, OUT_HEADER, InitFlag, Opcode
from agent.fs.fuse.requests import FLUSH_IN, FORGET_IN
from agent.fs.fuse.session import WANTED, FuseSession
from agent.fs.interface import RootFileSystem

KERNEL = 40


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, StandIn]]:
    kernel, ours = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with kernel, ours:
        kernel.setblocking(False)
        yield kernel, StandIn(ours.fileno())


def request(opcode: Opcode, body: bytes, unique: int = 7) -> bytes:
    return IN_HEADER.pack(IN_HEADER.size + len(body), opcode, unique, 1, 0, 0, 1, 0) + body


def init() -> bytes:
    flags = int(WANTED | InitFlag.INIT_EXT)
    return request(
        Opcode.INIT, INIT_IN.pack(7, KERNEL, 1 << 20, flags & 0xFFFF_FFFF) + INIT_FLAGS2.pack(flags >> 32)
    )


def test_it_agrees_with_the_kernel_and_another_process_goes_on(ends: tuple[socket.socket, StandIn]) -> None:
    kernel, stand_in = ends
    assert stand_in.negotiated is None
    stand_in.answer_waiting()  # nothing waits
    kernel.send(init())
    stand_in.answer_waiting()
    answer = kernel.recv(4096)
    assert OUT_HEADER.unpack_from(answer) == (OUT_HEADER.size + INIT_OUT.size, 0, 7)
    agreed = stand_in.negotiated
    assert agreed is not None
    assert agreed.flags & InitFlag.MAX_PAGES
    session = FuseSession(RootFileSystem({}))
    session.resume(agreed)
    assert session.initialised.is_set()
    assert session.negotiated == agreed


def test_whoever_asks_hears_at_once_that_nobody_is_there(ends: tuple[socket.socket, StandIn]) -> None:
    kernel, stand_in = ends
    kernel.send(init())
    for unique in range(10, 14):
        kernel.send(request(Opcode.LOOKUP, b"kv\0", unique))
    kernel.send(request(Opcode.FORGET, FORGET_IN.pack(1)))
    kernel.send(request(Opcode.FLUSH, FLUSH_IN.pack(1, 1), 14))
    stand_in.answer_waiting()
    kernel.recv(4096)
    for unique in range(10, 15):
        assert OUT_HEADER.unpack(kernel.recv(4096)) == (OUT_HEADER.size, -errno.ENOTCONN, unique)
    with pytest.raises(BlockingIOError):
        kernel.recv(4096)


def test_what_is_no_request_is_left_alone(ends: tuple[socket.socket, StandIn]) -> None:
    kernel, stand_in = ends
    kernel.send(b"short")
    stand_in.answer_waiting()
    with pytest.raises(BlockingIOError):
        kernel.recv(4096)


def test_a_mount_that_is_gone_is_told() -> None:
    read, write = os.pipe()
    os.close(write)
    gone = StandIn(read)
    os.close(read)
    with pytest.raises(OSError, match=os.strerror(errno.EBADF)):
        gone.answer_waiting()
