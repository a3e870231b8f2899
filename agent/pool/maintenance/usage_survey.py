"""How many slots the tenants with a quota have taken: a walk over their directories that never ends.

What an agent remembers of directories is a part of them, and other agents change them. So upkeep reads a
batch of directories at a time, of all volumes in turn: those that are remembered are refreshed, of the others
the number of taken slots is noted and nothing else is kept.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from agent.pool.format.directory import DIRECTORY_BYTES, taken_in
from agent.pool.format.occupancy import SetPlace
from agent.pool.steps import Lanes, Pending, Steps, wait_for
from agent.pool.volume.volume import LOADS_IN_FLIGHT, Volume

SETS_PER_LOOK = 128
"""Half a MiB of directories, 8,192 slots."""
IO_SECONDS = 1.0


class Census:
    """Where the walk is. One thread walks."""

    def __init__(self) -> None:
        self.passes = 0
        """How often all sets were looked at."""
        self._rest: Iterator[tuple[Volume, SetPlace]] = iter(())
        self._volumes: Sequence[Volume] = ()

    def look(self, lanes: Lanes, volumes: Sequence[Volume]) -> Steps[None]:
        """Look at the next sets of `volumes`. What could not be read keeps the number that it had."""
        if volumes != self._volumes:
            self._volumes, self._rest, self.passes = volumes, _places(volumes), 0
        batch = list(itertools.islice(self._rest, SETS_PER_LOOK))
        if len(batch) < SETS_PER_LOOK:
            self._rest = _places(volumes)
            self.passes += 1
        for start in range(0, len(batch), LOADS_IN_FLIGHT):
            yield from _look_at(lanes, batch[start : start + LOADS_IN_FLIGHT])


def _places(volumes: Sequence[Volume]) -> Iterator[tuple[Volume, SetPlace]]:
    for volume in volumes:
        for extent in volume.settings.extents:
            for number in range(extent.sets):
                yield volume, (extent.namespace, extent.offset + number * volume.settings.set_bytes)


def _look_at(lanes: Lanes, batch: list[tuple[Volume, SetPlace]]) -> Steps[None]:
    unknown: list[tuple[Volume, SetPlace, memoryview, Pending]] = []
    for volume, place in batch:
        cached = volume.cache.borrow_remembered(place)
        if cached is None:
            block = memoryview(bytearray(DIRECTORY_BYTES))
            unknown.append((volume, place, block, lanes.read(*place, block)))
            continue
        try:
            yield from volume.load(lanes, [cached], lanes.now() + IO_SECONDS)
        finally:
            volume.give_back_sets([cached])
    for volume, place, block, pending in unknown:
        if (yield from wait_for(lanes, pending, lanes.now() + IO_SECONDS)) is None:
            volume.cache.note_forgotten(place, taken_in(block), volume.occupancy)
