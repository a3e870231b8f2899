"""The virtio-fs door at a real socket, with real eventfds and threads, over a tree in memory."""

from __future__ import annotations

import os
import socket
import threading
from pathlib import Path
from typing import Any

import pytest

from agent.bench.virtio_driver.connection import BackEndGone
from agent.bench.virtio_driver.front_end import FEATURES, PROTOCOL_FEATURES
from agent.bench.virtio_driver.machine import Machine, queues_offered
from agent.bench.virtio_driver.request_queue import Waiter
from agent.bench.virtiofs_files import VirtiofsFiles
from agent.errors import G35Error
from agent.fs.virtiofs.door import listen
from agent.fs.virtiofs.guest_books import GuestBooks
from agent.virtio.vhost_user import Feature, ProtocolFeature
from tests.support.fs.driver_chains import submit
from tests.support.fs.guest_requests import (
    attributes_of,
    create,
    entries,
    forget,
    forget_many,
    interrupt,
    make_folder,
    unlink,
)
from tests.support.fs.memory_filesystem import MemoryFileSystem
from tests.support.fs.virtiofs_served import QUEUES, Gate, contents, scattered, served, started
from tests.support.waiting import wait_until

BROKEN_RING = "the queue is stopped"


def put(machine: Machine, name: bytes, data: bytes) -> int:
    """Write a file of up to 2 MiB; its node."""
    client = machine.client
    node, handle = create(client, 1, name)
    room = machine.memory.room(1 << 20)
    for offset in range(0, len(data), 1 << 20):
        part = room.part(0, min(len(data) - offset, 1 << 20))
        part.view[:] = data[offset : offset + part.size]
        assert client.write_from(node.number, handle, offset, part) == part.size
    client.release(node.number, handle)
    return node.number


def get(machine: Machine, node: int, size: int) -> bytes:
    client = machine.client
    handle = client.open(node)
    room = machine.memory.room(1 << 20)
    found = b""
    while len(found) < size:
        part = room.part(0, min(size - len(found), 1 << 20))
        part.view[:] = bytes(part.size)
        assert client.read_into(node, handle, len(found), part) == part.size
        found += bytes(part.view)
    assert client.read_into(node, handle, size, room) == 0
    client.release(node, handle)
    return found


WAYS: dict[str, dict[str, Any]] = {
    "as Linux": {},
    "in runs": {"pages": False},
    "around the numbers": {"first": 0xFFF0},
    "no event index": {"features": FEATURES & ~Feature.RING_EVENT_IDX},
    "no indirect tables": {"features": FEATURES & ~Feature.RING_INDIRECT_DESC},
    "no inflight area": {"protocol_features": PROTOCOL_FEATURES & ~ProtocolFeature.INFLIGHT_SHMFD},
    "one memory table": {"protocol_features": PROTOCOL_FEATURES & ~ProtocolFeature.CONFIGURE_MEM_SLOTS},
    "no acknowledgements": {"protocol_features": PROTOCOL_FEATURES & ~ProtocolFeature.REPLY_ACK},
    "a small ring": {"queue_size": 512, "features": FEATURES & ~Feature.RING_INDIRECT_DESC},
}


@pytest.mark.parametrize("way", WAYS)
def test_what_is_put_is_got(path: Path, tree: MemoryFileSystem, way: str) -> None:
    data = contents((1 << 20) + 12345)
    with started(path, **WAYS[way]) as machine:
        node = put(machine, b"a file", data)
        assert attributes_of(machine.client, node).size == len(data)
        assert get(machine, node, len(data)) == data
        assert machine.client.lookup(1, b"a file").number == node
    wait_until(lambda: not tree.open_handles)


def test_pages_that_lie_anywhere(path: Path) -> None:
    """256 pages in any order, the last one short, for WRITE and for READ; the header's page among them."""
    data = contents((1 << 20) - 100)
    with started(path) as machine:
        client = machine.client
        node, handle = create(client, 1, b"scattered")
        room = machine.memory.room(1 << 20).part(0, len(data))
        pages = scattered(room)
        last = next(page for page in pages if page.size < 4096)
        pages.remove(last)
        pages.append(last)
        at = 0
        for page in pages:
            page.view[:] = data[at : at + page.size]
            at += page.size
        assert client.write_from(node.number, handle, 0, pages) == len(data)
        into = scattered(machine.memory.room(1 << 20), seed=36)
        assert client.read_into(node.number, handle, 0, into) == len(data)
        read = b"".join(room.view for room in into)
        assert read[: len(data)] == data
        assert read[len(data) :] == bytes(100)
        client.release(node.number, handle)


def test_calls_longer_than_a_request(path: Path, tree: MemoryFileSystem) -> None:
    """host_shim's calls through the device: memory of any kind, cut into transfers."""
    size = (2 << 20) + 777
    data = contents(size)
    with started(path) as machine:
        node, handle = create(machine.client, 1, b"long")
        machine.client.release(node.number, handle)
        files = VirtiofsFiles(machine)
        descriptor = files.open("long")
        assert files.pwrite(descriptor, data, 5) == size  # out of memory that is not the guest's
        inside = machine.memory.room(3 << 20).view
        assert files.preadv(descriptor, inside, 5) == size
        assert inside[:size] == data
        outside = memoryview(bytearray(3 << 20))
        assert files.preadv(descriptor, outside, 4) == size + 1
        assert outside[1 : size + 1] == data
        inside[: 1 << 20] = inside[1 << 20 : 2 << 20]
        assert files.pwrite(descriptor, inside[:size], 0) == size
        assert files.preadv(descriptor, outside[:100], 0) == 100
        assert outside[:100] == data[1 << 20 : (1 << 20) + 100]
        files.close(descriptor)
        assert not tree.open_handles
        del inside


def test_folders(path: Path) -> None:
    names = {b"entry %03d" % number for number in range(200)}
    with started(path) as machine:
        client = machine.client
        folder = make_folder(client, 1, b"folder").number
        for name in names:
            node, handle = create(client, folder, name)
            client.release(node.number, handle)
        for plus in (False, True):
            found = entries(client, folder, plus=plus)
            assert {each.name for each in found} - {b".", b".."} == names
            assert len({each.cookie for each in found}) == len(found)
        nodes = {each.name: each.node for each in found if each.node}
        assert nodes[b"entry 007"] == client.lookup(folder, b"entry 007").number
        unlink(client, folder, b"entry 007")
        with pytest.raises(FileNotFoundError):
            client.lookup(folder, b"entry 007")


def test_the_high_priority_queue(path: Path, tree: MemoryFileSystem) -> None:
    with started(path) as machine:
        client = machine.client
        node, handle = create(client, 1, b"forgotten")
        client.lookup(1, b"forgotten")
        assert tree.nodes[node.number].lookups == 2
        forget(client, node.number)
        assert tree.nodes[node.number].lookups == 1
        forget_many(client, [(node.number, 1), (77, 5)])
        assert tree.nodes[node.number].lookups == 0
        room = machine.memory.room(4096)
        call = client.start_write(client.lookup(1, b"forgotten").number, handle, 0, client.laid(room))
        interrupt(client, call)
        call.finish()


def test_threads_on_a_few_queues(path: Path) -> None:
    """Eight threads share two queues, each with a file of its own; every answer is its own."""
    with started(path) as machine:
        client = machine.client
        wrong: list[str] = []

        def work(number: int) -> None:
            node, handle = create(client, 1, b"of %d" % number)
            out, back = machine.memory.room(1 << 16), machine.memory.room(1 << 16)
            for turn in range(30):
                out.view[:] = bytes([number, turn]) * (1 << 15)
                client.write_from(node.number, handle, turn << 16, out)
                if client.read_into(node.number, handle, turn << 16, back) != 1 << 16:
                    wrong.append(f"{number}: short")
                if back.view != out.view:
                    wrong.append(f"{number}: other bytes")
            client.release(node.number, handle)

        threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not wrong
        assert not any(queue.outstanding for queue in machine.queues)


@pytest.mark.expects_log("second front-end was turned away")
def test_a_second_front_end_is_refused_and_the_first_goes_on(path: Path) -> None:
    assert queues_offered(path) == 1 + QUEUES
    with started(path) as machine, Machine(path) as second:
        with pytest.raises(BackEndGone):
            second.start()
        assert get(machine, put(machine, b"x", b"unharmed"), 8) == b"unharmed"
        machine.lose()
        second.start(patience=30)


@pytest.mark.parametrize("inflight", [True, False])
def test_a_front_end_that_is_killed_while_it_writes(tmp_path: Path, inflight: bool) -> None:
    """What it had open is closed, unless it may come back; the next guest finds all in order."""
    gate = Gate(MemoryFileSystem())
    leave_out = 0 if inflight else ProtocolFeature.INFLIGHT_SHMFD
    with served(tmp_path / "fs.sock", gate):
        with started(tmp_path / "fs.sock", protocol_features=PROTOCOL_FEATURES & ~leave_out) as machine:
            node, handle = create(machine.client, 1, b"half")
            room = machine.memory.room(1 << 20)
            room.view[:] = contents(1 << 20)
            gate.ajar.clear()
            for queue in machine.queues[1:]:
                machine.client.start_write(node.number, handle, 0, machine.client.laid(room), queue)
            wait_until(lambda: gate.waiting == QUEUES)
            machine.lose()
            del room
        gate.ajar.set()
        with started(tmp_path / "fs.sock") as machine:
            # INIT says that it is another guest's life: nothing of the one before is open.
            assert not gate.inner.open_handles
            again = machine.client.lookup(1, b"half")
            assert again.number == node.number
            assert get(machine, again.number, again.size) == contents(1 << 20)[: again.size]


@pytest.mark.expects_log(BROKEN_RING)
def test_a_queue_with_a_broken_ring_stops_and_the_others_go_on(path: Path) -> None:
    with started(path) as machine:
        node, handle = create(machine.client, 1, b"here")
        broken, sound = machine.queues[1:]
        submit(broken, [(0x10, 40)], [], Waiter())  # no guest memory
        room = machine.memory.room(8192)
        room.view[:] = contents(8192)
        client = machine.client
        laid = client.laid(room)
        for turn in range(20):
            client.start_write(node.number, handle, turn * 8192, laid, sound).finish()
        silent = client.start_write(node.number, handle, 0, laid, broken)
        with pytest.raises(TimeoutError):
            silent.finish(timeout=0.3)
        # A reset of the guest makes a new ring of it, and all is well again.
        machine.lose()
    with started(path) as machine:
        found = machine.client.lookup(1, b"here")
        assert found.size == 20 * 8192
        assert get(machine, found.number, found.size) == contents(8192) * 20


def test_a_guest_that_never_takes_its_answers(path: Path) -> None:
    """A full ring of answers that nobody looks at keeps the device from nothing."""
    with started(path) as machine:
        client = machine.client
        idle, used = machine.queues[1:]
        before = idle.ring.used_index
        calls = [client.start(3, 1, bytes(16), 104, idle) for _ in range(400)]
        wait_until(lambda: idle.ring.used_index == before + 400)
        for _ in range(50):
            assert len(client.start(3, 1, bytes(16), 104, used).body()) == 104
        assert all(len(call.body()) == 104 for call in calls)  # they had waited for it


def test_a_guest_that_never_kicks(path: Path) -> None:
    with started(path) as machine:
        client = machine.client
        dumb, used = machine.queues[1:]
        dumb.kick_now = lambda: None  # type: ignore[method-assign]
        calls = [client.start(3, 1, bytes(16), 104, dumb) for _ in range(20)]
        for _ in range(50):
            assert len(client.start(3, 1, bytes(16), 104, used).body()) == 104
        assert all(len(call.body()) == 104 for call in calls)  # found when the queue is looked at again


def test_rings_that_are_stopped_go_on_where_they_were(path: Path) -> None:
    """What a guest's pause does: the rings are stopped, and started with the same memory."""
    with started(path) as machine:
        node, handle = create(machine.client, 1, b"paused")
        room = machine.memory.room(4096)
        for turn in range(5):
            room.view[:] = bytes([turn]) * 4096
            machine.client.write_from(node.number, handle, turn * 4096, room)
            bases = machine.stop()
            assert [bases[queue.index] for queue in machine.queues] == [
                queue.ring.used_index for queue in machine.queues
            ]
            machine.start(patience=30)
        for turn in range(5):
            assert machine.client.read_into(node.number, handle, turn * 4096, room) == 4096
            assert room.view == bytes([turn]) * 4096
        machine.client.release(node.number, handle)


def test_requests_made_while_there_is_no_device(tmp_path: Path, tree: MemoryFileSystem) -> None:
    path = tmp_path / "fs.sock"
    with Machine(path, request_queues=QUEUES) as machine:
        with served(path, tree, books=GuestBooks(tmp_path / "books")):
            machine.start(patience=30)
            machine.client.init()
            machine.lose()
        calls = [machine.client.start(3, 1, bytes(16), 104) for _ in range(10)]
        assert not any(call.queue.ring.take_used() for call in calls)
        with served(path, tree, books=GuestBooks(tmp_path / "books")):
            machine.start(patience=30)
            assert all(len(call.body()) == 104 for call in calls)


def test_who_comes_back_at_once_is_let_in(path: Path) -> None:
    for _ in range(50):
        machine = Machine(path, request_queues=1)
        machine.start(patience=0.0)
        machine.stop()


def test_a_path_that_is_too_long_for_a_socket_is_refused_with_the_reason(tmp_path: Path) -> None:
    long = tmp_path / ("x" * 120)
    with pytest.raises(G35Error, match="too long") as refused:
        listen(long)
    assert "107 bytes" in refused.value.advice


@pytest.mark.expects_log("front-end")
def test_nonsense_on_the_socket(path: Path) -> None:
    """Bytes that are no messages, a header without its payload, descriptors for nothing; then a guest."""
    pipes = os.pipe()
    try:
        for nonsense in (
            b"",
            b"\0" * 5,
            b"GET / HTTP/1.1\r\n\r\n",
            b"\1\0\0\0\1\0\0\0\xff\xff\xff\x7f",
            bytes(4096),
        ):
            with socket.socket(socket.AF_UNIX) as asking:
                asking.settimeout(10)
                asking.connect(str(path))
                if nonsense:
                    socket.send_fds(asking, [nonsense], list(pipes) * 4)
                asking.shutdown(socket.SHUT_WR)
                try:
                    assert asking.recv(4096) == b""
                except ConnectionError:
                    continue
    finally:
        for descriptor in pipes:
            os.close(descriptor)
    with started(path) as machine:
        assert get(machine, put(machine, b"x", b"unharmed"), 8) == b"unharmed"
