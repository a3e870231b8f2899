"""Migration of one value to where it belongs since namespaces joined: copied first, cleared a while later.

The value is sealed anew, for a slot is sealed together with its place. It takes a free slot or an expired one
and evicts nothing. Its entry keeps expiry, hits and pins.

A reader finds it at any time. It looks at the old places and the new ones (`Volume.places`), and between the
copy's entry on flash and the end of the old one lies more time than a read may take. A crash in between
leaves two copies, of which the newer generation is read; the next walk clears the other.

A move holds the writer of the old set, so a delete through this agent comes before it or after it. A delete
through another agent may come in between, and the value is there again: as when a put and a delete of two
agents meet.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

from agent.pool.counters import MissCause
from agent.pool.format.directory import Entry
from agent.pool.format.slot import new_generation
from agent.pool.steps import IoChannel, Steps
from agent.pool.volume.directory_cache import CachedSet
from agent.pool.volume.volume import Volume
from agent.pool.write.set_transaction import SetTransaction, is_named
from agent.pool.write.slot_allocation import best_choice, is_eviction, release, reserve
from agent.pool.write.slot_copy import SlotCopy, SlotVerifier

UNNAME_SECONDS = 1.0
"""For taking back a copy whose key was dropped."""


class Outcome(enum.Enum):
    COPIED = "copied"
    GONE = "gone"
    """There is nothing to move any more."""
    NO_ROOM = "no room"
    TROUBLE = "trouble"
    """An enclosure did not answer, or the value does not prove itself; it stays where it is."""


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


def copy_value(volume: Volume, channel: IoChannel, old: Old, deadline: float) -> Steps[Outcome]:
    """Copy the value to one of the sets that it belongs to. It stays at the old place as well."""
    return (yield from _with_targets(_copy_to_targets, volume, channel, old, deadline))


def clear_old(volume: Volume, channel: IoChannel, old: Old, deadline: float) -> Steps[Outcome]:
    """Free the old slot, where the value is at its new place. GONE: done; TROUBLE: not now."""
    return (yield from _with_targets(_clear_if_copied, volume, channel, old, deadline))


_Work: TypeAlias = Callable[
    [SetTransaction, Volume, IoChannel, Old, Sequence[CachedSet], float], Steps[Outcome]
]


def _with_targets(
    work: _Work, volume: Volume, channel: IoChannel, old: Old, deadline: float
) -> Steps[Outcome]:
    """Do `work` in a transaction of the old set, with the other sets that the value belongs to.

    All their directories are as on flash, and the old one names the value.
    """
    cached, pseudonym = old.cached, old.entry.pseudonym
    sets = volume.borrow_sets(pseudonym)
    try:
        with SetTransaction(volume, channel, cached) as change:
            if (yield from change.begin(deadline)) is not None:
                return Outcome.TROUBLE
            targets = [each for each in volume.write_targets(pseudonym, sets) if each is not cached]
            if not targets or (yield from volume.load(channel, targets, deadline)) is not None:
                return Outcome.TROUBLE
            if not is_named(cached, old.slot, old.entry):
                return Outcome.GONE
            return (yield from work(change, volume, channel, old, targets, deadline))
    finally:
        volume.give_back_sets(sets)


def _copy_to_targets(
    change: SetTransaction,
    volume: Volume,
    channel: IoChannel,
    old: Old,
    targets: Sequence[CachedSet],
    deadline: float,
) -> Steps[Outcome]:
    with SlotVerifier(volume, channel, *old, deadline) as reader:
        cause = _expired(reader, (yield from reader.open()))
        if cause in (MissCause.EVICTED, MissCause.EXPIRED):
            # The slot may be another value's by now, which another agent is about to name: it is left alone.
            return (yield from _unname(change, reader, cause, deadline))
        if cause is not None:
            return Outcome.TROUBLE
        lacking = []
        for target in targets:
            if not (yield from _is_there(volume, channel, target, old.entry.pseudonym, deadline)):
                lacking.append(target)
        if not lacking or (len(lacking) < len(targets) and volume.settings.copies == 1):
            return Outcome.COPIED
        if volume.refusal:
            return Outcome.TROUBLE
        return (yield from _copy(reader, lacking, deadline))


def _clear_if_copied(
    change: SetTransaction,
    volume: Volume,
    channel: IoChannel,
    old: Old,
    targets: Sequence[CachedSet],
    deadline: float,
) -> Steps[Outcome]:
    if not any(_entry_of(target, old.entry.pseudonym) is not None for target in targets):
        # Evicted there, or another agent's image of the directory went over it: it is moved once more.
        return Outcome.TROUBLE
    with SlotVerifier(volume, channel, *old, deadline) as reader:
        cause = _expired(reader, (yield from reader.open()))
        if cause in (MissCause.EVICTED, MissCause.EXPIRED):
            return (yield from _unname(change, reader, cause, deadline))
    # Where the erase has no answer, flash may have the entry still: the next walk tries again.
    failure = yield from change.erase(old.cached, [old.slot]).end(deadline)
    return Outcome.GONE if failure is None else Outcome.TROUBLE


def _entry_of(cached: CachedSet, pseudonym: bytes) -> tuple[int, Entry] | None:
    with cached.guard:
        directory = cached.directory
        slot = directory.find(pseudonym) if directory is not None else None
        entry = directory.entry(slot) if directory is not None and slot is not None else None
    if slot is None or entry is None or cached.disproven.get(slot) == entry.generation:
        return None
    return slot, entry


def _is_there(
    volume: Volume, channel: IoChannel, target: CachedSet, pseudonym: bytes, deadline: float
) -> Steps[bool]:
    """Whether the value lies in a set, every unit of it: the entry alone may be left by a crash."""
    found = _entry_of(target, pseudonym)
    if found is None:
        return False
    with SlotVerifier(volume, channel, target, *found, deadline) as reader:
        return _expired(reader, (yield from reader.verify())) is None


def _expired(reader: SlotVerifier, cause: MissCause | None) -> MissCause | None:
    """EXPIRED where the header that was opened says so, else `cause`."""
    opened = reader.opened
    if opened is not None and opened.expiry and opened.expiry <= reader.channel.wall():
        return MissCause.EXPIRED
    return cause


def _copy(reader: SlotVerifier, lacking: Sequence[CachedSet], deadline: float) -> Steps[Outcome]:
    """Copy the value to the emptier set, into a slot that costs no live value; trusted namespaces first."""
    volume, channel = reader.volume, reader.channel
    best = best_choice(lacking, channel, reader.entry.pseudonym)
    if best is None or is_eviction(best[1]) or not reserve(volume, channel, *best):
        return Outcome.NO_ROOM
    target, slot = best[0], best[1].slot
    try:
        codec = volume.sealing_codec(channel.now())
        copy = SlotCopy(reader, target, slot, codec, new_generation(channel.wall()))
        if (yield from copy.write()) is not None:
            return Outcome.TROUBLE
        with SetTransaction(volume, channel, target) as change:
            if (yield from change.begin(deadline, reload=False)) is not None:
                return Outcome.TROUBLE
            if target.directory is None or not volume.takes(codec, channel.now()):
                return Outcome.TROUBLE
            if (yield from change.name(target, slot, copy.entry, deadline)) is not None:
                return Outcome.TROUBLE
            if (yield from volume.vouches(channel, target.namespace, codec, deadline)) is None:
                return Outcome.COPIED
            # Its key was dropped: the value stays where it is. Killed before this is written, the next walk
            # finds that the copy does not open, and copies once more.
            until = channel.now() + UNNAME_SECONDS
            if not (yield from change.clear(target, slot, copy.entry, until, is_ours=True)):
                volume.in_doubt_writes.write_failed(target, slot, copy.entry, channel.now())
            return Outcome.TROUBLE
    finally:
        release(volume, target, slot)


def _unname(
    change: SetTransaction, reader: SlotVerifier, cause: MissCause | None, deadline: float
) -> Steps[Outcome]:
    """Clear an entry that led to nothing, if flash still has it, and leave its slot as it is.

    A second look must say the same: a drive may bring another slot's bytes once.
    """
    if (yield from change.load(deadline)) is not None:
        return Outcome.TROUBLE
    if not is_named(reader.cached, reader.slot, reader.entry):
        return Outcome.GONE
    if _expired(reader, (yield from reader.open())) is not cause:
        return Outcome.TROUBLE
    cleared = yield from change.clear(reader.cached, reader.slot, reader.entry, deadline)
    return Outcome.GONE if cleared else Outcome.TROUBLE
