"""Packets as bytes to send: one at a time, or a row of them at once in one reusable buffer.

A row is what makes a long message cheap: packets of one message that differ in their PSN alone. The payload
is written by one strided copy; per packet there remain the header and the ICRC, one call into C each. The CRC
goes on from a value that is the same for all: what differs (byte 8 of the BTH onwards) comes after it.

What these functions return is the buffer itself: it is good until the next call.
"""

from __future__ import annotations

import struct
from typing import Final

import numpy as np

from emulator.roce.nic.memory import EMPTY, Bytes, SpanList
from emulator.roce.nic.path import Path
from emulator.roce.nic.verbs import Burst
from emulator.roce.wire.bth import (
    ACKNOWLEDGE_REQUEST,
    BTH,
    DEFAULT_P_KEY,
    LOW_24_BITS,
    MIGRATION_REQUEST,
    OFFSET_PSN,
    PAD_SHIFT,
    SOLICITED_EVENT,
)
from emulator.roce.wire.icrc import ICRC_BYTES, burst_prefixes, crc32, prefix_crc
from emulator.roce.wire.opcodes import BTH_BYTES

MAX_BURST: Final = 65507
"""Bytes of one sendmsg with UDP_SEGMENT: the longest UDP payload over IPv4."""

MAX_SEGMENTS: Final = 64
"""UDP_MAX_SEGMENTS of older kernels; newer ones take 128."""

ROW_OVERHEAD: Final = BTH_BYTES + ICRC_BYTES
"""Bytes of a packet in a row besides its payload."""

SAME_BYTES: Final = 8
"""The bytes of the BTH that are equal in a row: byte 8 has the acknowledge request, the PSN follows."""

_ICRC = struct.Struct("<I")
_WORDS = struct.Struct(">III")
"""The BTH as three words."""
_ACKNOWLEDGE_BIT: Final = ACKNOWLEDGE_REQUEST >> 24
_ZEROS: Final = bytes(3)


def rows_of(mtu: int) -> int:
    """How many full packets one burst takes."""
    return min(MAX_SEGMENTS, MAX_BURST // (mtu + ROW_OVERHEAD))


class _Layout:
    """Views of the buffer as rows of packets with `mtu` bytes of payload."""

    __slots__ = ("covered", "icrc", "payload", "size")

    def __init__(self, memory: Bytes, view: memoryview, mtu: int) -> None:
        rows, size = rows_of(mtu), mtu + ROW_OVERHEAD
        table = memory[: rows * size].reshape(rows, size)
        self.size = size
        self.payload = table[:, BTH_BYTES : BTH_BYTES + mtu]
        self.icrc = table[:, BTH_BYTES + mtu :].view("<u4")[:, 0]
        self.covered = [view[i * size + SAME_BYTES : (i + 1) * size - ICRC_BYTES] for i in range(rows)]


class PacketWriter:
    """The one buffer in which a device makes its packets."""

    def __init__(self) -> None:
        memory = bytearray(MAX_BURST)
        self._memory: Bytes = np.frombuffer(memory, np.uint8)
        self._view = memoryview(memory)
        self._layouts: dict[int, _Layout] = {}

    def single(
        self,
        path: Path,
        opcode: int,
        queue_pair: int,
        psn: int,
        extended: bytes = b"",
        *,
        acknowledge: bool = False,
        solicited: bool = False,
        spans: SpanList = EMPTY,
        start: int = 0,
        length: int = 0,
    ) -> Burst:
        """One packet, with `length` bytes of payload from byte `start` of `spans` on. ProtectionFault where
        that memory is gone."""
        view = self._view
        pad = -length & 3
        flags = MIGRATION_REQUEST | pad << PAD_SHIFT | (SOLICITED_EVENT if solicited else 0)
        sequence = psn & LOW_24_BITS | (ACKNOWLEDGE_REQUEST if acknowledge else 0)
        BTH.pack_into(view, 0, opcode, flags, DEFAULT_P_KEY, queue_pair, sequence)
        begin = BTH_BYTES + len(extended)
        view[BTH_BYTES:begin] = extended
        end = begin + length
        if length:
            spans.copy_out(start, view[begin:end])
            if pad:
                view[end : end + pad] = _ZEROS[:pad]
                end += pad
        size = end + ICRC_BYTES
        _ICRC.pack_into(view, end, crc32(view[:end], prefix_crc(path.flow, size)))
        return Burst(view[:size], size, path.destination)

    def rows(
        self,
        path: Path,
        mtu: int,
        opcode: int,
        queue_pair: int,
        psn: int,
        source: Bytes,
        *,
        first: int | None = None,
        last: int | None = None,
        acknowledge: bool = False,
    ) -> Burst:
        """As many packets as `source` has full payloads, with `psn` and its successors. `first` and `last`
        are the opcodes of the outer packets where these differ; `acknowledge` is asked for by the last."""
        layout = self._layouts.get(mtu)
        if layout is None:
            layout = self._layouts[mtu] = _Layout(self._memory, self._view, mtu)
        count = len(source) // mtu
        size, view, pack = layout.size, self._view, _WORDS.pack_into
        head = opcode << 24 | MIGRATION_REQUEST << 16 | DEFAULT_P_KEY
        for at in range(0, count * size, size):
            pack(view, at, head, queue_pair, psn & LOW_24_BITS)
            psn += 1
        if first is not None:
            view[0] = first
        if last is not None:
            view[(count - 1) * size] = last
        if acknowledge:
            view[(count - 1) * size + OFFSET_PSN] |= _ACKNOWLEDGE_BIT
        layout.payload[:count] = source.reshape(count, mtu)
        if path.numbered or first is not None or last is not None:
            layout.icrc[:count] = self._each_by_itself(path, layout, count)
        else:
            value = crc32(view[:SAME_BYTES], prefix_crc(path.flow, size))
            layout.icrc[:count] = [crc32(covered, value) for covered in layout.covered[:count]]
        return Burst(view[: count * size], size, path.destination)

    def _each_by_itself(self, path: Path, layout: _Layout, count: int) -> list[int]:
        """The ICRCs of a row whose packets differ in more than their PSN."""
        size, view = layout.size, self._view
        prefixes = burst_prefixes(path.flow, size, count) if path.numbered else None
        prefix = prefix_crc(path.flow, size)
        return [
            crc32(
                layout.covered[i],
                crc32(view[i * size : i * size + SAME_BYTES], prefixes[i] if prefixes else prefix),
            )
            for i in range(count)
        ]
