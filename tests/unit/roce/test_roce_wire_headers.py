"""Transport headers: a vector with every field non-zero for each, every truncation, every malformation."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from emulator.roce.wire import bth, extended
from emulator.roce.wire.extended import Aeth, AethKind, AtomicEth, Deth, NakCode, Reth
from emulator.roce.wire.flow import flow_of, gid_of, ip_of, packed_address, text_address
from emulator.roce.wire.malformed import Cause, MalformedPacket
from emulator.roce.wire.opcodes import (
    MAX_PACKET,
    MAX_PAYLOAD,
    OPCODES,
    Opcode,
    Operation,
    Service,
    class_of,
)
from emulator.roce.wire.packet import Packet, decode_transport_untrusted
from tests.support.roce.packets import (
    check_icrc_untrusted,
    decode_packet_untrusted,
    encode_headers,
    encode_packet,
)

FLOW = flow_of("192.0.2.1", "198.51.100.2", 0xC0DE)
RETH = Reth(0x0123456789ABCDEF, 0xDEADBEEF, 0x00C0FFEE)
AETH = Aeth(0x6B, 0x123456)
ATOMIC = AtomicEth(0x0123456789ABCDEF, 0xDEADBEEF, 0x1122334455667788, 0x99AABBCCDDEEFF01)
DETH = Deth(0x80010000, 0xFEDCBA)
IMMEDIATE, INVALIDATE, ORIGINAL = 0xCAFEF00D, 0xA5A5A5A5, 0x7766554433221100

BASE = "{opcode:02x} d0 8765  c0 abcdef  80 fedcba"  # solicited, MigReq, pad 1, FECN, BECN, AckReq
HEADERS = {
    "reth": "0123456789abcdef deadbeef 00c0ffee",
    "aeth": "6b 123456",
    "atomic": "0123456789abcdef deadbeef 1122334455667788 99aabbccddeeff01",
    "atomic_ack": "7766554433221100",
    "immediate": "cafef00d",
    "invalidate": "a5a5a5a5",
    "deth": "80010000 00 fedcba",
}


def full(opcode: Opcode) -> Packet:
    """A packet of this opcode with every field non-zero."""
    known = class_of(opcode)
    return Packet(
        opcode,
        0xABCDEF,
        0xFEDCBA,
        b"\x01\x02\x03" if known.payload else b"",
        acknowledge=True,
        solicited=True,
        migration=True,
        p_key=0x8765,
        fecn=True,
        becn=True,
        reth=RETH if known.reth else None,
        aeth=AETH if known.aeth else None,
        atomic=ATOMIC if known.atomic else None,
        original=ORIGINAL if known.atomic_ack else None,
        immediate=IMMEDIATE if known.immediate else None,
        invalidate=INVALIDATE if known.invalidate else None,
        deth=DETH if known.deth else None,
    )


def sent(opcode: Opcode) -> bytes:
    """What `full` is on the wire, put together from the vectors above, without the ICRC."""
    known = class_of(opcode)
    parts = sorted((getattr(known, name), HEADERS[name]) for name in HEADERS if getattr(known, name))
    base = BASE if known.payload else BASE.replace("d0", "c0")
    raw = bytes.fromhex(base.format(opcode=opcode))
    for offset, vector in parts:
        assert len(raw) == offset
        raw += bytes.fromhex(vector)
    return raw + (b"\x01\x02\x03\x00" if known.payload else b"")


@pytest.mark.parametrize("opcode", Opcode, ids=lambda opcode: opcode.name)
def test_every_field_of_every_opcode(opcode: Opcode) -> None:
    packet = full(opcode)
    raw = encode_packet(packet, FLOW, 0x1234)
    assert raw[:-4] == sent(opcode)
    assert decode_packet_untrusted(raw, FLOW, 0x1234) == packet
    assert decode_packet_untrusted(memoryview(raw), FLOW) == packet
    assert encode_headers(packet, len(packet.payload)) == raw[: class_of(opcode).header_bytes]


@pytest.mark.parametrize("opcode", Opcode, ids=lambda opcode: opcode.name)
def test_truncated_at_every_length(opcode: Opcode) -> None:
    raw = encode_packet(full(opcode)._replace(payload=b"12345678" if class_of(opcode).payload else b""), FLOW)
    for length in range(len(raw)):
        with pytest.raises(MalformedPacket):
            decode_packet_untrusted(raw[:length], FLOW)
        with pytest.raises(MalformedPacket):
            check_icrc_untrusted(raw[:length], FLOW, 0)


def test_the_table_of_opcodes() -> None:
    """Header lengths as InfiniBand's table of packet contents has them, summed up by hand."""
    by_hand = {
        0x00: 12, 0x01: 12, 0x02: 12, 0x03: 16, 0x04: 12, 0x05: 16, 0x06: 28, 0x07: 12, 0x08: 12, 0x09: 16,
        0x0A: 28, 0x0B: 32, 0x0C: 28, 0x0D: 16, 0x0E: 12, 0x0F: 16, 0x10: 16, 0x11: 16, 0x12: 24, 0x13: 40,
        0x14: 40, 0x16: 16, 0x17: 16, 0x1D: 28, 0x20: 12, 0x21: 12, 0x22: 12, 0x23: 16, 0x24: 12, 0x25: 16,
        0x26: 28, 0x27: 12, 0x28: 12, 0x29: 16, 0x2A: 28, 0x2B: 32, 0x64: 20, 0x65: 24,
    }  # fmt: skip
    assert {code: known.header_bytes for code, known in enumerate(OPCODES) if known} == by_hand
    for code, known in enumerate(OPCODES):
        if known is None:
            continue
        assert known.opcode == code
        assert known.service == code >> 5
        assert known.request == (code not in range(0x0D, 0x13))
        name = known.opcode.name
        assert known.first == (("FIRST" in name) or not ("MIDDLE" in name or "LAST" in name))
        assert known.last == (("LAST" in name) or not ("MIDDLE" in name or "FIRST" in name))
        assert bool(known.immediate) == name.endswith("IMMEDIATE")
        assert bool(known.invalidate) == name.endswith("INVALIDATE")
        assert (known.service is Service.UD) == bool(known.deth) == name.startswith("UD_")
        assert (known.service is Service.UC) == name.startswith("UC_")
        assert ("SEND" in name) == (known.operation is Operation.SEND)
        writes = (Operation.WRITE, Operation.ATOMIC_WRITE)
        assert ("WRITE" in name) == (known.operation in writes)
    assert class_of(Opcode.ATOMIC_ACKNOWLEDGE).operation is Operation.ATOMIC_ACKNOWLEDGE
    assert class_of(Opcode.ATOMIC_ACKNOWLEDGE).atomic_ack == 16
    assert class_of(Opcode.WRITE_ONLY_WITH_IMMEDIATE).immediate == 28
    assert class_of(Opcode.UD_SEND_ONLY_WITH_IMMEDIATE).immediate == 20


# --- malformations ------------------------------------


def cause_of(raw: bytes) -> Cause:
    with pytest.raises(MalformedPacket) as caught:
        decode_transport_untrusted(raw)
    assert str(caught.value.cause) in str(caught.value)
    return caught.value.cause


def changed(opcode: Opcode, offset: int, value: int) -> bytes:
    raw = bytearray(encode_packet(full(opcode)._replace(payload=b""), FLOW))
    raw[offset] = value
    return bytes(raw)


def test_each_cause_has_its_packet() -> None:
    send, read = Opcode.SEND_ONLY, Opcode.READ_REQUEST
    assert cause_of(b"") is Cause.SHORT
    assert cause_of(bytes(15)) is Cause.SHORT
    assert cause_of(encode_packet(full(read), FLOW)[:-4]) is Cause.SHORT
    assert cause_of(changed(send, 0, 0x15)) is Cause.OPCODE
    assert cause_of(changed(send, 0, 0x40)) is Cause.OPCODE
    assert cause_of(changed(send, 0, 0x81)) is Cause.OPCODE
    assert cause_of(changed(send, 0, 0xFF)) is Cause.OPCODE
    assert cause_of(changed(send, 1, 0x01)) is Cause.VERSION
    assert cause_of(changed(send, 1, 0x30)) is Cause.PAD
    assert cause_of(changed(read, 1, 0x10)) is Cause.PAD
    assert cause_of(changed(send, 1, 0x00) + b"\0") is Cause.UNALIGNED
    assert cause_of(encode_packet(full(read), FLOW) + bytes(4)) is Cause.UNWANTED_PAYLOAD
    assert cause_of(encode_packet(full(Opcode.ACKNOWLEDGE), FLOW) + bytes(4)) is Cause.UNWANTED_PAYLOAD
    largest = encode_packet(full(send)._replace(payload=bytes(MAX_PAYLOAD)), FLOW)
    assert cause_of(largest + bytes(4)) is Cause.TOO_LONG
    nowhere = bytearray(largest)
    nowhere[5:8] = bytes(3)
    assert cause_of(bytes(nowhere)) is Cause.QUEUE_PAIR_0


def test_a_wrong_icrc_is_told_only_of_what_looks_like_a_packet() -> None:
    raw = bytearray(encode_packet(full(Opcode.SEND_ONLY), FLOW))
    raw[-1] ^= 1
    with pytest.raises(MalformedPacket) as caught:
        decode_packet_untrusted(raw, FLOW, 0)
    assert caught.value.cause is Cause.ICRC
    assert "192.0.2.1:49374 -> 198.51.100.2:4791" in str(caught.value)
    raw[0] = 0xFF
    with pytest.raises(MalformedPacket) as caught:
        decode_packet_untrusted(raw, FLOW, 0)
    assert caught.value.cause is Cause.OPCODE


def test_reserved_bits_are_ignored() -> None:
    packet = full(Opcode.UD_SEND_ONLY)
    raw = bytearray(encode_packet(packet, FLOW))
    raw[4] |= 0x3F
    raw[8] |= 0x7F
    raw[16] = 0xFF
    assert decode_transport_untrusted(raw) == packet


def test_the_largest_packet() -> None:
    largest = full(Opcode.WRITE_ONLY_WITH_IMMEDIATE)._replace(payload=bytes(MAX_PAYLOAD))
    assert len(encode_packet(largest, FLOW)) == MAX_PACKET
    assert max(known.header_bytes for known in OPCODES if known) + 4 < MAX_PACKET


@pytest.mark.parametrize(
    "wrong",
    [
        {"payload": bytes(MAX_PAYLOAD + 1)},
        {"queue_pair": 1 << 24},
        {"psn": 1 << 24},
        {"psn": -1},
        {"p_key": 1 << 16},
        {"reth": RETH},
        {"immediate": 1},
        {"deth": None},
        {"deth": Deth(1 << 32, 1)},
        {"deth": Deth(1, 1 << 24)},
        # As long as a DETH, so that the length alone would not tell.
        {"deth": None, "original": 1},
    ],
    ids=str,
)
def test_what_cannot_be_sent_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ValueError):
        encode_packet(full(Opcode.UD_SEND_ONLY)._replace(**wrong), FLOW)  # type: ignore[arg-type]


def test_more_that_cannot_be_sent() -> None:
    with pytest.raises(ValueError, match="payload"):
        encode_packet(full(Opcode.READ_REQUEST)._replace(payload=b"x"), FLOW)
    with pytest.raises(ValueError, match="24 bits"):
        encode_packet(full(Opcode.ACKNOWLEDGE)._replace(aeth=Aeth(0, 1 << 24)), FLOW)
    with pytest.raises(ValueError):
        encode_packet(full(Opcode.ACKNOWLEDGE)._replace(aeth=Aeth(1 << 8, 0)), FLOW)


# --- codes ------------------------------------------


def test_syndromes() -> None:
    assert Aeth(extended.SYNDROME_ACK, 7).kind is AethKind.ACK
    assert Aeth(extended.rnr_syndrome(12), 7) == Aeth(0x2C, 7)
    assert (Aeth(0x2C, 7).kind, Aeth(0x2C, 7).code) == (AethKind.RNR_NAK, 12)
    assert Aeth(extended.nak_syndrome(NakCode.REMOTE_ACCESS_ERROR), 7) == Aeth(0x62, 7)
    assert (Aeth(0x62, 7).kind, Aeth(0x62, 7).code) == (AethKind.NAK, NakCode.REMOTE_ACCESS_ERROR)
    assert [Aeth(value, 0).kind for value in (0x40, 0x80, 0xA0, 0xE0)] == [None] * 4


def test_rnr_timers() -> None:
    """By hand from the specification's table, in milliseconds."""
    assert extended.RNR_TIMERS[0] == 0.65536
    assert [round(t * 1e3, 2) for t in extended.RNR_TIMERS[1:16]] == [
        0.01, 0.02, 0.03, 0.04, 0.06, 0.08, 0.12, 0.16, 0.24, 0.32, 0.48, 0.64, 0.96, 1.28, 1.92,
    ]  # fmt: skip
    assert extended.RNR_TIMERS[31] == 0.49152
    assert sorted(extended.RNR_TIMERS[1:] + extended.RNR_TIMERS[:1]) == [
        *extended.RNR_TIMERS[1:],
        extended.RNR_TIMERS[0],
    ]


def test_time_outs() -> None:
    assert extended.ack_timeout_seconds(0) is None
    assert extended.ack_timeout_seconds(19) == pytest.approx(2.147483648)
    assert extended.exponential_seconds(20) == pytest.approx(4.294967296)
    assert extended.exponential_seconds(0) == pytest.approx(4.096e-6)


@given(st.integers(0, (1 << 24) - 1), st.integers(-(1 << 23), (1 << 23) - 1))
def test_differences_of_psns(psn: int, step: int) -> None:
    assert bth.psn_difference((psn + step) % (1 << 24), psn) == step


@given(st.integers(0, 10_000), st.sampled_from((256, 512, 1024, 2048, 4096)))
def test_psns_of_a_read(length: int, mtu: int) -> None:
    count = extended.read_packets(length, mtu)
    assert (count - 1) * mtu <= length <= count * mtu
    assert count >= 1


# --- addresses ----------------------------------------


def test_addresses() -> None:
    flow = flow_of("2001:db8::1", "2001:db8::2", 50000)
    assert flow.is_ipv6
    assert repr(flow) == "Flow(2001:db8::1:50000 -> 2001:db8::2:4791)"
    assert text_address(packed_address("10.1.2.3")) == "10.1.2.3"
    assert gid_of("10.1.2.3") == packed_address("::ffff:10.1.2.3")
    assert gid_of("2001:db8::1") == packed_address("2001:db8::1")
    for address in ("10.1.2.3", "2001:db8::1"):
        assert ip_of(gid_of(address)) == address
    with pytest.raises(ValueError, match="family"):
        flow_of("2001:db8::1", "10.1.2.3")
    for nonsense in ("localhost", "10.1.2", "1.2.3.4.5", "::1::", ""):
        with pytest.raises(ValueError, match="no IP address"):
            packed_address(nonsense)
