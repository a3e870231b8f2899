"""Events of the connection manager: rdma_cm's types, and the parameters in them."""

import errno
from dataclasses import dataclass
from enum import IntEnum
from typing import Final

from emulator.roce.nic.verbs import VerbsError
from emulator.roce.wire.bth import LOW_24_BITS
from emulator.roce.wire.cm_messages import ConnectReply, ConnectRequest

MAX_ATOMIC_DEPTH: Final = 255
"""Responder resources and initiator depth are one byte each."""


class CmEventType(IntEnum):
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
    """struct rdma_conn_param: one side's wishes for a connection, or the other side's as this side sees them.

    In an event they are crossed already, as in rdma_cm: `responder_resources` READs of the peer may run at
    once, and the peer takes `initiator_depth` READs.
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

    @classmethod
    def told_by(cls, message: ConnectRequest | ConnectReply, private_data: bytes) -> "ConnectionParameters":
        """The other side's wishes as an event has them: resources and depth are crossed."""
        return cls(
            qp_num=message.queue_pair,
            private_data=private_data,
            responder_resources=message.initiator_depth,
            initiator_depth=message.responder_resources,
            flow_control=message.end_to_end_flow_control,
            rnr_retry_count=message.rnr_retry_count,
            srq=message.srq,
        )

    def check(self, most_private: int) -> None:
        """EINVAL where this cannot be said to a peer, with `most_private` bytes of private data."""
        check_private(self.private_data, most_private)
        if not 1 < self.qp_num <= LOW_24_BITS:
            raise VerbsError(errno.EINVAL, f"{self.qp_num} is no queue pair")
        if not (
            0 <= self.responder_resources <= MAX_ATOMIC_DEPTH
            and 0 <= self.initiator_depth <= MAX_ATOMIC_DEPTH
            and 0 <= self.retry_count <= 7
            and 0 <= self.rnr_retry_count <= 7
        ):
            raise VerbsError(errno.EINVAL, f"no peer can be told {self}")


def check_private(private_data: bytes, most: int) -> None:
    """EINVAL for more than `most` bytes."""
    if len(private_data) > most:
        raise VerbsError(errno.EINVAL, f"{len(private_data)} bytes of private data, more than {most}")
