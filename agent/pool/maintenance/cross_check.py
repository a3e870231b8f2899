"""Whether a namespace can be trusted to tell of a slot that it is bad: others are asked beside it.

A drive that fails one read in three for a while has no bad ranges, and neither has one that answers nothing
but looks at directories. A process that has just begun has no history to suspect it by. So before anything
is taken out, other slots of the set are looked at, and directories and slots of other sets of the same
namespace, CONTROLS in all, and nearly all of them have to be there, and whole. A block each is read, and of
slots the header is opened.
"""

from __future__ import annotations

import random
from collections.abc import Collection
from dataclasses import dataclass

from agent.pool.counters import MissCause
from agent.pool.format.directory import DIRECTORY_BYTES, Directory, Entry, is_quarantined
from agent.pool.format.slot import HEADER_BYTES
from agent.pool.steps import Lanes, Steps, wait_for
from agent.pool.volume.directory_cache import CachedSet
from agent.pool.volume.volume import Volume

CONTROLS = 32
OWN_CONTROLS = 4
"""Of those, in the set itself: what is bad lies beside what is bad."""
OTHER_SETS = 8
FAILURES_SHARE = 10
"""One control in so many may fail."""
FEW = 4
"""Of so many controls one may: in a small pool a tenth is less than the other slot that is bad as well."""
IO_SECONDS = 1.0
"""For one read."""


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
    volume: Volume, lanes: Lanes, namespace: int, offset: int, suspects: Collection[int]
) -> Steps[bool | None]:
    """Whether a namespace gives nearly all of what else is asked of it; None where it does not answer.

    `suspects` are the slots of the set at `offset` that are known to be bad, and are not asked.
    """
    controls = _Controls()
    own = yield from _directory_at(lanes, namespace, offset, controls)
    if own is None:
        return None if not controls.asked else False
    chance = random.Random(int(lanes.now() * 1e6) ^ offset)
    here = _entries(own)
    chosen = [(offset, *each) for each in here if each[0] not in suspects]
    chosen = chance.sample(chosen, min(OWN_CONTROLS, len(chosen)))
    elsewhere: list[tuple[int, int, Entry]] = []
    for other in _other_sets(volume, namespace, offset, chance):
        directory = yield from _directory_at(lanes, namespace, other, controls)
        if directory is not None and directory.in_doubt:
            controls.failed += 1
        elif directory is not None:
            elsewhere += [(other, *each) for each in _entries(directory)]
    left = CONTROLS - controls.asked - len(chosen)
    chosen += chance.sample(elsewhere, min(left, len(elsewhere)))
    for at, slot, entry in chosen:
        header = memoryview(bytearray(HEADER_BYTES))
        where = CachedSet(namespace, at)
        pending = lanes.read(namespace, volume.slot_offset(where, slot), header)
        cause = yield from wait_for(lanes, pending, lanes.now() + IO_SECONDS)
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


def _directory_at(lanes: Lanes, namespace: int, at: int, controls: _Controls) -> Steps[Directory | None]:
    """A directory as it lies on flash. What does not answer is not counted."""
    block = memoryview(bytearray(DIRECTORY_BYTES))
    cause = yield from wait_for(lanes, lanes.read(namespace, at, block), lanes.now() + IO_SECONDS)
    if cause not in (MissCause.LATE, MissCause.ENCLOSURE_DOWN):
        controls.count(cause is not None)
    return Directory(block) if cause is None else None
