"""Cross-check: whether a namespace can be trusted when it says that a slot is bad.

A drive that fails one read in three for a while has no bad ranges; neither has one that answers only looks at
directories. A process that has just begun has no history to suspect a drive by. So before an entry is taken
out, CONTROLS others are read: slots of the same set, directories and slots of other sets of the namespace.
Nearly all must be there, and whole. Of a slot the header is opened.
"""

import random
from collections.abc import Collection
from dataclasses import dataclass

from agent.pool.counters import MissCause
from agent.pool.format.directory import DIRECTORY_BYTES, Directory, Entry, is_quarantined
from agent.pool.format.sealed_slot import HEADER_BYTES
from agent.pool.late_answers import wait_for
from agent.pool.steps import IoChannel, Steps
from agent.pool.volume.directory_cache import CachedSet
from agent.pool.volume.volume import Volume

CONTROLS = 32
OWN_CONTROLS = 4
"""The controls that lie in the set itself: bad ranges lie side by side."""
OTHER_SETS = 8
FAILURES_SHARE = 10
"""One control in so many may fail, …"""
FEW = 4
"""… and one of so many in any case: a small pool may have another bad slot."""
IO_SECONDS = 1.0
"""The deadline of one read."""


@dataclass(slots=True)
class _Controls:
    asked: int = 0
    failed: int = 0

    def count(self, failed: bool) -> None:
        self.asked += 1
        self.failed += failed

    @property
    def vouch(self) -> bool:
        return self.failed * FAILURES_SHARE <= self.asked or (self.failed == 1 and self.asked >= FEW)


def is_vouched_for(
    volume: Volume, channel: IoChannel, namespace: int, offset: int, suspects: Collection[int]
) -> Steps[bool | None]:
    """Whether a namespace gives nearly all controls; None where it does not answer.

    `suspects` are the bad slots of the set at `offset`, which are no controls.
    """
    controls = _Controls()
    own = yield from _directory_at(channel, namespace, offset, controls)
    if own is None:
        return None if not controls.asked else False
    chance = random.Random(int(channel.now() * 1e6) ^ offset)
    here = _entries(own)
    chosen = [(offset, *each) for each in here if each[0] not in suspects]
    chosen = chance.sample(chosen, min(OWN_CONTROLS, len(chosen)))
    elsewhere: list[tuple[int, int, Entry]] = []
    for other in _other_sets(volume, namespace, offset, chance):
        directory = yield from _directory_at(channel, namespace, other, controls)
        if directory is not None and directory.in_doubt:
            controls.failed += 1
        elif directory is not None:
            elsewhere += [(other, *each) for each in _entries(directory)]
    left = CONTROLS - controls.asked - len(chosen)
    chosen += chance.sample(elsewhere, min(left, len(elsewhere)))
    for at, slot, entry in chosen:
        header = memoryview(bytearray(HEADER_BYTES))
        where = CachedSet(namespace, at)
        pending = channel.read(namespace, volume.slot_offset(where, slot), header)
        cause = yield from wait_for(channel, pending, channel.now() + IO_SECONDS)
        if cause in (MissCause.LATE, MissCause.ENCLOSURE_DOWN):
            return None
        if cause is None:
            key = volume.placement.key_of(entry.pseudonym)
            opened = volume.codec.open(header, key, volume.place(where, slot), entry.generation)
            cause = opened if isinstance(opened, MissCause) else None
        controls.count(cause is MissCause.CORRUPT)
    return controls.vouch


def _entries(directory: Directory) -> list[tuple[int, Entry]]:
    return [(slot, entry) for slot, entry in directory if not is_quarantined(entry)]


def _other_sets(volume: Volume, namespace: int, offset: int, chance: random.Random) -> list[int]:
    """Some of the volume's other sets there, by the offsets of their directories."""
    size = volume.settings.set_bytes
    sets = [
        range(extent.offset, extent.offset + extent.sets * size, size)
        for extent in volume.settings.extents
        if extent.namespace == namespace
    ]
    found = [at for each in sets for at in chance.sample(each, min(OTHER_SETS + 1, len(each)))]
    return [at for at in found if at != offset][:OTHER_SETS]


def _directory_at(
    channel: IoChannel, namespace: int, at: int, controls: _Controls
) -> Steps[Directory | None]:
    """A directory as it lies on flash. A read without an answer is not counted."""
    block = memoryview(bytearray(DIRECTORY_BYTES))
    cause = yield from wait_for(channel, channel.read(namespace, at, block), channel.now() + IO_SECONDS)
    if cause not in (MissCause.LATE, MissCause.ENCLOSURE_DOWN):
        controls.count(cause is not None)
    return Directory(block) if cause is None else None
