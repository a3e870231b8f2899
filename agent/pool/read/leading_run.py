"""How long the leading run of some keys is that a volume can serve now, and from where: for routers.

A router asks about prompts that it may never send here. So a question is no use: no directory is remembered
for longer, nothing is prestaged, no get is counted. What remembered directories name is found without a
lock and without I/O. The answer is a hint, as all that directories say.
"""

from collections.abc import Sequence
from typing import Final

from agent.pool.counters import MissCause
from agent.pool.read.prestage_cache import PrestageCache
from agent.pool.volume.volume import Volume


class LeadingRun:
    """What is known of the leading run of some keys. Bytes are those of values.

    A value without a known length counts as the largest that the volume takes.
    """

    __slots__ = ("flash_bytes", "hole", "in_memory", "memory_bytes", "on_flash")

    def __init__(self) -> None:
        self.in_memory = 0
        """Keys of the run whose values wait in the agent's memory."""
        self.memory_bytes = 0
        self.on_flash = 0
        self.flash_bytes = 0
        self.hole: MissCause | None = None
        """Why the first key behind the run cannot be served; None where the run has all keys."""

    @property
    def length(self) -> int:
        return self.in_memory + self.on_flash

    def has_ended(self) -> bool:
        """Whether a hole was found. A call, because steps in between may find one."""
        return self.hole is not None

    def add_from_memory(self, size: int) -> None:
        self.in_memory += 1
        self.memory_bytes += size

    def add_from_flash(self, size: int, count: int = 1) -> None:
        """Of `count` values, each of `size` bytes."""
        self.on_flash += count
        self.flash_bytes += size * count


def places_of(volume: Volume, pseudonyms: Sequence[bytes]) -> list[list[tuple[int, int]]]:
    """The sets of many keys, each as namespace and byte offset, for a look at what is remembered."""
    if volume.old_placement is None:
        return volume.placement.places(pseudonyms, volume.settings.set_bytes)
    return [
        [(place.namespace, volume.set_offset(place)) for place in volume.places(pseudonym)]
        for pseudonym in pseudonyms
    ]


def extend_run(
    run: LeadingRun,
    volume: Volume,
    prestage: PrestageCache | None,
    pseudonyms: Sequence[bytes],
    places: Sequence[list[tuple[int, int]]],
    start: int,
    end: int,
    wall: float,
    away: frozenset[int],
) -> int:
    """Go on with the run over `pseudonyms[start:end]`, as far as remembered directories name them. How many
    it grew by.

    `places`: those of the pseudonyms (`places_of`). `away`: namespaces that cannot be read now; a
    value that lies there alone is the hole. `wall`: seconds since the epoch.
    """
    volume_id: Final = volume.settings.volume_id
    staged = prestage if prestage is not None and prestage.bytes_held else None
    for at in range(start, end):
        pseudonym = pseudonyms[at]
        length, is_away = -1, False
        for place in places[at]:
            cached = volume.cache.look(place)
            directory = None if cached is None else cached.directory
            hint = None if directory is None else directory.hint(pseudonym)
            if hint is None or (hint[1] and hint[1] <= wall):
                continue
            length, is_away = hint[0], place[0] in away
            if not is_away:
                break
        if length < 0:
            return at - start
        if staged is not None and staged.holds(volume_id, pseudonym):
            run.add_from_memory(length)
        elif is_away:
            run.hole = MissCause.ENCLOSURE_DOWN
            return at - start
        else:
            run.add_from_flash(length)
    return end - start
