"""Moving one value to where it belongs since namespaces joined: copied first, and cleared a while later.

The value is opened and sealed anew, for a slot is sealed together with its place. It takes a free slot or an
expired one and makes nothing else go. Its entry keeps its expiry, hits and pins.

A reader finds it all the time: it looks at the places of before and of now (`Volume.places`), and between the
copy's entry on flash and the end of the old one lies more time than a read may take. So a read whose look at
the new place came too early for the copy looks at the old one before that is cleared. A crash in between
leaves two copies, of which the one of the newer generation is read; the next pass clears the other.

Whoever moves a value holds the writer of its old set meanwhile, so a delete through this agent comes before
the move, which then finds nothing, or after it and finds both. Through another agent it may come in between,
and the value is there again: as when a put and a delete of two agents meet.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import NamedTuple

from agent.pool.counters import MissCause
from agent.pool.format.directory import SLOTS_PER_SET, Directory, Entry, choose_slot, flags_of
from agent.pool.format.slot import HEADER_BYTES, OpenSlot, SlotCodec, SlotSealer, new_generation
from agent.pool.steps import Acquire, Lanes, Steps, wait_for
from agent.pool.volume.directory_cache import SHUN_SECONDS, CachedSet
from agent.pool.volume.volume import Volume
from agent.pool.volume.writable_directory import load_writable, prove
from agent.pool.write.slot_erase import Freeing

PIECE_BYTES = 1 << 20
"""Moved at a time; a unit at the least, and no longer than one is."""


UNNAME_SECONDS = 1.0
"""To take back what was named under a key that is gone."""


class Outcome(enum.Enum):
    """What became of a move."""

    COPIED = "copied"
    GONE = "gone"
    """There is nothing to move any more."""
    NO_ROOM = "no room"
    TROUBLE = "trouble"
    """Somebody did not answer, or the value does not prove itself; it stays where it is."""


class Old(NamedTuple):
    """An entry at an earlier place."""

    cached: CachedSet
    slot: int
    entry: Entry


def is_misplaced(volume: Volume, cached: CachedSet, pseudonym: bytes) -> bool:
    """Whether a value of this pseudonym, in this set, belongs elsewhere."""
    here = (cached.namespace, cached.offset)
    candidates = volume.placement.candidates(pseudonym)
    return all((each.namespace, volume.set_offset(each)) != here for each in candidates)


def copy_value(volume: Volume, lanes: Lanes, old: Old, deadline: float) -> Steps[Outcome]:
    """Bring the value to one of the sets that it belongs to. It stays at the old place as well."""
    return (yield from _with_takers(_copy_to_takers, volume, lanes, old, deadline))


def clear_old(volume: Volume, lanes: Lanes, old: Old, deadline: float) -> Steps[Outcome]:
    """Free the old slot, where the value is at its new place. GONE: done; TROUBLE: not now."""
    return (yield from _with_takers(_clear_if_taken, volume, lanes, old, deadline))


def _with_takers(
    work: Callable[[Volume, Lanes, Old, list[CachedSet], float], Steps[Outcome]],
    volume: Volume,
    lanes: Lanes,
    old: Old,
    deadline: float,
) -> Steps[Outcome]:
    """What `work` makes of the old entry and the sets that the value belongs to.

    All their directories are as on flash, the entry stands, and nobody else writes the set that it is in.
    """
    cached, pseudonym = old.cached, old.entry.pseudonym
    sets = volume.borrow_sets(pseudonym)
    if not (yield Acquire(cached.writer, deadline)):
        volume.give_back_sets(sets)
        return Outcome.TROUBLE
    try:
        takers = [each for each in volume.takers(pseudonym, sets) if each is not cached]
        trouble = yield from load_writable(volume, lanes, [cached], deadline)
        trouble = (yield from volume.load(lanes, takers, deadline)) or trouble
        if trouble is not None or not takers:
            return Outcome.TROUBLE
        if not _stands(old):
            return Outcome.GONE
        return (yield from work(volume, lanes, old, takers, deadline))
    finally:
        cached.end_write()
        volume.give_back_sets(sets)


def _copy_to_takers(
    volume: Volume, lanes: Lanes, old: Old, takers: list[CachedSet], deadline: float
) -> Steps[Outcome]:
    opened = yield from _open(volume, lanes, old, deadline)
    if opened is MissCause.EVICTED or opened is MissCause.EXPIRED:
        # The slot may be another value's by now, which another agent is about to name: it is left alone.
        return (yield from _unname(volume, lanes, old, deadline))
    if isinstance(opened, MissCause):
        return Outcome.TROUBLE
    lacking = []
    for taker in takers:
        if not (yield from _is_there(volume, lanes, taker, old.entry.pseudonym, deadline)):
            lacking.append(taker)
    if not lacking or (len(lacking) < len(takers) and volume.settings.copies == 1):
        return Outcome.COPIED
    if volume.refusal:
        return Outcome.TROUBLE
    return (yield from _copy(volume, lanes, old, opened, lacking, deadline))


def _clear_if_taken(
    volume: Volume, lanes: Lanes, old: Old, takers: list[CachedSet], deadline: float
) -> Steps[Outcome]:
    if not any(_entry_of(taker, old.entry.pseudonym) is not None for taker in takers):
        # Evicted there, or another agent's image of the directory went over it: it is moved once more.
        return Outcome.TROUBLE
    opened = yield from _open(volume, lanes, old, deadline)
    if opened is MissCause.EVICTED or opened is MissCause.EXPIRED:
        return (yield from _unname(volume, lanes, old, deadline))
    return (yield from _clear(volume, lanes, old, deadline))


def _stands(old: Old) -> bool:
    with old.cached.guard:
        directory = old.cached.directory
        entry = directory.entry(old.slot) if directory is not None else None
    return (
        entry is not None
        and (entry.pseudonym, entry.generation) == (old.entry.pseudonym, old.entry.generation)
        and old.slot not in old.cached.reserved
    )


def _entry_of(cached: CachedSet, pseudonym: bytes) -> tuple[int, Entry] | None:
    with cached.guard:
        directory = cached.directory
        slot = directory.find(pseudonym) if directory is not None else None
        entry = directory.entry(slot) if directory is not None and slot is not None else None
    if slot is None or entry is None or cached.disproven.get(slot) == entry.generation:
        return None
    return slot, entry


def _is_there(
    volume: Volume, lanes: Lanes, taker: CachedSet, pseudonym: bytes, deadline: float
) -> Steps[bool]:
    """Whether the value lies in a set, every unit of it: the entry alone may be left by a crash."""
    found = _entry_of(taker, pseudonym)
    if found is None:
        return False
    copy = Old(taker, *found)
    opened = yield from _open(volume, lanes, copy, deadline)
    if isinstance(opened, MissCause):
        return False
    return (yield from _pass_on(volume, lanes, copy, opened, None, 0, 0, deadline))


def _open(volume: Volume, lanes: Lanes, old: Old, deadline: float) -> Steps[OpenSlot | MissCause]:
    """The header, proven; or why it is none of this entry's."""
    header = memoryview(bytearray(HEADER_BYTES))
    offset = volume.slot_offset(old.cached, old.slot)
    cause = yield from wait_for(lanes, lanes.read(old.cached.namespace, offset, header), deadline)
    if cause is not None:
        return cause
    key, place = volume.placement.key_of(old.entry.pseudonym), volume.place(old.cached, old.slot)
    opened = volume.codec.open(header, key, place, old.entry.generation)
    if isinstance(opened, MissCause):
        return opened
    if opened.expiry and opened.expiry <= lanes.wall():
        return MissCause.EXPIRED
    return opened if opened.length == old.entry.length else MissCause.CORRUPT


def _copy(
    volume: Volume, lanes: Lanes, old: Old, opened: OpenSlot, takers: list[CachedSet], deadline: float
) -> Steps[Outcome]:
    reserved = _reserve(volume, lanes, old, takers)
    if reserved is None:
        return Outcome.NO_ROOM
    target, slot = reserved
    volume.cache.borrow(target.namespace, target.offset)
    try:
        key, place = volume.placement.key_of(old.entry.pseudonym), volume.place(target, slot)
        codec = volume.sealing_codec(lanes.now())
        sealer = codec.seal(key, new_generation(lanes.wall()), place)
        offset = volume.slot_offset(target, slot)
        if not (yield from _pass_on(volume, lanes, old, opened, sealer, target.namespace, offset, deadline)):
            _shun(lanes, target, slot)
            return Outcome.TROUBLE
        header = sealer.header(opened.length, expiry=opened.expiry, stored_us=opened.stored_us)
        pending = lanes.write(target.namespace, offset, [header])
        if (yield from wait_for(lanes, pending, deadline)) is not None:
            _shun(lanes, target, slot)
            return Outcome.TROUBLE
        flags = old.entry.flags & 0xFF | flags_of(codec.epoch)
        entry = old.entry._replace(generation=sealer.generation, tag=sealer.tag(), flags=flags)
        return (yield from _name(volume, lanes, target, slot, entry, codec, deadline))
    finally:
        with target.guard:
            target.reserved.discard(slot)
        volume.cache.give_back(target)


def _reserve(volume: Volume, lanes: Lanes, old: Old, takers: list[CachedSet]) -> tuple[CachedSet, int] | None:
    """A slot that costs nothing, in the emptier set; trusted namespaces first."""
    best: tuple[tuple[bool, int], CachedSet] | None = None
    for taker in takers:
        with taker.guard:
            free = -1 if taker.directory is None else len(taker.directory.free_slots())
        rank = (lanes.trusts(taker.namespace), free)
        if free > 0 and (best is None or rank > best[0]):
            best = rank, taker
    if best is None:
        return None
    target = best[1]
    with target.guard:
        assert target.directory is not None
        start = old.entry.pseudonym[-1] % SLOTS_PER_SET
        choice = choose_slot(target.directory, target.unavailable(lanes.now()), lanes.wall(), start)
        if choice is None or choice.victim is not None:
            return None
        target.reserved.add(choice.slot)
    return target, choice.slot


def _pass_on(
    volume: Volume,
    lanes: Lanes,
    old: Old,
    opened: OpenSlot,
    sealer: SlotSealer | None,
    namespace: int,
    offset: int,
    deadline: float,
) -> Steps[bool]:
    """Open every unit, and seal and write it at its new place; without a sealer only see that it opens."""
    unit_bytes = volume.codec.unit_bytes
    step = max(PIECE_BYTES // unit_bytes, 1) * unit_bytes
    old_data = volume.slot_offset(old.cached, old.slot) + HEADER_BYTES
    for at in range(0, opened.length, step):
        length = min(step, opened.length - at)
        sealed = lanes.receive_buffer(volume.codec.padded(length))
        cause = yield from wait_for(lanes, lanes.read(old.cached.namespace, old_data + at, sealed), deadline)
        if cause is not None:
            return False
        plain = memoryview(bytearray(len(sealed)))
        for start in range(0, len(sealed), unit_bytes):
            end = min(start + unit_bytes, len(sealed))
            if not opened.open_unit((at + start) // unit_bytes, sealed[start:end], plain[start:end]):
                return False
        if sealer is None:
            continue
        buffer = lanes.send_buffer(len(sealed))
        taken = sealer.seal(at // unit_bytes, plain[:length], buffer)
        pending = lanes.write(namespace, offset + HEADER_BYTES + at, [buffer[:taken]])
        if (yield from wait_for(lanes, pending, deadline)) is not None:
            return False
    return True


def _name(
    volume: Volume,
    lanes: Lanes,
    target: CachedSet,
    slot: int,
    entry: Entry,
    codec: SlotCodec,
    deadline: float,
) -> Steps[Outcome]:
    """Write the directory with the copy's entry in it; as it was again, where the copy's key was dropped."""
    if not (yield Acquire(target.writer, deadline)):
        return Outcome.TROUBLE
    try:
        if (yield from prove(volume, lanes, [target], deadline, holds_writers=True)) is not None:
            return Outcome.TROUBLE
        with target.guard:
            if target.directory is None or not volume.takes(codec, lanes.now()):
                return Outcome.TROUBLE
            before, image = target.directory.image(), target.directory.copy()
        _put(image, slot, entry)
        if not (yield from _written(volume, lanes, target, slot, entry, image.image(), deadline)):
            return Outcome.TROUBLE
        if (yield from volume.vouches(lanes, target.namespace, codec, deadline)) is not None:
            # The value stays where it is. Killed before this is written, the next walk finds that it does not
            # open here, and copies it once more.
            yield from _written(volume, lanes, target, slot, entry, before, lanes.now() + UNNAME_SECONDS)
            return Outcome.TROUBLE
        with target.guard:
            if target.directory is not None:
                _put(target.directory, slot, entry)
        return Outcome.COPIED
    finally:
        target.end_write()


def _written(
    volume: Volume, lanes: Lanes, target: CachedSet, slot: int, entry: Entry, image: bytes, deadline: float
) -> Steps[bool]:
    """Write an image of a directory, in which `entry` is named in `slot` now or was before."""
    pending = lanes.write(target.namespace, target.offset, [image])
    if (yield from wait_for(lanes, pending, deadline)) is None:
        return True
    volume.unsettled.write_failed(target, slot, entry, lanes.now())
    _shun(lanes, target, slot)
    return False


def _put(directory: Directory, slot: int, entry: Entry) -> None:
    for older in directory.find_all(entry.pseudonym):
        directory.clear(older)
    directory.install(slot, entry._replace(ghost=directory.ghost(slot)))


def _clear(volume: Volume, lanes: Lanes, old: Old, deadline: float) -> Steps[Outcome]:
    """Free the old slot. Where nobody answers for that, flash may have its entry still: it is tried again."""
    failure = yield from Freeing(volume, lanes, old.cached, [old.slot]).end(deadline)
    return Outcome.GONE if failure is None else Outcome.TROUBLE


def _unname(volume: Volume, lanes: Lanes, old: Old, deadline: float) -> Steps[Outcome]:
    """Clear an entry that led to nothing, if flash still has it, and leave its slot as it is."""
    cached = old.cached
    if (yield from load_writable(volume, lanes, [cached], deadline)) is not None:
        return Outcome.TROUBLE
    if not _stands(old):
        return Outcome.GONE
    with cached.guard:
        assert cached.directory is not None
        image = cached.directory.copy()
    image.clear(old.slot)
    write = lanes.write(cached.namespace, cached.offset, [image.image()])
    if (yield from wait_for(lanes, write, deadline)) is not None:
        _shun(lanes, cached, old.slot)
        return Outcome.TROUBLE
    with cached.guard:
        if cached.directory is not None:
            cached.directory.clear(old.slot)
    return Outcome.GONE


def _shun(lanes: Lanes, cached: CachedSet, slot: int) -> None:
    """A write that failed may yet land there."""
    with cached.guard:
        cached.shunned[slot] = lanes.now() + SHUN_SECONDS
