"""Which of the entries that name a key is read, and in which order; for a volume that keeps two copies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from agent.pool.counters import MissCause
from agent.pool.steps import Lanes
from agent.pool.volume.media_errors import SlotAt
from agent.pool.volume.volume import Found, Volume

DOUBTFUL: Final = (MissCause.EVICTED, MissCause.CORRUPT, MissCause.WRONG_KEY)
"""Causes that say that the entry was wrong, or the slot is; anything else says nothing of either."""


def in_turn(volume: Volume, lanes: Lanes, found: list[Found]) -> list[tuple[Found, Found | None]]:
    """What is to be tried, one after the other, and with each the copy that may be asked beside it."""
    if volume.hedge is None or len(found) < 2:
        return [(each, None) for each in found]
    # What is trusted first; among those of one trust the newest, which `find` has put first.
    found = sorted(found, key=lambda each: not lanes.trusts(each.cached.namespace))
    first, other = found[0], found[1]
    same = first.entry.generation == other.entry.generation
    spare = other if same and first.cached.namespace != other.cached.namespace else None
    return [(first, spare), *((each, None) for each in found[1:])]


def doubt(volume: Volume, tried: Sequence[tuple[Found, MissCause]]) -> None:
    """Remember what entries led to nothing, and let somebody look into the slots that are damaged."""
    for found, cause in tried:
        if cause in DOUBTFUL:
            found.cached.disprove(found.slot, found.entry.generation)
        if cause is MissCause.CORRUPT:
            volume.damage.report(SlotAt(found.cached.namespace, found.cached.offset, found.slot))


def the_other_served(volume: Volume, lanes: Lanes, tried: Sequence[tuple[Found, MissCause]]) -> None:
    """A get was served after what was tried before was not: by the other copy, mostly."""
    if tried and volume.hedge is not None:
        lanes.tally(volume.settings.name).other_copy_reads += 1
        doubt(volume, tried)
