"""Packets as bytes to send: one at a time, or a row of them at once in one reusable buffer.

A row makes a long message cheap: packets of one message that differ only in their PSN. The writer makes up to
`VOLLEY_BURSTS` bursts at once. One strided copy writes the payload and one step of numpy the PSNs; the common
header bytes remain from the row before. Each packet then costs one call into C, for its ICRC. All CRCs
continue from the same value, because the differing bytes (from byte 8 of the BTH on) come after the common
ones.

The functions return the buffer itself. It is valid until the next call.
"""

import struct
from functools import lru_cache
from itertools import repeat
from typing import Final

import numpy as np
from numpy.typing import NDArray

from emulator.roce.nic.memory import EMPTY, Bytes, SpanList
from emulator.roce.nic.path import Path
from emulator.roce.nic.verbs import Burst
from emulator.roce.wire import bth
from emulator.roce.wire.flow import Flow
from emulator.roce.wire.icrc import ICRC_BYTES, burst_prefixes, crc32, prefix_crc
from emulator.roce.wire.opcodes import BTH_BYTES, MAX_PACKET

MAX_BURST: Final = 65507
"""Bytes of one sendmsg with UDP_SEGMENT: the longest UDP payload over IPv4."""

MAX_SEGMENTS: Final = 64
"""UDP_MAX_SEGMENTS of older kernels; newer ones take 128."""

VOLLEY_BURSTS: Final = 4
"""Bursts that are made at once. 240 KiB with the largest packets, which stays in a core's own cache until the
socket has taken it; eight are no cheaper, and let the receiver wait for longer."""

ROW_OVERHEAD: Final = BTH_BYTES + ICRC_BYTES
"""Bytes of a packet in a row besides its payload."""

SAME_BYTES: Final = 8
"""The bytes of the BTH that are equal in a row: byte 8 has the acknowledge request, the PSN follows."""

PSN_BLOCK: Final = 1 << 16
"""PSNs whose words are made at once, and remembered: 256 KiB, of which a row looks at 300 bytes."""

_ICRC: Final = struct.Struct("<I")
_COMMON: Final = struct.Struct(">II")
"""The first two words of a BTH: what is equal in a row."""
_ACKNOWLEDGE_BIT: Final = bth.ACKNOWLEDGE_REQUEST >> 24
_ZEROS: Final = bytes(3)


@lru_cache(maxsize=16)
def rows_of(mtu: int) -> int:
    """How many full packets one burst takes."""
    return min(MAX_SEGMENTS, MAX_BURST // (mtu + ROW_OVERHEAD))


@lru_cache(maxsize=8)
def psn_words(block: int) -> NDArray[np.uint32]:
    """The last word of the BTH as it is sent, for each PSN of a block, without an acknowledge request."""
    return np.arange(block * PSN_BLOCK, (block + 1) * PSN_BLOCK, dtype=">u4").view("<u4")


@lru_cache(maxsize=4 * MAX_SEGMENTS)
def _icrcs(count: int) -> struct.Struct:
    return struct.Struct(f"<{count}I")


class _Layout:
    """A buffer of its own for rows of packets with `mtu` bytes of payload, and the views of its parts."""

    __slots__ = (
        "common", "covered", "icrc", "icrcs", "made", "payload", "sequence", "size", "spoiled", "steps",
        "table", "view",
    )  # fmt: skip

    def __init__(self, mtu: int) -> None:
        rows, size = VOLLEY_BURSTS * rows_of(mtu), mtu + ROW_OVERHEAD
        memory = bytearray(rows * size)
        view = memoryview(memory)
        table: Bytes = np.frombuffer(memory, np.uint8).reshape(rows, size)
        self.size = size
        self.view = view
        self.table = table
        self.payload = table[:, BTH_BYTES : BTH_BYTES + mtu]
        self.sequence = table[:, SAME_BYTES:BTH_BYTES].view("<u4")[:, 0]
        self.icrc = table[:, BTH_BYTES + mtu :].view("<u4")[:, 0]
        self.steps = np.arange(rows, dtype=np.uint32)
        self.covered = [view[i * size + SAME_BYTES : (i + 1) * size - ICRC_BYTES] for i in range(rows)]
        self.made = bytearray(rows * ICRC_BYTES)
        self.icrcs: NDArray[np.uint32] = np.frombuffer(self.made, "<u4")
        self.common = b""
        """The first bytes of every packet in the buffer, but of those in `spoiled`."""
        self.spoiled: list[int] = []

    def write_common(self, common: bytes) -> None:
        """The first bytes of every packet."""
        if self.common != common:
            self.common = common
            self.table[:, :SAME_BYTES] = np.frombuffer(common, np.uint8)
            self.spoiled.clear()
        while self.spoiled:
            at = self.spoiled.pop() * self.size
            self.view[at : at + SAME_BYTES] = common

    def write_psns(self, psn: int, count: int) -> None:
        """The rest of the headers, without acknowledge requests."""
        psn &= bth.LOW_24_BITS
        low = psn % PSN_BLOCK
        if low + count <= PSN_BLOCK:
            self.sequence[:count] = psn_words(psn // PSN_BLOCK)[low : low + count]
        else:
            psns = self.steps[:count] + np.uint32(psn) & np.uint32(bth.LOW_24_BITS)
            self.sequence[:count] = psns.astype(">u4").view("<u4")

    def write_icrcs(self, flow: Flow, count: int) -> None:
        """Of packets that differ in their PSN alone."""
        value = crc32(self.common, prefix_crc(flow, self.size))
        # By way of `struct`, which takes a third of the time that numpy needs for numbers one by one.
        _icrcs(count).pack_into(self.made, 0, *map(crc32, self.covered[:count], repeat(value)))
        self.icrc[:count] = self.icrcs[:count]

    def write_icrc(self, index: int, prefix: int) -> None:
        """Of a packet that differs in more."""
        at = index * self.size
        self.icrc[index] = crc32(self.covered[index], crc32(self.view[at : at + SAME_BYTES], prefix))


class PacketWriter:
    """The buffers in which a device makes its packets: one for single ones, and one for the rows of each MTU
    that is in use (there are five MTUs; 250 KiB at most for each)."""

    def __init__(self) -> None:
        self._view = memoryview(bytearray(MAX_PACKET))
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
        flags = bth.MIGRATION_REQUEST | pad << bth.PAD_SHIFT | (bth.SOLICITED_EVENT if solicited else 0)
        sequence = psn & bth.LOW_24_BITS | (bth.ACKNOWLEDGE_REQUEST if acknowledge else 0)
        bth.BTH.pack_into(view, 0, opcode, flags, bth.DEFAULT_P_KEY, queue_pair, sequence)
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
        are the opcodes of the outer packets where these differ; `acknowledge` is asked for by the last.

        `source` is one burst at most where segments are numbered, else `VOLLEY_BURSTS`.
        """
        layout = self._layouts.get(mtu)
        if layout is None:
            layout = self._layouts[mtu] = _Layout(mtu)
        count = len(source) // mtu
        size, view, flow = layout.size, layout.view, path.flow
        head = opcode << 24 | bth.MIGRATION_REQUEST << 16 | bth.DEFAULT_P_KEY
        layout.write_common(_COMMON.pack(head, queue_pair))
        layout.write_psns(psn, count)
        if acknowledge:
            view[(count - 1) * size + bth.OFFSET_PSN] |= _ACKNOWLEDGE_BIT
        layout.payload[:count] = source.reshape(count, mtu)
        outer = []
        if first is not None:
            view[0] = first
            outer.append(0)
        if last is not None:
            view[(count - 1) * size] = last
            outer.append(count - 1)
        if path.numbered:
            for index, prefix in enumerate(burst_prefixes(flow, size, count)):
                layout.write_icrc(index, prefix)
        else:
            layout.write_icrcs(flow, count)
            for index in outer:
                layout.write_icrc(index, prefix_crc(flow, size))
        layout.spoiled += outer
        return Burst(view[: count * size], size, path.destination)

    def with_last(self, row: Burst, mtu: int, last: Burst) -> Burst:
        """A row of `rows`, as it was made last, with one packet behind it that is no longer than those of the
        row, and for which the row's last burst has room. It goes out by the same call of the socket."""
        layout, end = self._layouts[mtu], len(row.data)
        longer = end + len(last.data)
        layout.view[end:longer] = last.data
        layout.spoiled.append(end // layout.size)
        return Burst(layout.view[:longer], row.segment_size, row.destination)
