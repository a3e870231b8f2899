"""Whole RoCEv2 packets as bytes, and their ICRCs checked: for tests that are a peer themselves."""

from __future__ import annotations

import struct
from typing import Final

from emulator.roce.wire.bth import (
    ACKNOWLEDGE_REQUEST,
    BECN,
    BTH,
    FECN,
    LOW_24_BITS,
    MIGRATION_REQUEST,
    PAD_SHIFT,
    SOLICITED_EVENT,
)
from emulator.roce.wire.extended import AETH, ATOMIC_ACK_ETH, ATOMIC_ETH, DETH, IETH, IMM_DT, RETH
from emulator.roce.wire.flow import Buffer, Flow
from emulator.roce.wire.icrc import ICRC_BYTES, icrc_of, solved_ip_id
from emulator.roce.wire.malformed import Cause, MalformedPacket
from emulator.roce.wire.opcodes import MAX_PAYLOAD, OpcodeClass, class_of
from emulator.roce.wire.packet import Packet, decode_transport_untrusted

_ZEROS: Final = bytes(3)


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
        | (-payload_bytes & 3) << PAD_SHIFT
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
    raw = b"".join((raw, payload, _ZEROS[: -len(payload) & 3]))
    return raw + icrc_of(raw, flow, ip_id).to_bytes(ICRC_BYTES, "little")


def ip_id_of(datagram: Buffer, flow: Flow, expected: int = 0) -> int | None:
    """The identification with which a received UDP payload has the right ICRC; None when there is none.

    `expected` is tried first, in full strength: the position in a coalesced row, or 0. A caller that knows
    the field compares the result with it; one that does not takes any. An IPv6 packet has none: 0 says
    that its ICRC is right.
    """
    covered = datagram[:-ICRC_BYTES]
    received = int.from_bytes(datagram[-ICRC_BYTES:], "little")
    difference = icrc_of(covered, flow, expected) ^ received
    if not difference:
        return 0 if flow.is_ipv6 else expected
    if flow.is_ipv6:
        return None
    found = solved_ip_id(difference, len(datagram))
    return None if found is None else found ^ expected


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
