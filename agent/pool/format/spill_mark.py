"""The mark that an evicted value leaves in its slot's entry where a copy of it lies in G4.

Layout, eight bytes, little-endian, in the place of the ghost (directory.py):
     0  4  lower 28 bits: number of the bundle, its upper 8 bits the generation; upper 4 bits: length of the
     item
           in sixteenths of the volume's slot, less one, rounded up
     4  3  lower 12 bits: where in the bundle the item begins, in steps; upper 12 bits: fingerprint
     7  1  lower 7 bits: the last 7 bits of the pseudonym; the highest bit is set

So a mark says which range of which object to ask for: the object's name follows from pool, volume and number
(agent/spill/names.py), and no index is kept. A step is a sixteenth of a slot or less, and a power of two, so
a volume's settings alone give it. The slot is the one whose entry has the mark, since a slot's seal is bound
to its place.

A mark is a hint, as an entry is. 19 bits of the pseudonym stand in it: with 128 marks in a key's two sets one
key in 4,096 meets a foreign one, and what lies there does not prove itself as its value.

A ghost in a pool of an older g35 may have the highest bit set. It is then taken for a mark of another key.
"""

from typing import Final, NamedTuple

MARK_BYTES: Final = 8
IS_MARK: Final = 0x80
"""The bit of the last byte that tells a mark."""
BUNDLE_NUMBERS: Final = 1 << 28
STEPS_MAX: Final = 1 << 12
"""Steps of a bundle: what an item's beginning is counted in."""
STEP_BYTES_MIN: Final = 4096
_STEPS_OF_A_SLOT: Final = 16


class SpillMark(NamedTuple):
    """Where an item lies: the number of its bundle, its first byte there in steps, its length in sixteenths
    of a slot."""

    bundle: int
    step: int
    sixteenths: int

    def encode(self, pseudonym: bytes) -> bytes:
        """The mark that the value of this key leaves."""
        middle = self.step | _fingerprint(pseudonym) << 12
        return (
            (self.bundle | (self.sixteenths - 1) << 28).to_bytes(4, "little")
            + middle.to_bytes(3, "little")
            + bytes((pseudonym[-1] & 0x7F | IS_MARK,))
        )


def _fingerprint(pseudonym: bytes) -> int:
    return int.from_bytes(pseudonym[-3:-1], "little") & 0xFFF


def is_mark(ghost: bytes) -> bool:
    return bool(ghost[7] & IS_MARK)


def could_be(ghost: bytes, pseudonym: bytes) -> bool:
    """Whether a ghost is a mark that this key may have left."""
    return ghost[7] == pseudonym[-1] & 0x7F | IS_MARK and int.from_bytes(
        ghost[4:7], "little"
    ) >> 12 == _fingerprint(pseudonym)


def decode(ghost: bytes) -> SpillMark:
    first, middle = int.from_bytes(ghost[:4], "little"), int.from_bytes(ghost[4:7], "little")
    return SpillMark(first & (BUNDLE_NUMBERS - 1), middle & (STEPS_MAX - 1), (first >> 28) + 1)


def step_bytes(item_bytes: int) -> int:
    """The step of a volume whose slots hold items of so many bytes at the most."""
    step = STEP_BYTES_MIN
    while step * _STEPS_OF_A_SLOT * 2 <= item_bytes:
        step *= 2
    return step


def sixteenths_of(item_bytes: int, slot_bytes: int) -> int:
    return max(1, -(-item_bytes * _STEPS_OF_A_SLOT // slot_bytes))


def bytes_to_ask(mark: SpillMark, slot_bytes: int) -> int:
    """How long a range to ask for: the item, and less than a sixteenth of a slot more."""
    return -(-mark.sixteenths * slot_bytes // _STEPS_OF_A_SLOT)
