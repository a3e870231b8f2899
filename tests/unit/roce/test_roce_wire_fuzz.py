"""Bytes of all kinds: whatever comes, the answer is a packet that holds, or MalformedPacket with its cause.

50,000 packets; G35_FUZZ=1000000 makes it a million (with fewer, not every cause would be seen).
The seed is printed, and G35_SEED repeats it.
"""

from __future__ import annotations

import contextlib
import os
import random
from collections import Counter
from collections.abc import Iterator

from hypothesis import given
from hypothesis import strategies as st

from emulator.roce.nic.verbs import GSI_QPN
from emulator.roce.wire import cm_messages as cm
from emulator.roce.wire.cm_ip import decode_ip_cm_untrusted
from emulator.roce.wire.extended import Aeth, AtomicEth, Deth, Reth
from emulator.roce.wire.flow import flow_of
from emulator.roce.wire.icrc import icrc_of
from emulator.roce.wire.mad import MAD_BYTES, Attribute
from emulator.roce.wire.malformed import Cause, MalformedPacket
from emulator.roce.wire.opcodes import MAX_PACKET, MAX_PAYLOAD, Opcode, class_of
from emulator.roce.wire.packet import Packet, decode_transport_untrusted
from tests.support.roce.captures import read_packets, small_captures
from tests.support.roce.packets import decode_packet_untrusted, encode_packet

FUZZ = max(50_000, int(os.environ.get("G35_FUZZ", "0")))
FLOW = flow_of("192.168.77.2", "192.168.77.1", 0xC0DE)


def sealed(covered: bytes | bytearray, ip_id: int = 0) -> bytes:
    """With the ICRC that makes it pass, so that what is behind the ICRC is tried too."""
    return bytes(covered) + icrc_of(covered, FLOW, ip_id).to_bytes(4, "little")


def twisted(raw: bytearray, rng: random.Random) -> bytes:
    """One to three of: a flipped bit, a byte, a field in the headers, a cut, more bytes, a swapped end."""
    for _ in range(rng.randint(1, 3)):
        at = rng.randrange(min(len(raw), 44)) if rng.random() < 0.7 else rng.randrange(len(raw))
        match rng.randrange(6):
            case 0:
                raw[at] ^= 1 << rng.randrange(8)
            case 1:
                raw[at] = rng.choice((0, 1, 0x7F, 0x80, 0xFF, rng.randrange(256)))
            case 2:
                raw[at : at + 4] = rng.choice((bytes(4), b"\xff" * 4, rng.randbytes(4)))
            case 3:
                del raw[rng.randrange(12, len(raw) + 1) :]
            case 4:
                raw += rng.randbytes(rng.choice((1, 2, 3, 4, 8, 64, 4096)))
            case _:
                raw[0] = rng.choice((*Opcode, rng.randrange(256)))
        if len(raw) < 12:
            raw += bytes(12)
    return bytes(raw)


def hostile_packets(rng: random.Random, count: int) -> Iterator[bytes]:
    """A third each: the kernel's packets twisted, those with a right ICRC again, and noise."""
    captured = [each for file in small_captures() for each in read_packets(file)]
    kernel = [each.datagram for each in captured if each.by_kernel]
    for index in range(count):
        match index % 3:
            case 0:
                yield twisted(bytearray(rng.choice(kernel)), rng)
            case 1:
                yield sealed(twisted(bytearray(rng.choice(kernel)[:-4]), rng), rng.randrange(1 << 16))
            case _:
                noise = rng.randbytes(rng.choice((rng.randrange(64), 4 * rng.randrange(3, 100), 4200)))
                yield sealed(noise) if len(noise) >= 12 and rng.random() < 0.8 else noise


def test_hostile_packets(seed: int) -> None:
    print(f"seed {seed}, {FUZZ} packets")
    rng, outcomes = random.Random(seed), Counter[str]()
    for raw in hostile_packets(rng, FUZZ):
        try:
            packet = decode_packet_untrusted(raw, FLOW)
        except MalformedPacket as malformed:
            outcomes[malformed.cause] += 1
            continue
        outcomes["packets"] += 1
        known = class_of(packet.opcode)
        assert len(packet.payload) <= MAX_PAYLOAD
        assert len(raw) == known.header_bytes + len(packet.payload) + (-len(packet.payload) & 3) + 4
        again = encode_packet(packet, FLOW)
        assert len(again) == len(raw) <= MAX_PACKET
        assert decode_packet_untrusted(again, FLOW, 0) == packet
    print(dict(outcomes))
    assert outcomes["packets"] > FUZZ // 10
    assert {*outcomes} >= {cause.value for cause in PACKET_CAUSES}


PACKET_CAUSES = [
    Cause.SHORT, Cause.UNALIGNED, Cause.OPCODE, Cause.VERSION, Cause.PAD, Cause.UNWANTED_PAYLOAD,
    Cause.TOO_LONG, Cause.QUEUE_PAIR_0, Cause.ICRC,
]  # fmt: skip


def test_hostile_management_datagrams(seed: int) -> None:
    print(f"seed {seed}, {FUZZ // 5} datagrams")
    rng, outcomes = random.Random(seed + 1), Counter[str]()
    captured = [each for file in small_captures() for each in read_packets(file) if each.by_kernel]
    packets = [decode_transport_untrusted(each.datagram) for each in captured]
    kernel = [bytes(packet.payload) for packet in packets if packet.queue_pair == GSI_QPN]
    for _ in range(FUZZ // 5):
        raw = bytearray(rng.choice(kernel))
        for _ in range(rng.randint(1, 8)):
            raw[rng.choice((rng.randrange(24), rng.randrange(24, 256), 17))] = rng.randrange(256)
        if rng.random() < 0.05:
            del raw[rng.randrange(MAD_BYTES) :]
        try:
            message, transaction = cm.decode_cm_untrusted(raw)
        except MalformedPacket as malformed:
            outcomes[malformed.cause] += 1
            continue
        assert cm.decode_cm_untrusted(cm.encode_cm(message, transaction)) == (message, transaction)
        outcomes[cm.attribute_of(message).name] += 1
        try:
            decode_ip_cm_untrusted(message.private_data).encode()
        except MalformedPacket as malformed:
            outcomes[malformed.cause] += 1
    print(dict(outcomes))
    assert {*outcomes} >= {Cause.MAD_LENGTH, Cause.MAD_CLASS, Cause.CM_ATTRIBUTE, Cause.IP_CM}
    assert {*outcomes} >= {a.name for a in Attribute if a not in (Attribute.LAP, Attribute.APR)}


# --- round trips -------------------------------------

u16, u24, u32, u64 = (st.integers(0, (1 << bits) - 1) for bits in (16, 24, 32, 64))


@st.composite
def packets(draw: st.DrawFn) -> Packet:
    """Any packet that can be sent."""
    opcode = draw(st.sampled_from(Opcode))
    known = class_of(opcode)
    return Packet(
        opcode,
        draw(u24.filter(bool)),
        draw(u24),
        draw(st.binary(max_size=200) | st.just(bytes(MAX_PAYLOAD))) if known.payload else b"",
        acknowledge=draw(st.booleans()),
        solicited=draw(st.booleans()),
        migration=draw(st.booleans()),
        p_key=draw(u16),
        fecn=draw(st.booleans()),
        becn=draw(st.booleans()),
        reth=Reth(draw(u64), draw(u32), draw(u32)) if known.reth else None,
        aeth=Aeth(draw(st.integers(0, 255)), draw(u24)) if known.aeth else None,
        atomic=AtomicEth(draw(u64), draw(u32), draw(u64), draw(u64)) if known.atomic else None,
        original=draw(u64) if known.atomic_ack else None,
        immediate=draw(u32) if known.immediate else None,
        invalidate=draw(u32) if known.invalidate else None,
        deth=Deth(draw(u32), draw(u24)) if known.deth else None,
    )


@given(packets(), u16)
def test_a_packet_survives_the_wire(packet: Packet, ip_id: int) -> None:
    raw = encode_packet(packet, FLOW, ip_id)
    assert len(raw) % 4 == 0
    assert len(raw) >= class_of(packet.opcode).header_bytes + 4
    assert decode_packet_untrusted(raw, FLOW, ip_id) == packet
    assert decode_packet_untrusted(memoryview(raw), FLOW) == packet


@given(st.binary(max_size=MAX_PACKET + 8))
def test_noise_raises_nothing_else(raw: bytes) -> None:
    with contextlib.suppress(MalformedPacket):
        decode_packet_untrusted(raw, FLOW)
    with contextlib.suppress(MalformedPacket):
        cm.decode_cm_untrusted(raw)
