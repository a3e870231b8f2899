"""Requests that a door has put aside: each would have held one worker too many (agent/remote/long_waits.py).

Such a request changes nothing, and ended early (`GaveWay`). The kernel waits for its answer, no worker does.
The request is served again once a worker's long wait is over: by that worker, after its reply. The wait may
have ended with an answer of the enclosure, or in vain; then the next request waits in its place, until the
circuit breaker refuses the rest.

A kernel takes an answer on the descriptor alone by which it gave the request out. So each request keeps a
duplicate of that descriptor, for its worker may have ended meanwhile.
"""

import contextlib
import os
import threading
from collections import deque
from collections.abc import Callable
from typing import Final, NamedTuple

from agent.host_os.per_user_bounds import ALL, Bounds, Limit

PARKED: Final = Limit(
    "parked-requests", "reads of files that wait aside for an enclosure which answers nobody", 256,
    by="everybody", share=ALL, refused="EIO", bytes_each=1024,
)  # fmt: skip
REQUEST_BYTES_MAX: Final = 4096
"""Of a request with its arguments. What brings data along is not put aside."""


class Parked(NamedTuple):
    """A request as it was read, and a descriptor for its answer. Who takes the request closes it."""

    request: bytes
    descriptor: int


class ParkedRequests:
    """Of the workers of one door. Safe from any thread."""

    def __init__(self, has_room: Callable[[], bool], most: int = PARKED.most) -> None:
        """`has_room`: whether one worker more may wait long."""
        self._has_room = has_room
        self._most = most
        self._waiting: deque[Parked] = deque()
        self._lock = threading.Lock()
        self._is_closed = False
        self._ended = 0
        self.refused = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def watch(self, bounds: Bounds) -> None:
        bounds.watch(PARKED, lambda: {"all": len(self)}, lambda: self.refused, most=self._most)

    def put(self, request: memoryview, descriptor: int) -> bool:
        """Put a request aside. False: it is to be refused."""
        if len(request) > REQUEST_BYTES_MAX:
            return False
        with self._lock:
            if not self._is_closed and len(self._waiting) < self._most:
                with contextlib.suppress(OSError):  # as many descriptors are open as may be
                    self._waiting.append(Parked(bytes(request), os.dup(descriptor)))
                    return True
            self.refused += 1
            return False

    def put_back(self, parked: Parked) -> bool:
        """It gave way once more. False, and its descriptor is closed: the door ends."""
        with self._lock:
            if not self._is_closed:
                self._waiting.append(parked)
                return True
        os.close(parked.descriptor)
        return False

    def take(self) -> Parked | None:
        """The one that has waited longest; None where none waits, or none could wait for long now."""
        if not self._waiting or not self._has_room():
            return None
        with self._lock:
            return self._waiting.popleft() if self._waiting else None

    def leave(self, workers: int) -> None:
        """A worker has ended, of so many. With the last of them the kernel is to answer in the door's place,
        which it does once every descriptor is closed."""
        with self._lock:
            self._ended += 1
            is_last = self._ended >= workers
        if is_last:
            self.close()

    def close(self) -> None:
        """The door ends: nobody is answered any more."""
        with self._lock:
            self._is_closed = True
            left = list(self._waiting)
            self._waiting.clear()
        for parked in left:
            os.close(parked.descriptor)
