"""Where NVMe over Fabrics meets sockets. `base.py` is the interface; `tcp.py` is the one transport so far."""

from __future__ import annotations

from nvmeof.errors import LocalProtocolError
from nvmeof.limits import CONNECT_TIMEOUT_S
from nvmeof.transport import tcp
from nvmeof.transport.base import Address, ControllerInfo, HostQueue, NamespaceInfo

__all__ = ["Address", "ControllerInfo", "HostQueue", "NamespaceInfo", "connect_io_queue"]

_CONNECT = {"tcp": tcp.connect_io_queue}


def connect_io_queue(
    info: ControllerInfo, qid: int, depth: int, timeout_s: float = CONNECT_TIMEOUT_S
) -> HostQueue:
    """Connect an I/O queue by whichever transport leads to the controller.

    Blocks; may be called in any thread. Raises `ConnectionLost`, or `ConnectRefused`.
    """
    connect = _CONNECT.get(info.transport)
    if connect is None:
        raise LocalProtocolError(f"there is no transport {info.transport!r}")
    return connect(info, qid, depth, timeout_s)
