"""Which values of a volume have a copy in G4, and what is asked of the tier there; state of one volume.

A value is copied before it is evicted (agent/spill/copy_down.py): a put then only looks here which mark its
victim leaves, and waits for nothing. What is noted names one write of one slot, so a slot since reused finds
nothing. Lost with the agent: what was copied then, and is evicted later, leaves a plain ghost."""

import threading
from collections import OrderedDict, deque
from typing import Final, NamedTuple, Protocol

from agent.inline.cipher_suites import Place
from agent.pool.counters import MissCause
from agent.pool.format.directory import Entry
from agent.pool.format.occupancy import SetPlace
from agent.pool.format.spill_mark import SpillMark

COPIES_MAX: Final = 1 << 16
"""Values of a volume that are copied and still on flash; the one noted longest ago is forgotten first."""
SETS_MAX: Final = 1024
"""Sets that evicted and whose next victims are yet to be copied; more are dropped without regret."""


class FoundMark(NamedTuple):
    """A mark that named a value, and where it stands."""

    place: Place
    """The place of the slot, as its seal has it."""
    set_place: SetPlace
    slot: int
    mark: bytes
    """The eight bytes on flash."""


class LowerTier(Protocol):
    """What a get asks of G4 (agent/spill/read_up.py). Any thread may call it."""

    def __len__(self) -> int:
        """Keys and values that it remembers."""

    def pays(self) -> bool:
        """Whether a value would come in time, by what the last ones took."""

    def seconds_to_load(self, size: int) -> float | None:
        """How long so many bytes would take to come; None: not measured."""

    def fetch(self, mark: SpillMark) -> memoryview | MissCause:
        """The range that a mark names, as it came; it may be longer or shorter than the item. Waits until the
        tier's own deadline. The caller ends what it got by `release`."""

    def release(self, sealed: memoryview) -> None:
        """The caller is done with a range."""

    def served(self, pseudonym: bytes, key: bytes, sealed: memoryview, found: "FoundMark") -> None:
        """A get was served out of a range. On second use the value goes back to flash, later."""


class SpillCopies:
    """Safe from any thread."""

    def __init__(self) -> None:
        self.wanted = False
        """Victims of this volume are copied."""
        self._copies: OrderedDict[tuple[SetPlace, int], tuple[int, bytes]] = OrderedDict()
        self._sets: deque[SetPlace] = deque()
        self._waiting: set[SetPlace] = set()
        self.sets_dropped = 0
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._copies) + len(self._sets)

    def note(self, place: SetPlace, slot: int, entry: Entry, mark: SpillMark) -> None:
        """A copy of what the entry names lies in G4."""
        with self._lock:
            self._copies[place, slot] = entry.generation, mark.encode(entry.pseudonym)
            self._copies.move_to_end((place, slot))
            while len(self._copies) > COPIES_MAX:
                self._copies.popitem(last=False)

    def has(self, place: SetPlace, slot: int, generation: int) -> bool:
        noted = self._copies.get((place, slot))
        return noted is not None and noted[0] == generation

    def mark_for(self, place: SetPlace, slot: int, victim: Entry) -> bytes | None:
        """The mark that a victim leaves; None where it has no copy. Its set's next victims are wanted now."""
        if not self.wanted:
            return None
        with self._lock:
            if place not in self._waiting:
                if len(self._sets) < SETS_MAX:
                    self._sets.append(place)
                    self._waiting.add(place)
                else:
                    self.sets_dropped += 1
            noted = self._copies.pop((place, slot), None)
            return noted[1] if noted is not None and noted[0] == victim.generation else None

    def next_set(self) -> SetPlace | None:
        """The set that has waited longest since it evicted."""
        with self._lock:
            if not self._sets:
                return None
            place = self._sets.popleft()
            self._waiting.discard(place)
            return place

    def forget(self) -> None:
        with self._lock:
            self.wanted = False
            self._copies.clear()
            self._sets.clear()
            self._waiting.clear()
