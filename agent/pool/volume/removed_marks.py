"""Marks that this agent took out lately, with a delete or a put of their keys.

Two agents that write one directory at once both write what they read before, and the later image stays. So
the image of another agent may bring a mark back (spill_mark.py), and with it an older value. For a while this
agent follows no mark that it took out, and looks whether one is back (agent/pool/write/unmark.py). Lost with
the agent; a key beyond KEYS_MAX takes the place of the oldest."""

import heapq
import threading
from collections import OrderedDict
from collections.abc import Collection, Sequence
from typing import Final

from agent.pool.volume.directory_cache import COOLDOWN_SECONDS

LOOKS: Final[Sequence[float]] = (0.025, 0.1, 0.4, 1.2, COOLDOWN_SECONDS + 1.0)
"""Seconds after a removal at which the directories are read again. Another agent's image may be 20 ms old and
on its way for as long as a write may take. One that was given up may land within COOLDOWN_SECONDS."""
ANY_SECONDS: Final = 1.5
"""For so long every mark of the key counts as removed: another agent may have copied the older value as well,
and evict it by what it read before. A newer value that is evicted so soon is a miss."""
FORGET_SECONDS: Final = 5.0
"""The time from the last look until the removal is forgotten."""
KEYS_MAX: Final = 4096
"""The most keys of one volume."""
MARKS_MAX: Final = 16
"""The most marks of one key, and writes of it that a delete took out. Beyond that the newest stay."""


class _Removed:
    """The removal of one key, and the marks of it that were seen."""

    __slots__ = ("any_until", "generations", "marks", "number")

    def __init__(self, number: int) -> None:
        self.number = number
        """The number of the removal; looks that are due for an earlier removal do not count."""
        self.any_until = 0.0
        self.marks: tuple[bytes, ...] = ()
        self.generations: tuple[int, ...] = ()


class RemovedMarks:
    """The removed marks of one volume. Safe from any thread; `now` in the seconds of the channel's clock."""

    def __init__(self) -> None:
        self._keys: OrderedDict[bytes, _Removed] = OrderedDict()
        self._due: list[tuple[float, bytes, int, int]] = []
        """When, which key, the number of its removal, and which look."""
        self._count = 0
        self._lock = threading.Lock()
        self.found_again = 0
        """Marks that came back and were taken out again."""

    def __len__(self) -> int:
        return len(self._keys)

    def note(
        self, pseudonym: bytes, marks: Collection[bytes], now: float, *, generations: Collection[int] = ()
    ) -> None:
        """The marks of a key were taken from flash; and of a delete the entries of these writes."""
        with self._lock:
            self._count += 1
            removed = self._keys.setdefault(pseudonym, _Removed(self._count))
            removed.number, removed.any_until = self._count, now + ANY_SECONDS
            removed.marks = (*removed.marks, *marks)[-MARKS_MAX:]
            removed.generations = (*removed.generations, *generations)[-MARKS_MAX:]
            self._keys.move_to_end(pseudonym)
            if len(self._keys) > KEYS_MAX:
                self._keys.popitem(last=False)
            # No more than one of each key: the next is put in when it is worked off.
            heapq.heappush(self._due, (now + LOOKS[0], pseudonym, self._count, 0))
            if len(self._due) > 2 * KEYS_MAX:
                self._due = [each for each in self._due if self._stands(each)]
                heapq.heapify(self._due)

    def _stands(self, due: tuple[float, bytes, int, int]) -> bool:
        removed = self._keys.get(due[1])
        return removed is not None and removed.number == due[2]

    def is_removed(self, pseudonym: bytes, mark: bytes, now: float) -> bool:
        """Whether a mark that may be the key's is one of an older value."""
        removed = self._keys.get(pseudonym)
        return removed is not None and (now < removed.any_until or mark in removed.marks)

    def was_erased(self, pseudonym: bytes, generation: int) -> bool:
        """Whether a delete took out the entry of this write."""
        removed = self._keys.get(pseudonym)
        return removed is not None and generation in removed.generations

    def next_due(self, now: float) -> bytes | None:
        """A key whose directories are to be read again; its next look is noted."""
        with self._lock:
            while self._due and self._due[0][0] <= now:
                due = heapq.heappop(self._due)
                _, pseudonym, number, look = due
                if not self._stands(due):
                    continue
                if look == len(LOOKS):
                    del self._keys[pseudonym]
                    continue
                # The last look still asks here what was removed.
                later = LOOKS[look + 1] - LOOKS[look] if look + 1 < len(LOOKS) else FORGET_SECONDS
                heapq.heappush(self._due, (max(now, due[0] + later), pseudonym, number, look + 1))
                return pseudonym
            return None

    def forget(self) -> None:
        """The volume was erased."""
        with self._lock:
            self._keys.clear()
            self._due.clear()
