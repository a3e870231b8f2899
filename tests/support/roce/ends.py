"""Two emulated RDMA devices on a network in memory, with everything that a test of a connection needs."""

from __future__ import annotations

import random
from dataclasses import dataclass

from emulator.roce.nic.completion import CompletionQueue
from emulator.roce.nic.device_services import WINDOW_BYTES
from emulator.roce.nic.memory import MemoryRegion, ProtectionDomain
from emulator.roce.nic.nic import Nic
from emulator.roce.nic.queue_pair import QueuePair
from emulator.roce.nic.shared_receive import SharedReceiveQueue
from emulator.roce.nic.states import MOVES
from emulator.roce.nic.verbs import (
    Access,
    AddressVector,
    Mtu,
    QpAttr,
    QpAttributes,
    QpCapabilities,
    QpState,
    QpType,
    SendFlags,
    SendOpcode,
    Sge,
    WorkCompletion,
)
from emulator.roce.nic.work_requests import ReceiveRequest, SendRequest
from tests.support.roce.memory_network import MemoryNetwork
from tests.support.roce.weather import CALM, Weather

ALL_ACCESS = (
    Access.LOCAL_WRITE | Access.REMOTE_WRITE | Access.REMOTE_READ | Access.REMOTE_ATOMIC | Access.MW_BIND
)
GUARD = 64
"""Bytes around registered memory that nothing may ever change."""

TO_INIT = QpAttr.STATE | QpAttr.PKEY_INDEX | QpAttr.PORT | QpAttr.ACCESS_FLAGS
TO_RTR = (
    QpAttr.STATE
    | QpAttr.AV
    | QpAttr.PATH_MTU
    | QpAttr.DEST_QPN
    | QpAttr.RQ_PSN
    | QpAttr.MAX_DEST_RD_ATOMIC
    | QpAttr.MIN_RNR_TIMER
)
TO_RTS = (
    QpAttr.STATE
    | QpAttr.TIMEOUT
    | QpAttr.RETRY_CNT
    | QpAttr.RNR_RETRY
    | QpAttr.SQ_PSN
    | QpAttr.MAX_QP_RD_ATOMIC
)


class GuardedMemory:
    """`size` bytes that can be registered, in the middle of bytes that must not change."""

    def __init__(self, size: int, fill: int = 0) -> None:
        self._all = bytearray([0xA5]) * (size + 2 * GUARD)
        self.view = memoryview(self._all)[GUARD : GUARD + size]
        self.view[:] = bytes([fill]) * size

    @property
    def intact(self) -> bool:
        """Whether the bytes around are as they were."""
        return bytes(self._all[:GUARD]) == bytes(self._all[-GUARD:]) == b"\xa5" * GUARD


@dataclass
class End:
    """One end of a connection. Memory is `memory`, registered as `region` at iova `base`."""

    nic: Nic
    pd: ProtectionDomain
    cq: CompletionQueue
    qp: QueuePair
    memory: GuardedMemory
    region: MemoryRegion

    def sge(self, offset: int = 0, length: int | None = None) -> Sge:
        """A part of the memory."""
        size = len(self.memory.view) - offset if length is None else length
        return Sge(self.region.address + offset, size, self.region.lkey)

    def post(
        self,
        opcode: SendOpcode,
        *sges: Sge,
        wr_id: int = 0,
        flags: SendFlags = SendFlags.SIGNALED,
        to: End | None = None,
        at: int = 0,
        **rest: object,
    ) -> None:
        """Post a send request; `to` and `at` are the remote memory."""
        remote = {} if to is None else {"remote_address": to.region.address + at, "rkey": to.region.rkey}
        self.qp.post_send(SendRequest(wr_id, opcode, flags, sges, **(remote | rest)))  # type: ignore[arg-type]

    def receive(self, *sges: Sge, wr_id: int = 0) -> None:
        """Post a receive."""
        self.qp.post_recv(ReceiveRequest(wr_id, sges))

    def polled(self) -> list[WorkCompletion]:
        """All completions there are."""
        return self.cq.poll(1 << 20)


def make_end(
    nic: Nic,
    size: int,
    *,
    depth: int = 64,
    cqe: int = 4096,
    base: int = 0x10_0000,
    access: Access = ALL_ACCESS,
    signal_all: bool = False,
    srq: bool = False,
    kind: QpType = QpType.RC,
) -> End:
    """A device's objects, the queue pair in RESET."""
    pd = nic.alloc_pd()
    cq = nic.create_cq(cqe)
    shared: SharedReceiveQueue | None = nic.create_srq(pd, depth, 4) if srq else None
    qp = nic.create_qp(
        pd, kind, cq, cq, QpCapabilities(depth, depth, 4, 4, 256), signal_all=signal_all, srq=shared
    )
    memory = GuardedMemory(size)
    return End(nic, pd, cq, qp, memory, nic.reg_mr(pd, memory.view, base, access))


def attributes_for(end: End, peer: End, **changes: object) -> QpAttributes:
    """What `end` needs to know of `peer`; PSNs are numbers that wrap around soon."""
    values: dict[str, object] = {
        "path_mtu": Mtu.MTU_1024,
        "dest_qpn": peer.qp.number,
        "rq_psn": 0xFFFF00 + (peer.qp.number & 0x7F),
        "sq_psn": 0xFFFF00 + (end.qp.number & 0x7F),
        "access": ALL_ACCESS,
        "av": AddressVector(peer.nic.address),
        "max_rd_atomic": 4,
        "max_dest_rd_atomic": 4,
        "min_rnr_timer": 1,
        "port_num": 1,
        "timeout": 8,
        "retry_count": 7,
        "rnr_retry": 7,
    }
    return QpAttributes(**(values | changes))  # type: ignore[arg-type]


def move_up(end: End, attributes: QpAttributes, to: QpState = QpState.RTS) -> None:
    """From RESET towards RTS."""
    steps = MOVES[end.qp.type]
    previous = QpState.RESET
    for state in (QpState.INIT, QpState.RTR, QpState.RTS):
        attributes.state = state
        end.qp.modify(attributes, QpAttr.STATE | steps[previous, state].required)
        previous = state
        if state is to:
            return


class Pair:
    """Two connected ends, `a` and `b`, and the network between them."""

    def __init__(
        self,
        size: int = 1 << 16,
        *,
        weather: Weather = CALM,
        seed: int = 1,
        parted: bool = False,
        window_bytes: int = WINDOW_BYTES,
        numbered: bool = False,
        changes: dict[str, object] | None = None,
        **make: object,
    ) -> None:
        chance = random.Random(seed)
        self.network = MemoryNetwork(weather, random.Random(seed), parted=parted)
        nics = [Nic(f"10.0.0.{i}", rng=chance, window_bytes=window_bytes) for i in (1, 2)]
        self.a, self.b = (make_end(nic, size, **make) for nic in nics)  # type: ignore[arg-type]
        for end, peer in ((self.a, self.b), (self.b, self.a)):
            end.nic.segments_numbered = end.nic.solve_identification = numbered
            move_up(end, attributes_for(end, peer, **(changes or {})))
            self.network.attach(end.nic, end.nic.address)

    def run(self, seconds: float = 60.0) -> None:
        """Until nothing happens any more."""
        self.network.run(most_seconds=seconds)

    def run_until(self, count: int, end: End | None = None, seconds: float = 60.0) -> list[WorkCompletion]:
        """Until an end (`a`) has `count` completions, and these."""
        end = end or self.a
        self.network.run(lambda: len(end.cq) >= count, most_seconds=seconds)
        return end.polled()
