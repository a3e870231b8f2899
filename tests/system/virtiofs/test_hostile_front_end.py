"""Front-ends and guests that hold on to what they share with the device, ask for too much, or never stop."""

from __future__ import annotations

import errno
import fcntl
import os
import select
import socket
import threading
import time
from pathlib import Path

import pytest

from agent.bench.virtio_driver import fuse_wire as wire
from agent.bench.virtio_driver.guest_memory import Room
from agent.bench.virtio_driver.machine import Machine
from agent.fs.virtiofs import queue_worker
from agent.fs.virtiofs.back_end import PeerError
from agent.fs.virtiofs.front_end_descriptors import Call
from agent.fs.virtiofs.guest_books import GuestBooks
from agent.virtio import inflight
from agent.virtio.vhost_user import Request, encode_message
from tests.support.fs.guest_requests import attributes_of, create, forget
from tests.support.fs.memory_filesystem import MemoryFileSystem
from tests.support.fs.virtiofs_served import QUEUES, Gate, served, started
from tests.support.waiting import wait_until

FULL = 0xFFFF_FFFF_FFFF_FFFE
"""The most that an eventfd counts: the next write to it would sleep."""


def make_blocking(event: int) -> None:
    fcntl.fcntl(event, fcntl.F_SETFL, fcntl.fcntl(event, fcntl.F_GETFL) & ~os.O_NONBLOCK)


def is_writable(event: int) -> bool:
    poller = select.poll()
    poller.register(event, select.POLLOUT)
    return bool(poller.poll(0))


def fill(event: int) -> None:
    """Only while nobody else reads or writes it."""
    make_blocking(event)
    poller = select.poll()
    poller.register(event, select.POLLIN)
    if poller.poll(0):
        os.eventfd_read(event)
    os.eventfd_write(event, FULL)


class TestEventsThatBlock:
    """An eventfd's flags are the file's, and so the front-end's, too."""

    def test_a_kick(self, path: Path) -> None:
        with started(path) as machine:
            for queue in machine.queues:
                make_blocking(queue.kick)
            client = machine.client
            for _ in range(20):
                attributes_of(client, 1)
            machine.stop()
        with started(path) as machine:
            attributes_of(machine.client, 1)

    def test_a_call_that_is_full(self, path: Path) -> None:
        """The thread that calls sleeps; it is the front-end's own, and the end of the connection frees it."""
        with started(path) as machine:
            idle = machine.queues[1]
            attributes_of(machine.client, 1)
            fill(idle.call)
            idle.ring.want_interrupts()
            before = idle.ring.used_index
            machine.client.start(wire.Opcode.GETATTR, 1, bytes(16), 104, idle)
            wait_until(lambda: idle.ring.used_index == before + 1)
            machine.client.start(wire.Opcode.GETATTR, 1, bytes(16), 104, machine.queues[2]).body()
            machine.lose()
        with started(path) as machine:
            attributes_of(machine.client, 1)


class TestCall:
    def test_a_sleeper_is_freed_and_a_call_is_not_lost(self) -> None:
        call, event = Call(), os.eventfd(0)
        try:
            call.use(event)
            os.eventfd_write(event, FULL)
            sleeper = threading.Thread(target=call.signal)
            sleeper.start()
            while sleeper.is_alive():
                call.free()
                sleeper.join(0.01)
            assert os.eventfd_read(event) == 1
            os.eventfd_write(event, 7)
            call.free()
            assert os.eventfd_read(event) == 7
        finally:
            os.close(event)
            call.close()

    def test_another_descriptor_waits_for_the_sleeper(self) -> None:
        call, event, other = Call(), os.eventfd(0), os.eventfd(0)
        try:
            call.use(event)
            os.eventfd_write(event, FULL)
            sleeper = threading.Thread(target=call.signal)
            sleeper.start()
            # Else it may signal the other one, which is right as well.
            wait_until(call._lock.locked, what="the sleeper to be at it")
            call.use(other)
            sleeper.join(60)
            assert not sleeper.is_alive()
            call.signal()
            assert os.eventfd_read(other) == 1
        finally:
            os.close(event)
            os.close(other)
            call.close()

    def test_one_that_keeps_its_thread_is_refused(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("agent.fs.virtiofs.front_end_descriptors.CALL_SECONDS", 0.1)
        call, event = Call(), os.eventfd(0)
        try:
            with call._lock, pytest.raises(PeerError):
                call.use(event)
        finally:
            os.close(event)
            call.close()


def test_more_than_was_negotiated_is_refused(path: Path) -> None:
    with Machine(path, request_queues=1, memory_bytes=8 << 20, pages=False) as machine:
        machine.start(patience=30)
        client = machine.client
        client.init()
        node, handle = create(client, 1, b"file")
        room = machine.memory.room(2 << 20)
        for size, code in (((1 << 20) + 1, errno.EINVAL), (2 << 20, errno.EINVAL), (1 << 20, 0)):
            part = room.part(0, size)
            for ask in (
                lambda part=part: client.start_write(node.number, handle, 0, client.laid(part)).finish(),
                lambda part=part: client.start_read(node.number, handle, 0, client.laid(part)).finish(),
            ):
                if not code:
                    ask()
                    continue
                with pytest.raises(OSError) as refused:
                    ask()
                assert refused.value.errno == code


@pytest.mark.expects_log("still at its last operation")
def test_a_slow_operation_is_waited_for_and_the_device_stays(
    tmp_path: Path, tree: MemoryFileSystem, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queue_worker, "SLOW_SECONDS", 0.05)
    gate = Gate(tree)
    with served(tmp_path / "fs.sock", gate) as door:
        with started(tmp_path / "fs.sock") as machine:
            node, handle = create(machine.client, 1, b"slow")
            room: Room = machine.memory.room(4096)
            gate.ajar.clear()
            machine.client.start_write(node.number, handle, 0, machine.client.laid(room))
            wait_until(lambda: gate.waiting == 1)
            machine.lose()
            del room
        assert not door.wait(0.3)
        gate.ajar.set()
        with started(tmp_path / "fs.sock") as machine:
            attributes_of(machine.client, 1)


@pytest.mark.expects_log("front-end")
def test_a_flood_of_messages_does_not_keep_the_door_from_stopping(
    tmp_path: Path, tree: MemoryFileSystem
) -> None:
    over, flooded = threading.Event(), threading.Event()

    def flood() -> None:
        messages = encode_message(Request.SET_OWNER) * 1000
        with socket.socket(socket.AF_UNIX) as asking:
            asking.connect(str(tmp_path / "fs.sock"))
            while not over.is_set():
                try:
                    asking.sendall(messages)
                except OSError:
                    return
                flooded.set()

    with served(tmp_path / "fs.sock", tree) as door:
        flooding = threading.Thread(target=flood)
        flooding.start()
        try:
            assert flooded.wait(30)
            began = time.monotonic()
            door.stop()
            assert time.monotonic() - began < 10
        finally:
            over.set()
            flooding.join()


def test_a_forget_that_was_carried_out_is_not_counted_again(tmp_path: Path, tree: MemoryFileSystem) -> None:
    """As after a kill between the deed and its completion: used idx not moved, the chain in flight."""
    path = tmp_path / "fs.sock"
    with Machine(path, request_queues=QUEUES) as machine:
        client = machine.client
        with served(path, tree, books=GuestBooks(tmp_path / "books")):
            machine.start(patience=30)
            client.init()
            node, handle = create(client, 1, b"forgotten")
            client.release(node.number, handle)
            client.lookup(1, b"forgotten")
            forget(client, node.number)
            wait_until(lambda: tree.nodes[node.number].lookups == 1)
            client._desks.clear()  # so that the request stays where it lies
            machine.lose()
        area, descriptor = machine.front_end.inflight or pytest.fail("no inflight area")
        content = bytearray(os.pread(descriptor, area.mmap_size, 0))
        words = memoryview(content).cast("H")
        words[inflight.USED_IDX_WORD] -= 1
        content_head = words[inflight.LAST_BATCH_HEAD_WORD]
        machine.queues[0].ring.used.view.cast("H")[1] -= 1
        words.release()
        content[inflight.in_flight_byte(content_head)] = 1
        os.pwrite(descriptor, content, 0)
        with served(path, tree, books=GuestBooks(tmp_path / "books")):
            machine.start(patience=30)
            assert attributes_of(client, node.number).number == node.number
            assert tree.nodes[node.number].lookups == 1
            machine.lose()


def test_a_machine_is_closed_once(path: Path) -> None:
    machine = Machine(path)
    fds = (machine.queues[0].kick, machine.queues[0].call)
    machine.close()
    taken = [os.eventfd(0) for _ in range(8)]
    try:
        machine.close()
        for event in taken:
            os.eventfd_write(event, 1)
        assert set(fds) & set(taken), "the numbers were given out again, so a second close would have shown"
    finally:
        for event in taken:
            os.close(event)
