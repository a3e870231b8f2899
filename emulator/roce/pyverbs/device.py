"""`pyverbs.device`: the list of devices, and a device once it is opened: what it is and what it can do.

Devices are the NICs of `emulator.roce.runtime`'s registry: those that were added in this process and those
that the environment variable G35_ROCE_DEVICES names. Each has one port with one GID. All attributes of
pyverbs exist; those that a RoCE device in software lacks are 0.
"""

# One idea in one file: pyverbs' module, with its records and the words for what is in them.

import errno
import struct
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import InitVar, dataclass, field
from enum import IntEnum
from typing import TYPE_CHECKING, Any, ClassVar, Final, NoReturn

from emulator.roce.cm.limits import ACK_DELAY_EXPONENT
from emulator.roce.nic.nic import Nic
from emulator.roce.nic.verbs import Mtu
from emulator.roce.pyverbs import base
from emulator.roce.pyverbs import enums as e
from emulator.roce.pyverbs.pyverbs_error import PyverbsRDMAError, PyverbsUserError
from emulator.roce.pyverbs.utils import GID, be64toh, gid_str
from emulator.roce.runtime import registry
from emulator.roce.runtime.device import Device as OpenedDevice
from emulator.roce.runtime.device import guid_of
from emulator.roce.runtime.errors import CannotOpen, DeviceClosed, NoSuchDevice
from emulator.roce.wire.bth import DEFAULT_P_KEY
from emulator.roce.wire.flow import gid_of

PORTS = 1

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


_TRANSPORTS: Final = ("IB", "IWARP", "USNIC", "USNIC UDP")
_NODES: Final = {1: "CA", 2: "Switch", 3: "Router", 4: "RNIC", 5: "USNIC", 6: "USNIC UDP"}
_PORT_STATES: Final = ("NOP", "Down", "Init", "Armed", "Active", "Defer")
_PHYSICAL: Final = {
    1: "Sleep", 2: "Polling", 3: "Disabled", 4: "Port configuration training", 5: "Link up",
    6: "Link error recovery", 7: "Phy test",
}  # fmt: skip
_LINK_LAYERS: Final = ("Unspecified", "InfiniBand", "Ethernet")
_GID_TYPES: Final[dict[int, str]] = {
    e.IBV_GID_TYPE_IB: "IB",
    e.IBV_GID_TYPE_ROCE_V1: "RoCEv1",
    e.IBV_GID_TYPE_ROCE_V2: "RoCEv2",
}
_WIDTHS: Final = {1: "1X", 2: "4X", 4: "8X", 16: "2X"}
_SPEEDS: Final = {0: 0.0, 1: 2.5, 2: 5.0, 4: 5.0, 8: 10.0, 16: 14.0, 32: 25.0, 64: 50.0, 128: 100.0}
"""Gbit/s by the code of IBTA 14.2.5.6."""


def _one_of(words: tuple[str, ...], number: int, otherwise: str) -> str:
    return words[number] if 0 <= number < len(words) else otherwise


def str_from_flags(flags: int, dictionary: Mapping[int, str]) -> str:
    """The words of all bits that are set, each on a line of its own."""
    return "\n  " + "".join(f"{word}\n  " for bit, word in dictionary.items() if flags & bit)


def _named(flags: int, members: Iterable[IntEnum]) -> str:
    return str_from_flags(flags, {int(member): member.name for member in members})


def translate_gid_type(gid_type: int) -> str:
    return _GID_TYPES.get(gid_type, f"Unknown gid_type ({gid_type})")


def guid_format(num: int) -> str:
    """Groups of four digits of a GUID that is a big-endian number read in this machine's order."""
    return struct.pack("=Q", num).hex(":", 2)


def guid_to_hex(node_guid: int) -> str:
    return f"{node_guid:x}"


def translate_transport_type(transport_type: int) -> str:
    return _one_of(_TRANSPORTS, transport_type, "Unknown")


def translate_node_type(node_type: int) -> str:
    return _NODES.get(node_type, "Unknown")


def port_state_to_str(port_state: int) -> str:
    if 0 <= port_state < len(_PORT_STATES):
        return f"{_PORT_STATES[port_state]} ({port_state})"
    return f"Invalid state ({port_state})"


def translate_mtu(mtu: int) -> str:
    return f"{128 << mtu} ({mtu})" if 1 <= mtu <= 5 else f"Invalid MTU ({mtu})"


def translate_link_layer(ll: int) -> str:
    return _one_of(_LINK_LAYERS, ll, f"Invalid link layer ({ll})")


def translate_port_cap_flags(flags: int) -> str:
    return _named(flags, e.ibv_port_cap_flags)


def translate_port_cap_flags2(flags: int) -> str:
    return _named(flags, e.ibv_port_cap_flags2)


def translate_device_caps(flags: int) -> str:
    return _named(flags, e.ibv_device_cap_flags)


def phys_state_to_str(phys: int) -> str:
    return f"{_PHYSICAL[phys]} ({phys})" if phys in _PHYSICAL else "Invalid physical state"


def width_to_str(width: int) -> str:
    return f"{_WIDTHS[width]} ({width})" if width in _WIDTHS else "Invalid width"


def speed_to_str(speed: int) -> str:
    return f"{_SPEEDS[speed]} Gbps ({speed})" if speed in _SPEEDS else "Invalid speed"


def translate_event_type(event_type: int) -> str:
    try:
        return e.ibv_event_type(event_type).name
    except ValueError:
        return f"Unknown event_type ({event_type})"


class _Record(base.PyverbsObject):
    """Attributes that begin as 0."""

    __slots__: tuple[str, ...] = ()

    def __init__(self) -> None:
        for name in type(self).__slots__:
            setattr(self, name, 0)

    def _listing(self, words: Mapping[str, Callable[[Any], str]]) -> str:
        """All attributes line by line, as `words` say or as numbers."""
        return base.listing(
            (name.replace("_", " "), words.get(name, str)(getattr(self, name))) for name in self.__slots__
        )

    def fill(self, **values: int) -> None:
        for name, value in values.items():
            setattr(self, name, value)

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...


class DeviceAttr(_Record):
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
    def of(cls, nic: Nic) -> "DeviceAttr":
        """What this device says. Not in pyverbs."""
        attr, limits = cls(), nic.limits
        for name in set(cls.__slots__) & set(type(limits).__slots__):
            setattr(attr, name, getattr(limits, name))
        attr.fill(
            node_guid=be64toh(nic.guid), sys_image_guid=be64toh(nic.guid), page_size_cap=PAGE_SIZES,
            vendor_id=VENDOR_ID, device_cap_flags=int(CAPABILITIES), max_sge_rd=limits.max_sge,
            max_qp_init_rd_atom=limits.max_qp_rd_atom, max_res_rd_atom=limits.max_qp_rd_atom * limits.max_qp,
            atomic_caps=e.IBV_ATOMIC_HCA, max_pkeys=1, local_ca_ack_delay=ACK_DELAY_EXPONENT, phys_port_cnt=1,
        )  # fmt: skip
        attr.fw_version = "0.0.0"
        return attr

    def __str__(self) -> str:
        words = {
            "node_guid": guid_format, "sys_image_guid": guid_format, "max_mr_size": hex, "page_size_cap": hex,
            "vendor_id": hex, "device_cap_flags": translate_device_caps,
        }  # fmt: skip
        return self._listing(words)


class TSOCaps(_Record):
    __slots__ = ("max_tso", "supported_qpts")


class RSSCaps(_Record):
    __slots__ = (
        "max_rwq_indirection_table_size", "max_rwq_indirection_tables", "rx_hash_fields_mask",
        "rx_hash_function", "supported_qpts",
    )  # fmt: skip


class PacketPacingCaps(_Record):
    __slots__ = ("qp_rate_limit_max", "qp_rate_limit_min", "supported_qpts")


class TMCaps(_Record):
    __slots__ = ("flags", "max_num_tags", "max_ops", "max_rndv_hdr_size", "max_sge")


class CQModerationCaps(_Record):
    __slots__ = ("max_cq_count", "max_cq_period")


class PCIAtomicCaps(_Record):
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
    def of(cls, nic: Nic) -> "DeviceAttrEx":
        """What this device says. Not in pyverbs."""
        attr = cls()
        attr.orig_attr = DeviceAttr.of(nic)
        attr.fill(device_cap_flags_ex=int(CAPABILITIES) | ATOMIC_WRITE_CAPABILITY, phys_port_cnt_ex=1)
        return attr


@dataclass(slots=True, eq=False)
class QueryDeviceExInput(base.PyverbsObject):
    comp_mask: int


class PortAttr(_Record):
    __slots__ = (
        "active_mtu", "active_speed", "active_width", "bad_pkey_cntr", "flags", "gid_tbl_len",
        "init_type_reply", "lid", "link_layer", "lmc", "max_msg_sz", "max_mtu", "max_vl_num", "phys_state",
        "pkey_tbl_len", "port_cap_flags", "port_cap_flags2", "qkey_viol_cntr", "sm_lid", "sm_sl", "state",
        "subnet_timeout",
    )  # fmt: skip

    @classmethod
    def of(cls, nic: Nic) -> "PortAttr":
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
        words = {
            "state": port_state_to_str, "max_mtu": translate_mtu, "active_mtu": translate_mtu, "lmc": hex,
            "link_layer": translate_link_layer, "max_msg_sz": hex, "port_cap_flags": translate_port_cap_flags,
            "port_cap_flags2": translate_port_cap_flags2, "active_width": width_to_str,
            "active_speed": speed_to_str, "phys_state": phys_state_to_str,
        }  # fmt: skip
        return self._listing(words)


@dataclass(slots=True, eq=False)
class GIDEntry(base.PyverbsObject):
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
        return gid_str(self.gid_subnet_prefix, self.gid_interface_id)

    def __str__(self) -> str:
        return base.listing(
            [
                ("GID", self.gid_str()), ("GID Index", self.gid_index), ("Port number", self.port_num),
                ("GID type", translate_gid_type(self.gid_type)), ("Ndev ifindex", self.ndev_ifindex),
            ]
        )  # fmt: skip


@dataclass(slots=True, eq=False)
class AsyncEvent(base.PyverbsObject):
    event_type: int = 0

    def ack(self) -> None:
        """Nothing waits for it here."""

    __str__ = base.shown("", ("Event Type", "event_type", translate_event_type))


@dataclass(slots=True, eq=False)
class AllocDmAttr(base.PyverbsObject):
    length: int
    log_align_req: int = 0
    comp_mask: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class Device(base.PyverbsObject):
    """A device that exists. `name` is bytes, as in pyverbs."""

    name: bytes
    guid: int
    node_type: int
    transport_type: int
    index: int

    def __str__(self) -> str:
        return (
            f"Device {self.name.decode()}, node type {translate_node_type(self.node_type)}, transport type "
            f"{translate_transport_type(self.transport_type)}, guid {guid_to_hex(self.guid)}, "
            f"index {self.index}"
        )


class DeviceList(list[Device]):
    """A list that says how devices are named to a program that takes one which is not there."""

    def __getitem__(self, index: Any) -> Any:
        try:
            return super().__getitem__(index)
        except IndexError:
            known = registry.known_devices(registry.devices())
            raise IndexError(f"there is no device {index}; {known}") from None


def get_device_list() -> list[Device]:
    kinds = (e.IBV_NODE_CA, e.IBV_TRANSPORT_IB)
    return DeviceList(
        Device(known.name.encode(), guid_of(known.ip), *kinds, index)
        for index, known in enumerate(registry.devices())
    )


def rdma_get_devices() -> list[Device]:
    """The devices that the connection manager can use: all."""
    return get_device_list()


class Context(base.PyverbsCM):
    """A device, opened by `name=`; or, inside of this package, that of a CMID."""

    __slots__ = ("_device", "_shared", "ccs", "cqs", "name", "pds", "qps")

    def __init__(self, **kwargs: Any) -> None:
        self._device: OpenedDevice | None = None
        self._shared = False
        self.pds, self.ccs, self.cqs, self.qps = (base.Children() for _ in range(4))
        self.name: str = kwargs.get("name", "")
        cmid = kwargs.get("cmid")
        if cmid is not None:
            self._device = device = cmid.opened()
            self._shared = True
            self.name = device.name
            cmid.ctx = self
            return
        if kwargs.get("cmd_fd") is not None:
            raise PyverbsRDMAError("Failed to import device", errno.EOPNOTSUPP)
        if kwargs.get("attr") is not None:
            raise PyverbsRDMAError("there are no providers of vendors here", errno.EOPNOTSUPP)
        if not self.name:
            raise PyverbsUserError("Device name must be provided")
        base.close_deferred()
        try:
            self._device = registry.open_device(self.name)
        except NoSuchDevice as error:
            raise PyverbsRDMAError(f"Failed to find device {self.name}: {error}") from error
        except CannotOpen as error:
            raise PyverbsRDMAError(f"Failed to open device {self.name}: {error}", errno.ENODEV) from error

    def __del__(self) -> None:
        if getattr(self, "_device", None) is not None and not self._shared:
            base.close_or_defer(self)

    @property
    def device(self) -> OpenedDevice:
        """The opened device. Not in pyverbs."""
        if self._device is None:
            raise PyverbsUserError("the Context is closed")
        return self._device

    def close(self) -> None:
        """Close everything that was made of the device, and the device, where nobody else has it open."""
        if self._device is None:
            return
        base.close_children(self.qps, self.ccs, self.cqs, self.pds)
        base.close_deferred()
        if not self._shared:
            registry.release_device(self._device)
        self._device = None

    def forget(self) -> None:
        """Its CMID is closed, and with it everything that was made of the device. Not in pyverbs."""
        self._device = None

    context = base.reads("device", "As `device`: in pyverbs the C structure.")
    num_comp_vectors: ClassVar[int] = 1
    """Completion vectors; they are all the same."""

    @property
    def cmd_fd(self) -> int:
        """Of the device; nothing can be asked by it."""
        return self.device.async_events.fileno()

    def query_device(self) -> DeviceAttr:
        return DeviceAttr.of(self.device.nic)

    def query_device_ex(self, ex_input: QueryDeviceExInput | None = None) -> DeviceAttrEx:
        """What the device can do, and what it cannot."""
        return DeviceAttrEx.of(self.device.nic)

    def query_port(self, port_num: int) -> PortAttr:
        """The port. EINVAL for one that does not exist."""
        _exists(port_num, 0, f"Failed to query port {port_num}", errno.EINVAL)
        return PortAttr.of(self.device.nic)

    def query_pkey(self, port_num: int, index: int) -> int:
        """The one P_Key, big-endian as in the C structure (either way 0xFFFF)."""
        _exists(port_num, index, f"Failed to query pkey {index} of port {port_num}")
        return DEFAULT_P_KEY

    def get_pkey_index(self, port_num: int, pkey: int) -> int:
        """Where a P_Key is in the table. Not in pyverbs 44 (it came later)."""
        refused = f"Failed to get pkey index of pkey = {pkey} of port {port_num}"
        _exists(port_num, pkey != DEFAULT_P_KEY, refused)
        return 0

    def query_gid(self, port_num: int, index: int) -> GID:
        """The one GID."""
        _exists(port_num, index, f"Failed to query gid {index} of port {port_num}")
        gid = GID()
        gid.raw = gid_of(self.device.nic.address)
        return gid

    def query_gid_type(self, port_num: int, index: int) -> int:
        """An `ibv_gid_type_sysfs`."""
        refused = f"Failed to query gid type of port {port_num} and gid index {index}"
        _exists(port_num, index, refused, errno.EINVAL)
        return e.IBV_GID_TYPE_SYSFS_ROCE_V2

    def _gid_entry(self) -> GIDEntry:
        raw = gid_of(self.device.nic.address)
        halves = (int.from_bytes(raw[:8], "little"), int.from_bytes(raw[8:], "little"))
        return GIDEntry(*halves, gid_index=0, port_num=PORTS, gid_type=e.IBV_GID_TYPE_ROCE_V2)

    def query_gid_table(self, max_entries: int, flags: int = 0) -> list[GIDEntry]:
        """All GIDs. A refusal has a negative errno, as in pyverbs: EINVAL where there are more than
        `max_entries`, EOPNOTSUPP for any flag."""
        refused = "Failed to query gid tables of the device"
        if flags:
            raise PyverbsRDMAError(refused, -errno.EOPNOTSUPP)
        if max_entries < 1:
            raise PyverbsRDMAError(refused, -errno.EINVAL)
        return [self._gid_entry()]

    def query_gid_ex(self, port_num: int, gid_index: int, flags: int = 0) -> GIDEntry:
        """One entry of the table. EOPNOTSUPP for any flag, EINVAL for a port or index that does not exist."""
        refused = f"Failed to query gid table of port {port_num} in index {gid_index}"
        if flags:
            raise PyverbsRDMAError(refused, errno.EOPNOTSUPP)
        _exists(port_num, gid_index, refused, errno.EINVAL)
        return self._gid_entry()

    def query_rt_values_ex(self, comp_mask: int = e.IBV_VALUES_MASK_RAW_CLOCK) -> NoReturn:
        """There is no clock of the hardware (EOPNOTSUPP)."""
        raise PyverbsRDMAError("Failed to query real time values", errno.EOPNOTSUPP)

    def get_async_event(self) -> AsyncEvent:
        """Wait for the next asynchronous event of the device and take it."""
        device = self.device
        events = device.async_events
        while True:
            try:
                device.drive_until(events.__len__, None)
            except DeviceClosed as error:
                raise PyverbsRDMAError("Failed to get async event", errno.ENODEV) from error
            with device.turn():
                event = events.pop()
            if event is not None:
                return AsyncEvent(int(event.type))

    def drive_until(self, condition: Callable[[], object], deadline: float | None = None) -> bool:
        """Wait until `condition()` is true, at most until `deadline` (time.monotonic), driving the device
        meanwhile: whether it is. Not in pyverbs; it spares a waiting program the switch between threads."""
        try:
            return self.device.drive_until(condition, deadline)
        except DeviceClosed as error:
            raise PyverbsRDMAError("the device is closed", errno.ENODEV) from error

    def now(self) -> float:
        """The clock of `drive_until`. Not in pyverbs."""
        return time.monotonic()


def _exists(port_num: int, index: int, refused: str, number: int = -1) -> None:
    """There is one port, and one entry in each of its tables."""
    if port_num != PORTS or index:
        raise PyverbsRDMAError(refused, number)


class DM(base.PyverbsCM):
    """Memory on the device: there is none, and `query_device_ex` says so (`max_dm_size` is 0)."""

    __slots__ = ()

    def __init__(self, context: Context, dm_attr: AllocDmAttr | None = None, **kwargs: Any) -> None:
        if kwargs.get("handle") is not None:
            raise PyverbsRDMAError("Failed to import DM", errno.EOPNOTSUPP)
        raise PyverbsUserError("Device doesn't support dm allocation")

    def unimport(self) -> None:
        """Nothing was imported."""

    def copy_to_dm(self, dm_offset: int, data: bytes, length: int) -> NoReturn:
        """There is no memory to copy to (EOPNOTSUPP)."""
        raise PyverbsRDMAError("Failed to copy to dm", errno.EOPNOTSUPP)

    def copy_from_dm(self, dm_offset: int, length: int) -> NoReturn:
        """There is no memory to copy from (EOPNOTSUPP)."""
        raise PyverbsRDMAError("Failed to copy from dm", errno.EOPNOTSUPP)

    handle: ClassVar[int] = 0
    """There is none."""
