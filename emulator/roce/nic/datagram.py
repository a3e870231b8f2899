"""The unreliable datagram service: one packet a message, to any peer (IBTA 9.8.2). QP1 uses it.

A send completes when its packet has left. The service drops and counts a datagram with a wrong Q_Key or
without a posted receive. The sender gets no answer, as with a real device.
"""

from collections import deque
from typing import Final

from emulator.roce.nic.counters import Count
from emulator.roce.nic.memory import ProtectionFault
from emulator.roce.nic.qp_context import QpContext
from emulator.roce.nic.verbs import (
    GRH_BYTES,
    Burst,
    QpState,
    SendFlags,
    SendOpcode,
    WcFlags,
    WcOpcode,
    WcStatus,
    WorkCompletion,
)
from emulator.roce.nic.work_requests import SendRequest
from emulator.roce.wire.extended import DETH, IMM_DT
from emulator.roce.wire.flow import Flow, ip_and_udp_headers, text_address
from emulator.roce.wire.opcodes import Opcode
from emulator.roce.wire.packet import Packet

CONTROLLED_QKEY: Final = 0x80000000
"""A Q_Key with this bit in a request means the queue pair's own (IBTA 10.2.5)."""

_SOLICITED: Final = int(SendFlags.SOLICITED)
_SIGNALED: Final = int(SendFlags.SIGNALED)
_LOW_24_BITS: Final = 0xFFFFFF


def network_header(flow: Flow, datagram: memoryview) -> bytes:
    """The 40 bytes before the payload of a received datagram: the IPv6 header, or 20 bytes of nothing and the
    IPv4 header (annex A17.4.5.1), whose TOS, TTL and identification a socket does not show."""
    header = ip_and_udp_headers(flow, datagram)[:-8]
    return header if flow.is_ipv6 else bytes(GRH_BYTES - len(header)) + header


class DatagramService:
    """Both directions of a UD queue pair. The send queue is bounded by `max_send_wr`."""

    def __init__(self, qp: QpContext) -> None:
        self._qp = qp
        self._waiting: deque[SendRequest] = deque()
        self.psn = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def start(self, psn: int) -> None:
        """Begin with this PSN, and with nothing in the queue."""
        self._waiting.clear()
        self.psn = psn

    def post(self, request: SendRequest) -> None:
        self._waiting.append(request)

    def flush(self) -> None:
        """Complete everything with WR_FLUSH_ERR."""
        while self._waiting:
            self._qp.complete_send(self._waiting.popleft(), WcStatus.WR_FLUSH_ERR)

    def next_burst(self) -> Burst | None:
        qp = self._qp
        while self._waiting and qp.state is QpState.RTS:
            request = self._waiting.popleft()
            try:
                burst = self._packet(request)
            except ProtectionFault:
                burst = None
                qp.complete_send(request, WcStatus.LOC_PROT_ERR)
            else:
                if burst is None:
                    qp.complete_send(request, WcStatus.LOC_LEN_ERR)
            if burst is None:
                qp.send_queue_failed()
                return None
            flags = int(request.flags)
            if qp.signal_all or flags & _SIGNALED:
                qp.complete_send(request, WcStatus.SUCCESS)
            return burst
        return None

    def _packet(self, request: SendRequest) -> Burst | None:
        qp = self._qp
        assert request.ah is not None
        spans = qp.payload_of(request, write=False)
        if spans.length > qp.mtu:
            return None
        q_key = qp.attributes.qkey if request.remote_qkey & CONTROLLED_QKEY else request.remote_qkey
        extended = DETH.pack(q_key, qp.number)
        opcode = Opcode.UD_SEND_ONLY
        if request.opcode is SendOpcode.SEND_WITH_IMM:
            opcode = Opcode.UD_SEND_ONLY_WITH_IMMEDIATE
            extended += IMM_DT.pack(request.imm)
        psn, self.psn = self.psn, self.psn + 1 & _LOW_24_BITS
        return qp.device.writer.single(
            qp.device.path_to(request.ah.av.ip),
            opcode,
            request.remote_qpn,
            psn,
            extended,
            solicited=int(request.flags) & _SOLICITED != 0,
            spans=spans,
            length=spans.length,
        )

    def receive(self, packet: Packet, datagram: memoryview, flow: Flow) -> None:
        """A datagram, checked as far as its form goes."""
        qp = self._qp
        counters = qp.device.counters
        assert packet.deth is not None
        if packet.deth.q_key != qp.attributes.qkey:
            counters[Count.WRONG_QKEY] += 1
            return
        request = qp.receives.take()
        if request is None:
            counters[Count.NO_RECEIVE] += 1
            return
        payload = memoryview(packet.payload)
        status, length = WcStatus.SUCCESS, GRH_BYTES + len(payload)
        try:
            spans = qp.scatter_of(request)
            if length > spans.length:
                counters[Count.BUFFER_TOO_SMALL] += 1
                status = WcStatus.LOC_LEN_ERR
            else:
                spans.place(0, memoryview(network_header(flow, datagram)))
                spans.place(GRH_BYTES, payload)
        except ProtectionFault:
            status = WcStatus.LOC_PROT_ERR
        flags = WcFlags.GRH | (WcFlags.WITH_IMM if packet.immediate is not None else WcFlags(0))
        qp.recv_cq.push(
            WorkCompletion(
                request.wr_id,
                status,
                WcOpcode.RECV,
                qp.number,
                length if status is WcStatus.SUCCESS else 0,
                packet.immediate or 0,
                packet.deth.source_queue_pair,
                flags,
                source=text_address(flow.source),
            ),
            packet.solicited,
        )
        if status is not WcStatus.SUCCESS:
            qp.enter_error()
