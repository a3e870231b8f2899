"""The emulated RDMA device: one IP address, its objects, and the packets that come and go. No I/O, no locks.

    nic = Nic("127.0.0.2", rng=random.Random())
    nic.receive(data, segment_size, source, now)        a datagram, or a row of them as UDP_GRO gives it
    while (burst := nic.next_burst(now)) is not None:   one sendmsg each, with UDP_SEGMENT
        send(burst)
    nic.advance(now)                                    at nic.deadline(), and at any other time

Whoever uses it from several threads holds one lock around every call, polling included. Nothing that arrives
raises anything: what is no good is dropped and counted by its cause in `counters`.

Read `queue_pair.py` next, then `requester.py` and `responder.py`; `packets_out.py` and `packets_in.py` are
the fast path of both.
"""

from __future__ import annotations

import random
import struct
from typing import Final

from emulator.roce.nic.counters import Count
from emulator.roce.nic.device_services import WINDOW_BYTES
from emulator.roce.nic.multicast import MULTICAST_QPN
from emulator.roce.nic.packets_in import RowReader, identification_of
from emulator.roce.nic.packets_out import MAX_BURST, ROW_OVERHEAD, VOLLEY_BURSTS
from emulator.roce.nic.path import incoming_flow
from emulator.roce.nic.resources import Objects
from emulator.roce.nic.verbs import Address, Burst, Limits
from emulator.roce.wire.bth import BTH, DEFAULT_P_KEY, LOW_24_BITS, MIGRATION_REQUEST
from emulator.roce.wire.flow import Flow
from emulator.roce.wire.malformed import Cause, MalformedPacket
from emulator.roce.wire.opcodes import ICRC_BYTES, SERVICE_SHIFT, Opcode, Service, class_of
from emulator.roce.wire.packet import decode_transport_untrusted

TURN_BURSTS: Final = VOLLEY_BURSTS
"""Bursts that a queue pair sends before it is the next one's turn: rows that follow each other are taken as
one by the receiver (`UdpLink`)."""

_ROW_OPCODES: Final = frozenset(
    {
        Opcode.SEND_MIDDLE,
        Opcode.WRITE_MIDDLE,
        Opcode.READ_RESPONSE_MIDDLE,
        Opcode.UC_SEND_MIDDLE,
        Opcode.UC_WRITE_MIDDLE,
    }
)
_NO_FLAGS: Final = ~MIGRATION_REQUEST & 0xFF

_ACKNOWLEDGEMENT: Final = struct.Struct(">BBHIII")
"""BTH and AETH. A syndrome of 0 to 31 is a positive acknowledgement."""
_ACKNOWLEDGEMENT_BYTES: Final = _ACKNOWLEDGEMENT.size + ICRC_BYTES


class Nic(Objects):
    """See the module's docstring."""

    def __init__(
        self,
        address: str,
        *,
        rng: random.Random,
        guid: int = 0,
        mtu: int = 4096,
        limits: Limits | None = None,
        window_bytes: int = WINDOW_BYTES,
    ) -> None:
        super().__init__(address, rng, guid, mtu, limits, window_bytes)
        self.solve_identification = False
        self._reader = RowReader()
        self.now = 0.0
        self.expects = 0
        """Bytes still to come of the message that the last row received was part of; half a window at most,
        because beyond that the peer may wait for an acknowledgement of ours."""
        self._in_turn = 0

    def fall_silent(self) -> None:
        """The device is about to close: connections send nothing more, management datagrams still go out."""
        for qp in self._qps.values():
            if qp.datagrams is None:
                qp.scheduled = True  # so it never asks for its turn again
        kept = [qp for qp in self.ready if qp.datagrams is not None]
        self.ready.clear()
        self.ready.extend(kept)

    @property
    def has_output(self) -> bool:
        """Whether `next_burst` may have something."""
        return bool(self.ready)

    def next_burst(self, now: float) -> Burst | None:
        """The next packets to send, queue pair by queue pair in turn; None when there is nothing now. What it
        gives is good until the next call."""
        self.now = now
        ready = self.ready
        while ready:
            qp = ready[0]
            burst = qp.next_burst(now)
            if burst is not None:
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

    def take_output(self, now: float | None = None) -> list[Burst]:
        """All that `next_burst` gives, copied: for links in memory. Without a time it is the latest known."""
        result = []
        at = self.now if now is None else now
        while (burst := self.next_burst(at)) is not None:
            result.append(burst._replace(data=memoryview(bytes(burst.data))))
        return result

    def deadline(self) -> float | None:
        """When `advance` is due, if nothing happens before."""
        if not self.running:
            return None
        return min([at for clock in self.running if (at := clock.deadline) is not None], default=None)

    def advance(self, now: float) -> None:
        """It is `now`: time-outs, the end of a wait for a receiver."""
        self.now = now
        for clock, call in list(self.running.items()):
            at = clock.deadline
            if at is not None and at <= now:
                call(now)

    def receive(
        self,
        data: memoryview,
        segment_size: int,
        source: Address | tuple[str, int],
        now: float,
        group: str = "",
    ) -> None:
        """Datagrams of `segment_size` bytes each (the last may be shorter) have come from `source`, for our
        own address or for a multicast group. The memory is the caller's again afterwards."""
        self.now = now
        try:
            flow = incoming_flow(group or self.address, source[0], source[1])
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
        return True

    def _receive_single(self, datagram: memoryview, flow: Flow, ip: str, index: int) -> None:
        if len(datagram) == _ACKNOWLEDGEMENT_BYTES and self._receive_acknowledgement(
            datagram, flow, ip, index
        ):
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
        elif known.request:
            qp.communication_seen()
            qp.responder.receive(packet)
        else:
            qp.requester.receive(packet, self.now)

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
