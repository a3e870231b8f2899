"""Capture loopback TCP traffic into a pcap file, and read the byte streams out of one.

Layouts: https://www.ietf.org/archive/id/draft-ietf-opsawg-pcap-04.html (little-endian, microseconds),
link type 1 (Ethernet: the loopback device has an empty Ethernet header), IPv4 (RFC 791), TCP (RFC 9293).
"""

from __future__ import annotations

import gzip
import socket
import struct
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import IO, cast

FILE_HEADER = struct.Struct("<IHHiIII")
RECORD_HEADER = struct.Struct("<IIII")
PCAP_MAGIC = 0xA1B2C3D4
LINKTYPE_ETHERNET = 1
SNAP_LENGTH = 262_144

ETHERNET_HEADER_BYTES = 14
ETHERTYPE_IPV4 = 0x0800
PROTOCOL_TCP = 6
FLAG_FIN, FLAG_SYN = 1, 2
ALL_PROTOCOLS = 0x0003
# The loopback device shows each packet twice: as it leaves, and as it arrives.
PACKET_OUTGOING = 4
# asm-generic/socket.h: SO_RCVBUF beyond the limit of the system, for root.
SO_RCVBUFFORCE = 33


class Capture:
    """Writes the TCP packets from and to `port` on lo to `file`, while in its `with` block. Needs root.

    A name that ends in .gz makes it a compressed file, which Wireshark reads as well.
    """

    def __init__(self, file: Path, port: int) -> None:
        self._file, self._port = file, port
        self._socket = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(ALL_PROTOCOLS))
        self._thread = threading.Thread(target=self._run, name="packet capture")
        self._ending = threading.Event()

    def __enter__(self) -> Capture:
        self._socket.setsockopt(socket.SOL_SOCKET, SO_RCVBUFFORCE, 32 << 20)
        self._socket.bind(("lo", 0))
        self._socket.settimeout(0.2)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ending.set()
        self._thread.join()
        self._socket.close()

    def _run(self) -> None:
        with _opener(self._file)(self._file, "wb") as file:
            file.write(FILE_HEADER.pack(PCAP_MAGIC, 2, 4, 0, 0, SNAP_LENGTH, LINKTYPE_ETHERNET))
            while True:
                try:
                    frame, origin = self._socket.recvfrom(SNAP_LENGTH)
                except TimeoutError:
                    if self._ending.is_set():  # only when nothing more is waiting
                        return
                    continue
                segment = None if origin[2] == PACKET_OUTGOING else decode_segment(frame)
                if segment and self._port in (segment.source[1], segment.destination[1]):
                    seconds, rest = divmod(time.time_ns(), 1_000_000_000)
                    file.write(RECORD_HEADER.pack(seconds, rest // 1000, len(frame), len(frame)) + frame)


@dataclass(frozen=True, slots=True)
class Segment:
    """One TCP segment: (address, port) pairs, sequence number, flags, payload."""

    source: tuple[str, int]
    destination: tuple[str, int]
    sequence: int
    flags: int
    payload: bytes


@dataclass(slots=True)
class Connection:
    """Both byte streams of one TCP connection, whole and in order."""

    client: tuple[str, int]
    server: tuple[str, int]
    from_client: bytearray = field(default_factory=bytearray)
    from_server: bytearray = field(default_factory=bytearray)


def decode_segment(frame: bytes) -> Segment | None:
    """The TCP segment of an Ethernet frame; None if it is something else."""
    if len(frame) < 54 or int.from_bytes(frame[12:14], "big") != ETHERTYPE_IPV4 or frame[23] != PROTOCOL_TCP:
        return None
    packet = frame[ETHERNET_HEADER_BYTES:]
    segment = packet[(packet[0] & 0xF) * 4 : int.from_bytes(packet[2:4], "big") or None]
    source_port, destination_port, sequence = struct.unpack_from(">HHI", segment)
    return Segment(
        (socket.inet_ntoa(packet[12:16]), source_port),
        (socket.inet_ntoa(packet[16:20]), destination_port),
        sequence,
        segment[13],
        bytes(segment[(segment[12] >> 4) * 4 :]),
    )


def read_connections(file: Path) -> list[Connection]:
    """The connections of a capture that starts before them, in the order in which they were opened.

    Retransmitted bytes are taken once. A missing byte raises ValueError.
    """
    with _opener(file)(file, "rb") as opened:
        data = opened.read()
    if FILE_HEADER.unpack_from(data)[0] != PCAP_MAGIC:
        raise ValueError(f"{file} is no little-endian pcap file with microseconds")
    offset, segments = FILE_HEADER.size, list[Segment]()
    while offset < len(data):
        length = RECORD_HEADER.unpack_from(data, offset)[2]
        offset += RECORD_HEADER.size
        segment = decode_segment(data[offset : offset + length])
        if segment:
            segments.append(segment)
        offset += length

    connections: dict[tuple[tuple[str, int], tuple[str, int]], Connection] = {}
    expected: dict[tuple[tuple[str, int], tuple[str, int]], int] = {}
    waiting: dict[tuple[tuple[str, int], tuple[str, int]], dict[int, bytes]] = defaultdict(dict)
    for segment in segments:
        way = (segment.source, segment.destination)
        if segment.flags & FLAG_SYN:
            expected[way] = (segment.sequence + 1) & 0xFFFFFFFF
            if way[::-1] not in expected:
                connections[way] = Connection(*way)
            continue
        if way not in expected or not segment.payload:
            continue
        waiting[way][segment.sequence] = segment.payload
        connection = connections.get(way) or connections[way[::-1]]
        stream = connection.from_client if way in connections else connection.from_server
        while (payload := waiting[way].pop(expected[way], None)) is not None:
            stream += payload
            expected[way] = (expected[way] + len(payload)) & 0xFFFFFFFF
    for way, rest in waiting.items():
        if any((sequence - expected[way]) & 0xFFFFFFFF < 1 << 31 for sequence in rest):
            raise ValueError(f"{file}: bytes are missing from {way[0]} to {way[1]}")
    return list(connections.values())


def _opener(file: Path) -> Callable[[Path, str], IO[bytes]]:
    return cast("Callable[[Path, str], IO[bytes]]", gzip.open if file.suffix == ".gz" else open)
