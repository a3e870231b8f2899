"""A channel over plain memory: the pool's steps run on it without a fabric, a thread or a clock.

Faults are set per namespace: `down` (no way there), `hung` (never answers), `broken` (a status), `slow` and
`paused` (as agent/remote treats a suspect). Every read and write is counted, so that a test can say how many
round trips an operation took.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

from agent.inline.scatter import Buffer
from agent.pool.counters import Tally
from agent.pool.steps import Acquire, Pending, Read, Steps, Wait, Write, read_each, take_each, write_each
from agent.pool.write.flush_tracking import UnflushedWrites
from agent.remote.circuit_breaker import NOT_ANSWERING
from agent.remote.queue_slot import QUEUE_DEPTH
from agent.sim.medium import Medium, WorkerBuffer

T = TypeVar("T")

UNFLUSHED = UnflushedWrites()
"""Of all namespaces of a test process, whichever channel leads there."""
PATIENCE = 0.01
"""Seconds that a slow namespace is waited for, as `Health.patience` of agent/remote."""
_NGUIDS = itertools.count(1)


@dataclass
class MemoryNamespace(Medium):
    unreadable: set[int] = field(default_factory=set)
    """Blocks, by byte offset, whose reads end with Unrecovered Read Error until they are written."""
    unwritable: set[int] = field(default_factory=set)
    """Blocks whose writes end with Write Fault."""
    unflushable: bool = False
    is_local: bool = False
    """A device of the machine whose agent asks."""
    slow: float = 0.0
    """Seconds that a read takes. Steps without patience wait PATIENCE for it."""
    paused: bool = False
    """The circuit breaker refuses steps that have no patience."""
    flushes: int = 0
    key: bytes = field(default_factory=lambda: next(_NGUIDS).to_bytes(16, "big"))
    began: int = 0
    """The session that it is reached by; see `new_session`."""

    def new_session(self, blocks: dict[int, bytes] | None = None) -> None:
        """The session ends and another begins; with `blocks`, because power was lost that left these."""
        self.began = UNFLUSHED.session_began()
        if blocks is not None:
            self.blocks = dict(blocks)

    def store(self, offset: int, parts: Sequence[Buffer]) -> None:
        super().store(offset, parts)
        if self.unreadable:
            size = sum(map(len, parts))
            self.unreadable.difference_update(range(offset, offset + size, 4096))


@dataclass
class MemoryPending:
    done: bool = False
    received: int = 0
    fault: str | None = None
    unreachable: bool = False
    answer: Callable[[], None] | None = None
    """What fills the buffer of a read that takes some time."""
    answers_at: float = 0.0
    patience_ends: float = float("inf")

    def comes_by(self, deadline: float) -> float | None:
        """When the answer comes; None where it does not by then."""
        by = min(deadline, self.patience_ends)
        if self.done or self.answer is None or self.answers_at > by:
            return None
        self.answer()
        self.done = True
        return self.answers_at


class MemoryChannel:
    """One worker's channel; `clock` moves only when a test moves it, or when a wait runs to its deadline."""

    def __init__(self, namespaces: Sequence[MemoryNamespace]) -> None:
        self.namespaces = namespaces
        self.tallies: dict[str, Tally] = {"": Tally()}
        self.clock = 1000.0
        self._looks = 0
        self._is_patient = False
        self.epoch = 1_800_000_000.0
        self.round_trips = 0
        self.before_wait: Callable[[], None] | None = None
        self._receive = WorkerBuffer()
        self._send = WorkerBuffer()

    def read(self, namespace: int, offset: int, into: memoryview, *, more: bool = False) -> MemoryPending:
        target = self.namespaces[namespace]
        target.reads += 1
        self.tallies[""].flash_bytes_read += len(into)
        pending = self._start(target)
        if not target.unreadable.isdisjoint(range(offset, offset + len(into), 4096)):
            pending.fault = pending.fault or "Unrecovered Read Error"
        if pending.done and pending.fault is None:
            if target.slow:
                pending.done, pending.answers_at = False, self.clock + target.slow
                pending.answer = partial(target.load, offset, into)
                pending.patience_ends = float("inf") if self._is_patient else self.clock + PATIENCE
                return pending
            target.load(offset, into)
            pending.received = len(into)
        return pending

    def write(
        self, namespace: int, offset: int, parts: Sequence[Buffer], *, more: bool = False
    ) -> MemoryPending:
        target = self.namespaces[namespace]
        target.writes += 1
        pending = self._start(target)
        size = sum(map(len, parts))
        if not target.unwritable.isdisjoint(range(offset, offset + size, 4096)):
            pending.fault = pending.fault or "Write Fault"
        if pending.done and pending.fault is None:
            target.store(offset, parts)
        UNFLUSHED.wrote(target.key, pending, UNFLUSHED.sessions)
        return pending

    def flush(self, namespace: int) -> MemoryPending:
        target = self.namespaces[namespace]
        target.flushes += 1
        pending = self._start(target)
        if target.unflushable:
            pending.done, pending.fault = True, pending.fault or "Internal Error"
        return pending

    def unflushed(self, namespace: int) -> int | None:
        return UNFLUSHED.mark(self.namespaces[namespace].key)

    def flushed(self, namespace: int, mark: int, flush: Pending) -> None:
        target = self.namespaces[namespace]
        UNFLUSHED.flushed(target.key, mark, target.began)

    def written(self) -> int:
        return UNFLUSHED.number

    def is_unflushed(self, namespace: int, first: int, last: int) -> bool:
        return UNFLUSHED.is_open(self.namespaces[namespace].key, first, last)

    def doubtful(self, namespace: int) -> int:
        return UNFLUSHED.doubtful(self.namespaces[namespace].key)

    def _start(self, target: MemoryNamespace) -> MemoryPending:
        if target.down:
            return MemoryPending(done=True, fault="no way there", unreachable=True)
        if target.paused and not self._is_patient:
            return MemoryPending(done=True, fault=NOT_ANSWERING, unreachable=True)
        if target.broken:
            return MemoryPending(done=True, fault="Unrecovered Read Error")
        return MemoryPending(done=not target.hung)

    def abandon(self, pending: MemoryPending) -> None:
        pending.done = True
        pending.fault = pending.fault or "abandoned"

    def gives_way(self) -> None: ...

    def has_patience(self) -> None:
        self._is_patient = True

    waits_for_slow = has_patience

    def took(self, pending: MemoryPending) -> None: ...

    def read_many(self, reads: Sequence[Read]) -> list[Pending]:
        return read_each(self, reads)

    def write_many(self, writes: Sequence[Write]) -> list[Pending]:
        return write_each(self, writes)

    def arrived(self, pendings: Sequence[Pending], first: int) -> int:
        return take_each(self, pendings, first)

    def comes_again(self) -> None: ...

    def queue_depth(self) -> int:
        return QUEUE_DEPTH

    def receive_buffer(self, size: int) -> memoryview:
        return self._receive.take(size)

    def send_buffer(self, size: int) -> memoryview:
        return self._send.take(size)

    def is_local(self, namespace: int) -> bool:
        return self.namespaces[namespace].is_local

    def trusts(self, namespace: int) -> bool:
        return not self.namespaces[namespace].suspect

    def tally(self, volume: str) -> Tally:
        tally = self.tallies.get(volume)
        if tally is None:
            tally = self.tallies[volume] = Tally()
        return tally

    def now(self) -> float:
        return self.clock

    def wall(self) -> float:
        # No two writes of a real agent fall into one microsecond, and generations rely on that.
        self._looks += 1
        return self.epoch + self.clock + self._looks * 1e-6

    def run(self, steps: Steps[T]) -> T:
        """Drive steps to their end; a wait that nothing will answer ends at its deadline at once."""
        try:
            wanted = next(steps)
            while True:
                if isinstance(wanted, Acquire):
                    answer = wanted.lock.acquire(blocking=False)
                else:
                    answer = wanted.pending.done or self._comes(wanted)
                if not answer:
                    self.clock = max(self.clock, self._ends(wanted))
                wanted = steps.send(answer)
        except StopIteration as finished:
            return finished.value
        finally:
            self._is_patient = False

    def _comes(self, wanted: Wait) -> bool:
        """Whether the answer comes in time; it is that time then."""
        pending = wanted.pending
        came = pending.comes_by(wanted.deadline) if isinstance(pending, MemoryPending) else None
        self.clock = max(self.clock, came or 0.0)
        return came is not None

    def _ends(self, wanted: Wait | Acquire) -> float:
        """When a wait for nothing ends."""
        pending = wanted.pending if isinstance(wanted, Wait) else None
        patience = pending.patience_ends if isinstance(pending, MemoryPending) else float("inf")
        return min(wanted.deadline, patience)


def rest_of(steps: Steps[T], answer: bool) -> Steps[T]:
    """What is left of steps that wait for an answer, which is this."""
    while True:
        try:
            wanted = steps.send(answer)
        except StopIteration as end:
            left: T = end.value
            return left
        answer = yield wanted
