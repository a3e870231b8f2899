"""The invariant CRC (IBTA volume 1, 7.8.1; for RoCEv2 annex A17), made, checked and solved.

It is the CRC-32 of Ethernet, stored little-endian in the last four bytes of the UDP payload, over

    8 bytes 0xFF                  where InfiniBand would have its local route header
    IP header, UDP header, UDP payload up to the ICRC, padding included

with ones in place of whatever a router may change: IPv4 TOS, TTL and header checksum; IPv6 traffic class,
flow label and hop limit; the UDP checksum; byte 4 of the BTH (FECN, BECN, reserved).

A CRC is linear: flipping bits of the input flips bits of the CRC that depend on nothing but where they
are. Three things follow, and this file lives on them.

1. The masking of BTH byte 4 can be done before the BTH is there: `prefix_crc` has it in already. The ICRC of
   a packet whose byte 4 is 0 is one call, `crc32(payload_up_to_the_icrc, prefix_crc(...))`, no copy made.
2. The identification of the IPv4 header, which a plain UDP socket does not show, can be computed from the
   ICRC that was received. The difference to the ICRC for identification 0, shifted back to where the field
   stands, must have 16 zero bits, and the other 16 are the field. So a packet of a stranger is still checked
   with 16 bits of strength (one wrong packet in 65,536 passes), and with all 32 where the field is known.
3. An unconnected UDP socket that always forbids fragmentation (IP_PMTUDISC_DO) sends identification 0. Of one
   `sendmsg` with UDP_SEGMENT the kernel makes segments with identification 0, 1, 2, ...: the ICRC of segment
   i is made for identification i (`burst_prefixes`), also where, as on the loopback device, nobody segments.
"""

from functools import lru_cache
from typing import Final

from isal import isal_zlib

from emulator.roce.wire.flow import (
    DONT_FRAGMENT,
    IPV4,
    IPV4_VERSION_AND_LENGTH,
    IPV6,
    IPV6_VERSION,
    PROTOCOL_UDP,
    UDP,
    Buffer,
    Flow,
)
from emulator.roce.wire.opcodes import ICRC_BYTES as ICRC_BYTES
from emulator.roce.wire.opcodes import MAX_PACKET

crc32 = isal_zlib.crc32
"""`crc32(data, value)`, continued from `value`. At memory speed; releases the GIL for larger buffers."""

BTH_RESERVED_OFFSET: Final = 4
"""Where the masked byte of the BTH stands: FECN, BECN and six reserved bits."""

MAX_CACHED_PREFIXES: Final = 4096
"""Flows times lengths times identifications of which the prefix is remembered; about 2 MiB."""
MAX_CACHED_BURSTS: Final = 256
"""Flows times lengths times counts of which the rows of prefixes are remembered; less than 1 MiB."""
MAX_CACHED_LENGTHS: Final = 1040
"""Packet lengths of which the table for solving is remembered, all that exist: multiples of four up to 4,132.
About 6 MiB when a peer has used each; less would let it make us compute one for every packet of its."""

_POLYNOMIAL: Final = 0xEDB88320
_ONE: Final = 0x80000000
"""The polynomial 1: bit 31 of the CRC's register is the coefficient of x to the 0, bit 0 of x to the 31."""
_ORDER: Final = 0xFFFFFFFF
"""x to this power is 1 modulo the polynomial, so x to the -n is x to the (_ORDER - n)."""


def _times_x(value: int) -> int:
    return value >> 1 ^ (_POLYNOMIAL if value & 1 else 0)


def _times(a: int, b: int) -> int:
    """a * b modulo the polynomial."""
    product = 0
    while a:
        if a & _ONE:
            product ^= b
        a = a << 1 & 0xFFFFFFFF
        b = _times_x(b)
    return product


def _power(base: int, exponent: int) -> int:
    result = _ONE
    while exponent:
        if exponent & 1:
            result = _times(result, base)
        base = _times(base, base)
        exponent >>= 1
    return result


_BYTE_BACK: Final = _power(_ONE >> 1, _ORDER - 8)
"""x to the -8: takes a difference in the register back to where it was one byte before."""
_FOUR_BYTES_BACK: Final = _power(_BYTE_BACK, BTH_RESERVED_OFFSET)
RESERVED_CORRECTION: Final = tuple(_times(_FOUR_BYTES_BACK, value) for value in range(256))
"""What BTH byte 4 changes in the value to continue from, by its value; nothing when it is 0."""


@lru_cache(maxsize=MAX_CACHED_PREFIXES)
def prefix_crc(flow: Flow, datagram_bytes: int, ip_id: int = 0) -> int:
    """The value from which `crc32` continues with the BTH of a packet.

    `datagram_bytes` is the length of the UDP payload, ICRC included; `ip_id` the identification of the IPv4
    header (IPv6 has none). BTH byte 4 counts as 0 in what follows: XOR with `RESERVED_CORRECTION[value]`
    where it is not.
    """
    size = UDP.size + datagram_bytes
    udp = UDP.pack(flow.source_port, flow.destination_port, size, 0xFFFF)
    if flow.is_ipv6:
        word = IPV6_VERSION << 28 | 0x0FFFFFFF
        header = IPV6.pack(word, size, PROTOCOL_UDP, 0xFF, flow.source, flow.destination)
    else:
        header = IPV4.pack(
            IPV4_VERSION_AND_LENGTH, 0xFF, IPV4.size + size, ip_id, DONT_FRAGMENT, 0xFF, PROTOCOL_UDP, 0xFFFF,
            flow.source, flow.destination,
        )  # fmt: skip
    return crc32(b"\xff" * 8 + header + udp) ^ RESERVED_CORRECTION[0xFF]


@lru_cache(maxsize=MAX_CACHED_BURSTS)
def burst_prefixes(flow: Flow, datagram_bytes: int, count: int) -> tuple[int, ...]:
    """The prefixes of `count` equally long packets that one call sends with UDP_SEGMENT."""
    return tuple(prefix_crc(flow, datagram_bytes, index) for index in range(count))


def icrc_of(covered: Buffer, flow: Flow, ip_id: int = 0) -> int:
    """The ICRC of a UDP payload without its last four bytes. `covered` has a whole BTH at least."""
    value = prefix_crc(flow, len(covered) + ICRC_BYTES, ip_id)
    return crc32(covered, value ^ RESERVED_CORRECTION[covered[BTH_RESERVED_OFFSET]])


@lru_cache(maxsize=MAX_CACHED_LENGTHS)
def _way_back(datagram_bytes: int) -> tuple[tuple[int, ...], ...]:
    """Eight tables of 16, one for each nibble of a difference from the lowest on: what it was, shifted back
    from the ICRC over everything that follows the identification, that field included."""
    # The column of bit 31 is the factor itself; each next lower bit is one x more.
    column = _power(_BYTE_BACK, IPV4.size - 4 + UDP.size + datagram_bytes - ICRC_BYTES)
    tables = []
    for _ in range(8):
        table = [0] * 16
        for bit in (8, 4, 2, 1):
            for others in range(0, 16, 2 * bit):
                for nibble in range(others + bit, others + 2 * bit):
                    table[nibble] ^= column
            column = _times_x(column)
        tables.append(tuple(table))
    return tuple(reversed(tables))


def solved_ip_id(difference: int, datagram_bytes: int) -> int | None:
    """The identification that explains a difference to the ICRC for identification 0; None: nothing does.

    A length that no packet has is explained by nothing, and costs nothing.
    """
    if datagram_bytes > MAX_PACKET or datagram_bytes & 3:
        return None
    t0, t1, t2, t3, t4, t5, t6, t7 = _way_back(datagram_bytes)
    register = (
        t0[difference & 15] ^ t1[difference >> 4 & 15] ^ t2[difference >> 8 & 15]
        ^ t3[difference >> 12 & 15] ^ t4[difference >> 16 & 15] ^ t5[difference >> 20 & 15]
        ^ t6[difference >> 24 & 15] ^ t7[difference >> 28]
    )  # fmt: skip
    if register >> 16:
        return None
    return (register & 0xFF) << 8 | register >> 8
