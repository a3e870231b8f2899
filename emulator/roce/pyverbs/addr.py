"""`pyverbs.addr`: GIDs, global routes and address handles.

Over RoCE v2 an address vector is its GID: an IP address. What InfiniBand has besides (LIDs, path bits, rates)
is kept and shown, and has no effect.
"""

import errno
from dataclasses import InitVar, dataclass, field
from typing import Any, ClassVar

from emulator.roce.nic.memory import AddressHandle
from emulator.roce.nic.verbs import GRH_BYTES, AddressVector, VerbsError
from emulator.roce.pyverbs import enums as e
from emulator.roce.pyverbs import mem_alloc
from emulator.roce.pyverbs.base import DeviceObject, PyverbsObject, listing, shown
from emulator.roce.pyverbs.cq import WC
from emulator.roce.pyverbs.pd import PD
from emulator.roce.pyverbs.pyverbs_error import PyverbsRDMAError, PyverbsUserError
from emulator.roce.pyverbs.utils import GID, NO_GID, gid_bytes, gid_text
from emulator.roce.wire.flow import gid_of, ip_of


class GRH(PyverbsObject):
    """struct ibv_grh: the global route header of a datagram."""

    __slots__ = ("_dgid", "_sgid", "hop_limit", "next_hdr", "paylen", "version_tclass_flow")

    def __init__(
        self,
        sgid: GID | None = None,
        dgid: GID | None = None,
        version_tclass_flow: int = 0,
        paylen: int = 0,
        next_hdr: int = 0,
        hop_limit: int = 1,
    ) -> None:
        if sgid is None or dgid is None:
            raise AttributeError("a GRH needs both of its GIDs")
        self._sgid, self._dgid = sgid.raw, dgid.raw
        self.version_tclass_flow, self.paylen = version_tclass_flow, paylen
        self.next_hdr, self.hop_limit = next_hdr, hop_limit

    dgid = gid_text("_dgid")
    sgid = gid_text("_sgid")

    __str__ = shown(
        "",
        ("DGID", "dgid"), ("SGID", "sgid"), ("version tclass flow", "version_tclass_flow"),
        ("paylen", "paylen"), ("next header", "next_hdr"), ("hop limit", "hop_limit"),
    )  # fmt: skip


class GlobalRoute(PyverbsObject):
    """struct ibv_global_route: where to, and by which of the local GIDs."""

    __slots__ = ("flow_label", "hop_limit", "raw_dgid", "sgid_index", "traffic_class")

    def __init__(
        self,
        dgid: GID | None = None,
        flow_label: int = 0,
        sgid_index: int = 0,
        hop_limit: int = 1,
        traffic_class: int = 0,
    ) -> None:
        if dgid is None:
            raise AttributeError("a global route needs a GID")
        self.raw_dgid = dgid.raw
        self.flow_label, self.sgid_index = flow_label, sgid_index
        self.hop_limit, self.traffic_class = hop_limit, traffic_class

    dgid = gid_text("raw_dgid")

    __str__ = shown(
        "",
        ("DGID", "dgid"), ("flow label", "flow_label"), ("sgid index", "sgid_index"),
        ("hop limit", "hop_limit"), ("traffic class", "traffic_class"),
    )  # fmt: skip


def _of_route(name: str, doc: str) -> Any:
    """An attribute of an `AHAttr` that is None while `is_global` is not set."""

    def write(attr: "AHAttr", val: int) -> None:
        setattr(attr, name, val)

    return property(lambda attr: getattr(attr, name) if attr.is_global else None, write, doc=doc)


@dataclass(slots=True, eq=False)
class AHAttr(PyverbsObject):
    """struct ibv_ah_attr. As in pyverbs, what belongs to the route is None while `is_global` is not set."""

    dlid: int = 0
    sl: int = 0
    src_path_bits: int = 0
    static_rate: int = 0
    is_global: int = 0
    port_num: int = 1
    gr: InitVar[GlobalRoute | None] = None
    raw_dgid: bytes = field(default=NO_GID, init=False)
    _flow_label: int = field(default=0, init=False)
    _sgid_index: int = field(default=0, init=False)
    _hop_limit: int = field(default=0, init=False)
    _traffic_class: int = field(default=0, init=False)

    flow_label: ClassVar[Any] = _of_route("_flow_label", "20 bits.")
    sgid_index: ClassVar[Any] = _of_route("_sgid_index", "Which of the local GIDs is the source.")
    hop_limit: ClassVar[Any] = _of_route("_hop_limit", "The IP time to live.")
    traffic_class: ClassVar[Any] = _of_route("_traffic_class", "The IP type of service.")

    def __post_init__(self, gr: GlobalRoute | None) -> None:
        self.is_global = int(self.is_global)
        if self.is_global:
            if gr is None:
                raise PyverbsUserError("a global address needs a GlobalRoute (gr)")
            self.raw_dgid = gr.raw_dgid
            self._flow_label, self._sgid_index = gr.flow_label, gr.sgid_index
            self._hop_limit, self._traffic_class = gr.hop_limit, gr.traffic_class

    @property
    def dgid(self) -> str | None:
        return self.raw_dgid.hex(":", 2) if self.is_global else None

    @dgid.setter
    def dgid(self, val: str) -> None:
        if self.is_global:
            self.raw_dgid = gid_bytes(val)

    def vector(self) -> AddressVector:
        """What the device takes. VerbsError(EINVAL) without a global route: RoCE needs it (IBTA A17)."""
        if not self.is_global:
            raise VerbsError(errno.EINVAL, "an address over RoCE needs its global route")
        if self.raw_dgid == NO_GID:
            raise VerbsError(errno.EINVAL, "the GID is zero")
        return AddressVector(
            ip_of(self.raw_dgid), self.port_num, self._sgid_index, self._traffic_class, self._flow_label,
            self._hop_limit, self.sl,
        )  # fmt: skip

    @classmethod
    def of(cls, vector: AddressVector | None) -> "AHAttr":
        attr = cls(port_num=0)
        if vector is not None:
            attr.is_global, attr.raw_dgid = 1, gid_of(vector.ip)
            attr.port_num, attr.sl = vector.port_num, vector.service_level
            attr._sgid_index, attr._traffic_class = vector.sgid_index, vector.traffic_class
            attr._flow_label, attr._hop_limit = vector.flow_label, vector.hop_limit
        return attr

    def pairs(self) -> list[tuple[str, Any]]:
        """What `str()` shows, line by line."""
        rows: list[tuple[str, Any]] = [
            ("port num", self.port_num), ("sl", self.sl), ("source path bits", self.src_path_bits),
            ("dlid", self.dlid), ("static rate", self.static_rate), ("is global", self.is_global),
        ]  # fmt: skip
        if self.is_global:
            rows += [
                ("dgid", self.dgid), ("flow label", self._flow_label), ("sgid index", self._sgid_index),
                ("hop limit", self._hop_limit), ("traffic_class", self._traffic_class),
            ]  # fmt: skip
        return rows

    def __str__(self) -> str:
        return listing(self.pairs(), "  ")


def sender_gid(header: bytes) -> bytes:
    """The GID that sent a datagram, from the 40 bytes before its payload.

    RoCE v2 over IPv6 leaves the IPv6 header there, which is a GRH; over IPv4 its header lies in the last 20
    bytes (IBTA Annex A17.4.5.1).
    """
    if header[0] >> 4 == 6:
        return header[8:24]
    return bytes(10) + b"\xff\xff" + header[32:36]


class AH(DeviceObject[AddressHandle]):
    """An address handle: of `attr=`, or of a datagram that came: `wc=`, `grh=` (an address), `port_num=`.

    Requests that are under way keep what they need of a handle that is closed.
    """

    __slots__ = ("pd",)
    PARENTS = "pd"
    DESTROY = "destroy_ah"
    REFUSED = "Failed to destroy AH"

    def __init__(self, pd: PD, **kwargs: Any) -> None:
        super().__init__(pd.device)
        attr = (
            kwargs["attr"] if len(kwargs) == 1 else _answer(kwargs["wc"], kwargs["grh"], kwargs["port_num"])
        )
        self._make("Failed to create AH", lambda: self.device.nic.create_ah(pd.native, attr.vector()))
        self.pd: PD | None = pd
        pd.ahs.add(self)


def _answer(wc: WC, grh: int, port_num: int) -> AHAttr:
    """Where the answer to a datagram goes (ibv_init_ah_from_wc)."""
    attr = AHAttr(dlid=wc.slid, sl=wc.sl, src_path_bits=wc.dlid_path_bits, port_num=port_num)
    if wc.wc_flags & e.IBV_WC_GRH:
        if not grh:
            raise PyverbsRDMAError("Failed to create AH", errno.EINVAL)
        attr.is_global = 1
        attr.raw_dgid = sender_gid(mem_alloc.read(grh, GRH_BYTES))
        attr._hop_limit = 0xFF
    return attr


__all__ = ["AH", "GID", "GRH", "AHAttr", "GlobalRoute", "sender_gid"]
