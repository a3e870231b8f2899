"""Eviction for a tenant at its quota: which of its own values goes for a new one, or because the quota was
lowered.

The victim comes from the tenant's fullest cache, so it is never another tenant's, and no cache of the tenant
keeps another empty. Where that is the new key's own volume, it comes from the key's two sets, if they have
one. Otherwise it is the least wanted value of a few sets, drawn by chance among those that are known to hold
values; its directory is written for that alone.
"""

import enum
import random
from collections.abc import Sequence

from agent.pool.format.eviction_choice import Choice, choose_slot
from agent.pool.format.occupancy import SetPlace
from agent.pool.steps import IoChannel, Steps
from agent.pool.volume.directory_cache import CachedSet
from agent.pool.volume.volume import Found, Volume
from agent.pool.write.set_transaction import SetTransaction
from agent.pool.write.slot_allocation import count_eviction, is_eviction, left_by

SAMPLE = 4
"""Sets that are compared. Each may have to be read."""
PROBES = 64
"""Sets that are drawn by chance before all known ones are looked through."""

_dice = random.Random()


class Room(enum.Enum):
    """What a put at the quota may do."""

    SET_ASIDE = "take any slot"
    EXCHANGE = "take the slot of another value of its two sets"
    NONE = "be refused"


def room_for(
    volume: Volume, channel: IoChannel, sets: Sequence[CachedSet], *, may_evict: bool, deadline: float
) -> Steps[Room]:
    """Set room aside for one slot more in one of `sets`, if need be by an eviction. The tenant has a quota.

    Unless it is NONE, the caller owes `Quota.give_back`.
    """
    quota, slot_bytes = volume.quota, volume.settings.slot_bytes
    assert quota is not None
    if quota.set_aside(slot_bytes):
        return Room.SET_ASIDE
    owners = volume.siblings if volume in volume.siblings else (*volume.siblings, volume)
    idle = [volume.puts_in_pieces.make_way(each.settings.volume_id, channel) for each in owners]
    if any(idle) and quota.set_aside(slot_bytes):
        return Room.SET_ASIDE
    if may_evict:
        # Before the victim goes: a put beside this one must not take its room.
        quota.exchange(slot_bytes)
        caches = fullest_first(owners)
        is_fullest = not caches or _holds(caches[0]) <= _holds(volume)
        if is_fullest and any(_victim(volume, cached, channel) is not None for cached in sets):
            quota.count(evicted=1)
            return Room.EXCHANGE
        freed = 0
        for cache in caches:
            # Smaller slots than the one that is needed: several.
            while freed < slot_bytes and (yield from evict_one(cache, channel, deadline)):
                quota.count(evicted=1)
                freed += cache.settings.slot_bytes
        if freed:
            return Room.SET_ASIDE
        quota.give_back(slot_bytes)
    quota.count(refused=1)
    return Room.NONE


def fullest_first(volumes: Sequence[Volume]) -> list[Volume]:
    """The caches that hold values, the fullest first. Volumes of files lose none."""
    caches = [each for each in volumes if each.settings.may_lose and not each.erased and each.occupancy.known]
    return sorted(caches, key=_holds, reverse=True)


def _holds(volume: Volume) -> int:
    return volume.occupancy.known * volume.settings.slot_bytes


def evict_one(volume: Volume, channel: IoChannel, deadline: float) -> Steps[bool]:
    """Evict one value of the volume, on flash as well. False: none was found, or the write failed."""
    borrowed = [volume.cache.borrow(*place, volume.occupancy) for place in _some_that_hold(volume)]
    try:
        unread = [cached for cached in borrowed if cached.directory is None]
        if unread:
            yield from volume.load(channel, unread, deadline)
        best: tuple[float, CachedSet] | None = None
        for cached in borrowed:
            victim = _victim(volume, cached, channel)
            if victim is not None and (best is None or victim.cost > best[0]):
                best = (victim.cost, cached)
        if best is None:
            return False
        return (yield from _evict_from(volume, channel, best[1], deadline))
    finally:
        volume.give_back_sets(borrowed)


def _victim(volume: Volume, cached: CachedSet, channel: IoChannel) -> Choice | None:
    with cached.guard:
        directory = cached.directory
        if directory is None or cached.fault is not None:
            return None
        taken = cached.unavailable(channel.now()) | directory.free_slots()
        return choose_slot(directory, taken, channel.wall(), held=volume.holds.held)


def _evict_from(volume: Volume, channel: IoChannel, cached: CachedSet, deadline: float) -> Steps[bool]:
    with SetTransaction(volume, channel, cached) as change:
        if (yield from change.begin(deadline)) is not None:
            return False
        choice = _victim(volume, cached, channel)
        if choice is None or choice.victim is None:
            return False
        ghost = left_by(volume, cached, choice)
        victim = Found(cached, choice.slot, choice.victim)
        gone = yield from change.clear(victim, deadline, ghost=ghost, evicts=is_eviction(choice))
        if gone:
            count_eviction(volume, channel, choice)
        return gone


def _some_that_hold(volume: Volume) -> list[SetPlace]:
    """Up to SAMPLE sets that are known to hold values."""
    places: dict[SetPlace, None] = {}
    extents, occupancy, set_bytes = volume.settings.extents, volume.occupancy, volume.settings.set_bytes
    weights = [extent.sets for extent in extents]
    for extent in _dice.choices(extents, weights, k=PROBES):
        place = extent.namespace, extent.offset + _dice.randrange(extent.sets) * set_bytes
        if volume.cache.remembers(place) or occupancy.is_forgotten(place):
            places[place] = None
        if len(places) == SAMPLE:
            return list(places)
    remembered = [
        (cached.namespace, cached.offset)
        for cached in volume.cache.snapshot()
        if cached.occupancy is occupancy and cached.directory is not None and cached.directory.taken
    ]
    known = [*remembered, *occupancy.forgotten()]
    return _dice.sample(known, min(SAMPLE, len(known)))
