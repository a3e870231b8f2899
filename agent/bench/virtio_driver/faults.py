"""What goes wrong between a driver and its device, and within the driver. Interpreted, because mypyc makes no
classes that inherit from these."""


class DeviceSilent(TimeoutError):
    """The device's fault: a request was not answered in time. It is still the device's."""


class OutOfGuestMemory(MemoryError):
    """Our own fault: the machine was made too small for what its driver wants to lay out."""
