"""Units that were opened for a range which ended inside of them, kept for the range that comes next.

A buffer in the GPU host's memory seldom begins at a page, and then the kernel cuts a read of 1 MiB in
two: all but the last bytes, and the last bytes. Without this the second request would fetch and open the
last unit once more. A unit waits here in plain text until it was read to its end, bounded in number, the
one kept longest dropped first.
"""

from __future__ import annotations

import threading
from collections import OrderedDict

KEPT_UNITS_MAX = 32
"""Of 256 KiB each by default: 8 MiB. As many reads as workers can be under way at once."""


class KeptUnits:
    """Opened units by reader, one each. Safe from any thread."""

    def __init__(self, capacity: int = KEPT_UNITS_MAX) -> None:
        self._capacity = capacity
        self._units: OrderedDict[int, tuple[int, memoryview]] = OrderedDict()
        self._lock = threading.Lock()

    def keep(self, reader: int, number: int, plain: memoryview) -> None:
        """Keep one unit for a reader (by its number), instead of what it kept before."""
        with self._lock:
            self._units.pop(reader, None)
            self._units[reader] = (number, plain)
            if len(self._units) > self._capacity:
                self._units.popitem(last=False)

    def take(self, reader: int, number: int) -> memoryview | None:
        """The unit, if this very one is kept for the reader; it is not kept any longer."""
        with self._lock:
            kept = self._units.get(reader)
            if kept is None or kept[0] != number:
                return None
            del self._units[reader]
            return kept[1]

    def drop(self, reader: int) -> None:
        """The reader is gone."""
        with self._lock:
            self._units.pop(reader, None)
