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

import enum
from collections.abc import Callable, Sequence

from agent.pool.counters import MissCause
from agent.pool.format.occupancy import SetPlace
from agent.pool.format.sealed_slot import new_generation
from agent.pool.steps import IoChannel, Steps
from agent.pool.volume.directory_cache import CachedSet
from agent.pool.volume.volume import Found, Volume
from agent.pool.write.set_transaction import SetTransaction, is_named
from agent.pool.write.slot_allocation import best_choice, is_eviction, release, reserve
from agent.pool.write.slot_copy import SlotCopy, SlotVerifier

BUSY_SECONDS = 0.05
"""For the writer of a set before the old one, whose writer is held: who holds it may wait for the old one."""
UNNAME_SECONDS = 1.0
"""The deadline for taking back a copy whose key was dropped."""


class Outcome(enum.Enum):
    COPIED = "copied"
    GONE = "gone"
    """There is nothing to move any more."""
    NO_ROOM = "no room"
    TROUBLE = "trouble"
    """An enclosure did not answer, or the value does not prove itself; it stays where it is."""


def is_misplaced(volume: Volume, cached: CachedSet, pseudonym: bytes) -> bool:
    """Whether a value of this pseudonym, in this set, belongs elsewhere."""
    here = (cached.namespace, cached.offset)
    candidates = volume.placement.candidates(pseudonym)
    return all((each.namespace, volume.set_offset(each)) != here for each in candidates)


class Migration:
    """The two steps of a move from `old`, an entry at an earlier place, each a transaction of the old set."""

    def __init__(self, volume: Volume, channel: IoChannel, old: Found, deadline: float) -> None:
        self._volume, self._channel, self._old, self._deadline = volume, channel, old, deadline

    def copy(self) -> Steps[Outcome]:
        """Copy the value to one of the sets that it belongs to. It stays at the old place as well."""
        return self._with_targets(self._copy_to)

    def clear(self) -> Steps[Outcome]:
        """Free the old slot, where the value is at its new place. GONE: done; TROUBLE: not now."""
        return self._with_targets(self._clear_if_on)

    def _with_targets(
        self, work: Callable[[SetTransaction, Sequence[CachedSet]], Steps[Outcome]]
    ) -> Steps[Outcome]:
        """Do `work` in a transaction of the old set, with the other sets that the value belongs to.

        All their directories are as on flash, and the old one names the value.
        """
        volume, channel, old, deadline = self._volume, self._channel, self._old, self._deadline
        with (
            volume.borrowed(old.entry.pseudonym) as sets,
            SetTransaction(volume, channel, old.cached) as change,
        ):
            if (yield from change.begin(deadline)) is not None:
                return Outcome.TROUBLE
            wanted = volume.write_targets(old.entry.pseudonym, sets)
            targets = [each for each in wanted if each is not old.cached]
            if not targets or (yield from volume.load(channel, targets, deadline)) is not None:
                return Outcome.TROUBLE
            if not is_named(old):
                return Outcome.GONE
            return (yield from work(change, targets))

    def _copy_to(self, change: SetTransaction, targets: Sequence[CachedSet]) -> Steps[Outcome]:
        volume = self._volume
        with self._verifier(self._old) as reader:
            cause = _expired(reader, (yield from reader.open()))
            if cause in (MissCause.EVICTED, MissCause.EXPIRED):
                # The slot may be another value's by now, which another agent is about to name: it is left
                # alone.
                return (yield from self._unname(change, reader, cause))
            if cause is not None:
                return Outcome.TROUBLE
            lacking = []
            for target in targets:
                if not (yield from self._is_there(target)):
                    lacking.append(target)
            if not lacking or (len(lacking) < len(targets) and volume.settings.copies == 1):
                return Outcome.COPIED
            return Outcome.TROUBLE if volume.refusal else (yield from self._copy(change, reader, lacking))

    def _clear_if_on(self, change: SetTransaction, targets: Sequence[CachedSet]) -> Steps[Outcome]:
        old = self._old
        if not any(self._found_in(target) for target in targets):
            # Evicted there, or another agent's image of the directory went over it: it is moved once more.
            return Outcome.TROUBLE
        with self._verifier(old) as reader:
            cause = _expired(reader, (yield from reader.open()))
            if cause in (MissCause.EVICTED, MissCause.EXPIRED):
                return (yield from self._unname(change, reader, cause))
        # Where the erase has no answer, flash may have the entry still: the next walk tries again.
        failure = yield from change.erase(old.cached, [old.slot], old.entry.pseudonym).end(self._deadline)
        return Outcome.GONE if failure is None else Outcome.TROUBLE

    def _verifier(self, found: Found) -> SlotVerifier:
        return SlotVerifier(self._volume, self._channel, found, self._deadline)

    def _found_in(self, target: CachedSet) -> Found | None:
        with target.guard:
            found = self._volume.find([target], self._old.entry.pseudonym)
        if not found or target.disproven.get(found[0].slot) == found[0].entry.generation:
            return None
        return found[0]

    def _is_there(self, target: CachedSet) -> Steps[bool]:
        """Whether the value lies in a set, every unit of it: the entry alone may be left by a crash."""
        found = self._found_in(target)
        if found is None:
            return False
        with self._verifier(found) as reader:
            return _expired(reader, (yield from reader.verify())) is None

    def _copy(
        self, of_old: SetTransaction, reader: SlotVerifier, lacking: Sequence[CachedSet]
    ) -> Steps[Outcome]:
        """Copy the value to the emptier set, into a slot without a live value; trusted namespaces first."""
        volume, channel, deadline = self._volume, self._channel, self._deadline
        best = best_choice(lacking, channel, reader.entry.pseudonym, volume.holds.held)
        if best is None or is_eviction(best[1]) or not reserve(volume, channel, *best):
            return Outcome.NO_ROOM
        target, slot = best[0], best[1].slot
        try:
            codec = volume.sealing_codec(channel.now())
            changes = bool(volume.settings.names_of)
            # A value that may be replaced meanwhile is not to be newer than what replaces it.
            generation = reader.entry.generation if changes else new_generation(channel.wall())
            copy = SlotCopy(reader, target, slot, codec, generation)
            if (yield from copy.write()) is not None:
                return Outcome.TROUBLE
            with SetTransaction(volume, channel, target) as change:
                until = (
                    deadline if _place(self._old.cached) < _place(target) else channel.now() + BUSY_SECONDS
                )
                if (yield from change.begin(deadline, reload=changes, lock_until=until)) is not None:
                    return Outcome.TROUBLE
                if changes and (yield from self._is_replaced(of_old, target)):
                    return Outcome.TROUBLE
                if target.directory is None or not volume.takes(codec, channel.now()):
                    return Outcome.TROUBLE
                if (yield from change.name(target, slot, copy.entry, deadline)) is not None:
                    return Outcome.TROUBLE
                if (yield from volume.vouches(channel, target.namespace, codec, deadline)) is None:
                    return Outcome.COPIED
                # Its key was dropped: the value stays where it is. Killed before this is written, the next
                # walk finds that the copy does not open, and copies once more.
                until = channel.now() + UNNAME_SECONDS
                if not (yield from change.clear(Found(target, slot, copy.entry), until, is_ours=True)):
                    volume.in_doubt_writes.write_failed(target, slot, copy.entry, channel.now())
                return Outcome.TROUBLE
        finally:
            release(volume, target, slot)

    def _is_replaced(self, of_old: SetTransaction, target: CachedSet) -> Steps[bool]:
        """Whether another agent may have stored another value of the key since the old set was read."""
        trouble = yield from of_old.load(self._deadline)
        return trouble is not None or not is_named(self._old) or self._found_in(target) is not None

    def _unname(self, change: SetTransaction, reader: SlotVerifier, cause: MissCause) -> Steps[Outcome]:
        """Clear an entry that led to nothing, if flash still has it, and leave its slot as it is.

        A second look must say the same: a drive may bring another slot's bytes once.
        """
        if (yield from change.load(self._deadline)) is not None:
            return Outcome.TROUBLE
        if not is_named(self._old):
            return Outcome.GONE
        if _expired(reader, (yield from reader.open())) is not cause:
            return Outcome.TROUBLE
        cleared = yield from change.clear(self._old, self._deadline)
        return Outcome.GONE if cleared else Outcome.TROUBLE


def _place(cached: CachedSet) -> SetPlace:
    return cached.namespace, cached.offset


def _expired(reader: SlotVerifier, cause: MissCause | None) -> MissCause | None:
    """EXPIRED where the header that was opened says so, else `cause`."""
    opened = reader.opened
    if opened is not None and opened.expiry and opened.expiry <= reader.channel.wall():
        return MissCause.EXPIRED
    return cause
