"""What a queue had sent ends with it: no kernel goes on repeating the writes of a process that is gone."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator

import pytest

from nvmeof.host import commands
from nvmeof.host.tcp_queue import TcpQueue
from nvmeof.tcp.pdu import ICResp
from nvmeof.transport.tcp_queue import TcpHostQueue, open_socket
from tests.support.nvme.pdus import encode_header
from tests.support.processes import Processes

RECEIVES = 4096
"""The peer's receive buffer; what is sent beyond it stays in the sender's kernel."""

SENDER = """
import sys, time
from contextlib import suppress
from nvmeof.transport.tcp_queue import open_socket
sock, total = open_socket("127.0.0.1", int(sys.argv[1]), 5.0), 0
sock.setblocking(False)
with suppress(BlockingIOError):
    while True:
        total += sock.send(bytes(65536))
print("sent", total, flush=True)
time.sleep(600)
"""


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.socket() as made:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVES)
        made.bind(("127.0.0.1", 0))
        made.listen(1)
        yield made


def drained(peer: socket.socket) -> tuple[int, bool]:
    """How many bytes came, and whether the connection was reset rather than closed."""
    total = 0
    while True:
        try:
            data = peer.recv(1 << 20)
        except ConnectionResetError:
            return total, True
        if not data:
            return total, False
        total += len(data)


def test_what_a_killed_process_had_sent_is_dropped(listener: socket.socket, processes: Processes) -> None:
    sender = processes.python("-c", SENDER, str(listener.getsockname()[1]))
    with listener.accept()[0] as peer:
        peer.settimeout(20)
        sent = int(sender.wait_for_line("sent").split()[1])
        sender.kill()
        came, was_reset = drained(peer)
    assert was_reset
    assert came < sent, "the rest lay in the send queue of a process that is gone"


@pytest.fixture
def queue_to(listener: socket.socket) -> Iterator[tuple[TcpHostQueue, socket.socket]]:
    """A queue that is ready, and the controller's end of it, which takes what comes and says no more."""
    with open_socket("127.0.0.1", listener.getsockname()[1], 5.0) as sock, listener.accept()[0] as peer:
        peer.settimeout(20)
        peer.sendall(encode_header(ICResp(max_h2c_data=4096)))
        queue = TcpHostQueue(sock, TcpQueue(4, in_capsule_bytes=8192), 1 << 20)
        queue.wait_until_ready(time.monotonic() + 20.0)
        assert len(peer.recv(128, socket.MSG_WAITALL)) == 128
        yield queue, peer
        queue.close()


@pytest.mark.parametrize("ends", ["closed", "abandoned and closed"])
def test_a_queue_with_a_write_in_flight_is_reset(
    queue_to: tuple[TcpHostQueue, socket.socket], ends: str
) -> None:
    queue, peer = queue_to
    write = commands.write(1, 0, 1, [bytes(4096)])
    queue.submit(write)
    if ends != "closed":
        queue.abandon(write)
    queue.close()
    assert drained(peer) == (72 + 4096, True)
    assert write.lost is not write.orphaned


def test_a_queue_that_owes_nothing_is_closed_in_order(queue_to: tuple[TcpHostQueue, socket.socket]) -> None:
    queue, peer = queue_to
    queue.close()
    assert drained(peer) == (0, False)


def test_the_last_word_to_a_controller_that_errs_arrives(
    queue_to: tuple[TcpHostQueue, socket.socket],
) -> None:
    queue, peer = queue_to
    flush = commands.flush(1)
    queue.submit(flush)
    peer.sendall(b"\xee" * 24)
    assert queue.wait(flush, time.monotonic() + 20.0)
    assert flush.lost
    came, was_reset = drained(peer)
    assert came > 72
    assert not was_reset
