"""The responder of a reliable connection: requests in PSN order, each carried out once (IBTA 9.7.4).

Checks run in rxe's order: PSN, sequence of opcodes, whether this queue pair allows the operation, receive
request, length, R_Key. A packet out of sequence gets one NAK (PSN sequence error), a missing receive an RNR
NAK each time, and any other fault a NAK that ends the queue pair.

At most `max_dest_rd_atomic` resources serve duplicates: the memory of a READ, which is read again, and the
result of an atomic, which is not carried out again (9.7.4.4, 9.7.5.1.4).
"""

# One idea in one file: requests carried out, and the answers that go out for them in the same order.

from collections import deque
from dataclasses import dataclass
from typing import Final, TypeAlias

from emulator.roce.nic.counters import Count
from emulator.roce.nic.memory import EMPTY, Bytes, ProtectionFault, SpanList
from emulator.roce.nic.packets_in import Row
from emulator.roce.nic.pending_send import ATOMIC_BYTES, extended_psn
from emulator.roce.nic.qp_context import QpContext
from emulator.roce.nic.verbs import (
    MAX_MESSAGE,
    NO_WC_FLAGS,
    Access,
    Burst,
    EventType,
    WcFlags,
    WcOpcode,
    WcStatus,
    WorkCompletion,
)
from emulator.roce.nic.work_requests import ReceiveRequest
from emulator.roce.wire.bth import LOW_24_BITS
from emulator.roce.wire.extended import (
    AETH,
    ATOMIC_ACK_ETH,
    SYNDROME_ACK,
    NakCode,
    nak_syndrome,
    read_packets,
    rnr_syndrome,
)
from emulator.roce.wire.opcodes import Opcode, OpcodeClass, Operation, class_of
from emulator.roce.wire.packet import Packet

_REMOTE_WRITE: Final = int(Access.REMOTE_WRITE)
_REMOTE_READ: Final = int(Access.REMOTE_READ)
_REMOTE_ATOMIC: Final = int(Access.REMOTE_ATOMIC)
_NEEDED: Final = {
    Operation.SEND: 0,
    Operation.WRITE: _REMOTE_WRITE,
    Operation.READ_REQUEST: _REMOTE_READ,
    Operation.ATOMIC: _REMOTE_ATOMIC,
    Operation.ATOMIC_WRITE: _REMOTE_WRITE,
}
_64_BITS: Final = (1 << 64) - 1


class Refusal(Exception):
    """The request cannot be carried out. `status` completes the receive request that it took; `event` is for
    the program."""

    def __init__(
        self, code: NakCode, status: WcStatus = WcStatus.LOC_QP_OP_ERR, event: EventType | None = None
    ) -> None:
        super().__init__(code)
        self.code = code
        self.status = status
        self.event = event


class NotReady(Exception):
    """No receive is posted."""


@dataclass(slots=True)
class _Resource:
    """A READ or atomic that was carried out, kept for its duplicates."""

    first: int
    end: int
    address: int
    rkey: int
    length: int
    original: int | None = None


class Responder:
    """See the module's docstring. Belongs to one queue pair."""

    def __init__(self, qp: QpContext) -> None:
        self._qp = qp
        self.responses = Responses(qp)
        self._resources: deque[_Resource] = deque()
        self.start(0)

    def start(self, psn: int) -> None:
        """Expect this PSN, and forget all before it."""
        self.expected = psn + (1 << 24)
        self._messages = 0
        self._nak_sent = False
        self._resources.clear()
        self.responses.clear()
        self._end_message()
        self._receive: ReceiveRequest | None = None

    def _end_message(self) -> None:
        self._operation: Operation | None = None
        self._spans: SpanList = EMPTY
        self._offset = 0
        self._total = 0

    def flush(self) -> None:
        """Complete the receive that is under way with WR_FLUSH_ERR; nothing more is received."""
        if self._receive is not None:
            self._complete(WcStatus.WR_FLUSH_ERR)
        self._end_message()
        self._resources.clear()

    def next_burst(self, paced: bool = False) -> Burst | None:
        """The next answer; where the connection is `paced`, no data of a READ."""
        return self.responses.next_burst(paced) if self.responses else None

    def receive(self, packet: Packet) -> None:
        """A request from the peer, whose form has been checked."""
        psn = extended_psn(packet.psn, self.expected)
        if psn > self.expected:
            self._count(Count.OUT_OF_SEQUENCE)
            if not self._nak_sent:
                self._nak_sent = True
                self._nak(NakCode.PSN_SEQUENCE_ERROR)
            return
        known = class_of(packet.opcode)
        if psn < self.expected:
            self._duplicate(packet, psn, known)
            return
        self._nak_sent = False
        try:
            self._carry_out(packet, known)
        except NotReady:
            self._count(Count.RNR_NAK_SENT)
            syndrome = rnr_syndrome(self._qp.attributes.min_rnr_timer)
            self.responses.acknowledge(self.expected, self._messages, syndrome)
        except Refusal as refusal:
            self._refuse(refusal)

    def _nak(self, code: NakCode) -> None:
        self._count(Count.NAK_SENT)
        self.responses.acknowledge(self.expected, self._messages, nak_syndrome(code))

    def _refuse(self, refusal: Refusal) -> None:
        self._nak(refusal.code)
        if self._receive is not None:
            self._complete(refusal.status)
        if refusal.event is not None:
            self._qp.tell(refusal.event)
        self._qp.responder_failed()

    def _carry_out(self, packet: Packet, known: OpcodeClass) -> None:
        operation, qp = known.operation, self._qp
        starts = known.first
        if starts != (self._operation is None) or (not starts and operation is not self._operation):
            raise Refusal(NakCode.INVALID_REQUEST, event=EventType.QP_REQ_ERR)
        if _NEEDED[operation] & ~int(qp.attributes.access):
            raise Refusal(NakCode.INVALID_REQUEST, event=EventType.QP_REQ_ERR)
        try:
            if operation is Operation.READ_REQUEST:
                self._read(packet)
            elif operation is Operation.ATOMIC:
                self._atomic(packet)
            elif operation is Operation.ATOMIC_WRITE:
                self._atomic_write(packet)
            elif operation is Operation.SEND:
                self._send(packet, known)
            else:
                self._write(packet, known)
        except ProtectionFault as fault:  # of the memory that the peer named
            code, status = NakCode.REMOTE_ACCESS_ERROR, WcStatus.LOC_ACCESS_ERR
            raise Refusal(code, status, EventType.QP_ACCESS_ERR) from fault
        if packet.acknowledge and operation in (Operation.SEND, Operation.WRITE):
            self.responses.acknowledge(self.expected - 1, self._messages)

    def _take_receive(self) -> ReceiveRequest:
        request = self._qp.receives.take()
        if request is None:
            raise NotReady
        self._receive = request
        return request

    def _check_size(self, known: OpcodeClass, size: int) -> None:
        mtu = self._qp.mtu
        if size > mtu or (not known.last and size != mtu) or (known.last and not known.first and not size):
            raise Refusal(NakCode.INVALID_REQUEST, WcStatus.LOC_LEN_ERR, EventType.QP_REQ_ERR)

    def _send(self, packet: Packet, known: OpcodeClass) -> None:
        payload = memoryview(packet.payload)
        if known.first:
            request = self._take_receive()
            try:
                self._spans = self._qp.scatter_of(request)
            except ProtectionFault as fault:
                raise Refusal(NakCode.REMOTE_OPERATIONAL_ERROR, WcStatus.LOC_PROT_ERR) from fault
        self._check_size(known, len(payload))
        if self._offset + len(payload) > min(self._spans.length, MAX_MESSAGE):
            raise Refusal(NakCode.INVALID_REQUEST, WcStatus.LOC_LEN_ERR)
        try:
            self._spans.place(self._offset, payload)
        except ProtectionFault as fault:
            raise Refusal(NakCode.REMOTE_OPERATIONAL_ERROR, WcStatus.LOC_PROT_ERR) from fault
        flags, imm = NO_WC_FLAGS, 0
        if packet.invalidate is not None:
            try:
                self._qp.keys.invalidate(self._qp.pd, self._qp.number, packet.invalidate)
            except ProtectionFault as fault:
                raise Refusal(NakCode.REMOTE_ACCESS_ERROR, WcStatus.REM_INV_REQ_ERR) from fault
            flags, imm = WcFlags.WITH_INV, packet.invalidate
        elif packet.immediate is not None:
            flags, imm = WcFlags.WITH_IMM, packet.immediate
        self._operation = Operation.SEND
        self._offset += len(payload)
        self.expected += 1
        if known.last:
            self._messages += 1
            length = self._offset
            self._end_message()
            self._complete(WcStatus.SUCCESS, length=length, imm=imm, flags=flags, solicited=packet.solicited)

    def _write(self, packet: Packet, known: OpcodeClass) -> None:
        payload = memoryview(packet.payload)
        spans, offset, total = self._spans, self._offset, self._total
        if known.first:
            assert packet.reth is not None
            address, rkey, total = packet.reth
            offset = 0
            if total > MAX_MESSAGE:
                raise Refusal(NakCode.INVALID_REQUEST, event=EventType.QP_REQ_ERR)
            spans = self._remote(rkey, address, total, _REMOTE_WRITE)
        self._check_size(known, len(payload))
        left = total - offset - len(payload)
        if left < 0 or (left > 0) == known.last:
            raise Refusal(NakCode.INVALID_REQUEST, event=EventType.QP_REQ_ERR)
        if packet.immediate is not None:
            self._take_receive()
        spans.place(offset, payload)
        self._operation = Operation.WRITE
        self._spans, self._offset, self._total = spans, offset + len(payload), total
        self.expected += 1
        if known.last:
            self._messages += 1
            self._end_message()
            if packet.immediate is not None:
                self._complete(
                    WcStatus.SUCCESS,
                    opcode=WcOpcode.RECV_RDMA_WITH_IMM,
                    length=total,
                    imm=packet.immediate,
                    flags=WcFlags.WITH_IMM,
                    solicited=packet.solicited,
                )

    def _remote(self, rkey: int, address: int, length: int, need: int) -> SpanList:
        if not length:
            # Nothing is reached, so no key is looked at (IBTA 9.7.4.1.5).
            return EMPTY
        return self._qp.keys.remote(self._qp.pd, self._qp.number, rkey, address, length, need)

    def _remember(self, resource: _Resource) -> None:
        most = self._qp.attributes.max_dest_rd_atomic
        if not most:
            raise Refusal(NakCode.INVALID_REQUEST, event=EventType.QP_REQ_ERR)
        if len(self._resources) >= most:
            self._resources.popleft()
        self._resources.append(resource)

    def _read(self, packet: Packet) -> None:
        assert packet.reth is not None
        address, rkey, length = packet.reth
        if length > MAX_MESSAGE:
            raise Refusal(NakCode.INVALID_REQUEST, event=EventType.QP_REQ_ERR)
        spans = self._remote(rkey, address, length, _REMOTE_READ)
        first, end = self.expected, self.expected + read_packets(length, self._qp.mtu)
        self._remember(_Resource(first, end, address, rkey, length))
        self.expected = end
        self._messages += 1
        self.responses.answer(ReadAnswer(first, end, spans, 0, length, self._messages))

    def _atomic(self, packet: Packet) -> None:
        assert packet.atomic is not None
        address, rkey, swap_or_add, compare = packet.atomic
        if address % ATOMIC_BYTES:
            raise Refusal(NakCode.INVALID_REQUEST, event=EventType.QP_REQ_ERR)
        spans = self._remote(rkey, address, ATOMIC_BYTES, _REMOTE_ATOMIC)
        before = bytearray(ATOMIC_BYTES)
        psn = self.expected
        resource = _Resource(psn, psn + 1, address, rkey, ATOMIC_BYTES)
        self._remember(resource)
        spans.copy_out(0, memoryview(before))
        original = int.from_bytes(before, "little")
        after = original
        if packet.opcode is Opcode.FETCH_ADD:
            after = original + swap_or_add & _64_BITS
        elif original == compare:
            after = swap_or_add
        spans.place(0, memoryview(after.to_bytes(ATOMIC_BYTES, "little")))
        resource.original = original
        self.expected += 1
        self._messages += 1
        self.responses.answer(AtomicAnswer(psn, original, self._messages))

    def _atomic_write(self, packet: Packet) -> None:
        """Eight aligned bytes at once, after everything before (IBTA annex A19). The answer is that of a
        READ of nothing."""
        assert packet.reth is not None
        address, rkey, length = packet.reth
        payload = memoryview(packet.payload)
        if address % ATOMIC_BYTES or length != ATOMIC_BYTES or len(payload) != ATOMIC_BYTES:
            raise Refusal(NakCode.INVALID_REQUEST, event=EventType.QP_REQ_ERR)
        spans = self._remote(rkey, address, length, _REMOTE_WRITE)
        psn = self.expected
        self._remember(_Resource(psn, psn + 1, address, rkey, length, 0))
        spans.place(0, payload)
        self.expected += 1
        self._messages += 1
        self.responses.answer(ReadAnswer(psn, psn + 1, EMPTY, 0, 0, self._messages))

    def _duplicate(self, packet: Packet, psn: int, known: OpcodeClass) -> None:
        self._count(Count.DUPLICATE)
        if known.operation in (Operation.SEND, Operation.WRITE):
            self.responses.acknowledge(self.expected - 1, self._messages)
            return
        resource = next((r for r in self._resources if r.first <= psn < r.end), None)
        if resource is None:
            self._count(Count.NO_RESOURCE)
            return
        if known.operation is Operation.ATOMIC_WRITE:
            # Carried out once; only its answer is said again.
            self.responses.answer(ReadAnswer(psn, psn + 1, EMPTY, 0, 0, self._messages, again=True))
        elif packet.reth is not None:
            self._read_again(packet, psn, resource)
        elif resource.original is not None:
            self.responses.answer(AtomicAnswer(psn, resource.original, self._messages))

    def _read_again(self, packet: Packet, psn: int, resource: _Resource) -> None:
        """Answer a READ, or a later part of it, once more, from the memory as it is now."""
        assert packet.reth is not None
        address, rkey, length = packet.reth
        mtu = self._qp.mtu
        end = psn + read_packets(length, mtu)
        if (
            resource.original is not None
            or rkey != resource.rkey
            or address != resource.address + (psn - resource.first) * mtu
            or address + length > resource.address + resource.length
        ):
            self._count(Count.NO_RESOURCE)
            return
        try:
            spans = self._remote(rkey, address, length, _REMOTE_READ)
        except ProtectionFault:
            self._count(Count.NO_RESOURCE)
            return
        self.responses.answer(ReadAnswer(psn, end, spans, 0, length, self._messages, again=True))

    def row_target(self, opcode: int, psn: int, most: int) -> tuple[int, Bytes] | None:
        """Where a row of middle packets would go that begins with `psn`: the most packets that it can have,
        and the memory. None if such packets are not what comes next."""
        operation = class_of(Opcode(opcode)).operation
        if operation is not self._operation or extended_psn(psn, self.expected) != self.expected:
            return None
        if operation is Operation.WRITE:
            if _REMOTE_WRITE & ~int(self._qp.attributes.access):
                return None
            most_bytes = self._total - self._offset - 1
        else:
            most_bytes = min(self._spans.length, MAX_MESSAGE) - self._offset
        mtu = self._qp.mtu
        most = min(most, most_bytes // mtu)
        if most < 2:
            return None
        try:
            target = self._spans.contiguous(self._offset, most * mtu)
        except ProtectionFault:
            return None
        return len(target) // mtu, target

    def take_row(self, row: Row, target: Bytes) -> int:
        """A row for `row_target` has come. Returns how much of an RDMA WRITE is still to come."""
        row.place(target)
        self._nak_sent = False
        self._offset += row.count * row.mtu
        if row.asked >= 0:
            self.responses.acknowledge(self.expected + row.asked, self._messages)
        self.expected += row.count
        return max(0, self._total - self._offset)

    def _complete(
        self,
        status: WcStatus,
        *,
        opcode: WcOpcode = WcOpcode.RECV,
        length: int = 0,
        imm: int = 0,
        flags: WcFlags = NO_WC_FLAGS,
        solicited: bool = False,
    ) -> None:
        qp, request = self._qp, self._receive
        assert request is not None
        self._receive = None
        qp.recv_cq.push(
            WorkCompletion(
                request.wr_id,
                status,
                opcode,
                qp.number,
                length,
                imm,
                qp.attributes.dest_qpn if status is WcStatus.SUCCESS else 0,
                flags,
            ),
            solicited,
        )

    def _count(self, what: Count) -> None:
        self._qp.device.counters[what] += 1


@dataclass(slots=True)
class Acknowledgement:
    """ACK, NAK or RNR NAK, by its syndrome."""

    psn: int
    syndrome: int
    messages: int


@dataclass(slots=True)
class AtomicAnswer:
    """The eight bytes as they were."""

    psn: int
    original: int
    messages: int


@dataclass(slots=True)
class ReadAnswer:
    """Packets `psn` to `end` - 1, of which `psn` is the next to go; they carry `length` bytes of `spans` from
    `offset` on. `begun` once the first has gone; `again` where the peer may have had them all before."""

    psn: int
    end: int
    spans: SpanList
    offset: int
    length: int
    messages: int
    again: bool = False
    begun: bool = False


Answer: TypeAlias = Acknowledgement | AtomicAnswer | ReadAnswer


class Responses:
    """Answers that wait to be sent, in order: acknowledgements, answers of READs and of atomics.

    One row for all of them, because an acknowledgement that overtook the answer of an earlier READ would tell
    the requester that this answer is lost. An acknowledgement speaks for all before it, so two in a row are
    one. Bound: `max_dest_rd_atomic` answers, and an acknowledgement after each.
    """

    def __init__(self, qp: QpContext) -> None:
        self._qp = qp
        self._row: deque[Answer] = deque()

    def __len__(self) -> int:
        return len(self._row)

    def clear(self) -> None:
        """Nothing of it is sent."""
        self._row.clear()

    def acknowledge(self, psn: int, messages: int, syndrome: int = SYNDROME_ACK) -> None:
        """ACK, or refuse, everything up to `psn`."""
        last = self._row[-1] if self._row else None
        if isinstance(last, Acknowledgement):
            # Also in place of a NAK: what it asked for has come, or it would be the end of the queue pair.
            last.psn, last.messages, last.syndrome = psn, messages, syndrome
        else:
            self._row.append(Acknowledgement(psn, syndrome, messages))
        self._qp.schedule()

    def answer(self, answer: AtomicAnswer | ReadAnswer) -> None:
        """Send the answer of an atomic or a READ. One that is still going out starts again where the
        requester wants it to; what is too much is dropped, and asked for again."""
        for index, waiting in enumerate(self._row):
            if isinstance(answer, ReadAnswer) and isinstance(waiting, ReadAnswer):
                if waiting.end == answer.end:
                    if answer.psn < waiting.psn:
                        self._row[index] = answer
                    return
            elif isinstance(waiting, AtomicAnswer) and waiting.psn == answer.psn:
                return
        if len(self._row) > 2 * self._qp.attributes.max_dest_rd_atomic:
            return
        self._row.append(answer)
        self._qp.schedule()

    def next_burst(self, paced: bool = False) -> Burst | None:
        while self._row:
            head = self._row[0]
            if not isinstance(head, ReadAnswer):
                self._row.popleft()
                return self._packet(head)
            if paced:
                return None
            try:
                return self._read_packets(head)
            except ProtectionFault:
                if head.again:
                    # As with a duplicate that comes now: the peer may have had it, and so the key has gone.
                    self._qp.device.counters[Count.NO_RESOURCE] += 1
                    self._row.popleft()
                    continue
                # The memory went while it was read: the peer's access has become invalid.
                self._row.clear()
                syndrome = nak_syndrome(NakCode.REMOTE_ACCESS_ERROR)
                self._qp.responder_failed()
                return self._packet(Acknowledgement(head.psn, syndrome, head.messages))
        return None

    def _packet(self, head: Acknowledgement | AtomicAnswer) -> Burst:
        extended = AETH.pack(self._syndrome_word(head))
        opcode = Opcode.ACKNOWLEDGE
        if isinstance(head, AtomicAnswer):
            opcode = Opcode.ATOMIC_ACKNOWLEDGE
            extended += ATOMIC_ACK_ETH.pack(head.original)
        return self._qp.device.writer.single(
            self._qp.path, opcode, self._qp.attributes.dest_qpn, head.psn, extended
        )

    def _syndrome_word(self, answer: Answer) -> int:
        syndrome = answer.syndrome if isinstance(answer, Acknowledgement) else SYNDROME_ACK
        return syndrome << 24 | answer.messages & LOW_24_BITS

    def _read_packets(self, answer: ReadAnswer) -> Burst:
        qp = self._qp
        mtu, left = qp.mtu, answer.end - answer.psn
        # First and last carry an AETH, so they are no part of a row.
        most = min(qp.volley_packets(), left - 1)
        if answer.begun and most > 1:
            source = answer.spans.contiguous(answer.offset, most * mtu)
            count = len(source) // mtu
            if count > 1:
                psn = answer.psn
                answer.psn += count
                answer.offset += count * mtu
                answer.length -= count * mtu
                return qp.device.writer.rows(
                    qp.path,
                    mtu,
                    Opcode.READ_RESPONSE_MIDDLE,
                    qp.attributes.dest_qpn,
                    psn,
                    source[: count * mtu],
                )
        if left == 1:
            opcode = Opcode.READ_RESPONSE_LAST if answer.begun else Opcode.READ_RESPONSE_ONLY
        else:
            opcode = Opcode.READ_RESPONSE_MIDDLE if answer.begun else Opcode.READ_RESPONSE_FIRST
        with_aeth = opcode is not Opcode.READ_RESPONSE_MIDDLE
        length = min(mtu, answer.length)
        burst = qp.device.writer.single(
            qp.path,
            opcode,
            qp.attributes.dest_qpn,
            answer.psn,
            AETH.pack(self._syndrome_word(answer)) if with_aeth else b"",
            spans=answer.spans,
            start=answer.offset,
            length=length,
        )
        answer.begun = True
        answer.psn += 1
        answer.offset += length
        answer.length -= length
        if left == 1:
            self._row.popleft()
        return burst
