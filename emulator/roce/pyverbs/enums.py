"""`pyverbs.enums`: every enumeration of the verbs, and every enumerator as a name of this module.

Facts of the interface (`infiniband/verbs.h` of rdma-core 44, as Debian's pyverbs 44 shows them), held to the
checked-in inventory by tests/unit/roce_pyverbs. The device's own enumerations come
from `nic.verbs`.
"""

from enum import Enum, IntEnum
from typing import TYPE_CHECKING, Final

from emulator.roce.nic import verbs


def numbers(name: str, prefix: str, members: str | type[Enum], first: int = 0, **more: int) -> type[IntEnum]:
    """The C enumeration `name`: words that count from `first`, or the members of an enumeration of
    the device; and `more` members. Each is called `prefix` and its word."""
    if isinstance(members, str):
        values = {word: number for number, word in enumerate(members.split(), first)}
    else:
        values = {word: int(member.value) for word, member in members.__members__.items()}
    every = sorted((values | more).items(), key=lambda member: member[1])
    return IntEnum(name, [(prefix + word, value) for word, value in every])  # type: ignore[return-value]


def flags(name: str, prefix: str, bits: str) -> type[IntEnum]:
    """The C enumeration `name` of single bits, from bit 0 on; "-" is a bit without a name."""
    words = {word: 1 << place for place, word in enumerate(bits.split()) if word != "-"}
    return numbers(name, prefix, "", **words)


# fmt: off
ibv_access_flags = numbers("ibv_access_flags", "IBV_ACCESS_", verbs.Access, ON_DEMAND=1 << 6, HUGETLB=1 << 7)
ibv_atomic_cap = numbers("ibv_atomic_cap", "IBV_ATOMIC_", "NONE HCA GLOB")
ibv_counter_description = numbers("ibv_counter_description", "IBV_COUNTER_", "PACKETS BYTES")
ibv_cq_init_attr_mask = flags("ibv_cq_init_attr_mask", "IBV_CQ_INIT_ATTR_MASK_", "FLAGS PD")
ibv_create_cq_attr_flags = flags("ibv_create_cq_attr_flags", "IBV_CREATE_CQ_ATTR_",
    "SINGLE_THREADED IGNORE_OVERRUN")
ibv_create_cq_wc_flags = flags("ibv_create_cq_wc_flags", "IBV_WC_EX_WITH_",
    "BYTE_LEN IMM QP_NUM SRC_QP SLID SL DLID_PATH_BITS COMPLETION_TIMESTAMP CVLAN FLOW_TAG TM_INFO "
    "COMPLETION_TIMESTAMP_WALLCLOCK")
ibv_device_cap_flags = flags("ibv_device_cap_flags", "IBV_DEVICE_",
    "RESIZE_MAX_WR BAD_PKEY_CNTR BAD_QKEY_CNTR RAW_MULTI AUTO_PATH_MIG CHANGE_PHY_PORT UD_AV_PORT_ENFORCE "
    "CURR_QP_STATE_MOD SHUTDOWN_PORT INIT_TYPE PORT_ACTIVE_EVENT SYS_IMAGE_GUID RC_RNR_NAK_GEN SRQ_RESIZE "
    "N_NOTIFY_CQ - - MEM_WINDOW UD_IP_CSUM - XRC MEM_MGT_EXTENSIONS - MEM_WINDOW_TYPE_2A MEM_WINDOW_TYPE_2B "
    "RC_IP_CSUM RAW_IP_CSUM - - MANAGED_FLOW_STEERING")
ibv_event_type = numbers("ibv_event_type", "IBV_EVENT_", verbs.EventType)
ibv_flow_attr_type = numbers("ibv_flow_attr_type", "IBV_FLOW_ATTR_", "NORMAL ALL_DEFAULT MC_DEFAULT SNIFFER")
ibv_flow_flags = flags("ibv_flow_flags", "IBV_FLOW_ATTR_FLAGS_", "- DONT_TRAP EGRESS")
ibv_flow_spec_type = numbers("ibv_flow_spec_type", "IBV_FLOW_SPEC_", "",
    ETH=32, IPV4=48, IPV6=49, IPV4_EXT=50, ESP=52, TCP=64, UDP=65, VXLAN_TUNNEL=80, GRE=81, MPLS=96,
    INNER=0x100, ACTION_TAG=0x1000, ACTION_DROP=0x1001, ACTION_HANDLE=0x1002, ACTION_COUNT=0x1003)
ibv_fork_status = numbers("ibv_fork_status", "IBV_FORK_", "DISABLED ENABLED UNNEEDED")
ibv_gid_type = numbers("ibv_gid_type", "IBV_GID_TYPE_", "IB ROCE_V1 ROCE_V2")
ibv_gid_type_sysfs = numbers("ibv_gid_type_sysfs", "IBV_GID_TYPE_SYSFS_", "IB_ROCE_V1 ROCE_V2")
ibv_mig_state = numbers("ibv_mig_state", "IBV_MIG_", "MIGRATED REARM ARMED")
ibv_mtu = numbers("ibv_mtu", "IBV_", verbs.Mtu)
ibv_mw_type = numbers("ibv_mw_type", "IBV_MW_", verbs.MwType)
ibv_node_type = numbers("ibv_node_type", "IBV_NODE_", "",
    UNKNOWN=-1, CA=1, SWITCH=2, ROUTER=3, RNIC=4, USNIC=5, USNIC_UDP=6, UNSPECIFIED=7)
ibv_odp_general_caps = flags("ibv_odp_general_caps", "IBV_ODP_", "SUPPORT SUPPORT_IMPLICIT")
ibv_odp_transport_cap_bits = flags("ibv_odp_transport_cap_bits", "IBV_ODP_SUPPORT_",
    "SEND RECV WRITE READ ATOMIC SRQ_RECV")
ibv_ops_flags = flags("ibv_ops_flags", "IBV_OPS_", "SIGNALED TM_SYNC")
ibv_ops_wr_opcode = numbers("ibv_ops_wr_opcode", "IBV_WR_TAG_", "ADD DEL SYNC")
ibv_parent_domain_init_attr_mask = flags("ibv_parent_domain_init_attr_mask", "IBV_PARENT_DOMAIN_INIT_ATTR_",
    "ALLOCATORS PD_CONTEXT")
ibv_port_cap_flags = flags("ibv_port_cap_flags", "IBV_PORT_",
    "- SM NOTICE_SUP TRAP_SUP OPT_IPD_SUP AUTO_MIGR_SUP SL_MAP_SUP MKEY_NVRAM PKEY_NVRAM LED_INFO_SUP - "
    "SYS_IMAGE_GUID_SUP PKEY_SW_EXT_PORT_TRAP_SUP - EXTENDED_SPEEDS_SUP CAP_MASK2_SUP CM_SUP "
    "SNMP_TUNNEL_SUP REINIT_SUP DEVICE_MGMT_SUP VENDOR_CLASS_SUP DR_NOTICE_SUP CAP_MASK_NOTICE_SUP "
    "BOOT_MGMT_SUP LINK_LATENCY_SUP CLIENT_REG_SUP IP_BASED_GIDS")
ibv_port_cap_flags2 = flags("ibv_port_cap_flags2", "IBV_PORT_",
    "SET_NODE_DESC_SUP INFO_EXT_SUP VIRT_SUP SWITCH_PORT_STATE_TABLE_SUP LINK_WIDTH_2X_SUP "
    "LINK_SPEED_HDR_SUP - - - - LINK_SPEED_NDR_SUP")
ibv_port_state = numbers("ibv_port_state", "IBV_PORT_", "NOP DOWN INIT ARMED ACTIVE ACTIVE_DEFER")
ibv_qp_attr_mask = numbers("ibv_qp_attr_mask", "IBV_QP_", verbs.QpAttr, RATE_LIMIT=1 << 25)
ibv_qp_create_flags = flags("ibv_qp_create_flags", "IBV_QP_CREATE_",
    "- BLOCK_SELF_MCAST_LB - - - - - - SCATTER_FCS CVLAN_STRIPPING SOURCE_QPN PCI_WRITE_END_PADDING")
ibv_qp_create_send_ops_flags = flags("ibv_qp_create_send_ops_flags", "IBV_QP_EX_WITH_",
    "RDMA_WRITE RDMA_WRITE_WITH_IMM SEND SEND_WITH_IMM RDMA_READ ATOMIC_CMP_AND_SWP ATOMIC_FETCH_AND_ADD "
    "LOCAL_INV BIND_MW SEND_WITH_INV TSO - ATOMIC_WRITE")
ibv_qp_init_attr_mask = flags("ibv_qp_init_attr_mask", "IBV_QP_INIT_ATTR_",
    "PD XRCD CREATE_FLAGS MAX_TSO_HEADER IND_TABLE RX_HASH SEND_OPS_FLAGS")
ibv_qp_state = numbers("ibv_qp_state", "IBV_QPS_", verbs.QpState, UNKNOWN=7)
ibv_qp_type = numbers("ibv_qp_type", "IBV_QPT_", verbs.QpType,
    RAW_PACKET=8, XRC_SEND=9, XRC_RECV=10, DRIVER=255)
ibv_raw_packet_caps = flags("ibv_raw_packet_caps", "IBV_RAW_PACKET_CAP_",
    "CVLAN_STRIPPING SCATTER_FCS IP_CSUM DELAY_DROP")
ibv_read_counters_flags = flags("ibv_read_counters_flags", "IBV_READ_COUNTERS_ATTR_", "PREFER_CACHED")
ibv_rereg_mr_err_code = numbers("ibv_rereg_mr_err_code", "IBV_REREG_MR_ERR_", "",
    INPUT=-1, DONT_FORK_NEW=-2, DO_FORK_OLD=-3, CMD=-4, CMD_AND_DO_FORK_NEW=-5)
ibv_rereg_mr_flags = flags("ibv_rereg_mr_flags", "IBV_REREG_MR_CHANGE_", "TRANSLATION PD ACCESS")
ibv_rx_hash_fields = flags("ibv_rx_hash_fields", "IBV_RX_HASH_",
    "SRC_IPV4 DST_IPV4 SRC_IPV6 DST_IPV6 SRC_PORT_TCP DST_PORT_TCP SRC_PORT_UDP DST_PORT_UDP")
ibv_rx_hash_function_flags = flags("ibv_rx_hash_function_flags", "IBV_RX_HASH_FUNC_", "TOEPLITZ")
ibv_send_flags = numbers("ibv_send_flags", "IBV_SEND_", verbs.SendFlags, IP_CSUM=1 << 4)
ibv_srq_attr_mask = numbers("ibv_srq_attr_mask", "IBV_SRQ_", verbs.SrqAttr)
ibv_srq_init_attr_mask = flags("ibv_srq_init_attr_mask", "IBV_SRQ_INIT_ATTR_", "TYPE PD XRCD CQ TM")
ibv_srq_type = numbers("ibv_srq_type", "IBV_SRQT_", "BASIC XRC TM")
ibv_tm_cap_flags = flags("ibv_tm_cap_flags", "IBV_TM_CAP_", "RC")
ibv_tmh_op = numbers("ibv_tmh_op", "IBV_TMH_", "NO_TAG RNDV FIN EAGER")
ibv_transport_type = numbers("ibv_transport_type", "IBV_TRANSPORT_",
    "UNKNOWN IB IWARP USNIC USNIC_UDP", first=-1)
ibv_values_mask = flags("ibv_values_mask", "IBV_VALUES_MASK_", "RAW_CLOCK")
ibv_wc_flags = numbers("ibv_wc_flags", "IBV_WC_", verbs.WcFlags,
    IP_CSUM_OK=1 << 2, TM_SYNC_REQ=1 << 4, TM_MATCH=1 << 5, TM_DATA_VALID=1 << 6)
ibv_wc_opcode = numbers("ibv_wc_opcode", "IBV_WC_", verbs.WcOpcode,
    TSO=7, TM_ADD=130, TM_DEL=131, TM_SYNC=132, TM_RECV=133, TM_NO_TAG=134, DRIVER2=136, DRIVER3=137)
ibv_wc_status = numbers("ibv_wc_status", "IBV_WC_", verbs.WcStatus, TM_ERR=22, TM_RNDV_INCOMPLETE=23)
ibv_wq_attr_mask = flags("ibv_wq_attr_mask", "IBV_WQ_ATTR_", "STATE CURR_STATE FLAGS")
ibv_wq_flags = flags("ibv_wq_flags", "IBV_WQ_FLAGS_",
    "CVLAN_STRIPPING SCATTER_FCS DELAY_DROP PCI_WRITE_END_PADDING")
ibv_wq_init_attr_mask = flags("ibv_wq_init_attr_mask", "IBV_WQ_INIT_ATTR_", "FLAGS")
ibv_wq_state = numbers("ibv_wq_state", "IBV_WQS_", "RESET RDY ERR UNKNOWN")
ibv_wq_type = numbers("ibv_wq_type", "IBV_WQT_", "RQ")
ibv_wr_opcode = numbers("ibv_wr_opcode", "IBV_WR_", verbs.SendOpcode, TSO=10)
ibv_xrcd_init_attr_mask = flags("ibv_xrcd_init_attr_mask", "IBV_XRCD_INIT_ATTR_", "FD OFLAGS RESERVED")
# fmt: on

_IBV_DEVICE_RAW_SCATTER_FCS: Final = 1 << 34
_IBV_DEVICE_PCI_WRITE_END_PADDING: Final = 1 << 36
_IBV_ALLOCATOR_USE_DEFAULT: Final = (1 << 64) - 1
_IBV_ADVISE_MR_ADVICE_PREFETCH: Final = 0
_IBV_ADVISE_MR_ADVICE_PREFETCH_WRITE: Final = 1
_IBV_ADVISE_MR_ADVICE_PREFETCH_NO_FAULT: Final = 2
_IBV_ADVISE_MR_FLAG_FLUSH: Final = 1

IBV_LINK_LAYER_UNSPECIFIED: Final = 0
IBV_LINK_LAYER_INFINIBAND: Final = 1
IBV_LINK_LAYER_ETHERNET: Final = 2

IBV_QPF_GRH_REQUIRED: Final = 1
IBV_WC_STANDARD_FLAGS: Final = 0x7F


def publish(module: dict[str, object]) -> None:
    """Members of the enumerations of a module become its names, as a C header has them."""
    for kind in [kind for name, kind in module.items() if name.startswith(("ibv_", "rdma_"))]:
        module.update(getattr(kind, "__members__", {}))


publish(globals())

if TYPE_CHECKING:  # the names that `publish` adds are numbers

    def __getattr__(name: str) -> int: ...
