"""A virtio-fs door over a tree in memory and the processes beside it that serve some of its queues."""

from __future__ import annotations

import collections
import socket
import subprocess
from pathlib import Path
from types import TracebackType

from agent.fs.guest_sessions import GuestWords, shared_words
from agent.fs.interface import NOBODY, LockOwner
from agent.fs.virtiofs.door import VirtioFsDoor
from agent.fs.virtiofs.processes.first_process import RemoteQueue
from agent.fs.virtiofs.processes.queue_places import GuestProcesses
from tests.support.fs import reader_process
from tests.support.fs.memory_filesystem import MemoryFileSystem
from tests.support.pool.inline_runner import inline_runner
from tests.support.waiting import wait_until

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


class DeviceAndReaders:
    """Request queue Q, from 0, is with process Q mod (1 + readers). A `with` block ends all of it."""

    def __init__(self, path: Path, queues: int = 2, readers: int = 1) -> None:
        self.path, self.tree = path, CountingTree()
        descriptor = shared_words()
        of_queue = [queue % (1 + readers) for queue in range(queues)]
        processes = GuestProcesses(
            of_queue, GuestWords(descriptor), descriptor, lambda handle: (), READ_BY_READERS
        )
        self.door = VirtioFsDoor(self.tree, path, queues, inline_runner, processes=processes)
        self.readers: list[subprocess.Popen[bytes]] = []
        self.door.start()

    def start_reader(self, number: int = 1, death: str = "", passes: int = 0) -> subprocess.Popen[bytes]:
        """As `reader_process.start`."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        process = reader_process.start(READ_BY_READERS, theirs, death, passes)
        self.readers.append(process)
        self.door.serve_reader(number, ours)
        return process

    def by_readers(self) -> list[int]:
        """Which queues readers serve now."""
        served = list(self.door.device.places._served.items())
        return sorted(index for index, each in served if isinstance(each.worker, RemoteQueue))

    def wait_by_readers(self, *queues: int) -> None:
        wait_until(lambda: self.by_readers() == list(queues), 30, f"readers to serve {queues}")

    def __enter__(self) -> DeviceAndReaders:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, *_exception: BaseException | TracebackType | None
    ) -> None:
        try:
            self.door.stop()
        finally:
            for process in self.readers:
                process.kill()
                process.wait()
