"""A link that writes a capture of everything that passes another link; Wireshark opens the file.

It captures each sent and received datagram by itself, with the identification of its ICRC as far as a socket
knows it. A socket does not show that of an arriving datagram, so the capture has the one that an emulated
peer sends. Packets of a kernel may thus appear with a wrong identification and a wrong ICRC.

A pcap file (draft-ietf-opsawg-pcap), little-endian, of link type 101: each record is a bare IP packet.

    file    0..3 magic   4..5 major (2)   6..7 minor (4)   8..15 zero   16..19 snap length   20..23 link type
    record  0..3 seconds   4..7 nanoseconds   8..11 and 12..15 bytes, here the same
"""

import logging
import struct
import time
from pathlib import Path
from typing import Any, BinaryIO, Final

from emulator.roce.link.base import Link, Received
from emulator.roce.nic.verbs import Address, Burst
from emulator.roce.wire.flow import Buffer, Flow, flow_of, ip_and_udp_headers

log = logging.getLogger(__name__)

FILE_HEADER: Final = struct.Struct("<IHHiIII")
RECORD_HEADER: Final = struct.Struct("<IIII")
assert (FILE_HEADER.size, RECORD_HEADER.size) == (24, 16)

MAGIC_NANOSECONDS: Final = 0xA1B2_3C4D
LINK_TYPE_RAW: Final = 101
SNAP_LENGTH: Final = 262_144

DEFAULT_FILE_BYTES: Final = 1 << 30
BUFFER_BYTES: Final = 1 << 20


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


class TappedLink:
    """A `Link` round another, which it closes. Raises OSError where the file cannot be made.

    Where it can be written no longer (a full disk), or is as large as it may be, the capture ends there.
    That is logged; packets go on. The close logs how many packets had no room.
    """

    def __init__(self, link: Link, path: Path, *, max_bytes: int = DEFAULT_FILE_BYTES) -> None:
        self._link = link
        self._path = path
        self._has_ended = False
        self._file = path.open("wb", buffering=BUFFER_BYTES)
        self._writer = PcapWriter(self._file, max_bytes=max_bytes)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._link, name)

    def pending(self) -> Received | None:
        return self._captured(self._link.pending())

    def receive(self) -> Received | None:
        return self._captured(self._link.receive())

    def _captured(self, received: Received | None) -> Received | None:
        if received is not None:
            own = self._link.address
            to = Address(received.group, own.port) if received.group else own
            self._write(received.source, to, received.data, received.segment_size)
        return received

    def send(self, burst: Burst) -> None:
        """See `Link`. It captures a burst at once, even if the burst waits or is lost later."""
        self._write(self._link.address, burst.destination, burst.data, burst.segment_size)
        self._link.send(burst)

    def close(self) -> None:
        """See `Link`; the file is complete afterwards."""
        self._link.close()
        try:
            self._file.close()
        except OSError as why:
            self._end(why)
        if self._writer.left_out:
            log.warning("the capture %s leaves %d later packets out", self._path, self._writer.left_out)

    def _end(self, why: OSError) -> None:
        if not self._has_ended:
            self._has_ended = True
            log.warning("the capture %s ends here, packets go on: %s", self._path, why.strerror)

    def _write(self, source: Address, destination: Address, data: memoryview, segment_size: int) -> None:
        if self._has_ended:
            return
        flow = flow_of(source.ip, destination.ip, source.port)
        now = time.time()
        peer = destination.ip if source.ip == self._link.address.ip else source.ip
        numbered = self._link.numbers_segments(peer)
        had_room = not self._writer.left_out
        try:
            self._writer.write_burst(flow, data, segment_size, now, numbered=numbered)
        except OSError as why:
            self._end(why)
        if had_room and self._writer.left_out:
            log.warning("the capture %s is full and ends here, packets go on", self._path)
