"""All connections of one NIC: tables, listeners and timers. Read `connection.py` first.

    manager = ConnectionManager("10.0.0.1", guid, random.Random(seed))
    manager.listen(PortSpace.TCP, 4420, events.append)
    connection = manager.create(events.append)
    manager.receive(mad, source_ip, now); manager.advance(now)
    for ip, mad in manager.take_output(): ...

The manager drops malformed messages, and messages that fit no connection or not its state, and counts their
causes. It answers where the specification wants an answer. Every table is bounded (`limits.py`).
"""

import errno
import heapq
import itertools
import random
from typing import TypeAlias

from emulator.roce.cm import limits
from emulator.roce.cm.connection import Connection, EventSink, Listener
from emulator.roce.cm.service_resolution import ServiceResolution
from emulator.roce.cm.services import ConnectionServices
from emulator.roce.cm.states import CmState
from emulator.roce.nic.verbs import Mtu, VerbsError
from emulator.roce.wire import cm_messages as wire
from emulator.roce.wire.cm_ip import PortSpace, decode_ip_cm_untrusted, port_of
from emulator.roce.wire.flow import gid_of, packed_address
from emulator.roce.wire.malformed import MalformedPacket

_OfConnection: TypeAlias = (
    wire.ConnectReply
    | wire.ConnectReject
    | wire.ReadyToUse
    | wire.MessageReceipt
    | wire.DisconnectRequest
    | wire.DisconnectReply
)


class ConnectionManager(ConnectionServices):
    """See the top of this file. Has no lock: callers hold the device's lock."""

    def __init__(
        self,
        ip: str,
        guid: int,
        chance: random.Random,
        *,
        mtu: Mtu = Mtu.MTU_4096,
        times: limits.CmTimes | None = None,
    ) -> None:
        super().__init__(ip, guid, chance, mtu, times if times is not None else limits.CmTimes())
        self._listeners: dict[tuple[PortSpace, int], Listener] = {}
        self._connections: dict[int, Connection] = {}
        self._by_request: dict[tuple[str, int], Connection] = {}
        """Passive connections by the peer's address and communication ID, to know a REQ again."""
        self._by_queue_pair: dict[tuple[int, int], Connection] = {}
        """Connections by the peer's GUID and queue pair, to know a stale one."""
        self._timers: list[tuple[float, int, int]] = []
        """A heap of deadline, number and connection's ID; entries that have become void are still in it."""
        self._timer_numbers = itertools.count()
        self._ports = itertools.cycle(limits.EPHEMERAL_PORTS)
        for _ in range(chance.randrange(len(limits.EPHEMERAL_PORTS))):
            next(self._ports)

    def create(self, sink: EventSink, port_space: PortSpace = PortSpace.TCP) -> Connection:
        """A connection, or a datagram service, that does nothing yet. ENOMEM where there are too many."""
        if len(self._connections) >= limits.MAX_CONNECTIONS:
            raise VerbsError(errno.ENOMEM, f"{limits.MAX_CONNECTIONS} connections exist")
        kind = ServiceResolution if port_space is PortSpace.UDP else Connection
        connection = kind(self, sink, self._unused_id())
        self._connections[connection.local_id] = connection
        return connection

    def listen(
        self, port_space: PortSpace, port: int, sink: EventSink, backlog: int = limits.MAX_BACKLOG
    ) -> Listener:
        """Take requests for a port; 0 asks for any. EADDRINUSE for a port with a listener, EINVAL for no
        port."""
        if not 0 <= port <= 0xFFFF:
            raise VerbsError(errno.EINVAL, f"{port} is no port")
        if port == 0:
            port = self.ephemeral_port(port_space)
        if (port_space, port) in self._listeners:
            raise VerbsError(errno.EADDRINUSE, f"somebody listens on port {port}")
        if len(self._listeners) >= limits.MAX_LISTENERS:
            raise VerbsError(errno.ENOMEM, f"{limits.MAX_LISTENERS} listeners exist")
        # rdma_listen's 0 and less mean "as many as possible".
        most = backlog if 0 < backlog <= limits.MAX_BACKLOG else limits.MAX_BACKLOG
        listener = Listener(port_space, port, sink, most, self._stop_listening)
        self._listeners[port_space, port] = listener
        return listener

    def _stop_listening(self, listener: Listener) -> None:
        """See `Listener.close`."""
        if self._listeners.get((listener.port_space, listener.port)) is listener:
            del self._listeners[listener.port_space, listener.port]

    def find(self, local_qpn: int) -> Connection | None:
        """The connection that uses this queue pair of ours."""
        return next((c for c in self._connections.values() if c.local_qpn == local_qpn), None)

    def close(self, now: float) -> None:
        """The end of the device: destroy all connections, and tell each peer once."""
        self._listeners.clear()
        for connection in list(self._connections.values()):
            connection.destroy(now)

    @property
    def connections(self) -> int:
        """How many there are, time-wait included."""
        return len(self._connections)

    def deadline(self) -> float | None:
        """When `advance` has to be called."""
        timers = self._timers
        while timers and self._is_void(timers[0]):
            heapq.heappop(timers)
        return timers[0][0] if timers else None

    def advance(self, now: float) -> None:
        while (deadline := self.deadline()) is not None and deadline <= now:
            _, _, local_id = heapq.heappop(self._timers)
            self._connections[local_id].time_over(now)

    def _is_void(self, timer: tuple[float, int, int]) -> bool:
        connection = self._connections.get(timer[2])
        return connection is None or connection.deadline != timer[0]

    @property
    def has_output(self) -> bool:
        """Whether `take_output` has something."""
        return bool(self._output)

    def take_output(self) -> list[tuple[str, bytes]]:
        """Address and management datagram of each message that is to be sent."""
        output, self._output = self._output, []
        return output

    def receive(self, raw: bytes | bytearray | memoryview, ip: str, now: float) -> None:
        """A datagram for queue pair 1 has come from `ip`. Never raises."""
        try:
            message, transaction = wire.decode_cm_untrusted(raw)
        except MalformedPacket as error:
            self.counters[error.cause] += 1
            return
        self.counters[f"received {wire.attribute_of(message).name}"] += 1
        match message:
            case wire.ConnectRequest():
                self._request(message, transaction, ip, now)
            case wire.ServiceRequest():
                self._service_request(message, transaction, ip)
            case wire.ServiceReply():
                self._service_reply(message, ip)
            case _:
                self._for_connection(message, transaction, ip, now)

    def _for_connection(self, message: _OfConnection, transaction: int, ip: str, now: float) -> None:
        connection = self._connections.get(message.remote_id)
        if connection is None and isinstance(message, wire.ConnectReject) and not message.remote_id:
            # The peer gave up its REQ before it had learnt of our ID.
            connection = self._by_request.get((ip, message.local_id))
        if connection is not None and connection.remote_ip != ip:
            # Another peer's connection: an answer would tell a stranger our IDs.
            self.counters["wrong address"] += 1
            return
        if connection is None or not self._fits(connection, message):
            self._unknown(message, transaction, ip)
            return
        match message:
            case wire.ConnectReply():
                known = self._reply(connection, message, transaction, ip)
            case wire.ConnectReject():
                known = connection.reject_received(message, now)
            case wire.ReadyToUse():
                known = connection.ready_received(message)
            case wire.MessageReceipt():
                known = connection.receipt_received(message, now)
            case wire.DisconnectRequest():
                known = connection.disconnect_received(message, transaction, now)
            case wire.DisconnectReply():
                known = connection.disconnected(message, now)
        if not known:
            self.counters["out of state"] += 1

    def _fits(self, connection: Connection, message: _OfConnection) -> bool:
        """Whether the peer's ID is the one that this connection knows.

        The first answer to a REQ brings an ID that is new. A late REJ of one more copy of the REQ brings a
        wrong one or none, and must not end what a REP has begun meanwhile.
        """
        if connection.state is CmState.REQ_SENT or message.local_id == connection.remote_id:
            return True
        return (
            isinstance(message, wire.ConnectReject)
            and (message.local_id, message.message) == (0, wire.MessageKind.REP)
            and connection.state is CmState.REP_SENT
        )

    def _unknown(self, message: _OfConnection, transaction: int, ip: str) -> None:
        """No connection of ours: what would leave the peer waiting is answered (IBTA 12.9.8.3)."""
        self.counters["unknown connection"] += 1
        match message:
            case wire.ConnectReply():
                reason = wire.RejectReason.INVALID_COMMUNICATION_ID
                refusal = wire.ConnectReject(0, message.local_id, wire.MessageKind.REP, reason)
                self._answer(refusal, transaction, ip)
            case wire.DisconnectRequest():
                self._answer(wire.DisconnectReply(message.remote_id, message.local_id), transaction, ip)

    def _request(self, request: wire.ConnectRequest, transaction: int, ip: str, now: float) -> None:
        known = self._by_request.get((ip, request.local_id))
        if known is not None:
            known.repeated_request()
            return
        if request.primary.local_gid != gid_of(ip):
            # It claims to be another than it is; the answer would go to an innocent.
            self.counters["wrong address"] += 1
            return
        refusal = self._refusal(request)
        port = port_of(request.service_id)
        # A service of datagrams takes no connections.
        listener = None if port is None or port[0] is not PortSpace.TCP else self._listeners.get(port)
        if refusal is None and listener is None:
            refusal = wire.RejectReason.INVALID_SERVICE_ID
        stale = self._by_queue_pair.get((request.ca_guid, request.queue_pair))
        if refusal is None and stale is not None:
            refusal = wire.RejectReason.STALE_CONNECTION
            if stale.remote_ip == ip:
                stale.superseded(now)
        if refusal is None and len(self._connections) >= limits.MAX_CONNECTIONS:
            refusal = wire.RejectReason.NO_RESOURCES
        if refusal is not None or listener is None:
            self.counters["refused"] += 1
            information = bytes([self.mtu << 4]) if refusal is wire.RejectReason.INVALID_PATH_MTU else b""
            reason = refusal or wire.RejectReason.INVALID_SERVICE_ID
            answer = wire.ConnectReject(0, request.local_id, wire.MessageKind.REQ, reason, information)
            self._answer(answer, transaction, ip)
            return
        if self._has_room(listener):
            connection = Connection(self, listener.sink, self._unused_id())
            self._connections[connection.local_id] = connection
            self._by_request[ip, request.local_id] = connection
            self._by_queue_pair[request.ca_guid, request.queue_pair] = connection
            connection.begin(request, transaction, ip, listener)

    def _has_room(self, listener: Listener) -> bool:
        if listener.waiting >= listener.backlog:
            # As a TCP listener does: the request comes again when there may be room.
            self.counters["backlog full"] += 1
            return False
        listener.waiting += 1
        return True

    def _refusal(self, request: wire.ConnectRequest) -> wire.RejectReason | None:
        """The fault of a request by itself, for any listener."""
        if request.transport_type != wire.TransportType.RC:
            return wire.RejectReason.INVALID_TRANSPORT_SERVICE_TYPE
        if request.primary.remote_gid != gid_of(self.ip):
            return wire.RejectReason.PRIMARY_GID_REJECTED
        if not Mtu.MTU_256 <= request.path_mtu <= self.mtu:
            return wire.RejectReason.INVALID_PATH_MTU
        if port_of(request.service_id) is None:
            return wire.RejectReason.INVALID_SERVICE_ID
        if request.queue_pair < 2:
            return wire.RejectReason.NO_QUEUE_PAIR
        try:
            header = decode_ip_cm_untrusted(request.private_data)
        except MalformedPacket as error:
            self.counters[error.cause] += 1
            return wire.RejectReason.UNSUPPORTED_REQUEST
        if header.destination != packed_address(self.ip):
            return wire.RejectReason.UNSUPPORTED_REQUEST
        return None

    def _reply(self, connection: Connection, reply: wire.ConnectReply, transaction: int, ip: str) -> bool:
        if connection.state is CmState.REQ_SENT:
            key = (reply.ca_guid, reply.queue_pair)
            if key in self._by_queue_pair or reply.queue_pair < 2:
                reason = wire.RejectReason.STALE_CONNECTION
                refusal = wire.ConnectReject(
                    connection.local_id, reply.local_id, wire.MessageKind.REP, reason
                )
                self._answer(refusal, transaction, ip)
                return False
            self._by_queue_pair[key] = connection
        return connection.reply_received(reply, transaction)

    def _service_request(self, request: wire.ServiceRequest, transaction: int, ip: str) -> None:
        known = self._by_request.get((ip, request.request_id))
        if known is not None:
            known.repeated_request()
            return
        port = port_of(request.service_id)
        listener = None if port is None or port[0] is not PortSpace.UDP else self._listeners.get(port)
        status = wire.SidrStatus.UNSUPPORTED_SERVICE_ID if listener is None else wire.SidrStatus.VALID
        try:
            header = decode_ip_cm_untrusted(request.private_data)
            addresses = (header.source, header.destination)
            if listener is not None and addresses != (packed_address(ip), packed_address(self.ip)):
                status = wire.SidrStatus.REJECTED
        except MalformedPacket as error:
            self.counters[error.cause] += 1
            status = status or wire.SidrStatus.REJECTED
        if len(self._connections) >= limits.MAX_CONNECTIONS:
            status = status or wire.SidrStatus.NO_QUEUE_PAIR
        if status is not wire.SidrStatus.VALID or listener is None:
            self.counters["refused"] += 1
            answer = wire.ServiceReply(request.request_id, status, service_id=request.service_id)
            self._answer(answer, transaction, ip)
            return
        if self._has_room(listener):
            service = ServiceResolution(self, listener.sink, self._unused_id())
            self._connections[service.local_id] = service
            self._by_request[ip, request.request_id] = service
            service.begin_service(request, transaction, ip, listener)

    def _service_reply(self, reply: wire.ServiceReply, ip: str) -> None:
        service = self._connections.get(reply.request_id)
        if not isinstance(service, ServiceResolution) or not service.active:
            self.counters["unasked"] += 1
        elif service.remote_ip != ip:
            self.counters["wrong address"] += 1
        elif not service.reply_to_service(reply):
            self.counters["out of state"] += 1

    def _answer(self, message: wire.CmMessage, transaction: int, ip: str) -> None:
        self.send(wire.encode_cm(message, transaction), ip)

    def arm(self, local_id: int, deadline: float) -> None:
        """The connection's deadline has become this one; an earlier entry is found to be void later."""
        if len(self._timers) > 4 * limits.MAX_CONNECTIONS:
            self._timers = [timer for timer in self._timers if not self._is_void(timer)]
            heapq.heapify(self._timers)
        heapq.heappush(self._timers, (deadline, next(self._timer_numbers), local_id))

    def forget(self, local_id: int) -> None:
        """The connection is closed."""
        connection = self._connections.pop(local_id, None)
        if connection is None:
            return
        request = (connection.remote_ip, connection.remote_id)
        if self._by_request.get(request) is connection:
            del self._by_request[request]
        queue_pair = (connection.remote_guid, connection.remote_qpn)
        if self._by_queue_pair.get(queue_pair) is connection:
            del self._by_queue_pair[queue_pair]

    def ephemeral_port(self, port_space: PortSpace = PortSpace.TCP) -> int:
        """A port without a listener. EADDRINUSE when all are taken."""
        for _ in limits.EPHEMERAL_PORTS:
            port = next(self._ports)
            if (port_space, port) not in self._listeners:
                return port
        raise VerbsError(errno.EADDRINUSE, "no port is left")

    def _unused_id(self) -> int:
        while True:
            number = self._chance.getrandbits(32)
            if number and number not in self._connections:
                return number
