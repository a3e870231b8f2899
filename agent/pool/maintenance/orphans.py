"""Orphans: entries of blocks that no file has and that do not open. They are cleared, so that a rotation
ends.

Two agents that wrote one directory may have brought back the entry of a deleted block; its slot holds zeros
by then, or another block. Such an entry says for ever that its slot is under the earlier key. Only the
database of file names can tell it from a damaged block, which stays for a scrub and its file's reader to
find. And only by the newest pool map is it certain that it stays shut.
"""

from collections.abc import Callable, Sequence
from typing import TypeAlias

from agent.pool.maintenance.rekey import IO_SECONDS, MAY_COME_BACK, Unopened
from agent.pool.maintenance.scrub import is_young
from agent.pool.steps import IoChannel, Steps
from agent.pool.volume.volume import Found, Volume
from agent.pool.write.set_transaction import SetTransaction
from agent.pool.write.slot_copy import SlotVerifier

Unnamed: TypeAlias = Callable[[Sequence[bytes]], Sequence[bytes]]
"""Of some block identifiers those that no file has and no deletion waits for."""


def clear_leftovers(
    volume: Volume, channel: IoChannel, found: Sequence[Unopened], unnamed: Unnamed
) -> Steps[int]:
    """Free the slots of blocks that no file has and that still do not open; how many."""
    wall = channel.wall()
    blocks = {
        volume.placement.key_of(each.entry.pseudonym): each
        for each in found
        if not is_young(volume, each.entry, wall)
    }
    cleared = 0
    for block in unnamed(list(blocks)) if blocks else ():
        if volume.erased:
            break
        cleared += yield from _clear(volume, channel, blocks[block])
    return cleared


def _clear(volume: Volume, channel: IoChannel, leftover: Unopened) -> Steps[bool]:
    deadline = channel.now() + volume.timing.write_deadline
    with (
        volume.borrowed_at(leftover.place) as (cached,),
        SetTransaction(volume, channel, cached) as change,
    ):
        found = Found(cached, leftover.slot, leftover.entry)
        if (yield from change.begin(deadline)) is not None:
            return False
        if not (yield from _certainly_does_not_open(volume, channel, found, deadline)):
            return False
        return (yield from change.clear(found, deadline))


def _certainly_does_not_open(
    volume: Volume, channel: IoChannel, found: Found, deadline: float
) -> Steps[bool]:
    """Whether the slot does not open between two looks that found the map of this agent the newest."""
    before = yield from _map_in_force(volume, channel, deadline)
    if before is None:
        return False
    with SlotVerifier(volume, channel, found, io_seconds=IO_SECONDS) as reader:
        cause = yield from reader.verify()
    if cause is None or cause in MAY_COME_BACK:
        return False
    return (yield from _map_in_force(volume, channel, deadline)) == before


def _map_in_force(volume: Volume, channel: IoChannel, deadline: float) -> Steps[int | None]:
    return 0 if volume.newest_map is None else (yield from volume.newest_map(channel, deadline))
