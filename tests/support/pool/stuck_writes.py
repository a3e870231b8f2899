"""A channel on which chosen writes are never answered, and steps that are driven to a moment of its clock."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

from agent.inline.scatter import Buffer
from agent.pool.steps import Acquire
from tests.support.pool.memory_channel import MemoryChannel, MemoryPending

ANSWER_SECONDS = 0.0005


class SoonPending:
    """A write that is answered a moment after it was sent."""

    def __init__(self, channel: MemoryChannel, found: MemoryPending) -> None:
        self.channel = channel
        self.ready_at = channel.clock + ANSWER_SECONDS
        self.fault, self.received, self.unreachable = found.fault, 0, found.unreachable

    @property
    def done(self) -> bool:
        return self.channel.clock >= self.ready_at

    @done.setter
    def done(self, given_up: bool) -> None:
        self.ready_at = 0.0


class StuckWrites(MemoryChannel):
    """Writes that `is_stuck` picks, by namespace and offset, are never answered, and others in a moment."""

    is_stuck: Callable[[int, int], bool] = staticmethod(lambda namespace, offset: False)

    def write(
        self, namespace: int, offset: int, parts: Sequence[Buffer], *, more: bool = False
    ) -> MemoryPending:
        if self.is_stuck(namespace, offset):
            self.namespaces[namespace].writes += 1
            return MemoryPending()
        found = super().write(namespace, offset, parts, more=more)
        return cast(MemoryPending, SoonPending(self, found))


class Driven:
    """Steps that are driven up to a moment of the channel's clock, and on from there."""

    def __init__(self, channel: MemoryChannel, steps: Any) -> None:
        self.channel = channel
        self.steps = steps
        self.wanted: Any = next(steps)

    def run(self, seconds: float) -> list[Any] | None:
        """For so long; what came of them where that was the end."""
        channel, until = self.channel, self.channel.clock + seconds
        while True:
            wanted = self.wanted
            if isinstance(wanted, Acquire):
                answer = wanted.lock.acquire(blocking=False)
            else:
                answer = wanted.pending.done
            if not answer and channel.clock < wanted.deadline:
                pending = None if isinstance(wanted, Acquire) else wanted.pending
                moment = min(wanted.deadline, getattr(pending, "ready_at", wanted.deadline))
                if moment > until:
                    channel.clock = until
                    return None
                channel.clock = max(channel.clock, moment)
                answer = pending is not None and pending.done
            try:
                self.wanted = self.steps.send(answer)
            except StopIteration as end:
                found: list[Any] = end.value
                return found
