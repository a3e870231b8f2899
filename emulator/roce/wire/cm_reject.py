"""Why a connection request or reply is rejected (IBTA volume 1, 12.6.7.2)."""

from __future__ import annotations

from enum import IntEnum


class RejectReason(IntEnum):
    """The reason of a REJ. A number that is not here is kept as it came."""

    NO_QUEUE_PAIR = 1
    NO_EE_CONTEXT = 2
    NO_RESOURCES = 3
    TIMEOUT = 4
    """Sent after all tries of a REP remained without an answer; the peer forgets the connection."""
    UNSUPPORTED_REQUEST = 5
    INVALID_COMMUNICATION_ID = 6
    INVALID_COMMUNICATION_INSTANCE = 7
    INVALID_SERVICE_ID = 8
    """No listener there."""
    INVALID_TRANSPORT_SERVICE_TYPE = 9
    STALE_CONNECTION = 10
    """The receiver knows this queue pair of the sender, in a connection that is not over for it yet."""
    RDC_DOES_NOT_EXIST = 11
    PRIMARY_GID_REJECTED = 12
    PRIMARY_LID_REJECTED = 13
    INVALID_PRIMARY_SERVICE_LEVEL = 14
    INVALID_PRIMARY_TRAFFIC_CLASS = 15
    INVALID_PRIMARY_HOP_LIMIT = 16
    INVALID_PRIMARY_PACKET_RATE = 17
    ALTERNATE_GID_REJECTED = 18
    ALTERNATE_LID_REJECTED = 19
    INVALID_ALTERNATE_SERVICE_LEVEL = 20
    INVALID_ALTERNATE_TRAFFIC_CLASS = 21
    INVALID_ALTERNATE_HOP_LIMIT = 22
    INVALID_ALTERNATE_PACKET_RATE = 23
    PORT_AND_CM_REDIRECTION = 24
    PORT_REDIRECTION = 25
    INVALID_PATH_MTU = 26
    """The additional information is one byte: in its upper four bits, the largest MTU that is accepted."""
    INSUFFICIENT_RESPONDER_RESOURCES = 27
    CONSUMER_DEFINED = 28
    """The application said no; its reason is in the private data (NVMe/RDMA's is)."""
    INVALID_RNR_RETRY = 29
    DUPLICATE_LOCAL_COMMUNICATION_ID = 30
    INVALID_CLASS_VERSION = 31
    INVALID_PRIMARY_FLOW_LABEL = 32
    INVALID_ALTERNATE_FLOW_LABEL = 33
    VENDOR_OPTION_NOT_SUPPORTED = 35


def reject_reason(number: int) -> int:
    """The `RejectReason` of a number where it is one, else the number."""
    return RejectReason(number) if number in RejectReason._value2member_map_ else number
