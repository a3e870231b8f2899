"""Uses that other processes of the agent have noted (agent/pool/volume/uses.py), counted in directories."""

from collections.abc import Iterable, Sequence
from typing import Final

from agent.pool.steps import IoChannel, Steps
from agent.pool.volume.uses import Use
from agent.pool.volume.volume import Volume

COUNTED_MAX: Final = 16
"""The most uses that one hand-over counts for one entry."""
LOADED_MAX: Final = 256
"""Directories that are read for one hand-over, because they are not remembered."""
LOAD_SECONDS: Final = 1.0


def count_uses(volumes: Iterable[Volume], channel: IoChannel, uses: Sequence[Use]) -> Steps[None]:
    """Count them in the remembered directories; some that are not remembered are read for that."""
    served, loads = [each for each in volumes if not each.erased], 0
    for place, of_set in _by_set(uses).items():
        volume = _volume_at(served, *place)
        if volume is None:
            continue
        with volume.borrowed_at(place) as (cached,):
            if cached.directory is None and loads < LOADED_MAX:
                loads += 1
                yield from volume.load(channel, [cached], channel.now() + LOAD_SECONDS)
            with cached.guard:
                directory = cached.directory
                if directory is None:
                    continue
                for use in of_set:
                    entry = directory.entry(use.slot)
                    if entry is not None and entry.generation == use.generation:
                        for _ in range(min(use.times, COUNTED_MAX)):
                            directory.touch(use.slot, int(channel.wall() * 1e6))


def _by_set(uses: Sequence[Use]) -> dict[tuple[int, int], list[Use]]:
    found: dict[tuple[int, int], list[Use]] = {}
    for use in uses:
        found.setdefault((use.namespace, use.offset), []).append(use)
    return found


def _volume_at(volumes: Iterable[Volume], namespace: int, offset: int) -> Volume | None:
    """Whose directory lies there."""
    for volume in volumes:
        settings = volume.settings
        for extent in settings.extents:
            end = extent.offset + extent.sets * settings.set_bytes
            if extent.namespace == namespace and extent.offset <= offset < end:
                return volume
    return None
