"""The marks of a key's older value in G4, taken out before a newer value is acknowledged.

Else the older one comes up once the newer one is evicted, expires, or is not stored after all. For volumes
with G4 below alone: without it no mark is followed here."""

from typing import Final

from agent.pool.counters import MissCause
from agent.pool.steps import IoChannel, Steps
from agent.pool.volume.directory_cache import CachedSet
from agent.pool.volume.volume import Volume
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

    What is known of a set is enough if it is of just now, as after the lookup that missed: then nothing is
    read."""
    with volume.borrowed(pseudonym) as sets:
        others = [cached for cached in sets if cached is not but]
        stale = [
            each
            for each in others
            if each.directory is None or each.fault or not volume.is_fresh(each, channel, PUT_FRESH_SECONDS)
        ]
        if stale:
            trouble = yield from volume.load(channel, stale, deadline)
            if trouble is not None:
                return trouble
        named = dict.fromkeys(cached for cached, _ in volume.marks(others, pseudonym))
        # An entry that came damaged may hide a mark.
        marked = [cached for cached in others if cached in named or cached.in_doubt]
        if not marked:
            return None
        with SetTransaction(volume, channel, *marked) as change:
            doubt = yield from change.begin(deadline)
            for cached in marked:
                if doubt is None:
                    _, doubt = yield from change.unmark(cached, pseudonym, deadline)
            return doubt
