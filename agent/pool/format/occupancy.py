"""How many slots of a volume are taken, as far as its directories are known: running sums.

Every remembered directory counts its entries in here as they come and go, so nobody walks the directories for
that. For a volume with a quota (agent/pool/volume/quota.py) the taken slots of sets that are not remembered
are kept as well, as of the last look.
"""

import threading

SetPlace = tuple[int, int]
"""A set: its namespace (an index into the pool map), and its directory's offset there in bytes."""


class Occupancy:
    """The slots taken in the directories of one volume. Safe from any thread."""

    def __init__(self) -> None:
        self.taken = 0
        """The taken slots in remembered directories."""
        self._forgotten: dict[SetPlace, int] | None = None
        self._in_forgotten = 0
        self._lock = threading.Lock()

    def add(self, more: int) -> None:
        """`more` slots are taken, or fewer where it is negative."""
        with self._lock:
            self.taken += more

    def keep_forgotten(self) -> None:
        """From now on sets that are not remembered count as well: one number for each that is not empty."""
        with self._lock:
            if self._forgotten is None:
                self._forgotten = {}

    @property
    def known(self) -> int:
        """Slots taken in all sets that were ever looked at."""
        return self.taken + self._in_forgotten

    def forgotten(self) -> list[SetPlace]:
        """The sets that are not remembered and were not empty."""
        with self._lock:
            return list(self._forgotten or ())

    def is_forgotten(self, place: SetPlace) -> bool:
        return place in (self._forgotten or ())

    def note_forgotten(self, place: SetPlace, taken: int) -> None:
        """Note how many slots are taken in a set that is not remembered any more; 0 also where it is
        remembered now."""
        with self._lock:
            if self._forgotten is not None:
                self._in_forgotten += taken - self._forgotten.pop(place, 0)
                if taken:
                    self._forgotten[place] = taken
