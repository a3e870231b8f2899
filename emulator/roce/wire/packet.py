"""One whole RoCEv2 packet: the payload of a UDP datagram as a record, and back.

    BTH | extended headers, as the opcode has them | payload | 0 to 3 bytes of padding | ICRC, little-endian

This is the way of single packets. Rows of equal packets of one message are written and compared as numpy
arrays by the device, with the constants of `bth.py`, `opcodes.py` and `icrc.py`.
"""

from __future__ import annotations

import struct
from typing import Final, NamedTuple

from emulator.roce.wire.bth import (
    ACKNOWLEDGE_REQUEST,
    BECN,
    BTH,
    DEFAULT_P_KEY,
    FECN,
    LOW_24_BITS,
    MIGRATION_REQUEST,
    PAD_MASK,
    PAD_SHIFT,
    SOLICITED_EVENT,
    VERSION_MASK,
    pad_count,
)
from emulator.roce.wire.extended import (
    AETH,
    ATOMIC_ACK_ETH,
    ATOMIC_ETH,
    DETH,
    IETH,
    IMM_DT,
    RETH,
    Aeth,
    AtomicEth,
    Deth,
    Reth,
)
from emulator.roce.wire.flow import Buffer, Flow
from emulator.roce.wire.icrc import ICRC_BYTES, icrc_of, ip_id_of
from emulator.roce.wire.malformed import Cause, MalformedPacket
from emulator.roce.wire.opcodes import MAX_PAYLOAD, OPCODES, Opcode, OpcodeClass, class_of

_ZEROS: Final = bytes(3)


class Packet(NamedTuple):
    """A packet. Of the extended headers, exactly those of its opcode are not None."""

    opcode: Opcode
    queue_pair: int
    """Destination, 24 bits."""
    psn: int
    payload: Buffer = b""
    """Without padding. Decoding gives a view of the datagram when that was a view."""
    acknowledge: bool = False
    """AckReq: the responder is to acknowledge this packet."""
    solicited: bool = False
    migration: bool = False
    """MigReq: the path is the primary one. rxe sends 0, hardware 1; both take either."""
    p_key: int = DEFAULT_P_KEY
    fecn: bool = False
    becn: bool = False
    reth: Reth | None = None
    aeth: Aeth | None = None
    atomic: AtomicEth | None = None
    original: int | None = None
    """AtomicAckETH: the eight bytes as they were before the operation."""
    immediate: int | None = None
    """ImmDt, as a number."""
    invalidate: int | None = None
    """IETH: the R_Key to invalidate."""
    deth: Deth | None = None


# --- encoding ----------------------------------------


def encode_headers(packet: Packet, payload_bytes: int) -> bytes:
    """BTH and extended headers before a payload of so many bytes, whatever `packet.payload` is.

    ValueError for a packet that the opcode does not allow, and for fields that do not fit.
    """
    known = class_of(packet.opcode)
    if payload_bytes > (MAX_PAYLOAD if known.payload else 0):
        raise ValueError(f"{packet.opcode.name} cannot carry {payload_bytes} bytes of payload")
    words = packet.queue_pair | packet.psn
    if packet.aeth is not None:
        words |= packet.aeth.message_sequence
    if packet.deth is not None:
        words |= packet.deth.source_queue_pair
    if words & ~LOW_24_BITS:
        raise ValueError(f"a queue pair, PSN or message sequence number of more than 24 bits: {packet}")
    flags = (
        (SOLICITED_EVENT if packet.solicited else 0)
        | (MIGRATION_REQUEST if packet.migration else 0)
        | pad_count(payload_bytes) << PAD_SHIFT
    )
    destination = packet.queue_pair | (FECN if packet.fecn else 0) | (BECN if packet.becn else 0)
    sequence = packet.psn | (ACKNOWLEDGE_REQUEST if packet.acknowledge else 0)
    try:
        raw = _pack(packet, flags, destination, sequence)
    except struct.error as error:
        raise ValueError(f"{packet.opcode.name}: {error}") from None
    if len(raw) != known.header_bytes or not _complete(packet, known):
        raise ValueError(f"{packet.opcode.name} with other extended headers than its own: {packet}")
    return raw


def _pack(packet: Packet, flags: int, destination: int, sequence: int) -> bytes:
    raw = BTH.pack(packet.opcode, flags, packet.p_key, destination, sequence)
    if packet.deth is not None:
        raw += DETH.pack(*packet.deth)
    if packet.reth is not None:
        raw += RETH.pack(*packet.reth)
    if packet.aeth is not None:
        raw += AETH.pack(packet.aeth.syndrome << 24 | packet.aeth.message_sequence)
    if packet.atomic is not None:
        raw += ATOMIC_ETH.pack(*packet.atomic)
    if packet.original is not None:
        raw += ATOMIC_ACK_ETH.pack(packet.original)
    if packet.immediate is not None:
        raw += IMM_DT.pack(packet.immediate)
    if packet.invalidate is not None:
        raw += IETH.pack(packet.invalidate)
    return raw


def _complete(packet: Packet, known: OpcodeClass) -> bool:
    """Whether what the opcode wants is there; together with the length, that nothing else is."""
    return not (
        (known.reth and packet.reth is None)
        or (known.aeth and packet.aeth is None)
        or (known.atomic and packet.atomic is None)
        or (known.atomic_ack and packet.original is None)
        or (known.immediate and packet.immediate is None)
        or (known.invalidate and packet.invalidate is None)
        or (known.deth and packet.deth is None)
    )


def encode_packet(packet: Packet, flow: Flow, ip_id: int = 0) -> bytes:
    """The UDP payload of a packet on this flow, ICRC included. ValueError as for `encode_headers`.

    `ip_id` is the identification that the IPv4 header will have: 0 for a datagram sent by itself.
    """
    payload = packet.payload
    raw = encode_headers(packet, len(payload))
    raw = b"".join((raw, payload, _ZEROS[: pad_count(len(payload))]))
    return raw + icrc_of(raw, flow, ip_id).to_bytes(ICRC_BYTES, "little")


# --- decoding ----------------------------------------


def check_icrc_untrusted(datagram: Buffer, flow: Flow, ip_id: int | None = None) -> None:
    """MalformedPacket (cause ICRC, or SHORT) unless the ICRC is right.

    `ip_id` is the identification of the IPv4 header where that is known; without it the check has 16 bits
    of strength (see `icrc.py`). An IPv6 packet is always checked in full.
    """
    if len(datagram) < BTH.size + ICRC_BYTES:
        raise MalformedPacket(Cause.SHORT, f"{len(datagram)} bytes")
    found = ip_id_of(datagram, flow, ip_id or 0)
    if found is None or (ip_id is not None and found != ip_id and not flow.is_ipv6):
        raise MalformedPacket(Cause.ICRC, f"of {len(datagram)} bytes from {flow!r}")


def decode_packet_untrusted(datagram: Buffer, flow: Flow, ip_id: int | None = None) -> Packet:
    """The packet in a UDP payload. MalformedPacket with its cause if there is none, or its ICRC is wrong.

    The form is looked at first and the ICRC last, so that a counter of wrong ICRCs counts damaged packets
    and not strangers' datagrams. `ip_id` as for `check_icrc_untrusted`.
    """
    packet = decode_transport_untrusted(datagram)
    check_icrc_untrusted(datagram, flow, ip_id)
    return packet


def decode_transport_untrusted(datagram: Buffer) -> Packet:
    """The packet in a UDP payload, whose ICRC somebody else has checked or will."""
    size = len(datagram)
    if size < BTH.size + ICRC_BYTES:
        raise MalformedPacket(Cause.SHORT, f"{size} bytes")
    code, flags, p_key, destination, sequence = BTH.unpack_from(datagram)
    known = OPCODES[code]
    if known is None:
        raise MalformedPacket(Cause.OPCODE, f"{code:#04x}")
    if flags & VERSION_MASK:
        raise MalformedPacket(Cause.VERSION, f"TVer {flags & VERSION_MASK}")
    if size & 3:
        raise MalformedPacket(Cause.UNALIGNED, f"{size} bytes")
    start = known.header_bytes
    padded = size - ICRC_BYTES - start
    if padded < 0:
        raise MalformedPacket(Cause.SHORT, f"{size} bytes of {known.opcode.name}")
    end = size - ICRC_BYTES - ((flags & PAD_MASK) >> PAD_SHIFT)
    if end < start:
        raise MalformedPacket(Cause.PAD, f"{(flags & PAD_MASK) >> PAD_SHIFT} bytes of {padded}")
    if padded and not known.payload:
        raise MalformedPacket(Cause.UNWANTED_PAYLOAD, f"{padded} bytes after {known.opcode.name}")
    if padded > MAX_PAYLOAD:
        raise MalformedPacket(Cause.TOO_LONG, f"{padded} bytes of payload")
    if not destination & LOW_24_BITS:
        raise MalformedPacket(Cause.QUEUE_PAIR_0, known.opcode.name)
    reth = aeth = atomic = original = immediate = invalidate = deth = None
    if known.reth:
        reth = Reth._make(RETH.unpack_from(datagram, known.reth))
    if known.aeth:
        (word,) = AETH.unpack_from(datagram, known.aeth)
        aeth = Aeth(word >> 24, word & LOW_24_BITS)
    if known.atomic:
        atomic = AtomicEth._make(ATOMIC_ETH.unpack_from(datagram, known.atomic))
    if known.atomic_ack:
        (original,) = ATOMIC_ACK_ETH.unpack_from(datagram, known.atomic_ack)
    if known.immediate:
        (immediate,) = IMM_DT.unpack_from(datagram, known.immediate)
    if known.invalidate:
        (invalidate,) = IETH.unpack_from(datagram, known.invalidate)
    if known.deth:
        q_key, source = DETH.unpack_from(datagram, known.deth)
        deth = Deth(q_key, source & LOW_24_BITS)
    return Packet(
        known.opcode,
        destination & LOW_24_BITS,
        sequence & LOW_24_BITS,
        datagram[start:end],
        sequence & ACKNOWLEDGE_REQUEST != 0,
        flags & SOLICITED_EVENT != 0,
        flags & MIGRATION_REQUEST != 0,
        p_key,
        destination & FECN != 0,
        destination & BECN != 0,
        reth,
        aeth,
        atomic,
        original,
        immediate,
        invalidate,
        deth,
    )
