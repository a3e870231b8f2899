"""One connection: its user's calls and the peer's messages in; messages, a deadline and events out.

Its inputs are the user's calls (`connect`, `establish`; `accept`, `reject`; `disconnect`, `destroy`), its
messages from `manager.py`, and the time. Both sides are here, since only the first exchange differs (IBTA
volume 1, 12.9.6 and 12.9.7). Read `states.py` first.

REQ, REP and DREQ are sent again until an answer comes; RTU, DREP and REJ are sent again when the message that
they answer comes again. So each loss, and each duplicate, gets an answer.
"""

# One idea in one file: the life of a connection, whichever side began it.

import errno
from collections.abc import Callable
from dataclasses import dataclass, replace

from emulator.roce.cm.events import CmEventType, ConnectionParameters, check_private
from emulator.roce.cm.limits import ACK_DELAY_EXPONENT, MAX_SERVICE_WAIT_S, MRA_EXPONENT, REQ_CONSUMER_BYTES
from emulator.roce.cm.services import ConnectionServices
from emulator.roce.cm.states import LEGAL, CmState
from emulator.roce.nic.verbs import Mtu, VerbsError
from emulator.roce.wire import cm_messages as wire
from emulator.roce.wire.cm_ip import IP_CM_BYTES, IpCmHeader, PortSpace, service_id
from emulator.roce.wire.extended import exponential_seconds
from emulator.roce.wire.flow import gid_of, packed_address
from emulator.roce.wire.mad import Attribute

EventSink = Callable[["CmEvent"], None]
"""Where events go: a channel's `push`, or a list's `append`."""


@dataclass(frozen=True, slots=True)
class CmEvent:
    """struct rdma_cm_event.

    `status`: the reason of a REJ with REJECTED; a negative errno with UNREACHABLE, CONNECT_ERROR,
    MULTICAST_ERROR and with a DISCONNECTED that the peer never confirmed; with UNREACHABLE of a datagram
    service the status of SIDR; else 0. `parameters` come with CONNECT_REQUEST and CONNECT_RESPONSE, with
    ESTABLISHED of a datagram service, and with MULTICAST_JOIN; `listener` with CONNECT_REQUEST, whose
    `connection` is new.
    """

    type: CmEventType
    connection: "Connection"
    status: int = 0
    private_data: bytes = b""
    parameters: ConnectionParameters | None = None
    listener: "Listener | None" = None
    group: str = ""
    """With MULTICAST_JOIN and MULTICAST_ERROR: the address of the group."""


class Listener:
    """One port that connections are requested of; `sink` gets their CONNECT_REQUESTs."""

    def __init__(
        self, space: PortSpace, port: int, sink: EventSink, backlog: int, stop: "Callable[[Listener], None]"
    ) -> None:
        self.port_space = space
        self.port = port
        self.sink = sink
        self.backlog = backlog
        self.waiting = 0
        """Requests that have not been answered."""
        self.context: object = None
        """Its user's own."""
        self._stop = stop

    def close(self) -> None:
        """No more requests; those that wait stay. Closing twice is fine."""
        self._stop(self)


class Connection:
    """See the top of this file. Made by `ConnectionManager.create`, or by a REQ.

    Calls that the state does not allow raise `VerbsError` with EINVAL; nothing has happened then.
    """

    def __init__(self, manager: ConnectionServices, sink: EventSink, local_id: int) -> None:
        self.manager = manager
        self.sink = sink
        """May be changed at any time: rdma_migrate_id."""
        self.context: object = None
        """Its user's own, as `struct rdma_cm_id`'s context."""
        self.state = CmState.IDLE
        self.local_id = local_id
        self.remote_id = 0
        self.active = True
        self.port_space = PortSpace.TCP
        self.local_port = 0
        self.remote_port = 0
        self.remote_ip = ""
        self.local_qpn = 0
        self.remote_qpn = 0
        self.remote_guid = 0
        self.rq_psn = manager.random_psn()
        """The first PSN that this side expects; the peer learns it."""
        self.sq_psn = 0
        """The first PSN that this side sends."""
        self.path_mtu = manager.mtu
        self.ack_exponent = manager.times.ack_exponent
        self.retry_count = 7
        self.rnr_retry_count = 7
        self.responder_resources = 0
        """READs and atomics of the peer that this side must be able to keep; 0: it gets no right to any."""
        self.initiator_depth = 0
        """READs and atomics of this side that may be outstanding."""
        self.flow_label = 0
        self.listener: Listener | None = None
        """On the passive side, until the request is answered."""
        self.deadline: float | None = None
        self.orphan = False
        """Destroyed by its user: no event follows."""
        self._transaction = 0
        self._again = b""
        """The message that is sent until its answer comes."""
        self._answer = b""
        """The answer to a repetition of the peer's last message."""
        self._tries = 0
        self._wait_s = exponential_seconds(manager.times.response_exponent)

    def __repr__(self) -> str:
        return f"<Connection {self.local_id:#010x} to {self.remote_ip}: {self.state.value}>"

    def resolve_address(self, ip: str, port: int, space: PortSpace = PortSpace.TCP) -> None:
        """rdma_resolve_addr: ADDR_RESOLVED follows. EINVAL where `ip` is no address of our family."""
        self._expect("resolve an address", CmState.IDLE)
        try:
            service_id(space, port)
            if len(packed_address(ip)) != len(packed_address(self.manager.ip)):
                raise ValueError(f"no way from {self.manager.ip} to {ip}")
        except ValueError as error:
            raise VerbsError(errno.EINVAL, str(error)) from None
        self.remote_ip, self.remote_port, self.port_space = ip, port, space
        self._tell(CmEventType.ADDR_RESOLVED)

    def resolve_route(self) -> None:
        """rdma_resolve_route: ROUTE_RESOLVED follows; the kernel routes the packets."""
        self._expect_resolved("resolve a route")
        self._tell(CmEventType.ROUTE_RESOLVED)

    def disconnect(self, now: float) -> None:
        """rdma_disconnect: DISCONNECTED follows, when the peer confirms or is given up.

        Nothing happens where the connection is ending or over already. EINVAL before it began.
        """
        if self.state in (CmState.DREQ_SENT, CmState.TIME_WAIT, CmState.CLOSED):
            return
        self._expect("disconnect", CmState.ESTABLISHED, CmState.REP_SENT, CmState.REP_RECEIVED)
        self._become(CmState.DREQ_SENT)
        message = wire.DisconnectRequest(self.local_id, self.remote_id, self.remote_qpn)
        self._ask(message, self.manager.new_transaction(), now, self.manager.times.disconnect_tries)

    def destroy(self, now: float) -> None:
        """rdma_destroy_id: no event follows. The peer gets a REJ or DREQ where it needs one."""
        self.orphan = True
        match self.state:
            case CmState.REQ_SENT:
                self._send_reject(wire.RejectReason.TIMEOUT, wire.MessageKind.OTHER)
                self._close()
            case CmState.REQ_RECEIVED | CmState.REP_RECEIVED:
                self.reject(now)
            case CmState.REP_SENT | CmState.ESTABLISHED:
                self.disconnect(now)
            case CmState.IDLE:
                self._close()
        # In any other state the end is on its way already.

    def connect(self, parameters: ConnectionParameters, now: float) -> None:
        """Send a REQ. CONNECT_RESPONSE, REJECTED or UNREACHABLE follows."""
        self._expect_resolved("connect")
        manager = self.manager
        self._take(parameters, REQ_CONSUMER_BYTES)
        self.responder_resources = parameters.responder_resources
        self.initiator_depth = parameters.initiator_depth
        request = wire.ConnectRequest(
            local_id=self.local_id,
            service_id=service_id(self.port_space, self.remote_port),
            ca_guid=manager.guid,
            queue_pair=self.local_qpn,
            starting_psn=self.rq_psn,
            primary=wire.CmPath(
                gid_of(manager.ip), gid_of(self.remote_ip), local_ack_timeout=self.ack_exponent
            ),
            path_mtu=self.path_mtu,
            responder_resources=parameters.responder_resources,
            initiator_depth=parameters.initiator_depth,
            retry_count=self.retry_count,
            rnr_retry_count=self.rnr_retry_count,
            remote_response_timeout=manager.times.response_exponent,
            local_response_timeout=manager.times.response_exponent,
            max_cm_retries=manager.times.tries,
            end_to_end_flow_control=parameters.flow_control,
            srq=parameters.srq,
            private_data=self._ip_header() + parameters.private_data,
        )
        self._become(CmState.REQ_SENT)
        self._transaction = manager.new_transaction()
        self._ask(request, self._transaction, now, manager.times.tries)

    def establish(self, now: float, private_data: bytes = b"") -> None:
        """rdma_establish: send the RTU, once the queue pair is ready to receive. No event follows."""
        self._expect("establish", CmState.REP_RECEIVED)
        check_private(private_data, wire.PRIVATE_BYTES[Attribute.RTU])
        self._become(CmState.ESTABLISHED)
        self._reply(wire.ReadyToUse(self.local_id, self.remote_id, private_data))

    def accept(self, parameters: ConnectionParameters, now: float) -> None:
        """Send a REP, once the queue pair is ready to receive. ESTABLISHED, REJECTED or UNREACHABLE follows.

        Of `responder_resources` and `initiator_depth` the connection gets no more than the peer offered.
        """
        self._expect("accept", CmState.REQ_RECEIVED)
        self._take(parameters, wire.PRIVATE_BYTES[Attribute.REP])
        self.responder_resources = min(parameters.responder_resources, self.responder_resources)
        self.initiator_depth = min(parameters.initiator_depth, self.initiator_depth)
        self._answered()
        self._become(CmState.REP_SENT)
        reply = wire.ConnectReply(
            local_id=self.local_id,
            remote_id=self.remote_id,
            queue_pair=self.local_qpn,
            starting_psn=self.rq_psn,
            ca_guid=self.manager.guid,
            responder_resources=self.responder_resources,
            initiator_depth=self.initiator_depth,
            target_ack_delay=ACK_DELAY_EXPONENT,
            end_to_end_flow_control=parameters.flow_control,
            rnr_retry_count=parameters.rnr_retry_count,
            srq=parameters.srq,
            private_data=parameters.private_data,
        )
        self._ask(reply, self._transaction, now, self._tries)

    def reject(
        self, now: float, private_data: bytes = b"", reason: int = wire.RejectReason.CONSUMER_DEFINED
    ) -> None:
        """rdma_reject, of a request on the passive side or a reply on the active one; no event follows."""
        self._expect("reject", CmState.REQ_RECEIVED, CmState.REP_RECEIVED)
        check_private(private_data, wire.PRIVATE_BYTES[Attribute.REJ])
        if self.state is CmState.REQ_RECEIVED:
            self._send_reject(reason, wire.MessageKind.REQ, private_data)
            self._close()
        else:
            self._send_reject(reason, wire.MessageKind.REP, private_data)
            self._wait_out(now)

    def communication_established(self) -> None:
        """A packet has come to the queue pair before the RTU (verbs' COMM_EST): that says as much."""
        if self.state is CmState.REP_SENT:
            self._be_established(b"")

    def begin(self, request: wire.ConnectRequest, transaction: int, ip: str, listener: Listener) -> None:
        """A REQ that was found fit makes this a passive connection; its user hears of it."""
        private = self._be_asked(request.local_id, request.private_data, transaction, ip, listener)
        self.remote_qpn = request.queue_pair
        self.remote_guid = request.ca_guid
        self.sq_psn = request.starting_psn
        self.path_mtu = Mtu(request.path_mtu)
        self.ack_exponent = request.primary.local_ack_timeout
        self.flow_label = request.primary.flow_label
        self.retry_count = request.retry_count
        self.rnr_retry_count = request.rnr_retry_count
        self.responder_resources = request.initiator_depth
        self.initiator_depth = request.responder_resources
        self._tries = request.max_cm_retries
        ours = self.manager.times.response_exponent
        self._wait_s = exponential_seconds(min(request.local_response_timeout, ours))
        self._become(CmState.REQ_RECEIVED)
        told = replace(ConnectionParameters.told_by(request, private), retry_count=request.retry_count)
        self._tell(CmEventType.CONNECT_REQUEST, private_data=private, parameters=told, listener=listener)

    def _be_asked(
        self, remote_id: int, private_data: bytes, transaction: int, ip: str, listener: Listener
    ) -> bytes:
        """This side is passive; its consumer's part of the private data of the request."""
        self.active = False
        self.listener = listener
        self.port_space, self.local_port = listener.port_space, listener.port
        self.remote_port = int.from_bytes(private_data[2:4], "big")
        self.remote_ip, self.remote_id = ip, remote_id
        self._transaction = transaction
        return private_data[IP_CM_BYTES:]

    def repeated_request(self) -> None:
        """The REQ that began this connection, once more."""
        if self.state is CmState.REQ_RECEIVED:
            receipt = wire.MessageReceipt(self.local_id, self.remote_id, wire.MessageKind.REQ, MRA_EXPONENT)
            self._send(receipt, self._transaction)
        elif self.state is CmState.REP_SENT:
            self.manager.send(self._again, self.remote_ip)

    def reply_received(self, reply: wire.ConnectReply, transaction: int) -> bool:
        """REP. False where it makes no sense in this state."""
        if self.state is CmState.REP_RECEIVED:
            receipt = wire.MessageReceipt(self.local_id, self.remote_id, wire.MessageKind.REP, MRA_EXPONENT)
            self._send(receipt, transaction)
            return True
        if self.state is CmState.ESTABLISHED and self.active and reply.local_id == self.remote_id:
            self.manager.send(self._answer, self.remote_ip)
            return True
        if self.state is not CmState.REQ_SENT:
            return False
        self.remote_id = reply.local_id
        self.remote_qpn = reply.queue_pair
        self.remote_guid = reply.ca_guid
        self.sq_psn = reply.starting_psn
        # Crossed, and no more than we asked for whatever the peer says.
        self.responder_resources = min(self.responder_resources, reply.initiator_depth)
        self.initiator_depth = min(self.initiator_depth, reply.responder_resources)
        self.rnr_retry_count = reply.rnr_retry_count
        self._transaction = transaction
        self._set_deadline(None)
        self._become(CmState.REP_RECEIVED)
        told = ConnectionParameters.told_by(reply, reply.private_data)
        self._tell(CmEventType.CONNECT_RESPONSE, private_data=reply.private_data, parameters=told)
        return True

    def ready_received(self, message: wire.ReadyToUse) -> bool:
        """RTU. False where it makes no sense in this state; one more is no mistake."""
        if self.state is CmState.REP_SENT:
            self._be_established(message.private_data)
            return True
        return self.state in (CmState.ESTABLISHED, CmState.DREQ_SENT, CmState.TIME_WAIT)

    def receipt_received(self, message: wire.MessageReceipt, now: float) -> bool:
        """MRA: the peer has our message and takes its time."""
        waiting_for = {CmState.REQ_SENT: wire.MessageKind.REQ, CmState.REP_SENT: wire.MessageKind.REP}
        if waiting_for.get(self.state) != message.message:
            return False
        self._set_deadline(
            now + self._wait_s + min(exponential_seconds(message.service_timeout), MAX_SERVICE_WAIT_S)
        )
        return True

    def reject_received(self, message: wire.ConnectReject, now: float) -> bool:
        """REJ. It ends everything that has not ended yet; False where it has."""
        if self.state in (CmState.IDLE, CmState.TIME_WAIT, CmState.CLOSED):
            return False
        early = self.state in (CmState.REQ_SENT, CmState.REP_SENT)
        self._answered()
        if self.state is CmState.REQ_RECEIVED or (
            early and message.reason != wire.RejectReason.STALE_CONNECTION
        ):
            self._close()
        else:
            self._wait_out(now)
        self._tell(CmEventType.REJECTED, status=message.reason, private_data=message.private_data)
        return True

    def disconnect_received(self, message: wire.DisconnectRequest, transaction: int, now: float) -> bool:
        """DREQ: answered at once, whatever the user does."""
        if message.remote_queue_pair != self.local_qpn or message.local_id != self.remote_id:
            return False
        if self.state not in (
            CmState.ESTABLISHED, CmState.REP_SENT, CmState.REP_RECEIVED, CmState.DREQ_SENT, CmState.TIME_WAIT,
        ):  # fmt: skip
            return False
        self._send(wire.DisconnectReply(self.local_id, self.remote_id), transaction)
        if self.state is not CmState.TIME_WAIT:
            self._wait_out(now)
            self._tell(CmEventType.DISCONNECTED, private_data=message.private_data)
        return True

    def disconnected(self, message: wire.DisconnectReply, now: float) -> bool:
        """DREP."""
        if self.state is not CmState.DREQ_SENT:
            return self.state is CmState.TIME_WAIT
        self._wait_out(now)
        self._tell(CmEventType.DISCONNECTED, private_data=message.private_data)
        return True

    def superseded(self, now: float) -> None:
        """The peer asks for a new connection with the queue pair of this one, so for it this one is over."""
        if self.state in (CmState.ESTABLISHED, CmState.REP_SENT, CmState.REP_RECEIVED):
            self._wait_out(now)
            self._tell(CmEventType.DISCONNECTED)

    def time_over(self, now: float) -> None:
        """The deadline has passed."""
        self.deadline = None
        if self.state is CmState.TIME_WAIT:
            self._close()
            self._tell(CmEventType.TIMEWAIT_EXIT)
        elif self._tries > 0:
            self._tries -= 1
            self.manager.send(self._again, self.remote_ip)
            self._set_deadline(now + self._wait_s)
        elif self.state is CmState.DREQ_SENT:
            self._wait_out(now)
            self._tell(CmEventType.DISCONNECTED, status=-errno.ETIMEDOUT)
        else:
            kind = wire.MessageKind.OTHER if self.state is CmState.REQ_SENT else wire.MessageKind.REQ
            self._send_reject(wire.RejectReason.TIMEOUT, kind)
            self._close()
            self._tell(CmEventType.UNREACHABLE, status=-errno.ETIMEDOUT)

    def _expect(self, what: str, *states: CmState) -> None:
        if self.state not in states:
            raise VerbsError(errno.EINVAL, f"a connection that is {self.state.value} cannot {what}")

    def _expect_resolved(self, what: str) -> None:
        self._expect(what, CmState.IDLE)
        if not self.remote_ip:
            raise VerbsError(errno.EINVAL, "the address has not been resolved")

    def _ip_header(self) -> bytes:
        """What comes first in the private data of a request; with a port of our own."""
        own = self.manager.ip
        self.local_port = self.local_port or self.manager.ephemeral_port(self.port_space)
        return IpCmHeader(packed_address(own), packed_address(self.remote_ip), self.local_port).encode()

    def _become(self, state: CmState) -> None:
        if state not in LEGAL[self.state]:
            raise AssertionError(f"a bug: no way from {self.state.value} to {state.value}")
        self.state = state

    def _take(self, parameters: ConnectionParameters, most_private: int) -> None:
        """Store the user's parameters of its queue pair; EINVAL where no message can carry them."""
        parameters.check(most_private)
        self.local_qpn = parameters.qp_num
        if self.active:
            self.retry_count = parameters.retry_count
            self.rnr_retry_count = parameters.rnr_retry_count

    def _tell(
        self,
        kind: CmEventType,
        *,
        status: int = 0,
        private_data: bytes = b"",
        parameters: ConnectionParameters | None = None,
        listener: Listener | None = None,
    ) -> None:
        if not self.orphan:
            self.sink(CmEvent(kind, self, status, private_data, parameters, listener))

    def _send(self, message: wire.CmMessage, transaction: int) -> None:
        self.manager.send(wire.encode_cm(message, transaction), self.remote_ip)

    def _ask(self, message: wire.CmMessage, transaction: int, now: float, tries: int) -> None:
        """Send a message that wants an answer."""
        self._again = wire.encode_cm(message, transaction)
        self._tries = tries
        self.manager.send(self._again, self.remote_ip)
        self._set_deadline(now + self._wait_s)

    def _reply(self, message: wire.CmMessage) -> None:
        """Send a message that answers; it is sent again if the question comes again."""
        self._answer = wire.encode_cm(message, self._transaction)
        self.manager.send(self._answer, self.remote_ip)

    def _send_reject(self, reason: int, kind: wire.MessageKind, private_data: bytes = b"") -> None:
        # The peer knows us by our GUID and ID, in case that we never learnt the peer's ID.
        information = self.manager.guid.to_bytes(8, "big") if reason == wire.RejectReason.TIMEOUT else b""
        message = wire.ConnectReject(self.local_id, self.remote_id, kind, reason, information, private_data)
        self._send(message, self._transaction)

    def _be_established(self, private_data: bytes) -> None:
        self._set_deadline(None)
        self._become(CmState.ESTABLISHED)
        self._tell(CmEventType.ESTABLISHED, private_data=private_data)

    def _answered(self) -> None:
        """A request of the peer no longer waits for its listener's user."""
        if self.listener is not None:
            self.listener.waiting -= 1
            self.listener = None

    def _set_deadline(self, deadline: float | None) -> None:
        self.deadline = deadline
        if deadline is not None:
            self.manager.arm(self.local_id, deadline)

    def _wait_out(self, now: float) -> None:
        self._become(CmState.TIME_WAIT)
        self._set_deadline(now + self.manager.times.time_wait_s)

    def _close(self) -> None:
        self._answered()
        self._set_deadline(None)
        self._become(CmState.CLOSED)
        self.manager.forget(self.local_id)
