"""The sync record: one block of each namespace, which says whose values that are replaced do not count.

A namespace that is away misses what is stored meanwhile. So the others bear a *mark* against it first, and
nothing that it has counts until it is in sync again (agent/pool/volume/in_sync.py). The block is the last one
of the first copy of the pool map, which a map never reaches (agent/pool/map/superblock.py).

Layout, little-endian:
       0  8  magic "g35sync1"
       8 16  NGUID of the namespace that it lies on
      24  8  floor: what lies here with this generation, or a lesser one, does not count
      32  8  incarnation: marks up to this number are over
      40  4  number of marks
      44  4  zero
      48  …  marks, 24 bytes each: the NGUID of another namespace, and a number
    4080  8  CRC-64/NVME of the 4,080 bytes before
    4088  8  the magic again

A mark that is odd says: that namespace is left out. An even one says: it is about to be in sync again. All
numbers only grow, so two records are joined by the greater number of each.
"""

import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from agent.inline.crc64 import crc64

RECORD_BYTES: Final = 4096
RECORD_OFFSET: Final = (1 << 19) - RECORD_BYTES
MAGIC: Final = b"g35sync1"
NUMBER_MAX: Final = 1 << 62
"""Beyond that nobody counts: such a record is damaged."""
_HEAD: Final = struct.Struct("<8s16sQQI4x")
_MARK: Final = struct.Struct("<16sQ")
_TAIL: Final = struct.Struct("<Q8s")
_CHECKED: Final = RECORD_BYTES - _TAIL.size
MARKS_MAX: Final = (_CHECKED - _HEAD.size) // _MARK.size
"""168 namespaces that are away at the same time, or have been."""


class DamagedRecord(Exception):
    """The block says nothing that can be believed."""


@dataclass(frozen=True, slots=True)
class SyncRecord:
    """What the block of one namespace says. `marks` go by NGUID."""

    floor: int = 0
    incarnation: int = 0
    marks: Mapping[bytes, int] = field(default_factory=dict)

    def joined(self, other: "SyncRecord") -> "SyncRecord":
        """The greater number of each. Marks that are over, as far as these two know, stay: they are few."""
        marks = dict(self.marks)
        for nguid, mark in other.marks.items():
            marks[nguid] = max(mark, marks.get(nguid, 0))
        return SyncRecord(max(self.floor, other.floor), max(self.incarnation, other.incarnation), marks)

    def encode(self, nguid: bytes) -> bytes:
        """The block. Raises ValueError for more marks than it has room for."""
        if len(self.marks) > MARKS_MAX:
            raise ValueError(f"{len(self.marks)} marks; {MARKS_MAX} are the most")
        head = _HEAD.pack(MAGIC, nguid, self.floor, self.incarnation, len(self.marks))
        body = head + b"".join(_MARK.pack(*mark) for mark in sorted(self.marks.items()))
        body = body.ljust(_CHECKED, b"\0")
        return body + _TAIL.pack(crc64(body), MAGIC)


BLANK: Final = SyncRecord()


def decode_sync_record_untrusted(block: bytes | memoryview, nguid: bytes) -> SyncRecord:
    """A record out of its block. A block that was never written has none, which is the blank one.

    Raises DamagedRecord, and nothing else, for a block that was a record once, or another namespace's.
    """
    raw = bytes(block)
    if len(raw) != RECORD_BYTES:
        raise DamagedRecord("a sync record of another length")
    crc, end = _TAIL.unpack_from(raw, _CHECKED)
    if MAGIC not in (raw[: len(MAGIC)], end):
        return BLANK
    magic, owner, floor, incarnation, count = _HEAD.unpack_from(raw)
    if magic != MAGIC or end != MAGIC or crc != crc64(raw[:_CHECKED]):
        raise DamagedRecord("a damaged sync record")
    if owner != nguid:
        raise DamagedRecord("the sync record of another namespace")
    if count > MARKS_MAX:
        raise DamagedRecord("a sync record of too many marks")
    marks: dict[bytes, int] = {}
    for number in range(count):
        about, mark = _MARK.unpack_from(raw, _HEAD.size + number * _MARK.size)
        marks[about] = mark
    if max(floor, incarnation, *marks.values(), 0) >= NUMBER_MAX:
        raise DamagedRecord("a sync record of numbers that nobody counts to")
    return SyncRecord(floor, incarnation, marks)
