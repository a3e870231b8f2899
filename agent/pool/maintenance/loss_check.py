"""Whether a block of a file is lost: what flash says of it now, for those who decide whether to give it up.

A cache drops a value that does not prove itself, for that is a miss. A block of a file is a user's data, and
a path or an enclosure that damages bytes looks, to one read, like a medium that has lost them. So nothing is
given up here. `examine` returns the evidence against a block as bytes, which are equal only for the very same
findings; the database of file names asks several times with time between
(agent/fs/files/suspect_blocks.py). No evidence is: no answer, a directory in doubt
(agent/pool/volume/writable_directory.py), and a namespace that fails a cross-check.
"""

import struct

from agent.pool.maintenance.cross_check import is_vouched_for
from agent.pool.maintenance.scrub import ScrubCounters, take_out_bad
from agent.pool.maintenance.slot_look import Finding, look_at
from agent.pool.steps import IoChannel, Steps
from agent.pool.volume.directory_cache import CachedSet
from agent.pool.volume.media_errors import SlotAt
from agent.pool.volume.volume import Found, Volume
from agent.pool.write.set_transaction import SetTransaction

ABSENT = b"no directory names it"
_WHERE = struct.Struct("<IQHQ")
"""Namespace, offset of the set, slot, generation of the entry."""


class Undecided(Exception):
    """Why nothing can be said of a block now."""


def examine(volume: Volume, channel: IoChannel, block_id: bytes) -> Steps[bytes | None]:
    """The evidence against a block; None: all of it is there. Raises Undecided."""
    pseudonym = volume.placement.pseudonym(block_id)
    with volume.borrowed(pseudonym) as sets:
        yield from _read_directories(volume, channel, sets)
        found = volume.find(sets, pseudonym)
        against = [ABSENT]
        suspects: dict[int, set[int]] = {}
        for each in found:
            look = yield from look_at(volume, channel, each)
            if look.finding is Finding.GOOD:
                each.cached.bear_out(each.slot)
                return None
            if look.finding is Finding.UNKNOWN:
                raise Undecided("an enclosure does not answer")
            where = _WHERE.pack(*_place_of(each), each.entry.generation)
            against.append(where + look.finding.name.encode() + look.wrong)
            suspects.setdefault(id(each.cached), set()).add(each.slot)
        for cached in sets:
            vouched = yield from is_vouched_for(
                volume, channel, cached.namespace, cached.offset, suspects.get(id(cached), ())
            )
            if not vouched:
                raise Undecided("an enclosure fails other blocks as well")
        return b"".join(against)


def _read_directories(volume: Volume, channel: IoChannel, sets: tuple[CachedSet, ...]) -> Steps[None]:
    """Read all as flash has them, with no image of ours under way. Raises Undecided."""
    deadline = channel.now() + volume.timing.write_deadline
    with SetTransaction(volume, channel, *sets) as locked:
        if not (yield from locked.lock(deadline)):
            raise Undecided("its directory is being written all the time")
        trouble = yield from volume.load(channel, sets, deadline, holds_writers=True)
        if trouble is not None:
            raise Undecided(f"its directory was not read: {trouble.name.lower()}")
    if any(cached.in_doubt for cached in sets):
        raise Undecided("its directory comes damaged")


def set_aside(volume: Volume, channel: IoChannel, block_id: bytes) -> Steps[None]:
    """The block is given up: clear its entries, and set its slot aside where the medium is to blame."""
    pseudonym = volume.placement.pseudonym(block_id)
    with volume.borrowed(pseudonym) as sets:
        places = [_place_of(each) for each in volume.find(sets, pseudonym)]
    for place in places:
        yield from take_out_bad(
            volume, channel, place.namespace, place.offset, [place.slot], ScrubCounters(), is_given_up=True
        )


def _place_of(found: Found) -> SlotAt:
    return SlotAt(found.cached.namespace, found.cached.offset, found.slot)
