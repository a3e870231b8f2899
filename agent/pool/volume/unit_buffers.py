"""Buffers of one unit, used again: page faults in fresh memory cost more than the copy into it.

A unit needs a buffer where a range of the host ends inside it (agent/pool/read/get.py), and where a value
arrives in pieces (agent/pool/write/put.py). Hosts with page-aligned buffers seldom do either.
"""

from __future__ import annotations

import threading
from typing import Final

from agent.host_os.payload_memory import payload_memory

SPARE_MAX: Final = 16
"""Buffers that wait for their next use; one unit each."""


class UnitBuffers:
    """Spare buffers of `unit_bytes`. Safe from any thread."""

    def __init__(self, unit_bytes: int) -> None:
        self._unit_bytes = unit_bytes
        self._spare: list[memoryview] = []
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._spare)

    def borrow(self) -> memoryview:
        """A buffer of one unit; what it holds is left over from its last use."""
        with self._lock:
            if self._spare:
                return self._spare.pop()
        return payload_memory(self._unit_bytes)

    def give_back(self, buffer: memoryview) -> None:
        """The whole buffer that `borrow` gave; nobody looks at it any more."""
        with self._lock:
            if len(self._spare) < SPARE_MAX:
                self._spare.append(buffer)


class Tail:
    """The bytes of a value that do not yet make a whole unit: `len` of them, from `at` in the value on."""

    __slots__ = ("_buffer", "_buffers", "_filled", "at")

    def __init__(self, buffers: UnitBuffers) -> None:
        self._buffers = buffers
        self._buffer: memoryview | None = None
        self._filled = 0
        self.at = 0

    def __len__(self) -> int:
        return self._filled

    def begin(self, at: int, data: memoryview) -> None:
        """Hold `data`, less than a unit, which lies at `at` in the value."""
        if self._buffer is None:
            self._buffer = self._buffers.borrow()
        self.at = at
        self._filled = len(data)
        self._buffer[: len(data)] = data

    def append(self, data: memoryview) -> None:
        """Hold `data` behind what is held; together no more than a unit."""
        assert self._buffer is not None
        self._buffer[self._filled : self._filled + len(data)] = data
        self._filled += len(data)

    def text(self) -> memoryview:
        """What is held."""
        assert self._buffer is not None
        return self._buffer[: self._filled]

    def clear(self) -> None:
        """Hold nothing, and give the buffer back."""
        buffer, self._buffer = self._buffer, None
        self._filled = 0
        if buffer is not None:
            self._buffers.give_back(buffer)
