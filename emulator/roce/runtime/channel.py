"""Events behind a file descriptor: a completion channel, a CM event channel, a device's asynchronous events.

The descriptor is an eventfd that is readable exactly while events wait, so that a program can select() on
it. It is written when the first event comes and read when the last one goes: two system calls for a burst of
events, however many. All methods are called with the device's lock held, `fileno` excepted.
"""

import os
from collections import deque
from collections.abc import Callable
from typing import Final, Generic, TypeVar

T = TypeVar("T")

MAX_EVENTS: Final = 1 << 16
"""Events that wait in one channel. A completion queue has at most one armed event, a connection a handful,
so only a program that never looks gets here; then events are dropped and counted."""


class EventChannel(Generic[T]):
    """A row of events with a descriptor, `most` of them at once."""

    def __init__(self, most: int = MAX_EVENTS) -> None:
        self.dropped = 0
        self._most = most
        self._events: deque[T] = deque()
        self._descriptor = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def __len__(self) -> int:
        return len(self._events)

    @property
    def closed(self) -> bool:
        return self._descriptor < 0

    def fileno(self) -> int:
        """For select and poll: readable while events wait. -1 once closed."""
        return self._descriptor

    def push(self, event: T) -> None:
        """Add an event; one for a closed channel is forgotten."""
        if self._descriptor < 0:
            return
        if len(self._events) >= self._most:
            self.dropped += 1
            return
        self._events.append(event)
        if len(self._events) == 1:
            os.eventfd_write(self._descriptor, 1)

    def pop(self) -> T | None:
        if not self._events:
            return None
        event = self._events.popleft()
        if not self._events:
            os.eventfd_read(self._descriptor)
        return event

    def discard(self, unwanted: Callable[[T], bool]) -> None:
        kept = [event for event in self._events if not unwanted(event)]
        if len(kept) == len(self._events):
            return
        self._events = deque(kept)
        if not kept:
            os.eventfd_read(self._descriptor)

    def close(self) -> None:
        """Give the descriptor back; events that wait are lost. Closing twice is fine."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
            self._events.clear()
