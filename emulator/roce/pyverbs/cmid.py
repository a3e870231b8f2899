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

from __future__ import annotations

import errno
import weakref
from typing import TYPE_CHECKING, Final

from emulator.roce.cm.attributes import queue_pair_attributes
from emulator.roce.cm.events import CmEventType, ConnectionParameters
from emulator.roce.cm.service_resolution import ServiceResolution
from emulator.roce.nic.gid import gid_of
from emulator.roce.nic.verbs import Address, AddressVector, QpAttr, QpAttributes, QpState, VerbsError
from emulator.roce.pyverbs import cm_devices
from emulator.roce.pyverbs.addr import AH, AHAttr
from emulator.roce.pyverbs.base import PyverbsObject, bury, close_children, forsake, refusal
from emulator.roce.pyverbs.cm_channel import CMEventChannel, Happened
from emulator.roce.pyverbs.cm_enums import (
    RAI_PASSIVE,
    RDMA_OPTION_ID,
    RDMA_OPTION_ID_ACK_TIMEOUT,
    rdma_cm_event_type,
    rdma_cm_join_mc_attr_mask,
    rdma_cm_mc_join_flags,
    rdma_port_space,
)
from emulator.roce.pyverbs.cm_queue_pair import QueuePairOfId
from emulator.roce.pyverbs.cm_records import AddrInfo, ConnParam, JoinMCAttrEx
from emulator.roce.pyverbs.device import Context
from emulator.roce.pyverbs.pd import PD
from emulator.roce.pyverbs.pyverbs_error import PyverbsRDMAError, PyverbsUserError
from emulator.roce.pyverbs.qp import ECE, QPAttr, QPInitAttr
from emulator.roce.runtime import registry
from emulator.roce.wire.cm_ip import PortSpace

if TYPE_CHECKING:
    from emulator.roce.cm.connection import Connection, Listener
    from emulator.roce.runtime.device import Device

_JOIN_MASK = (
    rdma_cm_join_mc_attr_mask.RDMA_CM_JOIN_MC_ATTR_ADDRESS
    | rdma_cm_join_mc_attr_mask.RDMA_CM_JOIN_MC_ATTR_JOIN_FLAGS
)

_WHERE_TO_SEND: Final = (
    rdma_cm_event_type.RDMA_CM_EVENT_ESTABLISHED, rdma_cm_event_type.RDMA_CM_EVENT_MULTICAST_JOIN,
)  # fmt: skip

_FAILED = frozenset(
    {
        CmEventType.REJECTED, CmEventType.UNREACHABLE, CmEventType.CONNECT_ERROR, CmEventType.ADDR_ERROR,
        CmEventType.MULTICAST_ERROR,
    }
)  # fmt: skip


class CMEvent(PyverbsObject):
    """The next event of a channel: waits for it where there is none, and the descriptor blocks.

    To take a CONNECT_RESPONSE of a CMID with a queue pair of its own sets that to RTS and completes the
    connection, as in librdmacm; what the program gets is ESTABLISHED.
    """

    __slots__ = ("_acknowledged", "_happened", "_id", "_type")

    def __init__(self, channel: CMEventChannel) -> None:
        self._acknowledged = True
        happened = channel.take(wait=channel.blocking)
        if happened is None:
            for device in tuple(channel.devices):
                device.drive_once()
            happened = channel.take(wait=False)
        if happened is None:
            raise PyverbsRDMAError("Failed to create CMEvent", errno.EAGAIN)
        self._happened = happened
        self._acknowledged = False
        self._id = happened.cmid if isinstance(happened.cmid, CMID) else self._known()
        self._type = happened.type
        if self._id is not None:
            self._type = self._id.digest(happened)

    def _known(self) -> CMID | None:
        return _owner(self.connection)

    def close(self) -> None:
        """Acknowledge it, where that was not done."""
        if not self._acknowledged:
            self.ack_cm_event()

    def ack_cm_event(self) -> None:
        """Acknowledge it."""
        self._acknowledged = True

    @property
    def event_type(self) -> int:
        """An `rdma_cm_event_type`."""
        return int(self._type)

    def event_str(self) -> str:
        """The name of its type; nothing once it is acknowledged, as in pyverbs."""
        return "" if self._acknowledged else rdma_cm_event_type(self.event_type).name

    @property
    def private_data(self) -> bytes:
        """What came with the peer's message."""
        event = self._happened.event
        return event.private_data if event is not None else b""

    @property
    def status(self) -> int:
        """A negative errno, or with REJECTED the reason that the peer gave. Not in pyverbs."""
        return self._happened.status

    @property
    def param(self) -> ConnectionParameters | None:
        """What the peer asks for, with a CONNECT_REQUEST or CONNECT_RESPONSE. Not in pyverbs."""
        return self._happened.event.parameters if self._happened.event is not None else None

    @property
    def group(self) -> str:
        """The address of the multicast group that it is about, if any. Not in pyverbs."""
        return self._happened.event.group if self._happened.event is not None else ""

    @property
    def connection(self) -> Connection | None:
        """What the connection manager knows it by. Not in pyverbs."""
        return self._happened.event.connection if self._happened.event is not None else None

    @property
    def listen_id(self) -> CMID | None:
        """With a CONNECT_REQUEST, the CMID that listens. Not in pyverbs."""
        event = self._happened.event
        return _owner(event.listener) if event is not None else None

    @property
    def id(self) -> CMID | None:
        """The CMID that it is about; with a CONNECT_REQUEST a new one, made when it is first asked for.
        Not in pyverbs."""
        if self._id is None and self._type is CmEventType.CONNECT_REQUEST:
            self._id = CMID(creator=self, listen_id=self.listen_id)
        return self._id


def _owner(thing: Connection | Listener | None) -> CMID | None:
    """The CMID of a connection or listener, where the program still has it; they hold it weakly."""
    reference = thing.context if thing is not None else None
    found: CMID | None = reference() if callable(reference) else None
    return found


class UDParam(PyverbsObject):
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


class CMID(QueuePairOfId):
    """One end of a connection, or a listener. See the top of this file."""

    __slots__ = (
        "_ack_timeout", "_channel", "_listeners", "_local", "_open", "_over", "_passive_qp", "_shares",
        "_users", "event_channel",
    )  # fmt: skip

    def __init__(
        self,
        creator: AddrInfo | CMEventChannel | CMEvent | None = None,
        qp_init_attr: QPInitAttr | None = None,
        pd: PD | None = None,
        port_space: int = rdma_port_space.RDMA_PS_TCP,
        listen_id: CMID | None = None,
    ) -> None:
        super().__init__(pd)
        self._open = False
        self.event_channel: CMEventChannel | None = None
        self._users: list[Device] = []
        self._listeners: list[Listener] = []
        self._local: Address | None = None
        self._passive_qp: QPInitAttr | None = None
        self._shares = False
        self._over = False
        self._ack_timeout: int | None = None
        bury()
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
            if info.flags & RAI_PASSIVE:
                self._bind(info.source)
                self._passive_qp = qp_init_attr
                return
            self._resolve(info)
        except VerbsError as error:
            self._release()
            raise refusal(refused, error) from error
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
                forsake(self)
            else:
                self.close()

    # --- what it belongs to -------------------------------------------------------------------------------

    def _use(self, device: Device) -> None:
        """Be one of those who have the device open."""
        self._users.append(device)
        self._channel.devices.add(device)

    @property
    def device(self) -> Device:
        """Any device that it uses. Not in pyverbs."""
        return self._device if self._device is not None else self._users[0]

    def _take_port_space(self, port_space: int) -> None:
        if port_space not in (rdma_port_space.RDMA_PS_TCP, rdma_port_space.RDMA_PS_UDP):
            raise PyverbsRDMAError("Failed to create CM ID", errno.EOPNOTSUPP)
        self._port_space = PortSpace(port_space)

    @property
    def dev_name(self) -> str:
        """The device's name."""
        return self.opened().name

    @property
    def port_num(self) -> int:
        """The device's port; 0 before it is known."""
        return 1 if self._device is not None else 0

    @property
    def context(self) -> Context | None:
        """The `Context` of its device, once it is known."""
        return self.ctx

    @property
    def src_port(self) -> int:
        """The local port of rdma_cm; 0 before it is known. Not in pyverbs."""
        if self._listeners:
            return self._listeners[0].port
        if self._connection is not None and self._connection.local_port:
            return self._connection.local_port
        return self._local.port if self._local is not None else 0

    # --- addresses ----------------------------------------------------------------------------------------

    def _bind(self, address: Address | None) -> None:
        if self._local is not None or self._connection is not None:
            raise VerbsError(errno.EINVAL, "the CMID is bound already")
        self._local = address if address is not None else Address("0.0.0.0", 0)
        if not cm_devices.is_any(self._local):
            self._device = cm_devices.opened_at(self._local.ip)
            self._use(self._device)

    def bind_addr(self, lai: AddrInfo) -> None:
        """Take a local address; with one of a device, that device. ENODEV where no device has it."""
        try:
            self._bind(lai.source)
        except VerbsError as error:
            raise refusal("Failed to Bind ID", error) from error
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
                raise refusal("Failed to Resolve Address", error) from error
            self._channel.tell(self, CmEventType.ADDR_ERROR, -errno.ENODEV)

    def resolve_route(self, timeout_ms: int = 2000) -> None:
        """The way is the kernel's affair. ROUTE_RESOLVED follows; `context` and `pd` are there now."""
        try:
            with self.opened().turn():
                self.connection().resolve_route()
        except VerbsError as error:
            raise refusal("Failed to Resolve Route", error) from error
        if self.event_channel is None:
            self._channel.take(wait=False)
        self._context_and_domain()

    # --- the passive side ---------------------------------------------------------------------------------

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
            raise refusal("Listen Failed", error) from error

    def _stop_listening(self) -> None:
        devices = [self._device] if self._device is not None else self._users
        for device, listener in zip(devices, self._listeners, strict=False):
            with device.turn():
                listener.close()
        self._listeners.clear()

    def _adopt(self, connection: Connection, listening: CMID) -> None:
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

    def get_request(self) -> CMID:
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
        try:
            device, connection = self.opened(), self.connection()
            given = self._parameters(param, (connection.responder_resources, connection.initiator_depth))
            if self.qp is not None and not self.datagrams:
                self.set_queue_pair(QpState.INIT, QpState.RTR, QpState.RTS)
            with device.turn():
                connection.accept(given, device.clock())
        except VerbsError as error:
            raise refusal(refused, error) from error
        if not self.datagrams:
            self._complete(refused, CmEventType.ESTABLISHED)

    def reject(self, private_data: bytes | None = None) -> None:
        """Say no, with up to 148 bytes of private data."""
        try:
            device = self.opened()
            with device.turn():
                self.connection().reject(device.clock(), private_data or b"")
        except VerbsError as error:
            raise refusal("Failed to Reject Connection", error) from error

    # --- the active side ----------------------------------------------------------------------------------

    def connect(self, param: ConnParam | None = None) -> None:
        """Ask for the connection. CONNECT_RESPONSE follows (with a queue pair of the CMID's own ESTABLISHED),
        or REJECTED (ECONNREFUSED), or UNREACHABLE (ETIMEDOUT)."""
        refused = "Failed to Connect"
        try:
            device, connection = self.opened(), self.connection()
            most = device.nic.limits.max_qp_rd_atom
            given = self._parameters(param, (most, most))
            with device.turn():
                connection.connect(given, device.clock())
        except VerbsError as error:
            raise refusal(refused, error) from error
        self._complete(refused, CmEventType.ESTABLISHED, CmEventType.CONNECT_RESPONSE)

    def establish(self) -> None:
        """Complete an active connection whose queue pair is the program's own, when that is ready."""
        try:
            device = self.opened()
            if self.qp is not None:
                raise VerbsError(errno.EINVAL, "the CMID has completed the connection itself")
            with device.turn():
                self.connection().establish(device.clock())
        except VerbsError as error:
            raise refusal("Failed to Complete an active connection request", error) from error

    def disconnect(self) -> None:
        """End the connection; a queue pair of the CMID's own is flushed. DISCONNECTED follows."""
        refused = "Failed to Disconnect"
        try:
            device = self.opened()
            if self.qp is not None:
                with device.turn():
                    self.qp.pair.modify(QpAttributes(state=QpState.ERR), QpAttr.STATE)
            with device.turn():
                self.connection().disconnect(device.clock())
        except VerbsError as error:
            raise refusal(refused, error) from error
        if not self._over:
            self._complete(refused, CmEventType.DISCONNECTED)

    def _parameters(self, param: ConnParam | None, most: tuple[int, int]) -> ConnectionParameters:
        """What is asked for; without `param` as much as possible, as in librdmacm."""
        device_most = self.opened().nic.limits.max_qp_rd_atom
        if param is None:
            param = ConnParam(
                min(most[0], device_most), min(most[1], device_most), flow_control=1, retry=7, rnr_retry=7
            )
        number = self.qp.qp_num if self.qp is not None else param.qpn
        return param.parameters(number, device_most)

    # --- what happens -------------------------------------------------------------------------------------

    def digest(self, happened: Happened) -> CmEventType:
        """Do what librdmacm does before the program sees an event; what it then sees. Not in pyverbs."""
        kind = happened.type
        if kind is CmEventType.DISCONNECTED:
            self._over = True
        if self.qp is None:
            return kind
        try:
            if kind is CmEventType.CONNECT_RESPONSE:
                self.set_queue_pair(QpState.INIT, QpState.RTR, QpState.RTS)
                device = self.opened()
                with device.turn():
                    self.connection().establish(device.clock())
                return CmEventType.ESTABLISHED
            if kind is CmEventType.REJECTED:
                with self.opened().turn():
                    self.qp.pair.modify(QpAttributes(state=QpState.ERR), QpAttr.STATE)
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

    # --- multicast ----------------------------------------------------------------------------------------

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
        try:
            flags = int(rdma_cm_mc_join_flags.RDMA_MC_JOIN_FLAG_FULLMEMBER)
            if mc_attr is not None:
                addr, flags = mc_attr.addr, _checked_flags(mc_attr)
            group, service = _group_in(addr), self._service()
            receives = flags != rdma_cm_mc_join_flags.RDMA_MC_JOIN_FLAG_SENDONLY_FULLMEMBER
            with self.opened().turn():
                attach = self._attach if receives and self.qp is not None else None
                service.join_multicast(group, None if attach is None else lambda: attach(group))
        except VerbsError as error:
            raise refusal(refused, error) from error
        self._complete(refused, CmEventType.MULTICAST_JOIN)

    def leave_multicast(self, addr: AddrInfo) -> None:
        """Leave the group that is the source of `addr`; what the channel still has of it goes. EADDRNOTAVAIL
        where it was not joined."""
        try:
            group, service = _group_in(addr), self._service()
            with self.opened().turn():
                attached = service.leave_multicast(group)
                if attached and self.qp is not None:
                    self._detach(group)
        except VerbsError as error:
            raise refusal("Failed to leave multicast", error) from error
        self._channel.discard(
            lambda one: one.event is not None and (one.event.connection, one.event.group) == (service, group)
        )

    def _service(self) -> ServiceResolution:
        connection = self.connection()
        if not isinstance(connection, ServiceResolution):
            raise VerbsError(errno.EINVAL, "only RDMA_PS_UDP has multicast groups")
        return connection

    def _attach(self, group: str) -> None:
        assert self.qp is not None
        self.opened().nic.attach_mcast(self.qp.pair, gid_of(group))

    def _detach(self, group: str) -> None:
        assert self.qp is not None
        nic, pair = self.opened().nic, self.qp.pair
        if group in nic.groups.groups_of(pair):
            nic.detach_mcast(pair, gid_of(group))

    # --- options ------------------------------------------------------------------------------------------

    def set_option(self, level: int, optname: int, optval: int, optlen: int) -> None:
        """RDMA_OPTION_ID_ACK_TIMEOUT: the exponent of the local ACK time-out, up to 31."""
        if optname != RDMA_OPTION_ID_ACK_TIMEOUT:
            raise PyverbsUserError("Currently only RDMA_OPTION_ID_ACK_TIMEOUT is supported in Pyverbs.")
        if level != RDMA_OPTION_ID or optlen != 1 or not 0 <= optval <= 31:
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
        self.close_queue_pair()
        if self._device is not None and self._connection is not None:
            with self._device.turn():
                self._connection.destroy(self._device.clock())
        self._stop_listening()
        self._channel.forget(self._connection, self)
        close_children(self.mrs)
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


def _group_in(addr: AddrInfo | None) -> str:
    if addr is None or addr.source is None:
        raise VerbsError(errno.EINVAL, "no group: it is the source of an AddrInfo")
    return addr.source.ip


def _checked_flags(attr: JoinMCAttrEx) -> int:
    """As rdma_join_multicast_ex checks them."""
    if attr.comp_mask & ~_JOIN_MASK:
        raise VerbsError(errno.EOPNOTSUPP, f"mask {attr.comp_mask:#x} has bits that nobody knows")
    if attr.comp_mask != _JOIN_MASK or attr.join_flags not in rdma_cm_mc_join_flags.__members__.values():
        raise VerbsError(errno.EINVAL, f"mask {attr.comp_mask:#x} with flags {attr.join_flags:#x}")
    return attr.join_flags


__all__ = ["AH", "CMID", "AddrInfo", "CMEvent", "CMEventChannel", "ConnParam", "JoinMCAttrEx", "UDParam"]
