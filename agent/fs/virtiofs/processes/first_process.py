"""Queues of one guest that readers serve, as the first process has them: the links to the readers, and a
thread for each queue that serves what its reader does not.

The guest's session, its books and its files live in the first process. So a reader carries each request here
that is no get of its own: it names the chain, this process answers it in the guest's memory, and the reader
completes it. A reader never closes a socket of these before its process ends or the queue was stopped. So the
end of a socket means that nobody serves the ring any more.
"""

import logging
import os
import queue
import select
import socket
import threading
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from agent.fs.guest_sessions import Bound
from agent.fs.virtiofs.back_end import QueueSetup
from agent.fs.virtiofs.device_queue import BadRing, DeviceQueue
from agent.fs.virtiofs.front_end_descriptors import signal
from agent.fs.virtiofs.processes.messages import (
    LINE_BYTES_MAX,
    QUESTION,
    READY,
    SERVE,
    Answer,
    Done,
    Message,
    Place,
    PlacedRegion,
    Refused,
    Run,
    Stop,
    UseCall,
    UseMemory,
    decode_answer,
    encode_bad,
    encode_bound,
    encode_message,
    encode_written,
)
from agent.fs.virtiofs.queue_worker import Serve
from agent.host_os.foreign_memory import place_in_memory
from agent.virtio.memory_table import MemoryTable

log = logging.getLogger(__name__)


class ReaderGone(Exception):
    """The process that served the queue has ended."""


class RunRefused(Exception):
    """A reader cannot serve this queue, by the front-end's fault."""


class Taken(NamedTuple):
    """A chain that this process has answered for a reader, and how many bytes were written into it."""

    head: int
    taking: int
    written: int


class ReaderLink:
    """To one process, for one guest. For the door's thread."""

    def __init__(self, number: int, link: socket.socket) -> None:
        self.number: Final = number
        self._link = link
        self.is_ready = self.is_gone = False

    def fileno(self) -> int:
        return self._link.fileno()

    def hear(self) -> None:
        """What it says unasked: that it is ready, or its end."""
        try:
            self._hear(self._link.recv(LINE_BYTES_MAX, socket.MSG_DONTWAIT))
        except BlockingIOError:
            return
        except ConnectionError:
            self.is_gone = True

    def _hear(self, line: bytes) -> None:
        self.is_gone = not line
        self.is_ready = self.is_ready or line == READY

    def ask(self, message: Message, descriptors: Sequence[int] = ()) -> Done:
        """Raises ReaderGone, RunRefused. A process that hangs is killed by those who started it."""
        if self.is_gone:
            raise ReaderGone
        try:
            socket.send_fds(self._link, [encode_message(message)], descriptors)
            line = self._link.recv(LINE_BYTES_MAX)
        except OSError:
            line = b""
        if not line:
            self.is_gone = True
            raise ReaderGone
        return _done(decode_answer(line))

    def close(self) -> None:
        self._link.close()


def _done(answer: Answer) -> Done:
    if isinstance(answer, Refused):
        raise RunRefused(answer.words)
    return answer


class ReaderLinks:
    """Those of one guest. All but `come` is for the door's thread."""

    def __init__(self) -> None:
        self._arrivals: queue.SimpleQueue[ReaderLink] = queue.SimpleQueue()
        self._links: dict[int, ReaderLink] = {}
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._poller = select.epoll()
        self._poller.register(self._wake, select.EPOLLIN)

    def fileno(self) -> int:
        """To be watched: readable when `look` has something to do."""
        return self._poller.fileno()

    def come(self, number: int, link: socket.socket) -> None:
        """A new process of this number has the other end; from any thread."""
        self._arrivals.put(ReaderLink(number, link))
        signal(self._wake)

    def look(self) -> None:
        """Hear what there is, without waiting."""
        for descriptor, _ in self._poller.poll(0):
            if descriptor == self._wake:
                os.eventfd_read(self._wake)
        while not self._arrivals.empty():
            link = self._arrivals.get()
            before = self._links.get(link.number)
            if before is not None:
                before.is_gone = True
                before.close()
            self._links[link.number] = link
            self._poller.register(link.fileno(), select.EPOLLIN)
        for link in list(self._links.values()):
            link.hear()
            if link.is_gone:
                del self._links[link.number]
                link.close()

    def ready(self, number: int) -> ReaderLink | None:
        """The process of this number, where it can serve."""
        link = self._links.get(number)
        return link if link is not None and link.is_ready and not link.is_gone else None

    def close(self) -> None:
        for link in self._links.values():
            link.close()
        while not self._arrivals.empty():
            self._arrivals.get().close()
        self._poller.close()
        os.close(self._wake)


class Placed:
    """Places in memory that goes along with a message."""

    def __init__(self) -> None:
        self.descriptors: list[int] = []

    def of(self, view: memoryview) -> Place:
        descriptor, offset = place_in_memory(view)
        if descriptor not in self.descriptors:
            self.descriptors.append(descriptor)
        return Place(self.descriptors.index(descriptor), offset, len(view))

    def regions(self, memory: MemoryTable) -> list[PlacedRegion]:
        return [
            PlacedRegion(
                each.region.guest_address, each.region.size, each.region.user_address, self.of(each.memory)
            )
            for each in memory.regions
        ]


class RemoteQueue:
    """One run of one queue by a reader, and the thread here that serves what that one carries."""

    def __init__(
        self,
        name: str,
        index: int,
        ring: DeviceQueue,
        make_serve: Callable[[], Serve],
        bound: Callable[[int], Bound],
        link: ReaderLink,
    ) -> None:
        """`ring` is there to follow chains. `make_serve` is called in the thread; `bound`: in a session of
        the guest, by its handle."""
        self.link: Final = link
        self._index, self._ring = index, ring
        self._make_serve, self._bound = make_serve, bound
        self._carried, self._carrying = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self.last: Taken | None = None
        """The last chain that was answered here, once the thread has ended."""

    def start(self, setup: QueueSetup, memory: MemoryTable, call: int, words: int) -> None:
        """Have the reader serve it, with its notes in the inflight piece. Raises ReaderGone; RunRefused where
        nobody serves it."""
        assert setup.inflight_piece is not None
        placed = Placed()
        run = Run(
            self._index,
            setup.size,
            setup.base,
            setup.features.value,
            placed.of(setup.descriptors),
            placed.of(setup.available),
            placed.of(setup.used),
            placed.of(setup.inflight_piece),
            placed.regions(memory),
        )
        self._thread.start()
        try:
            with self._carrying:
                given = [self._carrying.fileno(), setup.kick, call, words]
                self.link.ask(run, [*given, *placed.descriptors])
        except (ReaderGone, RunRefused):
            self.join()
            raise

    def use_memory(self, memory: MemoryTable) -> None:
        self._ring.memory = memory

    def use_call(self, fd: int | None) -> None:
        """Raises ReaderGone, RunRefused."""
        self.link.ask(UseCall(self._index, fd is not None), [] if fd is None else [fd])

    def stop(self) -> int | None:
        """End it after the request at hand: the available idx to go on from. Raises ReaderGone."""
        done = self.link.ask(Stop(self._index))
        self.join()
        return done.base

    def join(self) -> None:
        """Wait for the thread, whose socket's other end is closed or is to be closed. A second time there is
        nothing to wait for."""
        self._thread.join()
        self._carried.close()

    def _work(self) -> None:
        try:
            serve = self._make_serve()
            while question := self._carried.recv(QUESTION.size):
                self._carried.sendall(self._answer(serve, question))
        except ConnectionError:
            return  # the reader has ended
        except BaseException:
            # Not of a request: those stay within the session. The reader gets no answer, and ends.
            log.exception("%s ended", self._thread.name)
            self._carried.shutdown(socket.SHUT_RDWR)

    def _answer(self, serve: Serve, question: bytes) -> bytes:
        which, again, head, _, taking, handle = QUESTION.unpack(question)
        if which != SERVE:
            return encode_bound(self._bound(handle))
        try:
            written = serve(self._ring.chain_at(head, again=bool(again)))
        except BadRing as bad:
            return encode_bad(str(bad))
        self.last = Taken(head, taking, written)
        return encode_written(written, self._bound(handle) if handle else None)


def tell_memory(link: ReaderLink, memory: MemoryTable) -> str:
    """The guest's memory is another. Why the reader does not take it, empty where it does or is gone."""
    placed = Placed()
    regions = placed.regions(memory)
    try:
        link.ask(UseMemory(regions), placed.descriptors)
    except ReaderGone:
        return ""
    except RunRefused as refused:
        return str(refused)
    return ""
