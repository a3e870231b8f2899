"""Log lines about work that went wrong, at a bounded rate.

A process can send a million broken requests, and the log must not fill the disk. Each kind of complaint gets
one line in `interval` seconds, with the number of complaints that were left out since.
"""

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

KINDS_MAX = 256
"""Kinds remembered at once; a kind is an operation and a type of exception, so this is not reached."""


@dataclass(eq=False)
class Complaints:
    """Shared by all threads that do the work."""

    _log: logging.Logger
    interval: float = 10.0
    clock: Callable[[], float] = time.monotonic
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _next_at: dict[str, float] = field(default_factory=dict)
    _left_out: dict[str, int] = field(default_factory=dict)
    count: int = 0

    def bug(self, doing: str, error: BaseException, outcome: str = "answered EIO") -> None:
        """An operation raised an exception that it must not; `outcome`: the answer to its caller."""
        self._say(logging.ERROR, f"{doing}: {type(error).__name__}", outcome, error)

    def peer(self, doing: str, why: str) -> None:
        """A request was not what the protocol says."""
        self._say(logging.WARNING, f"{doing}: malformed request", why, None)

    def world(self, what: str, why: str, level: int = logging.WARNING) -> None:
        """Something could not be done, by no fault of ours or the peer's: a disk is full."""
        self._say(level, what, why, None)

    def _say(self, level: int, kind: str, why: str, error: BaseException | None) -> None:
        with self._lock:
            self.count += 1
            now = self.clock()
            if now < self._next_at.get(kind, now):
                self._left_out[kind] = self._left_out.get(kind, 0) + 1
                return
            if len(self._next_at) >= KINDS_MAX:
                self._next_at.clear()
                self._left_out.clear()
            self._next_at[kind] = now + self.interval
            left_out = self._left_out.pop(kind, 0)
        more = f" ({left_out} more like it since the last such line)" if left_out else ""
        self._log.log(level, "%s: %s%s", kind, why, more, exc_info=error)
