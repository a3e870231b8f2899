"""Removing and pinning keys: what touches entries without moving values."""

from __future__ import annotations

from typing import Final

from agent.pool.counters import MissCause
from agent.pool.errors import PutRefused
from agent.pool.format.directory import SLOTS_PER_SET, TIME_MAX, is_quarantined
from agent.pool.steps import Acquire, Lanes, Steps
from agent.pool.volume.directory_cache import CachedSet
from agent.pool.volume.volume import Volume
from agent.pool.volume.writable_directory import load_writable
from agent.pool.write.slot_erase import Freeing

PINNED_SLOTS_MAX: Final = SLOTS_PER_SET // 2
"""Of one set. Pins must not be able to stop a volume from taking new values."""

NOT_REACHED: Final = "an enclosure that may hold the key does not answer"


def delete(volume: Volume, lanes: Lanes, key: bytes, deadline: float) -> Steps[bool]:
    """Remove a key everywhere it may lie. True where it was there.

    Its header is zeroed as well (slot_erase.py). Raises PutRefused where a candidate enclosure does not
    answer, its directory does not prove itself whole, or a write of the key may still land: then the key may
    come back, and nobody may be told that it is gone. Nothing is removed then: the enclosure that is away may
    hold an older value of the key.
    """
    return (yield from _delete(volume, lanes, key, deadline, stored_once=False))


def delete_block(volume: Volume, lanes: Lanes, key: bytes, deadline: float) -> Steps[bool]:
    """As `delete`, of a key that was put once at most and never will be again: a block of a file.

    Where a candidate does not answer, what lies on the others is removed all the same. If that was there, it
    was all there was, unless values are moving. PutRefused, as above, where there may be more.
    """
    return (yield from _delete(volume, lanes, key, deadline, stored_once=True))


def _delete(volume: Volume, lanes: Lanes, key: bytes, deadline: float, *, stored_once: bool) -> Steps[bool]:
    pseudonym = volume.placement.pseudonym(key)
    sets = volume.borrow_sets(pseudonym)
    held: list[CachedSet] = []
    try:
        # Whoever wants both writers takes them in one order. Holding them while the directories are read
        # makes what was read the truth here, with no image of ours under way.
        for cached in sorted(sets, key=lambda each: (each.namespace, each.offset)):
            if not (yield Acquire(cached.writer, deadline)):
                raise PutRefused("the directory is being written all the time", MissCause.LATE)
            held.append(cached)
        if volume.unsettled.stands(pseudonym, lanes.now()):
            raise PutRefused("a write of the key was not answered and may still land", MissCause.LATE)
        came: list[CachedSet] = []
        # With one enclosure hung there has to be time left to remove it from the other.
        until = (lanes.now() + deadline) / 2 if stored_once else deadline
        trouble = yield from load_writable(volume, lanes, sets, until, came=came)
        if trouble is not None and not stored_once:
            raise PutRefused(NOT_REACHED, trouble)
        freed: list[Freeing] = []
        for cached in came:
            directory = cached.directory
            assert directory is not None
            with cached.guard:
                slots = directory.find_all(pseudonym)
            if slots:
                freed.append(Freeing(volume, lanes, cached, slots))
        faults = []
        for each in freed:
            cause = yield from each.end(deadline)
            if cause is not None:
                faults.append(cause)
        if faults:
            raise PutRefused("the enclosure did not delete it", faults[0])
        lanes.tally(volume.settings.name).deletes += bool(freed)
        if trouble is not None and (not freed or volume.earlier is not None or volume.settings.copies > 1):
            raise PutRefused(NOT_REACHED, trouble)
        return bool(freed)
    finally:
        for cached in held:
            cached.end_write()
        volume.give_back_sets(sets)


def pin(volume: Volume, lanes: Lanes, key: bytes, until: int, deadline: float) -> Steps[bool | None]:
    """Keep a key from eviction until a time (seconds since the epoch; 0 unpins).

    True where it is pinned now, False where the set has its share of pins, None where no directory
    names the key. The pin is in force at once here; flash, and so other agents, learn of it with the
    next write of the directory.
    """
    pseudonym = volume.placement.pseudonym(key)
    sets = volume.borrow_sets(pseudonym)
    try:
        stale = [cached for cached in sets if not volume.is_fresh(cached, lanes)]
        if stale and not volume.find(sets, pseudonym):
            yield from volume.load(lanes, stale, deadline)
        found = volume.find(sets, pseudonym)
        if not found:
            return None
        cached, wall = found[0].cached, lanes.wall()
        with cached.guard:
            directory = cached.directory
            if directory is None or directory.find(pseudonym) != found[0].slot:
                return None
            pinned = sum(entry.pinned_until > wall and not is_quarantined(entry) for _, entry in directory)
            if until > wall and pinned >= PINNED_SLOTS_MAX and found[0].entry.pinned_until <= wall:
                return False
            directory.pin(found[0].slot, min(until, TIME_MAX))
        return True
    finally:
        volume.give_back_sets(sets)
