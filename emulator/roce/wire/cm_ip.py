"""The RDMA IP CM service (IBTA annex A11): IP addresses and ports for the connection manager.

A service ID names a port space and a port:

    0..4 0x0000000001   5 IP protocol (6 for the port space "TCP", 17 for "UDP")   6..7 port

and the private data of a REQ (or SIDR_REQ) to it begin with 36 bytes:

    0      7..4 major version (0), 3..0 minor version (0)
    1      7..4 IP version, 3..0 reserved
    2..3   source port
    4..19  source address, 20..35 destination address     an IPv4 address in the last four bytes of each

of the 92 the rest, 56, is the consumer's. Big-endian.
"""

import struct
from dataclasses import dataclass
from enum import IntEnum
from typing import Final

from emulator.roce.wire.flow import Buffer
from emulator.roce.wire.malformed import Cause, MalformedPacket

IP_CM: Final = struct.Struct(">BBH16s16s")
IP_CM_BYTES: Final = IP_CM.size
assert IP_CM_BYTES == 36


class PortSpace(IntEnum):
    """Port spaces of rdma_cm, with its numbers (enum rdma_port_space): bits 31..16 of the service ID."""

    TCP = 0x0106
    UDP = 0x0111


def service_id(port_space: PortSpace, port: int) -> int:
    """The 64-bit service ID of a port. ValueError for a port outside 0..65535."""
    if not 0 <= port <= 0xFFFF:
        raise ValueError(f"{port} is no port")
    return port_space << 16 | port


def port_of(service: int) -> tuple[PortSpace, int] | None:
    """The port space and port of a service ID; None when it is not one of the RDMA IP CM service."""
    space = service >> 16
    if space not in PortSpace._value2member_map_:
        return None
    return PortSpace(space), service & 0xFFFF


@dataclass(frozen=True, slots=True)
class IpCmHeader:
    """The source and destination of a request. Addresses have 4 (IPv4) or 16 (IPv6) bytes, both alike."""

    source: bytes
    destination: bytes
    source_port: int
    major_version: int = 0
    minor_version: int = 0

    def encode(self) -> bytes:
        """36 bytes. ValueError when the addresses are of two families, or of none."""
        size = len(self.source)
        if size != len(self.destination) or size not in (4, 16):
            raise ValueError(f"addresses of {size} and {len(self.destination)} bytes")
        return IP_CM.pack(
            self.major_version << 4 | self.minor_version,
            (4 if size == 4 else 6) << 4,
            self.source_port,
            self.source.rjust(16, b"\0"),
            self.destination.rjust(16, b"\0"),
        )


def decode_ip_cm_untrusted(private_data: Buffer) -> IpCmHeader:
    """The header at the beginning of private data. MalformedPacket (cause IP_CM) if it is none of ours:
    too short, a major version other than 0, or an IP version other than 4 and 6."""
    if len(private_data) < IP_CM_BYTES:
        raise MalformedPacket(Cause.IP_CM, f"{len(private_data)} bytes of private data")
    versions, ip_version, port, source, destination = IP_CM.unpack_from(private_data)
    if versions >> 4 != 0:
        raise MalformedPacket(Cause.IP_CM, f"major version {versions >> 4}")
    if ip_version >> 4 == 4:
        source, destination = source[12:], destination[12:]
    elif ip_version >> 4 != 6:
        raise MalformedPacket(Cause.IP_CM, f"IP version {ip_version >> 4}")
    return IpCmHeader(source, destination, port, versions >> 4, versions & 0x0F)
