"""The yardstick: a fully associative LRU of the same size, played alongside by the same rules."""

from collections import OrderedDict
from collections.abc import Sequence


class LruBaseline:
    """Counts what an LRU of `capacity` blocks would have had. Requests come in the trace's order."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.blocks = 0
        self.hits = 0
        self._kept: OrderedDict[int, None] = OrderedDict()

    def play(self, hash_ids: Sequence[int]) -> None:
        """One request: the prefix up to the first hole is a hit, what is not there is stored."""
        self.blocks += len(hash_ids)
        prefix = True
        for hash_id in hash_ids:
            if hash_id in self._kept:
                if prefix:
                    self.hits += 1
                    self._kept.move_to_end(hash_id)
                continue
            prefix = False
            self._kept[hash_id] = None
            if len(self._kept) > self.capacity:
                self._kept.popitem(last=False)

    @property
    def hit_ratio(self) -> float:
        return self.hits / self.blocks if self.blocks else 0.0
