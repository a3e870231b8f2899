"""`pyverbs.srq`: shared receive queues. Those for XRC and tag matching are refused (EOPNOTSUPP)."""

import errno
from collections.abc import Sequence
from dataclasses import InitVar, dataclass, field
from typing import NoReturn

from emulator.roce.nic.shared_receive import SharedReceiveQueue
from emulator.roce.nic.verbs import Sge
from emulator.roce.nic.verbs import SrqAttr as SrqMask
from emulator.roce.pyverbs import enums as e
from emulator.roce.pyverbs.base import Children, DeviceObject, PyverbsCM, PyverbsObject, asking
from emulator.roce.pyverbs.cq import CQ, CQEX
from emulator.roce.pyverbs.device import Context
from emulator.roce.pyverbs.pd import PD
from emulator.roce.pyverbs.pyverbs_error import PyverbsRDMAError
from emulator.roce.pyverbs.wr import SGE, RecvWR, elements, post_chain


@dataclass(slots=True, eq=False)
class SrqAttr(PyverbsObject):
    max_wr: int = 100
    max_sge: int = 1
    srq_limit: int = 0


@dataclass(slots=True, eq=False)
class SrqInitAttr(PyverbsObject):
    attr: InitVar[SrqAttr | None] = None
    max_wr: int = field(default=0, init=False)
    max_sge: int = field(default=0, init=False)
    srq_limit: int = field(default=0, init=False)

    def __post_init__(self, attr: SrqAttr | None) -> None:
        if attr is not None:
            self.max_wr, self.max_sge, self.srq_limit = attr.max_wr, attr.max_sge, attr.srq_limit


@dataclass(slots=True, eq=False)
class SrqInitAttrEx(SrqAttr):
    comp_mask: int = field(default=0, init=False)
    srq_type: int = field(default=e.IBV_SRQT_BASIC, init=False)
    max_num_tags: int = field(default=0, init=False)
    max_ops: int = field(default=0, init=False)
    cq: CQ | CQEX | None = field(default=None, init=False)
    pd: PD | None = field(default=None, init=False)
    xrcd: object = field(default=None, init=False)


@dataclass(slots=True, eq=False)
class OpsWr(PyverbsCM):
    """struct ibv_ops_wr: a request of tag matching, which no queue here takes."""

    wr_id: int = 0
    opcode: int = e.IBV_WR_TAG_ADD
    flags: int = e.IBV_OPS_SIGNALED
    next_wr: "OpsWr | None" = None
    unexpected_cnt: int = 0
    recv_wr_id: int = 0
    num_sge: InitVar[int | None] = None
    tag: int = 0
    mask: int = 0
    sg_list: InitVar[Sequence[SGE] | None] = None
    handle: int = field(default=0, init=False)
    sges: tuple[Sge, ...] = field(default=(), init=False)

    def __post_init__(self, num_sge: int | None, sg_list: Sequence[SGE] | None) -> None:
        self.sges = elements(num_sge or 0, sg_list)


class SRQ(DeviceObject[SharedReceiveQueue]):
    """A shared receive queue of a `PD` (with `SrqInitAttr`) or of a `Context` (with `SrqInitAttrEx`)."""

    __slots__ = ("cq", "qps")
    CHILDREN = "qps"
    PARENTS = "cq"
    DESTROY = "destroy_srq"
    REFUSED = "Failed to destroy SRQ"

    qps: Children

    def __init__(self, creator: PD | Context, attr: SrqInitAttr | SrqInitAttrEx) -> None:
        self.cq: CQ | CQEX | None = None
        if isinstance(creator, PD) and isinstance(attr, SrqInitAttr):
            self._create_srq(creator, attr)
        elif isinstance(creator, Context) and isinstance(attr, SrqInitAttrEx):
            self._create_srq_ex(creator, attr)
        else:
            raise PyverbsRDMAError("Srq needs either Context or PD for creation")

    def _create_srq(self, pd: PD, init_attr: SrqInitAttr | SrqInitAttrEx) -> None:
        super().__init__(pd.device)
        nic, max_wr, max_sge = self.device.nic, init_attr.max_wr, init_attr.max_sge
        self._make("Failed to create SRQ", lambda: nic.create_srq(pd.native, max_wr, max_sge))
        pd.srqs.add(self)

    def _create_srq_ex(self, context: Context, init_attr_ex: SrqInitAttrEx) -> None:
        if init_attr_ex.srq_type != e.IBV_SRQT_BASIC or init_attr_ex.xrcd is not None:
            raise PyverbsRDMAError("Failed to create SRQ", errno.EOPNOTSUPP)
        if init_attr_ex.pd is None:
            raise PyverbsRDMAError("Failed to create SRQ", errno.EINVAL)
        self._create_srq(init_attr_ex.pd, init_attr_ex)

    def get_srq_num(self) -> NoReturn:
        """Only an XRC queue has a number (EOPNOTSUPP)."""
        raise PyverbsRDMAError("Failed to retrieve SRQ number", errno.EOPNOTSUPP)

    def modify(self, attr: SrqAttr, comp_mask: int) -> None:
        """Set the size or arm the limit, as `comp_mask` (ibv_srq_attr_mask) says."""
        with asking(self.device, "Failed to modify SRQ"):
            self.native.modify(SrqMask(comp_mask), max_wr=attr.max_wr, limit=attr.srq_limit)

    def query(self) -> SrqAttr:
        """Size and limit; the limit is 0 once it was reached."""
        queue = self.native
        return SrqAttr(queue.max_wr, queue.max_sge, queue.limit)

    def post_recv(self, wr: RecvWR, bad_wr: RecvWR | None = None) -> None:
        """Post a receive and those chained to it. Those before one that is refused are posted."""
        with self.device.turn():
            post_chain(wr, bad_wr, self.native.post_recv, "Failed to post receive to SRQ.")

    def post_srq_ops(self, wr: OpsWr, bad_wr: OpsWr | None = None) -> NoReturn:
        """There is no tag matching (EOPNOTSUPP)."""
        raise PyverbsRDMAError("post SRQ ops failed.", errno.EOPNOTSUPP)
