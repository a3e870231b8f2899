"""Where each queue of a device is served: in this process, or by a reader.

A queue that belongs to a reader is served there while that process can, and here otherwise: until it is
ready, and from its end to the start of the next. What a reader had in hand when it died is known from the
inflight piece of its queue, which is the front-end's, or made here. A chain that was carried here and is
answered is completed then, and not served again.
"""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from agent.fs.guest_sessions import Binding, Bound, GuestWords
from agent.fs.virtiofs.back_end import PeerError, QueueSetup
from agent.fs.virtiofs.device_queue import BadRing, DeviceQueue
from agent.fs.virtiofs.front_end_descriptors import Call
from agent.fs.virtiofs.processes.first_process import (
    ReaderGone,
    ReaderLink,
    ReaderLinks,
    RemoteQueue,
    RunRefused,
    tell_memory,
)
from agent.fs.virtiofs.queue_worker import QueueWorker, Serve
from agent.host_os.rate_limited_log import Complaints
from agent.virtio.inflight import queue_bytes
from agent.virtio.memory_table import MemoryTable

HIGH_PRIORITY: Final = 0
"""The queue for FORGET and INTERRUPT; requests have the others. It is the first process'."""


class GuestProcesses(NamedTuple):
    """The processes of the agent, as the device of one guest needs them."""

    of_queue: Sequence[int]
    """By request queue, the number of the process that serves it; 0 is the first."""
    words: GuestWords
    words_descriptor: int
    """It is the device's, and closed with it."""
    bindings: Callable[[int], Sequence[Binding]]
    """Of the session that is open in this process under a handle."""
    session_node: int


class Queues(NamedTuple):
    """What a device has for its queues, by their numbers."""

    name: str
    calls: Sequence[Call]
    make_serve: Callable[[int], Callable[[], Serve]]
    make_piece: Callable[[int], memoryview]
    """Zeros of so many bytes for an inflight piece, which other processes may map."""
    bound: Callable[[int], Bound]
    """In a session of the guest, by the guest's handle."""


@dataclass(slots=True)
class _Served:
    setup: QueueSetup
    """With the available idx to go on from, and the piece with the notes of who serves it."""
    worker: QueueWorker | RemoteQueue | None = None
    """None: nobody serves it any more, for its ring cannot be followed."""


class QueuePlaces:
    """For the thread of the door."""

    def __init__(self, queues: Queues, processes: GuestProcesses | None, complaints: Complaints) -> None:
        self.links: Final = None if processes is None else ReaderLinks()
        self._queues, self._processes, self._complaints = queues, processes, complaints
        self._served: dict[int, _Served] = {}
        self._memory = MemoryTable()
        """Of the queues that run. What is kept here a guest that has ended still takes of the machine."""

    @property
    def are_still(self) -> bool:
        """No queue runs."""
        return not self._served

    def start(self, index: int, setup: QueueSetup, memory: MemoryTable) -> None:
        """Raises PeerError where its ring cannot be followed."""
        self._memory = memory
        served = _Served(setup)
        try:
            link = self._reader_of(index)
            ring = setup.ring(memory) if link is None else self._give(index, served, link)
            if ring is not None:
                self._serve_here(index, served, ring)
            self._served[index] = served
        except (BadRing, RunRefused) as bad:
            raise PeerError(str(bad)) from None
        finally:
            self._keep_no_memory_of_nobody()

    def stop(self, index: int) -> int | None:
        """End a queue after the request at hand; the available idx to go on from, None where it did not
        run."""
        served = self._served.pop(index, None)
        base = None if served is None else self._stop(index, served)
        self._keep_no_memory_of_nobody()
        return base

    def _keep_no_memory_of_nobody(self) -> None:
        if not self._served:
            self._memory = MemoryTable()

    def _stop(self, index: int, served: _Served) -> int | None:
        if served.worker is None:
            return None
        try:
            return served.worker.stop()
        except ReaderGone:
            assert isinstance(served.worker, RemoteQueue)
        try:
            # What the reader has left may want a call, and that a thread makes which can be freed.
            return self._serve_here(index, served, self._left_by(served.worker, served)).stop()
        except BadRing:
            return None

    def use_memory(self, memory: MemoryTable) -> None:
        if self._served:
            self._memory = memory
        refused: dict[ReaderLink, str] = {}
        for index, served in self._served.items():
            worker = served.worker
            if isinstance(worker, QueueWorker):
                worker.queue.memory = memory
            elif worker is not None:
                worker.use_memory(memory)
                if worker.link not in refused:
                    refused[worker.link] = tell_memory(worker.link, memory)
                if refused[worker.link]:
                    self._stop_refused(index, served, worker, refused[worker.link])
        self.settle()

    def _stop_refused(self, index: int, served: _Served, worker: RemoteQueue, why: str) -> None:
        try:
            worker.stop()
        except ReaderGone:
            return  # `settle` sees that
        self._serve_no_more(index, served, why)

    def _serve_no_more(self, index: int, served: _Served, why: str) -> None:
        served.worker = None
        self._complaints.peer(f"the ring of {self._queues.name}-{index}", f"{why}; the queue is stopped")

    def use_call(self, index: int, fd: int | None) -> None:
        """Call the driver of a queue through another descriptor. Raises PeerError."""
        self._queues.calls[index].use(fd)
        served = self._served.get(index)
        worker = None if served is None else served.worker
        if isinstance(worker, RemoteQueue):
            try:
                worker.use_call(fd)
            except RunRefused as refused:
                raise PeerError(str(refused)) from None
            except ReaderGone:
                pass  # `settle` sees that
            self.settle()

    def settle(self) -> None:
        """Serve here what readers that have ended served; give those that are ready what is theirs."""
        if self.links is None:
            return
        self.links.look()
        for index, served in self._served.items():
            try:
                if isinstance(served.worker, RemoteQueue) and served.worker.link.is_gone:
                    self._serve_here(index, served, self._left_by(served.worker, served))
                worker, link = served.worker, self._reader_of(index)
                if isinstance(worker, QueueWorker) and link is not None and not worker.broken:
                    self._hand_over(index, served, worker, link)
            except (BadRing, RunRefused) as bad:
                self._serve_no_more(index, served, str(bad))

    def close(self) -> None:
        if self.links is not None and self._processes is not None:
            self.links.close()
            os.close(self._processes.words_descriptor)

    def _reader_of(self, index: int) -> ReaderLink | None:
        """The process that is to serve the queue, where it can and is not this one."""
        if self.links is None or self._processes is None or index == HIGH_PRIORITY:
            return None
        number = self._processes.of_queue[index - 1]
        return self.links.ready(number) if number else None

    def _serve_here(self, index: int, served: _Served, ring: DeviceQueue) -> QueueWorker:
        queues = self._queues
        worker = QueueWorker(
            f"{queues.name}-{index}",
            ring,
            served.setup.kick,
            queues.calls[index],
            queues.make_serve(index),
            self._complaints,
        )
        served.worker = worker
        worker.start()
        return worker

    def _hand_over(self, index: int, served: _Served, worker: QueueWorker, link: ReaderLink) -> None:
        """Raises BadRing, RunRefused."""
        served.setup = served.setup._replace(base=worker.stop())
        if worker.broken:
            served.worker = None
        elif (ring := self._give(index, served, link)) is not None:
            self._serve_here(index, served, ring)

    def _give(self, index: int, served: _Served, link: ReaderLink) -> DeviceQueue | None:
        """Have a queue served by a reader; where that cannot be, its ring as it is then. Raises BadRing,
        RunRefused."""
        queues, processes = self._queues, self._processes
        assert processes is not None
        name = f"{queues.name}-{index}"
        try:
            if served.setup.inflight_piece is None:
                piece = queues.make_piece(queue_bytes(served.setup.size))
                served.setup = served.setup._replace(inflight_piece=piece)
            ring = served.setup._replace(inflight_piece=None).ring(self._memory)
            remote = RemoteQueue(name, index, ring, queues.make_serve(index), queues.bound, link)
        except OSError as failure:
            self._complaints.world(f"{name} is served by the first process", str(failure))
            return served.setup.ring(self._memory)
        call = queues.calls[index].fileno()
        try:
            remote.start(served.setup, self._memory, call, processes.words_descriptor)
        except ReaderGone:
            # It may have begun to serve, and be gone before it said so.
            return self._left_by(remote, served)
        served.worker = remote
        return None

    def _left_by(self, remote: RemoteQueue, served: _Served) -> DeviceQueue:
        """The ring of a queue whose reader has ended, without what was answered already. Its next worker
        calls the driver. Raises BadRing."""
        served.worker = None
        remote.join()
        ring = served.setup.ring(self._memory)
        if remote.last is not None:
            ring.complete_left_over(*remote.last)
        return ring
