"""Processes that serve queues of a device, and die at the worst moment, or have a front-end that means it."""

from __future__ import annotations

import collections
import fcntl
import gc
import itertools
import os
import select
import socket
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest

from agent.bench.virtio_driver.front_end import PROTOCOL_FEATURES
from agent.bench.virtio_driver.machine import Machine
from agent.bench.virtio_driver.request_queue import RequestQueue
from agent.fs.interface import NOBODY, LockOwner
from agent.virtio.vhost_user import ProtocolFeature
from tests.support.fs.device_and_readers import DeviceAndReaders
from tests.support.fs.guest_requests import create
from tests.support.fs.memory_filesystem import MemoryFileSystem
from tests.support.fs.reader_process import DIED, pattern
from tests.support.waiting import wait_until

F_SEAL_FUTURE_WRITE = 0x0010
FULL = 0xFFFF_FFFF_FFFF_FFFE
"""The most that an eventfd counts: the next write to it would sleep."""
READ_BY_READERS = 2
"""The node that readers read: the first that is made."""


class CountingTree(MemoryFileSystem):
    """How often each place of a file was written."""

    def __init__(self) -> None:
        super().__init__()
        self.writes: collections.Counter[tuple[int, int]] = collections.Counter()

    def write(self, ino: int, handle: int, offset: int, data: memoryview, by: LockOwner = NOBODY) -> int:
        self.writes[ino, offset] += 1
        return super().write(ino, handle, offset, data, by)


@pytest.fixture
def tree() -> CountingTree:
    return CountingTree()


@pytest.fixture
def device(tmp_path: Path, tree: CountingTree) -> Iterator[DeviceAndReaders]:
    """The first request queue is the first process', the second a reader's."""
    with DeviceAndReaders(tmp_path / "fs.sock", tree, [0, 1], READ_BY_READERS) as made:
        yield made


class Guest:
    """A machine with the file that readers read, and the queue that is with the reader."""

    def __init__(self, device: DeviceAndReaders, *, notes: bool = True) -> None:
        features = PROTOCOL_FEATURES if notes else PROTOCOL_FEATURES & ~ProtocolFeature.INFLIGHT_SHMFD
        self.machine = Machine(
            device.path, request_queues=2, memory_bytes=16 << 20, protocol_features=features
        )
        self.machine.start(patience=30)
        self.client = self.machine.client
        self.client.init()
        node, self.handle = create(self.client, 1, b"read by readers")
        assert node.number == READ_BY_READERS
        self.room = self.machine.memory.room(8192)

    @property
    def queue(self) -> RequestQueue:
        return self.machine.queues[2]

    def get(self, offset: int) -> None:
        laid = self.client.laid(self.room)
        assert self.client.start_read(READ_BY_READERS, self.handle, offset, laid, self.queue).finish() == 8192
        assert self.room.view == pattern(offset, 8192)

    def is_called(self, seconds: float = 0.0) -> bool:
        poller = select.poll()
        poller.register(self.queue.call, select.POLLIN)
        return bool(poller.poll(seconds * 1000))


@pytest.fixture
def guest(device: DeviceAndReaders) -> Iterator[Guest]:
    made = Guest(device)
    with made.machine:
        yield made


def test_a_call_that_died_with_its_reader_is_made_up_for(device: DeviceAndReaders, guest: Guest) -> None:
    """The used idx has moved, so nothing is served again: the driver would sleep for ever."""
    process = device.start_reader(1, "call", passes=1)
    device.wait_by_readers(2)
    wait_until(guest.is_called, what="the call of the queue's start")
    os.eventfd_read(guest.queue.call)
    ring = guest.queue.ring
    before = ring.used_index
    ring.want_interrupts()
    laid = guest.client.laid(guest.room)
    call = guest.client.start_read(READ_BY_READERS, guest.handle, 2, laid, guest.queue)
    assert process.wait(30) == DIED
    assert ring.used_index == before + 1
    assert guest.is_called(30)
    assert call.finish() == 8192


@pytest.mark.parametrize("death", ["push", "carried", "done"])
@pytest.mark.parametrize("notes", [True, False])
def test_what_was_carried_is_done_once(
    device: DeviceAndReaders, tree: CountingTree, death: str, notes: bool
) -> None:
    guest = Guest(device, notes=notes)
    client = guest.client
    with guest.machine:
        file, handle = create(client, 1, b"written once")
        laid = client.laid(guest.room)
        offsets = itertools.count(0, 8192)
        for _ in range(3):
            process = device.start_reader(1, death, passes=5)
            while process.poll() is None:
                offset = next(offsets)
                guest.room.view[:] = pattern(offset, 8192)
                body = client.start_write(file.number, handle, offset, laid, guest.queue).body()
                assert struct.unpack_from("<I", body) == (8192,)
                assert tree.writes[file.number, offset] == 1
            assert process.returncode == DIED
            device.wait_by_readers()


@pytest.mark.expects_log("it is not for writing; the queue is stopped")
def test_memory_that_is_sealed_later_ends_no_reader(device: DeviceAndReaders, guest: Guest) -> None:
    """What the first process has mapped a reader may map no more: F_SEAL_FUTURE_WRITE. Others go on by it."""
    fcntl.fcntl(guest.machine.memory.regions[0].descriptor, fcntl.F_ADD_SEALS, F_SEAL_FUTURE_WRITE)
    process = device.start_reader()
    served = device.door.device.places._served
    wait_until(lambda: served[2].worker is None, what="the queue to be stopped")
    guest.machine.lose()
    other = Guest(device)
    with other.machine:
        device.wait_by_readers(2)
        other.get(2)
    assert process.poll() is None


def test_a_reader_that_was_given_up_serves_no_more(device: DeviceAndReaders, guest: Guest) -> None:
    """Two that serve one ring are worse than none. So the end of the link ends the process."""
    process = device.start_reader()
    device.wait_by_readers(2)
    guest.get(2)
    places = device.door.device.places
    assert places.links is not None
    link = places.links.ready(1)
    assert link is not None
    link.is_gone = True  # as where a message could not be sent
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        places.links.come(2, ours)  # so that the door looks
        assert process.wait(30)
        device.wait_by_readers()
    assert guest.client.walk("read by readers").number == READ_BY_READERS


def test_a_call_that_blocks_keeps_nobody_but_its_queue(device: DeviceAndReaders, guest: Guest) -> None:
    """The eventfd is full and blocks. What the reader has left is completed, and the door is not kept."""
    process = device.start_reader(1, "carried", passes=0)
    device.wait_by_readers(2)
    wait_until(guest.is_called, what="the call of the queue's start")
    os.eventfd_read(guest.queue.call)
    os.set_blocking(guest.queue.call, True)
    os.eventfd_write(guest.queue.call, FULL)
    ring = guest.queue.ring
    ring.want_interrupts()
    before = ring.used_index
    laid = guest.client.laid(guest.room)
    guest.client.start_read(READ_BY_READERS, guest.handle, 1, laid, guest.queue)
    assert process.wait(30) == DIED
    wait_until(lambda: ring.used_index == before + 1, what="the answer")
    guest.machine.lose()
    with Guest(device).machine:
        pass


def test_a_guest_that_has_ended_takes_no_memory(device: DeviceAndReaders) -> None:
    """What a process of the agent maps the machine does not get back, though QEMU has ended."""
    guest = Guest(device)
    process = device.start_reader()
    device.wait_by_readers(2)
    inode = os.fstat(guest.machine.memory.regions[0].descriptor).st_ino

    def is_mapped(pid: int) -> bool:
        lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
        return any(line.split()[4] == str(inode) for line in lines)

    for number in range(4):
        guest.get(2 * number)
        guest.client.walk("read by readers")
    assert is_mapped(process.pid)
    guest.machine.close()
    del guest
    with Guest(device).machine as other:
        pass  # the door has let go of the one before
    assert other.connection is None
    wait_until(lambda: not is_mapped(process.pid), what="the reader to let go of it")
    wait_until(
        lambda: gc.collect() >= 0 and not is_mapped(os.getpid()), what="the first process to let go of it"
    )
