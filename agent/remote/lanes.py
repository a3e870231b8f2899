"""A worker's lanes: its own queues to every enclosure, and the loop that drives steps on them.

A `WorkerLanes` belongs to one thread. It connects a queue to an enclosure when it first needs one and
the supervisor's session stands, reads and writes on it, and while it waits for one answer it receives
for all. Buffers are the worker's own as well, page-aligned and as long as the longest operation needs.

Nothing here raises for the fabric's sake. What cannot be sent is a `LanePending` that has failed.
"""

from __future__ import annotations

import mmap
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

from agent.pool.slot import HEADER_BYTES
from agent.pool.steps import Acquire, Buffer, Pending, Steps
from agent.pool.tally import Tally
from agent.remote.asked import NOT_ANSWERING, Asked
from agent.remote.connecting import Connecting
from agent.remote.fabric import Enclosure, Fabric, Route
from agent.remote.kv_lanes import KvCommands, KvLanePending
from agent.remote.lane_pending import LanePending
from nvmeof.errors import NvmeofError
from nvmeof.host import commands
from nvmeof.host.command import Command
from nvmeof.transport import HostQueue, connect_io_queue

T = TypeVar("T")

TRANSFER_MAX = 1 << 20
"""The longest range that one request of the host asks for."""
BUFFER_BYTES = HEADER_BYTES + TRANSFER_MAX + (2 << 20)
"""Header, range, and the units (1 MiB at most) that the range begins and ends in."""
QUEUE_DEPTH = 64
CONNECT_SECONDS = 1.0
CONNECT_WAIT_SECONDS = 0.04
"""How long the request that first wants a queue waits for it to be connected; then it is a miss."""
RETRY_CONNECT_SECONDS = 0.5
COMMAND_SECONDS = 10.0
"""An abandoned command that is older has to be cleared away by resetting the controller."""


_current = threading.local()


def current_lanes() -> WorkerLanes:
    """The lanes whose `run` drives the steps that ask. Only steps may ask."""
    lanes: WorkerLanes = _current.lanes
    return lanes


class _Lane:
    """One queue to one enclosure, or the try to connect it, and when to try again."""

    __slots__ = ("connecting", "epoch", "next_try", "queue")

    def __init__(self) -> None:
        self.queue: HostQueue | None = None
        self.connecting: Connecting | None = None
        self.epoch = -1
        self.next_try = 0.0


class WorkerLanes(KvCommands):
    """Lanes and runner of one worker. `queue_id` is the id of its queues, the same on every enclosure."""

    def __init__(self, fabric: Fabric, queue_id: int) -> None:
        self.tallies: dict[str, Tally] = {"": Tally()}
        self._fabric = fabric
        self._queue_id = queue_id
        self._lanes: dict[int, _Lane] = {}
        self._receive = memoryview(mmap.mmap(-1, BUFFER_BYTES))
        self._send = memoryview(mmap.mmap(-1, BUFFER_BYTES))

    # -- Lanes ----------------------------------------------------------------------------------

    def read(self, namespace: int, offset: int, into: memoryview) -> LanePending:
        self.tallies[""].flash_bytes_read += len(into)
        return self._start(namespace, offset, len(into), into, ())

    def write(
        self, namespace: int, offset: int, parts: Sequence[Buffer], *, more: bool = False
    ) -> LanePending:
        size = sum(map(len, parts))
        self.tallies[""].flash_bytes_written += size
        return self._start(namespace, offset, size, None, parts, more)

    def flush(self, namespace: int) -> LanePending:
        return self._start(namespace, 0, 0, None, ())

    def abandon(self, pending: Pending) -> None:
        assert isinstance(pending, LanePending)
        if not pending.done and pending.asked is not None:
            pending.asked.given_up(time.monotonic())
        pending.give_up("no answer in time")

    def receive_buffer(self, size: int) -> memoryview:
        return self._receive[:size]

    def send_buffer(self, size: int) -> memoryview:
        return self._send[:size]

    def trusts(self, namespace: int) -> bool:
        return self._fabric.health[namespace].trusted

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
    ) -> LanePending:
        now = time.monotonic()
        way = self._way(namespace, now)
        if isinstance(way, str):
            return LanePending(None, (), None, way)
        route, queue = way
        if route.kv is not None and size:
            return LanePending(None, (), None, "a namespace of keys has no blocks")
        built = _commands(route.nsid, route.lba_bytes, offset, size, into, parts, queue.max_transfer)
        asked = Asked(self._fabric.health[namespace], now, is_read=into is not None)
        why = self._submit(route, queue, built, more)
        if why is not None:
            return LanePending(None, (), None, why)
        return LanePending(queue, built, asked)

    def start_kv(self, namespace: int, build: Callable[[int], Command]) -> KvLanePending:
        """Send a command on a key; `build` makes it for a namespace id."""
        now = time.monotonic()
        way = self._way(namespace, now)
        if isinstance(way, str):
            return KvLanePending(None, (), None, way)
        route, queue = way
        command = build(route.nsid)
        why = self._submit(route, queue, (command,), False)
        if why is not None:
            return KvLanePending(None, (), None, why)
        asked = Asked(self._fabric.health[namespace], now, is_read=command.data_in is not None)
        return KvLanePending(queue, (command,), asked)

    def _way(self, namespace: int, now: float) -> tuple[Route, HostQueue] | str:
        """The route to a namespace and a queue to its enclosure, or why there is none."""
        routes = self._fabric.routes
        route = routes[namespace] if namespace < len(routes) else None
        if route is None:
            return "there is no way to the namespace"
        if not self._fabric.health[namespace].may_ask(now):
            return NOT_ANSWERING
        queue = self._queue(route.enclosure, now)
        return "there is no queue to the enclosure" if queue is None else (route, queue)

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
        for enclosure in self._fabric.enclosures:
            self._queue(enclosure, time.monotonic(), patience=0.0)
        for enclosure in self._fabric.enclosures:
            lane = self._lanes.get(id(enclosure))
            if lane is not None and lane.connecting is not None:
                lane.connecting.wait(max(0.0, end - time.monotonic()))
                self._queue(enclosure, time.monotonic(), patience=0.0)

    def _queue(
        self, enclosure: Enclosure, now: float, patience: float = CONNECT_WAIT_SECONDS
    ) -> HostQueue | None:
        lane = self._lanes.get(id(enclosure))
        if lane is None:
            # As many lanes as enclosures in the configuration, which is bounded.
            lane = self._lanes[id(enclosure)] = _Lane()
        queue = lane.queue
        if (
            queue is not None
            and lane.epoch == enclosure.epoch
            and enclosure.session is not None
            and queue.alive
            and not queue.needs_reconnect
        ):
            oldest = queue.oldest_abandoned()
            if oldest is None or now - oldest < COMMAND_SECONDS:
                return queue
        if lane.connecting is not None:
            # Somebody has waited for it in vain before: nobody else does.
            return self._connected(lane, enclosure) if lane.connecting.wait(0.0) else None
        if not self._begin_to_connect(lane, enclosure, now):
            return None
        assert lane.connecting is not None
        return self._connected(lane, enclosure) if lane.connecting.wait(patience) else None

    def _begin_to_connect(self, lane: _Lane, enclosure: Enclosure, now: float) -> bool:
        session, epoch = enclosure.session, enclosure.epoch
        queue, lane.queue = lane.queue, None
        connect: Callable[[], HostQueue]
        if queue is not None and queue.needs_reconnect and lane.epoch == epoch and session is not None:
            connect = partial(_again, queue)
        else:
            if queue is not None:
                enclosure.complain(lane.epoch)
                queue.close()
            if session is None or now < lane.next_try or self._queue_id > session.io_queues:
                return False
            depth = min(QUEUE_DEPTH, session.max_queue_entries)
            connect = partial(connect_io_queue, session, self._queue_id, depth, CONNECT_SECONDS)
        lane.epoch = epoch
        lane.connecting = Connecting(connect, f"{enclosure.name}-{self._queue_id}")
        return True

    def _connected(self, lane: _Lane, enclosure: Enclosure) -> HostQueue | None:
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
        for lane in self._lanes.values():
            if lane.connecting is not None:
                lane.connecting.give_up()
                lane.connecting = None
            if lane.queue is not None:
                lane.queue.close()
                lane.queue = None

    # -- Runner ---------------------------------------------------------------------------------

    def run(self, steps: Steps[T]) -> T:
        """Drive steps to their end on this thread, with these lanes as `current_lanes`."""
        _current.lanes = self
        answer: bool | None = None
        try:
            while True:
                wanted = steps.send(answer)  # type: ignore[arg-type]  # a generator begins with None
                if isinstance(wanted, Acquire):
                    timeout = max(0.0, wanted.deadline - time.monotonic())
                    answer = wanted.lock.acquire(timeout=timeout)
                else:
                    pending = wanted.pending
                    assert isinstance(pending, LanePending)
                    answer = self._wait(pending, wanted.deadline, wanted.at_least)
        except StopIteration as finished:
            value: T = finished.value
            return value

    def _wait(self, pending: LanePending, deadline: float, at_least: int | None) -> bool:
        queue, asked = pending.queue, pending.asked
        if queue is None:
            return True
        if asked is not None:
            deadline = asked.wait_until(deadline)
        before = 0
        lost = failed = False
        for command in pending.commands:
            if not command.done:
                enough = None if at_least is None else at_least - before
                if enough is not None and command.received >= enough:
                    return True
                if not queue.wait(command, deadline, enough):
                    return False
            lost = lost or command.lost
            failed = failed or pending.is_error(command)
            before += command.in_bytes
            if at_least is not None and before >= at_least:
                break
        if asked is not None:
            asked.answered(time.monotonic(), failed=failed, lost=lost)
        return True


def _again(queue: HostQueue) -> HostQueue:
    queue.reconnect()
    return queue


def _commands(
    nsid: int,
    lba_bytes: int,
    offset: int,
    size: int,
    into: memoryview | None,
    parts: Sequence[Buffer],
    max_transfer: int,
) -> Sequence[Command]:
    """The commands of one request: one, unless it is longer than the controller takes at a time."""
    if not size:
        return (commands.flush(nsid),)
    first = offset // lba_bytes
    if size <= max_transfer:
        if into is not None:
            return (commands.read(nsid, first, size // lba_bytes, into),)
        return (commands.write(nsid, first, size // lba_bytes, parts),)
    step = max_transfer // lba_bytes * lba_bytes
    if into is not None:
        return [
            commands.read(
                nsid,
                first + at // lba_bytes,
                len(into[at : at + step]) // lba_bytes,
                into[at : at + step],
            )
            for at in range(0, size, step)
        ]
    return [
        commands.write(nsid, first + at // lba_bytes, sum(map(len, piece)) // lba_bytes, piece)
        for at, piece in _pieces(parts, step)
    ]


def _pieces(parts: Sequence[Buffer], step: int) -> list[tuple[int, list[memoryview]]]:
    """Buffers cut into pieces of `step` bytes, without copying: (offset of the piece, its buffers)."""
    pieces: list[tuple[int, list[memoryview]]] = [(0, [])]
    room = step
    for part in parts:
        view = memoryview(part)
        while len(view):
            if not room:
                pieces.append((pieces[-1][0] + step, []))
                room = step
            taken = view[:room]
            pieces[-1][1].append(taken)
            room -= len(taken)
            view = view[len(taken) :]
    return pieces
