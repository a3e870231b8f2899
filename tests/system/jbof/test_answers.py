"""When an enclosure answers a long Write: after what is there already, but never after what is to come."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import closing, contextmanager

import pytest

from emulator.jbof.tcp_listener import TcpListener
from nvmeof.controller.settings import ControllerSettings
from nvmeof.controller.tcp_rules import TcpSettings
from nvmeof.tcp.pdu import CapsuleCmd, ICReq, encode_header, encode_pdu
from nvmeof.wire.cqe import Cqe, decode_cqe_untrusted
from nvmeof.wire.fabrics import Connect, ConnectData
from nvmeof.wire.sgl import in_capsule
from nvmeof.wire.sqe import IoOpcode, Sqe
from tests.support.heap_storage import HeapStorage
from tests.support.raw_host import HOST, HOST_ID, SUBSYSTEM, make_target, open_admin

BLOCK = 4096
LONG = 64


@contextmanager
def io_queue(storage: HeapStorage) -> Iterator[socket.socket]:
    """A socket on which Connect of an I/O queue has succeeded."""
    target, _ = make_target(storage, settings=ControllerSettings(in_capsule_bytes=LONG * BLOCK))
    _admin, cntlid = open_admin(target)
    data = ConnectData(HOST_ID, cntlid, SUBSYSTEM, HOST).encode()
    with (
        closing(TcpListener(target, TcpSettings(), "127.0.0.1", 0)) as listener,
        socket.create_connection(("127.0.0.1", listener.port), timeout=10) as sock,
    ):
        sock.sendall(encode_header(ICReq()))
        assert sock.recv(128, socket.MSG_WAITALL)[0] == 1
        sqe = Connect(1, 31, 0, cattr=4).sqe(0)
        sock.sendall(b"".join(encode_pdu(CapsuleCmd(sqe, len(data)), data=(data,))))
        assert answer(sock).status == 0
        yield sock


def answer(sock: socket.socket) -> Cqe:
    pdu = sock.recv(24, socket.MSG_WAITALL)
    assert pdu[0] == 5
    return decode_cqe_untrusted(pdu[8:])


def write(cid: int, slba: int, data: bytes) -> bytes:
    sqe = Sqe(IoOpcode.WRITE, cid, 1, in_capsule(len(data)), slba, 0, len(data) // BLOCK - 1)
    return b"".join(encode_pdu(CapsuleCmd(sqe, len(data)), data=(data,)))


@pytest.mark.parametrize("behind", [0, 1, 72, 1000, 72 + BLOCK - 1, 72 + BLOCK])
def test_a_long_write_is_answered_however_much_of_the_next_command_is_there(behind: int) -> None:
    storage = HeapStorage(LONG + 1)
    long, short = b"\x35" * (LONG * BLOCK), b"\x53" * BLOCK
    following = write(2, LONG, short)
    with io_queue(storage) as sock:
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
    with io_queue(storage) as sock:
        sock.sendall(write(1, 0, long))
        sock.shutdown(socket.SHUT_WR)
        assert answer(sock).status == 0
        assert sock.recv(1) == b""
    assert storage.memory[: LONG * BLOCK] == long
