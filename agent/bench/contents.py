"""Values to store and to compare with, all different, and buffers to read into.

Both begin at pages: the kernel cuts a direct read of 1 MiB that begins within a page into two FUSE requests.
"""

import functools
import mmap
import random
import threading
from collections.abc import Callable

from agent.host_os.payload_memory import payload_memory

ARENA_BYTES = 64 << 20
STEP = 4096
STEPS = 256


class _Arena:
    """Memory that buffers are cut from, one behind the other, as those of an engine's own host pool are.

    All that is measured gets its buffers here, the floors and the other stores too.
    """

    def __init__(self) -> None:
        self._left = memoryview(b"")
        self._lock = threading.Lock()

    def take(self, size: int) -> memoryview:
        room = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
        with self._lock:
            if room > len(self._left):
                self._left = payload_memory(max(room, ARENA_BYTES))
            taken, self._left = self._left[:size], self._left[room:]
        return taken


_arena = _Arena()


def pages(size: int) -> memoryview:
    """A writable buffer of `size` bytes that begins at a page and has been touched."""
    buffer = _arena.take(size)
    for at in range(0, size, mmap.PAGESIZE):
        buffer[at] = 0
    return buffer


@functools.cache
def _run(length: int) -> memoryview:
    run = pages(length)
    run[:] = random.Random(35).randbytes(length)
    return run.toreadonly()


class Contents:
    """The values of `value_bytes` bytes, by number; STEPS of them, then they repeat."""

    def __init__(self, value_bytes: int, new_buffer: Callable[[int], memoryview] | None = None) -> None:
        """`new_buffer`: where values must lie in memory of a certain kind, a copy of them is made there."""
        self.value_bytes = value_bytes
        self._run = _run(value_bytes + STEP * STEPS)
        if new_buffer is not None:
            copy = new_buffer(len(self._run))
            copy[:] = self._run
            self._run = copy

    def value(self, number: int) -> memoryview:
        start = number % STEPS * STEP
        return self._run[start : start + self.value_bytes]
