"""Captures of RoCEv2 packets that Wireshark and tcpdump read, made without a network in between.

A pcap file (draft-ietf-opsawg-pcap), little-endian, of link type 101: each record is a bare IP packet.

    file    0..3 magic   4..5 major (2)   6..7 minor (4)   8..15 zero   16..19 snap length   20..23 link type
    record  0..3 seconds   4..7 nanoseconds   8..11 and 12..15 bytes, here the same
"""

from __future__ import annotations

import struct
from typing import BinaryIO, Final

from emulator.roce.wire.flow import Buffer, Flow, ip_and_udp_headers

FILE_HEADER: Final = struct.Struct("<IHHiIII")
RECORD_HEADER: Final = struct.Struct("<IIII")
assert (FILE_HEADER.size, RECORD_HEADER.size) == (24, 16)

MAGIC_NANOSECONDS: Final = 0xA1B2_3C4D
LINK_TYPE_RAW: Final = 101
SNAP_LENGTH: Final = 262_144

DEFAULT_FILE_BYTES: Final = 1 << 30


class PcapWriter:
    """Writes packets of a link into a file, which the caller opens and closes.

    It stops at `max_bytes` of file; `left_out` counts later packets. Not locked: one thread at a time.
    An OSError of the file goes to the caller.
    """

    def __init__(self, file: BinaryIO, *, max_bytes: int = DEFAULT_FILE_BYTES) -> None:
        self._file = file
        self._room = max_bytes - FILE_HEADER.size
        self.written = 0
        """Packets in the file."""
        self.left_out = 0
        """Packets that would have made the file larger than allowed."""
        file.write(FILE_HEADER.pack(MAGIC_NANOSECONDS, 2, 4, 0, 0, SNAP_LENGTH, LINK_TYPE_RAW))

    def write(self, flow: Flow, datagram: Buffer, when: float, ip_id: int = 0) -> None:
        """One packet: a UDP payload of `flow` at `when`, in seconds since 1970 for a time that makes sense.

        `ip_id` is the identification of the IPv4 header, for which the ICRC was made.
        """
        packet = ip_and_udp_headers(flow, datagram, ip_id) + bytes(datagram)
        if self._room < RECORD_HEADER.size + len(packet):
            self._room = 0
            self.left_out += 1
            return
        self._room -= RECORD_HEADER.size + len(packet)
        seconds, fraction = divmod(round(when * 1e9), 1_000_000_000)
        self._file.write(
            RECORD_HEADER.pack(seconds & 0xFFFF_FFFF, fraction, len(packet), len(packet)) + packet
        )
        self.written += 1

    def write_burst(
        self, flow: Flow, burst: Buffer, segment_bytes: int, when: float, *, numbered: bool = True
    ) -> None:
        """A row of equally long datagrams, of which the last may be shorter, as one call moves it.

        Segment i has identification i, as the kernel numbers them (see `icrc.py`); where not `numbered`, 0.
        """
        view = memoryview(burst)
        for index, start in enumerate(range(0, len(view), segment_bytes)):
            self.write(flow, view[start : start + segment_bytes], when, index if numbered else 0)
