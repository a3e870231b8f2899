"""Delete and pin: changes of entries that move no value."""

from typing import Final

from agent.pool.counters import MissCause
from agent.pool.errors import PutRefused
from agent.pool.format.directory import SLOTS_PER_SET, TIME_MAX, is_quarantined
from agent.pool.steps import IoChannel, Steps
from agent.pool.volume.volume import Volume
from agent.pool.write.set_transaction import SetTransaction, SlotErase

PINNED_SLOTS_MAX: Final = SLOTS_PER_SET // 2
"""Of one set. Pins must not be able to stop a volume from taking new values."""

NOT_REACHED: Final = "an enclosure that may hold the key does not answer"
WRITTEN_ALL_THE_TIME: Final = "the directory is being written all the time"
NOT_DELETED: Final = "the enclosure did not delete it"
MAY_LAND: Final = "a write of the key was not answered and may still land"


def delete(volume: Volume, channel: IoChannel, key: bytes, deadline: float) -> Steps[bool]:
    """Remove a key everywhere it may lie. True where it was there.

    Its header is zeroed as well (set_transaction.py). Raises PutRefused where a candidate enclosure does not
    answer, its directory does not prove itself whole, or a write of the key may still land: then the key may
    come back, and nobody may be told that it is gone. Nothing is removed then: the enclosure that is away may
    hold an older value of the key.
    """
    return (yield from _delete(volume, channel, key, deadline, stored_once=False))


def delete_block(volume: Volume, channel: IoChannel, key: bytes, deadline: float) -> Steps[bool]:
    """As `delete`, of a key that was put once at most and never will be again: a block of a file.

    Where a candidate does not answer, the value is removed from the others all the same. A value that was
    there was the only one, unless values are moving. PutRefused, as above, where there may be more.
    """
    return (yield from _delete(volume, channel, key, deadline, stored_once=True))


def _delete(
    volume: Volume, channel: IoChannel, key: bytes, deadline: float, *, stored_once: bool
) -> Steps[bool]:
    pseudonym = volume.placement.pseudonym(key)
    with volume.borrowed(pseudonym) as sets, SetTransaction(volume, channel, *sets) as change:
        if not (yield from change.lock(deadline)):
            raise PutRefused(WRITTEN_ALL_THE_TIME, MissCause.LATE)
        if volume.in_doubt_writes.may_land(pseudonym, channel.now()):
            raise PutRefused(MAY_LAND, MissCause.LATE)
        # With one enclosure hung there has to be time left to remove it from the other.
        until = (channel.now() + deadline) / 2 if stored_once else deadline
        trouble = yield from change.load(until)
        if trouble is not None and not stored_once:
            raise PutRefused(NOT_REACHED, trouble)
        erased: list[SlotErase] = []
        marks: list[bytes] = []
        generations: list[int] = []
        faults = []
        was_below = False
        for cached in change.writable:
            directory = cached.directory
            assert directory is not None
            with cached.guard:
                slots, is_covered = directory.find_all(pseudonym), cached.covers(pseudonym)
            if slots:
                with cached.guard:
                    marks += directory.unmark(pseudonym)
                    generations += [entry.generation for entry in map(directory.entry, slots) if entry]
                erased.append(change.erase(cached, slots, pseudonym))
                continue
            marked, cause = yield from change.unmark(cached, pseudonym, deadline)
            was_below |= marked
            if is_covered and not marked:
                # It is the victim of a put that has not said so on flash, and may never do so: other
                # processes and agents serve it until then, and this one again after a put that fails.
                with cached.guard:
                    image = directory.image()
                cause = yield from change.write(cached, image, (), deadline)
            if cause is not None:
                faults.append(cause)
        for each in erased:
            cause = yield from each.end(deadline)
            if cause is not None:
                faults.append(cause)
        if faults:
            raise PutRefused(NOT_DELETED, faults[0])
        if volume.below is not None:
            volume.removed_marks.note(pseudonym, marks, channel.now(), generations=generations)
        channel.tally(volume.settings.name).deletes += bool(erased) or was_below
        if trouble is not None and (
            not (erased or was_below) or volume.old_placement is not None or volume.settings.copies > 1
        ):
            raise PutRefused(NOT_REACHED, trouble)
        return bool(erased) or was_below


def pin(volume: Volume, channel: IoChannel, key: bytes, until: int, deadline: float) -> Steps[bool | None]:
    """Keep a key from eviction until a time (seconds since the epoch; 0 unpins).

    True where it is pinned now, False where the set has its share of pins, None where no directory
    names the key. The pin is in force at once here; flash, and so other agents, learn of it with the
    next write of the directory.
    """
    pseudonym = volume.placement.pseudonym(key)
    with volume.borrowed(pseudonym) as sets:
        stale = [cached for cached in sets if not volume.is_fresh(cached, channel)]
        if stale and not volume.find(sets, pseudonym):
            yield from volume.load(channel, stale, deadline)
        found = volume.find(sets, pseudonym)
        if not found:
            return None
        cached, wall = found[0].cached, channel.wall()
        with cached.guard:
            directory = cached.directory
            if directory is None or directory.find(pseudonym) != found[0].slot:
                return None
            pinned = sum(
                (entry.pinned_until > wall or entry.pseudonym in volume.holds.held)
                and not is_quarantined(entry)
                for _, entry in directory
            )
            if until > wall and pinned >= PINNED_SLOTS_MAX and found[0].entry.pinned_until <= wall:
                return False
            directory.pin(found[0].slot, min(until, TIME_MAX))
        return True
