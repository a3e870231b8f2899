"""The second copy of a value, for a volume that keeps two: made after the put, mended when one goes bad.

A key has two sets, in two namespaces. A put fills a slot of the one and is acknowledged; the other gets a
copy of it, of the same generation, in a slot of its own that is sealed for its own place. `keep_two` makes
the copy: out of what lies on flash and proves itself, so a copy is never worse than what it was made of.
What puts owe waits in `ReplicationBacklog`; what is not made, because too much is owed or an enclosure is
away, is made by a scrub.

That a copy does not bring back what was deleted: a delete holds the writers of both sets while it reads and
clears both directories. A copy is named with the writer of its own set held, and only if the remembered
directory of the other still names the value it was made of. So within an agent either the delete comes
first, and the copy is not named, or it finds both. Another agent's delete is not seen by that; so the other
directory is read again from flash after the copy was named, and a copy whose original has gone, or of
whose original nothing can be said, goes as well: at once, or as soon as its enclosure answers. So does one
whose key was dropped while it was made (key_transition.py), for it opens for nobody; and one that its entry
says is under such a key is no copy. (docs/decisions/0029-bad-slots-are-entries-and-copies-follow.md)
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from agent.pool.counters import MissCause
from agent.pool.format.directory import (
    SLOTS_PER_SET,
    Directory,
    Entry,
    choose_slot,
    flags_of,
    is_under_dropped,
)
from agent.pool.format.slot import HEADER_BYTES, OpenSlot, SlotCodec
from agent.pool.steps import Acquire, Lanes, Steps, wait_for
from agent.pool.volume.directory_cache import CachedSet
from agent.pool.volume.replication_backlog import DOUBTFUL_MAX, NamedCopy
from agent.pool.volume.volume import Found, Volume
from agent.pool.volume.writable_directory import load_writable, prove
from agent.pool.write.slot_erase import Freeing

PIECE_BYTES: Final = 1 << 20
FRESH_SECONDS: Final = 0.02
"""Of directories: a copy is made right after its put."""
SHUN_SECONDS: Final = 60.0
"""As in agent/pool/write/put.py."""


DOUBT_SECONDS: Final = 1.0
"""Until a copy that could not be taken back is tried again."""


class Kept(enum.Enum):
    """What a look at a key's copies came to."""

    TWO = "two copies"
    ONE = "one copy, and no second could be made"
    NONE = "nothing of which there should be two"


def keep_two(volume: Volume, lanes: Lanes, pseudonym: bytes, *, may_evict: bool = False) -> Steps[Kept]:
    """See to it that a key has its two copies.

    A copy is made in a free slot; with `may_evict` also in the place of another value, where both sets are
    full. It keeps the key's turn, so that a put of the key comes before or after it.
    """
    if volume.settings.copies < 2 or volume.erased:
        return Kept.NONE
    if volume.codec.is_used_up or volume.owed.doubtful >= DOUBTFUL_MAX:
        return Kept.ONE
    deadline = lanes.now() + volume.timing.write_deadline
    if not (yield from volume.turns.take(pseudonym, deadline)):
        return Kept.ONE
    sets = volume.borrow_sets(pseudonym)
    try:
        if volume.earlier is not None or len(sets) < 2 or sets[0].namespace == sets[1].namespace:
            # Values that still move to where they belong get their copies there, from a scrub.
            return Kept.ONE
        stale = [cached for cached in sets if not volume.is_fresh(cached, lanes, FRESH_SECONDS)]
        if stale and (yield from volume.load(lanes, stale, deadline)) is not None:
            return Kept.ONE
        oldest = volume.codec.oldest_epoch
        found = [
            each
            for each in volume.find(sets, pseudonym)
            if not _is_doubted(each) and not is_under_dropped(each.entry, oldest)
        ]
        if not found:
            return Kept.NONE
        original = found[0]
        if any(
            each.cached is not original.cached and each.entry.generation == original.entry.generation
            for each in found
        ):
            return Kept.TWO
        target = next(cached for cached in sets if cached is not original.cached)
        copy = _reserve(volume, lanes, original, target, pseudonym, may_evict=may_evict)
        if copy is None:
            return Kept.ONE
        try:
            made = yield from _make(copy, deadline)
        finally:
            copy.release()
        if made:
            made = yield from _is_still_wanted(copy, deadline)
        if made:
            return Kept.TWO
        return Kept.ONE if copy.original_stands() else Kept.NONE
    finally:
        volume.give_back_sets(sets)
        volume.turns.end(pseudonym)


def work_off(volumes: Sequence[Volume], lanes: Lanes, most: int = 16) -> Steps[int]:
    """Take back what is doubted, and make some of the copies that puts owe; how many were looked at."""
    done = 0
    for volume in volumes:
        for _ in range(most):
            doubted = volume.owed.next_doubtful(lanes.now())
            if doubted is None or volume.erased:
                break
            done += 1
            yield from _take_back(volume, lanes, doubted)
        for _ in range(most):
            pseudonym = volume.owed.next()
            if pseudonym is None:
                break
            done += 1
            kept = yield from keep_two(volume, lanes, pseudonym, may_evict=True)
            volume.owed.not_made += kept is Kept.ONE
    return done


def _is_doubted(found: Found) -> bool:
    return found.cached.disproven.get(found.slot) == found.entry.generation


@dataclass(slots=True)
class _Copy:
    """A copy under way: of what, and into which slot, which is reserved."""

    volume: Volume
    lanes: Lanes
    original: Found
    target: CachedSet
    slot: int
    has_room_set_aside: bool
    codec: SlotCodec
    """Seals it."""

    def release(self) -> None:
        if self.has_room_set_aside and self.volume.quota is not None:
            self.volume.quota.give_back(self.volume.settings.slot_bytes)
        with self.target.guard:
            self.target.reserved.discard(self.slot)

    def original_stands(self) -> bool:
        """As far as it is remembered."""
        with self.original.cached.guard:
            directory, entry = self.original.cached.directory, self.original.entry
            if directory is None:
                return False
            # In whichever slot: it may have been sealed anew in another.
            named = [directory.entry(slot) for slot in directory.find_all(entry.pseudonym)]
        return any(each is not None and each.generation == entry.generation for each in named)


def _reserve(
    volume: Volume, lanes: Lanes, original: Found, target: CachedSet, pseudonym: bytes, *, may_evict: bool
) -> _Copy | None:
    if not lanes.trusts(target.namespace):
        return None
    quota, aside = volume.quota, False
    if quota is not None and quota.limits.of_room:
        if not quota.set_aside(volume.settings.slot_bytes):
            return None
        aside = True
    slot = _take_slot(volume, lanes, original, target, pseudonym, may_evict=may_evict)
    if slot is None:
        if quota is not None and aside:
            quota.give_back(volume.settings.slot_bytes)
        return None
    return _Copy(volume, lanes, original, target, slot, aside, volume.sealing_codec(lanes.now()))


def _take_slot(
    volume: Volume, lanes: Lanes, original: Found, target: CachedSet, pseudonym: bytes, *, may_evict: bool
) -> int | None:
    with original.cached.guard:
        other = original.cached.directory
        other_is_full = other is not None and other.taken == SLOTS_PER_SET
    with target.guard:
        directory = target.directory
        if directory is None:
            return None
        taken = target.unavailable(lanes.now())
        choice = choose_slot(directory, taken, lanes.wall(), pseudonym[-1] % SLOTS_PER_SET)
        if choice is None:
            return None
        if choice.victim is not None:
            is_live = choice.cost != float("inf")
            if is_live and not (may_evict and other_is_full):
                return None
            tally = lanes.tally(volume.settings.name)
            tally.evictions += is_live
            tally.evictions_expired += not is_live
            directory.clear(choice.slot, ghost=choice.victim.pseudonym if is_live else None)
        target.reserved.add(choice.slot)
        return choice.slot


def _make(copy: _Copy, deadline: float) -> Steps[bool]:
    """Read the original, seal it for its other place, write it, and name it."""
    scratch = copy.volume.unit_buffers.borrow()
    try:
        return (yield from _copy_over(copy, scratch, deadline))
    finally:
        scratch[:] = bytes(len(scratch))
        copy.volume.unit_buffers.give_back(scratch)


def _copy_over(copy: _Copy, scratch: memoryview, deadline: float) -> Steps[bool]:
    volume, lanes, target = copy.volume, copy.lanes, copy.target
    entry, codec = copy.original.entry, copy.codec
    if not 0 < entry.length <= volume.settings.value_bytes:
        return False
    source = volume.slot_offset(copy.original.cached, copy.original.slot)
    into = volume.slot_offset(target, copy.slot)
    key = volume.placement.key_of(entry.pseudonym)
    sealer = codec.seal(key, entry.generation, volume.place(target, copy.slot))
    unit, padded = codec.unit_bytes, codec.padded(entry.length)
    piece = max(unit, PIECE_BYTES // unit * unit)
    out = lanes.send_buffer(HEADER_BYTES + min(piece, padded))
    filled = HEADER_BYTES
    opened: OpenSlot | None = None
    for at in range(0, padded, piece):
        size, lead = min(piece, padded - at), HEADER_BYTES if opened is None else 0
        buffer = lanes.receive_buffer(lead + size)
        pending = lanes.read(copy.original.cached.namespace, source + HEADER_BYTES + at - lead, buffer)
        if (yield from wait_for(lanes, pending, deadline)) is not None:
            return False
        if opened is None:
            place = volume.place(copy.original.cached, copy.original.slot)
            proven = codec.open(buffer[:HEADER_BYTES], key, place, entry.generation)
            if isinstance(proven, MissCause) or proven.length != entry.length:
                return False
            opened = proven
        filled = HEADER_BYTES
        for start in range(0, size, unit):
            number = (at + start) // unit
            sealed = buffer[lead + start : lead + min(start + unit, size)]
            if not opened.open_unit(number, sealed, scratch[: len(sealed)]):
                return False
            plain = scratch[: min(unit, entry.length - number * unit)]
            filled += sealer.seal(number, plain, out[filled:])
        if padded > piece:
            # Of a value of several pieces the header goes by itself, at the end.
            write = lanes.write(target.namespace, into + HEADER_BYTES + at, [out[HEADER_BYTES:filled]])
            cause = yield from wait_for(lanes, write, deadline)
            if cause is not None:
                _shun(copy, cause)
                return False
            filled = HEADER_BYTES
    assert opened is not None
    out[:HEADER_BYTES] = sealer.header(entry.length, expiry=opened.expiry, stored_us=opened.stored_us)
    named = entry._replace(
        last_use_us=int(lanes.wall() * 1e6),
        expiry=opened.expiry,
        flags=entry.flags & 0xFF | flags_of(codec.epoch),
        tag=sealer.tag(),
    )
    return (yield from _name(copy, into, out[:filled], named, deadline))


def _name(copy: _Copy, into: int, last: memoryview, entry: Entry, deadline: float) -> Steps[bool]:
    """Write the last of the slot and its entry, with the directory's writer held."""
    lanes, target = copy.lanes, copy.target
    if not (yield Acquire(target.writer, deadline)):
        return False
    try:
        if (yield from prove(copy.volume, lanes, [target], deadline, holds_writers=True)) is not None:
            return False
        if not copy.volume.takes(copy.codec, lanes.now()) or not copy.original_stands():
            return False
        with target.guard:
            assert target.directory is not None
            image = target.directory.copy()
        _install(image, copy.slot, entry)
        writes = [
            lanes.write(target.namespace, into, [last], more=True),
            lanes.write(target.namespace, target.offset, [image.image()]),
        ]
        causes = []
        for write in writes:
            causes.append((yield from wait_for(lanes, write, deadline)))
        if any(cause is not None for cause in causes):
            copy.volume.unsettled.write_failed(target, copy.slot, entry, lanes.now())
            for cause in causes:
                _shun(copy, cause)
            return False
        with target.guard:
            if target.directory is not None:
                _install(target.directory, copy.slot, entry)
            target.disproven.pop(copy.slot, None)
    finally:
        target.end_write()
    tally = lanes.tally(copy.volume.settings.name)
    tally.copies_made += 1
    tally.copy_bytes += entry.length
    return True


def _install(directory: Directory, slot: int, entry: Entry) -> None:
    for older in directory.find_all(entry.pseudonym):
        directory.clear(older)
    directory.install(slot, entry._replace(ghost=directory.ghost(slot)))


def _shun(copy: _Copy, cause: MissCause | None) -> None:
    """A write of the slot failed, and may land yet."""
    if cause is None or cause is MissCause.ENCLOSURE_DOWN:
        return
    with copy.target.guard:
        copy.target.shunned[copy.slot] = copy.lanes.now() + SHUN_SECONDS


def _is_still_wanted(copy: _Copy, deadline: float) -> Steps[bool]:
    """Look on flash whether the original is still named; where it is not, another agent has deleted it, or
    given its slot away, and the copy goes as well. So it does where its key was dropped, and where either
    cannot be seen: a second copy can be made once more, and what was deleted must not come back."""
    volume, lanes, target = copy.volume, copy.lanes, copy.target
    trouble = yield from volume.load(lanes, [copy.original.cached], deadline)
    if trouble is None and copy.original_stands():
        trouble = yield from volume.vouches(lanes, target.namespace, copy.codec, deadline)
        if trouble is None:
            return True
    entry = copy.original.entry
    named = NamedCopy(target.namespace, target.offset, copy.slot, entry.pseudonym, entry.generation)
    yield from _take_back(volume, lanes, named)
    return False


def _take_back(volume: Volume, lanes: Lanes, copy: NamedCopy) -> Steps[None]:
    """Free a copy's slot, on flash; what cannot be freed now is doubted, and tried again."""
    target = volume.cache.borrow(copy.namespace, copy.offset, volume.occupancy)
    gone = False
    try:
        gone = yield from _free(volume, lanes, target, copy, lanes.now() + volume.timing.write_deadline)
    finally:
        if not gone:
            volume.owed.doubt(copy, lanes.now() + DOUBT_SECONDS)
        volume.cache.give_back(target)


def _free(volume: Volume, lanes: Lanes, target: CachedSet, copy: NamedCopy, deadline: float) -> Steps[bool]:
    """True where flash does not name the copy any more."""
    if not (yield Acquire(target.writer, deadline)):
        return False
    try:
        if (yield from load_writable(volume, lanes, [target], deadline)) is not None:
            return False
        with target.guard:
            directory = target.directory
            assert directory is not None
            now = directory.entry(copy.slot)
            if now is None or (now.pseudonym, now.generation) != (copy.pseudonym, copy.generation):
                return True
        return (yield from Freeing(volume, lanes, target, [copy.slot]).end(deadline)) is None
    finally:
        target.end_write()
