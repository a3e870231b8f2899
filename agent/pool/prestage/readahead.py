"""Reading the likely continuation of a prefix before it is asked for.

The faces say what they see: in which order a client named keys (`chain`), and that it has begun to read one
(`reads`). The first is learned from (predictor.py), the second starts the reading of what is likely to come,
by the prestager's threads and behind everything that was announced. Nothing here waits or moves a byte, so a
get is not held up by it.
"""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from agent.pool.prestage.predictor import CHAIN_WEIGHT, ENTRIES_MAX, Successors
from agent.pool.volume.volume import Volume

CHAIN_MAX = 512
"""Keys of one request that are learned from: a pseudonym is a microsecond, and a worker waits for it."""
DEPTH = 4
"""Blocks read ahead of the one that was asked for."""


@dataclass(slots=True)
class Trail:
    """Where one client was last: a session, or a process that opens files. Lost updates cost a guess."""

    volume_id: bytes = b""
    pseudonym: bytes = b""


class Readahead:
    """What all faces share. `stage(volume, pseudonym)` puts a key behind what is to be read."""

    def __init__(
        self,
        stage: Callable[[Volume, bytes], object],
        *,
        depth: int = DEPTH,
        active: bool = True,
        entries_max: int = ENTRIES_MAX,
    ) -> None:
        """`entries_max`: of the tables of all volumes together."""
        self._stage = stage
        self._entries_max = entries_max
        self._depth = depth
        self.active = active
        self._tables: dict[bytes, tuple[Volume, Successors]] = {}
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return sum(len(table) for _, table in list(self._tables.values()))

    def chain(self, volume: Volume | None, keys: Sequence[bytes], trail: Trail | None = None) -> None:
        """A client named these keys in this order; with a trail, after what it named before.

        `volume`: None where its values are not prestaged.
        """
        if not self.active or not keys or volume is None or volume.erased:
            return
        pseudonyms = [volume.placement.pseudonym(key) for key in keys[:CHAIN_MAX]]
        table = self._table(volume)
        if len(pseudonyms) > 1:
            table.saw(pseudonyms, CHAIN_WEIGHT)
        if trail is not None:
            volume_id = volume.settings.volume_id
            if trail.volume_id == volume_id:
                table.saw((trail.pseudonym, pseudonyms[0]), 1)
            trail.volume_id, trail.pseudonym = volume_id, pseudonyms[-1]
        self._keep_the_bound()

    def reads(self, volume: Volume | None, key: bytes) -> None:
        """A client reads this key, and will have done so soon."""
        if not self.active or volume is None or volume.erased:
            return
        for pseudonym in self._table(volume).likely(volume.placement.pseudonym(key), self._depth):
            self._stage(volume, pseudonym)

    def _table(self, volume: Volume) -> Successors:
        volume_id = volume.settings.volume_id
        found = self._tables.get(volume_id)
        if found is None:
            with self._lock:
                found = self._tables.setdefault(volume_id, (volume, Successors(self._entries_max)))
        return found[1]

    def _keep_the_bound(self) -> None:
        """All tables together have no more entries than there may be: the longest gives some up."""
        with self._lock:
            for erased in [each for each, (volume, _) in self._tables.items() if volume.erased]:
                del self._tables[erased]
            tables = [table for _, table in self._tables.values()]
            beyond = sum(map(len, tables)) - self._entries_max
            if beyond > 0:
                max(tables, key=len).forget_oldest(beyond)


INACTIVE = Readahead(lambda _volume, _pseudonym: None, active=False)
"""A readahead that does nothing, for a face without an agent around it."""
