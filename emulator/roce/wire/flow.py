"""Flows: the addresses and ports of a RoCEv2 packet, and its IP and UDP headers.

IPv4 (RFC 791), always 20 bytes:

    0 0x45   1 TOS   2..3 total length   4..5 identification   6..7 flags and fragment offset
    8 TTL    9 17    10..11 header checksum   12..15 source   16..19 destination

IPv6 (RFC 8200), 40 bytes:

    0..3 version(4) traffic class(8) flow label(20)   4..5 payload length   6 17   7 hop limit
    8..23 source   24..39 destination

UDP (RFC 768): 0..1 source port, 2..3 destination port, 4..5 length, 6..7 checksum. Big-endian throughout.
"""

import socket
import struct
from functools import lru_cache
from typing import Final, NamedTuple, TypeAlias

Buffer: TypeAlias = bytes | bytearray | memoryview

IPV4: Final = struct.Struct(">BBHHHBBH4s4s")
IPV6: Final = struct.Struct(">IHBB16s16s")
UDP: Final = struct.Struct(">HHHH")
assert (IPV4.size, IPV6.size, UDP.size) == (20, 40, 8)

IPV4_VERSION_AND_LENGTH: Final = 0x45
IPV6_VERSION: Final = 6
DONT_FRAGMENT: Final = 0x4000
PROTOCOL_UDP: Final = 17
ROCE_PORT: Final = 4791
"""The UDP destination port of RoCEv2 (IBTA annex A17)."""
SOURCE_PORT_MIN: Final = 0xC000
"""Source ports are taken from here upwards: they carry the entropy for the choice of a path (annex A17)."""
TIME_TO_LIVE: Final = 64

MAX_CACHED_FLOWS: Final = 1024
"""Pairs of addresses as text, and ports, of which the flow is remembered; about 0.5 MiB."""


MAX_CACHED_GIDS: Final = 256

GID_BYTES: Final = 16
_MAPPED: Final = bytes(10) + b"\xff\xff"
"""A GID is an IPv6 address; IPv4 is mapped, ::ffff:a.b.c.d (IBTA annex A17)."""


class Flow(NamedTuple):
    """Addresses of 4 (IPv4) or 16 (IPv6) bytes each, in network order, and the UDP ports."""

    source: bytes
    destination: bytes
    source_port: int = SOURCE_PORT_MIN
    destination_port: int = ROCE_PORT

    @property
    def is_ipv6(self) -> bool:
        return len(self.source) == 16

    def __repr__(self) -> str:
        ends = (f"{text_address(self.source)}:{self.source_port}", text_address(self.destination))
        return f"Flow({' -> '.join(ends)}:{self.destination_port})"


def packed_address(text: str) -> bytes:
    """4 or 16 bytes of an address as it is written. ValueError for anything else, host names included."""
    family = socket.AF_INET6 if ":" in text else socket.AF_INET
    try:
        return socket.inet_pton(family, text)
    except OSError:
        raise ValueError(f"{text!r} is no IP address") from None


def text_address(packed: bytes) -> str:
    """An address of 4 or 16 bytes as it is written."""
    return socket.inet_ntop(socket.AF_INET6 if len(packed) == 16 else socket.AF_INET, packed)


@lru_cache(maxsize=MAX_CACHED_GIDS)
def gid_of(ip: str) -> bytes:
    """The 16 bytes of the GID of an address as text. ValueError where it is none."""
    address = packed_address(ip)
    return _MAPPED + address if len(address) == 4 else address


@lru_cache(maxsize=MAX_CACHED_GIDS)
def ip_of(gid: bytes) -> str:
    """The address of a GID, as text. ValueError where `gid` is not 16 bytes."""
    if len(gid) != GID_BYTES:
        raise ValueError(f"a GID has 16 bytes, not {len(gid)}")
    return text_address(gid[12:] if gid.startswith(_MAPPED) else gid)


def is_multicast(text: str) -> bool:
    """Whether an address, as it is written, is a group of receivers: 224.0.0.0/4 (RFC 5771), ff00::/8 (RFC
    4291). ValueError where it is no address."""
    packed = packed_address(text)
    return packed[0] == 0xFF if len(packed) == 16 else packed[0] >> 4 == 0xE


@lru_cache(maxsize=MAX_CACHED_FLOWS)
def flow_of(source: str, destination: str, source_port: int = SOURCE_PORT_MIN) -> Flow:
    """The flow between two addresses as they are written. ValueError when they are of two families."""
    flow = Flow(packed_address(source), packed_address(destination), source_port)
    if len(flow.source) != len(flow.destination):
        raise ValueError(f"{source} and {destination} are not of one address family")
    return flow


def _ones_sum(words: bytes) -> int:
    total: int = sum(struct.unpack(f">{len(words) // 2}H", words))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return total


def ip_and_udp_headers(flow: Flow, datagram: Buffer, ip_id: int = 0) -> bytes:
    """The 28 or 48 bytes before a UDP payload, as our socket sends them.

    IPv4: don't fragment, identification `ip_id`, UDP checksum 0 ("none"). In IPv6 a UDP checksum of 0 is
    not allowed (RFC 8200, 8.1), so there it is computed.
    """
    size = UDP.size + len(datagram)
    if not flow.is_ipv6:
        fields = [IPV4_VERSION_AND_LENGTH, 0, IPV4.size + size, ip_id, DONT_FRAGMENT, TIME_TO_LIVE,
                  PROTOCOL_UDP, 0, flow.source, flow.destination]  # fmt: skip
        fields[7] = 0xFFFF - _ones_sum(IPV4.pack(*fields))
        return IPV4.pack(*fields) + UDP.pack(flow.source_port, flow.destination_port, size, 0)
    pseudo = flow.source + flow.destination + struct.pack(">II", size, PROTOCOL_UDP)
    udp = UDP.pack(flow.source_port, flow.destination_port, size, 0)
    covered = pseudo + udp + bytes(datagram)
    checksum = 0xFFFF - _ones_sum(covered + b"\0" * (len(covered) & 1)) or 0xFFFF
    return (
        IPV6.pack(IPV6_VERSION << 28, size, PROTOCOL_UDP, TIME_TO_LIVE, flow.source, flow.destination)
        + udp[:6]
        + checksum.to_bytes(2, "big")
    )
