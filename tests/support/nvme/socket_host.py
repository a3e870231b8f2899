"""A host on a real socket that sends exactly the bytes that a test wants to an I/O queue of a listener."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import closing, contextmanager

from nvmeof.controller.settings import ControllerSettings
from nvmeof.controller.storage import Storage
from nvmeof.controller.tcp_rules import TcpSettings
from nvmeof.tcp.pdu import CapsuleCmd, Digests, ICReq
from nvmeof.transport.tcp_listener import TcpListener
from nvmeof.wire.cqe import Cqe, decode_cqe_untrusted
from nvmeof.wire.fabrics import Connect, ConnectData
from tests.support.nvme.entries import fabrics_entry
from tests.support.nvme.pdus import encode_header, encode_pdu
from tests.support.nvme.raw_host import HOST, HOST_ID, SUBSYSTEM, make_target, open_admin


@contextmanager
def io_queue(
    storage: Storage, *, in_capsule_bytes: int = 8192, data_digest: bool = False
) -> Iterator[socket.socket]:
    """A socket on which Connect of an I/O queue has succeeded; its namespace 1 is `storage`."""
    target, _ = make_target(storage, settings=ControllerSettings(in_capsule_bytes=in_capsule_bytes))
    _admin, cntlid = open_admin(target)
    data = ConnectData(HOST_ID, cntlid, SUBSYSTEM, HOST).encode()
    with (
        closing(TcpListener(target, TcpSettings(), "127.0.0.1", 0)) as listener,
        socket.create_connection(("127.0.0.1", listener.port), timeout=10) as sock,
    ):
        sock.sendall(encode_header(ICReq(data_digest=data_digest)))
        assert exactly(sock, 128)[0] == 1
        sqe = fabrics_entry(Connect(1, 31, 0, cattr=4), 0)
        digests = Digests(False, data_digest)
        sock.sendall(b"".join(encode_pdu(CapsuleCmd(sqe, len(data)), digests, data=(data,))))
        assert answer(sock).status == 0
        yield sock


def answer(sock: socket.socket) -> Cqe:
    """The next completion, which has to be the next PDU."""
    pdu = exactly(sock, 24)
    assert pdu[0] == 5
    return decode_cqe_untrusted(pdu[8:])


def exactly(sock: socket.socket, length: int) -> bytes:
    """So many bytes, or fewer at the end. (MSG_WAITALL does not wait on a socket with a timeout.)"""
    data = bytearray()
    while len(data) < length and (piece := sock.recv(length - len(data))):
        data += piece
    return bytes(data)
