"""Devices made of the protocol objects: threads, a lock, file descriptors, names.

channel.py      events behind a file descriptor
driver_seat.py  the driver's seat: which thread receives, and which threads wait
device.py       a NIC, its connection manager and a link as one opened device
registry.py     which devices there are, by name
"""

from emulator.roce.runtime.registry import add_device as add_device
