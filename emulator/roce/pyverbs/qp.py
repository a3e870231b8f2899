"""`pyverbs.qp`: queue pairs and their extended form. What they are made of is in `qp_attributes.py`.

In the extended form requests are built by calls between `wr_start` and `wr_complete`. `wr_complete` posts all
requests or none: what makes one of them impossible is found while it is built and told then, as in the
drivers of libibverbs.
"""

import errno
from collections.abc import Callable, Sequence
from typing import Final

from emulator.roce.nic.pending_send import ATOMIC_BYTES
from emulator.roce.nic.queue_pair import OPCODES, QueuePair
from emulator.roce.nic.states import mask_to
from emulator.roce.nic.verbs import QpAttr, QpState, QpType, SendFlags, SendOpcode, Sge, VerbsError
from emulator.roce.nic.work_requests import SendRequest
from emulator.roce.pyverbs import base, mem_alloc, posting
from emulator.roce.pyverbs import enums as e
from emulator.roce.pyverbs.addr import AH
from emulator.roce.pyverbs.cq import CQ, CQEX
from emulator.roce.pyverbs.device import Context
from emulator.roce.pyverbs.mr import MW, MWBind, MWBindInfo
from emulator.roce.pyverbs.pd import PD
from emulator.roce.pyverbs.posting import FLAGS
from emulator.roce.pyverbs.pyverbs_error import PyverbsRDMAError, PyverbsUserError
from emulator.roce.pyverbs.qp_attributes import (
    ECE,
    DataBuffer,
    QPAttr,
    QPCap,
    QPInitAttr,
    QPInitAttrEx,
    _copy_caps,
)
from emulator.roce.pyverbs.srq import SRQ
from emulator.roce.pyverbs.utils import GID, gid_bytes, qp_state_to_str, qp_type_to_str
from emulator.roce.pyverbs.wr import SGE, RecvWR, SendWR, elements, post_chain
from emulator.roce.wire.flow import gid_of

SUPPORTED_COMP_MASK: Final = (
    e.IBV_QP_INIT_ATTR_PD | e.IBV_QP_INIT_ATTR_CREATE_FLAGS | e.IBV_QP_INIT_ATTR_SEND_OPS_FLAGS
)

_GRANTED_BY: Final = {
    opcode: int(e.ibv_qp_create_send_ops_flags[f"IBV_QP_EX_WITH_{opcode.name}"]) for opcode in SendOpcode
}
"""The flag by which a program asks for each opcode."""
_SUPPORTED: Final = {
    kind: sum(_GRANTED_BY[opcode] for opcode in opcodes.values()) for kind, opcodes in OPCODES.items()
}


def kind_of(qp_type: int) -> QpType:
    """The device's own. VerbsError: EOPNOTSUPP for types that other devices have, EINVAL for what is none."""
    try:
        return QpType(qp_type)
    except ValueError:
        known = qp_type in e.ibv_qp_type.__members__.values()
        number = errno.EOPNOTSUPP if known else errno.EINVAL
        raise VerbsError(number, f"there are no queue pairs of type {qp_type_to_str(qp_type)}") from None


class QP(base.DeviceObject[QueuePair]):
    """A queue pair of a `PD` (with `QPInitAttr`) or of a `Context` (with `QPInitAttrEx`).

    With a `qp_attr` it is taken as far as that carries it: a UD pair to RTS, an RC pair to INIT.
    """

    __slots__ = ("_sig_all", "context", "mws", "pd", "rcq", "scq", "srq")
    CHILDREN = "mws"
    PARENTS = "pd scq rcq srq"
    DESTROY = "destroy_qp"
    REFUSED = "Failed to destroy QP"

    mws: base.Children

    def __init__(
        self, creator: PD | Context, init_attr: QPInitAttr | QPInitAttrEx, qp_attr: QPAttr | None = None
    ) -> None:
        self.scq: CQ | CQEX | None = None
        self.rcq: CQ | CQEX | None = None
        self.srq: SRQ | None = None
        if isinstance(creator, Context) and isinstance(init_attr, QPInitAttrEx):
            self.context: Context = creator
            self._create_qp_ex(creator, init_attr)
            creator.qps.add(self)
        elif isinstance(creator, PD) and isinstance(init_attr, QPInitAttr):
            self.context = creator.ctx
            self._create_qp(creator, init_attr)
        else:
            raise TypeError(f"no queue pair from {type(creator).__name__} with {type(init_attr).__name__}")
        if qp_attr is not None:
            if self.qp_type == e.IBV_QPT_UD:
                self.to_rts(qp_attr)
            else:
                self.to_init(qp_attr)

    def _create_qp_ex(self, ctx: Context, attr: QPInitAttrEx) -> None:
        if attr.comp_mask & ~SUPPORTED_COMP_MASK or (
            attr.comp_mask & e.IBV_QP_INIT_ATTR_CREATE_FLAGS and attr.create_flags
        ):
            raise PyverbsRDMAError("Failed to create QP", errno.EOPNOTSUPP)
        if not attr.comp_mask & e.IBV_QP_INIT_ATTR_PD or attr.pd is None:
            raise PyverbsRDMAError("Failed to create QP", errno.EINVAL)
        self._create_qp(attr.pd, attr)

    def _create_qp(self, pd: PD, attr: QPInitAttr | QPInitAttrEx) -> None:
        send_cq, recv_cq, srq = attr.send_cq, attr.recv_cq, attr.srq
        super().__init__(pd.device)

        def make() -> QueuePair:
            kind = kind_of(attr.qp_type)
            if send_cq is None or recv_cq is None:
                raise VerbsError(errno.EINVAL, "a queue pair needs both of its completion queues")
            pair: QueuePair = self.device.nic.create_qp(
                pd.native,
                kind,
                send_cq.native,
                recv_cq.native,
                attr.capabilities(),
                signal_all=bool(attr.sq_sig_all),
                srq=None if srq is None else srq.native,
            )
            return pair

        self._make("Failed to create QP", make)
        self._sig_all = int(attr.sq_sig_all)
        self.scq, self.rcq, self.srq = send_cq, recv_cq, srq
        self.pd: PD | None = pd
        for parent in (pd, send_cq, recv_cq, srq):
            if parent is not None:
                parent.qps.add(self)

    @property
    def qp_type(self) -> int:
        return int(self.native.type)

    @property
    def qp_state(self) -> int:
        """An `ibv_qp_state`: always the device's own, in libibverbs the last one that was asked for."""
        return int(self.native.state)

    qp_num = base.reads("native.number", "The number that the peer sends to.")

    def _give_back(self, native: QueuePair) -> None:
        # It leaves all groups; what was posted and is not complete is gone.
        with self.device.turn():
            for group in self.device.nic.groups.groups_of(native):
                self.device.nic.detach_mcast(native, gid_of(group))
        super()._give_back(native)

    def _get_comp_mask(self, dst: str) -> int:
        """What a move to INIT, RTR or RTS must name."""
        return int(mask_to(self.native.type, QpState[dst]))

    def _modify(self, qp_attr: QPAttr, mask: int, refused: str) -> None:
        wanted = QpAttr(mask)
        with base.refusing(refused):
            attributes = qp_attr.attributes(wanted)
            with self.device.turn():
                self.native.modify(attributes, wanted)

    def to_init(self, qp_attr: QPAttr) -> None:
        """From RESET to INIT."""
        qp_attr.qp_state = e.IBV_QPS_INIT
        self._modify(qp_attr, self._get_comp_mask("INIT"), "Failed to modify QP state to init")

    def to_rtr(self, qp_attr: QPAttr) -> None:
        """To RTR, through INIT where it is not there yet."""
        if self.qp_state != e.IBV_QPS_INIT:
            self.to_init(qp_attr)
        qp_attr.qp_state = e.IBV_QPS_RTR
        self._modify(qp_attr, self._get_comp_mask("RTR"), "Failed to modify QP state to RTR")

    def to_rts(self, qp_attr: QPAttr) -> None:
        """To RTS, through what comes before."""
        if self.qp_state != e.IBV_QPS_RTR:
            self.to_rtr(qp_attr)
        qp_attr.qp_state = e.IBV_QPS_RTS
        self._modify(qp_attr, self._get_comp_mask("RTS"), "Failed to modify QP state to RTS")

    def modify(self, qp_attr: QPAttr, comp_mask: int) -> None:
        """Set what `comp_mask` (ibv_qp_attr_mask) names."""
        self._modify(qp_attr, int(comp_mask), "Failed to modify QP")

    def query(self, attr_mask: int) -> tuple[QPAttr, QPInitAttr]:
        """All attributes, whatever the mask says."""
        with self.device.turn():
            given = self.native.query()
        attr = QPAttr.of(given)
        return attr, QPInitAttr(self.qp_type, cap=attr.cap, sq_sig_all=self._sig_all)

    def attach_mcast(self, gid: GID | str, lid: int = 0) -> None:
        """ibv_attach_mcast: receive what is sent to a group (its GID, ::ffff:a.b.c.d over IPv4); only of a UD
        pair. RoCE has no LIDs. Not in pyverbs."""
        self._multicast("Failed to attach QP to multicast", self.device.nic.attach_mcast, gid)

    def detach_mcast(self, gid: GID | str, lid: int = 0) -> None:
        """ibv_detach_mcast. Not in pyverbs."""
        self._multicast("Failed to detach QP from multicast", self.device.nic.detach_mcast, gid)

    def _multicast(self, refused: str, call: Callable[[QueuePair, bytes], None], gid: GID | str) -> None:
        with base.asking(self.device, refused):
            call(self.native, gid_bytes(gid) if isinstance(gid, str) else gid.raw)

    def post_recv(self, wr: RecvWR, bad_wr: RecvWR | None = None) -> None:
        """Post a receive and those chained to it. Those before one that is refused are posted."""
        pair = self.native
        # In the error state a receive completes at once, which somebody may wait for.
        with self.device.turn() if pair.state is QpState.ERR else self.device.hold():
            post_chain(wr, bad_wr, pair.post_recv, "Failed to post recv")

    def post_send(self, wr: SendWR, bad_wr: SendWR | None = None) -> None:
        """Post a request and those chained to it. Those before one that is refused are posted."""
        with self.device.turn():
            post_chain(wr, bad_wr, self.native.post_send, "Failed to post send")

    def bind_mw(self, mw: MW, mw_bind: MWBind) -> None:
        """Bind a window of type 1 under the next key that it can have; its `rkey` is that key then."""
        refused = "Failed to Bind MW"
        info = mw_bind.info
        if mw.type != e.IBV_MW_TYPE_1 or info.mw_access_flags & e.IBV_ACCESS_ZERO_BASED:
            raise PyverbsRDMAError(refused, errno.EINVAL)
        if info.mr.native.pd is not mw.native.pd:
            raise PyverbsRDMAError(refused, errno.EPERM)
        key = base.inc_rkey(mw.rkey)
        request = SendRequest(mw_bind.wr_id, SendOpcode.BIND_MW, FLAGS[mw_bind.send_flags & 15])
        request.window, request.window_rkey, request.bind = mw.native, key, info.bind()
        with base.asking(self.device, refused):
            self.native.post_send(request)
        mw.rkey = key

    def set_ece(self, ece: ECE) -> None:
        """There are no extensions to agree on (EOPNOTSUPP), except on nothing."""
        if ece.vendor_id:
            raise PyverbsRDMAError("Failed to set ECE", errno.EOPNOTSUPP)

    def query_ece(self) -> ECE:
        """There are no extensions (EOPNOTSUPP)."""
        raise PyverbsRDMAError("Failed to query ECE", errno.EOPNOTSUPP)

    def query_data_in_order(self, op: int, flags: int = 0) -> int:
        """0: nobody may rely on the order in which bytes of a message land."""
        return 0

    __str__ = base.shown(
        "",
        ("QP type", "qp_type", qp_type_to_str), ("  number", "qp_num"),
        ("  state", "qp_state", qp_state_to_str),
    )  # fmt: skip


class QPEx(QP):
    """A `QP` with the `wr_*` calls, where IBV_QP_INIT_ATTR_SEND_OPS_FLAGS asked for them.

    `wr_id` and `wr_flags` count for the requests that are begun after they were set.
    """

    __slots__ = ("_built", "_failure", "_granted", "comp_mask", "ind_table", "wr_flags", "wr_id")

    def __init__(
        self, creator: PD | Context, init_attr: QPInitAttr | QPInitAttrEx, qp_attr: QPAttr | None = None
    ) -> None:
        self.comp_mask = 0
        self.wr_id = 0
        self.wr_flags = 0
        self.ind_table = None
        self._built: list[SendRequest] | None = None
        self._failure: VerbsError | None = None
        self._granted = 0
        super().__init__(creator, init_attr, qp_attr)

    def _create_qp_ex(self, ctx: Context, attr: QPInitAttrEx) -> None:
        if attr.comp_mask & e.IBV_QP_INIT_ATTR_SEND_OPS_FLAGS:
            possible = _SUPPORTED.get(attr.qp_type, 0)  # type: ignore[call-overload]  # numbers are equal
            if attr.send_ops_flags & ~possible:
                raise PyverbsRDMAError("Failed to create QP", errno.EOPNOTSUPP)
            self._granted = attr.send_ops_flags
        super()._create_qp_ex(ctx, attr)

    def wr_start(self) -> None:
        """Begin a row of requests."""
        if not self._granted:
            raise PyverbsUserError("the QP was not made with IBV_QP_INIT_ATTR_SEND_OPS_FLAGS")
        self._built = []
        self._failure = None

    def wr_complete(self) -> None:
        """Post the row. PyverbsRDMAError where any of it is impossible; nothing is posted then."""
        built, self._built = self._built, None
        if built is None:
            raise PyverbsUserError("wr_complete without wr_start")
        try:
            if self._failure is not None:
                raise self._failure
            with self.device.turn():
                self.native.post_sends(built)
        except VerbsError as error:
            raise base.refusal("ibv_wr_complete failed.", error) from error

    def post_rows(self, receives: Sequence[posting.ReceiveRow], rows: Sequence[posting.SendRow]) -> None:
        """Post receives, then requests, as `post_recv` and a row between `wr_start` and `wr_complete` do,
        with one call (see `posting.py`). Not in pyverbs."""
        granted = self._granted
        for row in rows:
            if not granted & _GRANTED_BY.get(row[0], 0):  # type: ignore[call-overload]  # numbers are equal
                raise PyverbsRDMAError("post_rows failed.", errno.EOPNOTSUPP)
            if row[6] is not None:
                self.mws.add(row[6])
        try:
            posting.post(self.native, self.device, receives, rows)
        except VerbsError as error:
            raise base.refusal("post_rows failed.", error) from error

    def wr_abort(self) -> None:
        self._built = None
        self._failure = None

    def _fail(self, number: int, why: str) -> None:
        if self._failure is None:
            self._failure = VerbsError(number, why)

    def _begin(self, opcode: SendOpcode) -> SendRequest:
        if self._built is None:
            raise PyverbsUserError("a request before wr_start")
        if not self._granted & _GRANTED_BY[opcode]:
            self._fail(errno.EOPNOTSUPP, f"{opcode.name} was not asked for when the QP was made")
        request = SendRequest(self.wr_id, opcode, FLAGS[self.wr_flags & 15])
        if self.wr_flags & ~15:
            self._fail(errno.EINVAL, f"flags {self.wr_flags:#x}")
        self._built.append(request)
        return request

    def _last(self) -> SendRequest:
        if not self._built:
            raise PyverbsUserError("there is no request yet to be set")
        return self._built[-1]

    def wr_send(self) -> None:
        self._begin(SendOpcode.SEND)

    def wr_send_imm(self, data: int) -> None:
        """`data` is a number; it goes out big-endian."""
        self._begin(SendOpcode.SEND_WITH_IMM).imm = data & 0xFFFFFFFF

    def wr_send_inv(self, invalidate_rkey: int) -> None:
        self._begin(SendOpcode.SEND_WITH_INV).invalidate_rkey = invalidate_rkey

    def wr_rdma_write(self, rkey: int, remote_addr: int) -> None:
        self._remote(SendOpcode.RDMA_WRITE, rkey, remote_addr)

    def wr_rdma_write_imm(self, rkey: int, remote_addr: int, data: int) -> None:
        """`data` is a number; it goes out big-endian."""
        self._remote(SendOpcode.RDMA_WRITE_WITH_IMM, rkey, remote_addr).imm = data & 0xFFFFFFFF

    def wr_rdma_read(self, rkey: int, remote_addr: int) -> None:
        self._remote(SendOpcode.RDMA_READ, rkey, remote_addr)

    def wr_atomic_cmp_swp(self, rkey: int, remote_addr: int, compare: int, swap: int) -> None:
        request = self._remote(SendOpcode.ATOMIC_CMP_AND_SWP, rkey, remote_addr)
        request.compare_add, request.swap = compare, swap

    def wr_atomic_fetch_add(self, rkey: int, remote_addr: int, add: int) -> None:
        self._remote(SendOpcode.ATOMIC_FETCH_AND_ADD, rkey, remote_addr).compare_add = add

    def wr_local_inv(self, invalidate_rkey: int) -> None:
        self._begin(SendOpcode.LOCAL_INV).invalidate_rkey = invalidate_rkey

    def wr_bind_mw(self, mw: MW, rkey: int, bind_info: MWBindInfo) -> None:
        """Bind a window of type 2; it is closed with this QP."""
        request = self._begin(SendOpcode.BIND_MW)
        request.window, request.window_rkey, request.bind = mw.native, rkey, bind_info.bind()
        self.mws.add(mw)

    def wr_send_tso(self, hdr: int, hdr_sz: int, mss: int) -> None:
        """Not on this device: EOPNOTSUPP, told by `wr_complete`."""
        if self._built is None:
            raise PyverbsUserError("a request before wr_start")
        self._built.append(SendRequest(self.wr_id))
        self._fail(errno.EOPNOTSUPP, "there is no TSO")

    def wr_atomic_write(self, rkey: int, remote_addr: int, atomic_wr: bytes) -> None:
        """The first eight bytes of `atomic_wr`, to a multiple of eight."""
        self._remote(SendOpcode.ATOMIC_WRITE, rkey, remote_addr).inline = bytes(atomic_wr[:ATOMIC_BYTES])

    def _remote(self, opcode: SendOpcode, rkey: int, remote_addr: int) -> SendRequest:
        request = self._begin(opcode)
        request.rkey, request.remote_address = rkey, remote_addr
        return request

    def wr_set_sge(self, sge: SGE) -> None:
        self._last().sges = (Sge(sge.addr, sge.length, sge.lkey),)

    def wr_set_sge_list(self, num_sge: int, sg_list: Sequence[SGE]) -> None:
        if num_sge > self.native.capabilities.max_send_sge:
            self._fail(errno.EINVAL, f"{num_sge} scatter/gather elements are too many")
        self._last().sges = elements(num_sge, sg_list)

    def wr_set_inline_data(self, addr: int, length: int) -> None:
        """`length` bytes at `addr`, taken now."""
        self._set_inline([(addr, length)])

    def wr_set_inline_data_list(self, num_buf: int, buf_list: Sequence[DataBuffer]) -> None:
        """The bytes of several buffers, one after the other, taken now."""
        self._set_inline([(buffer.addr, buffer.length) for buffer in buf_list[:num_buf]])

    def _set_inline(self, parts: list[tuple[int, int]]) -> None:
        request = self._last()
        if sum(length for _, length in parts) > self.native.capabilities.max_inline_data:
            self._fail(errno.EINVAL, "more inline data than max_inline_data")
            return
        request.inline = b"".join([mem_alloc.read(addr, length) for addr, length in parts])
        request.flags = FLAGS[int(request.flags) & 15 | SendFlags.INLINE]

    def wr_set_ud_addr(self, ah: AH, remote_qpn: int, remote_rkey: int) -> None:
        """Where the datagram goes; `remote_rkey` is the Q_Key, by pyverbs' name for it."""
        request = self._last()
        request.ah, request.remote_qpn, request.remote_qkey = ah.native, remote_qpn, remote_rkey

    def wr_set_xrc_srqn(self, remote_srqn: int) -> None:
        """There are no XRC queue pairs, so no request has this."""
        self._fail(errno.EOPNOTSUPP, "there is no XRC")


__all__ = [
    "ECE", "QP", "DataBuffer", "QPAttr", "QPCap", "QPEx", "QPInitAttr", "QPInitAttrEx", "_copy_caps",
]  # fmt: skip
