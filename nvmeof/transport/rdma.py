"""NVMe/RDMA, host role: what the rest of the program may import from here.

`rdma_queue.py` has I/O queues for threads, `rdma_controller.py` the admin session and discovery for trio,
`rdma_connect.py` the connection manager's side, `rdma_pair.py` work requests over verbs, and
`verbs_provider.py` where verbs come from.
"""

from __future__ import annotations

from nvmeof.transport.base import VerbsChoice
from nvmeof.transport.controller import Controller
from nvmeof.transport.keeper import Keeper, keep_controller
from nvmeof.transport.rdma_controller import discover, open_controller
from nvmeof.transport.rdma_queue import RdmaHostQueue, connect_io_queue

__all__ = [
    "Controller",
    "Keeper",
    "RdmaHostQueue",
    "VerbsChoice",
    "connect_io_queue",
    "discover",
    "keep_controller",
    "open_controller",
]
