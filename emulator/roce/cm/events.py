"""What the connection manager tells its users: the events of rdma_cm, with its numbers and its meanings."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from emulator.roce.cm.connection import Connection
    from emulator.roce.cm.manager import Listener


class CmEventType(IntEnum):
    """enum rdma_cm_event_type."""

    ADDR_RESOLVED = 0
    ADDR_ERROR = 1
    ROUTE_RESOLVED = 2
    ROUTE_ERROR = 3
    CONNECT_REQUEST = 4
    CONNECT_RESPONSE = 5
    CONNECT_ERROR = 6
    UNREACHABLE = 7
    REJECTED = 8
    ESTABLISHED = 9
    DISCONNECTED = 10
    DEVICE_REMOVAL = 11
    MULTICAST_JOIN = 12
    MULTICAST_ERROR = 13
    ADDR_CHANGE = 14
    TIMEWAIT_EXIT = 15


@dataclass(frozen=True, slots=True)
class ConnectionParameters:
    """struct rdma_conn_param: what one side asks of a connection, or is told that the other side asks.

    What a program is told is crossed already, as rdma_cm does it: `responder_resources` is how many READs of
    the peer there may be at once, `initiator_depth` how many READs the peer will take.
    """

    qp_num: int = 0
    private_data: bytes = b""
    responder_resources: int = 0
    initiator_depth: int = 0
    flow_control: bool = False
    retry_count: int = 7
    rnr_retry_count: int = 7
    srq: bool = False
    qkey: int = 0
    """Of a datagram service or a multicast group; `qp_num` is the queue pair to send to then."""


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
    connection: Connection
    status: int = 0
    private_data: bytes = b""
    parameters: ConnectionParameters | None = None
    listener: Listener | None = None
    group: str = ""
    """With MULTICAST_JOIN and MULTICAST_ERROR: the address of the group."""
