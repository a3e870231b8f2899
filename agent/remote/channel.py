"""A worker's lanes: its own queues to every enclosure, and the loop that drives steps on them.

A `WorkerLanes` belongs to one thread. It connects a queue to an enclosure when it first needs one and
the supervisor's session stands, reads and writes on it, and while it waits for one answer it receives
for all. Buffers are the worker's own as well, page-aligned and as long as the longest operation needs.
Only where the worker is idle another thread takes what has arrived at its queues (`look_for_answers`).

Nothing here raises for the fabric's sake. What cannot be sent is a `PendingRequest` that has failed.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator, Sequence
from functools import partial
from typing import Final, TypeVar

from agent.host_os.payload_memory import payload_memory
from agent.inline.scatter import Buffer
from agent.pool.counters import Tally
from agent.pool.format.slot import HEADER_BYTES
from agent.pool.steps import Acquire, Pending, Steps, Wait
from agent.remote.block_commands import block_commands
from agent.remote.connect_attempt import ConnectAttempt
from agent.remote.enclosure import Enclosure, Route
from agent.remote.fabric import Fabric
from agent.remote.fence import COMMAND_SECONDS
from agent.remote.kv_channel import KvCommands, KvPendingRequest
from agent.remote.outstanding import CLOCK_SLACK, NOT_ANSWERING, Outstanding
from agent.remote.paths import Build, Request, in_order, left_by_its_path, path_failed
from agent.remote.pending_request import PendingRequest
from agent.remote.queue_slot import QueueSlot
from nvmeof.errors import NvmeofError
from nvmeof.host.command import Command
from nvmeof.transport import HostQueue, connect_io_queue

T = TypeVar("T")

TRANSFER_MAX: Final = 1 << 20
"""The longest range that one request of the host asks for."""
BUFFER_BYTES: Final = HEADER_BYTES + TRANSFER_MAX + (2 << 20)
"""Header, range, and the units (1 MiB at most) that the range begins and ends in."""
QUEUE_DEPTH: Final = 64
CONNECT_SECONDS: Final = 1.0
CONNECT_WAIT_SECONDS: Final = 0.04
"""How long the request that first wants a queue waits for it to be connected; then it is a miss."""
RETRY_CONNECT_SECONDS: Final = 0.5
WARM_SECONDS: Final = 0.25
"""How often the queues of paths that are not in use are looked after."""
CLOSE_WAIT_SECONDS: Final = 0.1
"""How long the end of a worker waits for another thread's look at its queues."""
FENCED: Final = "a write that was not answered may still land there"

_CURRENT: Final = threading.local()


def current_lanes() -> WorkerLanes:
    """The lanes whose `run` drives the steps that ask. Only steps may ask."""
    lanes: WorkerLanes = _CURRENT.lanes
    return lanes


class WorkerLanes(KvCommands):
    """Lanes and runner of one worker. `queue_id` is the id of its queues, the same on every enclosure."""

    def __init__(self, fabric: Fabric, queue_id: int) -> None:
        self.tallies: dict[str, Tally] = {"": Tally()}
        self._fabric = fabric
        self._queue_id = queue_id
        self._lanes: dict[int, QueueSlot] = {}
        self._receive = payload_memory(BUFFER_BYTES)
        self._send = payload_memory(BUFFER_BYTES)
        self._warm_at = 0.0
        self._in_use = threading.RLock()
        """Of whoever uses the queues: the thread that runs steps, for as long as they run."""
        self._look_asked = False

    # -- Lanes ----------------------------------------------------------------------------------

    def read(self, namespace: int, offset: int, into: memoryview) -> PendingRequest:
        self.tallies[""].flash_bytes_read += len(into)
        return self._start(namespace, offset, len(into), into, ())

    def write(
        self, namespace: int, offset: int, parts: Sequence[Buffer], *, more: bool = False
    ) -> PendingRequest:
        size = sum(map(len, parts))
        self.tallies[""].flash_bytes_written += size
        sessions = self._fabric.unflushed.sessions
        pending = self._start(namespace, offset, size, None, parts, more)
        if pending.queue is not None:
            self._fabric.unflushed.wrote(self._fabric.nguids[namespace], pending, sessions)
        return pending

    def flush(self, namespace: int) -> PendingRequest:
        return self._start(namespace, 0, 0, None, ())

    def unflushed(self, namespace: int) -> int | None:
        return self._fabric.unflushed.mark(self._fabric.nguids[namespace])

    def flushed(self, namespace: int, mark: int, flush: Pending) -> None:
        assert isinstance(flush, PendingRequest)
        self._fabric.unflushed.flushed(self._fabric.nguids[namespace], mark, flush.began)

    def written(self) -> int:
        return self._fabric.unflushed.number

    def is_unflushed(self, namespace: int, first: int, last: int) -> bool:
        return self._fabric.unflushed.is_open(self._fabric.nguids[namespace], first, last)

    def doubtful(self, namespace: int) -> int:
        return self._fabric.unflushed.doubtful(self._fabric.nguids[namespace])

    def abandon(self, pending: Pending) -> None:
        assert isinstance(pending, PendingRequest)
        if not pending.done and pending.asked is not None:
            pending.asked.given_up(time.monotonic())
        self._settle(pending)
        pending.give_up("no answer in time")

    def receive_buffer(self, size: int) -> memoryview:
        return self._receive[:size]

    def send_buffer(self, size: int) -> memoryview:
        return self._send[:size]

    def trusts(self, namespace: int) -> bool:
        fabric = self._fabric
        return fabric.health[namespace].trusted and fabric.nguids[namespace] not in fabric.taken

    def tally(self, volume: str) -> Tally:
        tally = self.tallies.get(volume)
        if tally is None:
            tally = self.tallies[volume] = Tally()
        return tally

    def now(self) -> float:
        return time.monotonic()

    def wall(self) -> float:
        return time.time()

    # -- queues ---------------------------------------------------------------------------------

    def _start(
        self,
        namespace: int,
        offset: int,
        size: int,
        into: memoryview | None,
        parts: Sequence[Buffer],
        more: bool = False,
    ) -> PendingRequest:
        def build(route: Route, queue: HostQueue, base: int) -> Sequence[Command]:
            left = into[base:] if into is not None else None
            return block_commands(
                route.nsid, route.lba_bytes, offset + base, size - base, left, parts, queue.max_transfer
            )

        pending = PendingRequest(None, (), None)
        self._begin(pending, namespace, offset, size, build, is_read=not parts, more=more)
        return pending

    def start_kv(self, namespace: int, build: Callable[[int], Command], key: bytes = b"") -> KvPendingRequest:
        """Send a command on a key; `build` makes it for a namespace id. `key`: the one that it changes."""

        def built(route: Route, queue: HostQueue, base: int) -> Sequence[Command]:
            return (build(route.nsid),)

        pending = KvPendingRequest(None, (), None)
        at = int.from_bytes(key, "little")
        self._begin(pending, namespace, at, 1, built, is_read=not key, more=False, of_keys=True)
        return pending

    def _begin(
        self,
        pending: PendingRequest,
        namespace: int,
        at: int,
        size: int,
        build: Build,
        *,
        is_read: bool,
        more: bool,
        of_keys: bool = False,
    ) -> None:
        """Send a request by the best path; `pending` has failed where that cannot be done."""
        now, fabric = time.monotonic(), self._fabric
        ways = fabric.ways[namespace] if namespace < len(fabric.ways) else ()
        if not ways:
            pending.fail("there is no way to the namespace")
        elif not fabric.health[namespace].may_ask(now):
            pending.fail(NOT_ANSWERING)
        elif not is_read and fabric.nguids[namespace] in fabric.taken:
            pending.fail(f"the namespace carries pool {fabric.taken[fabric.nguids[namespace]]} now")
        elif not is_read and fabric.fence.stands(fabric.nguids[namespace], at, size, now):
            pending.fail(FENCED)
        elif size and (ways[0].kv is not None) is not of_keys:
            pending.fail("a namespace of keys has no blocks, and one of blocks no keys")
        else:
            # A write of unknown fate is fenced with one path as well: it was sent by one queue of several.
            if not is_read or ways[0].enclosure.has_other_paths:
                lba_bytes = 0 if of_keys else ways[0].lba_bytes
                pending.request = Request(
                    namespace, fabric.nguids[namespace], at, size, lba_bytes, build, is_read=is_read
                )
            self._send_by(ways, pending, namespace, build, now, is_read=is_read, more=more)

    def _send_by(
        self,
        ways: Sequence[Route],
        pending: PendingRequest,
        namespace: int,
        build: Build,
        now: float,
        *,
        is_read: bool,
        more: bool = False,
        base: int = 0,
    ) -> bool:
        """Send by the first of the ways that takes it; whether one did."""
        request = pending.request
        why = "there is no queue to the enclosure"
        ways = in_order(ways, now) if len(ways) > 1 else ways
        if len(ways) > 1 and now >= self._warm_at:
            self._warm_at = now + WARM_SECONDS
            for way in ways:
                self._queue(way.enclosure, now, 0.0)
        for number, way in enumerate(ways):
            if request is not None and way.enclosure in request.tried:
                continue
            queue = self._queue(way.enclosure, now, CONNECT_WAIT_SECONDS if number == len(ways) - 1 else 0.0)
            if queue is None:
                continue
            if request is not None:
                request.tried.append(way.enclosure)
                request.epoch = self._lanes[id(way.enclosure)].epoch
            built = build(way, queue, base)
            failed = self._submit(way, queue, built, more)
            if failed is None:
                asked = Outstanding(self._fabric.health[namespace], now, is_read=built[0].data_in is not None)
                pending.goes_on(queue, built, asked, base, self._lanes[id(way.enclosure)].began)
                return True
            why = failed
            if request is not None and any(command.cid >= 0 for command in built):
                request.over(built, self._fabric.fence, now, self)
                if not is_read:
                    break
        if not base and pending.queue is None:
            pending.fail(why)
        return False

    def _submit(self, route: Route, queue: HostQueue, built: Sequence[Command], more: bool) -> str | None:
        """Send commands; why it could not be done, and nothing is under way then."""
        try:
            for command in built:
                queue.submit(command, more=more)
        except NvmeofError as error:
            if not queue.alive:
                route.enclosure.complain(self._lanes[id(route.enclosure)].epoch)
            # What went out before stays in flight until it is abandoned here; the rest never went.
            for command in built:
                if not command.done and command.cid >= 0:
                    queue.abandon(command)
            return str(error)
        return None

    def connect_ahead(self, seconds: float = CONNECT_SECONDS) -> None:
        """Connect to every enclosure whose session stands, before the first request wants it."""
        end = time.monotonic() + seconds
        with self._in_use:
            for enclosure in self._fabric.enclosures:
                self._queue(enclosure, time.monotonic(), patience=0.0)
            for enclosure in self._fabric.enclosures:
                lane = self._lanes.get(id(enclosure))
                if lane is not None and lane.connecting is not None:
                    lane.connecting.wait(max(0.0, end - time.monotonic()))
                    self._queue(enclosure, time.monotonic(), patience=0.0)

    def look_for_answers(self) -> None:
        """Take the answers to requests that were given up, where some have come; on any thread, and without
        waiting. A worker that is busy does so itself, with its next wait."""
        self._look_asked = True
        if self._in_use.acquire(blocking=False):
            try:
                self._take_answers()
            finally:
                self._in_use.release()

    def _take_answers(self) -> None:
        self._look_asked = False
        for lane in self._lanes.values():
            if lane.queue is not None:
                lane.queue.oldest_abandoned()

    def _queue(
        self, enclosure: Enclosure, now: float, patience: float = CONNECT_WAIT_SECONDS
    ) -> HostQueue | None:
        lane = self._lanes.get(id(enclosure))
        if lane is None:
            # As many lanes as enclosures in the configuration, which is bounded.
            lane = self._lanes[id(enclosure)] = QueueSlot()
        queue = lane.queue
        if (
            queue is not None
            and lane.epoch == enclosure.epoch
            and enclosure.session is not None
            and queue.alive
            and not queue.needs_reconnect
        ):
            oldest = queue.oldest_abandoned()
            if oldest is None:
                return queue
            if lane.is_silent(now):
                queue.close()
                lane.queue = None
            elif now - oldest < COMMAND_SECONDS:
                return queue
        if lane.connecting is not None and lane.epoch != enclosure.epoch:
            # Of a session that is gone: a try of the new one need not wait for it.
            lane.connecting.give_up()
            lane.connecting = None
        if lane.connecting is None and not self._begin_to_connect(lane, enclosure, now):
            return None
        assert lane.connecting is not None
        if lane.connecting.wait(0.0 if lane.waited_for else patience):
            return self._connected(lane, enclosure)
        lane.waited_for = lane.waited_for or patience > 0
        return None

    def _begin_to_connect(self, lane: QueueSlot, enclosure: Enclosure, now: float) -> bool:
        session, epoch, began = enclosure.session, enclosure.epoch, enclosure.began
        queue, lane.queue = lane.queue, None
        connect: Callable[[], HostQueue]
        if queue is not None and queue.needs_reconnect and lane.epoch == epoch and session is not None:
            connect = partial(_again, queue)
        else:
            if queue is not None:
                enclosure.complain(lane.epoch)
                queue.close()
            tried = lane.epoch == epoch and now < lane.next_try
            if session is None or tried or self._queue_id > session.io_queues:
                return False
            depth = min(QUEUE_DEPTH, session.max_queue_entries)
            connect = partial(connect_io_queue, session, self._queue_id, depth, CONNECT_SECONDS)
        lane.epoch, lane.began, lane.waited_for = epoch, began, False
        lane.connecting = ConnectAttempt(connect, f"{enclosure.name}-{self._queue_id}")
        return True

    def _connected(self, lane: QueueSlot, enclosure: Enclosure) -> HostQueue | None:
        """The try is over."""
        assert lane.connecting is not None
        queue, lane.connecting = lane.connecting.queue, None
        if queue is None:
            lane.next_try = time.monotonic() + RETRY_CONNECT_SECONDS
            enclosure.complain(lane.epoch)
            return None
        if lane.epoch != enclosure.epoch:
            queue.close()
            return None
        for buffer in (self._receive, self._send):
            queue.register(buffer)
        lane.queue = queue
        return queue

    def close(self) -> None:
        """Hang up every queue; the worker is done."""
        # Of a thread that hangs at the end of everything nothing is waited for.
        held = self._in_use.acquire(timeout=CLOSE_WAIT_SECONDS)
        for lane in self._lanes.values():
            if lane.connecting is not None:
                lane.connecting.give_up()
                lane.connecting = None
            if lane.queue is not None:
                lane.queue.close()
                lane.queue = None
        if held:
            self._in_use.release()

    # -- Runner ---------------------------------------------------------------------------------

    def go_by(self, fabric: Fabric) -> Fabric:
        """Go by another fabric from now on, nothing being under way; the one of before."""
        self._fabric, before = fabric, self._fabric
        return before

    def run(self, steps: Steps[T]) -> T:
        """Drive steps to their end on this thread, with these lanes as `current_lanes`."""
        _CURRENT.lanes = self
        answer: bool | None = None
        self._in_use.acquire()
        came: list[T] = []
        whole = _into(came, steps)
        try:
            while True:
                wanted = whole.send(answer)  # type: ignore[arg-type]  # a generator begins with None
                if wanted is None:
                    return came[0]
                if isinstance(wanted, Acquire):
                    timeout = max(0.0, wanted.deadline - time.monotonic())
                    answer = wanted.lock.acquire(timeout=timeout)
                else:
                    pending = wanted.pending
                    assert isinstance(pending, PendingRequest)
                    answer = self._wait(pending, wanted.deadline, wanted.at_least)
        finally:
            self._in_use.release()

    def _wait(self, pending: PendingRequest, deadline: float, at_least: int | None) -> bool:
        """Wait for a request, by as many paths as it takes; see agent/remote/paths.py."""
        if self._look_asked:
            self._take_answers()
        while (request := pending.request) is not None:
            now = time.monotonic()
            ways = self._fabric.ways_to(request.namespace, request.nguid)
            if not request.has_another(ways):
                break
            stop = request.stops_here(now, deadline) if request.is_read else deadline
            came = self._wait_here(pending, stop, at_least)
            if came and not left_by_its_path(pending.commands):
                request.tried[-1].answered(time.monotonic())
                break
            if not came and (not request.is_read or time.monotonic() + CLOCK_SLACK < stop):
                # Writes stay where they are, and a suspect gets no more patience for having two paths.
                return False
            if not self._elsewhere(pending, request, ways, deadline):
                if pending.request is None:
                    return True
                break
        came = self._wait_here(pending, deadline, at_least)
        if came and (at_least is None or left_by_its_path(pending.commands)):
            self._settle(pending)
        return came

    def _elsewhere(
        self, pending: PendingRequest, request: Request, ways: Sequence[Route], deadline: float
    ) -> bool:
        """Send it again by another path, if that does no harm and there is one."""
        now = time.monotonic()
        if now >= deadline or not request.may_go_again(pending.commands):
            return False
        patience = min(CONNECT_WAIT_SECONDS, deadline - now)
        others = [way for way in ways if way.enclosure not in request.tried]
        if not any(self._queue(way.enclosure, now, patience) is not None for way in others):
            return False
        queue, path, base = pending.queue, request.tried[-1], request.resumes_at(pending.received)
        assert queue is not None
        path.sent_elsewhere += 1
        path.avoid(now)
        # Before another path may write to the buffer, this one may no longer.
        for command in pending.commands:
            if not command.done:
                queue.abandon(command)
        build, is_read = request.build, request.is_read
        if self._send_by(ways, pending, request.namespace, build, now, is_read=is_read, base=base):
            return True
        pending.fail("no other path takes it")
        return False

    def _settle(self, pending: PendingRequest) -> None:
        """It goes by no other path any more."""
        request, pending.request = pending.request, None
        if request is not None:
            request.over(pending.commands, self._fabric.fence, time.monotonic(), self)

    def _wait_here(self, pending: PendingRequest, deadline: float, at_least: int | None) -> bool:
        queue, asked = pending.queue, pending.asked
        if queue is None:
            return True
        if asked is not None:
            deadline = asked.wait_until(deadline)
        before = pending.base
        lost = failed = False
        for command in pending.commands:
            if not command.done:
                enough = None if at_least is None else at_least - before
                if enough is not None and command.received >= enough:
                    return True
                if not queue.wait(command, deadline, enough):
                    return False
            lost = lost or path_failed(command)
            failed = failed or pending.is_error(command)
            before += command.in_bytes
            if at_least is not None and before >= at_least:
                break
        if asked is not None:
            asked.answered(time.monotonic(), failed=failed, lost=lost)
        return True


def _into(came: list[T], steps: Steps[T]) -> Generator[Wait | Acquire | None, bool, None]:
    """The steps, then None when their value has come: their own end would be an exception, and dearer."""
    came.append((yield from steps))
    yield None


def _again(queue: HostQueue) -> HostQueue:
    queue.reconnect()
    return queue
