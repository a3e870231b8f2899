"""Datagram queue pairs on a network in memory: each with some memory and a few receives."""

from __future__ import annotations

import random

from emulator.roce.nic.multicast import MULTICAST_QPN
from emulator.roce.nic.nic import Nic
from emulator.roce.nic.verbs import (
    GSI_QKEY,
    AddressVector,
    QpAttr,
    QpAttributes,
    QpCapabilities,
    QpState,
    QpType,
    SendFlags,
    Sge,
    WorkCompletion,
)
from emulator.roce.nic.work_requests import ReceiveRequest, SendRequest
from tests.support.roce.ends import ALL_ACCESS, GuardedMemory
from tests.support.roce.memory_network import MemoryNetwork

QKEY = 0x1234


class Post:
    """A UD queue pair, or QP1, with 64 KiB of memory; on the device `beside` it or on a new one."""

    def __init__(
        self, network: MemoryNetwork, address: str, *, gsi: bool = False, beside: Post | None = None
    ) -> None:
        self.nic = beside.nic if beside is not None else Nic(address, rng=random.Random(address))
        self.pd = self.nic.alloc_pd()
        self.cq = self.nic.create_cq(64)
        caps = QpCapabilities(16, 16, 2, 2, 256)
        self.qp = self.nic.create_qp(self.pd, QpType.UD, self.cq, self.cq, caps, gsi=gsi)
        self.memory = GuardedMemory(1 << 16)
        self.region = self.nic.reg_mr(self.pd, self.memory.view, 0, ALL_ACCESS)
        attributes = QpAttributes(port_num=1, qkey=GSI_QKEY if gsi else QKEY)
        start = QpAttr.STATE | QpAttr.PKEY_INDEX | QpAttr.QKEY
        for state, mask in (
            (QpState.INIT, start if gsi else start | QpAttr.PORT),
            (QpState.RTR, QpAttr.STATE),
            (QpState.RTS, QpAttr.STATE | QpAttr.SQ_PSN),
        ):
            attributes.state = state
            self.qp.modify(attributes, mask)
        if beside is None:
            network.attach(self.nic, address)
            self.nic.groups.on_join = lambda group: network.join(group, address)
            self.nic.groups.on_leave = lambda group: network.leave(group, address)

    def send(self, to: Post, size: int, *, qkey: int = QKEY, **rest: object) -> None:
        ah = self.nic.create_ah(self.pd, AddressVector(to.nic.address))
        self.qp.post_send(
            SendRequest(
                1,
                sges=(Sge(0, size, self.region.lkey),),
                flags=SendFlags.SIGNALED,
                ah=ah,
                remote_qpn=to.qp.number,
                remote_qkey=qkey,
                **rest,  # type: ignore[arg-type]
            )
        )

    def send_to_group(
        self, group: str, size: int, *, qkey: int = QKEY, queue_pair: int = MULTICAST_QPN, wr_id: int = 1
    ) -> None:
        ah = self.nic.create_ah(self.pd, AddressVector(group))
        self.qp.post_send(
            SendRequest(
                wr_id,
                sges=(Sge(0, size, self.region.lkey),),
                flags=SendFlags.SIGNALED,
                ah=ah,
                remote_qpn=queue_pair,
                remote_qkey=qkey,
            )
        )

    def receive(self, size: int) -> None:
        self.qp.post_recv(ReceiveRequest(2, (Sge(0x8000, size, self.region.lkey),)))

    def polled(self) -> list[WorkCompletion]:
        return self.cq.poll(64)
