"""Packets as they arrive: is the ICRC right, and how many of a burst are a plain row of one message?

A row ends at the first packet without the expected header or a right ICRC. That packet and all after it take
the way of single packets, which handles every case, so this file handles none.
"""

import struct
from collections.abc import Iterable
from itertools import repeat
from typing import Final

import numpy as np
from numpy.typing import NDArray

from emulator.roce.nic.memory import Bytes
from emulator.roce.nic.packets_out import PSN_BLOCK, ROW_OVERHEAD, SAME_BYTES, psn_words
from emulator.roce.wire import icrc
from emulator.roce.wire.bth import ACKNOWLEDGE_REQUEST, LOW_24_BITS
from emulator.roce.wire.flow import Flow
from emulator.roce.wire.icrc import crc32, prefix_crc
from emulator.roce.wire.opcodes import BTH_BYTES

RESIDUE: Final = 0x2144DF1C
"""A CRC-32 that runs on over its own value, stored little-endian, ends in this."""


def identification_of(datagram: memoryview, flow: Flow, index: int, solve: bool) -> int | None:
    """The IP identification with which a UDP payload (a BTH and an ICRC at least) has the right ICRC, or
    None.

    It may be 0, or `index`, the position in a burst. With `solve` any identification will do, which leaves 16
    bits of strength to the check (see `wire/icrc.py`). A burst that lost a segment, and a kernel's packets,
    may be numbered from anywhere.
    """
    size = len(datagram)
    correction = icrc.RESERVED_CORRECTION[datagram[icrc.BTH_RESERVED_OFFSET]]
    covered = datagram[: size - icrc.ICRC_BYTES]
    received = int.from_bytes(datagram[size - icrc.ICRC_BYTES :], "little")
    difference = crc32(covered, prefix_crc(flow, size) ^ correction) ^ received
    if not difference:
        return 0
    if flow.is_ipv6:
        return None
    if index and crc32(covered, prefix_crc(flow, size, index) ^ correction) == received:
        return index
    return icrc.solved_ip_id(difference, size) if solve else None


MAX_TABLES: Final = 32
"""Places of rows that are remembered. A link receives into the same memory again and again, in a few sizes. A
link in memory gives new memory each time, and this much of it lives longer."""

_HEAD: Final = struct.Struct(">QI")
"""The BTH as what is equal in a row, and what is not."""

_FIRST_BIT: Final = ACKNOWLEDGE_REQUEST >> 24
"""The acknowledge request in a big-endian word that was read the other way round."""


class _Table:
    """How the packets of `mtu` bytes lie from byte `start` of `data` on: what is equal in their headers
    (`heads`), what is not (`words`, bytes turned round), what the ICRC goes on with (`parts`), payload."""

    __slots__ = ("data", "heads", "parts", "payload", "words")

    def __init__(self, data: memoryview, start: int, mtu: int) -> None:
        size = mtu + ROW_OVERHEAD
        count = (len(data) - start) // size
        self.data = data
        self.heads: NDArray[np.uint64] = np.ndarray(count, "<u8", data, start, size)
        self.words: NDArray[np.uint32] = np.ndarray(count, "<u4", data, start + SAME_BYTES, size)
        self.payload: Bytes = np.ndarray((count, mtu), np.uint8, data, start + BTH_BYTES, (size, 1))
        self.parts = [data[at + SAME_BYTES : at + size] for at in range(start, start + count * size, size)]


class Row:
    """The packets of a burst that follow each other as they should: `count` of them, of `mtu` bytes each.

    `asked` is the position of the last one that asks for an acknowledgement, or -1.
    """

    __slots__ = ("asked", "count", "mtu", "payload")

    def __init__(self, payload: Bytes, mtu: int, count: int, asked: int) -> None:
        self.payload = payload
        self.mtu = mtu
        self.count = count
        self.asked = asked

    def place(self, target: Bytes) -> None:
        """Copy the payload, all of it, in one go."""
        count, mtu = self.count, self.mtu
        if len(target) != count * mtu:
            target = target[: count * mtu]
        payload = self.payload
        target.reshape(count, mtu)[...] = payload if len(payload) == count else payload[:count]


class RowReader:
    """Finds rows in what has arrived. One for each device."""

    def __init__(self) -> None:
        self._tables: dict[tuple[int, int, int], _Table] = {}

    def match(
        self, data: memoryview, start: int, mtu: int, most: int, flow: Flow, index: int, solve: bool
    ) -> Row | None:
        """The row that begins with the packet at byte `start`, whose header the caller has looked at; None
        for less than two packets. `index` is that packet's position in the burst. BTH byte 4 is 0."""
        table = self._table(data, start, mtu)
        size = mtu + ROW_OVERHEAD
        same = data[start : start + SAME_BYTES]
        value = crc32(same, prefix_crc(flow, size))
        count, asked = _quick_run(table, most, value) or _run(data, start, size, most, repeat(value))
        if count < 2 and not flow.is_ipv6:
            number = identification_of(data[start : start + size], flow, index, solve)
            if number is not None:
                numbers = range(number, number + most)
                values = (crc32(same, prefix_crc(flow, size, i & 0xFFFF)) for i in numbers)
                count, asked = _run(data, start, size, most, values)
        return Row(table.payload, mtu, count, asked) if count > 1 else None

    def _table(self, data: memoryview, start: int, mtu: int) -> _Table:
        # A view is the same memory for ever, and what is remembered keeps it, so its id is no other's.
        key = id(data), start, mtu
        table = self._tables.get(key)
        if table is None:
            if len(self._tables) >= MAX_TABLES:
                self._tables.clear()
            table = self._tables[key] = _Table(data, start, mtu)
        return table


def _quick_run(table: _Table, most: int, value: int) -> tuple[int, int] | None:
    """The result of `_run`, in few steps for the usual case: all packets up to the end, or up to those of
    another message, are right. None: not the usual case."""
    parts = table.parts[:most]
    if crc32(parts[0], value) != RESIDUE:
        return None
    heads, words = table.heads, table.words
    if most < len(heads):
        heads, words = heads[:most], words[:most]
    # Bytes are compared several times quicker than arrays of such length.
    same = heads.tobytes()
    if same != same[:SAME_BYTES] * most:
        most = int((heads != heads[0]).nonzero()[0][0])
        parts, words = parts[:most], words[:most]
    psn = int.from_bytes(parts[0][:4], "big") & LOW_24_BITS
    low = psn % PSN_BLOCK
    if low + most > PSN_BLOCK:
        return None
    asked = -1
    expected = psn_words(psn // PSN_BLOCK)[low : low + most]
    if words.tobytes() != expected.tobytes():
        wrong = words ^ expected
        asking = wrong.nonzero()[0]
        if (wrong[asking] != _FIRST_BIT).any():
            return None
        asked = int(asking[-1])
    if list(map(crc32, parts, repeat(value))).count(RESIDUE) != most:
        return None
    return most, asked


def _run(data: memoryview, start: int, size: int, most: int, values: Iterable[int]) -> tuple[int, int]:
    """How many packets follow each other with equal headers and right ICRCs, which go on from `values`; and
    the last of them that asks for an acknowledgement."""
    unpack = _HEAD.unpack_from
    same, expected = unpack(data, start)
    expected &= LOW_24_BITS
    asked, count = -1, 0
    for at, value in zip(range(start, start + most * size, size), values, strict=False):
        head, word = unpack(data, at)
        if head != same:
            break
        if word != expected:
            if word != expected | ACKNOWLEDGE_REQUEST:
                break
            asked = count
        if crc32(data[at + SAME_BYTES : at + size], value) != RESIDUE:
            break
        count += 1
        expected = expected + 1 & LOW_24_BITS
    return count, asked if asked < count else -1
