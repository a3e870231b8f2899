"""`pyverbs.cm_enums`: the enumerations of `rdma/rdma_cma.h` (rdma-core 44), and the members as names here."""

from __future__ import annotations

from enum import IntEnum
from typing import TYPE_CHECKING, Final

RAI_PASSIVE: Final = 1
RAI_NUMERICHOST: Final = 2
RAI_NOROUTE: Final = 4
RAI_FAMILY: Final = 8

RDMA_OPTION_ID: Final = 0
RDMA_OPTION_ID_ACK_TIMEOUT: Final = 3


class rdma_cm_event_type(IntEnum):
    RDMA_CM_EVENT_ADDR_RESOLVED = 0
    RDMA_CM_EVENT_ADDR_ERROR = 1
    RDMA_CM_EVENT_ROUTE_RESOLVED = 2
    RDMA_CM_EVENT_ROUTE_ERROR = 3
    RDMA_CM_EVENT_CONNECT_REQUEST = 4
    RDMA_CM_EVENT_CONNECT_RESPONSE = 5
    RDMA_CM_EVENT_CONNECT_ERROR = 6
    RDMA_CM_EVENT_UNREACHABLE = 7
    RDMA_CM_EVENT_REJECTED = 8
    RDMA_CM_EVENT_ESTABLISHED = 9
    RDMA_CM_EVENT_DISCONNECTED = 10
    RDMA_CM_EVENT_DEVICE_REMOVAL = 11
    RDMA_CM_EVENT_MULTICAST_JOIN = 12
    RDMA_CM_EVENT_MULTICAST_ERROR = 13
    RDMA_CM_EVENT_ADDR_CHANGE = 14
    RDMA_CM_EVENT_TIMEWAIT_EXIT = 15


class rdma_cm_join_mc_attr_mask(IntEnum):
    RDMA_CM_JOIN_MC_ATTR_ADDRESS = 1
    RDMA_CM_JOIN_MC_ATTR_JOIN_FLAGS = 2


class rdma_cm_mc_join_flags(IntEnum):
    RDMA_MC_JOIN_FLAG_FULLMEMBER = 0
    RDMA_MC_JOIN_FLAG_SENDONLY_FULLMEMBER = 1


class rdma_port_space(IntEnum):
    RDMA_PS_IPOIB = 2
    RDMA_PS_TCP = 0x106
    RDMA_PS_UDP = 0x111
    RDMA_PS_IB = 0x13F


globals().update(
    {
        name: member
        for kind in (
            rdma_cm_event_type, rdma_cm_join_mc_attr_mask, rdma_cm_mc_join_flags, rdma_port_space,
        )
        for name, member in kind.__members__.items()
    }
)  # fmt: skip

if TYPE_CHECKING:  # the names that are added above are numbers

    def __getattr__(name: str) -> int: ...
