"""One whole RoCEv2 packet: the payload of a UDP datagram as a record.

    BTH | extended headers, as the opcode has them | payload | 0 to 3 bytes of padding | ICRC, little-endian

This is the way of single packets. Rows of equal packets of one message are written and compared as numpy
arrays by the device, with the constants of `bth.py`, `opcodes.py` and `icrc.py`.
"""

from typing import Final, NamedTuple

from emulator.roce.wire import extended
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
)
from emulator.roce.wire.extended import Aeth, AtomicEth, Deth, Reth
from emulator.roce.wire.flow import Buffer
from emulator.roce.wire.icrc import ICRC_BYTES
from emulator.roce.wire.malformed import Cause, MalformedPacket
from emulator.roce.wire.opcodes import MAX_PAYLOAD, OPCODES, Opcode

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


def decode_transport_untrusted(datagram: Buffer) -> Packet:
    """The packet in a UDP payload. The caller checks the ICRC. MalformedPacket with its cause if there is
    none."""
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
        reth = Reth._make(extended.RETH.unpack_from(datagram, known.reth))
    if known.aeth:
        (word,) = extended.AETH.unpack_from(datagram, known.aeth)
        aeth = Aeth(word >> 24, word & LOW_24_BITS)
    if known.atomic:
        atomic = AtomicEth._make(extended.ATOMIC_ETH.unpack_from(datagram, known.atomic))
    if known.atomic_ack:
        (original,) = extended.ATOMIC_ACK_ETH.unpack_from(datagram, known.atomic_ack)
    if known.immediate:
        (immediate,) = extended.IMM_DT.unpack_from(datagram, known.immediate)
    if known.invalidate:
        (invalidate,) = extended.IETH.unpack_from(datagram, known.invalidate)
    if known.deth:
        q_key, source = extended.DETH.unpack_from(datagram, known.deth)
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
