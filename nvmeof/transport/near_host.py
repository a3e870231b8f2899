"""A connection's thread works on the processor where the host's packets come in (SO_INCOMING_CPU, socket(7)).

Payload lies in the cache of the processor that wrote it; the kernel's own NVMe/TCP target does the same.
Linux mostly finds such a place by itself. Where it did not, a get of 1 MiB took a fifth longer
(docs/decisions/0038-where-threads-work.md). The thread is bound until the threads of other connections have
found their places, and then free: Linux may move it where one processor has too much work.
"""

import contextlib
import ctypes
import os
import socket
from collections.abc import Callable
from typing import Final

LONG_BYTES: Final = 256 << 10
"""Moved for a command. Shorter payloads gain nothing: a thread on another processor wakes the host sooner."""
LOOK_EVERY: Final = 5
"""Commands. An odd number: packets that alternate between two processors must not look steady."""
APART: Final = 6
"""The thread follows once so many more looks found packets elsewhere: it must not run to and fro."""

BOUND_FOR: Final = 64
"""Commands, in which the threads of other connections find their places."""

# CDLL would release the interpreter's lock for the call.
_here: Final = ctypes.PyDLL(None).sched_getcpu


class Processors:
    """Where the calling thread may run."""

    here = staticmethod(_here)

    def bind(self, processor: int) -> frozenset[int]:
        """Bind it to one processor, if allowed; the processors before, empty where nothing has changed."""
        allowed = os.sched_getaffinity(0)
        if processor not in allowed or len(allowed) == 1:
            return frozenset()
        os.sched_setaffinity(0, {processor})
        return frozenset(allowed)

    def free(self, allowed: frozenset[int], bound_to: int) -> None:
        """Undo `bind`, unless somebody else has set its processors meanwhile."""
        if os.sched_getaffinity(0) == {bound_to}:
            os.sched_setaffinity(0, allowed)


class NearHost:
    """Of one connection, for its thread alone."""

    def __init__(self, incoming: Callable[[], int], processors: Processors | None = None) -> None:
        """`incoming`: the processor where the last packet came in."""
        self._incoming = incoming
        self._processors = processors or Processors()
        self._apart = 0
        self._moved = 0
        self._look_in = LOOK_EVERY
        self._bound_for = 0
        self._bound_to = -1
        self._allowed: frozenset[int] = frozenset()

    def moved(self, count: int) -> None:
        self._moved += count

    def command(self) -> None:
        """A command has come in; bytes moved before were for earlier ones."""
        moved, self._moved = self._moved, 0
        if self._bound_for:
            self._bound_for -= 1
            if not self._bound_for:
                with contextlib.suppress(OSError):
                    self._processors.free(self._allowed, self._bound_to)
        elif moved >= LONG_BYTES:
            self._look_in -= 1
            if not self._look_in:
                self._look_in = LOOK_EVERY
                self._look()

    def _look(self) -> None:
        try:
            processor = self._incoming()
        except OSError:
            return  # gVisor and the like know no such option
        if processor == self._processors.here():
            self._apart = max(0, self._apart - 1)
            return
        self._apart += 1
        if self._apart >= APART:
            self._apart = 0
            with contextlib.suppress(OSError):
                self._allowed = self._processors.bind(processor)
                self._bound_to = processor
                self._bound_for = BOUND_FOR if self._allowed else 0


def incoming_processor(sock: socket.socket) -> Callable[[], int]:
    """What `NearHost` asks of a socket."""

    def incoming() -> int:
        return sock.getsockopt(socket.SOL_SOCKET, socket.SO_INCOMING_CPU)

    return incoming
