"""Programs that change a pool a step at a time, so that a test lets one meet another at any place."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from agent.errors import G35Error
from agent.inline.scatter import Buffer
from agent.pool.steps import Acquire, Steps, Wait
from tests.support.pool.memory_channel import MemoryChannel, MemoryNamespace, MemoryPending


class SteppedChannel(MemoryChannel):
    """Each read and write happens when its program is next resumed, and not when it is asked for."""

    def __init__(self, namespaces: Sequence[MemoryNamespace]) -> None:
        super().__init__(namespaces)
        self.asked: list[tuple[MemoryPending, Callable[[], MemoryPending]]] = []

    def read(self, namespace: int, offset: int, into: memoryview, *, more: bool = False) -> MemoryPending:
        return self._later(lambda: super(SteppedChannel, self).read(namespace, offset, into))

    def write(
        self, namespace: int, offset: int, parts: Sequence[Buffer], *, more: bool = False
    ) -> MemoryPending:
        return self._later(lambda: super(SteppedChannel, self).write(namespace, offset, parts))

    def _later(self, happens: Callable[[], MemoryPending]) -> MemoryPending:
        self.asked.append((pending := MemoryPending(), happens))
        return pending

    def happen(self) -> None:
        """All that was asked for since the last call."""
        for pending, happens in self.asked:
            done = happens()
            pending.done, pending.received, pending.fault = True, done.received, done.fault
        self.asked.clear()


class Program:
    """Steps that go on when they are told to: one read, write or batch of them in each."""

    def __init__(self, channel: SteppedChannel, steps: Steps[Any]) -> None:
        self._channel, self._steps = channel, steps
        self.ended = False
        self.result: Any = None
        self.error: G35Error | None = None
        self.taken = 0
        self.wrote_at: list[int] = []
        """Numbers of the steps that wrote."""

    def step(self) -> None:
        writes = self._writes()
        self._channel.happen()
        if self._writes() != writes:
            self.wrote_at.append(self.taken)
        self.taken += 1
        try:
            wanted = next(self._steps) if self.taken == 1 else self._steps.send(True)
            while isinstance(wanted, Acquire):
                wanted = self._steps.send(wanted.lock.acquire(blocking=False))
            assert isinstance(wanted, Wait)
        except StopIteration as end:
            self.ended, self.result = True, end.value
        except G35Error as error:
            self.ended, self.error = True, error

    def run(self, steps: int = 1 << 30) -> None:
        """So many steps more, or to the end."""
        while not self.ended and steps:
            self.step()
            steps -= 1

    def _writes(self) -> int:
        return sum(each.writes for each in self._channel.namespaces)
