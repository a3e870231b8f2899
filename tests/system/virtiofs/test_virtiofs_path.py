"""virtio-fs over a real agent and enclosures: the values of the mount, and an agent that is killed.

The machine before the device stands for a QEMU that survives its agent: it keeps the rings and the inflight
area, and connects again. Its rings judge what comes back (each request once), the tests judge the bytes.
"""

from __future__ import annotations

import errno
import random
import struct
import threading
from collections.abc import Callable

import pytest

from agent.bench.virtio_driver.fuse_wire import Opcode
from agent.bench.virtio_driver.machine import Machine
from agent.bench.virtiofs_files import VirtiofsFiles
from host_shim.pool import Pool
from tests.support.fs.guest_requests import create
from tests.support.pool_up import PoolUp, wait_each_served
from tests.support.waiting import wait_until

VALUE = 200_000
OPTIONS = ("--virtiofs", "--drive-size", "256M", "--read-deadline-ms", "5000", "--drives", "1")


def content(key: bytes, size: int = VALUE) -> bytes:
    """What is stored under a key: derived from it, so that a reader can always tell."""
    return random.Random(key).randbytes(size)


def key(number: int) -> bytes:
    return number.to_bytes(16, "big")


def test_both_doors_lead_to_one_pool(pool_up: PoolUp, machine: Machine) -> None:
    with pool_up.pool() as by_mount, Pool("", files=VirtiofsFiles(machine)) as by_device:
        mounted, guest = by_mount.volume("kv"), by_device.volume("kv")
        for number in range(12):
            size = (1, 4095, VALUE, 262_144, 1 << 20)[number % 5]
            store, other = (mounted, guest) if number % 2 else (guest, mounted)
            assert store.put(key(number), content(key(number), size))
            wait_each_served(other, {key(number): content(key(number), size)})
        room = machine.memory.room(1 << 20)
        wait_until(lambda: guest.get_into(key(4), room.view) == 1 << 20, what="a value of 1 MiB")
        assert room.view == content(key(4), 1 << 20)
        assert guest.get_into(key(99), room.view) is None
        assert guest.exists([key(4), key(99)]) == [True, False]
        assert guest.delete([key(4)]) == [True]
        assert mounted.get(key(4)) is None
    name = pool_up.mount / "fs" / "a file"
    data = content(b"a file", 3 << 20)
    name.write_bytes(data)
    client = machine.client
    found = client.walk("fs/a file")
    assert found.size == len(data)
    handle = client.open(found.number)
    for offset in range(0, len(data), 1 << 20):
        assert client.read_into(found.number, handle, offset, room) == 1 << 20
        assert room.view == data[offset : offset + (1 << 20)]
    client.release(found.number, handle)
    folder = client.walk("fs").number
    made, handle = create(client, folder, b"of the guest")
    room.view[:] = content(b"guest", 1 << 20)
    assert client.write_from(made.number, handle, 0, room) == 1 << 20
    client.release(made.number, handle)
    assert (pool_up.mount / "fs" / "of the guest").read_bytes() == content(b"guest", 1 << 20)


class Guest:
    """Puts and gets on a few threads until told to stop."""

    def __init__(self, machine: Machine, seed: int, threads: int = 3) -> None:
        self._pool = Pool("", files=VirtiofsFiles(machine))
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self.wrong = self.hits = self.misses = 0
        self.stored: set[bytes] = set()
        self.failures: list[BaseException] = []
        self._threads = [
            threading.Thread(target=self._work, args=(random.Random(seed + number),))
            for number in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def _work(self, dice: random.Random) -> None:
        kv = self._pool.volume("kv")
        while not self._stop.is_set():
            wanted = key(dice.randrange(60))
            try:
                got = kv.get(wanted)
                stored = kv.put(wanted, content(wanted)) if got is None else False
            except BaseException as failure:
                self.failures.append(failure)
                return
            with self._lock:
                self.wrong += got is not None and got != content(wanted)
                self.hits += got is not None
                self.misses += got is None
                if stored:
                    self.stored.add(wanted)

    def progressed(self) -> None:
        """Until there were more hits."""
        before = self.hits
        wait_until(lambda: self.failures or self.hits > before + 5, 60, "more hits")
        assert not self.failures

    def end(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(60)
            assert not thread.is_alive(), "a call hangs"
        kv = self._pool.volume("kv")

        # What was acknowledged; an enclosure may have come back just now.
        wait_each_served(kv, {each: content(each) for each in self.stored})
        self._pool.close()
        assert not self.failures, self.failures
        assert not self.wrong


def killed_and_back(pool_up: PoolUp, machine: Machine, meanwhile: Callable[[], None] = lambda: None) -> None:
    """SIGKILL to the agent; `g35 up` starts another, which the machine finds."""
    old = pool_up.kill("agent-process")
    machine.lose()
    meanwhile()
    pool_up.wait_restarted("agent-process", old)
    machine.start(patience=60)


def test_an_orderly_stop_stores_no_half_of_a_value(pool_up: PoolUp, machine: Machine) -> None:
    """A guest is at writing a value and a file when its agent is told to end, and another takes its place."""
    client = machine.client
    room = machine.memory.room(1 << 16)
    room.view[:] = content(b"half", 1 << 16)
    volume, folder = client.walk("kv/kv").number, client.walk("fs").number
    value, writing = create(client, volume, b"half")
    assert client.write_from(value.number, writing, 0, room) == 1 << 16
    file, handle = create(client, folder, b"half")
    assert client.write_from(file.number, handle, 0, room) == 1 << 16
    whole, storing = create(client, volume, b"whole")
    assert client.write_from(whole.number, storing, 0, room) == 1 << 16
    client.start(Opcode.FSYNC, whole.number, struct.pack("<QII", storing, 0, 0), 0).finish()
    client.start(Opcode.FLUSH, whole.number, struct.pack("<QIIQ", storing, 0, 0, 0), 0).finish()
    client.release(whole.number, storing)
    pool_up.down()
    machine.lose()
    pool_up.start_again()
    pool_up.wait_connected(2)
    machine.start(patience=60)
    with pytest.raises(OSError) as lost:
        client.write_from(value.number, writing, 1 << 16, room)
    assert lost.value.errno == errno.EIO
    with pytest.raises(FileNotFoundError):
        client.lookup(volume, b"half")
    assert client.lookup(volume, b"whole").size == 1 << 16
    room.view[:] = bytes(1 << 16)
    assert client.read_into(file.number, handle, 0, room) == 1 << 16
    assert room.view == content(b"half", 1 << 16)


def test_an_agent_killed_under_load(pool_up: PoolUp, machine: Machine, seed: int) -> None:
    guest = Guest(machine, seed)
    try:
        guest.progressed()
        for _ in range(2):
            killed_and_back(pool_up, machine)
            guest.progressed()
    finally:
        guest.end()
    assert not any(queue.outstanding for queue in machine.queues)


def test_requests_that_the_dead_agent_had_are_answered_by_the_next(
    pool_up: PoolUp, machine: Machine, seed: int
) -> None:
    """Files are read when the enclosures hang, so all requests are in flight when the agent is killed."""
    client = machine.client
    folder = client.walk("fs").number
    room = machine.memory.room(1 << 20)
    nodes = []
    for number in range(6):
        node, handle = create(client, folder, b"file %d" % number)
        room.view[:] = content(key(number), 1 << 20)
        assert client.write_from(node.number, handle, 0, room) == 1 << 20
        client.release(node.number, handle)
        nodes.append((node.number, client.open(node.number)))
    for enclosure in range(2):
        pool_up.fault(enclosure, "hang", drive=0)
    rooms = [machine.memory.room(1 << 20) for _ in nodes]
    calls = [
        client.start_read(node, handle, 0, client.laid(into))
        for (node, handle), into in zip(nodes, rooms, strict=True)
    ]

    def heal() -> None:
        for enclosure in range(2):
            pool_up.fault(enclosure, "heal", drive=0)

    killed_and_back(pool_up, machine, heal)
    pool_up.wait_connected(2)
    for number, (call, into) in enumerate(zip(calls, rooms, strict=True)):
        try:
            assert call.finish() == 1 << 20
        except OSError:
            continue  # a handle that died with its agent; the answer came, and once
        assert into.view == content(key(number), 1 << 20)
    assert not any(queue.outstanding for queue in machine.queues)

    def is_whole(number: int) -> bool:
        """Or an error, as where a drive that hung until now is slow."""
        node = client.walk(f"fs/file {number}").number
        handle = client.open(node)
        try:
            assert client.read_into(node, handle, 0, room) == 1 << 20
        except OSError:
            return False
        finally:
            client.release(node, handle)
        assert room.view == content(key(number), 1 << 20)
        return True

    for number in range(6):
        wait_until(lambda number=number: is_whole(number), 30, "a file")  # type: ignore[misc]
