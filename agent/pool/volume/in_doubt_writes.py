"""Keys of which an entry was written without an answer: the entry may still appear on flash.

A put that was given up has failed, and its slot and entry may land all the same, after a delete of the key
that found nothing. The key would be back for good. So a delete of such a key is refused until the write can
land no more: by then the entry is on flash, where the delete finds it, or never will be.
"""

import threading
from typing import Final

from agent.pool.format.directory import Entry
from agent.pool.volume.directory_cache import COOLDOWN_SECONDS, CachedSet

KEYS_MAX: Final = 4096
"""The most keys of one volume. With more, no key of the volume is deleted until the last of them is
settled."""


class InDoubtWrites:
    """Keys of one volume, by pseudonym. Safe from any thread; `now` in the seconds of the channel's clock."""

    def __init__(self) -> None:
        self._until: dict[bytes, float] = {}
        self._all_until = float("-inf")
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._until)

    def note(self, pseudonym: bytes, now: float) -> None:
        """A write of the key was sent, and its fate is unknown."""
        until = now + COOLDOWN_SECONDS
        with self._lock:
            if len(self._until) >= KEYS_MAX and pseudonym not in self._until:
                self._until = {each: end for each, end in self._until.items() if end > now}
            if len(self._until) < KEYS_MAX or pseudonym in self._until:
                self._until[pseudonym] = until
            else:
                self._all_until = until

    def write_failed(self, cached: CachedSet, slot: int, entry: Entry, now: float) -> None:
        """An entry may be on flash, or come there. A put that is tried again must not believe it."""
        cached.disprove(slot, entry.generation)
        self.note(entry.pseudonym, now)

    def may_land(self, pseudonym: bytes, now: float) -> bool:
        """Whether a write of the key may still land."""
        return now < self._all_until or now < self._until.get(pseudonym, now)
