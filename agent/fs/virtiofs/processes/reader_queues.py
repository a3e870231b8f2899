"""Queues of one guest that this process of the agent, a reader, serves for the first process.

A thread for each guest does what the first process says over their link (messages.py): it starts and stops
the queues, whose threads are as those of the first process (queue_worker.py). Descriptors come from there,
which has looked at them. Should that thread fail, the process ends: only then does the first process know
that nobody serves these rings any more. A queue whose own thread fails stops, as in the first process.
"""

import logging
import mmap
import os
import socket
import weakref
from collections.abc import Callable, Sequence
from typing import Final, NoReturn, Protocol, cast

from agent.fs.guest_sessions import GuestWords
from agent.fs.virtiofs.back_end import PeerError, QueueSetup
from agent.fs.virtiofs.device_queue import BadRing, Chain
from agent.fs.virtiofs.front_end_descriptors import Call, map_memory
from agent.fs.virtiofs.processes.carrier import Carrier
from agent.fs.virtiofs.processes.messages import (
    DESCRIPTORS_MAX,
    FIRST_DESCRIPTORS,
    LINE_BYTES_MAX,
    READY,
    Answer,
    Done,
    Place,
    PlacedRegion,
    Refused,
    Run,
    Stop,
    UseCall,
    UseMemory,
    decode_message,
    encode_answer,
)
from agent.fs.virtiofs.queue_worker import QueueWorker
from agent.host_os.foreign_memory import file_of
from agent.host_os.own_descriptors import receive_from_ours
from agent.host_os.rate_limited_log import Complaints
from agent.virtio.memory_table import MappedRegion, MemoryTable
from agent.virtio.vhost_user import Feature

log = logging.getLogger(__name__)


class Service(Protocol):
    """Answers the chains of one queue."""

    def serve(self, chain: Chain) -> int:
        """How many bytes were written into it. Raises BadRing."""


MakeService = Callable[[int, GuestWords, Carrier], Service]
"""By the number of the request queue, from 0. Called in the thread of the queue."""


class _Running:
    """A queue that is served here, and what was received for it."""

    def __init__(self, worker: QueueWorker, call: Call, carrier: Carrier, kick: int) -> None:
        self.worker, self.call = worker, call
        self._carrier, self._kick = carrier, kick

    def stop(self) -> int:
        """The available idx to go on from."""
        base = self.worker.stop()
        self._carrier.close()
        self.call.close()
        os.close(self._kick)
        return base


class GuestQueues:
    """Those of one guest. Only the thread of `serve` changes anything."""

    def __init__(self, name: str, link: socket.socket, make_service: MakeService) -> None:
        self.name: Final = name
        self._link = link
        self._make_service = make_service
        self._running: dict[int, _Running] = {}
        self._mappings: weakref.WeakValueDictionary[tuple[int, int], mmap.mmap] = (
            weakref.WeakValueDictionary()
        )
        self._words: GuestWords | None = None
        self._complaints = Complaints(log)

    def serve(self) -> None:
        """Say that this process is ready, and do what the first process says, until the link ends."""
        with self._link:
            self._do_what_is_said()

    def _do_what_is_said(self) -> None:
        try:
            self._link.sendall(READY)
            while True:
                line, descriptors = receive_from_ours(self._link, LINE_BYTES_MAX, DESCRIPTORS_MAX)
                if not line:
                    break
                self._link.sendall(encode_answer(self._answer(line, descriptors)))
        except ConnectionError:
            pass
        except BaseException:
            self._end()
        if self._running:
            # The first process is gone, or it has given this one up and serves these rings itself.
            os._exit(1)

    def _end(self) -> NoReturn:
        log.exception("%s cannot go on, and this process ends", self.name)
        os._exit(1)

    def _answer(self, line: bytes, descriptors: Sequence[int]) -> Answer:
        left = list(descriptors)
        try:
            message = decode_message(line)
            if isinstance(message, Run):
                return self._run(message, left)
            if isinstance(message, Stop):
                running = self._running.pop(message.index, None)
                return Done(None if running is None else running.stop())
            if isinstance(message, UseCall):
                self._running[message.index].call.use(left[0] if message.is_there else None)
            else:
                self._use_memory(message, left)
            return Done()
        except PeerError as wrong:
            return Refused(str(wrong))
        finally:
            for each in left:
                os.close(each)

    def _use_memory(self, message: UseMemory, descriptors: Sequence[int]) -> None:
        memory = self._table(message.regions, descriptors)
        for running in self._running.values():
            running.worker.queue.memory = memory

    def _table(self, regions: Sequence[PlacedRegion], descriptors: Sequence[int]) -> MemoryTable:
        return MemoryTable(
            MappedRegion(each.region, self._mapped(each.place, descriptors)) for each in regions
        )

    def _mapped(self, place: Place, descriptors: Sequence[int]) -> memoryview:
        """Bytes of memory that is mapped once, for as long as anybody has a view of it. Raises PeerError: the
        front-end may have sealed it since the first process mapped it."""
        descriptor, end = descriptors[place.memory], place.offset + place.size
        file = file_of(descriptor)
        mapped = self._mappings.get(file)
        if mapped is None or len(mapped) < end:
            whole = map_memory(descriptor, 0, end, must_be_sealed=False)
            mapped = self._mappings[file] = cast(mmap.mmap, whole.obj)
        return memoryview(mapped)[place.offset : end]

    def _run(self, run: Run, descriptors: list[int]) -> Answer:
        """Serve a queue. The carrying socket and the kick are the queue's then."""
        carrying, kick, call_event, words = descriptors[:FIRST_DESCRIPTORS]
        memories = descriptors[FIRST_DESCRIPTORS:]
        if self._words is None:
            self._words = GuestWords(words)
        memory = self._table(run.regions, memories)
        descriptor_table, available, used, piece = (
            self._mapped(each, memories) for each in (run.descriptors, run.available, run.used, run.inflight)
        )
        features = Feature(run.features)
        setup = QueueSetup(run.size, run.base, descriptor_table, available, used, kick, features, piece)
        try:
            queue = setup.ring(memory)
        except BadRing as bad:
            return Refused(str(bad))
        call = Call()
        call.use(call_event)
        for each in (carrying, kick):
            descriptors.remove(each)
        carrier, words_of_guest = Carrier(carrying, queue), self._words

        def serve() -> Callable[[Chain], int]:
            return self._make_service(run.index - 1, words_of_guest, carrier).serve

        worker = QueueWorker(f"{self.name}-{run.index}", queue, kick, call, serve, self._complaints)
        self._running[run.index] = _Running(worker, call, carrier, kick)
        worker.start()
        return Done()
