"""What followed a key before: a bounded table from which the continuation of a prefix chain is guessed.

Blocks of a prefix are asked for in the order of the text, and each names all that went before it (their keys
are chained hashes). So what followed a block once is likely to follow it again, until the text branches: then
no continuation has the greater part of what was seen, and nothing is guessed.

The table knows pseudonyms and no keys: once a tenant is erased nobody can ask it for anything.
"""

import itertools
import threading
from collections import OrderedDict
from collections.abc import Sequence

ENTRIES_MAX = 1 << 17
"""Keys of all volumes whose successors are remembered, about 300 bytes each. The one of its volume that was
seen longest ago goes."""
SUCCESSORS_MAX = 4
"""Remembered of one key. Of a system prompt's last block there are more, and then none is likely."""
COUNT_MAX = 64
"""Where one successor was seen so often, all counts of its key are halved: what is new can catch up."""
CHAIN_WEIGHT = 4
"""An order that one request names, against one that is put together from requests that followed each other,
which may be those of two clients in turn."""
LIKELY_SHARE = 0.6
"""A successor is guessed where it has so much of all that was seen to follow its key. On the conversation
trace four successors and this share waste a third of what one and any share do (docs/prestaging.md)."""


class Successors:
    """The table of one volume. Safe from any thread."""

    def __init__(self, entries_max: int = ENTRIES_MAX) -> None:
        self._entries_max = entries_max
        self._table: OrderedDict[bytes, dict[bytes, int]] = OrderedDict()
        self._lock = threading.Lock()

    def forget_oldest(self, count: int) -> None:
        """Make room for what other volumes learn."""
        with self._lock:
            for _ in range(min(count, len(self._table))):
                self._table.popitem(last=False)

    def __len__(self) -> int:
        return len(self._table)

    def saw(self, chain: Sequence[bytes], weight: int = CHAIN_WEIGHT) -> None:
        with self._lock:
            for key, following in itertools.pairwise(chain):
                if key != following:
                    self._count(key, following, weight)

    def _count(self, key: bytes, following: bytes, weight: int) -> None:
        table = self._table
        seen = table.get(key)
        if seen is None:
            table[key] = {following: weight}
            if len(table) > self._entries_max:
                table.popitem(last=False)
            return
        table.move_to_end(key)
        if following not in seen and len(seen) >= SUCCESSORS_MAX:
            del seen[min(seen, key=seen.__getitem__)]
        count = seen.get(following, 0) + weight
        seen[following] = count
        if count > COUNT_MAX:
            for each in seen:
                seen[each] = max(1, seen[each] // 2)

    def likely(self, key: bytes, depth: int) -> list[bytes]:
        """What is likely to follow the key, `depth` keys at most, the next one first."""
        found: list[bytes] = []
        with self._lock:
            while len(found) < depth:
                seen = self._table.get(key)
                if not seen:
                    break
                following = max(seen, key=seen.__getitem__)
                if seen[following] < LIKELY_SHARE * sum(seen.values()) or following in found:
                    break
                found.append(following)
                key = following
        return found
