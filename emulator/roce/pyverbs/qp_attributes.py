"""Attributes of queue pairs: what they are made of and what is set later. Part of `pyverbs.qp`."""

import errno
from copy import copy
from dataclasses import dataclass
from typing import Any, Final

from emulator.roce.nic import verbs
from emulator.roce.pyverbs import enums as e
from emulator.roce.pyverbs import utils
from emulator.roce.pyverbs.addr import AHAttr
from emulator.roce.pyverbs.base import PyverbsCM, PyverbsObject, listing, shown
from emulator.roce.pyverbs.cq import CQ, CQEX, flags_to_str
from emulator.roce.pyverbs.pd import PD
from emulator.roce.pyverbs.pyverbs_error import PyverbsUserError
from emulator.roce.pyverbs.srq import SRQ

_COMP_MASK: Final = {
    1: "PD", 2: "XRCD", 4: "Create Flags", 8: "Max TSO header", 16: "Indirection Table", 32: "RX hash",
}  # fmt: skip
_CREATE_FLAGS: Final = {
    1: "Block self mcast loopback", 2: "Scatter FCS", 4: "CVLAN stripping", 8: "Source QPN",
    16: "PCI write end padding",
}  # fmt: skip

_AS_THEY_ARE: Final = (
    "qkey", "rq_psn", "sq_psn", "pkey_index", "max_rd_atomic", "max_dest_rd_atomic", "min_rnr_timer",
    "port_num", "timeout", "rnr_retry",
)  # fmt: skip
"""Attributes that the device has under the same name, with the same values."""

_CAPS: Final = ("max_send_wr", "max_recv_wr", "max_send_sge", "max_recv_sge", "max_inline_data")


@dataclass(slots=True, eq=False)
class QPCap(PyverbsObject):
    """struct ibv_qp_cap: the bounds of both queues."""

    max_send_wr: int = 1
    max_recv_wr: int = 10
    max_send_sge: int = 1
    max_recv_sge: int = 1
    max_inline_data: int = 0

    def __str__(self) -> str:
        return listing((name.replace("_", " "), getattr(self, name)) for name in _CAPS)


NO_CAP: Final = QPCap(0, 0, 0, 0, 0)


class _InitAttr(PyverbsObject):
    """What the two forms of initial attributes share; `cap` gives and takes all bounds."""

    __slots__ = (*_CAPS, "qp_context", "qp_type", "recv_cq", "send_cq", "sq_sig_all", "srq")

    max_send_wr: int
    max_recv_wr: int

    def __init__(
        self,
        qp_type: int = e.IBV_QPT_UD,
        qp_context: object = None,
        scq: CQ | CQEX | None = None,
        rcq: CQ | CQEX | None = None,
        srq: SRQ | None = None,
        cap: QPCap | None = None,
        sq_sig_all: int = 1,
    ) -> None:
        self.cap = cap if cap is not None else NO_CAP
        self.qp_type = qp_type
        self.qp_context = qp_context
        self.send_cq = _completion_queue(scq)
        self.recv_cq = _completion_queue(rcq)
        self.srq = srq
        self.sq_sig_all = sq_sig_all

    @property
    def cap(self) -> QPCap:
        """A copy of the bounds; setting it copies, too."""
        return QPCap(*_bounds(self))

    @cap.setter
    def cap(self, val: QPCap) -> None:
        _copy_caps(val, self)

    def capabilities(self) -> verbs.QpCapabilities:
        """What the device takes. VerbsError(EINVAL) for a negative number. Not in pyverbs."""
        values = _bounds(self)
        if min(values) < 0:
            raise verbs.VerbsError(errno.EINVAL, "a bound of a queue pair is negative")
        return verbs.QpCapabilities(*values)

    def _listing(self, indent: str, inner: str = "") -> str:
        rows = [("QP type", utils.qp_type_to_str(self.qp_type)), ("SQ sig. all", self.sq_sig_all)]
        bounds = [(inner + name.replace("_", " "), getattr(self, name)) for name in _CAPS]
        return listing(rows) + "QP caps:\n" + listing(bounds, indent)


def _bounds(record: object) -> list[int]:
    return [getattr(record, name) for name in _CAPS]


def _copy_caps(src: QPCap | None, dst: "_InitAttr | QPAttr") -> None:
    if src is None:
        return
    if isinstance(dst, QPAttr):
        dst.cap = src
        return
    for name in _CAPS:
        setattr(dst, name, getattr(src, name))


def _completion_queue(queue: object) -> CQ | CQEX | None:
    if queue is None or isinstance(queue, (CQ, CQEX)):
        return queue
    raise PyverbsUserError(f"Expected CQ/CQEX, got {type(queue)}")


class QPInitAttr(_InitAttr):
    __slots__ = ()

    def __str__(self) -> str:
        return self._listing("    ")


class QPInitAttrEx(_InitAttr):
    __slots__ = (
        "comp_mask", "create_flags", "hash_conf", "ind_table", "max_tso_header", "pd", "send_ops_flags",
        "source_qpn", "xrcd",
    )  # fmt: skip

    def __init__(
        self,
        qp_type: int = e.IBV_QPT_UD,
        qp_context: object = None,
        scq: CQ | CQEX | None = None,
        rcq: CQ | CQEX | None = None,
        srq: SRQ | None = None,
        cap: QPCap | None = None,
        sq_sig_all: int = 0,
        comp_mask: int = 0,
        pd: PD | None = None,
        xrcd: object = None,
        create_flags: int = 0,
        max_tso_header: int = 0,
        source_qpn: int = 0,
        hash_conf: object = None,
        ind_table: object = None,
        send_ops_flags: int = 0,
    ) -> None:
        super().__init__(qp_type, qp_context, scq, rcq, srq, cap, sq_sig_all)
        self.comp_mask = comp_mask
        self.pd = pd
        self.xrcd = xrcd
        self.create_flags = create_flags
        self.max_tso_header = max_tso_header
        self.source_qpn = source_qpn
        self.hash_conf = hash_conf
        self.ind_table = ind_table
        self.send_ops_flags = send_ops_flags

    def mask_to_str(self, mask: int) -> str:
        return flags_to_str(mask, _COMP_MASK)

    def flags_to_str(self, flags: int) -> str:
        return flags_to_str(flags, _CREATE_FLAGS)

    def __str__(self) -> str:
        more = [
            ("comp mask", self.mask_to_str(self.comp_mask)),
            ("create flags", self.flags_to_str(self.create_flags)),
            ("max TSO header", self.max_tso_header),
            ("Source QPN", self.source_qpn),
        ]
        return self._listing("", "  ") + listing(more)


def _copied(name: str, doc: str) -> Any:
    """A record inside of another, which gives and takes copies, as in pyverbs; None changes nothing."""

    def write(record: object, val: object) -> None:
        if val is not None:
            setattr(record, name, copy(val))

    return property(lambda record: copy(getattr(record, name)), write, doc=doc)


class QPAttr(PyverbsObject):
    __slots__ = (
        "_ah_attr", "_alt_ah_attr", "_cap", "alt_pkey_index", "alt_port_num", "alt_timeout", "cur_qp_state",
        "dest_qp_num", "en_sqd_async_notify", "max_dest_rd_atomic", "max_rd_atomic", "min_rnr_timer",
        "path_mig_state", "path_mtu", "pkey_index", "port_num", "qkey", "qp_access_flags", "qp_state",
        "rate_limit", "retry_cnt", "rnr_retry", "rq_psn", "sq_draining", "sq_psn", "timeout",
    )  # fmt: skip

    def __init__(
        self,
        qp_state: int = e.IBV_QPS_INIT,
        cur_qp_state: int = e.IBV_QPS_RESET,
        port_num: int = 1,
        path_mtu: int = e.IBV_MTU_1024,
    ) -> None:
        self.qp_state = qp_state
        self.cur_qp_state = cur_qp_state
        self.path_mtu = path_mtu
        self.path_mig_state = 0
        self.qkey = self.rq_psn = self.sq_psn = self.dest_qp_num = self.qp_access_flags = 0
        self._cap = NO_CAP
        self._ah_attr = AHAttr(port_num=0)
        self._alt_ah_attr = AHAttr(port_num=0)
        self.pkey_index = self.alt_pkey_index = 0
        self.en_sqd_async_notify = self.sq_draining = 0
        self.max_rd_atomic = self.max_dest_rd_atomic = self.min_rnr_timer = 0
        self.port_num = port_num
        self.timeout = self.retry_cnt = self.rnr_retry = 0
        self.alt_port_num = self.alt_timeout = self.rate_limit = 0

    cap = _copied("_cap", "The bounds of both queues.")
    ah_attr = _copied("_ah_attr", "The way to the peer.")
    alt_ah_attr = _copied("_alt_ah_attr", "The alternate way, which is never taken.")

    def _copy_ah(self, ah_attr: AHAttr | None, is_alt: bool = False) -> None:
        if is_alt:
            self.alt_ah_attr = ah_attr
        else:
            self.ah_attr = ah_attr

    def attributes(self, mask: verbs.QpAttr) -> verbs.QpAttributes:
        """What the device takes: those in the mask. VerbsError(EINVAL) for values that do not exist.
        Not in pyverbs."""
        vector: verbs.AddressVector | None = self._ah_attr.vector() if mask & verbs.QpAttr.AV else None
        try:
            return verbs.QpAttributes(
                state=verbs.QpState(self.qp_state) if mask & verbs.QpAttr.STATE else verbs.QpState.RESET,
                current_state=verbs.QpState(self.cur_qp_state)
                if mask & verbs.QpAttr.CUR_STATE
                else verbs.QpState.RESET,
                path_mtu=verbs.Mtu(self.path_mtu) if mask & verbs.QpAttr.PATH_MTU else verbs.Mtu.MTU_256,
                dest_qpn=self.dest_qp_num,
                access=verbs.Access(self.qp_access_flags),
                av=vector,
                enable_sqd_notify=bool(self.en_sqd_async_notify),
                retry_count=self.retry_cnt,
                **{name: getattr(self, name) for name in _AS_THEY_ARE},
            )
        except ValueError as error:
            raise verbs.VerbsError(errno.EINVAL, str(error)) from error

    @classmethod
    def of(cls, given: verbs.QpAttributes) -> "QPAttr":
        """From what the device gives. Not in pyverbs."""
        attr = cls(int(given.state), int(given.current_state), given.port_num, int(given.path_mtu))
        for name in _AS_THEY_ARE:
            setattr(attr, name, getattr(given, name))
        attr.dest_qp_num, attr.qp_access_flags = given.dest_qpn, int(given.access)
        attr._cap = QPCap(*_bounds(given.capabilities))
        attr._ah_attr = AHAttr.of(given.av)
        attr.en_sqd_async_notify, attr.sq_draining = int(given.enable_sqd_notify), int(given.sq_draining)
        attr.retry_cnt = given.retry_count
        return attr

    def __str__(self) -> str:
        first = [
            ("QP state", utils.qp_state_to_str(self.qp_state)),
            ("QP current state", utils.qp_state_to_str(self.cur_qp_state)),
            ("Path MTU", utils.mtu_to_str(self.path_mtu)),
            ("Path mig. state", utils.mig_state_to_str(self.path_mig_state)),
            ("QKey", self.qkey), ("RQ PSN", self.rq_psn), ("SQ PSN", self.sq_psn),
            ("Dest QP number", self.dest_qp_num),
            ("QP access flags", utils.access_flags_to_str(self.qp_access_flags)),
        ]  # fmt: skip
        last = [
            ("PKey index", self.pkey_index), ("Alt. PKey index", self.alt_pkey_index),
            ("En. SQD async notify", self.en_sqd_async_notify), ("SQ draining", self.sq_draining),
            ("Max RD atomic", self.max_rd_atomic), ("Max dest. RD atomic", self.max_dest_rd_atomic),
            ("Min RNR timer", self.min_rnr_timer), ("Port number", self.port_num), ("Timeout", self.timeout),
            ("Retry counter", self.retry_cnt), ("RNR retry", self.rnr_retry),
            ("Alt. port number", self.alt_port_num), ("Alt. timeout", self.alt_timeout),
            ("Rate limit", self.rate_limit),
        ]  # fmt: skip
        bounds = [(name.replace("_", " "), getattr(self._cap, name)) for name in _CAPS]
        return (
            listing(first)
            + "QP caps:\n"
            + listing(bounds, "  ")
            + "AH Attr:\n"
            + listing(self._ah_attr.pairs(), "  ")
            + "Alt. AH Attr:\n"
            + listing(self._alt_ah_attr.pairs(), "  ")
            + listing(last)
        )


@dataclass(slots=True, eq=False)
class ECE(PyverbsCM):
    """struct ibv_ece: extensions that two devices of one vendor may agree on; this one has none."""

    vendor_id: int = 0
    options: int = 0
    comp_mask: int = 0

    __str__ = shown(
        "ECE:\n",
        ("Vendor ID", "vendor_id", hex), ("Options", "options", hex), ("Comp Mask", "comp_mask", hex),
    )  # fmt: skip


@dataclass(slots=True, eq=False)
class DataBuffer(PyverbsCM):
    """struct ibv_data_buf: bytes for `QPEx.wr_set_inline_data_list`, by their address."""

    addr: int
    length: int
