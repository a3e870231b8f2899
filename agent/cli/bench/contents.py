"""Values to store and to compare with: all different, and made in no time."""

from __future__ import annotations

import functools
import random

STEP = 4104
"""Neighbours begin this many bytes apart: no multiple of a page, so that no two share one."""
STEPS = 256


@functools.cache
def _run(length: int) -> bytes:
    return random.Random(35).randbytes(length)


class Contents:
    """The values of `value_bytes` bytes, by number; STEPS of them, then they repeat."""

    def __init__(self, value_bytes: int) -> None:
        self.value_bytes = value_bytes
        self._run = memoryview(_run(value_bytes + STEP * STEPS))

    def value(self, number: int) -> memoryview:
        start = number % STEPS * STEP
        return self._run[start : start + self.value_bytes]
