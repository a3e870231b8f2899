"""Which of the entries that name a key is read, and in which order; for a volume that keeps two copies."""

from collections.abc import Callable, Sequence
from typing import Final

from agent.pool.counters import MissCause
from agent.pool.late_answers import has_arrived
from agent.pool.steps import IoChannel, Pending, Steps, Wait
from agent.pool.volume.hedging import SLICE, Hedge
from agent.pool.volume.media_errors import SlotAt
from agent.pool.volume.volume import Found, Volume

DOUBTFUL: Final = (MissCause.EVICTED, MissCause.CORRUPT, MissCause.WRONG_KEY)
"""Causes that say that the entry was wrong, or the slot is; another cause says nothing of either."""


def in_turn(volume: Volume, channel: IoChannel, found: list[Found]) -> list[tuple[Found, Found | None]]:
    """The entries to try, one after the other, and with each the copy that may be asked beside it."""
    if volume.hedge is None or len(found) < 2:
        return [(each, None) for each in found]
    # A trusted namespace first, then the newest generation, and of two copies alike the one of this machine.
    # An older value on this machine is one that a put elsewhere has replaced: never ahead of the newer one.
    found = sorted(found, key=lambda each: _distance(channel, each))
    first, other = found[0], found[1]
    same = first.entry.generation == other.entry.generation
    spare = other if same and first.cached.namespace != other.cached.namespace else None
    return [(first, spare), *((each, None) for each in found[1:])]


def _distance(channel: IoChannel, found: Found) -> tuple[bool, int, bool]:
    """What is read first has the least of it."""
    namespace = found.cached.namespace
    return not channel.trusts(namespace), -found.entry.generation, not channel.is_local(namespace)


def doubt(volume: Volume, tried: Sequence[tuple[Found, MissCause]]) -> None:
    """Remember the entries that led to nothing, and report the slots that are damaged."""
    for found, cause in tried:
        if cause in DOUBTFUL:
            found.cached.disprove(found.slot, found.entry.generation)
        if cause is MissCause.CORRUPT:
            volume.media_errors.report(SlotAt(found.cached.namespace, found.cached.offset, found.slot))


def the_other_served(volume: Volume, channel: IoChannel, tried: Sequence[tuple[Found, MissCause]]) -> None:
    """A get was served after the entries in `tried` failed: by the other copy, mostly."""
    if tried and volume.hedge is not None:
        channel.tally(volume.settings.name).other_copy_reads += 1
        doubt(volume, tried)


def race(
    channel: IoChannel,
    hedge: Hedge,
    first: Pending,
    ask_other: Callable[[], tuple[Pending, int]],
    enough: int,
    deadline: float,
) -> Steps[bool]:
    """Wait until one of two reads has come. True: the other one, which `ask_other` started; it says how many
    bytes of it are enough. False: the first; or neither in time; or the other was not asked, and the caller
    waits on. The caller abandons the read that it does not use.
    """
    began = channel.now()
    if has_arrived(first, enough) or (yield Wait(first, min(deadline, began + hedge.delay()), enough)):
        hedge.took(channel.now() - began)
        return False
    if channel.now() >= deadline or not hedge.may_ask():
        return False
    second, enough_of_second = ask_other()
    running = [(second, enough_of_second), (first, enough)]
    while running and channel.now() < deadline:
        for pending, wanted in tuple(running):
            if not has_arrived(pending, wanted):
                yield Wait(pending, min(deadline, channel.now() + SLICE), wanted)
            if not has_arrived(pending, wanted):
                continue
            if pending.fault is None:
                hedge.took(channel.now() - began)
                return pending is second
            running.remove((pending, wanted))
    return False
