"""Sealing values anew under a volume's new data key, a set at a time, while the volume is used.

An entry names the epoch of the key that its slot is sealed under (`is_under`), so a look at the directory
finds what is left to do. A value is opened whole, as it would be for a reader, and sealed into a free slot of
its set; then one write of the directory names the new slot and frees the old one. Blocks of files are flushed
before and after that. In a set without a free slot a value of a cache is sealed over itself, and is a miss
should we be interrupted; blocks of files wait until there is one. What does not open any more is dropped
from a cache, and left where it holds files: a scrub is to look at it, and whoever keeps their names
(orphans.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from agent.pool.counters import MissCause
from agent.pool.flush_tracking import flush_written
from agent.pool.format.directory import (
    DIRECTORY_BYTES,
    ENTRY,
    FREE,
    SLOTS_PER_SET,
    Entry,
    flags_of,
    is_under,
)
from agent.pool.format.occupancy import SetPlace
from agent.pool.format.slot import HEADER_BYTES, OpenSlot
from agent.pool.steps import Acquire, Lanes, Pending, Steps, wait_for
from agent.pool.volume.directory_cache import SHUN_SECONDS, CachedSet
from agent.pool.volume.volume import Volume
from agent.pool.volume.writable_directory import load_writable

IO_SECONDS: Final = 5.0
UNOPENED_MAX: Final = 256
BLOCKS_AT_ONCE: Final = 8
"""Blocks of files that two flushes are for. Their new slots, half of those that are free at the most, are
reserved meanwhile, and no block can be put there."""
READERS_SECONDS: Final = 0.5
"""For how long nothing is written to a slot that a value has left."""
MAY_COME_BACK: Final = (MissCause.LATE, MissCause.ENCLOSURE_DOWN)


class Unopened(NamedTuple):
    """An entry of a volume of files whose slot does not open."""

    place: SetPlace
    slot: int
    entry: Entry


@dataclass(slots=True)
class ResealCounts:
    """What was done since the agent's start."""

    resealed: int = 0
    dropped: int = 0
    """Values of a cache that did not open any more."""
    left: int = 0
    """Tries that came to nothing; a later pass comes by again."""
    unopened: list[Unopened] = field(default_factory=list)
    """Met in volumes of files; whoever looks at them takes them out. The first UNOPENED_MAX."""


def reseal_set(volume: Volume, lanes: Lanes, place: SetPlace, counts: ResealCounts) -> Steps[int]:
    """Seal anew what is under another key in one set; how many values were looked at."""
    cached = volume.cache.borrow(*place, volume.occupancy)
    try:
        if (yield from volume.load(lanes, [cached], lanes.now() + IO_SECONDS)) is not None:
            return 0
        directory = cached.directory
        assert directory is not None
        epoch = volume.codec.epoch
        left = [(slot, entry) for slot, entry in directory if entry.length and not is_under(entry, epoch)]
        if volume.settings.kind == "files":
            yield from _reseal_blocks(volume, lanes, cached, left, counts)
            return len(left)
        for slot, entry in left:
            if volume.erased:
                break
            sealed = yield from _reseal(volume, lanes, cached, slot, entry, counts)
            if sealed is not None:
                yield from _name_all(volume, lanes, cached, [sealed], counts)
        return len(left)
    finally:
        volume.give_back_sets([cached])


def _reseal_blocks(
    volume: Volume, lanes: Lanes, cached: CachedSet, left: list[tuple[int, Entry]], counts: ResealCounts
) -> Steps[None]:
    """Seal blocks of files anew, some at a time, with two flushes each time.

    A program may have been told by fsync(2) that the old ones are durable. So the new ones are, before a
    directory names them; and that directory is, before anything else is stored in the old slots.
    """
    while left and not volume.erased:
        some = _at_once(lanes, cached)
        batch, left = left[:some], left[some:]
        if not batch or not (yield from _reseal_some(volume, lanes, cached, batch, counts)):
            counts.left += len(left)
            return


def _at_once(lanes: Lanes, cached: CachedSet) -> int:
    with cached.guard:
        directory = cached.directory
        if directory is None:
            return 0
        free = len(directory.free_slots() - cached.unavailable(lanes.now()))
    return min(BLOCKS_AT_ONCE, (free + 1) // 2)


def _reseal_some(
    volume: Volume, lanes: Lanes, cached: CachedSet, batch: list[tuple[int, Entry]], counts: ResealCounts
) -> Steps[bool]:
    """False where the enclosure does not flush: the rest can wait."""
    sealed: list[_Sealed] = []
    flushed = False
    try:
        for slot, entry in batch:
            done = yield from _reseal(volume, lanes, cached, slot, entry, counts)
            if done is not None:
                sealed.append(done)
        if not sealed:
            return True
        flushed = not (yield from flush_written(lanes, {cached.namespace}))
    finally:
        if not flushed:
            counts.left += len(sealed)
            _release(cached, sealed)
    if not flushed:
        return False
    shunned = yield from _name_all(volume, lanes, cached, sealed, counts)
    if (yield from flush_written(lanes, {cached.namespace})):
        return False  # The old slots stay shunned.
    with cached.guard:
        for slot, until in shunned.items():
            if until > lanes.now():
                cached.shunned[slot] = until
            else:
                cached.shunned.pop(slot, None)
    return True


@dataclass(frozen=True, slots=True)
class _Sealed:
    """A value that was sealed anew and is named in its old slot still. Its new one is reserved."""

    slot: int
    entry: Entry
    target: int
    epoch: int


def _release(cached: CachedSet, sealed: Sequence[_Sealed]) -> None:
    with cached.guard:
        cached.reserved.difference_update(each.target for each in sealed)


def _name_all(
    volume: Volume, lanes: Lanes, cached: CachedSet, sealed: Sequence[_Sealed], counts: ResealCounts
) -> Steps[dict[int, float]]:
    """Name values in their new slots, which are released. The old slots, which are shunned from then on, and
    until when they were to be shunned for other reasons."""
    shunned: dict[int, float] = {}
    try:
        for each in sealed:
            with cached.guard:
                before = cached.shunned.get(each.slot, 0.0)
            renamed = each.entry._replace(flags=each.entry.flags & 0xFF | flags_of(each.epoch))
            moved = yield from _rename(volume, lanes, cached, each.slot, each.entry, each.target, renamed)
            if moved:
                shunned[each.slot] = before
            counts.resealed += moved
            counts.left += not moved
    finally:
        _release(cached, sealed)
    return shunned


def _reseal(
    volume: Volume, lanes: Lanes, cached: CachedSet, slot: int, entry: Entry, counts: ResealCounts
) -> Steps[_Sealed | None]:
    """Open a value, and seal it into another slot. None, and counted, where that is not done."""
    value = bytearray(volume.codec.padded(min(entry.length, volume.settings.value_bytes)))
    try:
        return (yield from _reseal_by(volume, lanes, cached, slot, entry, memoryview(value), counts))
    finally:
        value[:] = bytes(len(value))  # Nothing that was opened stays in memory.


def _reseal_by(
    volume: Volume,
    lanes: Lanes,
    cached: CachedSet,
    slot: int,
    entry: Entry,
    value: memoryview,
    counts: ResealCounts,
) -> Steps[_Sealed | None]:
    opened = yield from open_whole(volume, lanes, cached, slot, entry, value)
    if isinstance(opened, MissCause):
        dropped = False
        if opened not in MAY_COME_BACK and volume.settings.kind == "kv":
            dropped = yield from _rename(volume, lanes, cached, slot, entry, None, None)
        elif opened not in MAY_COME_BACK and len(counts.unopened) < UNOPENED_MAX:
            counts.unopened.append(Unopened((cached.namespace, cached.offset), slot, entry))
        counts.dropped += dropped
        counts.left += not dropped
        return None
    target = _reserve(volume, lanes, cached, slot)
    if target is None:
        counts.left += 1
        return None
    epoch = None
    try:
        epoch = yield from _seal_into(volume, lanes, cached, target, opened, value)
    finally:
        if epoch is None:
            with cached.guard:
                cached.reserved.discard(target)
    if epoch is None:
        counts.left += 1
        return None
    return _Sealed(slot, entry, target, epoch)


def _reserve(volume: Volume, lanes: Lanes, cached: CachedSet, slot: int) -> int | None:
    """A free slot of the set, or the value's own where it is a cache's."""
    with cached.guard:
        directory = cached.directory
        if directory is None:
            return None
        free = directory.free_slots() - cached.unavailable(lanes.now())
        if free:
            target = min(free)
        elif volume.settings.kind == "kv" and slot not in cached.unavailable(lanes.now()):
            target = slot
        else:
            return None
        cached.reserved.add(target)
        return target


def open_whole(
    volume: Volume, lanes: Lanes, cached: CachedSet, slot: int, entry: Entry, value: memoryview
) -> Steps[OpenSlot | MissCause]:
    """Read a slot and open all of it into `value`. Unit by unit: a worker's buffer holds no more."""
    at = volume.slot_offset(cached, slot)
    header = lanes.receive_buffer(HEADER_BYTES)
    cause = yield from wait_for(lanes, lanes.read(cached.namespace, at, header), lanes.now() + IO_SECONDS)
    if cause is not None:
        return cause
    opened = volume.codec.open(header, None, volume.place(cached, slot), entry.generation)
    if isinstance(opened, MissCause):
        return opened
    if opened.length != entry.length or volume.placement.pseudonym(opened.key) != entry.pseudonym:
        return MissCause.CORRUPT
    unit = volume.codec.unit_bytes
    for number, start in enumerate(range(0, len(value), unit)):
        piece = value[start : start + unit]
        sealed = lanes.receive_buffer(len(piece))
        pending = lanes.read(cached.namespace, at + HEADER_BYTES + start, sealed)
        cause = yield from wait_for(lanes, pending, lanes.now() + IO_SECONDS)
        if cause is not None:
            return cause
        if not opened.open_unit(number, sealed, piece):
            return MissCause.CORRUPT
    return opened


def _seal_into(
    volume: Volume, lanes: Lanes, cached: CachedSet, target: int, opened: OpenSlot, value: memoryview
) -> Steps[int | None]:
    """Write the value to a slot, under the key of now and a fresh salt; the header last. The key's epoch;
    None: it failed."""
    codec, at, length = volume.codec, volume.slot_offset(cached, target), opened.length
    if codec.is_used_up:
        return None
    sealer = codec.seal(opened.key, opened.generation, volume.place(cached, target))
    for number, start in enumerate(range(0, len(value), codec.unit_bytes)):
        plain = value[start : min(start + codec.unit_bytes, length)]
        sealed = lanes.send_buffer(codec.padded(len(plain)))
        sealer.seal(number, plain, sealed)
        pending = lanes.write(cached.namespace, at + HEADER_BYTES + start, [sealed])
        if not (yield from _landed(lanes, cached, target, pending)):
            return None
    header = sealer.header(length, expiry=opened.expiry, stored_us=opened.stored_us)
    pending = lanes.write(cached.namespace, at, [header])
    if not (yield from _landed(lanes, cached, target, pending)):
        return None
    return codec.epoch


def _landed(lanes: Lanes, cached: CachedSet, target: int, pending: Pending) -> Steps[bool]:
    """Wait for a write of a slot. One that failed may land yet: the slot is left alone for a while."""
    cause = yield from wait_for(lanes, pending, lanes.now() + IO_SECONDS)
    if cause is not None and cause is not MissCause.ENCLOSURE_DOWN:
        with cached.guard:
            cached.shunned[target] = lanes.now() + SHUN_SECONDS
    return cause is None


def _rename(
    volume: Volume,
    lanes: Lanes,
    cached: CachedSet,
    slot: int,
    entry: Entry,
    target: int | None,
    renamed: Entry | None,
) -> Steps[bool]:
    """Free `slot`, and name the value in `target` where there is one. False: it is as it was, or was changed
    by somebody else meanwhile, whose change stays. `target` is reserved by the caller."""
    if not (yield Acquire(cached.writer, lanes.now() + IO_SECONDS)):
        return False
    try:
        if (yield from load_writable(volume, lanes, [cached], lanes.now() + IO_SECONDS)) is not None:
            return False
        if target is not None and not (yield from _is_ours(lanes, cached, target, entry, slot)):
            return False
        with cached.guard:
            directory = cached.directory
            present = directory.entry(slot) if directory is not None else None
            if directory is None or present is None or (slot in cached.reserved and slot != target):
                return False
            if (present.pseudonym, present.generation) != (entry.pseudonym, entry.generation):
                return False
            if target is not None and renamed is not None:
                if cached.shunned.get(target, 0.0) > lanes.now():
                    return False
                if target != slot:
                    # Who has found the value there may be reading it: leave it for a moment. Of a block of a
                    # file until this directory is flushed, and longer where it is not.
                    moment = READERS_SECONDS if volume.settings.kind == "kv" else SHUN_SECONDS
                    cached.shunned[slot] = lanes.now() + moment
                directory.clear(slot)
                # Hits and pins are those of now, and the ghost is the slot's own.
                uses = present._replace(flags=renamed.flags, ghost=directory.ghost(target))
                directory.install(target, uses)
            else:
                directory.clear(slot, ghost=entry.pseudonym)
            image = directory.image()
        pending = lanes.write(cached.namespace, cached.offset, [image])
        cause = yield from wait_for(lanes, pending, lanes.now() + IO_SECONDS)
        if cause is not None and target is not None:
            volume.unsettled.write_failed(cached, target, entry, lanes.now())
        return cause is None
    finally:
        cached.end_write()


def _is_ours(lanes: Lanes, cached: CachedSet, target: int, entry: Entry, slot: int) -> Steps[bool]:
    """Whether no other agent has named a value in `target` meanwhile. What is remembered of a reserved slot
    does not tell."""
    block = lanes.receive_buffer(DIRECTORY_BYTES)
    reading = lanes.read(cached.namespace, cached.offset, block)
    if (yield from wait_for(lanes, reading, lanes.now() + IO_SECONDS)) is not None:
        return False
    found = Entry(*ENTRY.unpack_from(block, target * ENTRY.size)[:10])
    if target != slot:
        return found.pseudonym == FREE
    return (found.pseudonym, found.generation) == (entry.pseudonym, entry.generation)


assert SLOTS_PER_SET * ENTRY.size == DIRECTORY_BYTES
