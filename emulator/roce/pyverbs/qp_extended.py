"""The extended form of a queue pair: requests are built by calls between `wr_start` and `wr_complete`.

Part of `pyverbs.qp`. `wr_complete` posts all requests or none: what makes one of them impossible is found
while it is built and told then, as in the drivers of libibverbs.
"""

from __future__ import annotations

import errno
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from emulator.roce.nic.queue_pair import OPCODES
from emulator.roce.nic.verbs import SendFlags, SendOpcode, Sge, VerbsError
from emulator.roce.nic.work import ATOMIC_BYTES
from emulator.roce.nic.work_requests import SendRequest
from emulator.roce.pyverbs import enums as e
from emulator.roce.pyverbs import mem_alloc, posting
from emulator.roce.pyverbs.base import refusal
from emulator.roce.pyverbs.pyverbs_error import PyverbsRDMAError, PyverbsUserError
from emulator.roce.pyverbs.qp_attributes import DataBuffer, QPAttr, QPInitAttr, QPInitAttrEx
from emulator.roce.pyverbs.queue_pair import QP
from emulator.roce.pyverbs.wr import FLAGS, SGE

if TYPE_CHECKING:
    from emulator.roce.pyverbs.addr import AH
    from emulator.roce.pyverbs.device import Context
    from emulator.roce.pyverbs.mr import MW, MWBindInfo
    from emulator.roce.pyverbs.pd import PD

_GRANTED_BY: Final = {
    opcode: int(e.ibv_qp_create_send_ops_flags[f"IBV_QP_EX_WITH_{opcode.name}"]) for opcode in SendOpcode
}
"""The flag by which a program asks for each opcode."""
_SUPPORTED: Final = {
    kind: sum(_GRANTED_BY[opcode] for opcode in opcodes.values()) for kind, opcodes in OPCODES.items()
}


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

    # --- beginning and end --------------------------------------------------------------------------------

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
            raise refusal("ibv_wr_complete failed.", error) from error

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
            raise refusal("post_rows failed.", error) from error

    def wr_abort(self) -> None:
        """Forget the row."""
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

    # --- requests -----------------------------------------------------------------------------------------

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

    # --- what belongs to the last request -----------------------------------------------------------------

    def wr_set_sge(self, sge: SGE) -> None:
        self._last().sges = (Sge(sge.addr, sge.length, sge.lkey),)

    def wr_set_sge_list(self, num_sge: int, sg_list: Sequence[SGE]) -> None:
        if num_sge > self.native.capabilities.max_send_sge:
            self._fail(errno.EINVAL, f"{num_sge} scatter/gather elements are too many")
        self._last().sges = tuple([Sge(sge.addr, sge.length, sge.lkey) for sge in sg_list[:num_sge]])

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
