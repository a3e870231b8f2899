"""What may go wrong when an enclosure is asked over JSON-RPC, with the code that it gave.

SPDK answers with two kinds of code. Below -32000 they are JSON-RPC's own (JSON-RPC 2.0, 5.1); above that they
are a negative errno. Which of the first kind it takes is no matter of the specification: an unknown parameter
is -32603 from the block device calls and -32602 from the nvmf calls, so both are read as "not as asked".
"""

from __future__ import annotations

import errno
import os
from typing import Final

from agent.enclosure_control.printable import printable
from agent.errors import Fault, G35Error, PeerError

METHOD_NOT_FOUND: Final = -32601
INVALID_REQUEST: Final = -32600
INVALID_PARAMETERS: Final = -32602
INTERNAL_ERROR: Final = -32603

_ADVICE: Final[dict[int, tuple[Fault, str]]] = {
    INVALID_REQUEST: (Fault.BUG, "g35 and the enclosure disagree about JSON-RPC; please report it"),
    METHOD_NOT_FOUND: (
        Fault.WORLD,
        "this enclosure was built without it, or is of another version; rpc_get_methods lists what it has",
    ),
    INVALID_PARAMETERS: (Fault.OURS, "compare the description with `g35 enclosure show`"),
    INTERNAL_ERROR: (Fault.OURS, "compare the description with `g35 enclosure show`; its log says more"),
    -errno.EPERM: (
        Fault.OURS,
        "a key file must be given by its absolute path and have mode 0600; else the enclosure is in another "
        "state than it should be",
    ),
    -errno.ENOENT: (Fault.OURS, "create what it names first"),
    -errno.EIO: (
        Fault.WORLD,
        "the other end did not let it in (a wrong key, a wrong NQN), or the medium failed; see its log",
    ),
    -errno.ENODEV: (Fault.OURS, "there is no such device; `g35 enclosure show` lists what there is"),
    -errno.EEXIST: (Fault.OURS, "that name is taken; `g35 enclosure show` lists what there is"),
    -errno.EINVAL: (Fault.OURS, "a value of the description does not fit that enclosure"),
    -errno.ENOMEM: (Fault.WORLD, "give the enclosure more memory (huge pages for SPDK), or ask for less"),
    -errno.ENOSPC: (Fault.WORLD, "there is no room left on the device below"),
    -errno.EBUSY: (Fault.WORLD, "something uses it; end that first"),
}


class RpcError(G35Error):
    """The enclosure refused a call: `code` and `text` are its own words, `method` is what was asked.

    The message has what a terminal would obey (control characters) as numbers.
    """

    def __init__(self, method: str, code: int, text: str, advice: str | None = None) -> None:
        fault, usual = _ADVICE.get(code, (Fault.WORLD, "the log of the enclosure says more"))
        super().__init__(f"{method}: {printable(text)} ({_named(code)})", advice or usual, fault=fault)
        self.method = method
        self.code = code
        self.text = text


class RpcUnreachable(G35Error):
    """Nobody answers at the socket, or the connection broke before the answer."""


class RpcTimeout(RpcUnreachable):
    """No whole answer by the deadline. Whether the call was carried out is not known."""


class RpcAnswerError(PeerError):
    """An answer that is none: no JSON, too long, or not of the shape that SPDK gives."""


def _named(code: int) -> str:
    if -32768 <= code <= -32000 or code >= 0:
        return f"code {code}"
    name = errno.errorcode.get(-code)
    return f"code {code}, {name}: {os.strerror(-code)}" if name else f"code {code}"
