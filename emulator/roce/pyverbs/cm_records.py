"""Addresses and parameters of the connection manager. Part of `pyverbs.cmid`."""

import errno
import socket
from dataclasses import InitVar, dataclass, field
from typing import Any, ClassVar, Final

from emulator.roce.cm.events import ConnectionParameters
from emulator.roce.nic.verbs import Address, VerbsError
from emulator.roce.pyverbs import cm_enums as cm
from emulator.roce.pyverbs.base import PyverbsObject, reads, shown
from emulator.roce.pyverbs.pyverbs_error import PyverbsRDMAError

AS_MANY_AS_POSSIBLE: Final = 0xFF
"""RDMA_MAX_RESP_RES and RDMA_MAX_INIT_DEPTH: what the device can do."""

_JOIN_MASK = cm.RDMA_CM_JOIN_MC_ATTR_ADDRESS | cm.RDMA_CM_JOIN_MC_ATTR_JOIN_FLAGS

_BAD_NAME: Final = {
    socket.EAI_NONAME: errno.ENODEV,
    socket.EAI_SERVICE: errno.EINVAL,
    socket.EAI_AGAIN: errno.EAGAIN,
    socket.EAI_MEMORY: errno.ENOMEM,
}
"""Name resolution has codes of its own; these are the errnos that say the same."""


class AddrInfo(PyverbsObject):
    """What rdma_getaddrinfo finds: a source, a destination, or both, and a port space.

    `src` and `dst` are names or addresses, `*_service` names or numbers of ports. With RAI_PASSIVE the source
    is what to listen on; nothing named means any address.
    """

    __slots__ = ("destination", "flags", "port_space", "source")

    def __init__(
        self,
        src: str | bytes | None = None,
        dst: str | bytes | None = None,
        src_service: str | bytes | int | None = None,
        dst_service: str | bytes | int | None = None,
        port_space: int = 0,
        flags: int = 0,
    ) -> None:
        self.flags = flags
        self.port_space = port_space or cm.RDMA_PS_TCP
        self.source: Address | None = None
        self.destination: Address | None = None
        if flags & cm.RAI_PASSIVE:
            self.source = _resolved(src, src_service, flags)
            return
        if src is not None:
            self.source = _resolved(src, src_service, flags)
        if dst is None and dst_service is None:
            if self.source is not None:
                return  # as the hints alone: enough for a multicast group
            raise PyverbsRDMAError("Failed to get Address Info", errno.EINVAL)
        self.destination = _resolved(dst, dst_service, flags)

    def close(self) -> None:
        """There is nothing to give back."""


def _text(word: str | bytes | int | None) -> str | None:
    if word is None:
        return None
    return word.decode() if isinstance(word, bytes) else str(word)


def _resolved(host: str | bytes | None, service: str | bytes | int | None, flags: int) -> Address:
    name, port = _text(host), _text(service)
    try:
        found = socket.getaddrinfo(
            "0.0.0.0" if name is None else name,
            port,
            type=socket.SOCK_STREAM,
            flags=socket.AI_NUMERICHOST if flags & cm.RAI_NUMERICHOST else 0,
        )
    except (socket.gaierror, UnicodeError) as error:
        code = error.errno if isinstance(error, socket.gaierror) else None
        number = _BAD_NAME.get(code, errno.EINVAL) if code is not None else errno.EINVAL
        raise PyverbsRDMAError(f"Failed to get Address Info ({error})", number) from error
    address = found[0][4]
    return Address(str(address[0]), int(address[1]))


@dataclass(slots=True, eq=False)
class ConnParam(PyverbsObject):
    """struct rdma_conn_param. `data_len` makes room for private data; what does not fit is cut off."""

    resources: int = 1
    depth: int = 1
    flow_control: int = 0
    retry: int = 5
    rnr_retry: int = 5
    srq: int = 0
    qp_num: InitVar[int] = 0
    data_len: InitVar[int] = 0
    qpn: int = field(default=0, init=False)
    _data_len: int = field(default=0, init=False)
    _private_data: bytes = field(default=b"", init=False)

    def __post_init__(self, qp_num: int, data_len: int) -> None:
        self.qpn, self._data_len = qp_num, data_len

    private_data: ClassVar[Any] = reads("_private_data", "What goes to the peer with the message.")

    def set_private_data(self, data: bytes) -> None:
        """Take up to `data_len` bytes; with none on either side nothing changes, as in pyverbs."""
        if self._data_len and len(data):
            self._private_data = bytes(data[: self._data_len])

    def parameters(self, qp_num: int, most: int) -> ConnectionParameters:
        """What the connection manager takes; `most` is the READs that the device can do. VerbsError(EINVAL)
        for more. Not in pyverbs."""
        resources, depth = (
            most if wish == AS_MANY_AS_POSSIBLE else wish for wish in (self.resources, self.depth)
        )
        if resources > most or depth > most:
            raise VerbsError(errno.EINVAL, f"the device does {most} READs at once, not more")
        return ConnectionParameters(
            qp_num, self._private_data, resources, depth, bool(self.flow_control), self.retry,
            self.rnr_retry, bool(self.srq),
        )  # fmt: skip

    __str__ = shown(
        "Connection parameters: \n",
        ("responder resources", "resources"), ("initiator depth", "depth"), ("flow control", "flow_control"),
        ("retry count", "retry"), ("rnr retry count", "rnr_retry"), ("srq", "srq"), ("qp number", "qpn"),
    )  # fmt: skip


@dataclass(slots=True, eq=False)
class JoinMCAttrEx(PyverbsObject):
    """struct rdma_cm_join_mc_attr_ex: a multicast group, the source of `addr`, and how it is joined."""

    addr: AddrInfo
    comp_mask: int = 0
    join_flags: int = 0


def group_in(addr: AddrInfo | None) -> str:
    """The group that is the source of `addr`. VerbsError(EINVAL) where there is none."""
    if addr is None or addr.source is None:
        raise VerbsError(errno.EINVAL, "no group: it is the source of an AddrInfo")
    return addr.source.ip


def checked_flags(attr: JoinMCAttrEx) -> int:
    """The join flags. VerbsError as from rdma_join_multicast_ex."""
    if attr.comp_mask & ~_JOIN_MASK:
        raise VerbsError(errno.EOPNOTSUPP, f"mask {attr.comp_mask:#x} has unknown bits")
    if attr.comp_mask != _JOIN_MASK or attr.join_flags not in cm.rdma_cm_mc_join_flags.__members__.values():
        raise VerbsError(errno.EINVAL, f"mask {attr.comp_mask:#x} with flags {attr.join_flags:#x}")
    return attr.join_flags
