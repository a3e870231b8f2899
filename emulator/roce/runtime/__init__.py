"""What makes a device of the protocol objects: threads, a lock, file descriptors, names.

channel.py    events behind a file descriptor
seat.py       the driver's seat: who receives for everybody, and who waits
device.py     a NIC, its connection manager and a link as one opened device
registry.py   which devices there are, by name
"""

from emulator.roce.runtime.device import Device
from emulator.roce.runtime.errors import CannotOpen, DeviceClosed, DeviceError, NoSuchDevice
from emulator.roce.runtime.registry import (
    DeviceEntry,
    add_device,
    devices,
    find_device,
    open_device,
    release_device,
    remove_device,
)

__all__ = [
    "CannotOpen",
    "Device",
    "DeviceClosed",
    "DeviceEntry",
    "DeviceError",
    "NoSuchDevice",
    "add_device",
    "devices",
    "find_device",
    "open_device",
    "release_device",
    "remove_device",
]
