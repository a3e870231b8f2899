"""Read RoCEv2 packets out of pcap files, plain or gzip: the golden captures, and what our own writer wrote.

Layouts: draft-ietf-opsawg-pcap (little-endian, micro- or nanoseconds), link types 1 (Ethernet) and 101 (bare
IP), IPv4 without options and IPv6, UDP. The reader is made apart from `emulator.roce.link.tap`.
"""

from __future__ import annotations

import gzip
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from emulator.roce.wire.flow import Flow

VECTORS = Path(__file__).parents[2] / "vectors" / "roce"
LARGE = VECTORS / "large"
"""Apart, so that what is done with each byte of a capture is done with the small ones."""
ROCE_PORT = 4791


class Captured(NamedTuple):
    """One RoCEv2 packet of a capture."""

    flow: Flow
    ip_id: int
    headers: bytes
    """IP and UDP, 28 or 48 bytes."""
    datagram: bytes
    """The UDP payload, ICRC included."""
    when: float
    """Seconds since 1970."""

    @property
    def by_kernel(self) -> bool:
        """rxe sends without a UDP checksum; a UDP socket on a network device sends with one."""
        return self.headers[-2:] == b"\0\0"


def read_packets(file: Path) -> Iterator[Captured]:
    """The packets to UDP port 4791, in order. ValueError for a file that is no such pcap."""
    data = (gzip.decompress if file.suffix == ".gz" else bytes)(file.read_bytes())
    magic, *_, link_type = struct.unpack_from("<IHHiIII", data)
    if magic not in (0xA1B2C3D4, 0xA1B23C4D) or link_type not in (1, 101):
        raise ValueError(f"{file}: magic {magic:#x}, link type {link_type}")
    ticks = 1e6 if magic == 0xA1B2C3D4 else 1e9
    position = 24
    while position < len(data):
        seconds, fraction, captured, original = struct.unpack_from("<IIII", data, position)
        if captured != original:
            raise ValueError(f"{file}: a packet was cut to {captured} of {original} bytes")
        frame = data[position + 16 : position + 16 + captured]
        position += 16 + captured
        packet = frame[14:] if link_type == 1 else frame
        if link_type == 1 and frame[12:14] not in (b"\x08\x00", b"\x86\xdd"):
            continue
        version = packet[0] >> 4
        size = 20 if version == 4 else 40
        if packet[9 if version == 4 else 6] != 17 or packet[size + 2 : size + 4] != b"\x12\xb7":
            continue
        (udp_length,) = struct.unpack_from(">H", packet, size + 4)
        addresses = packet[12:20] if version == 4 else packet[8:40]
        half = len(addresses) // 2
        (source_port,) = struct.unpack_from(">H", packet, size)
        yield Captured(
            Flow(addresses[:half], addresses[half:], source_port, ROCE_PORT),
            struct.unpack_from(">H", packet, 4)[0] if version == 4 else 0,
            packet[: size + 8],
            packet[size + 8 : size + udp_length],
            seconds + fraction / ticks,
        )


def small_captures() -> list[Path]:
    """All but those in `LARGE`."""
    return sorted(VECTORS.glob("*.pcap.gz"))
