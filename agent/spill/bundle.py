"""A bundle: one object with the sealed slots of many values of one volume.

Layout, little-endian:
     0  8  magic "g35spil1"
     8 16  pool            24 16  volume
    40  4  number          44  4  bytes of a step
    48  4  count of items  52  4  zero
    56  8  CRC-64/NVME of the table below
    64  -  the table: for each item 4 bytes first step, 4 bytes length, 8 bytes CRC-64/NVME of its bytes;
    zero to
           the end of the 4,096 bytes
Items follow, each at a step: a slot as it lay on flash, header block and sealed units. Nothing in a bundle
tells a key, a tenant or what was opened.

A get reads an item alone and believes its seal. Table and checksums are for `g35 spill scrub`, which has no
key."""

import struct
from collections.abc import Iterator
from typing import Final, NamedTuple

from agent.inline.crc64 import crc64
from agent.pool.format.spill_mark import STEPS_MAX, SpillMark, sixteenths_of, step_bytes

TABLE_BYTES: Final = 4096
MAGIC: Final = b"g35spil1"
_HEAD: Final = struct.Struct("<8s16s16sIIIIQ")
_ITEM: Final = struct.Struct("<IIQ")
ITEMS_MAX: Final[int] = (TABLE_BYTES - _HEAD.size) // _ITEM.size
assert _HEAD.size == 64


class Damaged(Exception):
    """The bytes are no whole bundle; the text says why."""


class Item(NamedTuple):
    """Where an item lies in its bundle, in bytes, and its checksum."""

    offset: int
    size: int
    checksum: int


def bytes_wanted(slot_bytes: int) -> int:
    """How long a bundle must be that holds one item of the longest: its first steps, and that item's."""
    step = step_bytes(slot_bytes)
    return (-(-TABLE_BYTES // step) + -(-slot_bytes // step)) * step


class BundleBuilder:
    """A bundle that is being filled. Its memory is taken when it is made."""

    def __init__(self, slot_bytes: int, most_bytes: int) -> None:
        """`slot_bytes`: of the longest item. `most_bytes` of the object; the volume may allow less."""
        self._slot_bytes: Final = slot_bytes
        self._step: Final = step_bytes(slot_bytes)
        self._first: Final[int] = -(-TABLE_BYTES // self._step)
        self._steps: Final[int] = min(most_bytes // self._step, STEPS_MAX)
        self._data: Final = bytearray(self._steps * self._step)
        self._next = self._first
        self._end = self._first * self._step
        self._items: list[tuple[int, int, int]] = []

    @property
    def memory(self) -> int:
        return len(self._data)

    def __len__(self) -> int:
        return len(self._items)

    def has_room(self, size: int) -> bool:
        return len(self._items) < ITEMS_MAX and self._next + -(-size // self._step) <= self._steps

    def room(self, size: int) -> memoryview:
        """Where the next item of `size` bytes is to be put, before `add`; only where it `has_room`."""
        start = self._next * self._step
        return memoryview(self._data)[start : start + size]

    def add(self, size: int) -> SpillMark:
        """The item lies in its `room`. Its mark; the bundle has no number yet."""
        step = self._next
        self._items.append((step, size, crc64(self.room(size))))
        self._end = step * self._step + size
        self._next += -(-size // self._step)
        return SpillMark(0, step, sixteenths_of(size, self._slot_bytes))

    def finish(self, pool_id: str, volume_id: bytes, number: int) -> memoryview:
        """The object, under a number; it may be asked for again with another one."""
        table = b"".join(_ITEM.pack(*item) for item in self._items).ljust(TABLE_BYTES - _HEAD.size, b"\0")
        head = _HEAD.pack(
            MAGIC, bytes.fromhex(pool_id), volume_id, number, self._step, len(self._items), 0, crc64(table)
        )
        self._data[:TABLE_BYTES] = head + table
        return memoryview(self._data)[: self._end]


def items_untrusted(table: bytes) -> Iterator[Item]:
    """The items of a bundle by its first 4,096 bytes; it may end before they do. Raises Damaged."""
    if len(table) < TABLE_BYTES:
        raise Damaged(f"it has {len(table)} bytes")
    magic, _, _, _, step, count, _, checksum = _HEAD.unpack_from(table)
    if magic != MAGIC or count > ITEMS_MAX or crc64(table[_HEAD.size : TABLE_BYTES]) != checksum:
        raise Damaged("its table does not prove itself")
    for number in range(count):
        first, length, expected = _ITEM.unpack_from(table, _HEAD.size + number * _ITEM.size)
        yield Item(first * step, length, expected)
