"""Errors of calls over JSON-RPC, with the enclosure's code.

SPDK has two kinds of code: JSON-RPC's own below -32000 (JSON-RPC 2.0, 5.1), above them a negative errno. An
unknown parameter is -32603 from the block device calls and -32602 from the nvmf calls.
"""

import errno
import os
from typing import Final

from agent.errors import Fault, G35Error, PeerError, printable

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
    """The enclosure refused the call of `method`, with `code` and `text`."""

    def __init__(self, method: str, code: int, text: str, advice: str | None = None) -> None:
        fault, usual = _ADVICE.get(code, (Fault.WORLD, "the log of the enclosure says more"))
        super().__init__(f"{method}: {printable(text)} ({_named(code)})", advice or usual, fault=fault)
        self.method = method
        self.code = code
        self.text = text


class RpcUnreachable(G35Error):
    """No answer: nobody listens at the socket, or the connection broke."""


class RpcTimeout(RpcUnreachable):
    """No whole answer by the deadline. The call may have been carried out."""


class RpcAnswerError(PeerError):
    """A malformed answer: no JSON, too long, or not of SPDK's shape."""


def _named(code: int) -> str:
    if -32768 <= code <= -32000 or code >= 0:
        return f"code {code}"
    name = errno.errorcode.get(-code)
    return f"code {code}, {name}: {os.strerror(-code)}" if name else f"code {code}"
