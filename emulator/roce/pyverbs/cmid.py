"""`pyverbs.cmid`: connections by address and port, as librdmacm makes them.

A CMID made of an `AddrInfo` is synchronous: its calls return when what they ask for has happened. One made of
a `CMEventChannel` is not: what happens comes out of the channel as a `CMEvent`.

Beyond pyverbs, a passive side may have many connections: a `CMEvent` names its CMID (`CMEvent.id`), and what
a listening CMID and its connections share goes with the listening one.

With RDMA_PS_UDP there is no connection: `connect` asks for the queue pair that serves a port, and ESTABLISHED
brings it (`UDParam`). Multicast groups are joined by such a CMID too.
"""

# One idea in one file: an event makes the CMID of a request, and a CMID digests its events. Apart they would
# import each other.

import errno
import weakref
from functools import partial
from typing import Final

from emulator.roce.cm.attributes import queue_pair_attributes
from emulator.roce.cm.connection import Connection, Listener
from emulator.roce.cm.events import CmEventType, ConnectionParameters
from emulator.roce.cm.service_resolution import UDP_QKEY, ServiceResolution
from emulator.roce.nic.verbs import Address, AddressVector, QpAttr, QpAttributes, QpState, VerbsError
from emulator.roce.pyverbs import base, cm_devices
from emulator.roce.pyverbs import cm_enums as cm
from emulator.roce.pyverbs import enums as e
from emulator.roce.pyverbs.addr import AH, AHAttr
from emulator.roce.pyverbs.cm_channel import ChannelEvent, CMEventChannel
from emulator.roce.pyverbs.cm_records import AddrInfo, ConnParam, JoinMCAttrEx, checked_flags, group_in
from emulator.roce.pyverbs.cq import CQ, WC
from emulator.roce.pyverbs.mr import MR
from emulator.roce.pyverbs.pd import PD, DomainUser
from emulator.roce.pyverbs.pyverbs_error import PyverbsRDMAError, PyverbsUserError
from emulator.roce.pyverbs.qp import ECE, QP, QPAttr, QPInitAttr
from emulator.roce.pyverbs.wr import SGE, RecvWR, SendWR
from emulator.roce.runtime import registry
from emulator.roce.runtime.device import Device
from emulator.roce.runtime.errors import DeviceClosed
from emulator.roce.wire.cm_ip import PortSpace
from emulator.roce.wire.flow import gid_of

_WHERE_TO_SEND: Final = (cm.RDMA_CM_EVENT_ESTABLISHED, cm.RDMA_CM_EVENT_MULTICAST_JOIN)

_FAILED = frozenset(
    {
        CmEventType.REJECTED, CmEventType.UNREACHABLE, CmEventType.CONNECT_ERROR, CmEventType.ADDR_ERROR,
        CmEventType.MULTICAST_ERROR,
    }
)  # fmt: skip


class CMEvent(base.PyverbsObject):
    """The next event of a channel: waits for it where there is none, and the descriptor blocks.

    To take a CONNECT_RESPONSE of a CMID with a queue pair of its own sets that to RTS and completes the
    connection, as in librdmacm; what the program gets is ESTABLISHED.
    """

    __slots__ = (
        "_acknowledged", "_id", "_type", "connection", "group", "listener", "param", "private_data", "status",
    )  # fmt: skip

    def __init__(self, channel: CMEventChannel) -> None:
        self._acknowledged = True
        happened = channel.take(wait=channel.blocking)
        if happened is None:
            for device in tuple(channel.devices):
                device.drive_once()
            happened = channel.take(wait=False)
        if happened is None:
            raise PyverbsRDMAError("Failed to create CMEvent", errno.EAGAIN)
        self._acknowledged = False
        event = happened.event
        self.status = happened.status
        """A negative errno, or with REJECTED the reason that the peer gave. Not in pyverbs."""
        self.private_data = event.private_data if event is not None else b""
        """The private data of the peer's message."""
        self.param = event.parameters if event is not None else None
        """What the peer asks for, with a CONNECT_REQUEST or CONNECT_RESPONSE. Not in pyverbs."""
        self.group = event.group if event is not None else ""
        """The address of the multicast group that it is about, if any. Not in pyverbs."""
        self.connection = event.connection if event is not None else None
        """What the connection manager knows it by. Not in pyverbs."""
        self.listener = event.listener if event is not None else None
        self._id = happened.cmid if isinstance(happened.cmid, CMID) else _owner(self.connection)
        self._type = happened.type
        if self._id is not None:
            self._type = self._id.digest(happened)

    def ack_cm_event(self) -> None:
        """Acknowledge it. Twice is fine."""
        self._acknowledged = True

    close = ack_cm_event

    @property
    def event_type(self) -> int:
        return int(self._type)

    def event_str(self) -> str:
        """The name of its type; nothing once it is acknowledged, as in pyverbs."""
        return "" if self._acknowledged else cm.rdma_cm_event_type(self.event_type).name

    @property
    def listen_id(self) -> "CMID | None":
        """With a CONNECT_REQUEST, the CMID that listens. Not in pyverbs."""
        return _owner(self.listener)

    @property
    def id(self) -> "CMID | None":
        """The CMID that it is about; with a CONNECT_REQUEST a new one, made when it is first asked for.
        Not in pyverbs."""
        if self._id is None and self._type is CmEventType.CONNECT_REQUEST:
            self._id = CMID(creator=self, listen_id=self.listen_id)
        return self._id


def _owner(thing: Connection | Listener | None) -> "CMID | None":
    """The CMID of a connection or listener, where the program still has it; they hold it weakly."""
    reference = thing.context if thing is not None else None
    found: CMID | None = reference() if callable(reference) else None
    return found


class UDParam(base.PyverbsObject):
    """struct rdma_ud_param: where datagrams go, with ESTABLISHED of a service of RDMA_PS_UDP and with
    MULTICAST_JOIN; else zeros."""

    __slots__ = ("ah_attr", "qkey", "qp_num")

    def __init__(self, cm_event: CMEvent) -> None:
        self.qp_num = 0
        self.qkey = 0
        self.ah_attr = AHAttr(port_num=0)
        service, told = cm_event.connection, cm_event.param
        if cm_event.event_type in _WHERE_TO_SEND and isinstance(service, ServiceResolution):
            assert told is not None
            self.qp_num, self.qkey = told.qp_num, told.qkey
            self.ah_attr = AHAttr.of(AddressVector(cm_event.group or service.remote_ip))


class CMID(DomainUser):
    """One end of a connection, or a listener. See the top of this file."""

    __slots__ = (
        "_ack_timeout", "_channel", "_connection", "_listeners", "_local", "_open", "_over", "_own_cqs",
        "_passive_qp", "_port_space", "_shares", "_users", "event_channel", "qp",
    )  # fmt: skip

    def __init__(
        self,
        creator: AddrInfo | CMEventChannel | CMEvent | None = None,
        qp_init_attr: QPInitAttr | None = None,
        pd: PD | None = None,
        port_space: int = cm.RDMA_PS_TCP,
        listen_id: "CMID | None" = None,
    ) -> None:
        super().__init__(pd)
        self._open = False
        self.qp: QP | None = None
        self._own_cqs: list[CQ] = []
        self._connection: Connection | None = None
        self._port_space = PortSpace.TCP
        self.event_channel: CMEventChannel | None = None
        self._users: list[Device] = []
        self._listeners: list[Listener] = []
        self._local: Address | None = None
        self._passive_qp: QPInitAttr | None = None
        self._shares = False
        self._over = False
        self._ack_timeout: int | None = None
        base.close_deferred()
        if isinstance(creator, CMEventChannel):
            self._take_port_space(port_space)
            self.event_channel = self._channel = creator
        elif isinstance(creator, CMEvent):
            if listen_id is None:
                raise PyverbsUserError("listen ID not provided")
            if creator.connection is None:
                raise PyverbsUserError("the event is no CONNECT_REQUEST")
            self.event_channel = self._channel = listen_id._channel
            self._adopt(creator.connection, listen_id)
        else:
            self._channel = CMEventChannel()
            if isinstance(creator, AddrInfo):
                self._take_port_space(creator.port_space)
                self._create_endpoint(creator, qp_init_attr)
            elif creator is not None:
                raise PyverbsRDMAError(f"Cannot create CM ID from {type(creator)}", errno.EINVAL)
        self._open = True

    def _create_endpoint(self, info: AddrInfo, qp_init_attr: QPInitAttr | None) -> None:
        """rdma_create_ep: a listener to be, or an active side with its route and its queue pair."""
        refused = "Failed to create CM ID"
        try:
            if info.flags & cm.RAI_PASSIVE:
                self._bind(info.source)
                self._passive_qp = qp_init_attr
                return
            self._resolve(info)
        except VerbsError as error:
            self._release()
            raise base.refusal(refused, error) from error
        self._context_and_domain()
        if qp_init_attr is not None:
            try:
                self.create_qp(qp_init_attr)
            except PyverbsRDMAError as error:
                self._open = True
                self.close()
                raise PyverbsRDMAError(refused, error.error_code) from error

    def __del__(self) -> None:
        if getattr(self, "_open", False):
            if self._users:
                base.close_or_defer(self)
            else:
                self.close()

    def _use(self, device: Device) -> None:
        """Be one of those who have the device open."""
        self._users.append(device)
        self._channel.devices.add(device)

    @property
    def device(self) -> Device:
        """Any device that it uses. Not in pyverbs."""
        return self._device if self._device is not None else self._users[0]

    def _take_port_space(self, port_space: int) -> None:
        if port_space not in (cm.RDMA_PS_TCP, cm.RDMA_PS_UDP):
            raise PyverbsRDMAError("Failed to create CM ID", errno.EOPNOTSUPP)
        self._port_space = PortSpace(port_space)

    @property
    def datagrams(self) -> bool:
        """Whether its port space is RDMA_PS_UDP. Not in pyverbs."""
        return self._port_space is PortSpace.UDP

    def connection(self) -> Connection:
        """What the connection manager knows it by. VerbsError(EINVAL) where there is none. Not in pyverbs."""
        if self._connection is None:
            raise VerbsError(errno.EINVAL, "the CMID has no connection")
        return self._connection

    @property
    def dev_name(self) -> str:
        return self.opened().name

    @property
    def port_num(self) -> int:
        """The device's port; 0 before it is known."""
        return 1 if self._device is not None else 0

    context = base.reads("ctx", "The `Context` of its device, once it is known.")

    @property
    def src_port(self) -> int:
        """The local port of rdma_cm; 0 before it is known. Not in pyverbs."""
        if self._listeners:
            return self._listeners[0].port
        if self._connection is not None and self._connection.local_port:
            return self._connection.local_port
        return self._local.port if self._local is not None else 0

    def _bind(self, address: Address | None) -> None:
        if self._local is not None or self._connection is not None:
            raise VerbsError(errno.EINVAL, "the CMID is bound already")
        self._local = address if address is not None else Address("0.0.0.0", 0)
        if not cm_devices.is_any(self._local):
            self._device = cm_devices.opened_at(self._local.ip)
            self._use(self._device)

    def bind_addr(self, lai: AddrInfo) -> None:
        """Take a local address; with one of a device, that device. ENODEV where no device has it."""
        with base.refusing("Failed to Bind ID"):
            self._bind(lai.source)
        if self._device is not None:
            self._context_and_domain()

    def _resolve(self, info: AddrInfo) -> None:
        destination = info.destination
        if destination is None:
            raise VerbsError(errno.EINVAL, "no destination")
        if self._connection is not None:
            raise VerbsError(errno.EINVAL, "the address is resolved already")
        source = info.source if info.source is not None else self._local
        if self._device is None:
            self._device = cm_devices.opened_for(source, destination)
            self._use(self._device)
        device = self._device
        with device.turn():
            connection = device.cm.create(self._channel.happened, self._port_space)
            connection.context = weakref.ref(self)
            if source is not None:
                connection.local_port = source.port
            if self._ack_timeout is not None:
                connection.ack_exponent = self._ack_timeout
            self._connection = connection
            connection.resolve_address(destination.ip, destination.port, self._port_space)
        if self.event_channel is None:
            self._channel.take(wait=False)

    def resolve_addr(self, rai: AddrInfo, timeout_ms: int = 2000) -> None:
        """Find the device for a destination. ADDR_RESOLVED follows, or ADDR_ERROR where there is none."""
        try:
            self._resolve(rai)
        except VerbsError as error:
            if error.errno != errno.ENODEV or self.event_channel is None:
                raise base.refusal("Failed to Resolve Address", error) from error
            self._channel.tell(self, CmEventType.ADDR_ERROR, -errno.ENODEV)

    def resolve_route(self, timeout_ms: int = 2000) -> None:
        """The way is the kernel's affair. ROUTE_RESOLVED follows; `context` and `pd` are there now."""
        with base.asking(self.opened(), "Failed to Resolve Route"):
            self.connection().resolve_route()
        if self.event_channel is None:
            self._channel.take(wait=False)
        self._context_and_domain()

    def listen(self, backlog: int = 0) -> None:
        """Take requests for the port that the CMID is bound to; at any address, of all devices."""
        try:
            if self._listeners or self._connection is not None:
                raise VerbsError(errno.EINVAL, "the CMID cannot listen now")
            if self._local is None:
                self._bind(None)
            assert self._local is not None
            if self._device is not None:
                devices = [self._device]
            else:
                devices = cm_devices.opened_all()
                for device in devices:
                    self._use(device)
            port = self._local.port
            for device in devices:
                with device.turn():
                    listener = device.cm.listen(self._port_space, port, self._channel.happened, backlog)
                    listener.context = weakref.ref(self)
                self._listeners.append(listener)
                port = listener.port
        except VerbsError as error:
            self._stop_listening()
            raise base.refusal("Listen Failed", error) from error

    def _stop_listening(self) -> None:
        devices = [self._device] if self._device is not None else self._users
        for device, listener in zip(devices, self._listeners, strict=False):
            with device.turn():
                listener.close()
        self._listeners.clear()

    def _adopt(self, connection: Connection, listening: "CMID") -> None:
        """Become the CMID of a connection that was requested."""
        manager = connection.manager
        device = next((one for one in listening._users if one.cm is manager), None)
        if device is None:
            raise PyverbsUserError("the request came to another CMID")
        self._device = registry.open_device(device.ip)
        self._use(self._device)
        with device.turn():
            self._connection = connection
            connection.context = weakref.ref(self)
            connection.sink = self._channel.happened
        self._port_space = connection.port_space
        self.ctx, self.pd = listening.ctx, listening.pd
        self._shares = self.ctx is not None
        if self.ctx is None or self.ctx.device is not self._device:
            self._shares, self.ctx, self.pd = False, None, None
            self._context_and_domain()

    def get_request(self) -> "CMID":
        """Wait for a request: a CMID for it, with a queue pair where the listening one was given attributes.
        EINVAL for a listener that is not synchronous."""
        refused = "Failed to get request, no connection established"
        if self.event_channel is not None or not self._listeners:
            raise PyverbsRDMAError(refused, errno.EINVAL)
        while True:
            happened = self._channel.take(wait=True)
            if happened is not None and happened.type is CmEventType.CONNECT_REQUEST:
                break
        assert happened.event is not None
        request = CMID()
        request._adopt(happened.event.connection, self)
        if self.ctx is None:
            self.ctx, self.pd = request.ctx, request.pd
            request._shares = True
        if self._passive_qp is not None:
            try:
                request.create_qp(self._passive_qp)
            except PyverbsRDMAError as error:
                request.close()
                raise PyverbsRDMAError(refused, error.error_code) from error
        return request

    def accept(self, param: ConnParam | None = None) -> None:
        """Say yes. A queue pair of the CMID's own is made ready before; ESTABLISHED follows."""
        refused = "Failed to Accept Connection"
        with base.refusing(refused):
            device, connection = self.opened(), self.connection()
            given = self._parameters(param, (connection.responder_resources, connection.initiator_depth))
            if self.qp is not None and not self.datagrams:
                self._set_queue_pair(QpState.INIT, QpState.RTR, QpState.RTS)
            with device.turn():
                connection.accept(given, device.clock())
        if not self.datagrams:
            self._complete(refused, CmEventType.ESTABLISHED)

    def reject(self, private_data: bytes | None = None) -> None:
        """Say no, with up to 148 bytes of private data."""
        device = self.opened()
        with base.asking(device, "Failed to Reject Connection"):
            self.connection().reject(device.clock(), private_data or b"")

    def connect(self, param: ConnParam | None = None) -> None:
        """Ask for the connection. CONNECT_RESPONSE follows (with a queue pair of the CMID's own ESTABLISHED),
        or REJECTED (ECONNREFUSED), or UNREACHABLE (ETIMEDOUT)."""
        refused = "Failed to Connect"
        with base.refusing(refused):
            device, connection = self.opened(), self.connection()
            most = device.nic.limits.max_qp_rd_atom
            given = self._parameters(param, (most, most))
            with device.turn():
                connection.connect(given, device.clock())
        self._complete(refused, CmEventType.ESTABLISHED, CmEventType.CONNECT_RESPONSE)

    def establish(self) -> None:
        """Complete an active connection whose queue pair is the program's own, when that is ready."""
        device = self.opened()
        with base.asking(device, "Failed to Complete an active connection request"):
            if self.qp is not None:
                raise VerbsError(errno.EINVAL, "the CMID has completed the connection itself")
            self.connection().establish(device.clock())

    def disconnect(self) -> None:
        """End the connection; a queue pair of the CMID's own is flushed. DISCONNECTED follows."""
        refused = "Failed to Disconnect"
        device = self.opened()
        if self.qp is not None:
            with base.asking(device, refused):
                self.qp.native.modify(QpAttributes(state=QpState.ERR), QpAttr.STATE)
        with base.asking(device, refused):
            self.connection().disconnect(device.clock())
        if not self._over:
            self._complete(refused, CmEventType.DISCONNECTED)

    def _parameters(self, param: ConnParam | None, most: tuple[int, int]) -> ConnectionParameters:
        """What is asked for; without `param` as much as possible, as in librdmacm."""
        device_most = self.opened().nic.limits.max_qp_rd_atom
        if param is None:
            param = ConnParam(
                min(most[0], device_most), min(most[1], device_most), flow_control=1, retry=7, rnr_retry=7
            )
        return param.parameters(self.qp.qp_num if self.qp is not None else param.qpn, device_most)

    def create_qp(self, qp_init: QPInitAttr) -> None:
        """A queue pair for the connection (rdma_create_qp), in INIT; for datagrams in RTS. Completion queues
        that `qp_init` does not name are made for it."""
        refused = "Failed to Create QP"
        if self.qp is not None:
            raise PyverbsRDMAError(refused, errno.EINVAL)
        wanted = e.IBV_QPT_UD if self.datagrams else e.IBV_QPT_RC
        if qp_init.qp_type != wanted:
            raise PyverbsRDMAError(refused, errno.EINVAL)
        pd = self.domain_holder()
        own: list[CQ] = []
        send_cq, recv_cq = qp_init.send_cq, qp_init.recv_cq
        if send_cq is None:
            send_cq = CQ(pd.ctx, max(1, qp_init.max_send_wr))
            own.append(send_cq)
        if recv_cq is None:
            recv_cq = CQ(pd.ctx, max(1, qp_init.max_recv_wr))
            own.append(recv_cq)
        attr = QPInitAttr(
            qp_init.qp_type, None, send_cq, recv_cq, qp_init.srq, qp_init.cap, qp_init.sq_sig_all
        )
        self.qp = QP(pd, attr)
        self._own_cqs = own
        try:
            self._set_queue_pair(QpState.INIT, *((QpState.RTR, QpState.RTS) if self.datagrams else ()))
        except VerbsError as error:
            self._close_queue_pair()
            raise PyverbsRDMAError(refused, error.errno) from error

    def _set_queue_pair(self, *states: QpState) -> None:
        """Take it through these states as the connection wants it. VerbsError where that is refused."""
        qp = self.qp
        if qp is None:
            return
        with self.opened().turn():
            for state in states:
                qp.native.modify(*queue_pair_attributes(self.connection(), state))

    def _close_queue_pair(self) -> None:
        """Give it back, with the completion queues that were made for it."""
        if self.qp is not None:
            self.qp.close()
            self.qp = None
            for cq in self._own_cqs:
                cq.close()

    def _queue_pair(self, refused: str) -> QP:
        if self.qp is None:
            raise PyverbsRDMAError(refused, errno.EINVAL)
        return self.qp

    @property
    def qpn(self) -> int | None:
        return self.qp.qp_num if self.qp is not None else None

    def query_qp(self, attr_mask: int) -> tuple[QPAttr, QPInitAttr]:
        return self._queue_pair("Failed to query QP").query(attr_mask)

    def reg_msgs(self, size: int) -> MR:
        return MR(self, size, e.IBV_ACCESS_LOCAL_WRITE)

    def reg_read(self, size: int = 0) -> MR:
        return MR(self, size, e.IBV_ACCESS_REMOTE_READ)

    def reg_write(self, size: int = 0) -> MR:
        return MR(self, size, e.IBV_ACCESS_REMOTE_WRITE)

    def post_recv(self, mr: MR, length: int | None = None) -> None:
        """Post the region, or its first `length` bytes, for a message."""
        sge = SGE(mr.buf, length or mr.length, mr.lkey)
        self._queue_pair("Failed to Post Receive").post_recv(RecvWR(0, 1, [sge]))

    def post_send(self, mr: MR, flags: int = e.IBV_SEND_SIGNALED, length: int | None = None) -> None:
        """Send the region, or its first `length` bytes."""
        request = _request(e.IBV_WR_SEND, mr, length or mr.length, flags)
        self._queue_pair("Failed to Post Send").post_send(request)

    def post_read(self, mr: MR, length: int, remote_addr: int, rkey: int, flags: int = 0) -> None:
        request = _request(e.IBV_WR_RDMA_READ, mr, length, flags)
        request.set_wr_rdma(rkey, remote_addr)
        self._queue_pair("Failed to Post Read").post_send(request)

    def post_write(self, mr: MR, length: int, remote_addr: int, rkey: int, flags: int = 0) -> None:
        request = _request(e.IBV_WR_RDMA_WRITE, mr, length, flags)
        request.set_wr_rdma(rkey, remote_addr)
        self._queue_pair("Failed to Post Write").post_send(request)

    def post_ud_send(
        self, mr: MR, ah: AH, rqpn: int = 0, flags: int = e.IBV_SEND_SIGNALED, length: int | None = None
    ) -> None:
        """Send the region, or its first `length` bytes, to queue pair `rqpn` of an address."""
        request = _request(e.IBV_WR_SEND, mr, length or mr.length, flags)
        request.set_wr_ud(ah, rqpn, UDP_QKEY)
        self._queue_pair("Failed to Post Send").post_send(request)

    def get_recv_comp(self) -> WC | None:
        return self._completion(self._queue_pair("Failed to retrieve receive completion").rcq)

    def get_send_comp(self) -> WC | None:
        return self._completion(self._queue_pair("Failed to retrieve send completion").scq)

    def _completion(self, cq: object) -> WC | None:
        if not isinstance(cq, CQ):
            raise PyverbsUserError("the completions are those of an extended CQ")
        while True:
            count, completions = cq.poll(1)
            if count:
                return completions[0]
            try:
                self.opened().drive_until(cq.native.__len__, None)
            except DeviceClosed as error:
                raise PyverbsRDMAError("Failed to retrieve completion", errno.ENODEV) from error

    def digest(self, happened: ChannelEvent) -> CmEventType:
        """Do what librdmacm does before the program sees an event; what it then sees. Not in pyverbs."""
        kind = happened.type
        if kind is CmEventType.DISCONNECTED:
            self._over = True
        if self.qp is None:
            return kind
        try:
            if kind is CmEventType.CONNECT_RESPONSE:
                self._set_queue_pair(QpState.INIT, QpState.RTR, QpState.RTS)
                device = self.opened()
                with device.turn():
                    self.connection().establish(device.clock())
                return CmEventType.ESTABLISHED
            if kind is CmEventType.REJECTED:
                with self.opened().turn():
                    self.qp.native.modify(QpAttributes(state=QpState.ERR), QpAttr.STATE)
        except VerbsError:
            return CmEventType.CONNECT_ERROR
        return kind

    def _complete(self, refused: str, *wanted: CmEventType) -> None:
        """Of a synchronous CMID: wait until one of these has happened, or the end of all hope."""
        if self.event_channel is not None:
            return
        while True:
            happened = self._channel.take(wait=True)
            assert happened is not None
            kind = self.digest(happened)
            if kind in wanted:
                return
            if kind is CmEventType.DISCONNECTED:
                raise PyverbsRDMAError(refused, errno.ECONNRESET)
            if kind in _FAILED:
                rejected = kind is CmEventType.REJECTED
                raise PyverbsRDMAError(refused, errno.ECONNREFUSED if rejected else abs(happened.status))

    # librdmacm attaches the queue pair when the program takes the event; here it is attached before the event
    # is there, so that what can go wrong is the event's own affair.

    def join_multicast(
        self, addr: AddrInfo | None = None, mc_attr: JoinMCAttrEx | None = None, context: int = 0
    ) -> None:
        """Join the group that is the source of `addr`, or of `mc_attr`. MULTICAST_JOIN follows, with where to
        send (`UDParam`), or MULTICAST_ERROR. A queue pair of the CMID's own is attached, unless the join is
        SENDONLY_FULLMEMBER. EINVAL before an address is resolved, and for TCP. `context` is not kept."""
        if addr is None and mc_attr is None:
            raise PyverbsUserError("Join to multicast must have AddrInfo or JoinMCAttrEx arguments")
        refused = "Failed to Join multicast"
        with base.refusing(refused):
            flags = cm.RDMA_MC_JOIN_FLAG_FULLMEMBER
            if mc_attr is not None:
                addr, flags = mc_attr.addr, checked_flags(mc_attr)
            group, service = group_in(addr), self._service()
            receives = flags != cm.RDMA_MC_JOIN_FLAG_SENDONLY_FULLMEMBER
            with self.opened().turn():
                nic, attach = self.opened().nic, None
                if receives and self.qp is not None:
                    attach = partial(nic.attach_mcast, self.qp.native, gid_of(group))
                service.join_multicast(group, attach)
        self._complete(refused, CmEventType.MULTICAST_JOIN)

    def leave_multicast(self, addr: AddrInfo) -> None:
        """Leave the group that is the source of `addr`; what the channel still has of it goes. EADDRNOTAVAIL
        where it was not joined."""
        with base.refusing("Failed to leave multicast"):
            group, service = group_in(addr), self._service()
            with self.opened().turn():
                nic = self.opened().nic
                if service.leave_multicast(group) and self.qp is not None:
                    pair = self.qp.native
                    if group in nic.groups.groups_of(pair):
                        nic.detach_mcast(pair, gid_of(group))
        self._channel.discard(
            lambda one: one.event is not None and (one.event.connection, one.event.group) == (service, group)
        )

    def _service(self) -> ServiceResolution:
        connection = self.connection()
        if not isinstance(connection, ServiceResolution):
            raise VerbsError(errno.EINVAL, "only RDMA_PS_UDP has multicast groups")
        return connection

    def set_option(self, level: int, optname: int, optval: int, optlen: int) -> None:
        """RDMA_OPTION_ID_ACK_TIMEOUT: the exponent of the local ACK time-out, up to 31."""
        if optname != cm.RDMA_OPTION_ID_ACK_TIMEOUT:
            raise PyverbsUserError("Currently only RDMA_OPTION_ID_ACK_TIMEOUT is supported in Pyverbs.")
        if level != cm.RDMA_OPTION_ID or optlen != 1 or not 0 <= optval <= 31:
            raise PyverbsRDMAError("Failed to set option", errno.EINVAL)
        self._ack_timeout = optval
        if self._connection is not None:
            with self.opened().turn():
                self._connection.ack_exponent = optval

    def set_local_ece(self, ece: ECE) -> None:
        """There are no extensions to agree on, so nothing is said of them."""

    def get_remote_ece(self) -> ECE:
        """No peer is heard of extensions."""
        return ECE()

    def migrate_id(self, channel: CMEventChannel) -> None:
        """What happens from now on comes out of another channel (rdma_migrate_id). Not in pyverbs."""
        if self.event_channel is None:
            raise PyverbsUserError("a synchronous CMID has no channel")
        self.event_channel = self._channel = channel
        channel.devices.update(self._users)
        if self._connection is not None:
            with self.opened().turn():
                self._connection.sink = channel.happened

    def init_qp_attr(self, qp_state: int) -> tuple[QPAttr, int]:
        """What a queue pair of the program's own is to be set to, and the mask for `QP.modify`."""
        try:
            wanted = QpState(qp_state)
            with self.opened().turn():
                attributes, mask = queue_pair_attributes(self.connection(), wanted)
        except (VerbsError, ValueError) as error:
            number = error.errno if isinstance(error, VerbsError) else errno.EINVAL
            raise PyverbsRDMAError("Failed to get QP attributes", number) from error
        return QPAttr.of(attributes), int(mask)

    def close(self) -> None:
        """End the connection or the listening, and give everything back that belongs to it."""
        if not self._open:
            return
        self._open = False
        self._close_queue_pair()
        if self._device is not None and self._connection is not None:
            with self._device.turn():
                self._connection.destroy(self._device.clock())
        self._stop_listening()
        self._channel.forget(self._connection, self)
        base.close_children(self.mrs)
        if not self._shares:
            if self.pd is not None:
                self.pd.forget_if_borrowed()
            if self.ctx is not None:
                self.ctx.forget()
        self._connection = None
        self._release()
        if self.event_channel is None:
            self._channel.close()

    def _release(self) -> None:
        while self._users:
            registry.release_device(self._users.pop())
        self._device = None


def _request(opcode: int, mr: MR, length: int, flags: int) -> SendWR:
    return SendWR(0, opcode, 1, 0, [SGE(mr.buf, length, mr.lkey)], flags)


__all__ = ["AH", "CMID", "AddrInfo", "CMEvent", "CMEventChannel", "ConnParam", "JoinMCAttrEx", "UDParam"]
