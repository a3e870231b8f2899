"""A multicast packet, byte by byte: queue pair 0xFFFFFF, and an ICRC over the address of the group."""

from __future__ import annotations

import struct
import zlib

import pytest

from emulator.roce.wire.extended import Deth
from emulator.roce.wire.flow import flow_of, gid_of, ip_of, is_multicast
from emulator.roce.wire.malformed import Cause, MalformedPacket
from emulator.roce.wire.opcodes import Opcode
from emulator.roce.wire.packet import Packet
from tests.support.roce.packets import check_icrc_untrusted, decode_packet_untrusted, encode_packet

FLOW = flow_of("192.0.2.1", "239.1.2.3", 0xC0DE)
PACKET = Packet(
    Opcode.UD_SEND_ONLY, 0xFFFFFF, 0x123456, b"group", p_key=0xFFFF, deth=Deth(0x01234567, 0xFEDCBA)
)
COVERED = bytes.fromhex("64 30 ffff 00 ffffff 00 123456  01234567 00 fedcba  67726f757000 0000")
ICRC = bytes.fromhex("818d1ea1")


def test_a_multicast_packet_is_these_bytes() -> None:
    assert encode_packet(PACKET, FLOW) == COVERED + ICRC
    assert decode_packet_untrusted(COVERED + ICRC, FLOW) == PACKET


def test_its_icrc_is_that_of_the_specification() -> None:
    """Written out once more: IBTA 7.8.1 over an IPv4 header with the address of the group, by zlib."""
    size = len(COVERED) + 4
    ip = struct.pack(">BBHHHBBH", 0x45, 0xFF, 28 + size, 0, 0x4000, 0xFF, 17, 0xFFFF)
    ip += bytes([192, 0, 2, 1, 239, 1, 2, 3])
    udp = struct.pack(">HHHH", 0xC0DE, 4791, 8 + size, 0xFFFF)
    masked = COVERED[:4] + b"\xff" + COVERED[5:]
    assert zlib.crc32(b"\xff" * 8 + ip + udp + masked).to_bytes(4, "little") == ICRC


def test_another_group_is_another_icrc() -> None:
    check_icrc_untrusted(COVERED + ICRC, FLOW, 0)
    with pytest.raises(MalformedPacket) as found:
        check_icrc_untrusted(COVERED + ICRC, flow_of("192.0.2.1", "239.1.2.2", 0xC0DE), 0)
    assert found.value.cause is Cause.ICRC


@pytest.mark.parametrize(
    ("address", "group"),
    [
        ("223.255.255.255", False), ("224.0.0.0", True), ("239.255.255.255", True), ("240.0.0.0", False),
        ("fe80::1", False), ("ff02::1", True),
    ],
)  # fmt: skip
def test_which_addresses_are_groups(address: str, group: bool) -> None:
    assert is_multicast(address) == group


def test_the_gid_of_a_group_is_its_address() -> None:
    gid = gid_of("239.1.2.3")
    assert gid == bytes(10) + b"\xff\xff\xef\x01\x02\x03"
    assert ip_of(gid) == "239.1.2.3"
