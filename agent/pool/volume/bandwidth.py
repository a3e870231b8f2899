"""A tenant's bandwidth: a token bucket for values of /kv, read and written together, of this agent alone.

The bucket may go into debt by the values under way: a value's length is unknown before it was read. An
operation that finds a debt waits, within its deadline, and is late otherwise. A wait keeps a thread, so all
tenants together have few seats for waiting; an operation without a seat is late at once.
"""

import threading
from typing import Final

from agent.pool.steps import Acquire, IoChannel, Steps

EARLY_SECONDS: Final = 0.01
"""A wait that ends so much before its time gave way to others of its door (agent/remote/long_waits.py)."""
BURST_SECONDS: Final = 0.25
"""What a tenant that was quiet may move at once, in seconds of its bandwidth."""


class TokenBucket:
    """Bytes that may be moved, at `rate` a second; `burst` seconds' worth ahead at most. It may go into debt.
    `now` is in seconds."""

    def __init__(self, rate: int, now: float, burst: float = BURST_SECONDS) -> None:
        self.rate = rate
        self._tokens = self._most = rate * burst
        self._at = now

    def _fill(self, now: float) -> None:
        self._tokens = min(self._most, self._tokens + max(0.0, now - self._at) * self.rate)
        self._at = max(self._at, now)

    def ready_at(self, now: float) -> float:
        """When the debt is paid; not after `now` where there is none."""
        self._fill(now)
        return now - self._tokens / self.rate if self._tokens < 0 else now

    def charge(self, size: int, now: float) -> None:
        self._fill(now)
        self._tokens -= size

    def take(self, size: int, now: float) -> bool:
        """Whether so many bytes may be moved now; then they are charged. More than a burst goes out of one
        that is full. For one thread at a time."""
        self._fill(now)
        if self._tokens < min(size, self._most):
            return False
        self._tokens -= size
        return True


class Bandwidth:
    """The bucket of one tenant. Safe from any thread. A `rate` of 0 (bytes a second) is no limit."""

    def __init__(self, seats: threading.BoundedSemaphore, rate: int = 0) -> None:
        """`seats`: for threads that wait for bandwidth, of all tenants together."""
        self.waits = 0
        """Operations that had to wait, and those that waited in vain or not at all (`late`)."""
        self.late = 0
        self._seats = seats
        self._bucket: TokenBucket | None = None
        self._lock = threading.Lock()
        self.limit(rate)

    @property
    def rate(self) -> int:
        bucket = self._bucket  # once: another thread may put another in its place
        return bucket.rate if bucket is not None else 0

    def limit(self, rate: int) -> None:
        with self._lock:
            if self.rate != rate:
                self._bucket = TokenBucket(rate, float("-inf")) if rate else None

    def admit(self, channel: IoChannel, deadline: float) -> Steps[bool]:
        """Wait until the debt is paid. False: that takes longer than the deadline, or too many wait: for
        bandwidth, or at the same door for anything."""
        waited = False
        while self.rate:
            with self._lock:
                now, bucket = channel.now(), self._bucket
                ready = bucket.ready_at(now) if bucket is not None else now
                if ready <= now:
                    return True
                if ready > deadline or not self._seats.acquire(blocking=False):
                    self.late += 1
                    return False
                self.waits += not waited
                waited = True
            closed = threading.Lock()
            closed.acquire()
            try:
                # Nobody gives it away: it ends when the debt is paid. It may be as long as a wait for a drive
                # that hangs, and both together are not to take all workers of a door.
                yield Acquire(closed, ready, gives_way=True, is_pause=True)
            finally:
                self._seats.release()
            if channel.now() + EARLY_SECONDS < ready:
                with self._lock:
                    self.late += 1
                return False
        return True

    def is_ready(self, channel: IoChannel) -> bool:
        """Whether `admit` would not have to wait."""
        with self._lock:
            bucket = self._bucket
            now = channel.now()
            return bucket is None or bucket.ready_at(now) <= now

    def charge(self, channel: IoChannel, size: int) -> None:
        """Charge so many moved bytes of values."""
        if self.rate:
            with self._lock:
                bucket = self._bucket
                if bucket is not None:
                    bucket.charge(size, channel.now())
