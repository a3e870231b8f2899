"""SGL descriptors: where the data of a command is (NVMe Base 2.0, 4.3.2; NVMe-oF 1.1, 2.3).

Sixteen bytes, little-endian. The last byte is the identifier: type in its high, sub-type in its low half.

    data block      0..7 address (offset in the capsule when sub-type is 1)  8..11 length  12..14 reserved
    transport data  0..7 reserved                                            8..11 length  12..14 reserved
    keyed           0..7 address                       8..10 length (24 bits)  11..14 remote key

One record serves all three; fields that a kind does not have are 0.
"""

from enum import IntEnum
from typing import Final, NamedTuple

SGL_IN_CAPSULE: Final = 0x01 << 56
"""The high half of a descriptor of data in the capsule, less their length."""


class SglKind(IntEnum):
    """Descriptor type, bits 7:4 of the identifier."""

    DATA_BLOCK = 0x0
    KEYED = 0x4
    TRANSPORT = 0x5


SUBTYPE_ADDRESS: Final = 0x0
SUBTYPE_OFFSET: Final = 0x1
SUBTYPE_TRANSPORT: Final = 0xA
SUBTYPE_INVALIDATE: Final = 0xF
"""Bits 3:0 of the identifier. Invalidate: the controller is asked to invalidate the remote key."""


class SglDescriptor(NamedTuple):
    """One descriptor. `address` is an offset for in-capsule data; `length` is in bytes."""

    address: int
    length: int
    kind: int
    subtype: int
    key: int = 0

    @property
    def in_capsule(self) -> bool:
        """The data follow in the same capsule, `address` bytes after its start."""
        return self.kind == SglKind.DATA_BLOCK and self.subtype == SUBTYPE_OFFSET


def from_words(address: int, low: int, high: int) -> SglDescriptor:
    """The descriptor of its three words in an entry (`sqe.py`).

    Every value decodes: an odd kind is for the command to judge.
    """
    kind = high >> 28
    subtype = high >> 24 & 0xF
    length, key = low, 0
    if kind == 4:
        length, key = low & 0xFF_FFFF, low >> 24 | (high & 0xFF_FFFF) << 8
    # A named tuple's own way to be made is interpreted, and every command has one.
    return tuple.__new__(SglDescriptor, (address, length, kind, subtype, key))
