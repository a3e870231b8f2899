"""A worker's channel: requests by its own queues to every enclosure, and the loop that drives steps on them.

A `WorkerChannel` belongs to one thread. `QueueSlot` connects its queue to an enclosure, when a request first
needs it and the supervisor's session stands; `paths.Request` says by which paths a request may go; `Fence`
and `UnflushedWrites` of the fabric keep account of writes. While the worker waits for one answer it receives
for all. Its buffers are page-aligned and as long as the longest operation needs. Where the worker is idle,
another thread takes the answers that have arrived at its queues (`look_for_answers`).

Nothing here raises for the fabric's sake. A request that cannot be sent is a `PendingRequest` that has
failed.
"""
# One idea in one file: `WorkerChannel`, all of whose parts use the queues of one thread.

import threading
import time
from collections.abc import Callable, Generator, Sequence
from typing import Final, TypeVar

from agent.host_os.payload_memory import payload_memory
from agent.host_os.workers_on_duty import STUCK_SECONDS, WorkerOnDuty
from agent.inline.scatter import Buffer
from agent.pool.counters import Tally
from agent.pool.format.sealed_slot import HEADER_BYTES
from agent.pool.steps import Acquire, GaveWay, Pending, Read, Steps, Wait, Write
from agent.remote.circuit_breaker import CLOCK_SLACK, NOT_ANSWERING, Health, Outstanding
from agent.remote.enclosure import Enclosure, Route
from agent.remote.fabric import Fabric
from agent.remote.long_waits import LongWaits, WorkersWait
from agent.remote.path_choice import Build, Request, in_order, left_by_its_path, path_failed
from agent.remote.pending_request import KvPendingRequest, PendingRequest, block_commands
from agent.remote.queue_slot import (
    CONNECT_PATIENT_SECONDS,
    CONNECT_SECONDS,
    CONNECT_WAIT_SECONDS,
    QUEUE_DEPTH,
    QueueSlot,
    submit,
    submit_each,
)
from nvmeof.host import commands, kv_commands
from nvmeof.host.command import Command
from nvmeof.transport import HostQueue
from nvmeof.wire.kv import StoreOption

T = TypeVar("T")
Move = TypeVar("Move", Read, Write)

TRANSFER_MAX: Final = 1 << 20
"""The longest range that one request of the host asks for."""
BUFFER_BYTES: Final = HEADER_BYTES + TRANSFER_MAX + (2 << 20)
"""Header, range, and the units (1 MiB at most) that the range begins and ends in."""
WARM_SECONDS: Final = 0.25
"""How often the queues of paths that are not in use are looked after."""
CLOSE_WAIT_SECONDS: Final = 0.1
"""How long the end of a worker waits for another thread's look at its queues."""
FENCED: Final = "a write that was not answered may still land there"

_CURRENT: Final = threading.local()


def current_channel() -> "WorkerChannel":
    """The channel whose `run` drives the steps that ask. Only steps may ask."""
    channel: WorkerChannel = _CURRENT.channel
    return channel


class WorkerChannel:
    """Channel and runner of one worker. `queue_id` is the id of its queues, the same on every enclosure."""

    def __init__(self, fabric: Fabric, queue_id: int) -> None:
        self.tallies: dict[str, Tally] = {"": Tally()}
        self._fabric = fabric
        self._queue_id = queue_id
        self._slots: dict[int, QueueSlot] = {}
        """By enclosure, of which there are as many as in the configuration."""
        self._receive = payload_memory(BUFFER_BYTES)
        self._send = payload_memory(BUFFER_BYTES)
        self._warm_at = 0.0
        self._in_use = threading.RLock()
        """Held by the user of the queues: the thread that runs steps, for as long as they run."""
        self._look_asked = False
        self._waits: WorkersWait | None = None
        self._is_patient = self._is_changing = False
        """Of the steps under way: they have patience; they wait for what is slow."""
        self._comes_again = self._gave_way = False
        """The same: a door may ask for them once more; it is to do so."""
        self._may_park = False
        self.duty: WorkerOnDuty | None = None
        """Of the door that this worker serves."""

    def share_waits(self, of_door: LongWaits, *, may_park: bool = False) -> None:
        """Be one of a door's workers, of which only so many wait long at a time. `may_park`: the door puts
        aside a request whose steps gave way and may come again (`GaveWay`)."""
        self._waits = WorkersWait(of_door)
        self._may_park = may_park

    def gives_way(self) -> None:
        if self._waits is not None:
            self._waits.begin(time.monotonic())

    def has_patience(self) -> None:
        self._is_patient = True

    def waits_for_slow(self) -> None:
        self._is_changing = True

    def _has_patience_with(self, health: Health) -> bool:
        return self._is_patient or (self._is_changing and health.may_wait)

    def _outstanding(self, health: Health, now: float, *, is_read: bool) -> Outstanding:
        is_change = self._is_changing and not self._is_patient
        is_patient = self._has_patience_with(health)
        return Outstanding(health, now, is_read=is_read, is_patient=is_patient, is_change=is_change)

    def comes_again(self) -> None:
        if self._may_park and self._waits is not None:
            self._comes_again = True
            self._waits.begin(time.monotonic())

    def read(self, namespace: int, offset: int, into: memoryview, *, more: bool = False) -> PendingRequest:
        return self._read_volley(namespace, ((namespace, offset, into),), more)[0]

    def read_many(self, reads: Sequence[Read]) -> list[PendingRequest]:
        return _by_namespace(reads, self._read_volley)

    def arrived(self, pendings: Sequence[Pending], first: int) -> int:
        now, count, before = time.monotonic(), len(pendings), first
        while first < count:
            pending = pendings[first]
            assert isinstance(pending, PendingRequest)
            if not pending.take_answer(now):
                break
            first += 1
        if first > before:
            self._got_on(now)
        return first

    def _got_on(self, now: float) -> None:
        if self._waits is not None and self._waits.is_on:
            self._waits.got_on(now)

    def _read_volley(self, namespace: int, reads: Sequence[Read], more: bool) -> list[PendingRequest]:
        """Reads of one namespace, by one send. `more`: another one follows."""
        pendings = self._read_by_the_one_way(namespace, reads, more)
        if pendings is None:
            last = len(reads) - 1
            pendings = [
                self._start(namespace, read[1], len(read[2]), read[2], (), more or number < last)
                for number, read in enumerate(reads)
            ]
        size = 0
        for number, pending in enumerate(pendings):
            if pending.queue is not None:
                size += len(reads[number][2])
        if self.duty is not None:
            self.duty.moves(size, len(reads))
        tally = self.tallies[""]
        tally.flash_bytes_read += size
        if self._fabric.is_local(namespace):
            tally.local_bytes_read += size
        return pendings

    def _read_by_the_one_way(
        self, namespace: int, reads: Sequence[Read], more: bool
    ) -> list[PendingRequest] | None:
        """What `_start` comes to for most reads, in a few steps: one command each by the only path to a
        namespace that answers, whose queue is connected. None: `_start` has to look, and nothing was done."""
        fabric = self._fabric
        ways = fabric.ways[namespace] if namespace < len(fabric.ways) else ()
        if len(ways) != 1:
            return None
        way, health, now = ways[0], fabric.health[namespace], time.monotonic()
        enclosure = way.enclosure
        if health.may_refuse or self._is_full(health) or way.kv is not None or enclosure.has_other_paths:
            return None
        slot = self._slot(enclosure)
        queue = slot.take(now)
        if queue is None:
            return None
        most, nsid, lba_bytes = queue.max_transfer, way.nsid, way.lba_bytes
        built: list[Command] = []
        for _, offset, into in reads:
            size = len(into)
            if not 0 < size <= most:
                return None
            built.append(commands.read(nsid, offset // lba_bytes, size // lba_bytes, into))
        why = submit_each(slot, queue, built, more)
        pendings: list[PendingRequest] = []
        for command in built:
            pending = PendingRequest()
            if command.cid >= 0:
                outstanding = self._outstanding(health, now, is_read=True)
                pending.goes_on(queue, (command,), outstanding, 0, slot.began)
            else:
                pending.fail(why or "it was not sent")
            pendings.append(pending)
        return pendings

    def write(
        self, namespace: int, offset: int, parts: Sequence[Buffer], *, more: bool = False
    ) -> PendingRequest:
        return self._write_volley(namespace, ((namespace, offset, parts),), more)[0]

    def write_many(self, writes: Sequence[Write]) -> list[PendingRequest]:
        return _by_namespace(writes, self._write_volley)

    def _write_volley(self, namespace: int, writes: Sequence[Write], more: bool) -> list[PendingRequest]:
        """As `_read_volley`."""
        sizes = [sum(map(len, write[2])) for write in writes]
        if self.duty is not None:
            self.duty.moves(sum(sizes), len(writes))
        fabric = self._fabric
        sessions = fabric.unflushed.sessions
        pendings = self._write_by_the_one_way(namespace, writes, sizes, more)
        if pendings is None:
            last = len(writes) - 1
            pendings = [
                self._start(namespace, write[1], sizes[number], None, write[2], more or number < last)
                for number, write in enumerate(writes)
            ]
        sent: list[PendingRequest] = []
        size = 0
        for number, pending in enumerate(pendings):
            if pending.queue is not None:
                sent.append(pending)
                size += sizes[number]
        if sent:
            tally = self.tallies[""]
            tally.flash_bytes_written += size
            if fabric.is_local(namespace):
                tally.local_bytes_written += size
            fabric.unflushed.wrote_many(fabric.nguids[namespace], sent, sessions)
        return pendings

    def _write_by_the_one_way(
        self, namespace: int, writes: Sequence[Write], sizes: Sequence[int], more: bool
    ) -> list[PendingRequest] | None:
        """As `_read_by_the_one_way`. A write looks at the fence, too, and keeps what it was: another path may
        come meanwhile, or the fence has to go up."""
        fabric = self._fabric
        ways = fabric.ways[namespace] if namespace < len(fabric.ways) else ()
        if len(ways) != 1:
            return None
        way, health, now = ways[0], fabric.health[namespace], time.monotonic()
        enclosure, nguid = way.enclosure, fabric.nguids[namespace]
        if health.may_refuse or self._is_full(health) or way.kv is not None or nguid in fabric.taken:
            return None
        slot = self._slot(enclosure)
        queue = slot.take(now)
        if queue is None:
            return None
        most, nsid, lba_bytes = queue.max_transfer, way.nsid, way.lba_bytes
        built: list[Command] = []
        for number, (_, offset, parts) in enumerate(writes):
            size = sizes[number]
            if not 0 < size <= most or fabric.fence.stands(nguid, offset, size, now):
                return None
            built.append(commands.write(nsid, offset // lba_bytes, size // lba_bytes, parts))
        why = submit_each(slot, queue, built, more)
        pendings: list[PendingRequest] = []
        for number, command in enumerate(built):
            pending = PendingRequest()
            if command.cid >= 0:
                _, offset, parts = writes[number]
                size = sizes[number]
                request = Request(namespace, nguid, offset, size, lba_bytes, None, is_read=False, parts=parts)
                request.tried.append(enclosure)
                request.epoch = slot.epoch
                pending.request = request
                outstanding = self._outstanding(health, now, is_read=False)
                pending.goes_on(queue, (command,), outstanding, 0, slot.began)
            else:
                pending.fail(why or "it was not sent")
            pendings.append(pending)
        return pendings

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
        if not pending.done and pending.outstanding is not None:
            pending.outstanding.given_up(time.monotonic())
        self._settle(pending)
        pending.give_up("no answer in time")

    def took(self, pending: Pending) -> None:
        assert isinstance(pending, PendingRequest)
        self._wait(pending, 0.0, None)
        self._got_on(time.monotonic())

    def receive_buffer(self, size: int) -> memoryview:
        return self._receive[:size]

    def send_buffer(self, size: int) -> memoryview:
        return self._send[:size]

    def queue_depth(self) -> int:
        depth = QUEUE_DEPTH
        for slot in self._slots.values():
            queue = slot.queue
            if queue is not None:
                depth = min(depth, max(1, queue.depth // 2, queue.depth - queue.abandoned))
        return depth

    def trusts(self, namespace: int) -> bool:
        health, fabric = self._fabric.health[namespace], self._fabric
        return health.trusted and fabric.nguids[namespace] not in fabric.taken and not self._is_full(health)

    def _is_refused(self, health: Health, now: float) -> bool:
        """The breaker comes first: nobody is put aside to wait for what refuses everybody."""
        patient = self._has_patience_with(health)
        if health.refuses(now, patient=patient) or self._is_full(health):
            return True
        return not health.may_ask(now, patient=patient)

    def _is_full(self, health: Health) -> bool:
        is_full = self._waits is not None and self._waits.is_full(health)
        self._gave_way = self._gave_way or (is_full and self._comes_again)
        return is_full

    def is_local(self, namespace: int) -> bool:
        return self._fabric.is_local(namespace)

    def tally(self, volume: str) -> Tally:
        tally = self.tallies.get(volume)
        if tally is None:
            tally = self.tallies[volume] = Tally()
        return tally

    def now(self) -> float:
        return time.monotonic()

    def wall(self) -> float:
        return time.time()

    # -- commands on keys: agent/pool/kv/commands.py --------------------------------------------

    def kv_store(
        self, namespace: int, key: bytes, parts: Sequence[Buffer], *, only_new: bool = False
    ) -> KvPendingRequest:
        option = StoreOption.ONLY_IF_ABSENT if only_new else StoreOption.NONE
        pending = self._start_kv(
            namespace, lambda nsid: kv_commands.store(nsid, key, parts, options=option), key
        )
        if pending.queue is not None:
            self.tallies[""].flash_bytes_written += sum(map(len, parts))
        return pending

    def kv_retrieve(self, namespace: int, key: bytes, into: memoryview) -> KvPendingRequest:
        pending = self._start_kv(namespace, lambda nsid: kv_commands.retrieve(nsid, key, into))
        if pending.queue is not None:
            self.tallies[""].flash_bytes_read += len(into)
        return pending

    def kv_delete(self, namespace: int, key: bytes) -> KvPendingRequest:
        return self._start_kv(namespace, lambda nsid: kv_commands.delete(nsid, key), key)

    def kv_exists(self, namespace: int, key: bytes) -> KvPendingRequest:
        return self._start_kv(namespace, lambda nsid: kv_commands.exist(nsid, key))

    def kv_list(self, namespace: int, first: bytes, into: memoryview) -> KvPendingRequest:
        return self._start_kv(namespace, lambda nsid: kv_commands.list_keys(nsid, first, into))

    def kv_used_bytes(self, namespace: int) -> int:
        routes = self._fabric.routes
        route = routes[namespace] if namespace < len(routes) else None
        return 0 if route is None else route.used_bytes

    def _start(
        self,
        namespace: int,
        offset: int,
        size: int,
        into: memoryview | None,
        parts: Sequence[Buffer],
        more: bool = False,
    ) -> PendingRequest:
        pending, build = PendingRequest(), self._builder(offset, size, into, parts)
        self._begin(pending, namespace, offset, size, build, is_read=not parts, more=more)
        return pending

    def _builder(self, offset: int, size: int, into: memoryview | None, parts: Sequence[Buffer]) -> Build:
        def build(route: Route, queue: HostQueue, base: int) -> Sequence[Command]:
            left = into[base:] if into is not None else None
            return block_commands(
                route.nsid, route.lba_bytes, offset + base, size - base, left, parts, queue.max_transfer
            )

        return build

    def _start_kv(
        self, namespace: int, build: Callable[[int], Command], key: bytes = b""
    ) -> KvPendingRequest:
        """Send a command on a key; `build` makes it for a namespace id. `key`: the one that it changes."""

        def built(route: Route, queue: HostQueue, base: int) -> Sequence[Command]:
            return (build(route.nsid),)

        pending = KvPendingRequest()
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
        elif self._is_refused(fabric.health[namespace], now):
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
        again = self._is_patient or self._is_changing
        patience = CONNECT_PATIENT_SECONDS if again else CONNECT_WAIT_SECONDS
        if len(ways) > 1 and now >= self._warm_at:
            self._warm_at = now + WARM_SECONDS
            for way in ways:
                self._slot(way.enclosure).take(now)
        for number, way in enumerate(ways):
            if request is not None and way.enclosure in request.tried:
                continue
            slot = self._slot(way.enclosure)
            queue = self._taken(slot, now, patience if number == len(ways) - 1 else 0.0, again=again)
            if queue is None:
                continue
            if request is not None:
                request.tried.append(way.enclosure)
                request.epoch = slot.epoch
            built = build(way, queue, base)
            failed = submit(slot, queue, built, more)
            if failed is None:
                health, is_read = self._fabric.health[namespace], built[0].data_in is not None
                outstanding = self._outstanding(health, now, is_read=is_read)
                pending.goes_on(queue, built, outstanding, base, slot.began)
                return True
            why = failed
            if request is not None and any(command.cid >= 0 for command in built):
                request.over(built, self._fabric.fence, now, self)
                if not is_read:
                    break
        if not base and pending.queue is None:
            pending.fail(why)
        return False

    def _taken(
        self, slot: QueueSlot, now: float, patience: float, *, again: bool = False
    ) -> HostQueue | None:
        """`QueueSlot.take`, and others serve while it waits."""
        queue = slot.take(now)
        if queue is None and patience:
            if self.duty is not None:
                self.duty.is_stuck()
            queue = slot.take(now, patience, again=again)
        return queue

    def connect_ahead(self, seconds: float = CONNECT_SECONDS) -> None:
        """Connect to every enclosure whose session stands, before the first request wants it."""
        end = time.monotonic() + seconds
        with self._in_use:
            slots = [self._slot(enclosure) for enclosure in self._fabric.enclosures]
            for slot in slots:
                slot.take(time.monotonic())
            for slot in slots:
                slot.wait_connected(max(0.0, end - time.monotonic()))

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
        for slot in self._slots.values():
            if slot.queue is not None:
                slot.queue.oldest_abandoned()

    def _slot(self, enclosure: Enclosure) -> QueueSlot:
        slot = self._slots.get(id(enclosure))
        if slot is None:
            buffers = (self._receive, self._send)
            slot = self._slots[id(enclosure)] = QueueSlot(enclosure, self._queue_id, buffers)
        return slot

    def close(self) -> None:
        # Of a thread that hangs at the end of everything nothing is waited for.
        held = self._in_use.acquire(timeout=CLOSE_WAIT_SECONDS)
        for slot in self._slots.values():
            slot.close()
        if held:
            self._in_use.release()

    def go_by(self, fabric: Fabric) -> Fabric:
        """Go by another fabric from now on, nothing being under way; the one of before."""
        self._fabric, before = fabric, self._fabric
        return before

    def run(self, steps: Steps[T]) -> T:
        """Drive steps to their end on this thread, with this channel as `current_channel`. Raises what they
        raise, or `GaveWay` in its place."""
        _CURRENT.channel = self
        answer: bool | None = None
        self._in_use.acquire()
        came: list[T] = []
        whole = _into(came, steps)
        try:
            while True:
                wanted = whole.send(answer)  # type: ignore[arg-type]  # a generator begins with None
                if wanted is None:
                    return came[0]
                waits = self._waits
                if waits is not None and waits.is_on:
                    answer = self._wait_giving_way(waits, wanted)
                elif isinstance(wanted, Acquire):
                    answer = self._acquire(wanted, wanted.deadline)
                else:
                    pending = wanted.pending
                    assert isinstance(pending, PendingRequest)
                    answer = self._wait(pending, wanted.deadline, wanted.at_least, wanted.whole)
        except Exception:
            if self._gave_way:
                raise GaveWay from None
            raise
        finally:
            if self._waits is not None:
                self._waits.end()
            self._is_patient = self._is_changing = self._comes_again = self._gave_way = False
            self._in_use.release()

    def _acquire(self, wanted: Acquire, deadline: float) -> bool:
        duty = self.duty
        if duty is not None and duty.may_hold_up():
            if wanted.lock.acquire(blocking=False):
                return True
            duty.is_stuck()
        return wanted.lock.acquire(timeout=max(0.0, deadline - time.monotonic()))

    def _wait_giving_way(self, waits: WorkersWait, wanted: Wait | Acquire) -> bool:
        """Wait to the deadline, or as long as long_waits.py lets this worker."""
        deadline, health, asked = wanted.deadline, None, 0.0
        pending: PendingRequest | None = None
        if isinstance(wanted, Wait):
            assert isinstance(wanted.pending, PendingRequest)
            pending = wanted.pending
            if pending.outstanding is not None:
                health, asked = pending.outstanding.health, pending.outstanding.since
        elif not wanted.gives_way:
            came = self._acquire(wanted, deadline)
            waits.got_on(time.monotonic())
            return came
        while True:
            now = time.monotonic()
            until = waits.until(health, asked, deadline, now)
            if isinstance(wanted, Acquire):
                came = self._acquire(wanted, until)
            else:
                assert pending is not None
                whole = deadline if wanted.whole is None and until < deadline else wanted.whole
                came = self._wait(pending, until, wanted.at_least, whole)
            now = time.monotonic()
            if came:
                waits.got_on(now)
                return True
            if until >= deadline or now + CLOCK_SLACK < until:
                if isinstance(wanted, Acquire) and wanted.is_pause:
                    waits.got_on(now)
                return False
            if not waits.may_wait_on(health, asked, now):
                if pending is not None and pending.outstanding is not None:
                    pending.outstanding.gives_way(now)
                self._gave_way = self._comes_again
                return False

    def _wait(
        self, pending: PendingRequest, deadline: float, at_least: int | None, whole: float | None = None
    ) -> bool:
        """Wait for a request, by as many paths as it takes; see agent/remote/path_choice.py. `whole`: as of
        `Wait`, and paths go by it."""
        if self._look_asked:
            self._take_answers()
        here, is_slice = deadline, whole is not None
        if whole is not None:
            deadline = whole
        while (request := pending.request) is not None:
            now = time.monotonic()
            ways = self._fabric.ways_to(request.namespace, request.nguid)
            if not request.has_another(ways):
                break
            began = pending.sent_at(now) if is_slice else now
            stop = request.stops_here(began, deadline) if request.is_read else deadline
            came = self._wait_here(pending, min(stop, here) if is_slice else stop, at_least)
            if came and not left_by_its_path(pending.commands):
                request.tried[-1].answered(time.monotonic())
                break
            if not came and is_slice and here < stop:
                return False
            if not came and (not request.is_read or time.monotonic() + CLOCK_SLACK < stop):
                # Writes stay where they are, and a suspect gets no more patience for having two paths.
                return False
            if not self._elsewhere(pending, request, ways, deadline):
                if pending.request is None:
                    return True
                break
        came = self._wait_here(pending, here if is_slice else deadline, at_least)
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
        if not any(self._taken(self._slot(way.enclosure), now, patience) is not None for way in others):
            return False
        queue, path, base = pending.queue, request.tried[-1], request.resumes_at(pending.received)
        assert queue is not None
        path.sent_elsewhere += 1
        path.avoid(now)
        # Before another path may write to the buffer, this one may no longer.
        for command in pending.commands:
            if not command.done:
                queue.abandon(command)
        build = request.build or self._builder(request.at, request.size, None, request.parts)
        is_read = request.is_read
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
        queue, outstanding = pending.queue, pending.outstanding
        if queue is None:
            return True
        until = deadline if outstanding is None else outstanding.wait_until(deadline)
        began = time.monotonic()
        before = pending.base
        lost = failed = False
        duty = self.duty
        for command in pending.commands:
            if not command.done:
                enough = None if at_least is None else at_least - before
                if enough is not None and command.received >= enough:
                    return True
                if duty is not None and duty.may_hold_up():
                    duty.waits()
                    soon = min(until, began + STUCK_SECONDS)
                    if not queue.wait(command, soon, enough) and soon < until:
                        duty.is_stuck()
                while not queue.wait(command, until, enough):
                    later = until if outstanding is None else outstanding.wait_until(deadline)
                    if later <= until:
                        return False
                    until = later  # it has answered others meanwhile
            lost = lost or path_failed(command)
            failed = failed or pending.is_error(command)
            before += command.in_bytes
            if at_least is not None and before >= at_least:
                break
        if outstanding is not None:
            now = time.monotonic()
            outstanding.answered(now, failed=failed, lost=lost, waited=now - began)
        return True


def _into(came: list[T], steps: Steps[T]) -> Generator[Wait | Acquire | None, bool, None]:
    """The steps, then None when their value has come: their own end would be an exception, and dearer."""
    came.append((yield from steps))
    yield None


def _by_namespace(
    moves: Sequence[Move], send: Callable[[int, Sequence[Move], bool], list[PendingRequest]]
) -> list[PendingRequest]:
    """What `send` makes of each, once it was asked for those of each namespace together."""
    volleys: dict[int, list[int]] = {}
    for number, move in enumerate(moves):
        volleys.setdefault(move[0], []).append(number)
    if len(volleys) == 1:
        return send(moves[0][0], moves, False)
    pendings: dict[int, PendingRequest] = {}
    for namespace, numbers in volleys.items():
        sent = send(namespace, [moves[number] for number in numbers], False)
        for at, number in enumerate(numbers):
            pendings[number] = sent[at]
    return [pendings[number] for number in range(len(moves))]


class Interrupted(BaseException):
    """The verb is at its end, on the thread that works for it. No `except Exception` goes on after it."""


class VerbChannel(WorkerChannel):
    """The channel of a verb: another thread can stop it, at Ctrl-C."""

    def __init__(self, fabric: Fabric, queue_id: int) -> None:
        super().__init__(fabric, queue_id)
        self._stopping = threading.Event()

    def stop(self) -> None:
        """No step goes on after the request that it waits for now. On any thread."""
        self._stopping.set()

    def run(self, steps: Steps[T]) -> T:
        if self._stopping.is_set():
            raise Interrupted
        return super().run(steps)

    def _wait(
        self, pending: PendingRequest, deadline: float, at_least: int | None, whole: float | None = None
    ) -> bool:
        came = super()._wait(pending, deadline, at_least, whole)
        if self._stopping.is_set():
            raise Interrupted
        return came
