"""Requests of a requester by themselves: how they begin, and their single packets (what is no part of a row,
and the requests for data)."""

from __future__ import annotations

from typing import Final

from emulator.roce.nic.memory import ProtectionFault
from emulator.roce.nic.qp_context import QpContext
from emulator.roce.nic.verbs import Burst, SendFlags, SendOpcode, WcStatus
from emulator.roce.nic.work import ATOMIC_BYTES, ATOMICS, LOCAL_COMPLETION, ONE_PACKET, Work
from emulator.roce.nic.work_requests import SendRequest
from emulator.roce.wire.extended import ATOMIC_ETH, IMM_DT, RETH, read_packets
from emulator.roce.wire.opcodes import Opcode, class_of

_SOLICITED: Final = int(SendFlags.SOLICITED)


def prepare(qp: QpContext, work: Work) -> None:
    """Carry a local request out, or find the memory of another and let it take its PSNs; `failure` where it
    cannot be done. ProtectionFault where its memory may not be used so."""
    request = work.request
    if request.opcode in LOCAL_COMPLETION:
        try:
            _carry_out(qp, request)
        except ProtectionFault:
            binding = request.opcode is SendOpcode.BIND_MW
            work.failure = WcStatus.MW_BIND_ERR if binding else WcStatus.LOC_QP_OP_ERR
        return
    assert work.shape is not None
    if work.shape.answered and not qp.attributes.max_rd_atomic:
        work.failure = WcStatus.LOC_QP_OP_ERR
        return
    writes = work.shape.answered and request.opcode is not SendOpcode.ATOMIC_WRITE
    spans = qp.payload_of(request, write=writes)
    packets = 1 if request.opcode in ONE_PACKET else read_packets(spans.length, qp.mtu)
    work.take_psns(spans, packets)


def _carry_out(qp: QpContext, request: SendRequest) -> None:
    if request.opcode is SendOpcode.LOCAL_INV:
        qp.keys.invalidate(qp.pd, qp.number, request.invalidate_rkey)
    else:
        assert request.window is not None
        assert request.bind is not None
        qp.keys.bind(request.window, qp.number, qp.pd, request.bind, request.window_rkey)


def message_packet(qp: QpContext, work: Work, psn: int, *, acknowledge: bool) -> Burst:
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


def answered_packet(qp: QpContext, work: Work, psn: int, end: int) -> Burst:
    """The request for the answer with the PSNs `psn` to `end` - 1."""
    if work.request.opcode is SendOpcode.ATOMIC_WRITE:
        return atomic_write_packet(qp, work, psn)
    if work.request.opcode in ATOMICS:
        return atomic_packet(qp, work, psn)
    return read_packet(qp, work, psn, end)


def atomic_packet(qp: QpContext, work: Work, psn: int) -> Burst:
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


def atomic_write_packet(qp: QpContext, work: Work, psn: int) -> Burst:
    """The request of an atomic write (IBTA annex A19): its eight bytes travel in it."""
    extended = RETH.pack(work.request.remote_address, work.request.rkey, ATOMIC_BYTES)
    return qp.device.writer.single(
        qp.path,
        Opcode.ATOMIC_WRITE,
        qp.attributes.dest_qpn,
        psn,
        extended,
        acknowledge=True,
        spans=work.spans,
        length=ATOMIC_BYTES,
    )


def read_packet(qp: QpContext, work: Work, psn: int, end: int) -> Burst:
    """The request of the packets `psn` to `end` - 1 of a READ."""
    start = (psn - work.first) * qp.mtu
    length = min(work.length, (end - work.first) * qp.mtu) - start
    extended = RETH.pack(work.request.remote_address + start, work.request.rkey, length)
    return qp.device.writer.single(
        qp.path, Opcode.READ_REQUEST, qp.attributes.dest_qpn, psn, extended, acknowledge=True
    )
