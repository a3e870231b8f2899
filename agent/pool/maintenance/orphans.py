"""Entries of blocks that no file has and that do not open: they are taken out, so that a rotation ends.

Two agents that wrote one directory may have brought back the entry of a block that was deleted; its slot
holds zeros by then, or another block. Such an entry takes a slot, and says of it that it is under the earlier
key, for ever. Only whoever keeps the names of the files can tell it from a block that is damaged, which stays
for a scrub and its file's reader to find; and only by the newest pool map is it certain that it stays shut.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

from agent.pool.counters import MissCause
from agent.pool.maintenance.rekey import MAY_COME_BACK, Unopened, open_whole
from agent.pool.maintenance.scrub import is_young
from agent.pool.steps import Acquire, Lanes, Steps, wait_for
from agent.pool.volume.volume import Volume
from agent.pool.volume.writable_directory import load_writable

Unnamed: TypeAlias = Callable[[Sequence[bytes]], Sequence[bytes]]
"""Of some identifiers of blocks those that no file has, and no deletion waits for."""


def clear_leftovers(volume: Volume, lanes: Lanes, found: Sequence[Unopened], unnamed: Unnamed) -> Steps[int]:
    """Free the slots of those that no file has and that still do not open; how many."""
    wall = lanes.wall()
    blocks = {
        volume.placement.key_of(each.entry.pseudonym): each
        for each in found
        if not is_young(volume, each.entry, wall)
    }
    cleared = 0
    for block in unnamed(list(blocks)) if blocks else ():
        if volume.erased:
            break
        cleared += yield from _clear(volume, lanes, blocks[block])
    return cleared


def _clear(volume: Volume, lanes: Lanes, leftover: Unopened) -> Steps[bool]:
    place, slot, entry = leftover
    deadline = lanes.now() + volume.timing.write_deadline
    cached = volume.cache.borrow(*place, volume.occupancy)
    try:
        if not (yield Acquire(cached.writer, deadline)):
            return False
        try:
            if (yield from load_writable(volume, lanes, [cached], deadline)) is not None:
                return False
            if not (yield from _certainly_does_not_open(volume, lanes, leftover, deadline)):
                return False
            with cached.guard:
                directory = cached.directory
                present = directory.entry(slot) if directory is not None else None
                if directory is None or present is None or slot in cached.reserved:
                    return False
                if (present.pseudonym, present.generation) != (entry.pseudonym, entry.generation):
                    return False
                directory.clear(slot)
                image = directory.image()
            write = lanes.write(cached.namespace, cached.offset, [image])
            return (yield from wait_for(lanes, write, deadline)) is None
        finally:
            cached.end_write()
    finally:
        volume.give_back_sets([cached])


def _certainly_does_not_open(
    volume: Volume, lanes: Lanes, leftover: Unopened, deadline: float
) -> Steps[bool]:
    """Whether the slot does not open between two looks that found the map of this agent the newest."""
    before = yield from _map_in_force(volume, lanes, deadline)
    if before is None:
        return False
    place, slot, entry = leftover
    value = bytearray(volume.codec.padded(min(entry.length, volume.settings.value_bytes)))
    cached = volume.cache.borrow(*place, volume.occupancy)
    try:
        opened = yield from open_whole(volume, lanes, cached, slot, entry, memoryview(value))
    finally:
        value[:] = bytes(len(value))
        volume.give_back_sets([cached])
    if not isinstance(opened, MissCause) or opened in MAY_COME_BACK:
        return False
    return (yield from _map_in_force(volume, lanes, deadline)) == before


def _map_in_force(volume: Volume, lanes: Lanes, deadline: float) -> Steps[int | None]:
    return 0 if volume.in_force is None else (yield from volume.in_force(lanes, deadline))
