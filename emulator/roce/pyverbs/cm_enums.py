"""`pyverbs.cm_enums`: the enumerations of `rdma/rdma_cma.h` (rdma-core 44), and the members as names here."""

from typing import TYPE_CHECKING, Final

from emulator.roce.cm import events
from emulator.roce.pyverbs.enums import flags, numbers, publish
from emulator.roce.wire import cm_ip

rdma_cm_event_type = numbers("rdma_cm_event_type", "RDMA_CM_EVENT_", events.CmEventType)
rdma_cm_join_mc_attr_mask = flags("rdma_cm_join_mc_attr_mask", "RDMA_CM_JOIN_MC_ATTR_", "ADDRESS JOIN_FLAGS")
rdma_cm_mc_join_flags = numbers(
    "rdma_cm_mc_join_flags", "RDMA_MC_JOIN_FLAG_", "FULLMEMBER SENDONLY_FULLMEMBER"
)
rdma_port_space = numbers("rdma_port_space", "RDMA_PS_", cm_ip.PortSpace, IPOIB=2, IB=0x13F)

RAI_PASSIVE: Final = 1
RAI_NUMERICHOST: Final = 2
RAI_NOROUTE: Final = 4
RAI_FAMILY: Final = 8

RDMA_OPTION_ID: Final = 0
RDMA_OPTION_ID_ACK_TIMEOUT: Final = 3

publish(globals())

if TYPE_CHECKING:  # the names that `publish` adds are numbers

    def __getattr__(name: str) -> int: ...
