"""The split virtqueue: three areas in guest memory that driver and device share (virtio 1.2, 2.7).

    descriptor table   size x 16   0 address u64 (guest), 8 length u32, 12 flags u16, 14 next u16
    available ring                 0 flags u16, 2 idx u16, 4 ring u16 x size, then used_event u16
    used ring                      0 flags u16, 2 idx u16, 4 (id u32, length u32) x size, then avail_event u16

The driver writes the first two, the device the third. Both `idx` count for ever and wrap at 2^16; the
place in a ring is `idx % size`. With RING_EVENT_IDX the driver asks in `used_event` to be called when the
used idx passes it, and the device asks in `avail_event` to be kicked likewise. Without it the flags' bit 0
of each ring says that the other side need not be notified at all.

A single 16-bit word is read and written at once, which `memoryview.cast("H")` does; the machine's byte
order is the ring's (little-endian, VERSION_1), on every machine that this runs on.
"""

import struct
import sys
from enum import IntFlag
from typing import Final

assert sys.byteorder == "little", "rings of VERSION_1 are little-endian, and words are read as they lie"

QUEUE_SIZE_MAX: Final = 32768
INDEX_MASK: Final = 0xFFFF

DESCRIPTOR_BYTES: Final = 16
DESCRIPTOR_ALIGNMENT: Final = 16
AVAILABLE_ALIGNMENT: Final = 2
USED_ALIGNMENT: Final = 4
USED_ELEMENT_BYTES: Final = 8

AVAILABLE_NO_INTERRUPT: Final = 1
"""VIRTQ_AVAIL_F_NO_INTERRUPT: the driver need not be called."""
USED_NO_NOTIFY: Final = 1
"""VIRTQ_USED_F_NO_NOTIFY: the device need not be kicked."""

FLAGS_WORD: Final = 0
IDX_WORD: Final = 1
RING_WORD: Final = 2
"""Places of 16-bit words in the available ring, and of the first two in the used ring."""
USED_RING_DWORD: Final = 1
"""Place of the first element in the used ring, in 32-bit words: id, then length."""


class DescriptorFlag(IntFlag):
    """VIRTQ_DESC_F_*."""

    NEXT = 1
    WRITE = 2
    """The device writes here; otherwise it reads."""
    INDIRECT = 4
    """It names a table of descriptors rather than a buffer."""


DESCRIPTOR: Final = struct.Struct("<QIHH")
"""virtq_desc: address, length, flags, next."""
LENGTH_MASK: Final = 0xFFFF_FFFF
FLAGS_SHIFT: Final = 32
NEXT_SHIFT: Final = 48
"""Where length, flags and next are in the second 64-bit word of a descriptor; the first is the address."""

USED_ELEMENT: Final = struct.Struct("<II")
"""Head of a chain, and how many bytes were written into it."""

assert DESCRIPTOR.size == DESCRIPTOR_BYTES
assert USED_ELEMENT.size == USED_ELEMENT_BYTES


def is_queue_size(size: int) -> bool:
    """A power of two up to 2^15 (virtio 1.2, 2.7)."""
    return 0 < size <= QUEUE_SIZE_MAX and not size & (size - 1)


def descriptors_bytes(size: int) -> int:
    return DESCRIPTOR_BYTES * size


def available_bytes(size: int) -> int:
    """The available ring with used_event behind it."""
    return 6 + 2 * size


def used_bytes(size: int) -> int:
    """The used ring with avail_event behind it."""
    return 6 + USED_ELEMENT_BYTES * size


def used_event_word(size: int) -> int:
    return RING_WORD + size


def avail_event_word(size: int) -> int:
    return 2 + 4 * size


def passes_event(event: int, new: int, old: int) -> bool:
    """Whether an idx that went from `old` to `new` has passed `event` (virtio 1.2, 2.7.7.2)."""
    return (new - event - 1) & INDEX_MASK < (new - old) & INDEX_MASK
