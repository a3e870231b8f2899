"""Errors of a device as a whole."""


class DeviceError(Exception):
    """Base of what this package raises; never raised itself."""


class NoSuchDevice(DeviceError):
    """The user's fault: no device of this name or address is known. `G35_ROCE_DEVICES` names devices."""


class CannotOpen(DeviceError):
    """The environment's fault: the address or its UDP port 4791 is not available. The message says why."""


class DeviceClosed(DeviceError):
    """The device was closed, which ends all waits for it."""
