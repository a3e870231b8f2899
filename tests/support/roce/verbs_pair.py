"""Two emulated devices in one process, used through the stand-in for pyverbs, on addresses of their own."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from emulator.roce.pyverbs import enums as e
from emulator.roce.pyverbs.addr import GID, AHAttr, GlobalRoute
from emulator.roce.pyverbs.cq import CQ, CQEX, WC, CompChannel, CqInitAttrEx
from emulator.roce.pyverbs.device import Context
from emulator.roce.pyverbs.mr import MR
from emulator.roce.pyverbs.pd import PD
from emulator.roce.pyverbs.qp import QP, QPAttr, QPCap, QPEx, QPInitAttr, QPInitAttrEx
from emulator.roce.pyverbs.srq import SRQ
from emulator.roce.pyverbs.wr import SGE, RecvWR, SendWR
from emulator.roce.runtime import registry

SECONDS = 30.0
"""Until a test gives up waiting."""

BYTES = 1 << 16
"""Of each side's memory."""

EVERYTHING = (
    e.IBV_ACCESS_LOCAL_WRITE | e.IBV_ACCESS_REMOTE_WRITE | e.IBV_ACCESS_REMOTE_READ
    | e.IBV_ACCESS_REMOTE_ATOMIC | e.IBV_ACCESS_MW_BIND
)  # fmt: skip

ALL_SEND_OPS = (1 << 10) - 1 | e.IBV_QP_EX_WITH_ATOMIC_WRITE
"""From IBV_QP_EX_WITH_RDMA_WRITE to IBV_QP_EX_WITH_SEND_WITH_INV, and the atomic write."""

_SENDS = e.IBV_QP_EX_WITH_SEND | e.IBV_QP_EX_WITH_SEND_WITH_IMM
SEND_OPS = {
    e.IBV_QPT_RC: ALL_SEND_OPS,
    e.IBV_QPT_UC: _SENDS | e.IBV_QP_EX_WITH_RDMA_WRITE | e.IBV_QP_EX_WITH_RDMA_WRITE_WITH_IMM,
    e.IBV_QPT_UD: _SENDS,
}


def addresses(count: int) -> list[str]:
    """Addresses of the loopback network that no other test process has."""
    first = (os.getpid() * 8) & 0xFFFF
    return [f"127.35.{(first + n) >> 8 & 0xFF}.{(first + n) & 0xFF}" for n in range(1, count + 1)]


@contextmanager
def devices(count: int = 2) -> Iterator[list[str]]:
    """The names of devices that exist for the time being; what is still open is closed in the end."""
    known = {f"test{number}": ip for number, ip in enumerate(addresses(count))}
    for name, ip in known.items():
        registry.add_device(name, ip)
    try:
        yield list(known)
    finally:
        for name in known:
            registry.remove_device(name)


def ip_of(name: str) -> str:
    """A device's address."""
    return registry.find_device(name).ip


@dataclass
class Side:
    """One end: a device, its memory and a queue pair with room for 32 requests each way."""

    context: Context
    events: bool = False
    extended: bool = False
    """A CQEX, and a QPEx that is made of the context."""
    kind: int = e.IBV_QPT_RC
    shared: bool = False
    """Receive from a shared queue."""
    pd: PD = field(init=False)
    mr: MR = field(init=False)
    cq: CQ = field(init=False)
    cq_ex: CQEX = field(init=False)
    channel: CompChannel | None = None
    srq: SRQ | None = None
    qp: QP = field(init=False)

    def __post_init__(self) -> None:
        from emulator.roce.pyverbs.srq import SrqAttr, SrqInitAttr

        self.pd = PD(self.context)
        self.mr = MR(self.pd, BYTES, EVERYTHING)
        if self.events:
            self.channel = CompChannel(self.context)
        cap = QPCap(32, 32, 4, 4, 64)
        if self.shared:
            self.srq = SRQ(self.pd, SrqInitAttr(SrqAttr(32, 4)))
        if self.extended:
            self.cq_ex = CQEX(self.context, CqInitAttrEx(64, self.channel, wc_flags=e.IBV_WC_STANDARD_FLAGS))
            self.qp = QPEx(
                self.context,
                QPInitAttrEx(
                    self.kind, None, self.cq_ex, self.cq_ex, self.srq, cap, 1,
                    comp_mask=e.IBV_QP_INIT_ATTR_PD | e.IBV_QP_INIT_ATTR_SEND_OPS_FLAGS, pd=self.pd,
                    send_ops_flags=SEND_OPS[self.kind],
                ),
            )  # fmt: skip
        else:
            self.cq = CQ(self.context, 64, None, self.channel)
            self.qp = QP(self.pd, QPInitAttr(self.kind, None, self.cq, self.cq, self.srq, cap, 0))

    @property
    def gid(self) -> GID:
        return self.context.query_gid(1, 0)

    def way_to(self, peer: Side) -> AHAttr:
        """The address vector of the other end."""
        return AHAttr(is_global=1, port_num=1, gr=GlobalRoute(dgid=peer.gid, hop_limit=64))

    def connect(self, peer: Side) -> None:
        """To RTS, against `peer`; or, a UD pair, by itself."""
        attr = QPAttr(path_mtu=e.IBV_MTU_4096)
        attr.qkey = 0x11111111
        attr.qp_access_flags = EVERYTHING & ~e.IBV_ACCESS_MW_BIND
        attr.dest_qp_num = peer.qp.qp_num
        attr.ah_attr = self.way_to(peer)
        attr.rq_psn = attr.sq_psn = 0x123456
        attr.max_rd_atomic = attr.max_dest_rd_atomic = 4
        attr.min_rnr_timer, attr.timeout, attr.retry_cnt, attr.rnr_retry = 1, 18, 7, 7
        self.qp.to_rts(attr)

    def sge(self, start: int = 0, length: int = 64) -> list[SGE]:
        """A part of the memory."""
        return [SGE(self.mr.buf + start, length, self.mr.lkey)]

    def receive(self, start: int = 0, length: int = 4096, wr_id: int = 0) -> None:
        """Post a receive."""
        (self.srq or self.qp).post_recv(RecvWR(wr_id, 1, self.sge(start, length)))

    def request(self, opcode: int, start: int = 0, length: int = 64, wr_id: int = 0, imm: int = 0) -> SendWR:
        """A signalled request, not yet posted."""
        return SendWR(wr_id, opcode, 1, imm, self.sge(start, length), e.IBV_SEND_SIGNALED)

    def completions(self, count: int) -> list[WC]:
        """Wait for so many."""
        got: list[WC] = []
        deadline = time.monotonic() + SECONDS
        while len(got) < count:
            self.context.drive_until(self.cq.native.__len__, deadline)
            got += self.cq.poll(count - len(got))[1]
            assert time.monotonic() < deadline, f"{len(got)} of {count} completions"
        return got

    def completion(self) -> WC:
        """Wait for one that is a success."""
        one = self.completions(1)[0]
        assert one.status == e.IBV_WC_SUCCESS, one
        return one


@contextmanager
def two_sides(
    *,
    events: bool = False,
    extended: bool = False,
    kind: int = e.IBV_QPT_RC,
    shared: bool = False,
) -> Iterator[tuple[Side, Side]]:
    """Two ends of one connection, each on a device of its own, ready to send."""
    with devices() as (first, second), Context(name=first) as one, Context(name=second) as two:
        left = Side(one, events, extended, kind, shared)
        right = Side(two, events, extended, kind, shared)
        left.connect(right)
        right.connect(left)
        yield left, right
