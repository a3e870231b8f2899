"""One guest's device: its session, its books, and the threads that serve its queues.

`Device` is the `Surroundings` of a `BackEnd`. It outlives connections, for a front-end may come back and go
on. It gives back what it holds for a guest when the guest begins anew (INIT, DESTROY, RESET_DEVICE), or when
the front-end is gone and cannot come back.
"""

import errno
import logging
from collections.abc import Callable

from agent.fs.fuse.abi import IN_HEADER, IN_HEADER_BYTES, Opcode, encode_answer
from agent.fs.fuse.session import TRANSFER_BYTES, WANTED_BY_GUESTS, FuseSession, Negotiated
from agent.fs.guest_sessions import Bound
from agent.fs.interface import FACE_FILES, FACE_SHIFT, Tree
from agent.fs.virtiofs import front_end_descriptors
from agent.fs.virtiofs.back_end import QueueSetup
from agent.fs.virtiofs.device_queue import Chain
from agent.fs.virtiofs.guest_books import GuestBooks
from agent.fs.virtiofs.guest_view import GuestView
from agent.fs.virtiofs.processes.queue_places import HIGH_PRIORITY, GuestProcesses, QueuePlaces, Queues
from agent.fs.virtiofs.queue_worker import Serve
from agent.fs.virtiofs.request_buffers import RequestBuffers
from agent.fs.virtiofs.request_service import RequestService, is_given_back
from agent.host_os.foreign_descriptors import close_descriptor
from agent.host_os.rate_limited_log import Complaints
from agent.pool.steps import NoRunner, Runner
from agent.virtio.memory_table import MemoryTable

log = logging.getLogger(__name__)

_FORGETS = frozenset({Opcode.FORGET.value, Opcode.BATCH_FORGET.value})


def takes_scattered(node: int) -> bool:
    """Whether a READ of this node may open into several places: values may, files are put together."""
    return node >> FACE_SHIFT != FACE_FILES


class Device:
    """`Surroundings` of a back-end, for as many connections as come one after the other."""

    def __init__(
        self,
        name: str,
        tree: Tree,
        request_queues: int,
        make_runner: Callable[[int], Runner],
        *,
        sealed_memory: bool = True,
        transfer_bytes: int = TRANSFER_BYTES,
        books: GuestBooks | None = None,
        processes: GuestProcesses | None = None,
    ) -> None:
        """`books`: what the guest held when an earlier process ended; with INIT in them it goes on.
        `processes`: where others of the agent serve queues, too."""
        self.name = name
        self.queue_count = 1 + request_queues
        self.books = books or GuestBooks()
        self.view = GuestView(tree, self.books, name)
        self.complaints = Complaints(log)
        self._processes = processes
        self.session = FuseSession(
            self.view,
            transfer_bytes=transfer_bytes,
            complaints=self.complaints,
            wanted=WANTED_BY_GUESTS,
            begins_anew=self._begins_anew,
            agreed=self._agreed,
        )
        if self.books.negotiated is not None:
            self.session.resume(self.books.negotiated)
            self._say_live(True)
        self._make_runner = make_runner
        self._sealed_memory = sealed_memory
        self._buffers = [
            RequestBuffers(self.session.transfer_bytes, takes_scattered) for _ in range(self.queue_count)
        ]
        self._calls = [front_end_descriptors.Call() for _ in range(self.queue_count)]
        queues = Queues(name, self._calls, self._make_serve, self._make_piece, self._bound)
        self.places = QueuePlaces(queues, processes, self.complaints)

    @property
    def bytes_copied(self) -> int:
        return sum(buffers.bytes_copied for buffers in self._buffers)

    def settle_everything(self) -> None:
        """Flush the guest's files before an orderly end, while no queue runs."""
        self.view.settle_everything(self._make_runner(0))

    def close(self) -> None:
        """Close the device after the last connection, when nothing runs any more."""
        self.books.close()
        self.places.close()
        for call in self._calls:
            call.close()
        self._calls = []

    def end_session(self) -> None:
        """The guest is gone: what it held is given back. Only while no queue runs."""
        assert self.places.are_still
        self.session.begin_anew(self._make_runner(0))

    def map_memory(self, fd: int, offset: int, size: int) -> memoryview:
        return front_end_descriptors.map_memory(
            fd, offset, size, must_be_sealed=self._sealed_memory, is_shared=self._processes is not None
        )

    def make_memory(self, size: int) -> int:
        return front_end_descriptors.make_memory(size)

    def close_fd(self, fd: int) -> None:
        close_descriptor(fd)

    def check_event(self, fd: int) -> None:
        front_end_descriptors.check_event(fd)

    def use_call(self, index: int, fd: int | None) -> None:
        self.places.use_call(index, fd)

    def memory_changed(self, memory: MemoryTable) -> None:
        self.places.use_memory(memory)

    def start(self, index: int, setup: QueueSetup, memory: MemoryTable) -> None:
        self.places.start(index, setup, memory)

    def stop(self, index: int) -> int | None:
        return self.places.stop(index)

    def _make_serve(self, index: int) -> Callable[[], Serve]:
        return self._high_priority if index == HIGH_PRIORITY else lambda: self._requests(index)

    def _make_piece(self, size: int) -> memoryview:
        descriptor = self.make_memory(size)
        try:
            return self.map_memory(descriptor, 0, size)
        finally:
            self.close_fd(descriptor)

    def _bound(self, handle: int) -> Bound:
        """What a reader may read of a session that the guest has open."""
        processes = self._processes
        assert processes is not None
        version = processes.words.version_of(handle)  # before: what is bound meanwhile has a later one
        place = self.view.place_of(processes.session_node, handle)
        return Bound(version, () if place is None else processes.bindings(place[1]))

    def _say_live(self, is_live: bool) -> None:
        if self._processes is not None:
            self._processes.words.say_live(is_live)

    def _agreed(self, negotiated: Negotiated) -> None:
        self.books.agreed(negotiated)
        self._say_live(True)

    def _begins_anew(self, runner: Runner) -> None:
        self._say_live(False)
        self.view.give_everything_back(runner)

    def _requests(self, index: int) -> Serve:
        return RequestService(self.session, self._buffers[index], self._make_runner(index - 1)).serve

    def _high_priority(self) -> Serve:
        session, buffers = self.session, self._buffers[HIGH_PRIORITY]
        runner = NoRunner()  # FORGET waits for nothing, and whatever else comes is refused

        def serve(chain: Chain) -> int:
            message, received, data, room = buffers.take(chain.readable, chain.writable)
            if received < IN_HEADER_BYTES:
                self.complaints.peer("a high-priority request", "shorter than its header")
                return 0
            _, opcode, unique, *_ = IN_HEADER.unpack_from(message)
            if opcode in _FORGETS:
                buffers.let_go()
                if chain.again and is_given_back(message, received):
                    return 0
                session.answer(message, received, data, room, runner)
                return 0
            if opcode == Opcode.INTERRUPT:
                return 0  # a file system may ignore it; every operation of ours ends by its own deadline
            self.complaints.peer("a high-priority request", f"opcode {opcode}")
            return buffers.put([encode_answer(errno.EIO, unique)]) or 0

        return serve
