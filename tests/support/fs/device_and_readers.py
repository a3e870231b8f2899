"""A virtio-fs door over a tree in memory and the readers of some of its queues: processes, or a thread."""

from __future__ import annotations

import socket
import subprocess
import threading
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from agent.fs.guest_sessions import GuestWords, shared_words
from agent.fs.virtiofs.door import VirtioFsDoor
from agent.fs.virtiofs.processes.first_process import RemoteQueue
from agent.fs.virtiofs.processes.queue_places import GuestProcesses
from tests.support.fs import reader_process
from tests.support.pool.inline_runner import inline_runner
from tests.support.waiting import wait_until

NO_NODE = 0
"""Readers that are to read this one carry every request."""


class DeviceAndReaders:
    """A `with` block ends all of it."""

    def __init__(self, path: Path, tree: Any, of_queue: Sequence[int], node: int = NO_NODE) -> None:
        """`of_queue`: by request queue, the reader that is to serve it; 0 is the first process. `node`: what
        readers read themselves."""
        self.path, self._node = path, node
        descriptor = shared_words()
        processes = GuestProcesses(of_queue, GuestWords(descriptor), descriptor, lambda handle: (), node)
        self.door = VirtioFsDoor(tree, path, len(of_queue), inline_runner, processes=processes)
        self._processes: list[subprocess.Popen[bytes]] = []
        self._threads: list[threading.Thread] = []
        self.door.start()

    def start_reader(self, number: int = 1, death: str = "", passes: int = 0) -> subprocess.Popen[bytes]:
        """As `reader_process.start`."""
        process = reader_process.start(self._node, self._link(number), death, passes)
        self._processes.append(process)
        return process

    def start_thread(self, number: int = 1) -> None:
        """A reader in this process. It has come when this returns."""
        queues = reader_process.queues(self._link(number), self._node)
        self._threads.append(threading.Thread(target=queues.serve, name=queues.name, daemon=True))
        self._threads[-1].start()
        links = self.door.device.places.links
        wait_until(lambda: links is not None and links.ready(number) is not None, what="the reader")

    def _link(self, number: int) -> socket.socket:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.door.serve_reader(number, ours)
        return theirs

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
            for process in self._processes:
                process.kill()
                process.wait()
        for thread in self._threads:
            thread.join()
