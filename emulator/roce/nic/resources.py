"""The objects of a device: what the verbs create, look up and destroy, each table with its bound.

What libibverbs refuses raises `VerbsError` with its errno: EINVAL for what makes no sense or is not of this
device, EBUSY for what is still used, ENOMEM for a full table.
"""

from __future__ import annotations

import errno
import random
from collections import deque
from collections.abc import Callable
from dataclasses import replace

from emulator.roce.nic.completion import CompletionQueue
from emulator.roce.nic.device_services import DeviceServices
from emulator.roce.nic.gid import gid_of
from emulator.roce.nic.memory import AddressHandle, Bind, Memory, MemoryRegion, MemoryWindow, ProtectionDomain
from emulator.roce.nic.multicast import MULTICAST_QPN, MulticastGroups
from emulator.roce.nic.queue_pair import SERVICES, QueuePair
from emulator.roce.nic.shared_receive import SharedReceiveQueue
from emulator.roce.nic.verbs import (
    GSI_QKEY,
    GSI_QPN,
    Access,
    AddressVector,
    AsyncEvent,
    EventType,
    Limits,
    MwType,
    QpCapabilities,
    QpState,
    QpType,
    SendFlags,
    SendOpcode,
    VerbsError,
)
from emulator.roce.nic.work_requests import SendRequest
from emulator.roce.wire.bth import LOW_24_BITS


class Objects(DeviceServices):
    """The half of a `Nic` that the verbs see."""

    def __init__(
        self, address: str, rng: random.Random, guid: int, mtu: int, limits: Limits | None, window: int
    ) -> None:
        self.gid = gid_of(address)
        self.guid = guid or rng.getrandbits(64)
        super().__init__(address, rng, mtu, limits, window)
        self.on_gone: Callable[[object], None] | None = None
        """Called with what was destroyed, for who keeps events of it elsewhere than in `async_events`."""
        self.ready: deque[QueuePair] = deque()
        """Queue pairs that may have something to send, each once, in the order of their turns."""
        self.groups = MulticastGroups(address, self.limits)
        self._rng = rng
        self._qps: dict[int, QueuePair] = {}
        self._pds: set[ProtectionDomain] = set()
        self._cqs: set[CompletionQueue] = set()
        self._srqs: set[SharedReceiveQueue] = set()
        self._ahs: set[AddressHandle] = set()
        self._next_pd = 1
        self._next_qpn = rng.randrange(2, 1 << 24)

    # --- protection domains, memory -----------------------------------------------------------------------

    def alloc_pd(self) -> ProtectionDomain:
        """ibv_alloc_pd."""
        self._room(self._pds, self.limits.max_pd, "protection domains")
        pd = ProtectionDomain(self._next_pd)
        self._next_pd += 1
        self._pds.add(pd)
        return pd

    def dealloc_pd(self, pd: ProtectionDomain) -> None:
        """ibv_dealloc_pd. EBUSY while anything belongs to it."""
        self._known(pd, self._pds, "protection domain")
        self._unused(pd.users, "protection domain")
        self._pds.discard(pd)

    def reg_mr(self, pd: ProtectionDomain, memory: Memory, address: int, access: Access) -> MemoryRegion:
        """ibv_reg_mr_iova: `address` is what both sides call the first byte of `memory`, any writable buffer,
        which stays exported until `dereg_mr`."""
        self._known(pd, self._pds, "protection domain")
        return self.keys.add_region(pd, memory, address, Access(access))

    def dereg_mr(self, region: MemoryRegion) -> None:
        """ibv_dereg_mr: from now on nothing reads or writes that memory."""
        self.keys.remove_region(region)

    def rereg_mr(
        self, region: MemoryRegion, pd: ProtectionDomain, memory: Memory, address: int, access: Access
    ) -> MemoryRegion:
        """ibv_rereg_mr: the keys of `region` lead to this from now on; refused, nothing has changed."""
        successor = self.reg_mr(pd, memory, address, access)
        try:
            self.keys.replace_region(region, successor)
        except VerbsError:
            self.keys.remove_region(successor)
            raise
        return successor

    def alloc_mw(self, pd: ProtectionDomain, kind: MwType) -> MemoryWindow:
        """ibv_alloc_mw."""
        self._known(pd, self._pds, "protection domain")
        return self.keys.add_window(pd, MwType(kind))

    def dealloc_mw(self, window: MemoryWindow) -> None:
        """ibv_dealloc_mw."""
        self.keys.remove_window(window)

    def bind_mw(self, qp: QueuePair, window: MemoryWindow, bind: Bind, wr_id: int = 0, flags: int = 0) -> int:
        """ibv_bind_mw of a type 1 window: a request like any other; the result is the new R_Key."""
        if window.type is not MwType.TYPE_1:
            raise VerbsError(errno.EINVAL, "a type 2 window is bound by a send request")
        rkey = window.rkey & ~0xFF | (window.rkey + 1 & 0xFF)
        qp.post_send(
            SendRequest(
                wr_id, SendOpcode.BIND_MW, SendFlags(flags), window=window, window_rkey=rkey, bind=bind
            )
        )
        return rkey

    # --- queues -------------------------------------------------------------------------------------------

    def create_cq(self, entries: int) -> CompletionQueue:
        """ibv_create_cq."""
        if not 1 <= entries <= self.limits.max_cqe:
            raise VerbsError(errno.EINVAL, f"a completion queue of {entries} entries is not possible")
        self._room(self._cqs, self.limits.max_cq, "completion queues")
        cq = CompletionQueue(entries, self.limits.max_cqe, self._overrun)
        self._cqs.add(cq)
        return cq

    def destroy_cq(self, cq: CompletionQueue) -> None:
        """ibv_destroy_cq. EBUSY while a queue pair uses it."""
        self._known(cq, self._cqs, "completion queue")
        self._unused(cq.users, "completion queue")
        self._cqs.discard(cq)
        self._forget_events_of(cq)

    def create_srq(
        self, pd: ProtectionDomain, max_wr: int, max_sge: int, limit: int = 0
    ) -> SharedReceiveQueue:
        """ibv_create_srq."""
        self._known(pd, self._pds, "protection domain")
        limits = self.limits
        if not 1 <= max_wr <= limits.max_srq_wr or not 0 <= max_sge <= limits.max_srq_sge or limit > max_wr:
            raise VerbsError(errno.EINVAL, f"a shared queue of {max_wr} receives of {max_sge} entries")
        self._room(self._srqs, limits.max_srq, "shared receive queues")
        srq = SharedReceiveQueue(
            pd,
            max_wr,
            max_sge,
            limit,
            limits.max_srq_wr,
            lambda queue: self.raise_event(AsyncEvent(EventType.SRQ_LIMIT_REACHED, queue)),
        )
        self._srqs.add(srq)
        pd.users += 1
        return srq

    def destroy_srq(self, srq: SharedReceiveQueue) -> None:
        """ibv_destroy_srq. EBUSY while a queue pair uses it."""
        self._known(srq, self._srqs, "shared receive queue")
        self._unused(srq.users, "shared receive queue")
        self._srqs.discard(srq)
        srq.pd.users -= 1
        self._forget_events_of(srq)

    def create_ah(self, pd: ProtectionDomain, av: AddressVector) -> AddressHandle:
        """ibv_create_ah."""
        self._known(pd, self._pds, "protection domain")
        self._room(self._ahs, self.limits.max_ah, "address handles")
        self.check_address(av)
        ah = AddressHandle(pd, av)
        self._ahs.add(ah)
        pd.users += 1
        return ah

    def destroy_ah(self, ah: AddressHandle) -> None:
        """ibv_destroy_ah."""
        self._known(ah, self._ahs, "address handle")
        self._ahs.discard(ah)
        ah.pd.users -= 1

    def create_qp(
        self,
        pd: ProtectionDomain,
        kind: QpType,
        send_cq: CompletionQueue,
        recv_cq: CompletionQueue,
        capabilities: QpCapabilities,
        *,
        signal_all: bool = False,
        srq: SharedReceiveQueue | None = None,
    ) -> QueuePair:
        """ibv_create_qp. The number is one that no queue pair of this device had of late."""
        while True:
            self._next_qpn = max(2, (self._next_qpn + self._rng.randrange(1, 64)) & LOW_24_BITS)
            if self._next_qpn != MULTICAST_QPN and self._next_qpn not in self._qps:
                break
        return self._make_qp(self._next_qpn, pd, kind, send_cq, recv_cq, capabilities, signal_all, srq)

    def create_gsi_qp(
        self,
        pd: ProtectionDomain,
        send_cq: CompletionQueue,
        recv_cq: CompletionQueue,
        capabilities: QpCapabilities,
    ) -> QueuePair:
        """QP1. EBUSY where there is one."""
        if GSI_QPN in self._qps:
            raise VerbsError(errno.EBUSY, "QP1 is in use")
        qp = self._make_qp(GSI_QPN, pd, QpType.UD, send_cq, recv_cq, capabilities, False, None)
        qp.attributes.qkey = GSI_QKEY
        return qp

    def _make_qp(
        self,
        number: int,
        pd: ProtectionDomain,
        kind: QpType,
        send_cq: CompletionQueue,
        recv_cq: CompletionQueue,
        capabilities: QpCapabilities,
        signal_all: bool,
        srq: SharedReceiveQueue | None,
    ) -> QueuePair:
        self._known(pd, self._pds, "protection domain")
        self._known(send_cq, self._cqs, "completion queue")
        self._known(recv_cq, self._cqs, "completion queue")
        if srq is not None:
            self._known(srq, self._srqs, "shared receive queue")
        if kind not in SERVICES:
            raise VerbsError(errno.EOPNOTSUPP, f"no queue pairs of type {int(kind)}")
        limits = self.limits
        wanted = capabilities
        if (
            not 0 <= wanted.max_send_wr <= limits.max_qp_wr
            or not 0 <= wanted.max_recv_wr <= limits.max_qp_wr
            or not 0 <= wanted.max_send_sge <= limits.max_sge
            or not 0 <= wanted.max_recv_sge <= limits.max_sge
            or not 0 <= wanted.max_inline_data <= limits.max_inline_data
        ):
            raise VerbsError(errno.EINVAL, f"{wanted} is beyond the limits")
        self._room(self._qps, limits.max_qp, "queue pairs")
        kind, own = QpType(kind), replace(capabilities)
        qp = QueuePair(self, self.ready, number, kind, pd, send_cq, recv_cq, own, signal_all, srq)
        self._qps[number] = qp
        pd.users += 1
        send_cq.users += 1
        recv_cq.users += 1
        if srq is not None:
            srq.users += 1
        return qp

    def destroy_qp(self, qp: QueuePair) -> None:
        """ibv_destroy_qp: what is queued is not completed any more. EBUSY while it is attached to a group."""
        self._known_qp(qp)
        self._unused(len(self.groups.groups_of(qp)), "queue pair")
        del self._qps[qp.number]
        qp.abandon()
        qp.pd.users -= 1
        qp.send_cq.users -= 1
        qp.recv_cq.users -= 1
        if qp.srq is not None:
            qp.srq.users -= 1
        self._forget_events_of(qp)

    def attach_mcast(self, qp: QueuePair, gid: bytes) -> None:
        """ibv_attach_mcast: see `MulticastGroups.attach`."""
        self._known_qp(qp)
        self.groups.attach(qp, gid)

    def detach_mcast(self, qp: QueuePair, gid: bytes) -> None:
        """ibv_detach_mcast: see `MulticastGroups.detach`."""
        self._known_qp(qp)
        self.groups.detach(qp, gid)

    def _known_qp(self, qp: QueuePair) -> None:
        if self._qps.get(qp.number) is not qp:
            raise VerbsError(errno.EINVAL, "this queue pair does not exist here")

    def close(self) -> None:
        """Everything goes at once, as with a process; no memory is touched afterwards."""
        self.groups.clear()
        for qp in list(self._qps.values()):
            self.destroy_qp(qp)
        self.keys.forget_all()
        self.ready.clear()
        for table in (self._cqs, self._srqs, self._ahs, self._pds):
            table.clear()

    @staticmethod
    def _known(thing: object, table: object, what: str) -> None:
        if thing not in table:  # type: ignore[operator]
            raise VerbsError(errno.EINVAL, f"this {what} does not exist here")

    @staticmethod
    def _unused(users: int, what: str) -> None:
        if users:
            raise VerbsError(errno.EBUSY, f"{users} objects use this {what}")

    @staticmethod
    def _room(table: object, most: int, what: str) -> None:
        if len(table) >= most:  # type: ignore[arg-type]
            raise VerbsError(errno.ENOMEM, f"no more than {most} {what}")

    # --- events -------------------------------------------------------------------------------------------

    def _forget_events_of(self, element: object) -> None:
        """Events of what is destroyed go with it, as the kernel discards those that nobody has taken
        (ib_uverbs_release_uevent)."""
        events = self.async_events
        for _ in range(len(events)):
            event = events.popleft()
            if event.element is not element:
                events.append(event)
        if self.on_gone is not None:
            self.on_gone(element)

    def _overrun(self, cq: CompletionQueue) -> None:
        self.raise_event(AsyncEvent(EventType.CQ_ERR, cq))
        for qp in list(self._qps.values()):
            if cq in (qp.send_cq, qp.recv_cq) and qp.state not in (QpState.RESET, QpState.ERR):
                self.raise_event(AsyncEvent(EventType.QP_FATAL, qp))
                qp.enter_error()
