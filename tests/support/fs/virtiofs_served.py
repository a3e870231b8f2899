"""A virtio-fs door over a tree in memory, and machines before it, for as long as a `with` block lasts."""

from __future__ import annotations

import contextlib
import random
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from agent.bench.virtio_driver.guest_memory import Room, pages_of
from agent.bench.virtio_driver.machine import Machine
from agent.fs.interface import NOBODY, LockOwner
from agent.fs.virtiofs.door import VirtioFsDoor
from agent.fs.virtiofs.guest_books import GuestBooks
from tests.support.fs.device_and_readers import DeviceAndReaders
from tests.support.fs.memory_filesystem import MemoryFileSystem
from tests.support.pool.inline_runner import inline_runner

QUEUES = 2


class Gate:
    """Another file system whose writes wait while the gate is shut."""

    def __init__(self, inner: MemoryFileSystem) -> None:
        self.inner = inner
        self.ajar = threading.Event()
        self.ajar.set()
        self.waiting = 0

    def write(self, ino: int, handle: int, offset: int, data: memoryview, by: LockOwner = NOBODY) -> Any:
        self.waiting += 1
        assert self.ajar.wait(30)
        return self.inner.write(ino, handle, offset, data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


@contextlib.contextmanager
def served(
    path: Path, tree: Any, books: GuestBooks | None = None, *, by_reader: bool = False
) -> Iterator[VirtioFsDoor]:
    """A door at `path`; no thread of it is left afterwards. `by_reader`: a reader in this process carries
    every request."""
    if by_reader:
        assert books is None
        with DeviceAndReaders(path, tree, [1] * QUEUES) as device:
            device.start_thread()
            yield device.door
        return
    door = VirtioFsDoor(tree, path, QUEUES, inline_runner, books=books)
    door.start()
    try:
        yield door
    finally:
        door.stop()


@contextlib.contextmanager
def started(path: Path, *, queues: int = QUEUES, init: bool = True, **options: Any) -> Iterator[Machine]:
    """A machine whose device is set up, and INIT behind it."""
    with Machine(path, request_queues=queues, memory_bytes=(16 << 20, 8 << 20), **options) as machine:
        machine.start(patience=30)
        if init:
            assert machine.client.init().max_write == 1 << 20
        yield machine


def contents(size: int, seed: int = 35) -> bytes:
    return random.Random(seed).randbytes(size)


def scattered(room: Room, seed: int = 35) -> list[Room]:
    """The pages of a room in an order that no two of them are in."""
    pages = list(pages_of(room))
    random.Random(seed).shuffle(pages)
    return pages
