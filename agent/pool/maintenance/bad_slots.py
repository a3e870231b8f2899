"""Slots that are set aside because their medium is bad: entries of a directory that name no key.

Such an entry has a name that no key has (a pseudonym is the output of AES under the volume's own key), is
pinned for ever, and carries a flag. So it is not free and is never a victim, to this agent, to the others
of the pool and to older ones that do not know the flag; it survives restarts and needs no room of its own.
A directory that is lost, or overwritten by another agent that had read it before, loses it: then the slot
is used again and, where it is still bad, found again.
See docs/decisions/0029-bad-slots-are-entries-and-copies-follow.md.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from agent.pool.format.directory import DIRECTORY_BYTES, SLOTS_PER_SET, Directory, Entry
from agent.pool.map.document import MapVolume, set_size
from agent.pool.steps import Lanes, Steps
from agent.pool.volume.volume import wait_for
from agent.pool.volume.writable_directory import is_certain

NAME = b"g35 quarantined!"
FLAG = 1
"""Of `Entry.flags`, whose upper half has the epoch of the key."""
QUARANTINED_MAX = SLOTS_PER_SET // 4
"""Of one set: bad ranges must not be able to stop a volume from taking values. What has more is a bad
drive."""
_FOR_EVER = (1 << 32) - 1
_HITS_MAX = 0xFFFF
READS_IN_FLIGHT = 16
SECONDS = 10.0
"""For one read or write of a directory; an operator waits."""
assert len(NAME) == 16


def quarantine_entry(wall: float) -> Entry:
    """What stands for a slot that was set aside at `wall`, seconds since the epoch."""
    now_us = int(wall * 1e6)
    return Entry(NAME, now_us << 8, now_us, 0, pinned_until=_FOR_EVER, hits=_HITS_MAX, flags=FLAG)


def is_quarantined(entry: Entry) -> bool:
    return entry.pseudonym == NAME and bool(entry.flags & FLAG)


def count_quarantined(directory: Directory) -> int:
    return len(directory.find_all(NAME))


class Quarantined(NamedTuple):
    """A slot that is set aside, for people."""

    volume: str
    nguid: str
    offset: int
    """Of its directory, bytes from the namespace's start."""
    slot: int
    since: float
    """Seconds since the epoch."""


class Survey(NamedTuple):
    """What the directories of a volume say. `unread`: directories that could not be read."""

    quarantined: tuple[Quarantined, ...]
    unread: int


def _directories(volume: MapVolume) -> Iterator[tuple[str, int]]:
    for extent in volume.extents:
        for number in range(extent.sets):
            yield extent.nguid, extent.offset + number * set_size(volume.value_bytes)


def survey(lanes: Lanes, volume: MapVolume, numbers: Mapping[str, int]) -> Steps[Survey]:
    """Read all directories of a volume. `numbers` gives each NGUID (hex) that is reached its namespace."""
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
            reads.append((nguid, offset, block, lanes.read(numbers[nguid], offset, block)))
        for nguid, offset, block, pending in reads:
            if (yield from wait_for(lanes, pending, lanes.now() + SECONDS)) is not None:
                unread += 1
                continue
            unread += not (yield from is_certain(lanes, numbers[nguid], offset, block))
            found += [
                Quarantined(volume.name, nguid, offset, slot, entry.last_use_us / 1e6)
                for slot, entry in Directory(block)
                if is_quarantined(entry)
            ]
    return Survey(tuple(found), unread)


def release(
    lanes: Lanes, places: Mapping[tuple[str, int], frozenset[int]], numbers: Mapping[str, int]
) -> Steps[int]:
    """Give slots back, `places` by NGUID and directory; how many were. Those of a
    directory that does not prove itself whole stay. An agent that remembers one of these
    directories may set its slots aside once more, with its next write of it."""
    released = 0
    for (nguid, offset), slots in places.items():
        block = memoryview(bytearray(DIRECTORY_BYTES))
        pending = lanes.read(numbers[nguid], offset, block)
        if (yield from wait_for(lanes, pending, lanes.now() + SECONDS)) is not None:
            continue
        if not (yield from is_certain(lanes, numbers[nguid], offset, block)):
            continue
        directory = Directory(block)
        directory.believe()
        standing = [
            slot for slot in slots if (entry := directory.entry(slot)) is not None and is_quarantined(entry)
        ]
        for slot in standing:
            directory.clear(slot)
        writing = lanes.write(numbers[nguid], offset, [directory.image()])
        if (yield from wait_for(lanes, writing, lanes.now() + SECONDS)) is None:
            released += len(standing)
    return released
