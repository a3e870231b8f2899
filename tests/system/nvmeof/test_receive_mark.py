"""Long payloads wake their receiver seldom, and nothing that may come or fail leaves it asleep."""

from __future__ import annotations

import fcntl
import random
import select
import socket
import struct
import termios
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from nvmeof.host import commands
from nvmeof.host.command import Command
from nvmeof.host.tcp_queue import TcpQueue
from nvmeof.tcp.pdu import C2HData, CapsuleResp, Digests, ICResp
from nvmeof.transport.receive_mark import LONG_BYTES, MOST_BYTES, NONE, ReceiveMark
from nvmeof.transport.tcp_queue import TcpHostQueue, open_socket
from nvmeof.wire.cqe import Cqe
from tests.support.nvme.pdus import encode_header, encode_pdu
from tests.support.waiting import wait_until

MIB = 1 << 20
PATIENCE_S = 20.0
PLAIN, BOTH = Digests(), Digests(True, True)


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    """The receiver's and the sender's end of one connection."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        there = socket.create_connection(listener.getsockname(), timeout=PATIENCE_S)
        here = listener.accept()[0]
    with here, there:
        here.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("@ll", int(PATIENCE_S), 0))
        yield here, there


def waiting_bytes(sock: socket.socket) -> int:
    return int(struct.unpack("i", fcntl.ioctl(sock, termios.FIONREAD, bytes(4)))[0])


@contextmanager
def sending(work: Callable[[], None]) -> Iterator[None]:
    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield
    finally:
        thread.join()


def test_fewer_bytes_than_the_mark_wake_nobody(ends: tuple[socket.socket, socket.socket]) -> None:
    here, there = ends
    mark = ReceiveMark(here)
    assert mark.flags_for(MIB) == 0
    assert mark.bytes == MOST_BYTES
    poll = select.poll()
    poll.register(here, select.POLLIN)
    there.sendall(bytes(1000))
    wait_until(lambda: waiting_bytes(here) == 1000)
    assert poll.poll(0) == []
    mark.clear()
    assert poll.poll(0) != []


@pytest.mark.parametrize("size", [1, 4096, LONG_BYTES])
def test_a_short_rest_waits_for_all_of_itself(ends: tuple[socket.socket, socket.socket], size: int) -> None:
    mark = ReceiveMark(ends[0])
    mark.flags_for(MIB)
    assert mark.flags_for(size) == socket.MSG_WAITALL
    assert mark.bytes == NONE


@pytest.mark.parametrize("size", [LONG_BYTES + 1, 512 << 10, MIB, MIB + 4096])
def test_a_receive_ends_wherever_what_comes_is_cut(
    ends: tuple[socket.socket, socket.socket], size: int
) -> None:
    """A part that is taken at once leaves the mark or more to come: else the kernel never wakes."""
    here, there = ends
    mark = ReceiveMark(here)
    buffer = memoryview(bytearray(size))
    flags = mark.flags_for(size)
    assert mark.bytes * 2 <= size
    for cut in (1, mark.bytes - 1, mark.bytes, size // 2 + 1, size - 1):
        first = threading.Event()

        def send(cut: int = cut, first: threading.Event = first) -> None:
            there.sendall(bytes(cut))
            first.wait(PATIENCE_S)
            there.sendall(bytes(size - cut))

        with sending(send):
            wait_until(lambda cut=cut: waiting_bytes(here) >= min(cut, 32 << 10))  # type: ignore[misc]
            threading.Timer(0.02, first.set).start()
            got = 0
            while got < size:
                got += here.recv_into(buffer[got:], 0, mark.flags_for(size - got))
            flags = mark.flags_for(size)
    assert flags == 0


@contextmanager
def joined(digests: Digests = PLAIN) -> Iterator[tuple[TcpHostQueue, socket.socket]]:
    """A host's queue that is ready, and the controller's end of it."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        sock = open_socket("127.0.0.1", listener.getsockname()[1], PATIENCE_S)
        peer = listener.accept()[0]
    with sock, peer:
        peer.sendall(
            encode_header(ICResp(header_digest=digests.header, data_digest=digests.data, max_h2c_data=MIB))
        )
        queue = TcpHostQueue(sock, TcpQueue(8, digests=digests), 4 * MIB)
        queue.wait_until_ready(time.monotonic() + PATIENCE_S)
        yield queue, peer
        queue.close()


def submitted(queue: TcpHostQueue, count: int) -> list[Command]:
    reads = [commands.read(1, 0, 256, memoryview(bytearray(MIB))) for _ in range(count)]
    for command in reads:
        queue.submit(command)
    return reads


@pytest.mark.parametrize("digests", [PLAIN, BOTH], ids=["plain", "digests"])
def test_answers_of_several_commands_arrive_in_pieces(digests: Digests) -> None:
    dice = random.Random(21)
    data = [dice.randbytes(MIB) for _ in range(4)]
    with joined(digests) as (queue, peer):
        reads = submitted(queue, 4)
        stream = bytearray()
        for command, whole in zip(reads, data, strict=True):
            for offset in range(0, MIB, 384 << 10):  # the last of 256 KiB
                part = whole[offset : offset + (384 << 10)]
                last = offset + len(part) == MIB
                pdu = C2HData(command.cid, offset, len(part), last, False)
                stream += b"".join(encode_pdu(pdu, digests, data=[part]))
            stream += b"".join(encode_pdu(CapsuleResp(Cqe(command.cid)), digests))

        def send() -> None:
            sent = 0
            while sent < len(stream):
                size = dice.choice([1, 24, 4096, 100_000, 300_000, 700_000])
                peer.sendall(stream[sent : sent + size])
                sent += size

        with sending(send):
            for command, whole in zip(reads, data, strict=True):
                assert queue.wait(command, time.monotonic() + PATIENCE_S)
                command.check()
                assert command.data_in == whole


class CountedReceives:
    """A socket that counts how often it is received from."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self.count = 0

    def __getattr__(self, name: str) -> object:
        if name.startswith("recv"):
            self.count += 1
        return getattr(self._sock, name)


@pytest.mark.interpreted
@pytest.mark.parametrize(("size", "values", "receives"), [(4096, 8, 2), (16384, 3, 2), (28672, 2, 3)])
def test_answers_that_are_there_come_by_few_receives(size: int, values: int, receives: int) -> None:
    dice = random.Random(23)
    data = [dice.randbytes(size) for _ in range(values)]
    with joined() as (queue, peer):
        reads = [commands.read(1, 0, size // 4096, memoryview(bytearray(size))) for _ in data]
        for command in reads:
            queue.submit(command, more=command is not reads[-1])
        stream = bytearray()
        for command, whole in zip(reads, data, strict=True):
            stream += b"".join(encode_pdu(C2HData(command.cid, 0, size, True, True), PLAIN, data=[whole]))
        peer.sendall(stream)
        sock = queue._sock
        wait_until(lambda: waiting_bytes(sock) == len(stream))
        counted = CountedReceives(sock)
        queue._sock = counted  # type: ignore[assignment]
        for command, whole in zip(reads, data, strict=True):
            assert queue.wait(command, time.monotonic() + PATIENCE_S)
            command.check()
            assert command.data_in == whole
        assert counted.count <= receives


@pytest.mark.parametrize("ending", ["closes", "resets"])
def test_a_controller_that_dies_amid_a_payload_is_noticed(ending: str) -> None:
    with joined() as (queue, peer):
        (command,) = submitted(queue, 1)
        peer.sendall(encode_header(C2HData(command.cid, 0, MIB, True, True)) + bytes(1000))
        if ending == "resets":
            peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("@ii", 1, 0))
        else:
            peer.recv(1 << 16)  # with unread input it would be a reset as well
        threading.Timer(0.05, peer.close).start()
        began = time.monotonic()
        assert queue.wait(command, began + PATIENCE_S)
        assert command.lost
        assert time.monotonic() - began < PATIENCE_S / 2


def test_a_deadline_holds_amid_a_payload_and_the_queue_goes_on() -> None:
    with joined() as (queue, peer):
        late, other = submitted(queue, 2)
        peer.sendall(encode_header(C2HData(late.cid, 0, MIB, True, True)) + bytes(1000))
        began = time.monotonic()
        assert not queue.wait(late, began + 0.1)
        assert time.monotonic() - began < PATIENCE_S / 2
        queue.abandon(late)
        answer = b"".join(encode_pdu(CapsuleResp(Cqe(other.cid, status=2))))

        def send() -> None:
            peer.sendall(bytes(MIB - 1000))
            peer.sendall(answer)

        with sending(send):
            assert queue.wait(other, time.monotonic() + PATIENCE_S)
        assert other.status == 2
        assert queue.alive


def test_the_beginning_of_a_value_is_enough_for_who_asks_for_no_more() -> None:
    with joined() as (queue, peer):
        (command,) = submitted(queue, 1)
        peer.sendall(encode_header(C2HData(command.cid, 0, MIB, True, True)) + bytes(8192))
        assert queue.wait(command, time.monotonic() + PATIENCE_S, at_least=8192)
        assert command.received >= 8192
        assert not command.done
