"""What can go wrong with a device as a whole."""

from __future__ import annotations


class DeviceError(Exception):
    """Base of what this package raises; never raised itself."""


class NoSuchDevice(DeviceError):
    """Our user's fault: no device of this name or address is known. Say which with `G35_ROCE_DEVICES`."""


class CannotOpen(DeviceError):
    """The world's: the address or its UDP port 4791 cannot be had. The message says why."""


class DeviceClosed(DeviceError):
    """Somebody closed the device, which ends all waiting for it."""
