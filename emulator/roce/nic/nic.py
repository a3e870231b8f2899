"""The emulated RDMA device: one IP address, its objects, and the packets that come and go. No I/O, no locks.

    nic = Nic("127.0.0.2", rng=random.Random())
    nic.receive(data, segment_size, source, now)        a datagram, or a row of them as UDP_GRO gives it
    while (burst := nic.next_burst(now)) is not None:   one sendmsg each, with UDP_SEGMENT
        send(burst)
    nic.advance(now)                                    at nic.deadline(), and at any other time

A program with several threads holds one lock around every call, polling included. No packet raises an error:
the device drops a bad one and counts its cause in `counters`.

A call that libibverbs refuses raises `VerbsError` with its errno: EINVAL for arguments that make no sense or
belong to another device, EBUSY for an object in use, ENOMEM for a full table.

Read `queue_pair.py` next, then `requester.py` and `responder.py`; `packets_out.py` and `packets_in.py` are
the fast path of both.
"""

# One idea in one file: the device, its tables of objects and its packets.

import errno
import random
import struct
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Final

from emulator.roce.nic import verbs
from emulator.roce.nic.completion import CompletionQueue
from emulator.roce.nic.counters import Count
from emulator.roce.nic.device_services import WINDOW_BYTES, DeviceServices
from emulator.roce.nic.memory import AddressHandle, Memory, MemoryRegion, MemoryWindow, ProtectionDomain
from emulator.roce.nic.multicast import MULTICAST_QPN, MulticastGroups
from emulator.roce.nic.packets_in import RowReader, identification_of
from emulator.roce.nic.packets_out import MAX_BURST, ROW_OVERHEAD, VOLLEY_BURSTS
from emulator.roce.nic.queue_pair import SERVICES, QueuePair
from emulator.roce.nic.shared_receive import SharedReceiveQueue
from emulator.roce.wire.bth import BTH, DEFAULT_P_KEY, LOW_24_BITS, MIGRATION_REQUEST
from emulator.roce.wire.cnp import decode_cnp_untrusted, is_cnp_untrusted
from emulator.roce.wire.flow import Flow, flow_of, gid_of
from emulator.roce.wire.malformed import Cause, MalformedPacket
from emulator.roce.wire.opcodes import ICRC_BYTES, SERVICE_SHIFT, Opcode, Service, class_of
from emulator.roce.wire.packet import decode_transport_untrusted

TURN_BURSTS: Final = VOLLEY_BURSTS
"""Bursts that a queue pair sends before it is the next one's turn: rows that follow each other are taken as
one by the receiver (`UdpLink`)."""

_ROW_OPCODES: Final = frozenset(opcode for opcode in Opcode if opcode.name.endswith("_MIDDLE"))
_NO_FLAGS: Final = ~MIGRATION_REQUEST & 0xFF

_ACKNOWLEDGEMENT: Final = struct.Struct(">BBHIII")
"""BTH and AETH. A syndrome of 0 to 31 is a positive acknowledgement."""
_ACKNOWLEDGEMENT_BYTES: Final = _ACKNOWLEDGEMENT.size + ICRC_BYTES


class Nic(DeviceServices):
    """See the module's docstring: first what the verbs create, look up and destroy, then packets."""

    def __init__(
        self,
        address: str,
        *,
        rng: random.Random,
        guid: int = 0,
        mtu: int = 4096,
        limits: verbs.Limits | None = None,
        window_bytes: int = WINDOW_BYTES,
    ) -> None:
        self.gid = gid_of(address)
        self.guid = guid or rng.getrandbits(64)
        super().__init__(address, rng, mtu, limits, window_bytes)
        self.on_gone: Callable[[object], None] | None = None
        """Called with a destroyed object, for an owner that keeps its events elsewhere than in
        `async_events`."""
        self.ready: deque[QueuePair] = deque()
        """Queue pairs that may have something to send, each once, in the order of their turns."""
        self.groups = MulticastGroups(address, self.limits)
        self._qps: dict[int, QueuePair] = {}
        self._pds: set[ProtectionDomain] = set()
        self._cqs: set[CompletionQueue] = set()
        self._srqs: set[SharedReceiveQueue] = set()
        self._ahs: set[AddressHandle] = set()
        self._next_pd = 1
        self._rng = rng
        self._next_qpn = rng.randrange(2, 1 << 24)
        self.solve_identification = False
        self._reader = RowReader()
        self.now = 0.0
        self.expects = 0
        """Bytes still to come of the message that the last row received was part of; half a window at most,
        because beyond that the peer may wait for an acknowledgement of ours."""
        self._in_turn = 0
        self._marked = False
        """What is received now was marked by a switch, which matters here."""

    def alloc_pd(self) -> ProtectionDomain:
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

    def reg_mr(
        self, pd: ProtectionDomain, memory: Memory, address: int, access: verbs.Access
    ) -> MemoryRegion:
        """ibv_reg_mr_iova: `address` is what both sides call the first byte of `memory`, any writable buffer,
        which stays exported until `dereg_mr`."""
        self._known(pd, self._pds, "protection domain")
        return self.keys.add_region(pd, memory, address, verbs.Access(access))

    def dereg_mr(self, region: MemoryRegion) -> None:
        """ibv_dereg_mr: from now on nothing reads or writes that memory."""
        self.keys.remove_region(region)

    def rereg_mr(
        self, region: MemoryRegion, pd: ProtectionDomain, memory: Memory, address: int, access: verbs.Access
    ) -> MemoryRegion:
        """ibv_rereg_mr: the keys of `region` lead to this from now on; refused, nothing has changed."""
        successor = self.reg_mr(pd, memory, address, access)
        try:
            self.keys.replace_region(region, successor)
        except verbs.VerbsError:
            self.keys.remove_region(successor)
            raise
        return successor

    def alloc_mw(self, pd: ProtectionDomain, kind: verbs.MwType) -> MemoryWindow:
        self._known(pd, self._pds, "protection domain")
        return self.keys.add_window(pd, verbs.MwType(kind))

    def dealloc_mw(self, window: MemoryWindow) -> None:
        self.keys.remove_window(window)

    def create_cq(self, entries: int) -> CompletionQueue:
        if not 1 <= entries <= self.limits.max_cqe:
            raise verbs.VerbsError(errno.EINVAL, f"a completion queue of {entries} entries is not possible")
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
        self._known(pd, self._pds, "protection domain")
        limits = self.limits
        if not 1 <= max_wr <= limits.max_srq_wr or not 0 <= max_sge <= limits.max_srq_sge or limit > max_wr:
            raise verbs.VerbsError(errno.EINVAL, f"a shared queue of {max_wr} receives of {max_sge} entries")
        self._room(self._srqs, limits.max_srq, "shared receive queues")
        srq = SharedReceiveQueue(
            pd,
            max_wr,
            max_sge,
            limit,
            limits.max_srq_wr,
            lambda queue: self.raise_event(verbs.AsyncEvent(verbs.EventType.SRQ_LIMIT_REACHED, queue)),
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

    def create_ah(self, pd: ProtectionDomain, av: verbs.AddressVector) -> AddressHandle:
        self._known(pd, self._pds, "protection domain")
        self._room(self._ahs, self.limits.max_ah, "address handles")
        self.check_address(av)
        ah = AddressHandle(pd, av)
        self._ahs.add(ah)
        pd.users += 1
        return ah

    def destroy_ah(self, ah: AddressHandle) -> None:
        self._known(ah, self._ahs, "address handle")
        self._ahs.discard(ah)
        ah.pd.users -= 1

    def create_qp(
        self,
        pd: ProtectionDomain,
        kind: verbs.QpType,
        send_cq: CompletionQueue,
        recv_cq: CompletionQueue,
        capabilities: verbs.QpCapabilities,
        *,
        signal_all: bool = False,
        srq: SharedReceiveQueue | None = None,
        gsi: bool = False,
    ) -> QueuePair:
        """ibv_create_qp. The number is one that no queue pair of this device had of late; with `gsi` it is
        QP1, and EBUSY where there is one."""
        number = verbs.GSI_QPN if gsi else self._new_number()
        if gsi and verbs.GSI_QPN in self._qps:
            raise verbs.VerbsError(errno.EBUSY, "QP1 is in use")
        self._known(pd, self._pds, "protection domain")
        self._known(send_cq, self._cqs, "completion queue")
        self._known(recv_cq, self._cqs, "completion queue")
        if srq is not None:
            self._known(srq, self._srqs, "shared receive queue")
        if kind not in SERVICES:
            raise verbs.VerbsError(errno.EOPNOTSUPP, f"no queue pairs of type {int(kind)}")
        limits = self.limits
        wanted = capabilities
        if (
            not 0 <= wanted.max_send_wr <= limits.max_qp_wr
            or not 0 <= wanted.max_recv_wr <= limits.max_qp_wr
            or not 0 <= wanted.max_send_sge <= limits.max_sge
            or not 0 <= wanted.max_recv_sge <= limits.max_sge
            or not 0 <= wanted.max_inline_data <= limits.max_inline_data
        ):
            raise verbs.VerbsError(errno.EINVAL, f"{wanted} is beyond the limits")
        self._room(self._qps, limits.max_qp, "queue pairs")
        kind, own = verbs.QpType(kind), replace(capabilities)
        qp = QueuePair(self, self.ready, number, kind, pd, send_cq, recv_cq, own, signal_all, srq)
        self._qps[number] = qp
        pd.users += 1
        send_cq.users += 1
        recv_cq.users += 1
        if srq is not None:
            srq.users += 1
        if gsi:
            qp.attributes.qkey = verbs.GSI_QKEY
        return qp

    def _new_number(self) -> int:
        while True:
            self._next_qpn = max(2, (self._next_qpn + self._rng.randrange(1, 64)) & LOW_24_BITS)
            if self._next_qpn != MULTICAST_QPN and self._next_qpn not in self._qps:
                return self._next_qpn

    def destroy_qp(self, qp: QueuePair) -> None:
        """ibv_destroy_qp: what is queued is not completed any more. EBUSY while it is attached to a group."""
        self._known_qp(qp)
        self._unused(len(self.groups.groups_of(qp)), "queue pair")
        del self._qps[qp.number]
        qp.reset()
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
            raise verbs.VerbsError(errno.EINVAL, "this queue pair does not exist here")

    def close(self) -> None:
        """Destroy everything at once, as at the end of a process. No memory is touched afterwards."""
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
            raise verbs.VerbsError(errno.EINVAL, f"this {what} does not exist here")

    @staticmethod
    def _unused(users: int, what: str) -> None:
        if users:
            raise verbs.VerbsError(errno.EBUSY, f"{users} objects use this {what}")

    @staticmethod
    def _room(table: object, most: int, what: str) -> None:
        if len(table) >= most:  # type: ignore[arg-type]
            raise verbs.VerbsError(errno.ENOMEM, f"no more than {most} {what}")

    def _forget_events_of(self, element: object) -> None:
        """Drop the events of a destroyed object, as the kernel drops untaken ones
        (ib_uverbs_release_uevent)."""
        events = self.async_events
        for _ in range(len(events)):
            event = events.popleft()
            if event.element is not element:
                events.append(event)
        if self.on_gone is not None:
            self.on_gone(element)

    def _overrun(self, cq: CompletionQueue) -> None:
        self.raise_event(verbs.AsyncEvent(verbs.EventType.CQ_ERR, cq))
        for qp in list(self._qps.values()):
            if cq in (qp.send_cq, qp.recv_cq) and qp.state not in (verbs.QpState.RESET, verbs.QpState.ERR):
                self.raise_event(verbs.AsyncEvent(verbs.EventType.QP_FATAL, qp))
                qp.enter_error()

    def fall_silent(self) -> None:
        """The device is about to close: connections send no more, management datagrams still go out."""
        for qp in self._qps.values():
            if qp.datagrams is None:
                qp.scheduled = True  # so it never asks for its turn again
        kept = [qp for qp in self.ready if qp.datagrams is not None]
        self.ready.clear()
        self.ready.extend(kept)

    def next_burst(self, now: float) -> verbs.Burst | None:
        """The next packets to send, queue pair by queue pair in turn; None when there is nothing now. They
        are valid until the next call."""
        self.now = now
        ready, congestion = self.ready, self.congestion
        if congestion is not None:
            notice = congestion.next_notice()
            if notice is not None:
                self.counters[Count.CNP_SENT] += 1
                return notice
            if now < congestion.port_free_at:
                return None
        while ready:
            qp = ready[0]
            burst = qp.next_burst(now)
            if burst is not None:
                if congestion is not None:
                    congestion.sent(len(burst.data), now)
                    if qp.limiter is not None:
                        qp.limiter.sent(len(burst.data), now)
                self._in_turn += 1 + len(burst.data) // MAX_BURST
                if self._in_turn >= TURN_BURSTS:
                    self._in_turn = 0
                    ready.rotate(-1)
                self.counters[Count.BURSTS_OUT] += 1
                return burst
            qp.scheduled = False
            ready.popleft()
            self._in_turn = 0
        return None

    def deadline(self) -> float | None:
        """When `advance` is due, if nothing happens before."""
        first: float | None = None
        if self.congestion is not None:
            first = self.congestion.deadline(len(self.ready) > 0)
        for clock in self.running:
            at = clock.deadline
            if at is not None and (first is None or at < first):
                first = at
        return first

    def advance(self, now: float) -> None:
        """It is `now`: handle time-outs, and the end of a wait for a receiver, or for a paced turn."""
        self.now = now
        if self.congestion is not None:
            self.congestion.advance(now)
        for clock, call in list(self.running.items()):
            at = clock.deadline
            if at is not None and at <= now:
                call(now)

    def receive(
        self,
        data: memoryview,
        segment_size: int,
        source: verbs.Address | tuple[str, int],
        now: float,
        group: str = "",
        marked: bool = False,
    ) -> None:
        """Datagrams of `segment_size` bytes each (the last may be shorter) have come from `source`, for our
        own address or for a multicast group. `marked`: a switch has marked all of them (ECN, congestion
        experienced). The memory is the caller's again afterwards."""
        self.now = now
        self._marked = marked and self.congestion is not None
        try:
            flow = flow_of(source[0], group or self.address, source[1])
        except ValueError:
            self.counters[Count.STRANGE_SOURCE] += 1
            return
        self.expects = 0
        at, index, size = 0, 0, len(data)
        segment_size = max(1, segment_size)
        if group:
            for index, at in enumerate(range(0, size, segment_size)):
                self.counters[Count.PACKETS_IN] += 1
                self._receive_multicast(data[at : at + segment_size], flow, group, index)
            return
        while at < size:
            whole = (size - at) // segment_size
            count = (
                self._receive_row(data, at, segment_size, whole, flow, source[0], index) if whole > 1 else 0
            )
            if not count:
                count = 1
                self._receive_single(data[at : at + segment_size], flow, source[0], index)
            self.counters[Count.PACKETS_IN] += count
            at += count * segment_size
            index += count

    def _receive_row(
        self, data: memoryview, at: int, segment_size: int, most: int, flow: Flow, ip: str, index: int
    ) -> int:
        """Take as many packets as are a plain row of one message, and say how many; 0 for anything else."""
        mtu = segment_size - ROW_OVERHEAD
        if mtu < 256:
            return 0
        opcode, flags, p_key, queue_pair, sequence = BTH.unpack_from(data, at)
        if opcode not in _ROW_OPCODES or flags & _NO_FLAGS or p_key != DEFAULT_P_KEY:
            return 0
        qp = self._qps.get(queue_pair)
        if qp is None or opcode >> SERVICE_SHIFT != qp.service or not qp.receiving:
            return 0
        if qp.mtu != mtu or qp.path.ip != ip:
            return 0
        answer = opcode == Opcode.READ_RESPONSE_MIDDLE
        psn = sequence & LOW_24_BITS
        place = qp.requester.row_target(psn, most) if answer else qp.responder.row_target(opcode, psn, most)
        if place is None or place[0] < 2:
            return 0
        row = self._reader.match(data, at, mtu, place[0], flow, index, self.solve_identification)
        if row is None:
            return 0
        if answer:
            expects = qp.requester.take_row(row, place[1], self.now)
        else:
            expects = qp.responder.take_row(row, place[1])
        self.expects = min(expects, self.window_bytes // 2)
        self.counters[Count.ROW_PACKETS] += row.count
        if self._marked:
            self._congestion_seen(qp, p_key, row.count)
        return row.count

    def _receive_acknowledgement(self, datagram: memoryview, flow: Flow, ip: str, index: int) -> bool:
        """Take a plain positive acknowledgement, the most frequent single packet; False for all else."""
        opcode, flags, p_key, queue_pair, sequence, word = _ACKNOWLEDGEMENT.unpack(datagram[:-ICRC_BYTES])
        if opcode != Opcode.ACKNOWLEDGE or flags & _NO_FLAGS or p_key != DEFAULT_P_KEY or word >> 29:
            return False
        qp = self._qps.get(queue_pair)
        if qp is None or qp.service is not Service.RC or not qp.receiving or qp.path.ip != ip:
            return False
        if identification_of(datagram, flow, index, self.solve_identification) is None:
            return False
        qp.requester.acknowledged(sequence & LOW_24_BITS, self.now)
        if self._marked:
            self._congestion_seen(qp, p_key, 1)
        return True

    def _receive_single(self, datagram: memoryview, flow: Flow, ip: str, index: int) -> None:
        if len(datagram) == _ACKNOWLEDGEMENT_BYTES and self._receive_acknowledgement(
            datagram, flow, ip, index
        ):
            return
        if self.congestion is not None and is_cnp_untrusted(datagram):
            self._receive_notification(datagram, flow, ip, index)
            return
        counters = self.counters
        try:
            packet = decode_transport_untrusted(datagram)
        except MalformedPacket as error:
            counters[error.cause] += 1
            return
        known = class_of(packet.opcode)
        qp = self._qps.get(packet.queue_pair)
        if qp is None:
            counters[Count.NO_QUEUE_PAIR] += 1
        elif known.service is not qp.service:
            counters[Count.WRONG_SERVICE] += 1
        elif not qp.receiving:
            counters[Count.NOT_READY] += 1
        elif qp.datagrams is None and qp.path.ip != ip:
            counters[Count.WRONG_PEER] += 1
        elif packet.p_key & 0x7FFF != DEFAULT_P_KEY & 0x7FFF:
            counters[Count.WRONG_PKEY] += 1
        elif identification_of(datagram, flow, index, self.solve_identification) is None:
            counters[Cause.ICRC] += 1
        elif len(packet.payload) > qp.mtu and qp.datagrams is not None:
            counters[Count.MTU] += 1
        elif qp.datagrams is not None:
            qp.datagrams.receive(packet, datagram, flow)
        else:
            if self._marked:
                self._congestion_seen(qp, packet.p_key, 1)
            if known.request:
                qp.communication_seen()
                qp.responder.receive(packet)
            else:
                qp.requester.receive(packet, self.now)

    def _congestion_seen(self, qp: QueuePair, p_key: int, count: int) -> None:
        """`count` valid packets of a connection were marked: a CNP for its sender, if it had none of late."""
        congestion = self.congestion
        assert congestion is not None
        self.counters[Count.CE_IN] += count
        if self.now >= qp.notify_after:
            qp.notify_after = self.now + congestion.settings.cnp_interval_s
            congestion.notify(qp.path, qp.attributes.dest_qpn, p_key)

    def _receive_notification(self, datagram: memoryview, flow: Flow, ip: str, index: int) -> None:
        """A CNP, which is for a connection with its sender, or for nobody."""
        counters = self.counters
        try:
            cnp = decode_cnp_untrusted(datagram)
        except MalformedPacket as error:
            counters[error.cause] += 1
            return
        qp = self._qps.get(cnp.queue_pair)
        if qp is None or qp.datagrams is not None or not qp.receiving or qp.path.ip != ip:
            counters[Count.CNP_IGNORED] += 1
        elif cnp.p_key & 0x7FFF != DEFAULT_P_KEY & 0x7FFF:
            counters[Count.WRONG_PKEY] += 1
        elif identification_of(datagram, flow, index, self.solve_identification) is None:
            counters[Cause.ICRC] += 1
        else:
            counters[Count.CNP_HANDLED] += 1
            qp.congestion_notified(self.now)

    def _receive_multicast(self, datagram: memoryview, flow: Flow, group: str, index: int) -> None:
        """One datagram for all queue pairs that are attached to a group."""
        counters = self.counters
        try:
            packet = decode_transport_untrusted(datagram)
        except MalformedPacket as error:
            counters[error.cause] += 1
            return
        members = self.groups.members(group)
        if packet.queue_pair != MULTICAST_QPN:
            counters[Count.NO_QUEUE_PAIR] += 1
        elif not members:
            counters[Count.NO_GROUP] += 1
        elif class_of(packet.opcode).service is not Service.UD:
            counters[Count.WRONG_SERVICE] += 1
        elif packet.p_key & 0x7FFF != DEFAULT_P_KEY & 0x7FFF:
            counters[Count.WRONG_PKEY] += 1
        elif identification_of(datagram, flow, index, self.solve_identification) is None:
            counters[Cause.ICRC] += 1
        else:
            for qp in members:
                if not qp.receiving:
                    counters[Count.NOT_READY] += 1
                elif len(packet.payload) > qp.mtu:
                    counters[Count.MTU] += 1
                elif qp.datagrams is not None:
                    qp.datagrams.receive(packet, datagram, flow)
