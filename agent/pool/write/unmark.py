"""The marks of a key's older value in G4, taken out before a newer value is acknowledged.

Else the older one comes up once the newer one is evicted, expires, or is not stored after all. For volumes
with G4 below alone: without it no mark is followed here."""

from typing import Final

from agent.pool.counters import MissCause
from agent.pool.steps import IoChannel, Steps
from agent.pool.volume.directory_cache import CachedSet
from agent.pool.volume.volume import Found, Volume
from agent.pool.write.set_transaction import SetTransaction

PUT_FRESH_SECONDS: Final = 0.02
"""A put right after the lookup that missed does not read the directories again. What another agent wrote
into the same set in between may be lost to it: a hit, in the worst case. With G4 below, a put that took
longer reads its directory again before it writes that."""


def unmark(
    volume: Volume, channel: IoChannel, pseudonym: bytes, deadline: float, *, but: CachedSet | None = None
) -> Steps[MissCause | None]:
    """Take out the marks that a key may have left, in all of its sets `but` one. None: flash has none;
    otherwise why it may have some.

    What is known of a set is enough if it was read just now, as by the lookup that missed."""
    with volume.borrowed(pseudonym) as sets:
        others = [cached for cached in sets if cached is not but]
        stale = [each for each in others if each.fault or not volume.is_recent(each, channel)]
        if stale:
            trouble = yield from volume.load(channel, stale, deadline)
            if trouble is not None:
                return trouble
        named = dict.fromkeys(cached for cached, _ in volume.marks(others, pseudonym))
        # An entry that came damaged may hide a mark, and a read that a write of ours crossed says nothing.
        marked = [
            cached
            for cached in others
            if cached in named or cached.in_doubt or not volume.is_recent(cached, channel)
        ]
        if not marked:
            return None
        with SetTransaction(volume, channel, *marked) as change:
            doubt = yield from change.begin(deadline)
            for cached in marked:
                if doubt is None:
                    _, doubt = yield from change.unmark(cached, pseudonym, deadline)
            return doubt


def look_again(volume: Volume, channel: IoChannel, pseudonym: bytes, deadline: float) -> Steps[None]:
    """Take out again what the image of another agent brought back of a key: the marks that this agent took
    out (agent/pool/volume/removed_marks.py), and entries that its delete took out. Such an entry leads to
    nothing; its eviction would leave a mark."""
    removed = volume.removed_marks
    with volume.borrowed(pseudonym) as sets:
        yield from volume.load(channel, sets, deadline)
        back = [cached for cached in sets if _came_back(volume, channel, cached, pseudonym)]
        if not back:
            return
        with SetTransaction(volume, channel, *back) as change:
            if (yield from change.begin(deadline)) is not None:
                return  # The next look is for that.
            for cached in back:
                found = _came_back(volume, channel, cached, pseudonym)
                slots = [each for each in found if isinstance(each, int)]
                if slots:
                    removed.found_again += len(slots)
                    yield from change.unmark_at(cached, pseudonym, slots, deadline)
                for entry in found:
                    if isinstance(entry, Found):
                        yield from change.clear(entry, deadline)


def _came_back(volume: Volume, channel: IoChannel, cached: CachedSet, pseudonym: bytes) -> list[int | Found]:
    """The slots with a mark that was taken out, and entries that a delete took out."""
    removed, now = volume.removed_marks, channel.now()
    found: list[int | Found] = []
    with cached.guard:
        directory = cached.directory
        if directory is None or directory.in_doubt:
            return []
        for slot in directory.marks(pseudonym):
            if removed.is_removed(pseudonym, directory.mark(slot), now):
                found.append(slot)
        for slot in directory.find_all(pseudonym):
            entry = directory.entry(slot)
            if entry is not None and removed.was_erased(pseudonym, entry.generation):
                found.append(Found(cached, slot, entry))
    return found
