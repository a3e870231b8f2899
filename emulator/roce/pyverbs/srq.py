"""`pyverbs.srq`: shared receive queues. Those for XRC and tag matching are refused (EOPNOTSUPP)."""

from __future__ import annotations

import errno
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, NoReturn

from emulator.roce.nic.verbs import SrqAttr as SrqMask
from emulator.roce.nic.verbs import VerbsError
from emulator.roce.pyverbs.base import (
    Children,
    PyverbsCM,
    PyverbsObject,
    bury,
    close_children,
    forsake,
    give_back,
    refusal,
)
from emulator.roce.pyverbs.device import Context
from emulator.roce.pyverbs.enums_queues import ibv_ops_flags, ibv_ops_wr_opcode, ibv_srq_type
from emulator.roce.pyverbs.pd import PD
from emulator.roce.pyverbs.pyverbs_error import PyverbsRDMAError, PyverbsUserError
from emulator.roce.pyverbs.wr import SGE, RecvWR, elements

if TYPE_CHECKING:
    from emulator.roce.nic.shared_receive import SharedReceiveQueue
    from emulator.roce.pyverbs.cq import CQ, CQEX


class SrqAttr(PyverbsObject):
    """struct ibv_srq_attr."""

    __slots__ = ("max_sge", "max_wr", "srq_limit")

    def __init__(self, max_wr: int = 100, max_sge: int = 1, srq_limit: int = 0) -> None:
        self.max_wr = max_wr
        self.max_sge = max_sge
        self.srq_limit = srq_limit


class SrqInitAttr(PyverbsObject):
    """struct ibv_srq_init_attr."""

    __slots__ = ("max_sge", "max_wr", "srq_limit")

    def __init__(self, attr: SrqAttr | None = None) -> None:
        self.max_wr = attr.max_wr if attr is not None else 0
        self.max_sge = attr.max_sge if attr is not None else 0
        self.srq_limit = attr.srq_limit if attr is not None else 0


class SrqInitAttrEx(PyverbsObject):
    """struct ibv_srq_init_attr_ex."""

    __slots__ = (
        "comp_mask", "cq", "max_num_tags", "max_ops", "max_sge", "max_wr", "pd", "srq_limit", "srq_type",
        "xrcd",
    )  # fmt: skip

    def __init__(self, max_wr: int = 100, max_sge: int = 1, srq_limit: int = 0) -> None:
        self.max_wr = max_wr
        self.max_sge = max_sge
        self.srq_limit = srq_limit
        self.comp_mask = 0
        self.srq_type: int = ibv_srq_type.IBV_SRQT_BASIC
        self.max_num_tags = 0
        self.max_ops = 0
        self.cq: CQ | CQEX | None = None
        self.pd: PD | None = None
        self.xrcd: object = None


class OpsWr(PyverbsCM):
    """struct ibv_ops_wr: a request of tag matching, which no queue here takes."""

    __slots__ = (
        "flags", "handle", "mask", "next_wr", "opcode", "recv_wr_id", "sges", "tag", "unexpected_cnt",
        "wr_id",
    )  # fmt: skip

    def __init__(
        self,
        wr_id: int = 0,
        opcode: int = ibv_ops_wr_opcode.IBV_WR_TAG_ADD,
        flags: int = ibv_ops_flags.IBV_OPS_SIGNALED,
        next_wr: OpsWr | None = None,
        unexpected_cnt: int = 0,
        recv_wr_id: int = 0,
        num_sge: int | None = None,
        tag: int = 0,
        mask: int = 0,
        sg_list: Sequence[SGE] | None = None,
    ) -> None:
        self.wr_id = wr_id
        self.opcode = opcode
        self.flags = flags
        self.next_wr = next_wr
        self.unexpected_cnt = unexpected_cnt
        self.recv_wr_id = recv_wr_id
        self.tag = tag
        self.mask = mask
        self.handle = 0
        self.sges = elements(num_sge or 0, sg_list)


class SRQ(PyverbsCM):
    """A shared receive queue of a `PD` (with `SrqInitAttr`) or of a `Context` (with `SrqInitAttrEx`)."""

    __slots__ = ("_queue", "cq", "device", "qps")

    def __init__(self, creator: PD | Context, attr: SrqInitAttr | SrqInitAttrEx) -> None:
        self._queue: SharedReceiveQueue | None = None
        self.cq: CQ | CQEX | None = None
        self.qps: Children = weakref.WeakSet()
        if isinstance(creator, PD) and isinstance(attr, SrqInitAttr):
            self._create_srq(creator, attr)
        elif isinstance(creator, Context) and isinstance(attr, SrqInitAttrEx):
            self._create_srq_ex(creator, attr)
        else:
            raise PyverbsRDMAError("Srq needs either Context or PD for creation")

    def _create_srq(self, pd: PD, init_attr: SrqInitAttr) -> None:
        self._create(pd, init_attr.max_wr, init_attr.max_sge)

    def _create_srq_ex(self, context: Context, init_attr_ex: SrqInitAttrEx) -> None:
        if init_attr_ex.srq_type != ibv_srq_type.IBV_SRQT_BASIC or init_attr_ex.xrcd is not None:
            raise PyverbsRDMAError("Failed to create SRQ", errno.EOPNOTSUPP)
        if init_attr_ex.pd is None:
            raise PyverbsRDMAError("Failed to create SRQ", errno.EINVAL)
        self._create(init_attr_ex.pd, init_attr_ex.max_wr, init_attr_ex.max_sge)

    def _create(self, pd: PD, max_wr: int, max_sge: int) -> None:
        bury()
        device = self.device = pd.device
        try:
            with device.turn():
                self._queue = device.nic.create_srq(pd.domain, max_wr, max_sge)
        except VerbsError as error:
            raise refusal("Failed to create SRQ", error) from error
        pd.srqs.add(self)

    def __del__(self) -> None:
        if getattr(self, "_queue", None) is not None:
            forsake(self)

    @property
    def queue(self) -> SharedReceiveQueue:
        """The device's own. Not in pyverbs."""
        if self._queue is None:
            raise PyverbsUserError("the SRQ is closed")
        return self._queue

    def close(self) -> None:
        """Close the queue pairs that receive from it, and the queue."""
        if self._queue is None:
            return
        close_children(self.qps)
        give_back(self.device, self.device.nic.destroy_srq, self._queue, "Failed to destroy SRQ")
        self._queue = self.cq = None

    def get_srq_num(self) -> NoReturn:
        """Only an XRC queue has a number (EOPNOTSUPP)."""
        raise PyverbsRDMAError("Failed to retrieve SRQ number", errno.EOPNOTSUPP)

    def modify(self, attr: SrqAttr, comp_mask: int) -> None:
        """Set the size or arm the limit, as `comp_mask` (ibv_srq_attr_mask) says."""
        try:
            with self.device.turn():
                self.queue.modify(SrqMask(comp_mask), max_wr=attr.max_wr, limit=attr.srq_limit)
        except VerbsError as error:
            raise refusal("Failed to modify SRQ", error) from error

    def query(self) -> SrqAttr:
        """Size and limit; the limit is 0 once it was reached."""
        queue = self.queue
        return SrqAttr(queue.max_wr, queue.max_sge, queue.limit)

    def post_recv(self, wr: RecvWR, bad_wr: RecvWR | None = None) -> None:
        """Post a receive and those chained to it. Those before one that is refused are posted."""
        queue = self.queue
        one: RecvWR | None = wr
        with self.device.turn():
            while one is not None:
                try:
                    queue.post_recv(one.request())
                except VerbsError as error:
                    if bad_wr is not None:
                        bad_wr.become(one)
                    raise refusal("Failed to post receive to SRQ.", error) from error
                one = one.next_wr

    def post_srq_ops(self, wr: OpsWr, bad_wr: OpsWr | None = None) -> NoReturn:
        """There is no tag matching (EOPNOTSUPP)."""
        raise PyverbsRDMAError("post SRQ ops failed.", errno.EOPNOTSUPP)
