"""The directories that an agent remembers: hints, bounded in number, safe to lose.

Who may do what to a `CachedSet`:

* `guard` protects the entries and the reservations. It is held for microseconds and never across a
  yield, so a plain `with` is right even in steps.
* `writer` is held by whoever has a write of this directory under way. It is taken with `Acquire`,
  because its holder waits for the fabric. Two images of one directory are therefore never in flight at
  once from one agent; between agents they may be, and the later one wins: a lost entry is a lost hit.
* A set that is in use is not dropped from the cache, or a second copy of it could be loaded beside
  the first, and the agent would lose updates to itself.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass, field

from agent.pool.directory import Directory

APPROXIMATE_BYTES = 4096 + 1024
"""What one cached set takes: the block, the object round it and its place in the table."""


@dataclass(slots=True, eq=False)
class CachedSet:
    """One set's directory as this agent last saw it; `directory` is None until it was read once."""

    namespace: int
    offset: int
    directory: Directory | None = None
    loaded_at: float = float("-inf")
    fault: str | None = None
    reserved: set[int] = field(default_factory=set)
    guard: threading.Lock = field(default_factory=threading.Lock)
    writer: threading.Lock = field(default_factory=threading.Lock)
    users: int = 0

    def accept(self, block: memoryview, now: float) -> int:
        """Take over what was read from flash; how many damaged entries it had.

        While a write of ours is under way the block on flash may be either image, so ours stays.
        """
        fresh = Directory(block)
        with self.guard:
            if self.directory is not None:
                if self.writer.locked() or self.reserved:
                    self.loaded_at = now
                    return 0
                fresh.merge_uses(self.directory)
            self.directory = fresh
            self.loaded_at = now
        return len(fresh.corrupt_keys)


class DirectoryCache:
    """Cached sets by place, the least recently used dropped first."""

    def __init__(self, budget_bytes: int) -> None:
        self.capacity = max(16, budget_bytes // APPROXIMATE_BYTES)
        self._sets: OrderedDict[tuple[int, int], CachedSet] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._sets)

    def borrow(self, namespace: int, offset: int) -> CachedSet:
        """The set at a byte offset of a namespace, read or not; give it back with `give_back`."""
        place = (namespace, offset)
        with self._lock:
            cached = self._sets.get(place)
            if cached is None:
                cached = self._sets[place] = CachedSet(namespace, offset)
                if len(self._sets) > self.capacity:
                    self._drop_one()
            else:
                self._sets.move_to_end(place)
            cached.users += 1
            return cached

    def give_back(self, cached: CachedSet) -> None:
        with self._lock:
            cached.users -= 1

    def _drop_one(self) -> None:
        # The newest is the one just added; sets in use are few (two a worker), so this ends at once.
        for place, cached in self._sets.items():
            if cached.users == 0:
                del self._sets[place]
                return

    def forget_namespace(self, namespace: int) -> None:
        """Drop what is known of a namespace that came back: it may have been replaced meanwhile."""
        with self._lock:
            for place, cached in list(self._sets.items()):
                if place[0] == namespace and cached.users == 0:
                    del self._sets[place]

    def snapshot(self) -> list[CachedSet]:
        """All that is remembered now."""
        with self._lock:
            return list(self._sets.values())
