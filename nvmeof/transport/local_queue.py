"""An I/O queue without a wire: commands go to a medium of this machine. Read `base.HostQueue` first.

A real drive may hang, and pread(2) cannot be called off. So a few threads (`IoThreads`) do the reading and
writing, each with a buffer of its own, and the owner of a queue waits for them until its deadline. A command
that is given up leaves its owner's buffers alone from that moment: data are copied between the thread's
buffer and the owner's under the queue's lock, and only while somebody still waits.

Commands are judged as a controller judges them (`nvmeof/controller/io_commands.py`): namespace, blocks,
length. What a write stores is therefore the same, whether it comes by this queue or over the fabric.

A write that is given up before a thread took it up is never carried out. One that a thread has begun counts
as unanswered until it has ended, also after its queue was closed (agent/remote/fence.py).
"""

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Final

from nvmeof.controller.settings import MIN_PAGE_BYTES
from nvmeof.controller.storage import Scratch, Storage, StorageError
from nvmeof.errors import ConnectionLost, LocalProtocolError, QueueFull
from nvmeof.host.bring_up import ControllerFacts, SessionConfig
from nvmeof.host.command import CID_COUNT, Command
from nvmeof.linux_limits import SureThread
from nvmeof.transport.base import Address, ControllerInfo, submit_each
from nvmeof.wire.identify import IdentifyController
from nvmeof.wire.properties import Capabilities
from nvmeof.wire.sqe import IoOpcode
from nvmeof.wire.status import Status

log = logging.getLogger(__name__)

IO_THREADS: Final = 8
"""For each medium: commands that are carried out at once. An SSD is busy with fewer reads of 1 MiB."""
MAX_TRANSFER: Final = 2 << 20
"""Bytes that one command may move; each thread has a buffer of that size, once it needs one."""
QUEUES: Final = 1024
ENTRIES: Final = 1024
"""Queues, and commands of each, that a local controller grants."""
CLOSED: Final = "closed by us"


class IoThreads:
    """Threads that carry out jobs in the order in which they come. Started one by one, as jobs wait."""

    def __init__(self, name: str, most: int = IO_THREADS) -> None:
        self._name = name
        self._most = most
        self._changed = threading.Condition()
        self._jobs: deque[_Job] = deque()
        """As many as the queues of all workers hold."""
        self._threads = 0
        self._idle = 0
        self._open = True

    def add(self, job: "_Job") -> None:
        """Raises `ConnectionLost` after `close`, and where Linux has no thread for it."""
        with self._changed:
            if not self._open:
                raise ConnectionLost(CLOSED)
            if self._idle <= len(self._jobs) and self._threads < self._most:
                self._start_one()
            self._jobs.append(job)
            self._changed.notify()

    def remove(self, job: "_Job") -> bool:
        """Take a job back; False if a thread has it."""
        with self._changed:
            with suppress(ValueError):
                self._jobs.remove(job)
                return True
            return False

    def close(self) -> None:
        """No more jobs; threads end after what they are doing. Those that hang are daemons. What no thread
        has begun is never carried out, and its owner is told so."""
        with self._changed:
            self._open = False
            dropped = list(self._jobs)
            self._jobs.clear()
            self._changed.notify_all()
        for job in dropped:
            job.queue.ended(job, Status.NAMESPACE_NOT_READY)

    def _start_one(self) -> None:
        try:
            SureThread(self._run, f"{self._name}-{self._threads}").start()
        except RuntimeError as refused:
            if not self._threads:
                raise ConnectionLost(f"no thread for {self._name}: {refused}") from refused
            return
        self._threads += 1

    def _run(self) -> None:
        # It serves all queues, and whose job it was started for may be bound to one processor.
        with suppress(OSError):
            os.sched_setaffinity(0, os.sched_getaffinity(os.getpid()))
        scratch = Scratch(MAX_TRANSFER)
        while True:
            with self._changed:
                self._idle += 1
                while self._open and not self._jobs:
                    self._changed.wait()
                self._idle -= 1
                if not self._jobs:
                    return
                job = self._jobs.popleft()
            try:
                job.queue.carry_out(job, scratch)
            except Exception:
                # A bug: it costs one command, and the log says why.
                log.exception("%s", threading.current_thread().name)
                job.queue.ended(job, Status.INTERNAL_ERROR)


class _Job:
    """A command on its way. `begun`: a thread has it."""

    __slots__ = ("command", "length", "offset", "queue", "storage")

    def __init__(
        self, queue: "LocalQueue", command: Command, storage: Storage, offset: int, length: int
    ) -> None:
        self.queue = queue
        self.command = command
        self.storage = storage
        self.offset = offset
        self.length = length


class LocalMedia:
    """The namespaces of one subsystem of this machine, by id, and the threads that serve them."""

    def __init__(self, namespaces: Mapping[int, Storage], name: str) -> None:
        self.namespaces = namespaces
        self.threads = IoThreads(name)

    def connect(self, depth: int) -> "LocalQueue":
        """A queue of its own for one thread."""
        return LocalQueue(self, depth)

    def info(self, subsystem_nqn: str, host_nqn: str, host_id: bytes) -> ControllerInfo:
        """What a session to a controller would say, of these media."""
        facts = ControllerFacts(
            cntlid=0,
            identify=IdentifyController(subnqn=subsystem_nqn, model="g35 local"),
            capabilities=Capabilities(max_queue_entries=ENTRIES),
            io_queues=QUEUES,
            max_transfer=MAX_TRANSFER,
            in_capsule_bytes=MAX_TRANSFER,
        )
        config = SessionConfig(subsystem_nqn, host_nqn, host_id, keep_alive_s=0)
        return ControllerInfo(Address("local", 0), config, facts, transport="local", local=self)

    def close(self) -> None:
        self.threads.close()


class LocalQueue:
    """`HostQueue` on media of this machine. All calls but `carry_out` and `ended` come from one thread."""

    def __init__(self, media: LocalMedia, depth: int) -> None:
        self.max_transfer = MAX_TRANSFER
        self.depth = depth
        self.alive = True
        self._media = media
        self._changed = threading.Condition()
        self._in_flight: dict[Command, _Job] = {}
        """Waited for, or given up and still in the hands of a thread: `depth` at most."""
        self._next_cid = 0

    @property
    def in_flight(self) -> int:
        return len(self._in_flight)

    @property
    def abandoned(self) -> int:
        with self._changed:
            return sum(each.abandoned for each in self._in_flight)

    @property
    def needs_reconnect(self) -> bool:
        """Never: a command that was given up touches no buffer of its owner."""
        return False

    def reconnect(self) -> None:
        """It never needs to."""

    def register(self, buffer: memoryview) -> None:
        """Threads copy from any memory."""

    def has_room(self, commands: int) -> bool:
        return len(self._in_flight) + commands <= self.depth

    def submit(self, command: Command, *, more: bool = False) -> None:
        """Hand it to a thread. Raises `QueueFull` and `ConnectionLost`."""
        if not self.alive:
            raise ConnectionLost(CLOSED)
        if command.cid >= 0:
            raise LocalProtocolError(f"{command!r} was submitted already")
        if not self.has_room(1):
            raise QueueFull(f"{self.depth} commands are in flight")
        self._next_cid = (self._next_cid + 1) % CID_COUNT
        job, refused = self._judged(command)
        command.submitted_at = time.monotonic()
        command.cid = self._next_cid
        if job is None:
            command.end(refused, do_not_retry=True)
            return
        with self._changed:
            self._in_flight[command] = job
        try:
            self._media.threads.add(job)
        except ConnectionLost:
            command.cid = -1
            del self._in_flight[command]
            raise

    def submit_all(self, commands: Sequence[Command], *, more: bool = False) -> None:
        submit_each(self, commands, more)

    def _judged(self, command: Command) -> tuple[_Job | None, int]:
        """The job of a command; None, and the status, where it is refused."""
        storage = self._media.namespaces.get(command.nsid)
        if storage is None:
            return None, Status.INVALID_NAMESPACE
        if command.opcode == IoOpcode.FLUSH:
            return _Job(self, command, storage, 0, 0), 0
        if command.opcode not in (IoOpcode.READ, IoOpcode.WRITE):
            return None, Status.INVALID_OPCODE
        first = command.cdw10 | command.cdw11 << 32
        blocks = (command.cdw12 & 0xFFFF) + 1
        if first + blocks > storage.block_count:
            return None, Status.LBA_OUT_OF_RANGE
        length = blocks * storage.lba_bytes
        moved = command.in_bytes if command.opcode == IoOpcode.READ else command.out_bytes
        if moved != length:
            return None, Status.DATA_SGL_LENGTH_INVALID
        if length > MAX_TRANSFER:
            return None, Status.INVALID_FIELD
        return _Job(self, command, storage, first * storage.lba_bytes, length), 0

    def wait(self, command: Command, deadline: float, at_least: int | None = None) -> bool:
        if command.cid < 0:
            raise LocalProtocolError(f"{command!r} was not submitted")
        with self._changed:
            while not command.done:
                remaining = deadline - time.monotonic()
                if remaining <= 0:
                    return False
                self._changed.wait(remaining)
            return True

    def abandon(self, command: Command) -> None:
        with self._changed:
            job = self._in_flight.get(command)
            if job is None or command.done:
                return
            command.abandoned = True
            if self._media.threads.remove(job):
                del self._in_flight[command]
                command.answered_late = True

    def oldest_abandoned(self) -> float | None:
        with self._changed:
            given_up = [each.submitted_at for each in self._in_flight if each.abandoned]
        return min(given_up, default=None)

    def silent_since(self) -> float | None:
        """Nothing is lost between a thread and this queue."""
        return None

    def close(self) -> None:
        """What no thread has begun is never carried out. What one has begun ends where it is."""
        with self._changed:
            self.alive = False
            for command, job in list(self._in_flight.items()):
                was_taken_back = self._media.threads.remove(job)
                if was_taken_back:
                    del self._in_flight[command]
                if not command.abandoned:
                    if not command.done:
                        command.lose(CLOSED)
                elif was_taken_back:
                    command.answered_late = True
            self._changed.notify_all()

    # -- on a thread of IoThreads -----------------------------------------------------------------

    def carry_out(self, job: _Job, scratch: Scratch) -> None:
        """Do what the command says, into or out of `scratch`."""
        command = job.command
        try:
            if command.opcode == IoOpcode.READ:
                self.ended(job, 0, job.storage.read(job.offset, job.length, scratch))
                return
            if command.opcode == IoOpcode.WRITE:
                payload = self._gathered(job, scratch)
                if payload is not None:
                    job.storage.write(job.offset, payload, placed=False)
            else:
                job.storage.flush()
        except StorageError as failed:
            self.ended(job, failed.status, do_not_retry=failed.do_not_retry)
            return
        self.ended(job, 0)

    def _gathered(self, job: _Job, scratch: Scratch) -> memoryview | None:
        """The payload of a write, out of the buffers of its owner; None where they are his again."""
        command = job.command
        with self._changed:
            if command.abandoned or command.done:
                return None
            payload = scratch.take(job.length)
            at = 0
            for part in command.data_out:
                payload[at : at + len(part)] = part
                at += len(part)
            return payload

    def ended(
        self, job: _Job, status: int, data: memoryview | None = None, *, do_not_retry: bool = False
    ) -> None:
        """A thread is done with the command: settle it, if anybody waits for it still."""
        command = job.command
        with self._changed:
            self._in_flight.pop(command, None)
            if command.abandoned:
                command.answered_late = True
            elif not command.done:
                if data is not None and not status:
                    assert command.data_in is not None
                    command.data_in[:] = data
                    command.received = command.in_bytes
                command.end(status, do_not_retry=do_not_retry)
            self._changed.notify_all()


assert MAX_TRANSFER % MIN_PAGE_BYTES == 0
