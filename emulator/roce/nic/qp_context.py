"""What the services of a queue pair know of it: state, attributes, memory and completions (IBTA 10.3).

`QueuePair` fills in what concerns all services at once.
"""

from abc import ABC, abstractmethod

from emulator.roce.nic.completion import CompletionQueue
from emulator.roce.nic.congestion import RateLimiter
from emulator.roce.nic.device_services import DeviceServices
from emulator.roce.nic.memory import Backing, ProtectionDomain, Span, SpanList
from emulator.roce.nic.path import Path
from emulator.roce.nic.pending_send import completion_opcode
from emulator.roce.nic.shared_receive import ReceiveQueue, SharedReceiveQueue
from emulator.roce.nic.verbs import (
    AsyncEvent,
    EventType,
    QpAttributes,
    QpCapabilities,
    QpState,
    QpType,
    WcStatus,
    WorkCompletion,
)
from emulator.roce.nic.work_requests import ReceiveRequest, SendRequest


class QpContext(ABC):
    """The base of a `QueuePair`."""

    def __init__(
        self,
        device: DeviceServices,
        number: int,
        kind: QpType,
        pd: ProtectionDomain,
        send_cq: CompletionQueue,
        recv_cq: CompletionQueue,
        capabilities: QpCapabilities,
        signal_all: bool,
        srq: SharedReceiveQueue | None,
    ) -> None:
        self.device = device
        self.keys = device.keys
        self.number = number
        self.type = kind
        self.pd = pd
        self.send_cq = send_cq
        self.recv_cq = recv_cq
        self.capabilities = capabilities
        self.signal_all = signal_all
        self.srq = srq
        self.state = QpState.RESET
        self.attributes = QpAttributes(capabilities=capabilities)
        self.mtu = device.port_mtu.bytes
        self._path: Path | None = None
        self.limiter: RateLimiter | None = None
        """Of a connection that a CNP named."""
        self.notify_after = 0.0
        """A marked packet that comes earlier causes no CNP."""
        self._own_receives = ReceiveQueue(capabilities.max_recv_wr, capabilities.max_recv_sge)
        self.receives: ReceiveQueue = srq if srq is not None else self._own_receives

    @property
    def path(self) -> Path:
        """The way to the peer of a connection."""
        assert self._path is not None
        return self._path

    def volley_packets(self) -> int:
        """Packets of a long message that are made at once; few where congestion control paces them."""
        congestion = self.device.congestion
        most = self.device.volley_packets(self.path, self.mtu)
        if congestion is None:
            return most
        return min(most, congestion.burst_packets(self.limiter, self.mtu))

    def payload_of(self, request: SendRequest, *, write: bool) -> SpanList:
        """The memory of a send request. ProtectionFault where it may not be used so."""
        data = request.inline
        if data is not None:
            return SpanList((Span(Backing(memoryview(data)), 0, len(data)),) if data else ())
        return self.keys.local(self.pd, request.sges, write=write)

    def scatter_of(self, request: ReceiveRequest) -> SpanList:
        """The memory of a receive. ProtectionFault where it may not be written."""
        pd = self.srq.pd if self.srq is not None else self.pd
        return self.keys.local(pd, request.sges, write=True)

    def complete_send(self, request: SendRequest, status: WcStatus, length: int = 0) -> None:
        opcode = completion_opcode(request.opcode)
        self.send_cq.push(WorkCompletion(request.wr_id, status, opcode, self.number, length))

    def send_queue_drained(self) -> None:
        """In SQD: all requests that had begun are complete."""
        if self.attributes.enable_sqd_notify:
            self.attributes.enable_sqd_notify = False
            self.tell(EventType.SQ_DRAINED)

    def tell(self, what: EventType) -> None:
        """An asynchronous event of this queue pair."""
        self.device.raise_event(AsyncEvent(what, self))

    @abstractmethod
    def schedule(self) -> None:
        """There may be something to send."""

    @abstractmethod
    def enter_error(self) -> None:
        """All queued requests complete with WR_FLUSH_ERR, once."""

    @abstractmethod
    def responder_failed(self) -> None:
        """Like `enter_error`, but answers that wait, above all the NAK, still go out."""

    @abstractmethod
    def send_queue_failed(self) -> None:
        """An unreliable request could not be sent: sends end, receives go on (SQE, IBTA 10.3.1.6)."""
