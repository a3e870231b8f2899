"""Buffers of one unit, used again: page faults in fresh memory cost more than the copy into it.

A unit needs a buffer where a range of the host ends inside it (agent/pool/read/get.py), and where a value
arrives in pieces (agent/pool/write/put.py). Hosts with page-aligned buffers seldom do either.

A buffer of the GPU host seldom begins at a page; the kernel then cuts a read of 1 MiB in two, and the second
request would fetch and open the last unit again. So an opened unit waits in plain text until it was read to
its end (`UnitCache`). The oldest is dropped first.
"""

import threading
from collections import OrderedDict
from typing import Final

from agent.host_os.payload_memory import payload_memory

SPARE_MAX: Final = 16
"""Buffers that wait for their next use; one unit each."""
KEPT_UNITS_MAX: Final = 32
"""The most units, of at most 1 MiB each: 32 MiB a volume, and only where hosts read into buffers that begin
amid a page."""


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


class UnitCache:
    """Opened units by reader, one each. Safe from any thread."""

    def __init__(self, buffers: UnitBuffers) -> None:
        self._buffers = buffers
        self._units: OrderedDict[int, tuple[int, memoryview]] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._units)

    def keep(self, reader: int, number: int, buffer: memoryview) -> None:
        """Keep a buffer with one opened unit for a reader (by its number), instead of what it kept before."""
        with self._lock:
            gone = [self._units.pop(reader, None)]
            self._units[reader] = (number, buffer)
            if len(self._units) > KEPT_UNITS_MAX:
                gone.append(self._units.popitem(last=False)[1])
        for kept in gone:
            if kept is not None:
                self._buffers.give_back(kept[1])

    def take(self, reader: int, number: int) -> memoryview | None:
        """The buffer, if this very unit is kept for the reader; it is the caller's to give back or keep."""
        with self._lock:
            kept = self._units.get(reader)
            if kept is None or kept[0] != number:
                return None
            del self._units[reader]
            return kept[1]

    def drop_all(self) -> None:
        """Nothing may be read on; the memory goes, too, and is not given to other readers."""
        with self._lock:
            self._units.clear()

    def drop(self, reader: int) -> None:
        if not self._units:  # as mostly: reads of whole values keep nothing
            return
        with self._lock:
            kept = self._units.pop(reader, None)
        if kept is not None:
            self._buffers.give_back(kept[1])


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
        assert self._buffer is not None
        return self._buffer[: self._filled]

    def clear(self) -> None:
        buffer, self._buffer = self._buffer, None
        self._filled = 0
        if buffer is not None:
            self._buffers.give_back(buffer)
