"""The single packets of a requester: what is no part of a row, and the requests for data."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from emulator.roce.nic.verbs import Burst, SendFlags, SendOpcode
from emulator.roce.nic.work import Work
from emulator.roce.wire.extended import ATOMIC_ETH, IMM_DT, RETH
from emulator.roce.wire.opcodes import Opcode, class_of

if TYPE_CHECKING:
    from emulator.roce.nic.queue_pair import QueuePair

_SOLICITED: Final = int(SendFlags.SOLICITED)


def message_packet(qp: QueuePair, work: Work, psn: int, *, acknowledge: bool) -> Burst:
    """The packet `psn` of a SEND or WRITE. ProtectionFault where its memory is gone."""
    request, shape = work.request, work.shape
    assert shape is not None
    position, mtu = psn - work.first, qp.mtu
    last = position == work.packets - 1
    if last:
        opcode = shape.last if position else shape.only
    else:
        opcode = shape.middle if position else shape.first
    known = class_of(opcode)
    extended = b""
    if known.reth:
        extended = RETH.pack(request.remote_address, request.rkey, work.length)
    if known.immediate:
        extended += IMM_DT.pack(request.imm)
    elif known.invalidate:
        extended += IMM_DT.pack(request.invalidate_rkey)
    return qp.device.writer.single(
        qp.path,
        opcode,
        qp.attributes.dest_qpn,
        psn,
        extended,
        acknowledge=acknowledge,
        solicited=last and int(request.flags) & _SOLICITED != 0,
        spans=work.spans,
        start=position * mtu,
        length=min(mtu, work.length - position * mtu),
    )


def atomic_packet(qp: QueuePair, work: Work, psn: int) -> Burst:
    """The request of an atomic."""
    request = work.request
    adding = request.opcode is SendOpcode.ATOMIC_FETCH_AND_ADD
    extended = ATOMIC_ETH.pack(
        request.remote_address,
        request.rkey,
        request.compare_add if adding else request.swap,
        0 if adding else request.compare_add,
    )
    opcode = Opcode.FETCH_ADD if adding else Opcode.COMPARE_SWAP
    return qp.device.writer.single(qp.path, opcode, qp.attributes.dest_qpn, psn, extended, acknowledge=True)


def read_packet(qp: QueuePair, work: Work, psn: int, end: int) -> Burst:
    """The request of the packets `psn` to `end` - 1 of a READ."""
    start = (psn - work.first) * qp.mtu
    length = min(work.length, (end - work.first) * qp.mtu) - start
    extended = RETH.pack(work.request.remote_address + start, work.request.rkey, length)
    return qp.device.writer.single(
        qp.path, Opcode.READ_REQUEST, qp.attributes.dest_qpn, psn, extended, acknowledge=True
    )
