"""Rekey: values are sealed anew under a volume's new data key, a set at a time, while the volume is used.

An entry names the epoch of its slot's key (`is_under`), so a look at the directory finds the values that are
left. A value is opened whole, as for a reader, and sealed into a free slot of its set; then one write of the
directory names the new slot and frees the old one. Blocks of files are flushed before and after that. In a
set without a free slot a value of a cache is sealed over itself, and is a miss after an interruption; blocks
of files wait for a free slot. A value that does not open is dropped from a cache. In a volume of files it is
left to a scrub and to orphans.py.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from agent.pool.counters import MissCause
from agent.pool.format.directory import DIRECTORY_BYTES, ENTRY, FREE, Entry, flags_of, is_under
from agent.pool.format.eviction_choice import Choice, choose_slot
from agent.pool.format.occupancy import SetPlace
from agent.pool.late_answers import wait_for
from agent.pool.steps import IoChannel, Steps
from agent.pool.volume.directory_cache import COOLDOWN_SECONDS, CachedSet
from agent.pool.volume.volume import Found, Volume
from agent.pool.write.flush_tracking import flush_written
from agent.pool.write.set_transaction import SetTransaction, is_named
from agent.pool.write.slot_allocation import release, reserve
from agent.pool.write.slot_copy import SlotCopy, SlotVerifier

IO_SECONDS: Final = 5.0
UNOPENED_MAX: Final = 256
BLOCKS_AT_ONCE: Final = 8
"""Blocks of files that share two flushes. Their new slots are reserved meanwhile: half of the free ones at
most."""
READERS_SECONDS: Final = 0.5
"""How long a slot that a value has left takes no other: a reader may be there."""
MAY_COME_BACK: Final = (MissCause.LATE, MissCause.ENCLOSURE_DOWN)


class Unopened(NamedTuple):
    """An entry of a volume of files whose slot does not open."""

    place: SetPlace
    slot: int
    entry: Entry


@dataclass(slots=True)
class ResealCounts:
    resealed: int = 0
    dropped: int = 0
    """Values of a cache that did not open any more."""
    left: int = 0
    """Failed tries; a later pass tries again."""
    unopened: list[Unopened] = field(default_factory=list)
    """Found in volumes of files, the first UNOPENED_MAX, for orphans.py."""


def reseal_set(volume: Volume, channel: IoChannel, place: SetPlace, counts: ResealCounts) -> Steps[int]:
    """Seal anew the values under another key in one set; how many there were."""
    with volume.borrowed_at(place) as (cached,):
        if (yield from volume.load(channel, [cached], channel.now() + IO_SECONDS)) is not None:
            return 0
        directory = cached.directory
        assert directory is not None
        epoch = volume.codec.epoch
        left = [
            Found(cached, slot, entry)
            for slot, entry in directory
            if entry.length and not is_under(entry, epoch)
        ]
        rekey = _SetRekey(volume, channel, cached, counts)
        if volume.settings.kind == "files":
            yield from rekey.reseal_blocks(left)
            return len(left)
        for found in left:
            if volume.erased:
                break
            sealed = yield from rekey.reseal(found)
            if sealed is not None:
                yield from rekey.name_all([sealed])
        return len(left)


@dataclass(frozen=True, slots=True)
class _Sealed:
    """A value that was sealed anew and is named in its old slot still. Its new one is reserved."""

    old: Found
    target: int
    epoch: int


class _SetRekey:
    """One set whose values are sealed anew."""

    def __init__(self, volume: Volume, channel: IoChannel, cached: CachedSet, counts: ResealCounts) -> None:
        self._volume: Final = volume
        self._channel: Final = channel
        self._cached: Final = cached
        self._counts: Final = counts

    def reseal_blocks(self, left: list[Found]) -> Steps[None]:
        """Seal blocks of files anew, some at a time, with two flushes each time.

        fsync(2) may have said that the old ones are durable. So the new ones are before a directory names
        them, and that directory is before the old slots take another value.
        """
        while left and not self._volume.erased:
            some = self._at_once()
            batch, left = left[:some], left[some:]
            if not batch or not (yield from self._reseal_some(batch)):
                self._counts.left += len(left)
                return

    def _at_once(self) -> int:
        with self._cached.guard:
            directory = self._cached.directory
            if directory is None:
                return 0
            free = len(directory.free_slots() - self._cached.unavailable(self._channel.now()))
        return min(BLOCKS_AT_ONCE, (free + 1) // 2)

    def _reseal_some(self, batch: list[Found]) -> Steps[bool]:
        """False: the enclosure does not flush, so the rest waits."""
        channel, cached = self._channel, self._cached
        sealed: list[_Sealed] = []
        flushed = False
        try:
            for found in batch:
                done = yield from self.reseal(found)
                if done is not None:
                    sealed.append(done)
            if not sealed:
                return True
            flushed = not (yield from flush_written(channel, {cached.namespace}))
        finally:
            if not flushed:
                self._counts.left += len(sealed)
                self._release(sealed)
        if not flushed:
            return False
        cooling = yield from self.name_all(sealed)
        if (yield from flush_written(channel, {cached.namespace})):
            return False  # The old slots keep cooling down.
        for slot, until in cooling.items():
            cached.restore_cooldown(slot, until, channel.now())
        return True

    def _release(self, sealed: Sequence[_Sealed]) -> None:
        for each in sealed:
            release(self._volume, self._cached, each.target)

    def name_all(self, sealed: Sequence[_Sealed]) -> Steps[dict[int, float]]:
        """Name values in their new slots, which are released. The old slots, which cool down from then on,
        and until when they were to cool down for other reasons."""
        cooling: dict[int, float] = {}
        try:
            for each in sealed:
                before = self._cached.cooldown_until.get(each.old.slot, 0.0)
                moved = yield from self._rename(each)
                if moved:
                    cooling[each.old.slot] = before
                self._counts.resealed += moved
                self._counts.left += not moved
        finally:
            self._release(sealed)
        return cooling

    def reseal(self, old: Found) -> Steps[_Sealed | None]:
        """Open a value, and seal it into another slot. None, and counted, where that is not done.

        All of it is open before any of it is written, for it may be sealed over itself.
        """
        volume, cached, counts = self._volume, self._cached, self._counts
        with SlotVerifier(volume, self._channel, old, io_seconds=IO_SECONDS, whole=True) as reader:
            cause = yield from reader.verify()
            if cause is not None:
                dropped = False
                if cause not in MAY_COME_BACK and volume.settings.may_lose:
                    dropped = yield from self._drop(old)
                elif cause not in MAY_COME_BACK and len(counts.unopened) < UNOPENED_MAX:
                    place = (cached.namespace, cached.offset)
                    counts.unopened.append(Unopened(place, old.slot, old.entry))
                counts.dropped += dropped
                counts.left += not dropped
                return None
            target = self._reserve(old.slot)
            if target is None:
                counts.left += 1
                return None
            codec, is_sealed = volume.codec, False
            done = _Sealed(old, target, codec.epoch)
            try:
                if not codec.is_used_up:
                    copy = SlotCopy(reader, cached, target, codec, old.entry.generation)
                    is_sealed = (yield from copy.write()) is None
            finally:
                if not is_sealed:
                    counts.left += 1
                    self._release([done])
            return done if is_sealed else None

    def _reserve(self, slot: int) -> int | None:
        """Reserve a free slot of the set, or the value's own where it is a cache's."""
        volume, channel, cached = self._volume, self._channel, self._cached
        with cached.guard:
            directory = cached.directory
            if directory is None or directory.in_doubt:
                return None
            taken = cached.unavailable(channel.now())
            choice = choose_slot(directory, taken, channel.wall())
            entry = directory.entry(slot)
        if choice is None or choice.victim is not None:
            if not volume.settings.may_lose or slot in taken:
                return None
            choice = Choice(slot, entry, 0.0, 0)
        return choice.slot if reserve(volume, channel, cached, choice, keep=True) else None

    def _drop(self, old: Found) -> Steps[bool]:
        """Take out the entry of a value that does not open. False: it is as it was, or another one."""
        with SetTransaction(self._volume, self._channel, self._cached) as change:
            if (yield from change.begin(self._channel.now() + IO_SECONDS)) is not None:
                return False
            until = self._channel.now() + IO_SECONDS
            return (yield from change.clear(old, until, ghost=old.entry.pseudonym))

    def _rename(self, sealed: _Sealed) -> Steps[bool]:
        """Name the value in its new slot, and free the old one. False: it is as it was, or was changed by
        somebody else meanwhile, whose change stays."""
        volume, channel, cached = self._volume, self._channel, self._cached
        slot, target = sealed.old.slot, sealed.target
        with SetTransaction(volume, channel, cached) as change:
            if (yield from change.begin(channel.now() + IO_SECONDS)) is not None:
                return False
            if not (yield from self._is_ours(sealed)):
                return False
            with cached.guard:
                directory = cached.directory
                present = directory.entry(slot) if directory is not None else None
                if directory is None or present is None:
                    return False
                if not is_named(sealed.old, is_ours=slot == target):
                    return False
                if cached.cooldown_until.get(target, 0.0) > channel.now():
                    return False
                if target != slot:
                    # A reader may be there: leave it for a moment. A block's slot waits for the directory's
                    # flush.
                    moment = READERS_SECONDS if volume.settings.may_lose else COOLDOWN_SECONDS
                    cached.cooldown_until[slot] = channel.now() + moment
                directory.clear(slot)
                # Hits and pins are those of now, and the ghost is the slot's own.
                flags = present.flags & 0xFF | flags_of(sealed.epoch)
                renamed = present._replace(flags=flags, ghost=directory.ghost(target))
                directory.install(target, renamed)
                image = directory.image()
            until = channel.now() + IO_SECONDS
            return (yield from change.write(cached, image, (target,), until, added=renamed)) is None

    def _is_ours(self, sealed: _Sealed) -> Steps[bool]:
        """Whether no other agent has named a value in the new slot meanwhile. The remembered directory keeps
        our view of reserved slots, so flash is asked."""
        channel, cached, entry = self._channel, self._cached, sealed.old.entry
        block = channel.receive_buffer(DIRECTORY_BYTES)
        reading = channel.read(cached.namespace, cached.offset, block)
        if (yield from wait_for(channel, reading, channel.now() + IO_SECONDS)) is not None:
            return False
        found = Entry(*ENTRY.unpack_from(block, sealed.target * ENTRY.size)[:10])
        if sealed.target != sealed.old.slot:
            return found.pseudonym == FREE
        return (found.pseudonym, found.generation) == (entry.pseudonym, entry.generation)
