"""Packets as they arrive: is the ICRC right, and how many of a burst are a plain row of one message?

A row is accepted as far as every packet of it has the header that is expected and a right ICRC; what is left,
if only the packet after the row's end, takes the way of single packets, which knows all cases. So this file
needs to know none of them.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from functools import lru_cache
from itertools import repeat
from typing import Final

import numpy as np

from emulator.roce.nic.memory import Bytes
from emulator.roce.nic.packets_out import ROW_OVERHEAD, SAME_BYTES
from emulator.roce.wire.bth import ACKNOWLEDGE_REQUEST, LOW_24_BITS
from emulator.roce.wire.flow import Flow
from emulator.roce.wire.icrc import (
    BTH_RESERVED_OFFSET,
    ICRC_BYTES,
    RESERVED_CORRECTION,
    crc32,
    prefix_crc,
    solved_ip_id,
)
from emulator.roce.wire.opcodes import BTH_BYTES

RESIDUE: Final = 0x2144DF1C
"""A CRC-32 that runs on over its own value, stored little-endian, ends in this."""


def identification_of(datagram: memoryview, flow: Flow, index: int, solve: bool) -> int | None:
    """The IP identification with which a UDP payload (a BTH and an ICRC at least) has the right ICRC, or
    None.

    It may be 0, or `index`, the position in a burst. With `solve` any will do, which leaves 16 bits of
    strength to the check (see `wire/icrc.py`): a burst that lost a segment on its way, and what a kernel
    sends, is numbered from anywhere.
    """
    size = len(datagram)
    correction = RESERVED_CORRECTION[datagram[BTH_RESERVED_OFFSET]]
    covered = datagram[: size - ICRC_BYTES]
    received = int.from_bytes(datagram[size - ICRC_BYTES :], "little")
    difference = crc32(covered, prefix_crc(flow, size) ^ correction) ^ received
    if not difference:
        return 0
    if flow.is_ipv6:
        return None
    if index and crc32(covered, prefix_crc(flow, size, index) ^ correction) == received:
        return index
    return solved_ip_id(difference, size) if solve else None


MAX_TABLES: Final = 128
"""Rows of different length, or of different MTU, of which the layout is remembered; about 2 MiB."""

_HEAD = struct.Struct(">QI")
"""The BTH as what is equal in a row, and what is not."""


class Row:
    """The packets of a burst that follow each other as they should: `count` of them, of `mtu` bytes each.

    `asked` is the position of the last one that asks for an acknowledgement, or -1.
    """

    __slots__ = ("_data", "_start", "asked", "count", "mtu")

    def __init__(self, data: memoryview, start: int, mtu: int, count: int, asked: int) -> None:
        self._data = data
        self._start = start
        self.mtu = mtu
        self.count = count
        self.asked = asked

    def place(self, target: Bytes) -> None:
        """Copy the payload, all of it, in one go."""
        count, mtu = self.count, self.mtu
        payload = np.ndarray(
            (count, mtu), np.uint8, self._data, self._start + BTH_BYTES, (mtu + ROW_OVERHEAD, 1)
        )
        if len(target) != count * mtu:
            target = target[: count * mtu]
        target.reshape(count, mtu)[...] = payload


def match_row(
    data: memoryview, start: int, mtu: int, most: int, flow: Flow, index: int, solve: bool
) -> Row | None:
    """The row that begins with the packet at byte `start`, whose header the caller has looked at; None for
    less than two packets. `index` is that packet's position in the burst. BTH byte 4 is 0."""
    size = mtu + ROW_OVERHEAD
    same = data[start : start + SAME_BYTES]
    value = crc32(same, prefix_crc(flow, size))
    count, asked = _quick_run(data, start, mtu, most, value) or _run(data, start, size, most, repeat(value))
    if count < 2 and not flow.is_ipv6:
        number = identification_of(data[start : start + size], flow, index, solve)
        if number is not None:
            numbers = range(number, number + most)
            values = (crc32(same, prefix_crc(flow, size, i & 0xFFFF)) for i in numbers)
            count, asked = _run(data, start, size, most, values)
    return Row(data, start, mtu, count, asked) if count > 1 else None


class _Table:
    """How `count` packets of `mtu` bytes lie behind each other: their headers as one structure, and where
    lies what the ICRC of each goes on with."""

    __slots__ = ("headers", "parts")

    def __init__(self, mtu: int, count: int) -> None:
        size = mtu + ROW_OVERHEAD
        self.headers = struct.Struct(">" + f"QI{size - _HEAD.size}x" * count)
        self.parts = [slice(at + SAME_BYTES, at + size) for at in range(0, count * size, size)]


_table = lru_cache(maxsize=MAX_TABLES)(_Table)


def _quick_run(data: memoryview, start: int, mtu: int, most: int, value: int) -> tuple[int, int] | None:
    """What `_run` finds, in few steps for the usual case: all packets up to the end, or up to those of
    another message, are as they should be. None: it is not the usual case."""
    table = _table(mtu, most)
    if start:
        data = data[start:]
    parts = table.parts
    if crc32(data[parts[0]], value) != RESIDUE:
        return None
    fields = table.headers.unpack_from(data)
    heads = fields[::2]
    if heads.count(heads[0]) != most:
        most = next(index for index, head in enumerate(heads) if head != heads[0])
        parts = parts[:most]
    words, psn = fields[1 : 2 * most : 2], fields[1] & LOW_24_BITS
    expected, asked = tuple(range(psn, psn + most)), -1
    if words != expected:
        for index, word in enumerate(words):
            if word != expected[index]:
                if word != expected[index] | ACKNOWLEDGE_REQUEST:
                    return None
                asked = index
    if most > LOW_24_BITS - psn or [crc32(data[part], value) for part in parts] != [RESIDUE] * most:
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
