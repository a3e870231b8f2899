"""When an enclosure answers a long Write: after what is there already, but never after what is to come."""

from __future__ import annotations

import socket

import pytest

from nvmeof.tcp.pdu import CapsuleCmd
from nvmeof.wire.sqe import IoOpcode, Sqe
from tests.support.nvme.entries import in_capsule
from tests.support.nvme.heap_storage import HeapStorage
from tests.support.nvme.pdus import encode_pdu
from tests.support.nvme.socket_host import answer, io_queue

BLOCK = 4096
LONG = 64


def write(cid: int, slba: int, data: bytes) -> bytes:
    sqe = Sqe(IoOpcode.WRITE, cid, 1, in_capsule(len(data)), slba, 0, len(data) // BLOCK - 1)
    return b"".join(encode_pdu(CapsuleCmd(sqe, len(data)), data=(data,)))


@pytest.mark.parametrize("behind", [0, 1, 72, 1000, 72 + BLOCK - 1, 72 + BLOCK])
def test_a_long_write_is_answered_however_much_of_the_next_command_is_there(behind: int) -> None:
    storage = HeapStorage(LONG + 1)
    long, short = b"\x35" * (LONG * BLOCK), b"\x53" * BLOCK
    following = write(2, LONG, short)
    with io_queue(storage, in_capsule_bytes=LONG * BLOCK) as sock:
        sock.sendall(write(1, 0, long) + following[:behind])
        first = answer(sock)
        assert (first.cid, first.status) == (1, 0)
        sock.sendall(following[behind:])
        second = answer(sock)
        assert (second.cid, second.status) == (2, 0)
    assert storage.memory[: (LONG + 1) * BLOCK] == long + short


def test_a_host_that_hangs_up_behind_a_long_write_has_it_stored() -> None:
    storage = HeapStorage(LONG)
    long = b"\x35" * (LONG * BLOCK)
    with io_queue(storage, in_capsule_bytes=LONG * BLOCK) as sock:
        sock.sendall(write(1, 0, long))
        sock.shutdown(socket.SHUT_WR)
        assert answer(sock).status == 0
        assert sock.recv(1) == b""
    assert storage.memory[: LONG * BLOCK] == long
