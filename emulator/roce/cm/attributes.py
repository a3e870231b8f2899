"""Attributes of a connection's queue pair, state by state: rdma_init_qp_attr, with its masks.

INIT gives no access right before REQ or REP, and does afterwards. So a program that sets its queue pair to
INIT before `connect` must do it again before RTR, as with the kernel; otherwise the peer's READs get a NAK.
"""

import errno
from typing import Final

from emulator.roce.cm.connection import Connection
from emulator.roce.cm.service_resolution import UDP_QKEY, ServiceResolution
from emulator.roce.cm.states import CmState
from emulator.roce.nic.states import mask_to
from emulator.roce.nic.verbs import (
    Access,
    AddressVector,
    QpAttr,
    QpAttributes,
    QpState,
    QpType,
    VerbsError,
)

RNR_TIMER: Final = 24
"""41 ms: the wait that a peer gets when no receive is posted. Linux leaves 0, which is 655 ms. A program
that posts late because others have the cores gets five retries in a fifth of a second."""

_AGREED = {CmState.REQ_RECEIVED, CmState.REP_RECEIVED, CmState.REP_SENT, CmState.ESTABLISHED}


def queue_pair_attributes(connection: Connection, state: QpState) -> tuple[QpAttributes, QpAttr]:
    """Attributes and mask for `modify`. EINVAL where the connection does not know enough yet."""
    if isinstance(connection, ServiceResolution):
        return _datagram_attributes(connection, state)
    agreed = connection.state in _AGREED
    match state:
        case QpState.INIT:
            if connection.state in (CmState.TIME_WAIT, CmState.CLOSED, CmState.DREQ_SENT):
                raise _unknown(connection, state)
            access = Access(0)
            if agreed or connection.state is CmState.REQ_SENT:
                access |= Access.REMOTE_WRITE
                if connection.responder_resources:
                    access |= Access.REMOTE_READ | Access.REMOTE_ATOMIC
            attributes = QpAttributes(state=state, access=access, pkey_index=0, port_num=1)
        case QpState.RTR if agreed:
            attributes = QpAttributes(
                state=state,
                av=AddressVector(connection.remote_ip, flow_label=connection.flow_label),
                path_mtu=connection.path_mtu,
                dest_qpn=connection.remote_qpn,
                rq_psn=connection.rq_psn,
                max_dest_rd_atomic=connection.responder_resources,
                min_rnr_timer=RNR_TIMER,
            )
        case QpState.RTS if agreed:
            attributes = QpAttributes(
                state=state,
                sq_psn=connection.sq_psn,
                retry_count=connection.retry_count,
                rnr_retry=connection.rnr_retry_count,
                max_rd_atomic=connection.initiator_depth,
                timeout=connection.ack_exponent,
            )
        case _:
            raise _unknown(connection, state)
    return attributes, mask_to(QpType.RC, state)


def _datagram_attributes(service: ServiceResolution, state: QpState) -> tuple[QpAttributes, QpAttr]:
    """A datagram queue pair needs nothing of its peers, so it may go all the way at once."""
    attributes = QpAttributes(state=state, pkey_index=0, port_num=1, qkey=UDP_QKEY, sq_psn=service.rq_psn)
    if state not in (QpState.INIT, QpState.RTR, QpState.RTS):
        raise _unknown(service, state)
    return attributes, mask_to(QpType.UD, state)


def _unknown(connection: Connection, state: QpState) -> VerbsError:
    return VerbsError(
        errno.EINVAL, f"a connection that is {connection.state.value} knows nothing for {state.name}"
    )
