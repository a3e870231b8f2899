"""Write on second use: a volume that is full gives up a value only for one that was wanted before.

Flash wears, and most blocks are never asked for again. With this policy a put that would evict a live value
is taken and forgotten where its key is new, and stored where it was put before (an engine puts what it did
not find). While there is room everything is stored. It writes a third of what write-through writes and costs
hits (docs/prestaging.md has both for the conversation trace): it is for drives that wear out too fast.

TinyLFU was tried: comparing the newcomer's frequency with its victim's admits, on that trace, the very same
values, or fewer that are used again. So what is kept is the least that can be: which keys were seen.
"""

import threading
from typing import Final

from agent.pool.format.eviction_choice import Choice
from agent.pool.steps import IoChannel, Steps
from agent.pool.volume.directory_cache import CachedSet
from agent.pool.volume.volume import Volume
from agent.pool.write.put import SlotWriter
from agent.pool.write.slot_allocation import is_eviction
from agent.pool.write.writer_base import PutState

SEEN_MAX: Final = 1 << 18
"""Keys of all volumes that are remembered by their pseudonyms, in two generations of half as many: 25 MiB at
the most."""


class SecondUse:
    """Which keys were put before. Safe from any thread."""

    def __init__(self, seen_max: int = SEEN_MAX) -> None:
        self._half = max(1, seen_max // 2)
        self._young: set[bytes] = set()
        self._old: set[bytes] = set()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._young) + len(self._old)

    def was_seen(self, pseudonym: bytes) -> bool:
        """Whether it was, and from now on it was."""
        with self._lock:
            seen = pseudonym in self._young or pseudonym in self._old
            self._young.add(pseudonym)
            if len(self._young) >= self._half:
                self._old, self._young = self._young, set()
            return seen

    def forget(self) -> None:
        """Its volume was erased."""
        with self._lock:
            self._young, self._old = set(), set()


class _Declined(Exception):
    """It would evict a live value, and its key is new."""


class SecondUseWriter(SlotWriter):
    """A put that is taken and forgotten where it would evict for a key that is new."""

    def __init__(
        self, volume: Volume, key: bytes, admission: SecondUse, *, length: int | None, ttl_seconds: int
    ) -> None:
        super().__init__(volume, key, length=length, ttl_seconds=ttl_seconds)
        self._admission = admission

    def _take(self, channel: IoChannel, offset: int, data: memoryview, deadline: float) -> Steps[None]:
        try:
            yield from super()._take(channel, offset, data, deadline)
        except _Declined:
            if self._volume.below is not None:
                yield from self._unmark(channel, deadline)
            channel.tally(self._volume.settings.name).puts_declined += 1
            self._enter(PutState.DECLINED)

    def _reserve_slot(self, channel: IoChannel, cached: CachedSet, choice: Choice) -> bool:
        if is_eviction(choice) and not self._admission.was_seen(self.pseudonym):
            raise _Declined
        return super()._reserve_slot(channel, cached, choice)
