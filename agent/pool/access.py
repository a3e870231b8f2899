"""The entrance to the pool: a volume with the policies by which this agent serves it, and its operations.

A volume lies in sets of slots (volume/volume.py) or on KV namespaces (kv/volume.py). Policies are for the
first kind alone. A `ServedVolume` is whole when it is made (agent/service/volume_policies.py) and stays as it
is, so any thread may use it.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Final, TypeAlias

from agent.pool.counters import MissCause
from agent.pool.kv.get import KvReading
from agent.pool.kv.put import KvWriting, delete_key
from agent.pool.kv.volume import KvVolume
from agent.pool.read.get import Reading, remembered_length
from agent.pool.read.memory_reading import MemoryReading
from agent.pool.read.prestage_cache import OpenValue, PrestageCache
from agent.pool.read.recompute_gate import GatedReading, RecomputeGate
from agent.pool.steps import Lanes, Steps
from agent.pool.volume.settings import Timing, VolumeSettings
from agent.pool.volume.volume import Volume
from agent.pool.write.admission import SecondUse, SecondUseWriting
from agent.pool.write.delete_and_pin import delete, pin
from agent.pool.write.put import Writing
from agent.pool.write.write_back import AlreadyWaiting, BackWriting, Waiting, WriteBack

AnyVolume: TypeAlias = Volume | KvVolume
AnyReading: TypeAlias = Reading | KvReading | MemoryReading
AnyWriting: TypeAlias = Writing | KvWriting | BackWriting | AlreadyWaiting


LOOKED_UP_AT_ONCE: Final = 256
"""Keys of one batch whose directories are in use at a time: none of them is forgotten meanwhile."""


class ServedVolume:
    """A volume, and what this agent's configuration wants of its gets and puts (docs/prestaging.md)."""

    __slots__ = ("admission", "back", "gate", "volume")

    def __init__(
        self,
        volume: AnyVolume,
        gate: RecomputeGate | None = None,
        admission: SecondUse | None = None,
        back: WriteBack | None = None,
    ) -> None:
        self.volume: Final = volume
        self.gate = gate
        self.admission = admission
        self.back = back
        if admission is not None and isinstance(volume, Volume):
            volume.forgets_with_secret.append(admission.forget)

    @property
    def settings(self) -> VolumeSettings:
        return self.volume.settings

    @property
    def timing(self) -> Timing:
        return self.volume.timing

    @property
    def erased(self) -> bool:
        return self.volume.erased

    def pseudonym(self, key: bytes) -> bytes:
        return self.volume.placement.pseudonym(key)

    def reading(self, key: bytes, prestage: PrestageCache | None = None) -> AnyReading:
        """One value to be read. Values on KV namespaces are not prestaged."""
        volume = self.volume
        if isinstance(volume, KvVolume):
            return KvReading(volume, key)
        back = self.back
        if back is not None and len(back):
            waiting = back.find_to_read(self.pseudonym(key))
            if waiting is not None:
                let_go = functools.partial(back.let_go, waiting)
                return MemoryReading(volume, key, waiting.data, waiting.expires, let_go, prestaged=False)
        if prestage is not None and prestage.waits_open:
            value = _opened(volume, key, prestage)
            if value is not None:
                let_go = functools.partial(prestage.let_go, value)
                return MemoryReading(volume, key, value.data, value.expiry, let_go, prestaged=True)
        if self.gate is None:
            return Reading(volume, key, prestage)
        return GatedReading(volume, key, prestage, self.gate)

    def writing(
        self, key: bytes, *, length: int | None = None, ttl_seconds: int = 0, may_evict: bool = True
    ) -> AnyWriting:
        """One value to be written. Raises TooLong."""
        volume = self.volume
        if isinstance(volume, KvVolume):
            return KvWriting(volume, key, length=length, ttl_seconds=ttl_seconds, may_evict=may_evict)
        if self.back is not None and length is not None and 0 < length <= volume.settings.value_bytes:
            back = BackWriting.begin(self.back, key, length, ttl_seconds)
            if back is not None:
                return back
        if self._waiting(key) is not None:
            # It would be on flash first, and the first put would be the second.
            return AlreadyWaiting(volume, key, length)
        if self.admission is None:
            return Writing(volume, key, length=length, ttl_seconds=ttl_seconds, may_evict=may_evict)
        return SecondUseWriting(
            volume, key, self.admission, length=length, ttl_seconds=ttl_seconds, may_evict=may_evict
        )

    def _waiting(self, key: bytes) -> Waiting | None:
        """The value of a key that was acknowledged and is not on flash yet."""
        if self.back is None or not len(self.back):
            return None
        return self.back.find(self.pseudonym(key))

    def lookup(self, lanes: Lanes, keys: Sequence[bytes], deadline: float) -> Steps[list[MissCause | None]]:
        """For each key None where it is there, else why it is not; a hint, as all such answers."""
        volume = self.volume
        if isinstance(volume, KvVolume):
            return (yield from volume.lookup(lanes, keys, deadline))
        waiting = [self._waiting(key) for key in keys] if self.back is not None else []
        causes: list[MissCause | None] = []
        began = lanes.now()
        for start in range(0, len(keys), LOOKED_UP_AT_ONCE):
            part = keys[start : start + LOOKED_UP_AT_ONCE]
            # A directory that was read since is not read again.
            causes += yield from volume.lookup(lanes, part, deadline, lanes.now() - began)
        wall = lanes.wall()
        for at, value in enumerate(waiting):
            if value is not None:
                causes[at] = MissCause.EXPIRED if value.has_expired(wall) else None
        return causes

    def find_length(self, lanes: Lanes, key: bytes) -> Steps[int | None]:
        """The length of a value, for a stat that must not move it; None where there is none.

        On sets of slots it is what a directory hints at, on KV namespaces what the value's header proves.
        """
        volume, deadline = self.volume, lanes.now() + self.timing.read_deadline
        if isinstance(volume, KvVolume):
            return (yield from KvReading(volume, key).find_length(lanes, deadline))
        waiting = self._waiting(key)
        if waiting is not None:
            return len(waiting.data) if not waiting.has_expired(lanes.wall()) else None
        pseudonym = volume.placement.pseudonym(key)
        sets = volume.borrow_sets(pseudonym)
        try:
            length = remembered_length(volume, pseudonym, sets)
            if length is None:
                stale = [cached for cached in sets if not volume.is_fresh(cached, lanes)]
                if stale:
                    yield from volume.load(lanes, stale, deadline)
                    length = remembered_length(volume, pseudonym, sets)
            return length
        finally:
            volume.give_back_sets(sets)

    def delete(self, lanes: Lanes, key: bytes, deadline: float) -> Steps[bool]:
        """Remove a key. True where it was there. Raises PutRefused where an enclosure does not answer."""
        volume, waiting = self.volume, self._waiting(key)
        if isinstance(volume, KvVolume):
            return (yield from delete_key(volume, lanes, key, deadline))
        if waiting is not None and self.back is not None:
            return (yield from self.back.delete(lanes, waiting, deadline))
        return (yield from delete(volume, lanes, key, deadline))

    def pin(self, lanes: Lanes, key: bytes, until: int, deadline: float) -> Steps[bool | None]:
        """Keep a key from eviction; as `pin`. On KV namespaces nothing is pinned: False."""
        volume, waiting = self.volume, self._waiting(key)
        if isinstance(volume, KvVolume):
            return False
        back = self.back if waiting is not None and not waiting.has_expired(lanes.wall()) else None
        if waiting is not None and back is not None and (yield from back.pin(waiting, until, deadline)):
            return True
        return (yield from pin(volume, lanes, key, until, deadline))


def _opened(volume: Volume, key: bytes, prestage: PrestageCache) -> OpenValue | None:
    """The value that waits in clear, if a remembered directory names that write of the key."""
    pseudonym = volume.placement.pseudonym(key)
    sets = volume.borrow_sets(pseudonym)
    try:
        found = volume.find(sets, pseudonym)
        if not found:
            return None
        return prestage.find_open(volume.settings.volume_id, pseudonym, found[0].entry.generation)
    finally:
        volume.give_back_sets(sets)
