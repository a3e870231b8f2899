"""The second block of a directory, in volumes that have one: 340 marks of values in G4.

Layout, little-endian:
     0  2  the place that the next mark takes
     2 10  zero
    12  4  CRC-32 (IEEE 802.3) of the whole block with these four bytes zero
    16  -  340 marks of 12 bytes; zeros: none
A mark:
     0  5  the first 40 bits of the pseudonym
     5  1  lower 6 bits: the slot that the value lay in; the highest bit is set
     6  4  lower 28 bits: number of the bundle; upper 4 bits: length, as in spill_mark.py
    10  2  lower 12 bits: where in the bundle the item begins, in steps

The oldest goes first. The block lies right behind the directory's own: one read and one write carry both.
In such a volume the ghosts are plain ghosts. A block that does not prove itself has no marks. That costs
hits."""

import struct
import zlib
from typing import Final

from agent.pool.format.spill_mark import BUNDLE_NUMBERS, STEPS_MAX, SpillMark, could_be, decode

MARK_BLOCK_BYTES: Final = 4096
WIDE_MARK_BYTES: Final = 12
MARKS_MAX: Final = 340
_FIRST: Final = 16
_CRC_AT: Final = 12
_NAME_BYTES: Final = 5
_BLANK: Final = bytes(MARK_BLOCK_BYTES)
_IS_THERE: Final = 0x80
_SLOT: Final = 0x3F
_MARK: Final = struct.Struct(f"<{_NAME_BYTES}sBIH")
_U32: Final = struct.Struct("<I")
_U16: Final = struct.Struct("<H")
assert _MARK.size == WIDE_MARK_BYTES
assert _FIRST + MARKS_MAX * WIDE_MARK_BYTES == MARK_BLOCK_BYTES


def wide_mark(mark: SpillMark, slot: int, pseudonym: bytes) -> bytes:
    """The twelve bytes of a mark that the value of this key leaves, which lay in a slot."""
    first = mark.bundle | (mark.sixteenths - 1) << 28
    return _MARK.pack(pseudonym[:_NAME_BYTES], _IS_THERE | slot, first, mark.step)


def narrow(wide: bytes) -> SpillMark:
    """Where the item of a mark lies."""
    _, _, first, step = _MARK.unpack(wide)
    return SpillMark(first & (BUNDLE_NUMBERS - 1), step & (STEPS_MAX - 1), (first >> 28) + 1)


def slot_of(wide: bytes) -> int:
    return wide[_NAME_BYTES] & _SLOT


def is_of(wide: bytes, pseudonym: bytes) -> bool:
    """Whether it is a mark that this key may have left."""
    return bool(wide[_NAME_BYTES] & _IS_THERE) and wide.startswith(pseudonym[:_NAME_BYTES])


def located(mark: bytes, place: int) -> tuple[SpillMark, int]:
    """Where the item of a mark of either kind lies, and the slot that its value lay in. `place`: of the mark
    (`Directory.marks`)."""
    return (narrow(mark), slot_of(mark)) if len(mark) == WIDE_MARK_BYTES else (decode(mark), place)


def may_be_of(mark: bytes, pseudonym: bytes) -> bool:
    """Whether this key may have left a mark, of either kind."""
    return is_of(mark, pseudonym) if len(mark) == WIDE_MARK_BYTES else could_be(mark, pseudonym)


class MarkBlock:
    """The marks, kept as the bytes of the block. For one thread at a time."""

    __slots__ = ("raw",)

    def __init__(self, block: bytes | bytearray | memoryview | None = None) -> None:
        self.raw = bytearray(MARK_BLOCK_BYTES) if block is None else bytearray(block)
        if block is not None:
            stored: int = _U32.unpack_from(self.raw, _CRC_AT)[0]
            if stored != self._checksum():
                self.raw = bytearray(MARK_BLOCK_BYTES)

    def _checksum(self) -> int:
        """The checksum of a block; zero for a block of zeros, because such a block was never written."""
        _U32.pack_into(self.raw, _CRC_AT, 0)
        return zlib.crc32(self.raw) if self.raw != _BLANK else 0

    def image(self) -> bytes:
        """The block as it is to be written."""
        _U32.pack_into(self.raw, _CRC_AT, self._checksum())
        return bytes(self.raw)

    def __len__(self) -> int:
        flags = bytes(self.raw[_FIRST + _NAME_BYTES :: WIDE_MARK_BYTES])
        return len([each for each in flags if each & _IS_THERE])

    def at(self, place: int) -> bytes:
        """The mark at a place; zeros where there is none."""
        start = _FIRST + place * WIDE_MARK_BYTES
        return bytes(self.raw[start : start + WIDE_MARK_BYTES])

    def find(self, pseudonym: bytes) -> list[int]:
        """The places of the marks that a key may have left."""
        name, found = pseudonym[:_NAME_BYTES], []
        start = self.raw.find(name, _FIRST)
        while start >= 0:
            place, rest = divmod(start - _FIRST, WIDE_MARK_BYTES)
            if not rest and self.raw[start + _NAME_BYTES] & _IS_THERE:
                found.append(place)
            start = self.raw.find(name, start + 1)
        return found

    def add(self, wide: bytes) -> None:
        """A value goes to G4; its older mark goes, and that of the value that went there longest ago."""
        for place in self.find(wide[:_NAME_BYTES]):
            self.take_out(place)
        place = _U16.unpack_from(self.raw)[0] % MARKS_MAX
        start = _FIRST + place * WIDE_MARK_BYTES
        self.raw[start : start + WIDE_MARK_BYTES] = wide
        _U16.pack_into(self.raw, 0, (place + 1) % MARKS_MAX)

    def take_out(self, place: int) -> None:
        start = _FIRST + place * WIDE_MARK_BYTES
        self.raw[start : start + WIDE_MARK_BYTES] = bytes(WIDE_MARK_BYTES)
