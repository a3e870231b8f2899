"""A hold on a lock that always knows whether the lock is held, whatever interrupts the thread.

Ctrl-C raises KeyboardInterrupt in the main thread between any two steps of Python, also right after the step
that took a lock or let go of it: before the `try` that would undo it, and before a variable says so. A lock
lost in this way blocks the device for ever, its `close` included, and no peer hears that the process ends. A
single step of C is never interrupted. So here the call of the lock and its record are one such step: a list
grows by the result of each call. An odd length means that the lock is held.
"""

import threading
from contextlib import suppress
from itertools import starmap
from typing import Final

_ONE_CALL: Final = ((),)
"""The arguments of one call without any."""


class LockHold:
    """One thread's hold on `lock`, which it takes through `door`, a second lock. The thread in the door is
    next, ahead of one that releases the lock and comes back at once."""

    __slots__ = ("_door", "_lock", "_steps")

    def __init__(self, lock: threading.Lock, door: threading.Lock) -> None:
        self._lock = lock
        self._door = door
        self._steps: list[object] = []

    @property
    def held(self) -> bool:
        """Whether this thread has the lock by this grip."""
        return len(self._steps) & 1 == 1

    def enter(self) -> None:
        """Take the lock, as the next in the row."""
        with self._door:
            self._steps.extend(starmap(self._lock.acquire, _ONE_CALL))

    def acquire(self) -> None:
        """Take the lock, past the row: for a thread that released it only to sleep."""
        self._steps.extend(starmap(self._lock.acquire, _ONE_CALL))

    def release(self) -> None:
        self._steps.extend(starmap(self._lock.release, _ONE_CALL))
        self._steps.clear()

    def regain(self) -> None:
        """After an exception: take the lock if it is not held, and let no further interrupt prevent it."""
        while not self.held:
            with suppress(KeyboardInterrupt):
                self.enter()
