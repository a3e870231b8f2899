"""How many slots of a volume are taken, as far as its directories are remembered: a running sum.

Every directory that is remembered counts itself in here, entry by entry as they come and go; so whoever
wants to know how full a volume is need not walk them.
"""

from __future__ import annotations

import threading


class Occupancy:
    """The slots taken in the remembered directories of one volume. Safe from any thread."""

    def __init__(self) -> None:
        self.taken = 0
        self._lock = threading.Lock()

    def add(self, more: int) -> None:
        """`more` slots are taken, or fewer where it is negative."""
        with self._lock:
            self.taken += more
