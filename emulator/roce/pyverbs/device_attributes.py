"""Attributes of a device and its port. Part of `pyverbs.device`.

All attributes of pyverbs exist; those that a RoCE device in software lacks are 0.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import InitVar, dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Final

from emulator.roce.nic.verbs import Mtu
from emulator.roce.pyverbs import enums as e
from emulator.roce.pyverbs.base import PyverbsObject, listing
from emulator.roce.pyverbs.device_words import (
    guid_format,
    phys_state_to_str,
    port_state_to_str,
    speed_to_str,
    str_from_flags,
    translate_device_caps,
    translate_event_type,
    translate_gid_type,
    translate_link_layer,
    translate_mtu,
    translate_port_cap_flags,
    translate_port_cap_flags2,
    width_to_str,
)
from emulator.roce.pyverbs.utils import be64toh, gid_str

if TYPE_CHECKING:
    from emulator.roce.nic.nic import Nic

VENDOR_ID: Final = 0xFFFFFF
"""No vendor's: what rxe says, too."""

PAGE_SIZES: Final = 0xFFFFF000
"""Every power of two from 4 KiB on."""

ATOMIC_WRITE_CAPABILITY: Final = 1 << 40
"""IB_UVERBS_DEVICE_ATOMIC_WRITE (`rdma/ib_user_verbs.h`), for which pyverbs has no name."""

CAPABILITIES: Final = (
    e.IBV_DEVICE_UD_AV_PORT_ENFORCE
    | e.IBV_DEVICE_CURR_QP_STATE_MOD
    | e.IBV_DEVICE_SYS_IMAGE_GUID
    | e.IBV_DEVICE_RC_RNR_NAK_GEN
    | e.IBV_DEVICE_SRQ_RESIZE
    | e.IBV_DEVICE_MEM_WINDOW
    | e.IBV_DEVICE_MEM_MGT_EXTENSIONS
    | e.IBV_DEVICE_MEM_WINDOW_TYPE_2B
)

LINK_UP: Final = 5
"""Physical port state (IBTA 14.2.5.6)."""


class _Record(PyverbsObject):
    """Attributes that begin as 0."""

    __slots__: tuple[str, ...] = ()

    def __init__(self) -> None:
        for name in type(self).__slots__:
            setattr(self, name, 0)

    def _listing(self, shown: Mapping[str, Callable[[Any], str]]) -> str:
        """All attributes line by line, as `shown` says or as numbers."""
        return listing(
            (name.replace("_", " "), shown.get(name, str)(getattr(self, name))) for name in self.__slots__
        )

    def fill(self, **values: int) -> None:
        """Set several."""
        for name, value in values.items():
            setattr(self, name, value)

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...


class DeviceAttr(_Record):
    """struct ibv_device_attr."""

    __slots__ = (
        "atomic_caps", "device_cap_flags", "fw_version", "hw_ver", "local_ca_ack_delay", "max_ah", "max_cq",
        "max_cqe", "max_ee", "max_ee_init_rd_atom", "max_ee_rd_atom", "max_fmr", "max_map_per_fmr",
        "max_mcast_grp", "max_mcast_qp_attach", "max_mr", "max_mr_size", "max_mw", "max_pd", "max_pkeys",
        "max_qp", "max_qp_init_rd_atom", "max_qp_rd_atom", "max_qp_wr", "max_raw_ethy_qp", "max_raw_ipv6_qps",
        "max_rdd", "max_res_rd_atom", "max_sge", "max_sge_rd", "max_srq", "max_srq_sge", "max_srq_wr",
        "node_guid", "page_size_cap", "phys_port_cnt", "sys_image_guid", "vendor_id", "vendor_part_id",
    )  # fmt: skip

    def __init__(self) -> None:
        super().__init__()
        self.fw_version = ""

    @classmethod
    def of(cls, nic: Nic) -> DeviceAttr:
        """What this device says. Not in pyverbs."""
        attr, limits = cls(), nic.limits
        attr.fill(
            node_guid=be64toh(nic.guid), sys_image_guid=be64toh(nic.guid), max_mr_size=limits.max_mr_size,
            page_size_cap=PAGE_SIZES, vendor_id=VENDOR_ID, max_qp=limits.max_qp, max_qp_wr=limits.max_qp_wr,
            device_cap_flags=int(CAPABILITIES), max_sge=limits.max_sge, max_sge_rd=limits.max_sge,
            max_cq=limits.max_cq, max_cqe=limits.max_cqe, max_mr=limits.max_mr, max_pd=limits.max_pd,
            max_qp_rd_atom=limits.max_qp_rd_atom, max_qp_init_rd_atom=limits.max_qp_rd_atom,
            max_res_rd_atom=limits.max_qp_rd_atom * limits.max_qp,
            atomic_caps=e.IBV_ATOMIC_HCA, max_mw=limits.max_mw, max_ah=limits.max_ah,
            max_srq=limits.max_srq, max_srq_wr=limits.max_srq_wr, max_srq_sge=limits.max_srq_sge,
            max_mcast_grp=limits.max_mcast_grp, max_mcast_qp_attach=limits.max_mcast_qp_attach,
            max_pkeys=1, local_ca_ack_delay=15, phys_port_cnt=1,
        )  # fmt: skip
        attr.fw_version = "0.0.0"
        return attr

    def __str__(self) -> str:
        shown = {
            "node_guid": guid_format, "sys_image_guid": guid_format, "max_mr_size": hex, "page_size_cap": hex,
            "vendor_id": hex, "device_cap_flags": translate_device_caps,
        }  # fmt: skip
        return self._listing(shown)


class TSOCaps(_Record):
    """struct ibv_tso_caps."""

    __slots__ = ("max_tso", "supported_qpts")


class RSSCaps(_Record):
    """struct ibv_rss_caps."""

    __slots__ = (
        "max_rwq_indirection_table_size", "max_rwq_indirection_tables", "rx_hash_fields_mask",
        "rx_hash_function", "supported_qpts",
    )  # fmt: skip


class PacketPacingCaps(_Record):
    """struct ibv_packet_pacing_caps."""

    __slots__ = ("qp_rate_limit_max", "qp_rate_limit_min", "supported_qpts")


class TMCaps(_Record):
    """struct ibv_tm_caps."""

    __slots__ = ("flags", "max_num_tags", "max_ops", "max_rndv_hdr_size", "max_sge")


class CQModerationCaps(_Record):
    """struct ibv_cq_moderation_caps."""

    __slots__ = ("max_cq_count", "max_cq_period")


class PCIAtomicCaps(_Record):
    """struct ibv_pci_atomic_caps."""

    __slots__ = ("compare_swap", "fetch_add", "swap")


class ODPCaps(_Record):
    """struct ibv_odp_caps: no memory is paged in on demand."""

    __slots__ = ("general_caps", "rc_odp_caps", "uc_odp_caps", "ud_odp_caps", "xrc_odp_caps")

    _WORDS: ClassVar = {int(bit): bit.name for bit in e.ibv_odp_transport_cap_bits}

    def __str__(self) -> str:
        return "".join(
            f"{name.replace('_', ' ')}: {str_from_flags(getattr(self, name), self._WORDS)}\n"
            for name in self.__slots__
        )


class DeviceAttrEx(_Record):
    """struct ibv_device_attr_ex."""

    __slots__ = (
        "comp_mask", "completion_timestamp_mask", "cq_mod_caps", "device_cap_flags_ex", "hca_core_clock",
        "max_dm_size", "max_wq_type_rq", "odp_caps", "orig_attr", "packet_pacing_caps", "pci_atomic_caps",
        "phys_port_cnt_ex", "raw_packet_caps", "rss_caps", "tm_caps", "tso_caps",
    )  # fmt: skip

    def __init__(self) -> None:
        super().__init__()
        self.orig_attr = DeviceAttr()
        self.odp_caps, self.tso_caps, self.pci_atomic_caps = ODPCaps(), TSOCaps(), PCIAtomicCaps()
        self.rss_caps, self.packet_pacing_caps = RSSCaps(), PacketPacingCaps()
        self.tm_caps, self.cq_mod_caps = TMCaps(), CQModerationCaps()

    @classmethod
    def of(cls, nic: Nic) -> DeviceAttrEx:
        """What this device says. Not in pyverbs."""
        attr = cls()
        attr.orig_attr = DeviceAttr.of(nic)
        attr.fill(device_cap_flags_ex=int(CAPABILITIES) | ATOMIC_WRITE_CAPABILITY, phys_port_cnt_ex=1)
        return attr


@dataclass(slots=True, eq=False)
class QueryDeviceExInput(PyverbsObject):
    """struct ibv_query_device_ex_input."""

    comp_mask: int


class PortAttr(_Record):
    """struct ibv_port_attr."""

    __slots__ = (
        "active_mtu", "active_speed", "active_width", "bad_pkey_cntr", "flags", "gid_tbl_len",
        "init_type_reply", "lid", "link_layer", "lmc", "max_msg_sz", "max_mtu", "max_vl_num", "phys_state",
        "pkey_tbl_len", "port_cap_flags", "port_cap_flags2", "qkey_viol_cntr", "sm_lid", "sm_sl", "state",
        "subnet_timeout",
    )  # fmt: skip

    @classmethod
    def of(cls, nic: Nic) -> PortAttr:
        """What this device says of its one port. Not in pyverbs."""
        attr = cls()
        flags = e.IBV_PORT_CM_SUP | e.IBV_PORT_IP_BASED_GIDS
        attr.fill(
            state=e.IBV_PORT_ACTIVE, max_mtu=int(Mtu.MTU_4096), active_mtu=int(nic.port_mtu),
            gid_tbl_len=1, port_cap_flags=flags, max_msg_sz=nic.limits.max_message, pkey_tbl_len=1,
            max_vl_num=1, active_width=1, active_speed=1, phys_state=LINK_UP,
            link_layer=e.IBV_LINK_LAYER_ETHERNET, flags=e.IBV_QPF_GRH_REQUIRED,
        )  # fmt: skip
        return attr

    def __str__(self) -> str:
        shown = {
            "state": port_state_to_str, "max_mtu": translate_mtu, "active_mtu": translate_mtu, "lmc": hex,
            "link_layer": translate_link_layer, "max_msg_sz": hex, "port_cap_flags": translate_port_cap_flags,
            "port_cap_flags2": translate_port_cap_flags2, "active_width": width_to_str,
            "active_speed": speed_to_str, "phys_state": phys_state_to_str,
        }  # fmt: skip
        return listing(
            (name.replace("_", " "), shown.get(name, str)(getattr(self, name))) for name in self.__slots__
        )


@dataclass(slots=True, eq=False)
class GIDEntry(PyverbsObject):
    """struct ibv_gid_entry."""

    subnet_prefix: InitVar[int] = 0
    interface_id: InitVar[int] = 0
    gid_index: int = 0
    port_num: int = 0
    gid_type: int = 0
    ndev_ifindex: int = 0
    gid_subnet_prefix: int = field(default=0, init=False)
    gid_interface_id: int = field(default=0, init=False)

    def __post_init__(self, subnet_prefix: int, interface_id: int) -> None:
        self.gid_subnet_prefix, self.gid_interface_id = subnet_prefix, interface_id

    def gid_str(self) -> str:
        """The GID in text."""
        return gid_str(self.gid_subnet_prefix, self.gid_interface_id)

    def __str__(self) -> str:
        return listing(
            [
                ("GID", self.gid_str()), ("GID Index", self.gid_index), ("Port number", self.port_num),
                ("GID type", translate_gid_type(self.gid_type)), ("Ndev ifindex", self.ndev_ifindex),
            ]
        )  # fmt: skip


@dataclass(slots=True, eq=False)
class AsyncEvent(PyverbsObject):
    """struct ibv_async_event."""

    event_type: int = 0

    def ack(self) -> None:
        """Nothing waits for it here."""

    def __str__(self) -> str:
        return listing([("Event Type", translate_event_type(self.event_type))])


@dataclass(slots=True, eq=False)
class AllocDmAttr(PyverbsObject):
    """struct ibv_alloc_dm_attr."""

    length: int
    log_align_req: int = 0
    comp_mask: int = 0
