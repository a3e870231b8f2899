"""Which namespaces hold writes that no flush has followed, and the flush that fsync(2) of a file asks for.

A flush makes durable all writes that the controller answered before the flush was sent. So after a good
answer a namespace is clean up to these writes, of all workers of this agent. A namespace that this agent has
not flushed yet is not clean: an agent before it may have written there. *Other* agents flush their own
writes; a mover flushes before it clears its sources.

**A flush says nothing of writes that are older than its session.** An enclosure that lost power in between
lost the contents of its drives' volatile caches. It answers the flush well, for nothing is left to be
flushed. A session that began before a write was sent, and answers a flush after it, stood all the time, by
whichever path the write went. Where none did, those writes are *in doubt*: it may have been the network
alone. A caller that has to know reads what was written (agent/fs/files/pool_store.py).
"""

import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from agent.pool.late_answers import wait_for
from agent.pool.steps import IoChannel, Pending, Steps

FLUSH_SECONDS: Final = 5.0
"""For all the namespaces together."""
OPEN_LOOK: Final = 16
"""With so many writes, and twice as many as a look has left, the next write looks which were answered. So a
look is paid for by the writes since the last one, however many are under way."""
RUNS_MAX: Final = 64
"""Of one namespace. With more sessions while nobody flushes, more is in doubt than need be."""


@dataclass(slots=True)
class _Run:
    """Writes that no flush has followed, by their first and last number, and how many sessions had begun when
    they were sent."""

    first: int
    last: int
    sessions: int


class _State:
    """Of one namespace."""

    __slots__ = ("doubtful", "flushed", "left", "open", "runs", "sent")

    def __init__(self) -> None:
        self.sent = 1
        """The number of the last write; 1 stands for those of the time before this agent."""
        self.flushed = 0
        self.open: list[tuple[int, Pending]] = []
        """Writes that were not answered when last looked at, and those since; no more than twice what the
        queues of all workers hold, and OPEN_LOOK."""
        self.left = 0
        """How many the last look left."""
        self.runs: list[_Run] = []
        self.doubtful = 0
        """The number of the last write that is in doubt."""

    def look(self) -> None:
        self.open = [entry for entry in self.open if not entry[1].done]
        self.left = len(self.open)

    @property
    def answered(self) -> int:
        """Every write up to this one was answered, or given up."""
        return self.open[0][0] - 1 if self.open else self.sent

    def sent_one(self, number: int, pending: Pending, sessions: int) -> None:
        self.sent = number
        self.open.append((number, pending))
        if self.runs and self.runs[-1].sessions == sessions:
            self.runs[-1].last = number
            return
        self.runs.append(_Run(number, number, sessions))
        if len(self.runs) > RUNS_MAX:
            oldest = self.runs.pop(0)
            self.runs[0].first = oldest.first
            self.runs[0].sessions = min(oldest.sessions, self.runs[0].sessions)

    def flushed_up_to(self, mark: int, began: int) -> None:
        self.flushed = max(self.flushed, mark)
        left = []
        for run in self.runs:
            if run.first <= mark and run.sessions < began:
                self.doubtful = max(self.doubtful, min(run.last, mark))
            if run.last > mark:
                run.first = max(run.first, mark + 1)
                left.append(run)
        self.runs = left


class UnflushedWrites:
    """By NGUID; shared by all workers of an agent, and safe from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._states: dict[bytes, _State] = {}
        """As many as there are namespaces in the map, which is bounded."""
        self.number = 1
        """Of the last write; they are numbered through, wherever they go."""
        self.sessions = 0
        """How many have begun, to whichever enclosure."""

    def session_began(self) -> int:
        """The number of a session that stands now, and over which nothing was sent yet."""
        with self._lock:
            self.sessions += 1
            return self.sessions

    def _state(self, nguid: bytes) -> _State:
        state = self._states.get(nguid)
        if state is None:
            state = self._states[nguid] = _State()
        return state

    def wrote(self, nguid: bytes, pending: Pending, sessions: int = 0) -> None:
        """A write was sent there; `sessions` had begun before it was."""
        self.wrote_many(nguid, (pending,), sessions)

    def wrote_many(self, nguid: bytes, pendings: Sequence[Pending], sessions: int) -> None:
        """The same of several, in the order in which they were sent."""
        with self._lock:
            state = self._state(nguid)
            for pending in pendings:
                # Who asks what was answered looks anew. So here it is for the bound alone.
                if len(state.open) >= max(OPEN_LOOK, 2 * state.left):
                    state.look()
                self.number += 1
                state.sent_one(self.number, pending, sessions)

    def mark(self, nguid: bytes) -> int | None:
        """Up to where a flush that is sent now makes writes durable; None: nothing is to be flushed."""
        with self._lock:
            state = self._state(nguid)
            state.look()
            return None if state.flushed == state.sent else state.answered

    def flushed(self, nguid: bytes, mark: int, began: int = 0) -> None:
        """A flush was answered well that was sent after `mark` was asked for; `began` is the number of the
        session that it went over."""
        with self._lock:
            self._states[nguid].flushed_up_to(mark, began)

    def is_open(self, nguid: bytes, first: int, last: int) -> bool:
        """Whether a flush is still to follow one of the writes there from number `first` to `last`."""
        with self._lock:
            state = self._states.get(nguid)
            return state is not None and any(run.first <= last and run.last >= first for run in state.runs)

    def doubtful(self, nguid: bytes) -> int:
        """The number of the last write there that no flush has proven, and none will."""
        with self._lock:
            state = self._states.get(nguid)
            return 0 if state is None else state.doubtful


def flush_written(channel: IoChannel, namespaces: Iterable[int]) -> Steps[dict[int, str]]:
    """Flush those that hold writes which no flush has followed; those that did not, and why.

    What is in doubt afterwards is asked for by `channel.doubtful`.
    """
    failed: dict[int, str] = {}
    sent: list[tuple[int, int, Pending]] = []
    for namespace in namespaces:
        mark = channel.unflushed(namespace)
        if mark is not None:
            sent.append((namespace, mark, channel.flush(namespace)))
    deadline = channel.now() + FLUSH_SECONDS
    for namespace, mark, pending in sent:
        if (yield from wait_for(channel, pending, deadline)) is None:
            channel.flushed(namespace, mark, pending)
        else:
            failed[namespace] = pending.fault or "no answer"
    return failed


def until_flushed(channel: IoChannel, namespace: int, pending: Pending, seconds: float) -> Steps[str | None]:
    """Wait for a write, then for a flush, so many seconds for each; else why it may not be on flash."""
    cause = yield from wait_for(channel, pending, channel.now() + seconds)
    if cause is None:
        pending = channel.flush(namespace)
        cause = yield from wait_for(channel, pending, channel.now() + seconds)
    return None if cause is None else pending.fault or "no answer"
