"""Opened units, kept for the range that comes next.

A buffer of the GPU host seldom begins at a page; the kernel then cuts a read of 1 MiB in two, and the second
request would fetch and open the last unit again. A unit waits here in plain text until it was read to its
end. The oldest is dropped first.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import Final

from agent.pool.volume.unit_buffers import UnitBuffers

KEPT_UNITS_MAX: Final = 32
"""Of at most 1 MiB each: 32 MiB a volume, and only where hosts read into buffers that begin amid a page."""


class UnitCache:
    """Opened units by reader, one each. Safe from any thread."""

    def __init__(self, buffers: UnitBuffers, capacity: int = KEPT_UNITS_MAX) -> None:
        self._buffers = buffers
        self._capacity = capacity
        self._units: OrderedDict[int, tuple[int, memoryview]] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._units)

    def keep(self, reader: int, number: int, buffer: memoryview) -> None:
        """Keep a buffer with one opened unit for a reader (by its number), instead of what it kept before."""
        with self._lock:
            gone = [self._units.pop(reader, None)]
            self._units[reader] = (number, buffer)
            if len(self._units) > self._capacity:
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
        """The reader is gone."""
        if not self._units:  # as mostly: reads of whole values keep nothing
            return
        with self._lock:
            kept = self._units.pop(reader, None)
        if kept is not None:
            self._buffers.give_back(kept[1])
