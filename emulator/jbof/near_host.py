"""A connection's thread works on the processor where the host's packets come in.

What one side of a socket has written lies in the cache of the processor that it wrote on. The kernel's own
NVMe/TCP target works off a queue where its packets arrive (SO_INCOMING_CPU, socket(7)); so does this one.
Linux finds such a place by itself more often than not, and where it does not, a get of 1 MiB took a fifth
longer for as long as the threads stayed there (docs/decisions/0038-where-threads-work.md).

It is bound there for as long as the threads of other connections need to find their places, too, and then
free: Linux may put it elsewhere, where there is more to do than one processor can.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
from collections.abc import Callable
from typing import Final

LONG_BYTES: Final = 256 << 10
"""Moved for a command. Shorter payloads gain nothing, and who waits for one is woken sooner by a thread on
another processor."""
LOOK_EVERY: Final = 5
"""Commands. Not an even number, or what comes in here and there in turn would look steady."""
APART: Final = 6
"""So many more looks found that commands come in elsewhere before the thread follows: it must not run to
and fro."""

BOUND_FOR: Final = 64
"""Commands; in that time the threads of other connections find their places, too. Who sends none meanwhile
leaves an idle thread bound."""

# Not CDLL, which lets go of the interpreter's lock for the moment that the call takes.
_here: Final = ctypes.PyDLL(None).sched_getcpu


class Processors:
    """Where the calling thread may run."""

    here = staticmethod(_here)

    def bind(self, processor: int) -> frozenset[int]:
        """Have it run there alone, if it may; where it might before, empty where nothing has changed."""
        allowed = os.sched_getaffinity(0)
        if processor not in allowed or len(allowed) == 1:
            return frozenset()
        os.sched_setaffinity(0, {processor})
        return frozenset(allowed)

    def free(self, allowed: frozenset[int], bound_to: int) -> None:
        """Let it run there again, where nobody else has said meanwhile where it may."""
        if os.sched_getaffinity(0) == {bound_to}:
            os.sched_setaffinity(0, allowed)


class NearHost:
    """Of one connection, for its thread alone."""

    __slots__ = (
        "_allowed",
        "_apart",
        "_bound_for",
        "_bound_to",
        "_incoming",
        "_look_in",
        "_moved",
        "_processors",
    )

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
        """So many bytes, either way."""
        self._moved += count

    def command(self) -> None:
        """A command has come in, and what was moved before was for earlier ones."""
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
