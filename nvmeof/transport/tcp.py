"""NVMe/TCP, host role: what the rest of the program may import from here.

`tcp_queue.py` has I/O queues for threads, `tcp_controller.py` the admin session and discovery for trio, and
`keeper.py` holds a controller through losses of its connection.
"""

from __future__ import annotations

from nvmeof.tcp.pdu import NO_DIGESTS, Digests
from nvmeof.transport.controller import Controller
from nvmeof.transport.keeper import Keeper, keep_controller
from nvmeof.transport.tcp_controller import discover, open_controller
from nvmeof.transport.tcp_queue import TcpHostQueue, connect_io_queue

__all__ = [
    "NO_DIGESTS",
    "Controller",
    "Digests",
    "Keeper",
    "TcpHostQueue",
    "connect_io_queue",
    "discover",
    "keep_controller",
    "open_controller",
]
