"""`pyverbs.wr`: scatter/gather elements and work requests. Posting makes the device's own record of one."""

import errno
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from emulator.roce.nic.verbs import Sge, VerbsError
from emulator.roce.nic.work_requests import ReceiveRequest, SendRequest
from emulator.roce.pyverbs import enums as e
from emulator.roce.pyverbs import mem_alloc
from emulator.roce.pyverbs.addr import AH
from emulator.roce.pyverbs.base import PyverbsCM, inc_rkey, refusal, shown
from emulator.roce.pyverbs.cq import swapped
from emulator.roce.pyverbs.mr import MW, MWBindInfo
from emulator.roce.pyverbs.posting import FLAGS, OPCODES
from emulator.roce.pyverbs.pyverbs_error import PyverbsUserError

_WITHOUT_MEMORY = frozenset({e.IBV_WR_LOCAL_INV, e.IBV_WR_BIND_MW, e.IBV_WR_SEND_WITH_INV})


@dataclass(slots=True, eq=False)
class SGE(PyverbsCM):
    """struct ibv_sge: `length` bytes at `addr` in the region of `lkey`."""

    addr: int
    length: int
    lkey: int

    def read(self, length: int, offset: int) -> bytes:
        """Bytes from `offset` of the element on, wherever its address leads."""
        return mem_alloc.read(self.addr, length, offset)

    __str__ = shown("", ("Address", "addr", hex), ("Length", "length"), ("Key", "lkey", hex))


def elements(num_sge: int, sg: Sequence[SGE] | None) -> tuple[Sge, ...]:
    """The first `num_sge` elements as the device takes them."""
    if not num_sge or sg is None:
        return ()
    if num_sge == 1:
        one = sg[0]
        return (Sge(one.addr, one.length, one.lkey),)
    return tuple([Sge(one.addr, one.length, one.lkey) for one in sg[:num_sge]])


class RecvWR(PyverbsCM):
    """struct ibv_recv_wr: memory for one message to come; `next_wr` is posted after it."""

    __slots__ = ("_sges", "next_wr", "num_sge", "wr_id")

    def __init__(
        self,
        wr_id: int = 0,
        num_sge: int = 0,
        sg: Sequence[SGE] | None = None,
        next_wr: "RecvWR | None" = None,
    ) -> None:
        self.wr_id = wr_id
        self.num_sge = num_sge
        self._sges = elements(num_sge, sg)
        self.next_wr = next_wr

    def request(self) -> ReceiveRequest:
        sges = self._sges
        return ReceiveRequest(self.wr_id, sges if len(sges) == self.num_sge else sges[: self.num_sge])

    def become(self, other: "RecvWR") -> None:
        """Take the values of the request that was refused."""
        self.wr_id, self.num_sge, self._sges, self.next_wr = (
            other.wr_id, other.num_sge, other._sges, other.next_wr,
        )  # fmt: skip

    __str__ = shown("", ("WR ID", "wr_id"), ("Num SGE", "num_sge"))


def send_flags_to_str(flags: int) -> str:
    """Names of the flags, each followed by a space."""
    return "".join(f"{flag.name} " for flag in e.ibv_send_flags if flags & flag)


class SendWR(PyverbsCM):
    """struct ibv_send_wr. What the opcode needs besides memory is set by the `set_*` methods.

    `imm_data` is big-endian; for an invalidating opcode it is the R_Key (one field of the C structure).
    """

    __slots__ = ("_more", "_sges", "imm_data", "next_wr", "num_sge", "opcode", "send_flags", "wr_id")

    def __init__(
        self,
        wr_id: int = 0,
        opcode: int = e.IBV_WR_SEND,
        num_sge: int = 0,
        imm_data: int = 0,
        sg: Sequence[SGE] | None = None,
        send_flags: int = e.IBV_SEND_SIGNALED,
        next_wr: "SendWR | None" = None,
    ) -> None:
        if (num_sge < 1 or sg is None) and opcode not in _WITHOUT_MEMORY:
            raise PyverbsUserError("A WR needs at least one SGE")
        self.wr_id = wr_id
        self.opcode = opcode
        self.num_sge = num_sge
        self.imm_data = imm_data
        self._sges = elements(num_sge, sg)
        self.send_flags = send_flags
        self.next_wr = next_wr
        self._more: dict[str, Any] = {}
        """The fields of a `SendRequest` that the `set_*` methods have given."""

    def request(self) -> SendRequest:
        """A record for the device. VerbsError(EINVAL) for an opcode or flags that it does not know."""
        opcode, flags = OPCODES.get(self.opcode), FLAGS.get(self.send_flags)
        if opcode is None or flags is None:
            raise VerbsError(errno.EINVAL, f"opcode {self.opcode}, flags {self.send_flags:#x}")
        request = SendRequest(self.wr_id, opcode, flags, self._sges[: self.num_sge], **self._more)
        if self.imm_data:
            request.imm, request.invalidate_rkey = swapped(self.imm_data), self.imm_data
        return request

    def become(self, other: "SendWR") -> None:
        """Take the values of the request that was refused."""
        for name in SendWR.__slots__:
            setattr(self, name, getattr(other, name))

    def _set_sg_list(self, val: SGE) -> None:
        self._sges = elements(1, [val])

    sg_list = property(None, _set_sg_list, doc="One element; it can be set, and not read, as in pyverbs.")

    def _set(self, **fields: Any) -> None:
        self._more = self._more | fields

    @property
    def rkey(self) -> int:
        """The key that a memory window is going to have."""
        return int(self._more.get("window_rkey", 0))

    def set_wr_ud(self, ah: AH, rqpn: int, rqkey: int) -> None:
        self._set(ah=ah.native, remote_qpn=rqpn, remote_qkey=rqkey)

    def set_wr_rdma(self, rkey: int, addr: int) -> None:
        self._set(rkey=rkey, remote_address=addr)

    def set_wr_atomic(self, rkey: int, addr: int, compare_add: int, swap: int = 0) -> None:
        """The remote eight bytes of an atomic operation and its operands."""
        self._set(rkey=rkey, remote_address=addr, compare_add=compare_add, swap=swap)

    def set_bind_wr(self, mw: MW, bind_info: MWBindInfo) -> None:
        """Bind a memory window under the next key that it can have."""
        self._set(window=mw.native, window_rkey=inc_rkey(mw.rkey), bind=bind_info.bind())

    def set_qp_type_xrc(self, remote_srqn: int) -> None:
        """There are no XRC queue pairs here, so there is none to be told the receive queue."""

    __str__ = shown(
        "",
        ("WR ID", "wr_id"), ("Num SGE", "num_sge"), ("Opcode", "opcode", int),
        ("Send flags", "send_flags", send_flags_to_str), ("Imm Data", "imm_data"),
    )  # fmt: skip


def post_chain(first: Any, bad: Any, post: Callable[[Any], None], refused: str) -> None:
    """Post a request and those chained to it, with the device's lock held. Those before one that is refused
    are posted; `bad`, where there is one, becomes the refused one."""
    one = first
    while one is not None:
        try:
            post(one.request())
        except VerbsError as error:
            if bad is not None:
                bad.become(one)
            raise refusal(refused, error) from error
        one = one.next_wr


__all__ = ["SGE", "RecvWR", "SendWR", "inc_rkey", "send_flags_to_str"]
