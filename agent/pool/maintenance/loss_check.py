"""Whether a block of a file is gone: what flash says of it now, for those who decide whether to give it up.

A cache drops what does not prove itself, for that is a miss. A block of a file is somebody's data, and a path
or an enclosure that damages what it brings looks, to one read, like a medium that has lost it. So nothing is
given up here. `examine` says what speaks against a block, in bytes that are the same only if it found the
very same thing; it is for whoever keeps the names of files to ask several times with time between
(agent/fs/files/suspects.py). What is not held against a block: no answer, a directory in doubt
(agent/pool/volume/writable_directory.py), and a namespace that does not give nearly all of what else is asked
of it.
"""

from __future__ import annotations

import struct

from agent.pool.maintenance.cross_check import is_vouched_for
from agent.pool.maintenance.scrub import ScrubCounters, settle
from agent.pool.maintenance.slot_look import Finding, look_at
from agent.pool.steps import Acquire, Lanes, Steps
from agent.pool.volume.directory_cache import CachedSet
from agent.pool.volume.media_errors import SlotAt
from agent.pool.volume.volume import Found, Volume

ABSENT = b"no directory names it"
_WHERE = struct.Struct("<IQHQ")
"""Namespace, offset of the set, slot, generation of the entry."""


class Undecided(Exception):
    """Nothing can be said of a block now, and why."""


def examine(volume: Volume, lanes: Lanes, block_id: bytes) -> Steps[bytes | None]:
    """What speaks against a block; None where it is there, all of it. Raises Undecided."""
    pseudonym = volume.placement.pseudonym(block_id)
    sets = volume.borrow_sets(pseudonym)
    try:
        yield from _read_directories(volume, lanes, sets)
        found = volume.find(sets, pseudonym)
        against = [ABSENT]
        suspects: dict[int, set[int]] = {}
        for each in found:
            place = _place_of(each)
            look = yield from look_at(volume, lanes, place, each.entry)
            if look.finding is Finding.GOOD:
                each.cached.bear_out(each.slot)
                return None
            if look.finding is Finding.UNKNOWN:
                raise Undecided("an enclosure does not answer")
            where = _WHERE.pack(*place, each.entry.generation)
            against.append(where + look.finding.name.encode() + look.wrong)
            suspects.setdefault(id(each.cached), set()).add(each.slot)
        for cached in sets:
            vouched = yield from is_vouched_for(
                volume, lanes, cached.namespace, cached.offset, suspects.get(id(cached), ())
            )
            if not vouched:
                raise Undecided("an enclosure fails other blocks as well")
        return b"".join(against)
    finally:
        volume.give_back_sets(sets)


def _read_directories(volume: Volume, lanes: Lanes, sets: tuple[CachedSet, ...]) -> Steps[None]:
    """All as flash has them, with no image of ours under way. Raises Undecided."""
    deadline = lanes.now() + volume.timing.write_deadline
    held: list[CachedSet] = []
    try:
        # As in a delete (agent/pool/write/delete_and_pin.py).
        for cached in sorted(sets, key=lambda each: (each.namespace, each.offset)):
            if not (yield Acquire(cached.writer, deadline)):
                raise Undecided("its directory is being written all the time")
            held.append(cached)
        trouble = yield from volume.load(lanes, sets, deadline, holds_writers=True)
        if trouble is not None:
            raise Undecided(f"its directory was not read: {trouble.name.lower()}")
    finally:
        for cached in held:
            cached.end_write()
    if any(cached.in_doubt for cached in sets):
        raise Undecided("its directory comes damaged")


def set_aside(volume: Volume, lanes: Lanes, block_id: bytes) -> Steps[None]:
    """No file has the block any more, for it is lost: free what names it, and set its slot aside where the
    medium is to blame."""
    pseudonym = volume.placement.pseudonym(block_id)
    sets = volume.borrow_sets(pseudonym)
    try:
        places = [_place_of(each) for each in volume.find(sets, pseudonym)]
    finally:
        volume.give_back_sets(sets)
    for place in places:
        yield from settle(
            volume, lanes, place.namespace, place.offset, [place.slot], ScrubCounters(), is_given_up=True
        )


def _place_of(found: Found) -> SlotAt:
    return SlotAt(found.cached.namespace, found.cached.offset, found.slot)
