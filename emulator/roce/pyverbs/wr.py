"""`pyverbs.wr`: scatter/gather elements and work requests.

A work request is the device's own record underneath, made when the program makes the request; posting hands
it over as it is, and changing a request that has been posted changes a copy. So one that is posted many times
costs one object, and one that is posted once costs two.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from emulator.roce.nic.verbs import SendFlags, SendOpcode, Sge
from emulator.roce.nic.work_requests import ReceiveRequest, SendRequest
from emulator.roce.pyverbs import enums as e
from emulator.roce.pyverbs import mem_alloc
from emulator.roce.pyverbs.base import PyverbsCM, inc_rkey, listing
from emulator.roce.pyverbs.pyverbs_error import PyverbsUserError
from emulator.roce.pyverbs.work_completion import swapped

if TYPE_CHECKING:
    from emulator.roce.pyverbs.addr import AH
    from emulator.roce.pyverbs.mr import MW, MWBindInfo

OPCODES: dict[int, SendOpcode] = {int(opcode): opcode for opcode in SendOpcode}
FLAGS: dict[int, SendFlags] = {bits: SendFlags(bits) for bits in range(16)}
"""Every combination of send flags that the device knows; to look one up is cheaper than to make one."""

_INLINE = int(SendFlags.INLINE)

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

    def __str__(self) -> str:
        return listing([("Address", hex(self.addr)), ("Length", self.length), ("Key", hex(self.lkey))])


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
        next_wr: RecvWR | None = None,
    ) -> None:
        self.wr_id = wr_id
        self.num_sge = num_sge
        self._sges = elements(num_sge, sg)
        self.next_wr = next_wr

    def request(self) -> ReceiveRequest:
        """A record for the device."""
        sges = self._sges
        return ReceiveRequest(self.wr_id, sges if len(sges) == self.num_sge else sges[: self.num_sge])

    def become(self, other: RecvWR) -> None:
        """Take the values of the request that was refused."""
        self.wr_id, self.num_sge, self._sges, self.next_wr = (
            other.wr_id, other.num_sge, other._sges, other.next_wr,
        )  # fmt: skip

    def __str__(self) -> str:
        return listing([("WR ID", self.wr_id), ("Num SGE", self.num_sge)])


class SendWR(PyverbsCM):
    """struct ibv_send_wr. What the opcode needs besides memory is set by the `set_*` methods."""

    __slots__ = ("_imm_data", "_num_sge", "_opcode", "_posted", "_request", "_send_flags", "next_wr")

    def __init__(
        self,
        wr_id: int = 0,
        opcode: int = e.IBV_WR_SEND,
        num_sge: int = 0,
        imm_data: int = 0,
        sg: Sequence[SGE] | None = None,
        send_flags: int = e.IBV_SEND_SIGNALED,
        next_wr: SendWR | None = None,
    ) -> None:
        if (num_sge < 1 or sg is None) and opcode not in _WITHOUT_MEMORY:
            raise PyverbsUserError("A WR needs at least one SGE")
        self.next_wr = next_wr
        self._opcode = opcode
        self._send_flags = send_flags
        self._imm_data = imm_data
        self._num_sge = num_sge
        self._posted = False
        request = self._request = SendRequest(wr_id, OPCODES.get(opcode, SendOpcode.SEND))
        request.flags = FLAGS[send_flags & 15]
        request.sges = elements(num_sge, sg)
        if imm_data:
            request.imm = swapped(imm_data)
            request.invalidate_rkey = imm_data

    def request(self) -> SendRequest:
        """The record for the device; from now on it is the device's."""
        self._posted = True
        if self._send_flags & _INLINE:
            # The device keeps the inline data in the record; the next post takes it from memory anew.
            return replace(self._request)
        return self._request

    @property
    def supported(self) -> bool:
        """Whether the device knows this opcode and these flags at all."""
        return self._opcode in OPCODES and not self._send_flags & ~15

    def _own(self) -> SendRequest:
        """The record, to be written to."""
        if self._posted:
            self._request = replace(self._request)
            self._posted = False
        return self._request

    def become(self, other: SendWR) -> None:
        """Take the values of the request that was refused."""
        for name in SendWR.__slots__:
            setattr(self, name, getattr(other, name))
        self._posted = True

    @property
    def wr_id(self) -> int:
        """What the completion will be known by."""
        return self._request.wr_id

    @wr_id.setter
    def wr_id(self, val: int) -> None:
        self._own().wr_id = val

    @property
    def num_sge(self) -> int:
        """How many elements count."""
        return self._num_sge

    @num_sge.setter
    def num_sge(self, val: int) -> None:
        self._num_sge = val
        request = self._own()
        request.sges = request.sges[:val]

    @property
    def imm_data(self) -> int:
        """Big-endian immediate data; for an invalidating opcode, the R_Key (one field of the C structure)."""
        return self._imm_data

    @imm_data.setter
    def imm_data(self, val: int) -> None:
        self._imm_data = val
        request = self._own()
        request.imm = swapped(val)
        request.invalidate_rkey = val

    @property
    def opcode(self) -> int:
        """An `ibv_wr_opcode`."""
        return self._opcode

    @opcode.setter
    def opcode(self, val: int) -> None:
        self._opcode = val
        self._own().opcode = OPCODES.get(val, SendOpcode.SEND)

    @property
    def send_flags(self) -> int:
        """Of `ibv_send_flags`."""
        return self._send_flags

    @send_flags.setter
    def send_flags(self, val: int) -> None:
        self._send_flags = val
        self._own().flags = FLAGS[val & 15]

    def _set_sg_list(self, val: SGE) -> None:
        self._own().sges = (Sge(val.addr, val.length, val.lkey),)

    sg_list = property(None, _set_sg_list, doc="One element; it can be set, and not read, as in pyverbs.")

    @property
    def rkey(self) -> int:
        """The key that a memory window is going to have."""
        return self._request.window_rkey

    def set_wr_ud(self, ah: AH, rqpn: int, rqkey: int) -> None:
        """Where a datagram goes."""
        request = self._own()
        request.ah, request.remote_qpn, request.remote_qkey = ah.native, rqpn, rqkey

    def set_wr_rdma(self, rkey: int, addr: int) -> None:
        """The remote memory of a READ or WRITE."""
        request = self._own()
        request.rkey, request.remote_address = rkey, addr

    def set_wr_atomic(self, rkey: int, addr: int, compare_add: int, swap: int = 0) -> None:
        """The remote eight bytes of an atomic operation and its operands."""
        request = self._own()
        request.rkey, request.remote_address = rkey, addr
        request.compare_add, request.swap = compare_add, swap

    def set_bind_wr(self, mw: MW, bind_info: MWBindInfo) -> None:
        """Bind a memory window under the next key that it can have."""
        request = self._own()
        request.window, request.window_rkey = mw.native, inc_rkey(mw.rkey)
        request.bind = bind_info.bind()

    def set_qp_type_xrc(self, remote_srqn: int) -> None:
        """There are no XRC queue pairs here, so there is none to be told the receive queue."""

    def __str__(self) -> str:
        return listing(
            [
                ("WR ID", self.wr_id), ("Num SGE", self.num_sge), ("Opcode", int(self.opcode)),
                ("Send flags", send_flags_to_str(self.send_flags)), ("Imm Data", self.imm_data),
            ]
        )  # fmt: skip


def send_flags_to_str(flags: int) -> str:
    """Names of the flags, each followed by a space."""
    return "".join(f"{flag.name} " for flag in e.ibv_send_flags if flags & flag)


__all__ = ["SGE", "RecvWR", "SendWR", "inc_rkey", "send_flags_to_str"]
