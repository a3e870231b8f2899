"""Replication: the second copy of a value, for a volume that keeps two. It is made after the put, and mended.

A key has two sets, in two namespaces. A put fills a slot of one and is acknowledged. `keep_two` copies it
into the other set: a slot of the same generation, sealed for its own place, from bytes on flash that prove
themselves. Puts note their keys in `ReplicationBacklog`; a scrub makes the copies that were not made.

A copy must not bring back a deleted value. A delete holds the writers of both sets while it reads and clears
both directories. A copy is named with the writer of its own set held, and only if the remembered directory of
the other still names its original. So within an agent the delete finds both, or the copy is not named. A
delete by another agent is not seen by that. So the other directory is read again from flash after the copy
was named. A copy whose original has gone, or cannot be seen, goes as well: at once, or as soon as its
enclosure answers. So does a copy whose key was dropped meanwhile (key_transition.py), for it opens for
nobody; and an entry under such a key is no copy.
(docs/decisions/0029-bad-slots-are-entries-and-copies-follow.md)
"""

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from agent.pool.format.directory import SLOTS_PER_SET, is_under_dropped
from agent.pool.format.sealed_slot import SlotCodec
from agent.pool.steps import IoChannel, Steps
from agent.pool.volume.directory_cache import CachedSet
from agent.pool.volume.replication_backlog import DOUBTFUL_MAX, NamedCopy
from agent.pool.volume.volume import Found, Volume
from agent.pool.write.set_transaction import SetTransaction
from agent.pool.write.slot_allocation import best_choice, is_eviction, release, reserve
from agent.pool.write.slot_copy import SlotCopy, SlotVerifier

FRESH_SECONDS: Final = 0.02
"""How old a directory may be: a copy is made right after its put."""
DOUBT_SECONDS: Final = 1.0
"""The time until the agent tries again to take a copy back."""


class Kept(enum.Enum):
    TWO = "two copies"
    ONE = "one copy, and no second could be made"
    NONE = "nothing of which there should be two"


def keep_two(volume: Volume, channel: IoChannel, pseudonym: bytes, *, may_evict: bool = False) -> Steps[Kept]:
    """Give a key its second copy, in a free slot; with `may_evict` in place of another value, where both sets
    are full. It holds the key's lock, so a put of the key comes before or after it."""
    if volume.settings.copies < 2 or volume.erased:
        return Kept.NONE
    if volume.codec.is_used_up or volume.replication_backlog.doubtful >= DOUBTFUL_MAX:
        return Kept.ONE
    deadline = channel.now() + volume.timing.write_deadline
    if not (yield from volume.key_locks.take(pseudonym, deadline)):
        return Kept.ONE
    sets = volume.borrow_sets(pseudonym)
    try:
        if volume.old_placement is not None or len(sets) < 2 or sets[0].namespace == sets[1].namespace:
            # A value that still moves gets its copy at its new place, from a scrub.
            return Kept.ONE
        stale = [cached for cached in sets if not volume.is_fresh(cached, channel, FRESH_SECONDS)]
        if stale and (yield from volume.load(channel, stale, deadline)) is not None:
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
        copy = _reserve(volume, channel, original, target, pseudonym, may_evict=may_evict)
        if copy is None:
            return Kept.ONE
        try:
            made = yield from _copy_over(copy, deadline)
        finally:
            copy.release()
        if made:
            made = yield from _is_still_wanted(copy, deadline)
        if made:
            return Kept.TWO
        return Kept.ONE if copy.original_stands() else Kept.NONE
    finally:
        volume.give_back_sets(sets)
        volume.key_locks.end(pseudonym)


def work_off(volumes: Sequence[Volume], channel: IoChannel, most: int = 16) -> Steps[int]:
    """Take back doubted copies, and make some that puts owe; how many were looked at."""
    done = 0
    for volume in volumes:
        for _ in range(most):
            doubted = volume.replication_backlog.next_doubtful(channel.now())
            if doubted is None or volume.erased:
                break
            done += 1
            yield from _take_back(volume, channel, doubted)
        for _ in range(most):
            pseudonym = volume.replication_backlog.next()
            if pseudonym is None:
                break
            done += 1
            kept = yield from keep_two(volume, channel, pseudonym, may_evict=True)
            volume.replication_backlog.not_made += kept is Kept.ONE
    return done


def _is_doubted(found: Found) -> bool:
    return found.cached.disproven.get(found.slot) == found.entry.generation


@dataclass(slots=True)
class _Copy:
    """A copy under way, from a slot into a reserved one."""

    volume: Volume
    channel: IoChannel
    original: Found
    target: CachedSet
    slot: int
    has_room_set_aside: bool
    codec: SlotCodec
    """Seals it."""

    def release(self) -> None:
        if self.has_room_set_aside and self.volume.quota is not None:
            self.volume.quota.give_back(self.volume.settings.slot_bytes)
        release(self.volume, self.target, self.slot)

    def original_stands(self) -> bool:
        """Whether the original is named, as far as is remembered."""
        with self.original.cached.guard:
            directory, entry = self.original.cached.directory, self.original.entry
            if directory is None:
                return False
            # In whichever slot: it may have been sealed anew in another.
            named = [directory.entry(slot) for slot in directory.find_all(entry.pseudonym)]
        return any(each is not None and each.generation == entry.generation for each in named)


def _reserve(
    volume: Volume,
    channel: IoChannel,
    original: Found,
    target: CachedSet,
    pseudonym: bytes,
    *,
    may_evict: bool,
) -> _Copy | None:
    if not channel.trusts(target.namespace):
        return None
    with original.cached.guard:
        other = original.cached.directory
        may_evict &= other is not None and other.taken == SLOTS_PER_SET
    quota = volume.quota if volume.quota is not None and volume.quota.limits.of_room else None
    if quota is not None and not quota.set_aside(volume.settings.slot_bytes):
        return None
    best = best_choice([target], channel, pseudonym, volume.holds.held)
    if best is None or (is_eviction(best[1]) and not may_evict) or not reserve(volume, channel, *best):
        if quota is not None:
            quota.give_back(volume.settings.slot_bytes)
        return None
    codec = volume.sealing_codec(channel.now())
    return _Copy(volume, channel, original, target, best[1].slot, quota is not None, codec)


def _copy_over(copy: _Copy, deadline: float) -> Steps[bool]:
    """Read the original, seal it for its other place, write it, and name it."""
    with SlotVerifier(copy.volume, copy.channel, copy.original, deadline) as reader:
        sealed = SlotCopy(reader, copy.target, copy.slot, copy.codec, reader.entry.generation)
        if (yield from sealed.send()) is not None:
            return False
        return (yield from _name(copy, sealed, deadline))


def _name(copy: _Copy, sealed: SlotCopy, deadline: float) -> Steps[bool]:
    """Write the last of the slot beside its entry, if the original still stands."""
    volume, channel, target = copy.volume, copy.channel, copy.target
    entry = sealed.entry._replace(last_use_us=int(channel.wall() * 1e6))
    with SetTransaction(volume, channel, target) as change:
        if (yield from change.begin(deadline, reload=False)) is not None:
            return False
        if not volume.takes(copy.codec, channel.now()) or not copy.original_stands():
            return False
        into = volume.slot_offset(target, copy.slot)
        slot_write = channel.write(target.namespace, into, [sealed.last], more=True)
        if (yield from change.name(target, copy.slot, entry, deadline, slot_write)) is not None:
            return False
    tally = channel.tally(volume.settings.name)
    tally.copies_made += 1
    tally.copy_bytes += entry.length
    return True


def _is_still_wanted(copy: _Copy, deadline: float) -> Steps[bool]:
    """Whether flash still names the original, and the copy's key holds; else the copy goes. It goes where
    either cannot be seen as well: a copy can be made again, but a deleted value must not come back."""
    volume, channel, target = copy.volume, copy.channel, copy.target
    trouble = yield from volume.load(channel, [copy.original.cached], deadline)
    if trouble is None and copy.original_stands():
        trouble = yield from volume.vouches(channel, target.namespace, copy.codec, deadline)
        if trouble is None:
            return True
    entry = copy.original.entry
    named = NamedCopy(target.namespace, target.offset, copy.slot, entry.pseudonym, entry.generation)
    yield from _take_back(volume, channel, named)
    return False


def _take_back(volume: Volume, channel: IoChannel, copy: NamedCopy) -> Steps[None]:
    """Free a copy's slot, on flash; where that fails, the copy is doubted, and tried again."""
    target = volume.cache.borrow(copy.namespace, copy.offset, volume.occupancy)
    gone = False
    try:
        with SetTransaction(volume, channel, target) as change:
            deadline = channel.now() + volume.timing.write_deadline
            if (yield from change.begin(deadline)) is None:
                assert target.directory is not None
                named = target.directory.entry(copy.slot)
                gone = named is None or (named.pseudonym, named.generation) != (
                    copy.pseudonym,
                    copy.generation,
                )
                if not gone:
                    erase = change.erase(target, [copy.slot], copy.pseudonym)
                    gone = (yield from erase.end(deadline)) is None
    finally:
        if not gone:
            volume.replication_backlog.doubt(copy, channel.now() + DOUBT_SECONDS)
        volume.cache.give_back(target)
