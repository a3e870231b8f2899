"""Queues of a guest at a reader that dies: over a tree in memory, at a real socket, with real processes."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from agent.bench.virtio_driver.front_end import PROTOCOL_FEATURES
from agent.bench.virtio_driver.machine import Machine
from agent.virtio.vhost_user import ProtocolFeature
from tests.support.fs.device_and_readers import DeviceAndReaders
from tests.support.fs.guest_requests import attributes_of, create, unlink
from tests.support.fs.memory_filesystem import MemoryFileSystem
from tests.support.fs.virtiofs_served import QUEUES, Gate, contents, started
from tests.support.waiting import wait_until

WITHOUT_NOTES = PROTOCOL_FEATURES & ~ProtocolFeature.INFLIGHT_SHMFD


@pytest.fixture
def gate() -> Gate:
    return Gate(MemoryFileSystem())


@pytest.fixture
def device(tmp_path: Path, gate: Gate) -> Iterator[DeviceAndReaders]:
    """All request queues are a reader's, which carries every request."""
    with DeviceAndReaders(tmp_path / "fs.sock", gate, [1] * QUEUES) as made:
        yield made


@contextlib.contextmanager
def a_reader(device: DeviceAndReaders) -> Iterator[subprocess.Popen[bytes]]:
    process = device.start_reader()
    try:
        yield process
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize("features", [PROTOCOL_FEATURES, WITHOUT_NOTES], ids=["inflight", "without"])
def test_queues_come_and_go_with_their_reader(device: DeviceAndReaders, features: ProtocolFeature) -> None:
    with started(device.path, protocol_features=features) as machine:
        client = machine.client
        node, handle = create(client, 1, b"a file")
        room = machine.memory.room(1 << 20)
        for turn in range(3):
            assert not device.by_readers()
            with a_reader(device):
                device.wait_by_readers(1, 2)
                room.view[:] = contents(1 << 20, turn)
                assert client.write_from(node.number, handle, 0, room) == 1 << 20
                room.view[:] = bytes(1 << 20)
                assert client.read_into(node.number, handle, 0, room) == 1 << 20
                assert room.view == contents(1 << 20, turn)
            device.wait_by_readers()
            assert client.read_into(node.number, handle, 0, room) == 1 << 20
        with a_reader(device):
            device.wait_by_readers(1, 2)
            assert set(machine.stop()) == {0, 1, 2}
            machine.start(patience=30)
            client.init()
            device.wait_by_readers(1, 2)
            assert attributes_of(client, 1).number == 1


@pytest.mark.parametrize("features", [PROTOCOL_FEATURES, WITHOUT_NOTES], ids=["inflight", "without"])
def test_what_was_carried_is_done_once(
    device: DeviceAndReaders, gate: Gate, features: ProtocolFeature
) -> None:
    with started(device.path, protocol_features=features) as machine, a_reader(device) as reader:
        client = machine.client
        device.wait_by_readers(1, 2)
        node, handle = create(client, 1, b"slow")
        rooms = [machine.memory.room(4096) for _ in range(QUEUES)]
        for number, room in enumerate(rooms):
            room.view[:] = bytes([number + 1]) * 4096
        gate.ajar.clear()
        writes = [
            client.start_write(node.number, handle, 4096 * number, client.laid(rooms[number]), queue)
            for number, queue in enumerate(machine.queues[1:])
        ]
        wait_until(lambda: gate.waiting == QUEUES)
        reader.kill()
        reader.wait()
        gate.ajar.set()
        for write in writes:
            write.body()
        device.wait_by_readers()
        assert gate.waiting == QUEUES, "none was written a second time"
        for number, room in enumerate(rooms):
            assert client.read_into(node.number, handle, 4096 * number, room) == 4096
            assert room.view == bytes([number + 1]) * 4096


def test_names_are_made_and_removed_once_whatever_dies(device: DeviceAndReaders) -> None:
    """Each exclusive create says that it made the file, and each unlink that there was one."""
    failures: list[str] = []
    over = threading.Event()

    def work(machine: Machine, number: int) -> None:
        dice = random.Random(number)
        turn = 0
        try:
            while not over.is_set():
                turn += 1
                name = b"%d-%d" % (number, turn)
                node, handle = create(machine.client, 1, name, os.O_RDWR | os.O_CREAT | os.O_EXCL)
                room = machine.memory.room(4096)
                room.view[:] = dice.randbytes(4096)
                told = bytes(room.view)
                assert machine.client.write_from(node.number, handle, 0, room) == 4096
                room.view[:] = bytes(4096)
                assert machine.client.read_into(node.number, handle, 0, room) == 4096
                assert room.view == told
                machine.client.release(node.number, handle)
                unlink(machine.client, 1, name)
        except BaseException as failure:
            failures.append(f"{number} in turn {turn}: {failure!r}")

    with started(device.path) as machine:
        workers = [threading.Thread(target=work, args=(machine, number)) for number in range(3)]
        for worker in workers:
            worker.start()
        try:
            for _ in range(6):
                with a_reader(device) as reader:
                    device.wait_by_readers(1, 2)
                    reader.send_signal(signal.SIGKILL)
                device.wait_by_readers()
        finally:
            over.set()
            for worker in workers:
                worker.join(30)
        assert not failures
