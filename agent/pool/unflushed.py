"""Which namespaces hold writes that no flush has followed, and the flush that fsync(2) of a file asks for.

A flush makes durable what the controller had answered before it was sent. So a namespace is clean once one
was answered well, up to the writes that were answered when it began; whoever wrote, of all workers of this
agent. One that this agent has not flushed yet is not clean: an agent before it may have written there. What
*other* agents write is theirs to flush; a mover does, before it clears what it copied.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Final

from agent.pool.steps import Lanes, Pending, Steps
from agent.pool.volume import wait_for

FLUSH_SECONDS: Final = 5.0
"""For all the namespaces together."""


class _State:
    """Of one namespace. Writes are numbered as they are sent."""

    __slots__ = ("flushed", "open", "sent")

    def __init__(self) -> None:
        self.sent = 1
        """The number of the last write; 1 stands for those of the time before this agent."""
        self.flushed = 0
        self.open: list[tuple[int, Pending]] = []
        """Writes that were not answered when last looked at; no more than the queues of all workers hold."""

    def look(self) -> None:
        self.open = [entry for entry in self.open if not entry[1].done]

    @property
    def answered(self) -> int:
        """Every write up to this one was answered, or given up."""
        return self.open[0][0] - 1 if self.open else self.sent


class Unflushed:
    """By NGUID; shared by all workers of an agent, and safe from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._states: dict[bytes, _State] = {}
        """As many as there are namespaces in the map, which is bounded."""

    def wrote(self, nguid: bytes, pending: Pending) -> None:
        """A write was sent there."""
        with self._lock:
            state = self._states.setdefault(nguid, _State())
            state.look()
            state.sent += 1
            state.open.append((state.sent, pending))

    def mark(self, nguid: bytes) -> int | None:
        """Up to where a flush that is sent now makes writes durable; None: nothing is to be flushed."""
        with self._lock:
            state = self._states.setdefault(nguid, _State())
            state.look()
            return None if state.flushed == state.sent else state.answered

    def flushed(self, nguid: bytes, mark: int) -> None:
        """A flush was answered well that was sent after `mark` was asked for."""
        with self._lock:
            state = self._states[nguid]
            state.flushed = max(state.flushed, mark)


def flush_written(lanes: Lanes, namespaces: Iterable[int]) -> Steps[dict[int, str]]:
    """Flush those that hold writes which no flush has followed; those that did not, and why."""
    failed: dict[int, str] = {}
    sent: list[tuple[int, int, Pending]] = []
    for namespace in namespaces:
        mark = lanes.unflushed(namespace)
        if mark is not None:
            sent.append((namespace, mark, lanes.flush(namespace)))
    deadline = lanes.now() + FLUSH_SECONDS
    for namespace, mark, pending in sent:
        if (yield from wait_for(lanes, pending, deadline)) is None:
            lanes.flushed(namespace, mark)
        else:
            failed[namespace] = pending.fault or "no answer"
    return failed
