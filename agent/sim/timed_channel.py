"""What channels in virtual time have in common, whatever their namespaces are: clock, buffers, tallies.

Nothing here sits in a volatile cache, so no write is ever in doubt; what fsync asks is another's test.
"""

from collections.abc import Sequence
from typing import Protocol, cast

from agent.pool.counters import Tally
from agent.pool.steps import IoChannel, Pending, Read, Write, read_each, take_each, write_each
from agent.remote.circuit_breaker import Outstanding
from agent.remote.queue_slot import QUEUE_DEPTH
from agent.sim.medium import WorkerBuffer

EPOCH = 1_800_000_000.0


class Clock(Protocol):
    """What has the virtual time."""

    now: float


class TimedPending:
    """One read or write under way."""

    __slots__ = ("abandoned", "asked", "done", "fault", "received", "size", "unreachable")

    def __init__(self, size: int) -> None:
        """`size`: bytes to receive; -1 where it is no read."""
        self.asked: Outstanding | None = None
        """What judges the namespace by the answer, as in the agent."""
        self.size = size
        self.done = False
        self.received = 0
        self.fault: str | None = None
        self.unreachable = False
        self.abandoned = False


class TimedChannel:
    """One worker's. A worker runs one operation at a time, and its buffers are its own."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._receive, self._send = WorkerBuffer(), WorkerBuffer()
        self.tallies: dict[str, Tally] = {"": Tally()}
        self.skew = 0.0
        """Seconds that this agent's wall clock is off."""

    def receive_buffer(self, size: int) -> memoryview:
        return self._receive.take(size)

    def send_buffer(self, size: int) -> memoryview:
        return self._send.take(size)

    def is_local(self, namespace: int) -> bool:
        return False

    def unflushed(self, namespace: int) -> int | None:
        return 0

    def flushed(self, namespace: int, mark: int, flush: Pending) -> None: ...

    def written(self) -> int:
        return 0

    def is_unflushed(self, namespace: int, first: int, last: int) -> bool:
        return False

    def doubtful(self, namespace: int) -> int:
        return 0

    def tally(self, volume: str) -> Tally:
        found = self.tallies.get(volume)
        if found is None:
            found = self.tallies[volume] = Tally()
        return found

    def queue_depth(self) -> int:
        return QUEUE_DEPTH

    def gives_way(self) -> None:
        """Its worker has no door with others."""

    def took(self, pending: Pending) -> None:
        """Answers are counted as they come."""

    def read_many(self, reads: Sequence[Read]) -> list[Pending]:
        return read_each(cast("IoChannel", self), reads)

    def write_many(self, writes: Sequence[Write]) -> list[Pending]:
        return write_each(cast("IoChannel", self), writes)

    def arrived(self, pendings: Sequence[Pending], first: int) -> int:
        return take_each(cast("IoChannel", self), pendings, first)

    def comes_again(self) -> None:
        """As `gives_way`."""

    def has_patience(self) -> None:
        """No program waits for a file here: all steps go by what a get waits for."""

    def waits_for_slow(self) -> None:
        """Likewise."""

    def now(self) -> float:
        return self._clock.now

    def wall(self) -> float:
        return EPOCH + self._clock.now + self.skew
