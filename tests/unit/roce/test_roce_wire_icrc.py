"""The invariant CRC against a literal reading of the specification, and what its linearity is used for."""

from __future__ import annotations

import random
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from emulator.roce.wire.flow import Flow, flow_of, ip_and_udp_headers
from emulator.roce.wire.icrc import (
    RESERVED_CORRECTION,
    burst_prefixes,
    crc32,
    icrc_of,
    prefix_crc,
    solved_ip_id,
)
from emulator.roce.wire.malformed import Cause, MalformedPacket
from emulator.roce.wire.opcodes import Opcode
from emulator.roce.wire.packet import Packet
from tests.support.roce.packets import check_icrc_untrusted, decode_packet_untrusted, encode_packet, ip_id_of

FOUR = flow_of("192.0.2.1", "198.51.100.2", 0xC0DE)
SIX = flow_of("2001:db8::1", "2001:db8:1::2", 0xC0DE)

four, sixteen = (st.binary(min_size=size, max_size=size) for size in (4, 16))
ports = st.integers(0, 65535)
flows = st.one_of(st.builds(Flow, four, four, ports, ports), st.builds(Flow, sixteen, sixteen, ports, ports))
covered_bytes = st.integers(3, 300).flatmap(lambda words: st.binary(min_size=4 * words, max_size=4 * words))
ip_ids = st.integers(0, 65535)


def as_specified(headers: bytes, covered: bytes) -> int:
    """The definition, step by step: copy, mask, CRC. `headers` are IP and UDP as they were sent."""
    masked = bytearray(headers + covered)
    size = len(headers)
    if headers[0] >> 4 == 4:
        masked[1] = masked[8] = masked[10] = masked[11] = 0xFF
    else:
        masked[0] |= 0x0F
        masked[1] = masked[2] = masked[3] = masked[7] = 0xFF
    masked[size - 2] = masked[size - 1] = 0xFF
    masked[size + 4] = 0xFF
    return zlib.crc32(b"\xff" * 8 + masked)


@given(flows, covered_bytes, ip_ids)
def test_it_is_what_the_specification_says(flow: Flow, covered: bytes, ip_id: int) -> None:
    headers = ip_and_udp_headers(flow, covered + bytes(4), ip_id)
    assert icrc_of(covered, flow, ip_id) == as_specified(headers, covered)


@given(flows, covered_bytes, ip_ids)
def test_one_call_is_enough_where_nothing_is_marked(flow: Flow, covered: bytes, ip_id: int) -> None:
    plain = covered[:4] + b"\0" + covered[5:]
    prefix = prefix_crc(flow, len(covered) + 4, ip_id)
    assert crc32(plain, prefix) == icrc_of(plain, flow, ip_id) == icrc_of(covered, flow, ip_id)
    assert crc32(covered, prefix ^ RESERVED_CORRECTION[covered[4]]) == icrc_of(covered, flow, ip_id)


@given(flows, covered_bytes, ip_ids, ip_ids)
def test_the_identification_is_found(flow: Flow, covered: bytes, ip_id: int, guess: int) -> None:
    datagram = covered + icrc_of(covered, flow, ip_id).to_bytes(4, "little")
    found = ip_id_of(datagram, flow, guess)
    assert found == (0 if flow.is_ipv6 else ip_id)


def test_segments_of_one_call_are_numbered() -> None:
    prefixes = burst_prefixes(FOUR, 1024 + 16, 15)
    assert list(prefixes) == [prefix_crc(FOUR, 1024 + 16, index) for index in range(15)]
    for index in range(15):
        packet = Packet(Opcode.WRITE_MIDDLE, 5, 1000 + index, bytes([index]) * 1024)
        assert crc32(encode_packet(packet, FOUR)[:-4], prefixes[index]) == icrc_of(
            encode_packet(packet, FOUR)[:-4], FOUR, index
        )


def test_a_router_may_mark_congestion() -> None:
    """FECN and BECN are set on the way; the ICRC, made before, stays right."""
    for flow in (FOUR, SIX):
        raw = bytearray(encode_packet(Packet(Opcode.SEND_ONLY, 5, 6, b"data"), flow))
        raw[4] |= 0xC0
        packet = decode_packet_untrusted(raw, flow, 0)
        assert packet.fecn
        assert packet.becn
        assert ip_id_of(raw, flow) == 0


@pytest.mark.parametrize("flow", [FOUR, SIX], ids=["IPv4", "IPv6"])
@pytest.mark.parametrize("ip_id", [0, 0x1234])
def test_every_single_flipped_bit_is_noticed(flow: Flow, ip_id: int) -> None:
    """Whether the identification is known, or has to be solved for."""
    packet = Packet(Opcode.READ_RESPONSE_MIDDLE, 0x123456, 99, bytes(range(64)))
    raw = bytearray(encode_packet(packet, flow, ip_id))
    for bit in range(8 * len(raw)):
        if bit // 8 == 4:  # masked
            continue
        raw[bit // 8] ^= 1 << bit % 8
        assert ip_id_of(raw, flow) is None
        for known in (None, ip_id):
            with pytest.raises(MalformedPacket) as caught:
                check_icrc_untrusted(raw, flow, known)
            assert caught.value.cause is Cause.ICRC
        raw[bit // 8] ^= 1 << bit % 8
    check_icrc_untrusted(raw, flow, ip_id)


def test_another_flow_or_identification_is_noticed() -> None:
    raw = encode_packet(Packet(Opcode.SEND_ONLY, 5, 6, b"data"), FOUR, 7)
    assert ip_id_of(raw, FOUR) == 7
    assert ip_id_of(raw, FOUR._replace(source_port=FOUR.source_port ^ 1)) is None
    assert ip_id_of(raw, FOUR._replace(source=b"\xc0\x00\x02\x03")) is None
    assert ip_id_of(raw, SIX) is None
    with pytest.raises(MalformedPacket, match="icrc"):
        check_icrc_untrusted(raw, FOUR, 8)
    check_icrc_untrusted(raw, FOUR, 7)
    check_icrc_untrusted(raw, FOUR)


def test_the_strength_without_the_identification(seed: int) -> None:
    """One of 65,536 wrong ICRCs is taken for a right one with another identification, not more."""
    rng = random.Random(seed)
    lengths = [16 + 4 * rng.randrange(1000) for _ in range(8)]
    taken = sum(solved_ip_id(rng.getrandbits(32), rng.choice(lengths)) is not None for _ in range(100_000))
    assert taken <= 12


@pytest.mark.parametrize("length", [17, 18, 4136, 65500])
def test_a_length_that_no_packet_has_is_not_solved_for(length: int) -> None:
    covered = bytes(length - 4)
    datagram = covered + icrc_of(covered, FOUR, 5).to_bytes(4, "little")
    assert ip_id_of(datagram, FOUR) is None
    assert ip_id_of(datagram, FOUR, 5) == 5


def test_the_checksum_of_the_ip_header() -> None:
    headers = ip_and_udp_headers(FOUR, bytes(100), 0x4711)
    words = sum(int.from_bytes(headers[i : i + 2], "big") for i in range(0, 20, 2))
    assert (words & 0xFFFF) + (words >> 16) == 0xFFFF
    assert headers[4:8] == bytes.fromhex("47114000")
    assert headers[26:28] == b"\0\0"


@given(st.binary(max_size=99))
def test_the_checksum_of_udp_over_ipv6(datagram: bytes) -> None:
    packet = ip_and_udp_headers(SIX, datagram) + datagram
    size = 8 + len(datagram)
    summed = SIX.source + SIX.destination + size.to_bytes(4, "big") + b"\0\0\0\x11" + packet[40:]
    summed += b"\0" * (len(summed) & 1)
    total = sum(int.from_bytes(summed[i : i + 2], "big") for i in range(0, len(summed), 2))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    assert total == 0xFFFF
    assert packet[46:48] != b"\0\0"
