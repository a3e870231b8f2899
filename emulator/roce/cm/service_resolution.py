"""A datagram service of the port space "UDP": SIDR instead of a connection (IBTA volume 1, 12.11).

The active side asks which queue pair serves a port (SIDR_REQ); the passive side answers with it and its Q_Key
(SIDR_REP). There is no connection, no disconnect and no time-wait. The class has the calls and events of a
`Connection`, as rdma_cm has one id for both: `connect` asks, and ESTABLISHED brings queue pair and Q_Key; a
refusal or silence is UNREACHABLE.

The same id joins multicast groups, once an address is resolved. It asks no other node: RoCE has no subnet
manager, the group's GID is its address (annex A17), and the whole port space shares one Q_Key.
"""

import errno
from collections.abc import Callable
from typing import Final

from emulator.roce.cm.connection import CmEvent, Connection, EventSink, Listener
from emulator.roce.cm.events import CmEventType, ConnectionParameters, check_private
from emulator.roce.cm.limits import MAX_GROUPS
from emulator.roce.cm.services import ConnectionServices
from emulator.roce.cm.states import CmState
from emulator.roce.nic.multicast import MULTICAST_QPN
from emulator.roce.nic.verbs import VerbsError
from emulator.roce.wire import cm_messages as wire
from emulator.roce.wire.bth import LOW_24_BITS
from emulator.roce.wire.cm_ip import IP_CM_BYTES, service_id
from emulator.roce.wire.flow import is_multicast, packed_address
from emulator.roce.wire.mad import Attribute

UDP_QKEY: Final = 0x01234567
"""The Q_Key of every queue pair of this port space (RDMA_UDP_QKEY of `rdma/rdma_cma.h`)."""

_MOST_PRIVATE: Final = wire.PRIVATE_BYTES[Attribute.SIDR_REQ] - IP_CM_BYTES


class ServiceResolution(Connection):
    """See the top of this file. Either side."""

    def __init__(self, manager: ConnectionServices, sink: EventSink, local_id: int) -> None:
        super().__init__(manager, sink, local_id)
        self._groups: dict[str, bool] = {}
        """Multicast groups that were joined, and whether a queue pair was attached."""

    def join_multicast(self, group: str, attach: Callable[[], None] | None) -> None:
        """rdma_join_multicast: MULTICAST_JOIN follows, or MULTICAST_ERROR where `attach` raises VerbsError.
        A member that only sends has no `attach`. EINVAL for what is no group, ENOMEM for too many.
        """
        self._expect_resolved("join a multicast group")
        try:
            fits = is_multicast(group) and len(packed_address(group)) == len(packed_address(self.manager.ip))
        except ValueError as error:
            raise VerbsError(errno.EINVAL, str(error)) from None
        if not fits:
            raise VerbsError(errno.EINVAL, f"{group} is no multicast group of our address family")
        if group not in self._groups and len(self._groups) >= MAX_GROUPS:
            raise VerbsError(errno.ENOMEM, f"no more than {MAX_GROUPS} multicast groups")
        try:
            if attach is not None:
                attach()
        except VerbsError as error:
            self.sink(CmEvent(CmEventType.MULTICAST_ERROR, self, -error.errno, group=group))
            return
        self._groups[group] = self._groups.get(group, False) or attach is not None
        told = ConnectionParameters(MULTICAST_QPN, qkey=UDP_QKEY)
        self.sink(CmEvent(CmEventType.MULTICAST_JOIN, self, parameters=told, group=group))

    def leave_multicast(self, group: str) -> bool:
        """rdma_leave_multicast; whether a queue pair is to be detached. EADDRNOTAVAIL if not joined."""
        if group not in self._groups:
            raise VerbsError(errno.EADDRNOTAVAIL, f"{group!r} was not joined")
        return self._groups.pop(group)

    def connect(self, parameters: ConnectionParameters, now: float) -> None:
        """Send a SIDR_REQ. ESTABLISHED or UNREACHABLE follows."""
        self._expect_resolved("ask for a service")
        check_private(parameters.private_data, _MOST_PRIVATE)
        manager = self.manager
        self.local_qpn = parameters.qp_num
        request = wire.ServiceRequest(
            self.local_id,
            service_id(self.port_space, self.remote_port),
            private_data=self._ip_header() + parameters.private_data,
        )
        self._become(CmState.SIDR_SENT)
        self._ask(request, manager.new_transaction(), now, manager.times.tries)

    def reply_to_service(self, reply: wire.ServiceReply) -> bool:
        """SIDR_REP; whether it was waited for."""
        if self.state is not CmState.SIDR_SENT:
            return self.state is CmState.RESOLVED
        if reply.status != wire.SidrStatus.VALID or not 1 < reply.queue_pair <= LOW_24_BITS:
            self._close()
            self._tell(CmEventType.UNREACHABLE, status=reply.status, private_data=reply.private_data)
            return True
        self._set_deadline(None)
        self._become(CmState.RESOLVED)
        self.remote_qpn = reply.queue_pair
        told = ConnectionParameters(reply.queue_pair, reply.private_data, qkey=reply.q_key)
        self._tell(CmEventType.ESTABLISHED, private_data=reply.private_data, parameters=told)
        return True

    def begin_service(
        self, request: wire.ServiceRequest, transaction: int, ip: str, listener: Listener
    ) -> None:
        """A SIDR_REQ that was found fit; the listener's user hears of it."""
        private = self._be_asked(request.request_id, request.private_data, transaction, ip, listener)
        self._become(CmState.SIDR_RECEIVED)
        told = ConnectionParameters(private_data=private)
        self._tell(CmEventType.CONNECT_REQUEST, private_data=private, parameters=told, listener=listener)

    def repeated_request(self) -> None:
        """The SIDR_REQ once more: its answer was lost, or is still to be given."""
        if self.state is CmState.RESOLVED:
            self.manager.send(self._answer, self.remote_ip)

    def accept(self, parameters: ConnectionParameters, now: float) -> None:
        """Send a SIDR_REP with the queue pair that serves. No event follows."""
        self._expect("accept", CmState.SIDR_RECEIVED)
        check_private(parameters.private_data, wire.PRIVATE_BYTES[Attribute.SIDR_REP])
        if not 1 < parameters.qp_num <= LOW_24_BITS:
            raise VerbsError(errno.EINVAL, f"{parameters.qp_num} is no queue pair")
        self._answered()
        self.local_qpn = parameters.qp_num
        self._become(CmState.RESOLVED)
        self._reply(
            wire.ServiceReply(
                self.remote_id,
                wire.SidrStatus.VALID,
                parameters.qp_num,
                service_id(self.port_space, self.local_port),
                UDP_QKEY,
                private_data=parameters.private_data,
            )
        )

    def reject(
        self, now: float, private_data: bytes = b"", reason: int = wire.RejectReason.CONSUMER_DEFINED
    ) -> None:
        """Send a SIDR_REP that refuses; no event follows."""
        self._expect("reject", CmState.SIDR_RECEIVED)
        check_private(private_data, wire.PRIVATE_BYTES[Attribute.SIDR_REP])
        self._refuse(private_data)

    def _refuse(self, private_data: bytes = b"") -> None:
        answer = wire.ServiceReply(
            self.remote_id,
            wire.SidrStatus.REJECTED,
            service_id=service_id(self.port_space, self.local_port),
            private_data=private_data,
        )
        self.manager.send(wire.encode_cm(answer, self._transaction), self.remote_ip)
        self._close()

    def disconnect(self, now: float) -> None:
        """There is no connection to end (EINVAL)."""
        raise VerbsError(errno.EINVAL, "a datagram service has no connection")

    def destroy(self, now: float) -> None:
        """rdma_destroy_id: a request that waits is refused; no event follows."""
        self.orphan = True
        if self.state is CmState.SIDR_RECEIVED:
            self._refuse()
        elif self.state is not CmState.CLOSED:
            self._close()

    def _send_reject(self, reason: int, kind: wire.MessageKind, private_data: bytes = b"") -> None:
        """A question that is given up needs no word to the peer."""
