"""Slots that are set aside because their medium is bad: entries of a directory that name no key.

Such an entry has a name that no key has (a pseudonym is the output of AES under the volume's own key), is
pinned for ever, and carries a flag. So it is neither free nor a victim: for this agent, the others of the
pool, and older ones that do not know the flag. It survives restarts and needs no room of its own. A directory
that is lost, or overwritten by an agent that had read it before, loses it. Then the slot is used again and,
where it is still bad, found again. See docs/decisions/0029-bad-slots-are-entries-and-copies-follow.md.
"""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from agent.pool.format.directory import DIRECTORY_BYTES, Directory, is_quarantined
from agent.pool.late_answers import wait_for
from agent.pool.map.document import MapVolume
from agent.pool.map.superblock import MAP_IO_SECONDS
from agent.pool.steps import IoChannel, Steps
from agent.pool.volume.writable_directory import is_certain

READS_IN_FLIGHT = 16


class Quarantined(NamedTuple):
    volume: str
    nguid: str
    offset: int
    """The offset of the set's directory, in bytes from the namespace's start."""
    slot: int
    since: float
    """Seconds since the epoch."""


class Survey(NamedTuple):
    """What the directories of a volume say, and how many could not be read."""

    quarantined: tuple[Quarantined, ...]
    unread: int


def _directories(volume: MapVolume) -> Iterator[tuple[str, int]]:
    for extent in volume.extents:
        for number in range(extent.sets):
            yield extent.nguid, extent.offset + number * volume.set_bytes


def survey(channel: IoChannel, volume: MapVolume, numbers: Mapping[str, int]) -> Steps[Survey]:
    """Read all directories of a volume. `numbers` maps each NGUID (hex) in reach to its namespace."""
    found: list[Quarantined] = []
    unread = 0
    places = _directories(volume)
    while batch := [place for _, place in zip(range(READS_IN_FLIGHT), places, strict=False)]:
        reads = []
        for nguid, offset in batch:
            if nguid not in numbers:
                unread += 1
                continue
            block = memoryview(bytearray(DIRECTORY_BYTES))
            reads.append((nguid, offset, block, channel.read(numbers[nguid], offset, block)))
        for nguid, offset, block, pending in reads:
            if (yield from wait_for(channel, pending, channel.now() + MAP_IO_SECONDS)) is not None:
                unread += 1
                continue
            unread += not (yield from is_certain(channel, numbers[nguid], offset, block))
            found += [
                Quarantined(volume.name, nguid, offset, slot, entry.last_use_us / 1e6)
                for slot, entry in Directory(block)
                if is_quarantined(entry)
            ]
    return Survey(tuple(found), unread)


def release(
    channel: IoChannel, places: Mapping[tuple[str, int], frozenset[int]], numbers: Mapping[str, int]
) -> Steps[int]:
    """Give slots back, by NGUID and directory; how many were. Those of a directory that does not prove itself
    whole stay. An agent that remembers such a directory may set its slots aside once more, with its next
    write of it."""
    released = 0
    for (nguid, offset), slots in places.items():
        block = memoryview(bytearray(DIRECTORY_BYTES))
        pending = channel.read(numbers[nguid], offset, block)
        if (yield from wait_for(channel, pending, channel.now() + MAP_IO_SECONDS)) is not None:
            continue
        if not (yield from is_certain(channel, numbers[nguid], offset, block)):
            continue
        directory = Directory(block)
        directory.believe()
        standing = [
            slot for slot in slots if (entry := directory.entry(slot)) is not None and is_quarantined(entry)
        ]
        for slot in standing:
            directory.clear(slot)
        writing = channel.write(numbers[nguid], offset, [directory.image()])
        if (yield from wait_for(channel, writing, channel.now() + MAP_IO_SECONDS)) is None:
            released += len(standing)
    return released
