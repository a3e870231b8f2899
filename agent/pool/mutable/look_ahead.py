"""Look ahead: the directories that a key may lie in, read a while before its value is replaced.

A replace reads these directories with their writers held, which is a round trip before anything is written.
Where the operator says that no other agent writes (`directory_fresh`), a read of a moment ago says the same,
and it can go beside other I/O of the caller. So the caller looks, and hands what it saw to `replace`. What
was read within the first half of that time is not read again: the look then holds for the other half.

Other operations of this agent may change the directories between the two. An entry of the key that they bring
or take away is seen in what is remembered; then the look holds no longer. The same goes for a key that left
its ghost: a put that takes its slot, and fails, leaves the entry on flash alone. A directory whose write
failed counts as not read. Any other entry that flash alone has comes from a write without an answer, and then
replace refuses the key (in_doubt_writes.py).
"""

from collections.abc import Sequence
from typing import Final

from agent.pool.steps import IoChannel, Steps
from agent.pool.volume.directory_cache import CachedSet
from agent.pool.volume.volume import Volume

Named = tuple[tuple[int, int], ...]
"""Slot and generation of each entry of the key in one set."""


class Look:
    """What directories said of a key. It keeps none of them remembered."""

    __slots__ = ("_named", "_pseudonym", "_sets")

    def __init__(self, pseudonym: bytes, sets: Sequence[CachedSet]) -> None:
        self._pseudonym: Final = pseudonym
        self._sets: Final = tuple(sets)
        self._named: Final = [_named_in(cached, pseudonym) for cached in sets]

    def holds(self, volume: Volume, channel: IoChannel, pseudonym: bytes, sets: Sequence[CachedSet]) -> bool:
        """Whether reading `sets`, those of a key, whose writers are held, would show nothing else."""
        if pseudonym != self._pseudonym or len(sets) != len(self._sets):
            return False
        since = channel.now() - volume.timing.directory_fresh
        for cached, seen, named in zip(sets, self._sets, self._named, strict=True):
            if cached is not seen or not _is_known(cached, since):
                return False
            if _has_ghost(cached, pseudonym) or _named_in(cached, pseudonym) != named:
                return False
        return True


def look_ahead(volume: Volume, channel: IoChannel, key: bytes, deadline: float) -> Steps[Look | None]:
    """Read the directories of a key. None where nothing may be believed: other agents write, G4 is below, a
    directory did not come whole, or a write of this agent crossed the read."""
    fresh = volume.timing.directory_fresh
    if not fresh or volume.below is not None or volume.erased:
        return None
    pseudonym = volume.placement.pseudonym(key)
    with volume.borrowed(pseudonym) as sets:
        since = channel.now() - fresh / 2
        stale = [cached for cached in sets if not _is_known(cached, since)]
        if stale:
            yield from volume.load(channel, stale, deadline)
        if not all(_is_known(cached, since) for cached in sets):
            return None
        return Look(pseudonym, sets)


def _is_known(cached: CachedSet, since: float) -> bool:
    """Whether a read that went out later than `since` brought the directory, whole."""
    if cached.directory is None or cached.in_doubt or cached.fault is not None:
        return False
    return cached.asked_at > since


def _has_ghost(cached: CachedSet, pseudonym: bytes) -> bool:
    directory = cached.directory
    return directory is not None and directory.has_ghost(pseudonym)


def _named_in(cached: CachedSet, pseudonym: bytes) -> Named:
    with cached.guard:
        directory = cached.directory
        if directory is None:
            return ()
        entries = [(slot, directory.entry(slot)) for slot in directory.find_all(pseudonym)]
    return tuple((slot, entry.generation) for slot, entry in entries if entry is not None)
