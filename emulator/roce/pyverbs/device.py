"""`pyverbs.device`: the list of devices, and a device once it is opened.

Devices are the NICs of `emulator.roce.runtime`'s registry: those that were added in this process and those
that the environment variable G35_ROCE_DEVICES names. Each has one port with one GID.
"""

from __future__ import annotations

import errno
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

from emulator.roce.nic.gid import gid_of
from emulator.roce.pyverbs import enums as e
from emulator.roce.pyverbs.base import (
    Children,
    PyverbsCM,
    PyverbsObject,
    close_children,
    close_deferred,
    close_or_defer,
)
from emulator.roce.pyverbs.device_attributes import (
    AllocDmAttr,
    AsyncEvent,
    CQModerationCaps,
    DeviceAttr,
    DeviceAttrEx,
    GIDEntry,
    ODPCaps,
    PacketPacingCaps,
    PCIAtomicCaps,
    PortAttr,
    QueryDeviceExInput,
    RSSCaps,
    TMCaps,
    TSOCaps,
)
from emulator.roce.pyverbs.device_words import (
    guid_format,
    guid_to_hex,
    phys_state_to_str,
    port_state_to_str,
    speed_to_str,
    str_from_flags,
    translate_device_caps,
    translate_event_type,
    translate_gid_type,
    translate_link_layer,
    translate_mtu,
    translate_node_type,
    translate_port_cap_flags,
    translate_port_cap_flags2,
    translate_transport_type,
    width_to_str,
)
from emulator.roce.pyverbs.pyverbs_error import PyverbsRDMAError, PyverbsUserError
from emulator.roce.pyverbs.utils import GID
from emulator.roce.runtime import registry
from emulator.roce.runtime.device import guid_of
from emulator.roce.runtime.errors import CannotOpen, DeviceClosed, NoSuchDevice
from emulator.roce.wire.bth import DEFAULT_P_KEY

if TYPE_CHECKING:
    from emulator.roce.runtime.device import Device as OpenedDevice

PORTS = 1
COMPLETION_VECTORS = 1


@dataclass(frozen=True, slots=True, eq=False)
class Device(PyverbsObject):
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
    """All devices, opened or not."""
    kinds = (e.IBV_NODE_CA, e.IBV_TRANSPORT_IB)
    return DeviceList(
        Device(known.name.encode(), guid_of(known.ip), *kinds, index)
        for index, known in enumerate(registry.devices())
    )


def rdma_get_devices() -> list[Device]:
    """The devices that the connection manager can use: all."""
    return get_device_list()


class Context(PyverbsCM):
    """A device, opened by `name=`; or, inside of this package, that of a CMID."""

    __slots__ = ("_device", "_shared", "ccs", "cqs", "name", "pds", "qps")

    def __init__(self, **kwargs: Any) -> None:
        self._device: OpenedDevice | None = None
        self._shared = False
        self.pds, self.ccs, self.cqs, self.qps = (Children() for _ in range(4))
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
        close_deferred()
        try:
            self._device = registry.open_device(self.name)
        except NoSuchDevice as error:
            raise PyverbsRDMAError(f"Failed to find device {self.name}: {error}") from error
        except CannotOpen as error:
            raise PyverbsRDMAError(f"Failed to open device {self.name}: {error}", errno.ENODEV) from error

    def __del__(self) -> None:
        if getattr(self, "_device", None) is not None and not self._shared:
            close_or_defer(self)

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
        close_children(self.qps, self.ccs, self.cqs, self.pds)
        close_deferred()
        if not self._shared:
            registry.release_device(self._device)
        self._device = None

    def forget(self) -> None:
        """Its CMID is closed, and with it everything that was made of the device. Not in pyverbs."""
        self._device = None

    @property
    def context(self) -> OpenedDevice:
        """As `device`: in pyverbs the C structure."""
        return self.device

    @property
    def num_comp_vectors(self) -> int:
        """Completion vectors; they are all the same."""
        return COMPLETION_VECTORS

    @property
    def cmd_fd(self) -> int:
        """Of the device; nothing can be asked by it."""
        return self.device.async_events.fileno()

    # --- questions ----------------------------------------------------------------------------------------

    def query_device(self) -> DeviceAttr:
        """What the device can do."""
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


class DM(PyverbsCM):
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

    @property
    def handle(self) -> int:
        """There is none."""
        return 0


__all__ = [
    "DM", "AllocDmAttr", "AsyncEvent", "CQModerationCaps", "Context", "Device", "DeviceAttr", "DeviceAttrEx",
    "GIDEntry", "ODPCaps", "PCIAtomicCaps", "PacketPacingCaps", "PortAttr", "QueryDeviceExInput", "RSSCaps",
    "TMCaps", "TSOCaps", "get_device_list", "guid_format", "guid_to_hex", "phys_state_to_str",
    "port_state_to_str", "rdma_get_devices", "speed_to_str", "str_from_flags", "translate_device_caps",
    "translate_event_type", "translate_gid_type", "translate_link_layer", "translate_mtu",
    "translate_node_type", "translate_port_cap_flags", "translate_port_cap_flags2",
    "translate_transport_type", "width_to_str",
]  # fmt: skip
