"""The queue pair that a CMID may have of its own, and sending and receiving by it. Part of `pyverbs.cmid`."""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING

from emulator.roce.cm.attributes import queue_pair_attributes
from emulator.roce.cm.service_resolution import UDP_QKEY
from emulator.roce.nic.verbs import QpState, VerbsError
from emulator.roce.pyverbs.cq import CQ
from emulator.roce.pyverbs.enums_device import ibv_access_flags
from emulator.roce.pyverbs.enums_queues import ibv_qp_type, ibv_send_flags, ibv_wr_opcode
from emulator.roce.pyverbs.mr import MR
from emulator.roce.pyverbs.pd import PD, DomainUser
from emulator.roce.pyverbs.pyverbs_error import PyverbsRDMAError, PyverbsUserError
from emulator.roce.pyverbs.qp import QP, QPAttr, QPInitAttr
from emulator.roce.pyverbs.work_completion import WC
from emulator.roce.pyverbs.wr import SGE, RecvWR, SendWR
from emulator.roce.runtime.errors import DeviceClosed
from emulator.roce.wire.cm_ip import PortSpace

if TYPE_CHECKING:
    from emulator.roce.cm.connection import Connection
    from emulator.roce.pyverbs.addr import AH


class QueuePairOfId(DomainUser):
    """The half of a `CMID` that sends and receives."""

    __slots__ = ("_connection", "_own_cqs", "_port_space", "qp")

    def __init__(self, pd: PD | None) -> None:
        super().__init__(pd)
        self.qp: QP | None = None
        self._own_cqs: list[CQ] = []
        self._connection: Connection | None = None
        self._port_space = PortSpace.TCP

    @property
    def datagrams(self) -> bool:
        """Whether its port space is RDMA_PS_UDP. Not in pyverbs."""
        return self._port_space is PortSpace.UDP

    def connection(self) -> Connection:
        """What the connection manager knows it by. VerbsError(EINVAL) where there is none. Not in pyverbs."""
        if self._connection is None:
            raise VerbsError(errno.EINVAL, "the CMID has no connection")
        return self._connection

    def create_qp(self, qp_init: QPInitAttr) -> None:
        """A queue pair for the connection (rdma_create_qp), in INIT; for datagrams in RTS. Completion queues
        that `qp_init` does not name are made for it."""
        refused = "Failed to Create QP"
        if self.qp is not None:
            raise PyverbsRDMAError(refused, errno.EINVAL)
        wanted = ibv_qp_type.IBV_QPT_UD if self.datagrams else ibv_qp_type.IBV_QPT_RC
        if qp_init.qp_type != wanted:
            raise PyverbsRDMAError(refused, errno.EINVAL)
        pd = self.domain_holder()
        own: list[CQ] = []
        send_cq, recv_cq = qp_init.send_cq, qp_init.recv_cq
        if send_cq is None:
            send_cq = CQ(pd.ctx, max(1, qp_init.max_send_wr))
            own.append(send_cq)
        if recv_cq is None:
            recv_cq = CQ(pd.ctx, max(1, qp_init.max_recv_wr))
            own.append(recv_cq)
        attr = QPInitAttr(
            qp_init.qp_type, None, send_cq, recv_cq, qp_init.srq, qp_init.cap, qp_init.sq_sig_all
        )
        self.qp = QP(pd, attr)
        self._own_cqs = own
        try:
            self.set_queue_pair(QpState.INIT, *((QpState.RTR, QpState.RTS) if self.datagrams else ()))
        except VerbsError as error:
            self.close_queue_pair()
            raise PyverbsRDMAError(refused, error.errno) from error

    def set_queue_pair(self, *states: QpState) -> None:
        """Take it through these states as the connection wants it. VerbsError where that is refused.
        Not in pyverbs."""
        qp = self.qp
        if qp is None:
            return
        with self.opened().turn():
            for state in states:
                qp.pair.modify(*queue_pair_attributes(self.connection(), state))

    def close_queue_pair(self) -> None:
        """Give it back, with the completion queues that were made for it. Not in pyverbs."""
        if self.qp is not None:
            self.qp.close()
            self.qp = None
            for cq in self._own_cqs:
                cq.close()

    def _queue_pair(self, refused: str) -> QP:
        if self.qp is None:
            raise PyverbsRDMAError(refused, errno.EINVAL)
        return self.qp

    @property
    def qpn(self) -> int | None:
        """The number of the CMID's own queue pair; None where it has none."""
        return self.qp.qp_num if self.qp is not None else None

    def query_qp(self, attr_mask: int) -> tuple[QPAttr, QPInitAttr]:
        """All attributes of the queue pair."""
        return self._queue_pair("Failed to query QP").query(attr_mask)

    def reg_msgs(self, size: int) -> MR:
        """Memory for messages, allocated here."""
        return self._registered(size, ibv_access_flags.IBV_ACCESS_LOCAL_WRITE)

    def reg_read(self, size: int = 0) -> MR:
        """Memory that the peer may read, allocated here."""
        return self._registered(size, ibv_access_flags.IBV_ACCESS_REMOTE_READ)

    def reg_write(self, size: int = 0) -> MR:
        """Memory that the peer may write, allocated here."""
        return self._registered(size, ibv_access_flags.IBV_ACCESS_REMOTE_WRITE)

    def _registered(self, size: int, access: int) -> MR:
        return MR(self, size, access)

    def post_recv(self, mr: MR, length: int | None = None) -> None:
        """Post the region, or its first `length` bytes, for a message."""
        sge = SGE(mr.buf, length or mr.length, mr.lkey)
        self._queue_pair("Failed to Post Receive").post_recv(RecvWR(0, 1, [sge]))

    def post_send(
        self, mr: MR, flags: int = ibv_send_flags.IBV_SEND_SIGNALED, length: int | None = None
    ) -> None:
        """Send the region, or its first `length` bytes."""
        sge = SGE(mr.buf, length or mr.length, mr.lkey)
        request = SendWR(0, ibv_wr_opcode.IBV_WR_SEND, 1, 0, [sge], flags)
        self._queue_pair("Failed to Post Send").post_send(request)

    def post_read(self, mr: MR, length: int, remote_addr: int, rkey: int, flags: int = 0) -> None:
        """Read the peer's memory into the region."""
        self._post_remote(ibv_wr_opcode.IBV_WR_RDMA_READ, mr, length, remote_addr, rkey, flags)

    def post_write(self, mr: MR, length: int, remote_addr: int, rkey: int, flags: int = 0) -> None:
        """Write the region into the peer's memory."""
        self._post_remote(ibv_wr_opcode.IBV_WR_RDMA_WRITE, mr, length, remote_addr, rkey, flags)

    def _post_remote(self, opcode: int, mr: MR, length: int, remote_addr: int, rkey: int, flags: int) -> None:
        request = SendWR(0, opcode, 1, 0, [SGE(mr.buf, length, mr.lkey)], flags)
        request.set_wr_rdma(rkey, remote_addr)
        self._queue_pair("Failed to Post Read or Write").post_send(request)

    def post_ud_send(
        self,
        mr: MR,
        ah: AH,
        rqpn: int = 0,
        flags: int = ibv_send_flags.IBV_SEND_SIGNALED,
        length: int | None = None,
    ) -> None:
        """Send the region, or its first `length` bytes, to queue pair `rqpn` of an address."""
        sge = SGE(mr.buf, length or mr.length, mr.lkey)
        request = SendWR(0, ibv_wr_opcode.IBV_WR_SEND, 1, 0, [sge], flags)
        request.set_wr_ud(ah, rqpn, UDP_QKEY)
        self._queue_pair("Failed to Post Send").post_send(request)

    def get_recv_comp(self) -> WC | None:
        """Wait for the next completion of a receive."""
        return self._completion(self._queue_pair("Failed to retrieve receive completion").rcq)

    def get_send_comp(self) -> WC | None:
        """Wait for the next completion of a send."""
        return self._completion(self._queue_pair("Failed to retrieve send completion").scq)

    def _completion(self, cq: object) -> WC | None:
        if not isinstance(cq, CQ):
            raise PyverbsUserError("the completions are those of an extended CQ")
        while True:
            count, completions = cq.poll(1)
            if count:
                return completions[0]
            try:
                self.opened().drive_until(cq.queue.__len__, None)
            except DeviceClosed as error:
                raise PyverbsRDMAError("Failed to retrieve completion", errno.ENODEV) from error
