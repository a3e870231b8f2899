"""A guest that takes all it can get: another guest and the host go on, and all comes back at its end."""

from __future__ import annotations

import errno
import gc
import os
import random
import time
import tracemalloc
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from agent.bench.virtio_driver import fuse_wire as wire
from agent.bench.virtio_driver.faults import DeviceSilent
from agent.bench.virtio_driver.fuse_client import FuseClient
from agent.bench.virtio_driver.machine import Machine
from agent.bench.virtio_driver.request_queue import Waiter
from agent.fs.control.face import CONTROL_ROOT, ControlFace
from agent.fs.files.face import FilesFace
from agent.fs.interface import FACE_FILES, FACE_SHIFT, Caller, RootFileSystem
from agent.fs.kv_face import KV_ROOT, KvFace
from agent.fs.virtiofs import guest_view
from agent.fs.virtiofs.door import VirtioFsDoor
from agent.host_os.per_user_bounds import CATALOGUE, RESERVE_PART, Bounds
from agent.pool.steps import settle
from host_shim.control_wire import FLAG_NO_ANSWER, KEYS_MAX, Operation, Request
from tests.support.engines.session_door import refuse_prestage
from tests.support.fs.driver_chains import submit
from tests.support.fs.guest_requests import attributes_of, create, forget, forget_many
from tests.support.pool.memory_blocks import MemoryBlockStore
from tests.support.pool.memory_channel import MemoryChannel
from tests.support.pool.memory_pool import MemoryPool

FILES_ROOT = FACE_FILES << FACE_SHIFT | 1
MOST = 96
"""Of each bound that is walked here."""
SHARED = (
    "fs-open",
    "kv-open",
    "kv-writers",
    "sessions",
    "status-files",
    "tickets",
    "kv-nodes",
    "answer-bytes",
)
VALUES = 200


@dataclass
class Two:
    """An agent with two guests' doors over one pool, and the machines before them."""

    bounds: Bounds
    doors: list[VirtioFsDoor]
    kv: KvFace
    files: FilesFace
    control: ControlFace
    run: MemoryChannel
    machines: list[Machine] = field(default_factory=list)

    def held_by_all(self) -> dict[str, int]:
        return {name: self.bounds.of(CATALOGUE[name]).held for name in SHARED}


@pytest.fixture
def two(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Two]:
    bounds = Bounds()
    for name in SHARED[:-3]:
        bounds.of(CATALOGUE[name], MOST)
    bounds.of(CATALOGUE["kv-nodes"], MOST)
    bounds.of(CATALOGUE["tickets"], 4 * KEYS_MAX)
    monkeypatch.setattr(guest_view, "NODES_MAX", VALUES)
    monkeypatch.setattr(guest_view, "HANDLES_MAX", 80)
    agent = MemoryPool((64, 64), value_bytes=4096).agent()
    for number in range(VALUES + 50):
        agent.put(key(number), b"value %d" % number)
    files = FilesFace(tmp_path / "files.sqlite", MemoryBlockStore((512,)), bounds=bounds)
    channel = agent.channel
    faces = []
    for _ in range(3):
        kv = KvFace([agent.served], lambda: channel, bounds=bounds)
        control = ControlFace([agent.served], lambda: channel, lambda: {}, refuse_prestage, bounds=bounds)
        faces.append((kv, control))
    doors = []
    for number in range(2):
        kv, control = faces[number]
        tree = RootFileSystem(
            {b"kv": (KV_ROOT, kv), b"fs": (FILES_ROOT, files), b".g35": (CONTROL_ROOT, control)}, (0, 0)
        )
        name = f"virtiofs-{number}"
        doors.append(VirtioFsDoor(tree, tmp_path / name, 1, lambda _: channel, name=name))
    for door in doors:
        door.start()
    made = Two(bounds, doors, *faces[2][:1], files, faces[2][1], channel)
    try:
        for door in doors:
            machine = Machine(door.path, request_queues=1, memory_bytes=16 << 20)
            made.machines.append(machine)
            machine.start(patience=30)
            machine.client.init()
        yield made
    finally:
        for machine in made.machines:
            machine.close()
        for door in doors:
            door.stop()
        files.close()


def key(number: int) -> bytes:
    return number.to_bytes(16, "big")


def name_of(number: int) -> bytes:
    return key(number).hex().encode()


class Guest:
    """What a guest can take, one more at each call."""

    def __init__(self, client: FuseClient, machine: Machine) -> None:
        self.client = client
        self.value = client.walk(f"kv/v/{name_of(0).decode()}").number
        self.folder = client.walk("kv/v").number
        self.session_node = client.walk(".g35/session").number
        self.status_node = client.walk(".g35/status.json").number
        self.fs = client.walk("fs").number
        self.room = machine.memory.room(1 << 20)
        self._session = 0
        self._count = 0

    def open_value(self) -> None:
        handle = self.client.open(self.value)
        self.client.read_into(self.value, handle, 0, self.room.part(0, 4096))

    def open_writer(self) -> None:
        self._count += 1
        create(self.client, self.folder, b"new %d" % (id(self) % 1000 * 1000 + self._count), os.O_WRONLY)

    def open_session(self) -> None:
        self.client.open(self.session_node, os.O_RDWR)

    def open_status(self) -> None:
        self.client.open(self.status_node)

    def open_file(self) -> None:
        self._count += 1
        create(self.client, self.fs, b"file %d %d" % (id(self) % 1000, self._count))

    def bind_tickets(self) -> None:
        self._session = self._session or self.client.open(self.session_node, os.O_RDWR)
        many = KEYS_MAX // 8
        first = self._count % 8 * many
        request = Request(Operation.GET, 1, "v", (key(1),) * many, first, flags=FLAG_NO_ANSWER)
        self._count += 1
        encoded = request.encode()
        self.room.view[: len(encoded)] = encoded
        if not self._count % 8:
            self._session = 0
        session = self._session or self.client.open(self.session_node, os.O_RDWR)
        self.client.write_from(self.session_node, session, 0, self.room.part(0, len(encoded)))

    def look_up(self) -> None:
        self._count += 1
        self.client.lookup(self.folder, name_of(self._count))

    def open_folder(self) -> None:
        self.client.start(wire.Opcode.OPENDIR, 1, wire.OPEN_IN.pack(0, 0), wire.OPEN_OUT.size).body()


WALKS: dict[str, Callable[[Guest], None]] = {
    "kv-open": Guest.open_value,
    "kv-writers": Guest.open_writer,
    "sessions": Guest.open_session,
    "status-files": Guest.open_status,
    "fs-open": Guest.open_file,
    "tickets": Guest.bind_tickets,
    "guest-nodes": Guest.look_up,
    "guest-open": Guest.open_folder,
}


def until_refused(walk: Callable[[], None], most: int = 2000) -> tuple[int, str]:
    for count in range(most):
        try:
            walk()
        except OSError as refused:
            return count, errno.errorcode[refused.errno or 0]
    return most, ""


def host_goes_on(two: Two) -> None:
    """A user of the agent's machine, at the agent's own door."""
    user, run = Caller(1000), two.run
    folder = settle(two.kv.lookup(user, KV_ROOT, b"v"), run).attributes.ino
    value = settle(two.kv.lookup(user, folder, name_of(3)), run).attributes.ino
    handle = settle(two.kv.open(user, value, os.O_RDONLY), run).handle
    into = memoryview(bytearray(16))
    assert settle(two.kv.read(value, handle, 0, into), run) == 7
    settle(two.kv.release(value, handle), run)
    two.kv.forget(value, 1)
    session = settle(two.control.open(user, CONTROL_ROOT + 1, os.O_RDWR), run).handle
    settle(two.control.release(CONTROL_ROOT + 1, session), run)


def ended(door: VirtioFsDoor) -> None:
    """Another guest mounts the device, so the one before it is no more."""
    with Machine(door.path, request_queues=1, memory_bytes=8 << 20) as another:
        another.start(patience=30)
        another.client.init()
        another.stop()


@pytest.mark.parametrize("name", WALKS)
def test_a_guest_at_a_bound_leaves_another_and_the_host_their_own(two: Two, name: str) -> None:
    before = two.held_by_all()
    walk, client = WALKS[name], two.machines[0].client
    greedy = Guest(client, two.machines[0])
    count, refused = until_refused(lambda: walk(greedy))
    assert refused == CATALOGUE[name].refused
    assert count >= 10
    if name in SHARED and name != "tickets":
        assert two.bounds.of(CATALOGUE[name]).held <= MOST - MOST // RESERVE_PART
    other = Guest(two.machines[1].client, two.machines[1])
    for _ in range(3):
        walk(other)
    host_goes_on(two)
    # What it holds goes on serving it, too.
    attributes_of(client, 1)
    for machine in two.machines:
        machine.stop()
    for door in two.doors:
        ended(door)
        assert door.device.view.held == (0, 0)
    assert two.held_by_all() == before


def test_memory_does_not_grow_with_guests_that_come_and_take_all(two: Two) -> None:
    def once() -> None:
        machine = Machine(two.doors[0].path, request_queues=1, memory_bytes=16 << 20)
        with machine:
            machine.start(patience=30)
            machine.client.init()
            guest = Guest(machine.client, machine)
            for walk in WALKS.values():
                until_refused(lambda walk=walk: walk(guest), 120)  # type: ignore[misc]
            machine.stop()
        ended(two.doors[0])
        assert two.doors[0].device.view.held == (0, 0)

    two.machines[0].stop()
    for _ in range(3):
        once()
    tracemalloc.start()
    try:
        once()
        gc.collect()
        before = tracemalloc.get_traced_memory()[0]
        for _ in range(5):
            once()
        gc.collect()
        grown = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert grown < 200_000


def test_a_flood_of_forgets_takes_nothing_from_others(two: Two) -> None:
    greedy, other = (Guest(machine.client, machine) for machine in two.machines)
    theirs = [two.machines[1].client.lookup(other.folder, name_of(number)).number for number in range(20)]
    handle = two.machines[1].client.open(theirs[0])
    most, urgent = (1 << 64) - 1, two.machines[0].client
    chance = random.Random(35)
    began = time.monotonic()
    for _ in range(50):
        nodes = [(chance.choice((*theirs, greedy.value, 1, 0, most)), most) for _ in range(200)]
        forget_many(urgent, nodes)
    forget(urgent, greedy.value, most)
    assert time.monotonic() - began < 20
    room = two.machines[1].memory.room(4096)
    assert two.machines[1].client.read_into(theirs[0], handle, 0, room) == 7
    for number in theirs:
        attributes_of(two.machines[1].client, number)
    with pytest.raises(OSError, match="Stale"):
        attributes_of(urgent, greedy.value)
    urgent.walk(f"kv/v/{name_of(0).decode()}")
    host_goes_on(two)


@pytest.mark.expects_log("the ring of virtiofs-0", "malformed request")
@pytest.mark.parametrize(
    "length", [0, 1, 39, 40, 41, 4096, (1 << 20) + 81, 16 << 20, (16 << 20) + 1, 0x7FFF_FFFF, 0xFFFF_FFFF]
)
def test_wrong_lengths_in_a_ring_end_at_the_guest(two: Two, length: int) -> None:
    machine = two.machines[0]
    room, base = machine.memory.room(1 << 16), machine.memory
    message = wire.IN_HEADER.pack(min(length, 0xFFFF_FFFF), wire.Opcode.GETATTR, 2, 1, 0, 0, 1, 0, 0)
    room.view[: len(message)] = message
    for readable, writable in (
        ([(room.address, length)], [(room.address + 8192, 120)]),
        ([(room.address, 40), (room.address + 64, 16)], [(room.address + 8192, length)]),
    ):
        waiter = Waiter()
        submit(machine.queues[1], readable, writable, waiter)
        try:
            machine.queues[1].wait(waiter, 0.3)
        except DeviceSilent:
            break
    other = Guest(two.machines[1].client, two.machines[1])
    other.open_value()
    host_goes_on(two)
    del base
    machine.lose()
    with Machine(two.doors[0].path, request_queues=1, memory_bytes=8 << 20) as again:
        again.start(patience=30)
        again.client.init()
        attributes_of(again.client, 1)
        again.stop()


def test_as_many_requests_as_a_ring_holds_are_in_flight_and_others_are_served(two: Two) -> None:
    client = two.machines[0].client
    greedy = Guest(client, two.machines[0])
    other = Guest(two.machines[1].client, two.machines[1])
    for _ in range(5):
        calls = [client.start(wire.Opcode.GETATTR, greedy.value, bytes(16), 104) for _ in range(100)]
        began = time.monotonic()
        other.open_value()
        host_goes_on(two)
        assert time.monotonic() - began < 5
        for call in calls:
            call.finish()
