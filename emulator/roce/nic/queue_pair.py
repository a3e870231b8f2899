"""A queue pair as the verbs see it: states, posting, and the services behind it (IBTA 10.3, 11.2.5, 11.4).

`Requester`, `Responder` (for UC: `unreliable.py`) and `DatagramService` exchange packets with the peer. They
see their queue pair as its base `QpContext`. A posted request completes exactly once if it asked for a
completion or fails, unless the queue pair is reset or destroyed before.
"""

import errno
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from emulator.roce.nic.completion import CompletionQueue
from emulator.roce.nic.congestion import RateLimiter
from emulator.roce.nic.datagram import DatagramService
from emulator.roce.nic.device_services import DeviceServices
from emulator.roce.nic.memory import ProtectionDomain, ProtectionFault
from emulator.roce.nic.pending_send import ATOMIC_BYTES, ATOMICS, MESSAGES, UNRELIABLE_SHAPES
from emulator.roce.nic.qp_context import QpContext
from emulator.roce.nic.requester import Requester
from emulator.roce.nic.responder import Responder
from emulator.roce.nic.shared_receive import SharedReceiveQueue
from emulator.roce.nic.states import MAY_POST_RECEIVE, MAY_POST_SEND, RECEIVING, next_state
from emulator.roce.nic.unreliable import UnreliableRequester, UnreliableResponder
from emulator.roce.nic.verbs import (
    MAX_MESSAGE,
    Burst,
    EventType,
    Mtu,
    QpAttr,
    QpAttributes,
    QpCapabilities,
    QpState,
    QpType,
    SendFlags,
    SendOpcode,
    VerbsError,
    WcOpcode,
    WcStatus,
    WorkCompletion,
)
from emulator.roce.nic.work_requests import ReceiveRequest, SendRequest
from emulator.roce.wire.bth import LOW_24_BITS
from emulator.roce.wire.opcodes import Service

SERVICES: Final = {QpType.RC: Service.RC, QpType.UC: Service.UC, QpType.UD: Service.UD}
"""The transport service of a queue pair, which all packets to it have."""

_INLINE: Final = int(SendFlags.INLINE)

OPCODES: Final[dict[QpType, dict[int, SendOpcode]]] = {
    QpType.RC: {int(opcode): opcode for opcode in SendOpcode},
    QpType.UC: {
        int(opcode): opcode for opcode in (*UNRELIABLE_SHAPES, SendOpcode.LOCAL_INV, SendOpcode.BIND_MW)
    },
    QpType.UD: {int(opcode): opcode for opcode in (SendOpcode.SEND, SendOpcode.SEND_WITH_IMM)},
}
_BOUNDS: Final = {
    QpAttr.TIMEOUT: ("timeout", 31),
    QpAttr.RETRY_CNT: ("retry_count", 7),
    QpAttr.RNR_RETRY: ("rnr_retry", 7),
    QpAttr.MIN_RNR_TIMER: ("min_rnr_timer", 31),
    QpAttr.RQ_PSN: ("rq_psn", 0xFFFFFFFF),
    QpAttr.SQ_PSN: ("sq_psn", 0xFFFFFFFF),
    QpAttr.DEST_QPN: ("dest_qpn", LOW_24_BITS),
    QpAttr.PKEY_INDEX: ("pkey_index", 0),
}
"""The largest value of an attribute; there is one P_Key. Of PSNs the lower 24 bits count, as in the
kernel."""

_FIELDS: Final = {
    QpAttr.ACCESS_FLAGS: "access",
    QpAttr.PKEY_INDEX: "pkey_index",
    QpAttr.PORT: "port_num",
    QpAttr.QKEY: "qkey",
    QpAttr.AV: "av",
    QpAttr.PATH_MTU: "path_mtu",
    QpAttr.TIMEOUT: "timeout",
    QpAttr.RETRY_CNT: "retry_count",
    QpAttr.RNR_RETRY: "rnr_retry",
    QpAttr.RQ_PSN: "rq_psn",
    QpAttr.SQ_PSN: "sq_psn",
    QpAttr.MAX_QP_RD_ATOMIC: "max_rd_atomic",
    QpAttr.MAX_DEST_RD_ATOMIC: "max_dest_rd_atomic",
    QpAttr.MIN_RNR_TIMER: "min_rnr_timer",
    QpAttr.DEST_QPN: "dest_qpn",
    QpAttr.EN_SQD_ASYNC_NOTIFY: "enable_sqd_notify",
}
"""Attributes that are only stored. Alternate paths and migration are accepted and have no effect."""


class QueuePair(QpContext):
    """See the module's docstring. Made by `Nic.create_qp`; `ready` lists queue pairs that may send."""

    def __init__(
        self,
        device: DeviceServices,
        ready: "deque[QueuePair]",
        number: int,
        kind: QpType,
        pd: ProtectionDomain,
        send_cq: CompletionQueue,
        recv_cq: CompletionQueue,
        capabilities: QpCapabilities,
        signal_all: bool,
        srq: SharedReceiveQueue | None,
    ) -> None:
        super().__init__(device, number, kind, pd, send_cq, recv_cq, capabilities, signal_all, srq)
        self._ready = ready
        self._wake = self.schedule
        self.scheduled = False
        self._last_wqe_told = self._communicating = self._answers_first = False
        self.datagrams = DatagramService(self) if kind is QpType.UD else None
        self.service = SERVICES[kind]
        connected = kind is not QpType.UC
        self.requester = Requester(self) if connected else UnreliableRequester(self)
        self.responder = Responder(self) if connected else UnreliableResponder(self)
        self.sender = self.requester if self.datagrams is None else self.datagrams

    def query(self) -> QpAttributes:
        """ibv_query_qp: a copy of the attributes, with the current PSNs."""
        result = replace(self.attributes, state=self.state, current_state=self.state)
        result.capabilities = replace(self.capabilities)
        result.sq_draining = self.state is QpState.SQD and not self.requester.drained
        if self.state not in (QpState.RESET, QpState.INIT) and self.datagrams is None:
            result.rq_psn = self.responder.expected & LOW_24_BITS
            result.sq_psn = self.requester.psn & LOW_24_BITS
        return result

    def modify(self, attributes: QpAttributes, mask: QpAttr) -> None:
        """ibv_modify_qp. VerbsError(EINVAL) for an illegal move or value; nothing has changed then."""
        target = next_state(
            self.type, self.number, self.state, mask, attributes.state, attributes.current_state
        )
        self._check_values(attributes, mask)
        if target is QpState.RESET:
            self.reset()
            return
        if target is QpState.ERR:
            self.enter_error()
            return
        for flag, name in _FIELDS.items():
            if mask & flag:
                setattr(self.attributes, name, getattr(attributes, name))
        if mask & QpAttr.AV:
            assert attributes.av is not None
            self._path = self.device.path_to(attributes.av.ip)
        if mask & QpAttr.PATH_MTU:
            self.mtu = Mtu(attributes.path_mtu).bytes
        if mask & QpAttr.RQ_PSN:
            self.responder.start(attributes.rq_psn & LOW_24_BITS)
        if mask & QpAttr.SQ_PSN:
            self.sender.start(attributes.sq_psn & LOW_24_BITS)
        previous, self.state = self.state, target
        if target is QpState.SQD and previous is not QpState.SQD and self.requester.drained:
            self.send_queue_drained()
        self.schedule()

    def _check_values(self, attributes: QpAttributes, mask: QpAttr) -> None:
        for flag, (name, most) in _BOUNDS.items():
            if mask & flag and not 0 <= getattr(attributes, name) <= most:
                raise VerbsError(errno.EINVAL, f"{name} is {getattr(attributes, name)}, {most} at most")
        if mask & QpAttr.PORT and attributes.port_num != 1:
            raise VerbsError(errno.EINVAL, f"there is no port {attributes.port_num}")
        if mask & QpAttr.AV:
            if attributes.av is None:
                raise VerbsError(errno.EINVAL, "no address vector is given")
            self.device.check_address(attributes.av)
        if mask & QpAttr.PATH_MTU and not 1 <= attributes.path_mtu <= self.device.port_mtu:
            raise VerbsError(errno.EINVAL, f"the path MTU is beyond the port's, {self.device.port_mtu.bytes}")
        most = self.device.limits.max_qp_rd_atom
        for flag in (QpAttr.MAX_QP_RD_ATOMIC, QpAttr.MAX_DEST_RD_ATOMIC):
            if mask & flag and not 0 <= getattr(attributes, _FIELDS[flag]) <= most:
                raise VerbsError(errno.EINVAL, f"{_FIELDS[flag]} is beyond {most}")

    def reset(self) -> None:
        """The queue pair is reset or destroyed: what was posted completes and is sent no more."""
        self.state = QpState.RESET
        self.attributes = QpAttributes(capabilities=self.capabilities)
        self._path = None
        self.limiter, self.notify_after = None, 0.0
        if self.device.congestion is not None:
            self.device.congestion.forget(self._wake)
        self._last_wqe_told = self._communicating = False
        self._own_receives.row.clear()
        self.send_cq.forget(self.number)
        self.recv_cq.forget(self.number)
        self.requester.start(0)
        self.responder.start(0)
        if self.datagrams is not None:
            self.datagrams.start(0)
        self.keys.unbind_windows_of(self.number)

    def enter_error(self) -> None:
        if self.state is QpState.ERR:
            return
        self.state = QpState.ERR
        self.responder.responses.clear()
        self._flush()

    def responder_failed(self) -> None:
        self.state = QpState.ERR
        self._flush()

    def _flush(self) -> None:
        self.requester.flush()
        self.responder.flush()
        if self.datagrams is not None:
            self.datagrams.flush()
        while self._own_receives.row:
            self._flush_receive(self._own_receives.row.popleft())
        if self.srq is not None and not self._last_wqe_told:
            self._last_wqe_told = True
            self.tell(EventType.QP_LAST_WQE_REACHED)

    def send_queue_failed(self) -> None:
        self.state = QpState.SQE
        self.sender.flush()

    def post_send(self, request: SendRequest) -> None:
        """ibv_post_send of one request. EINVAL where it makes no sense, ENOMEM where the queue is full."""
        if self.state not in MAY_POST_SEND:
            raise VerbsError(errno.EINVAL, f"nothing can be sent in {self.state.name}")
        self._check_send(request)
        queue = self.sender
        if len(queue) >= self.capabilities.max_send_wr:
            raise VerbsError(errno.ENOMEM, "the send queue is full")
        if int(request.flags) & _INLINE and request.inline is None:
            request.inline = self._gathered(request)
        if self.state in (QpState.ERR, QpState.SQE):
            self.complete_send(request, WcStatus.WR_FLUSH_ERR)
            return
        queue.post(request)
        self.schedule()

    def post_sends(self, requests: Sequence[SendRequest]) -> None:
        """Post all of them, or none where the queue has no room for all. As `post_send` else."""
        if len(requests) > 1 and len(self.sender) + len(requests) > self.capabilities.max_send_wr:
            raise VerbsError(errno.ENOMEM, "the send queue is full")
        for request in requests:
            self.post_send(request)

    def _check_send(self, request: SendRequest) -> None:
        opcode = OPCODES[self.type].get(request.opcode)
        if opcode is None:
            raise VerbsError(errno.EINVAL, f"{self.type.name} does not do opcode {int(request.opcode)}")
        request.opcode = opcode
        if len(request.sges) > self.capabilities.max_send_sge:
            raise VerbsError(errno.EINVAL, f"{len(request.sges)} gather entries are too many")
        length = 0
        if request.inline is not None:
            length = len(request.inline)
        else:
            for sge in request.sges:
                length += sge[1]
        if length > MAX_MESSAGE:
            raise VerbsError(errno.EINVAL, f"a message of {length} bytes is too long")
        if opcode is SendOpcode.ATOMIC_WRITE:
            if length != ATOMIC_BYTES or request.remote_address % ATOMIC_BYTES:
                raise VerbsError(errno.EINVAL, "an atomic write is 8 bytes at a multiple of 8")
        elif int(request.flags) & _INLINE:
            if opcode not in MESSAGES or length > self.capabilities.max_inline_data:
                raise VerbsError(errno.EINVAL, f"{length} bytes of {opcode.name} cannot be inline")
        elif request.inline is not None:
            raise VerbsError(errno.EINVAL, "inline data without the flag")
        if self.type is QpType.UD:
            if request.ah is None or request.ah.pd is not self.pd:
                raise VerbsError(errno.EINVAL, "a datagram needs an address handle of its domain")
        elif opcode in ATOMICS:
            if length != ATOMIC_BYTES:
                raise VerbsError(errno.EINVAL, f"an atomic has 8 bytes, not {length}")
        elif opcode is SendOpcode.BIND_MW and (request.window is None or request.bind is None):
            raise VerbsError(errno.EINVAL, "a bind needs a window and what to bind it to")

    def _gathered(self, request: SendRequest) -> bytes:
        try:
            spans = self.keys.local(self.pd, request.sges, write=False)
            data = bytearray(spans.length)
            spans.copy_out(0, memoryview(data))
        except ProtectionFault as fault:
            raise VerbsError(errno.EINVAL, f"inline data: {fault}") from fault
        return bytes(data)

    def post_recv(self, request: ReceiveRequest) -> None:
        """ibv_post_recv of one request. EINVAL where it makes no sense, ENOMEM where the queue is full."""
        if self.srq is not None:
            raise VerbsError(errno.EINVAL, "this queue pair receives from a shared queue")
        if self.state not in MAY_POST_RECEIVE:
            raise VerbsError(errno.EINVAL, f"no receive can be posted in {self.state.name}")
        if self.state is QpState.ERR:
            if len(request.sges) > self.capabilities.max_recv_sge:
                raise VerbsError(errno.EINVAL, f"{len(request.sges)} scatter entries are too many")
            self._flush_receive(request)
            return
        self._own_receives.post_recv(request)

    def schedule(self) -> None:
        if not self.scheduled:
            self.scheduled = True
            self._ready.append(self)

    def _flush_receive(self, request: ReceiveRequest) -> None:
        self.recv_cq.push(WorkCompletion(request.wr_id, WcStatus.WR_FLUSH_ERR, WcOpcode.RECV, self.number))

    @property
    def receiving(self) -> bool:
        """Whether its state lets it receive."""
        return self.state in RECEIVING

    def communication_seen(self) -> None:
        """A valid packet in RTR proves that the peer is ready (COMM_EST, IBTA 11.6.3.1). Reported once."""
        if self.state is QpState.RTR and not self._communicating:
            self._communicating = True
            self.tell(EventType.COMM_EST)

    def congestion_notified(self, now: float) -> None:
        """The peer had packets of ours that a switch marked: send more slowly."""
        congestion = self.device.congestion
        if congestion is not None:
            if self.limiter is None:
                self.limiter = RateLimiter(congestion.settings)
            self.limiter.notified(now)

    def _may_send(self, limiter: RateLimiter, now: float) -> bool:
        congestion = self.device.congestion
        return congestion is None or congestion.may_send(limiter, self._wake, now)

    def next_burst(self, now: float) -> Burst | None:
        """The next packets to go out; answers and requests take turns."""
        if self.datagrams is not None:
            return self.datagrams.next_burst()
        if self._path is None:
            return None
        if self.limiter is not None and not self._may_send(self.limiter, now):
            return self.responder.next_burst(paced=True)
        self._answers_first = not self._answers_first
        if self._answers_first:
            return self.responder.next_burst() or self.requester.next_burst(now)
        return self.requester.next_burst(now) or self.responder.next_burst()
