"""The walk that counts how many slots the tenants with a quota have taken. It never ends.

The directories that an agent remembers are only some, and other agents change them. So upkeep reads a batch
of directories at a time, of all volumes in turn. Remembered ones are refreshed; of the others the number of
taken slots is noted and nothing else is kept.
"""

import itertools
from collections.abc import Iterator, Sequence

from agent.pool.format.directory import DIRECTORY_BYTES, taken_in
from agent.pool.format.occupancy import SetPlace
from agent.pool.late_answers import wait_for
from agent.pool.steps import IoChannel, Pending, Steps
from agent.pool.volume.volume import LOADS_IN_FLIGHT, Volume, all_sets

SETS_PER_LOOK = 128
"""Half a MiB of directories, 8,192 slots."""
IO_SECONDS = 1.0


class Census:
    """The state of the walk, for one thread."""

    def __init__(self) -> None:
        self._rest: Iterator[tuple[Volume, SetPlace]] = iter(())
        self._volumes: Sequence[Volume] = ()

    def look(self, channel: IoChannel, volumes: Sequence[Volume]) -> Steps[None]:
        """Look at the next sets of `volumes`. A set that could not be read keeps its number."""
        if volumes != self._volumes:
            self._volumes, self._rest = volumes, all_sets(volumes)
        batch = list(itertools.islice(self._rest, SETS_PER_LOOK))
        if len(batch) < SETS_PER_LOOK:
            self._rest = all_sets(volumes)
        for start in range(0, len(batch), LOADS_IN_FLIGHT):
            yield from _look_at(channel, batch[start : start + LOADS_IN_FLIGHT])


def _look_at(channel: IoChannel, batch: list[tuple[Volume, SetPlace]]) -> Steps[None]:
    unknown: list[tuple[Volume, SetPlace, memoryview, Pending]] = []
    for volume, place in batch:
        cached = volume.cache.borrow_remembered(place)
        if cached is None:
            block = memoryview(bytearray(DIRECTORY_BYTES))
            unknown.append((volume, place, block, channel.read(*place, block)))
            continue
        try:
            yield from volume.load(channel, [cached], channel.now() + IO_SECONDS)
        finally:
            volume.give_back_sets([cached])
    for volume, place, block, pending in unknown:
        if (yield from wait_for(channel, pending, channel.now() + IO_SECONDS)) is None:
            volume.cache.note_forgotten(place, taken_in(block), volume.occupancy)
