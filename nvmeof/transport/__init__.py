"""NVMe over Fabrics over sockets and queue pairs. `base.py` is the interface; `tcp.py` and `rdma.py` are the
transports behind it, found by their names. `local_queue.py` is the way to media of this machine.
"""

import importlib
from contextlib import AbstractAsyncContextManager
from typing import Any, Protocol, cast

from nvmeof.errors import LocalProtocolError
from nvmeof.host.namespaces import NamespaceInfo
from nvmeof.limits import CONNECT_TIMEOUT_S
from nvmeof.transport.base import Address, ControllerInfo, HostQueue, VerbsChoice

__all__ = [
    "Address",
    "ControllerInfo",
    "HostQueue",
    "NamespaceInfo",
    "Transport",
    "VerbsChoice",
    "connect_io_queue",
    "transport_named",
]

TRANSPORTS = ("tcp", "rdma")


class Transport(Protocol):
    """What the module of a transport offers; options beyond the common ones are in `base.py`."""

    def open_controller(self, *arguments: Any, **options: Any) -> AbstractAsyncContextManager[Any]: ...

    def connect_io_queue(
        self, info: ControllerInfo, qid: int, depth: int, timeout_s: float = CONNECT_TIMEOUT_S
    ) -> HostQueue: ...


def transport_named(name: str) -> Transport:
    """The transport of that name, imported when it is first asked for. Raises `LocalProtocolError`."""
    if name not in TRANSPORTS:
        raise LocalProtocolError(f"there is no transport {name!r}")
    return cast(Transport, importlib.import_module(f"nvmeof.transport.{name}"))


def connect_io_queue(
    info: ControllerInfo, qid: int, depth: int, timeout_s: float = CONNECT_TIMEOUT_S
) -> HostQueue:
    """Connect I/O queue `qid`, 1 to `info.facts.io_queues`. Blocks; may be called in any thread.

    The queue may turn out less deep than asked, where the controller allows no more. Raises
    `ConnectionLost`, or `ConnectRefused`.
    """
    if info.local is not None:
        return info.local.connect(info.queue_depth(qid, depth))
    return transport_named(info.transport).connect_io_queue(info, qid, depth, timeout_s)
