"""Operations on a volume, whether it lies in sets of slots (volume.py) or on KV namespaces (kv_volume.py)."""

from __future__ import annotations

from typing import TypeAlias

from agent.pool.kv_reading import KvReading
from agent.pool.kv_volume import KvVolume
from agent.pool.kv_writing import KvWriting, delete_key
from agent.pool.prestage import PrestageCache
from agent.pool.reading import Reading, remembered_length
from agent.pool.steps import Lanes, Steps
from agent.pool.upkeep import delete, pin
from agent.pool.volume import Volume
from agent.pool.writing import Writing

AnyVolume: TypeAlias = Volume | KvVolume
AnyReading: TypeAlias = Reading | KvReading
AnyWriting: TypeAlias = Writing | KvWriting


def new_reading(volume: AnyVolume, key: bytes, prestage: PrestageCache | None = None) -> AnyReading:
    """One value to be read. Values on KV namespaces are not prestaged."""
    return KvReading(volume, key) if isinstance(volume, KvVolume) else Reading(volume, key, prestage)


def new_writing(
    volume: AnyVolume, key: bytes, *, length: int | None = None, ttl_seconds: int = 0, may_evict: bool = True
) -> AnyWriting:
    """One value to be written. Raises TooLong."""
    if isinstance(volume, KvVolume):
        return KvWriting(volume, key, length=length, ttl_seconds=ttl_seconds, may_evict=may_evict)
    return Writing(volume, key, length=length, ttl_seconds=ttl_seconds, may_evict=may_evict)


def find_length(volume: AnyVolume, lanes: Lanes, key: bytes) -> Steps[int | None]:
    """The length of a value, for a stat that must not move it; None where there is none.

    On sets of slots it is what a directory hints at, on KV namespaces what the value's header proves.
    """
    if isinstance(volume, KvVolume):
        reading = KvReading(volume, key)
        return (yield from reading.find_length(lanes, lanes.now() + volume.timing.read_deadline))
    pseudonym = volume.placement.pseudonym(key)
    sets = volume.borrow_sets(pseudonym)
    try:
        length = remembered_length(volume, pseudonym, sets)
        if length is None:
            stale = [cached for cached in sets if not volume.is_fresh(cached, lanes)]
            if stale:
                yield from volume.load(lanes, stale, lanes.now() + volume.timing.read_deadline)
                length = remembered_length(volume, pseudonym, sets)
        return length
    finally:
        volume.give_back_sets(sets)


def delete_value(volume: AnyVolume, lanes: Lanes, key: bytes, deadline: float) -> Steps[bool]:
    """Remove a key. True where it was there. Raises PutRefused where an enclosure does not answer."""
    if isinstance(volume, KvVolume):
        return (yield from delete_key(volume, lanes, key, deadline))
    return (yield from delete(volume, lanes, key, deadline))


def pin_value(volume: AnyVolume, lanes: Lanes, key: bytes, until: int, deadline: float) -> Steps[bool | None]:
    """Keep a key from eviction; as `pin`. On KV namespaces nothing is pinned: False."""
    if isinstance(volume, KvVolume):
        return False
    return (yield from pin(volume, lanes, key, until, deadline))
