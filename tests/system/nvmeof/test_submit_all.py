"""Commands that leave together, where the queue has no room for all of them."""

from __future__ import annotations

import socket
import time

import pytest

from nvmeof.errors import QueueFull
from nvmeof.host import commands
from nvmeof.host.tcp_queue import TcpQueue
from nvmeof.tcp.pdu import ICResp
from nvmeof.transport.tcp_queue import TcpHostQueue
from tests.support.nvme.pdus import encode_header

DEPTH = 4
CAPSULE_BYTES = 72


def test_those_that_have_an_id_have_left_and_the_others_were_not_submitted() -> None:
    ours, peer = socket.socketpair()
    with peer:
        peer.settimeout(20)
        peer.sendall(encode_header(ICResp(max_h2c_data=4096)))
        queue = TcpHostQueue(ours, TcpQueue(DEPTH, in_capsule_bytes=8192), 1 << 20)
        queue.wait_until_ready(time.monotonic() + 20.0)
        peer.recv(128, socket.MSG_WAITALL)
        reads = [commands.read(1, number, 1, memoryview(bytearray(4096))) for number in range(DEPTH + 2)]
        queue.submit(reads[0], more=True)
        with pytest.raises(QueueFull):
            queue.submit_all(reads[1:])
        assert [command.cid >= 0 for command in reads] == [True] * DEPTH + [False] * 2
        assert queue.in_flight == DEPTH
        sent = peer.recv(DEPTH * CAPSULE_BYTES, socket.MSG_WAITALL)
        assert len(sent) == DEPTH * CAPSULE_BYTES
        queue.close()
        assert all(command.lost for command in reads[:DEPTH])
