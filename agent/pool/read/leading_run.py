"""How long the leading run of some keys is that a volume can serve now, and from where: for routers.

A router asks about prompts that it may never send here. So a question is no use: no directory is remembered
for longer, nothing is prestaged, no get is counted. What remembered directories name is found without a
lock and without I/O. The answer is a hint, as all that directories say.
"""

from collections.abc import Sequence
from typing import Final

from agent.pool.counters import MissCause
from agent.pool.format.directory import KEY_BYTES, Directory
from agent.pool.format.mark_block import located
from agent.pool.format.sealed_slot import HEADER_BYTES
from agent.pool.format.spill_mark import bytes_to_ask
from agent.pool.read.prestage_cache import PrestageCache
from agent.pool.volume.directory_cache import CachedSet
from agent.pool.volume.placement import Rank
from agent.pool.volume.volume import Volume

_IS_AWAY: Final = -2
LOOKED_AT_TOGETHER: Final = 128
"""Keys whose sets are looked for together. Where a run ends early, what is beyond its end was for nothing."""


class LeadingRun:
    """What is known of the leading run of some keys. Bytes are those of values.

    A value without a known length counts as the largest that the volume takes, and one in G4 as the longest
    that its mark may stand for: up to a sixteenth of a slot more than it has.
    """

    __slots__ = ("flash_bytes", "g4_bytes", "hole", "in_g4", "in_memory", "memory_bytes", "on_flash")

    def __init__(self) -> None:
        self.in_memory = 0
        """Keys of the run whose values wait in the agent's memory."""
        self.memory_bytes = 0
        self.on_flash = 0
        self.flash_bytes = 0
        self.in_g4 = 0
        """Keys whose values marks name, and no entry."""
        self.g4_bytes = 0
        self.hole: MissCause | None = None
        """Why the first key behind the run cannot be served; None where the run has all keys."""

    @property
    def length(self) -> int:
        return self.in_memory + self.on_flash + self.in_g4

    @property
    def value_bytes(self) -> int:
        return self.memory_bytes + self.flash_bytes + self.g4_bytes

    def has_ended(self) -> bool:
        """Whether a hole was found. A call, because steps in between may find one."""
        return self.hole is not None

    def add_from_memory(self, size: int) -> None:
        self.in_memory += 1
        self.memory_bytes += size

    def add_from_flash(self, size: int, count: int = 1) -> None:
        """Add a run of `count` values on flash, each of `size` bytes."""
        self.on_flash += count
        self.flash_bytes += size * count


def extend_run(
    run: LeadingRun,
    volume: Volume,
    prestage: PrestageCache | None,
    pseudonyms: bytes,
    places: Sequence[Rank],
    start: int,
    end: int,
    wall: float,
    away: frozenset[int],
    now: float = -1.0,
) -> int:
    """Go on with the run over the keys from number `start` to `end` of `pseudonyms`, as far as remembered
    directories name them. How many it grew by.

    `places`: those of the pseudonyms (`Volume.places_of_many`). `away`: namespaces that cannot be read now; a
    value that lies there alone is the hole. `wall`: seconds since the epoch. `now`, of the channel's clock:
    the directories are as new as the question, so a mark in them counts as well; below zero: no mark does.
    """
    cache: Final = volume.cache
    below = volume.below if now >= 0.0 else None
    asks_below: Final = below is not None and below.pays()
    staged = prestage if prestage is not None and prestage.bytes_held else None
    remembered: list[list[CachedSet | None]] = []
    on_flash = flash_bytes = 0
    grown = first = 0
    while start + grown < end:
        at = (start + grown) * KEY_BYTES
        if grown % LOOKED_AT_TOGETHER == 0:  # one call for the sets of each rank
            first, few = grown, slice(start + grown, min(start + grown + LOOKED_AT_TOGETHER, end))
            remembered = [cache.look(namespaces[few], offsets[few]) for namespaces, offsets in places]
        pseudonym = pseudonyms[at : at + KEY_BYTES]
        length, is_away = -1, False
        named_by: Directory | None = None
        for sets in remembered:
            cached = sets[grown - first]
            directory = None if cached is None else cached.directory
            if cached is None or directory is None:
                continue
            found = directory.find_length(pseudonym, wall)
            if found < 0:
                continue
            length, named_by, is_away = found, directory, bool(away) and cached.namespace in away
            if not is_away:
                break
        if named_by is None:
            if not asks_below:
                break
            of_key = [sets[grown - first] for sets in remembered]
            size = _size_below(volume, of_key, pseudonym, now, away)
            if size < 0:
                if size == _IS_AWAY:
                    run.hole = MissCause.ENCLOSURE_DOWN
                break
            run.in_g4 += 1
            run.g4_bytes += size
            grown += 1
            continue
        if staged is not None and _waits(staged, volume, pseudonym, named_by):
            run.add_from_memory(length)
        elif is_away:
            run.hole = MissCause.ENCLOSURE_DOWN
            break
        else:
            on_flash += 1
            flash_bytes += length
        grown += 1
    run.on_flash += on_flash
    run.flash_bytes += flash_bytes
    return grown


def _size_below(
    volume: Volume,
    sets: Sequence[CachedSet | None],
    pseudonym: bytes,
    now: float,
    away: frozenset[int],
) -> int:
    """The bytes that the value of a key has in G4 at the most. _IS_AWAY: the mark lies in a namespace that
    cannot be read now, and a get follows none that it did not read. -1: there is none."""
    size = -1
    for cached, place in volume.live_marks([each for each in sets if each is not None], pseudonym, now):
        if cached.namespace in away:
            size = _IS_AWAY
        elif cached.directory is not None:
            settings = volume.settings
            item, _ = located(cached.directory.mark(place), place)
            return min(settings.value_bytes, bytes_to_ask(item, settings.slot_bytes) - HEADER_BYTES)
    return size


def _waits(prestage: PrestageCache, volume: Volume, pseudonym: bytes, directory: Directory) -> bool:
    """Whether the value waits in memory: that write of the key which the directory names."""
    generation = prestage.generation(volume.settings.volume_id, pseudonym)
    if generation is None:
        return False
    slot = directory.find(pseudonym)
    entry = None if slot is None else directory.entry(slot)
    return entry is not None and entry.generation == generation
