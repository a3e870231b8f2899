"""An RDMA I/O queue for one thread: blocking, run to completion. Read `base.HostQueue` first.

The waiter takes completions for every command in flight until its own is done; with an emulated device it
also receives for everybody meanwhile (`verbs_waiting.Completions.wait`).

A queue that gave up on a command with a buffer of ours (`host/rdma_queue.py`) is still `alive`. Its queue
pair is broken at once, which makes the buffer safe; the next `submit` connects a new one to the same
controller. So a slow drive costs its reader the deadline and a new connection; other queues go on.
"""

import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

from nvmeof import errors
from nvmeof.host.bring_up import join
from nvmeof.host.command import Command
from nvmeof.host.procedure import each_command
from nvmeof.host.rdma_queue import SPARE_RECEIVES, RdmaQueue, send_room
from nvmeof.limits import CONNECT_TIMEOUT_S
from nvmeof.rdma.buffers import RegisteredBuffers
from nvmeof.rdma.work import Access
from nvmeof.transport.base import Address, ControllerInfo, submit_each
from nvmeof.transport.rdma_connect import RdmaLink, Waiting
from nvmeof.transport.verbs_provider import load_verbs
from nvmeof.wire.identify import SGLS_OFFSET
from nvmeof.wire.rdma import ConnectRequest

MOST_IN_CAPSULE: Final = 16 << 10
"""Larger data are not worth the copy into the capsule; every command has room for so much."""

RECONNECT_S: Final = 0.5
"""How long a queue may take to connect again after we broke its queue pair."""

RETRY_S: Final = 0.005
"""A controller that has not yet heard of the end of the old queue pair refuses its id; then after so long
again.
"""

WINDOWED: Final = Access.LOCAL_WRITE | Access.WINDOW_BIND
PLAIN: Final = Access.LOCAL_WRITE | Access.REMOTE_READ | Access.REMOTE_WRITE


@dataclass(frozen=True, slots=True)
class Linked:
    """A connected queue: the link and the protocol object on it."""

    link: RdmaLink
    queue: RdmaQueue
    buffers: RegisteredBuffers

    def post(self) -> None:
        """Post what the queue wants posted. Raises `ConnectionLost`."""
        self.link.post(self.queue.take_receives(), self.queue.sends.take())

    def pump(self) -> list[Command]:
        """Take what has completed and post what follows; the commands that ended. Raises `NvmeofError`."""
        queue = self.queue
        ended: list[Command] = []
        for done in self.link.take():
            ended += queue.completed(done)
        if queue.to_post:
            self.post()
        return ended

    def end(self, reason: str) -> list[Command]:
        """Break the queue pair, then end the commands: their owners may use the buffers again."""
        self.link.break_off()
        ended = self.queue.fail(reason)
        self.link.close()
        return ended


def link_up(
    link: RdmaLink, address: Address, qid: int, cntlid: int, depth: int, in_capsule: int, deadline: float
) -> Waiting[Linked]:
    """Connect a queue pair, and the queue on it; Connect is yet to be sent. Raises `ConnectionLost`."""
    try:
        yield from link.resolve(address, deadline)
        receives, room = depth + SPARE_RECEIVES, send_room(depth)
        domain = link.make_pair(room=room, receives=receives, windows=depth)
        buffers = RegisteredBuffers(domain, WINDOWED if link.windows else PLAIN)
        queue = RdmaQueue(
            depth,
            buffers,
            in_capsule_bytes=in_capsule,
            windows=link.windows,
            renew_window=domain.renew_window if link.windows_serve_once else None,
        )
        queue.start()
        linked = Linked(link, queue, buffers)
        linked.post()
        entries = yield from link.connect(ConnectRequest(qid, receives, depth + 1, cntlid), deadline)
        queue.limit_depth(entries)
        return linked
    except BaseException:
        link.close()
        raise


def _blocking(steps: Waiting[Linked], link: RdmaLink, deadline: float) -> Linked:
    while True:
        try:
            next(steps)
        except StopIteration as end:
            linked: Linked = end.value
            return linked
        link.wait_event(deadline)


class RdmaHostQueue:
    """`HostQueue` over a queue pair, which it owns. All calls come from one thread."""

    def __init__(self, info: ControllerInfo, qid: int, depth: int) -> None:
        self.max_transfer = info.facts.max_transfer
        self.depth = depth
        self.alive = True
        self._info = info
        self._qid = qid
        self._why = ""
        self._linked: Linked | None = None
        self._registered: list[memoryview] = []

    @property
    def in_flight(self) -> int:
        return self._linked.queue.in_flight if self._linked is not None else 0

    @property
    def abandoned(self) -> int:
        return self._linked.queue.abandoned if self._linked is not None else 0

    @property
    def needs_reconnect(self) -> bool:
        return self.alive and self._linked is None

    def reconnect(self) -> None:
        if self.needs_reconnect:
            self._connect_again()

    def register(self, buffer: memoryview) -> None:
        if not any(known is buffer for known in self._registered):
            self._registered.append(buffer)
        if self._linked is not None:
            self._register(self._linked)

    def has_room(self, commands: int) -> bool:
        linked = self._linked
        if linked is not None and not linked.queue.has_room(commands):
            self._pump(linked)
        return self._linked is None or self._linked.queue.has_room(commands)

    def submit(self, command: Command, *, more: bool = False) -> None:
        """Post it. Raises `QueueFull` and `ConnectionLost`; then it was not submitted."""
        if not self.alive:
            raise errors.ConnectionLost(self._why)
        linked = self._linked or self._connect_again()
        # Answers that nobody waits for (to abandoned commands) may make room.
        self.has_room(1)
        if self._linked is None:
            raise errors.ConnectionLost(self._why)
        linked.queue.submit(command, time.monotonic())
        if not more:
            self._post(linked)

    def submit_all(self, commands: Sequence[Command], *, more: bool = False) -> None:
        try:
            submit_each(self, commands, more)
        except errors.NvmeofError:
            # Those before it leave all the same: nobody may come to wait for one of this queue for a while.
            if self._linked is not None:
                self._post(self._linked)
            raise

    def _post(self, linked: Linked) -> None:
        try:
            linked.post()
        except errors.ConnectionLost as error:
            self._die(str(error))

    def wait(self, command: Command, deadline: float, at_least: int | None = None) -> bool:
        """Data of RDMA are there when all of them are."""
        while not command.done:
            linked = self._linked
            if command.cid < 0 or linked is None:
                raise errors.LocalProtocolError(f"{command!r} is not in flight here")
            completions = linked.link.completions
            assert completions is not None
            if completions.needs_arming:
                completions.arm()
            self._pump(linked)
            if self._linked is None or command.done:
                break
            if time.monotonic() >= deadline:
                return False
            try:
                completions.wait(deadline, linked.link.event_waits)
                if linked.link.event_waits():
                    linked.link.look_at_events()
            except errors.NvmeofError as error:
                self._die(str(error))
            else:
                if linked.link.gone is not None:
                    self._pump(linked)  # what was answered before the end is answered
                    self._die(linked.link.gone)
        return command.done

    def abandon(self, command: Command) -> None:
        """Breaks the queue pair where the data are in the owner's own buffer."""
        linked = self._linked
        if linked is not None and linked.queue.abandon(command):
            self._linked = None
            linked.end(f"{command.name} was given up, and its buffer taken back")

    def oldest_abandoned(self) -> float | None:
        """Takes what has arrived into account."""
        if self._linked is not None and self._linked.queue.oldest_abandoned() is not None:
            self._pump(self._linked)
        return self._linked.queue.oldest_abandoned() if self._linked is not None else None

    def silent_since(self) -> float | None:
        """A queue pair breaks where anything is lost."""
        return None

    def close(self) -> None:
        """Hang up. An RDMA connection needs no goodbye but the connection manager's."""
        self._die("closed by us")

    def _pump(self, linked: Linked) -> None:
        try:
            linked.pump()
        except errors.NvmeofError as error:
            self._die(str(error))

    def _die(self, reason: str) -> None:
        if not self.alive:
            return
        self.alive = False
        self._why = reason
        linked, self._linked = self._linked, None
        if linked is not None:
            linked.end(reason)

    def connect(self, deadline: float) -> None:
        """Connect the queue pair and the queue. Raises `ConnectionLost`, `ConnectRefused`."""
        info, facts = self._info, self._info.facts
        assert info.verbs is not None
        inside = min(facts.in_capsule_bytes, MOST_IN_CAPSULE) if facts.identify.sgls & SGLS_OFFSET else 0
        link = RdmaLink(info.verbs, load_verbs(info.verbs.provider))
        steps = link_up(link, info.address, self._qid, facts.cntlid, self.depth, inside, deadline)
        linked = self._linked = _blocking(steps, link, deadline)
        try:
            for command in each_command(join(info.config, self._qid, self.depth + 1, facts.cntlid)):
                self.submit(command)
                if not self.wait(command, deadline):
                    self._die("no answer in time")  # by which it is lost: the procedure says what that means
            self._register(linked)
        except errors.NvmeofError:
            self._linked = None
            linked.end("not connected")
            raise
        self.depth = linked.queue.depth

    def _register(self, linked: Linked) -> None:
        """Those that are not yet. One that the device will not have is copied from and to, as any other."""
        for buffer in self._registered:
            if linked.buffers.find(buffer) is None:
                with suppress(errors.ConnectionLost):
                    linked.buffers.register(buffer)

    def _connect_again(self) -> Linked:
        """After a queue pair that we broke. The queue dies where that does not succeed in time."""
        deadline = time.monotonic() + RECONNECT_S
        while True:
            try:
                self.connect(deadline)
            except errors.ConnectRefused as refusal:
                if isinstance(refusal, errors.AuthenticationFailed) or time.monotonic() + RETRY_S >= deadline:
                    self._die(str(refusal))
                    raise errors.ConnectionLost(str(refusal)) from refusal
                time.sleep(RETRY_S)
            except errors.NvmeofError as error:
                self._die(str(error))
                raise errors.ConnectionLost(str(error)) from error
            else:
                assert self._linked is not None
                return self._linked


def connect_io_queue(
    info: ControllerInfo, qid: int, depth: int, timeout_s: float = CONNECT_TIMEOUT_S
) -> RdmaHostQueue:
    queue = RdmaHostQueue(info, qid, info.queue_depth(qid, depth))
    try:
        queue.connect(time.monotonic() + timeout_s)
    except errors.NvmeofError:
        with suppress(errors.NvmeofError):
            queue.close()
        raise
    return queue
