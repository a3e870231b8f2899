"""Values to store and to compare with, all different and made in no time; and buffers to read into.

Values and buffers begin at pages, as those of an engine do that hands them to DMA. It matters: the kernel
cuts a direct read or write of 1 MiB that begins within a page into two FUSE requests.
"""

from __future__ import annotations

import functools
import mmap
import random
from collections.abc import Callable

STEP = 4096
STEPS = 256


def pages(size: int) -> memoryview:
    """A writable buffer of `size` bytes that begins at a page and has been touched."""
    buffer = memoryview(mmap.mmap(-1, size))
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
