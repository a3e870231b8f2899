"""The requester of a reliable connection: send requests become packets, answers complete them (IBTA 9.7.3,
9.7.5).

    waiting -> open: begun, PSNs taken, sent up to the cursor, not complete yet -> completed in order

Three PSNs are its state: everything before `unacked` is answered, the packet at `_cursor` is sent next, and
`_next` is the first that no request has taken. To repeat, the cursor goes back (go-back-N). Only the requests
are kept; their memory is read again.

An RDMA READ goes out in pieces, each a request of its own on the wire, so that one window bounds both
directions. The grid of pieces is fixed, so a repeated piece lies within the request that the responder
remembers.

Bounds: the queue by `max_send_wr`; packets under way, those of READ responses included, by the window;
READs and atomics by `max_rd_atomic`.

Congestion control (`congestion.py`) says when a connection may send, and how many packets at once.
"""

# One idea in one file: the queue of requests, and the packets that they become.

from collections import deque
from typing import Final

from emulator.roce.nic.counters import Count
from emulator.roce.nic.memory import EMPTY, Bytes, ProtectionFault
from emulator.roce.nic.packets_in import Row
from emulator.roce.nic.packets_out import rows_of
from emulator.roce.nic.path import Share
from emulator.roce.nic.pending_send import (
    ATOMIC_BYTES,
    ATOMICS,
    LOCAL_COMPLETION,
    MESSAGES,
    NAK_STATUS,
    ONE_PACKET,
    SHAPES,
    Shape,
    Work,
    extended_psn,
)  # fmt: skip
from emulator.roce.nic.qp_context import QpContext
from emulator.roce.nic.retry import Due, RetryClock
from emulator.roce.nic.verbs import Burst, QpState, SendFlags, SendOpcode, WcStatus
from emulator.roce.nic.work_requests import SendRequest
from emulator.roce.wire.extended import ATOMIC_ETH, IMM_DT, RETH, AethKind, NakCode, read_packets
from emulator.roce.wire.opcodes import Opcode, Operation, class_of
from emulator.roce.wire.packet import Packet

_FENCE: Final = int(SendFlags.FENCE)
_SIGNALED: Final = int(SendFlags.SIGNALED)

SMALL_BYTES: Final = 128
"""A message of this size may travel in the burst of the one before: less than the smallest MTU."""


class Requester:
    """See the module's docstring. Belongs to one queue pair."""

    def __init__(self, qp: QpContext, shapes: dict[SendOpcode, Shape] = SHAPES) -> None:
        self._qp = qp
        self._shapes = shapes
        self._share = Share()
        self._wake = qp.schedule
        self._waiting: deque[SendRequest] = deque()
        self._open: deque[Work] = deque()
        self.clock = self._new_clock()
        self.start(0)

    def _new_clock(self) -> RetryClock:
        return RetryClock(self._qp.attributes, self._qp.device.running, self.advance)

    def start(self, psn: int) -> None:
        """Begin with this PSN and an empty queue."""
        self._waiting.clear()
        self._open.clear()
        self.unacked = self._cursor = self._next = self._sent = psn + (1 << 24)
        self._share.hold(None, 0)
        self._index = 0
        self._pieces: deque[int] = deque()
        self._unasked = 0
        self._went_back_at = -1
        self.clock.stop()
        self.clock = self._new_clock()

    def __len__(self) -> int:
        return len(self._waiting) + len(self._open)

    def post(self, request: SendRequest) -> None:
        self._waiting.append(request)

    @property
    def psn(self) -> int:
        """The PSN that the next request will begin with."""
        return self._next

    @property
    def drained(self) -> bool:
        """All requests that have begun are complete."""
        return not self._open

    def flush(self) -> None:
        """Complete everything with WR_FLUSH_ERR, in order."""
        self.clock.stop()
        while self._open or self._waiting:
            request = self._open.popleft().request if self._open else self._waiting.popleft()
            self._qp.complete_send(request, WcStatus.WR_FLUSH_ERR)
        self._cursor = self._next = self._sent = self.unacked
        self._share.hold(None, 0)
        self._index = 0

    def _begin(self) -> bool:
        """Begin waiting requests until one has packets to send; False if none may."""
        qp = self._qp
        while self._waiting and qp.state is QpState.RTS:
            if self._open and self._open[-1].failure is not None:
                return False
            request = self._waiting[0]
            if int(request.flags) & _FENCE and self._first_unanswered() is not None:
                return False
            self._waiting.popleft()
            signaled = qp.signal_all or int(request.flags) & _SIGNALED != 0
            work = Work(request, signaled, self._next, self._shapes.get(request.opcode))
            try:
                _prepare(qp, work)
            except ProtectionFault:
                work.failure = WcStatus.LOC_PROT_ERR
            self._open.append(work)
            if work.packets:
                self._next = work.end
                return True
            self._retire()
        return False

    def next_burst(self, now: float) -> Burst | None:
        """The next packets to go out, or None if there are none, or it is not the time for them."""
        if self.clock.rnr_until is not None:
            return None
        if self._cursor == self._next and not self._begin():
            return None
        room = self.unacked + self._qp.device.window_packets(self._qp.mtu) - self._cursor
        if room <= 0:
            return None
        path = self._qp.path
        if self._cursor >= self._sent and path.in_flight >= path.budget:
            path.wait(self._wake)
            return None
        while self._open[self._index].end <= self._cursor:
            self._index += 1
        work = self._open[self._index]
        assert work.shape is not None
        try:
            burst = self._ask(work, room) if work.shape.answered else self._carry(work, room)
        except ProtectionFault:
            self._fail(work, WcStatus.LOC_PROT_ERR)
            return None
        if burst is not None:
            if self._cursor > self._sent:
                self._sent = self._cursor
                self._share.hold(path, (self._sent - self.unacked) * self._qp.mtu)
            if not self.clock.running:
                self.clock.restart(now)
        return burst

    def _carry(self, work: Work, room: int) -> Burst | None:
        """Packets of a SEND or WRITE: a row of them, or a single one where there is no row; None: not yet."""
        qp, shape = self._qp, work.shape
        assert shape is not None
        device = qp.device
        mtu, position = qp.mtu, self._cursor - work.first
        last = work.packets - 1
        rows, left = rows_of(mtu), work.packets - position
        volley = qp.volley_packets()
        wanted = min(room, volley, left)
        if wanted < left and wanted < min(rows, device.window_packets(mtu) // 4, volley):
            # The window leaves room for a scrap of a row: there will soon be more, since what is under way
            # and asks for no acknowledgement is never half a window.
            return None
        if rows < wanted < left:
            wanted -= wanted % rows
        if wanted > 1 and (position or not shape.write):
            # The last packet is part of the row where it is full and has no header that the others have not.
            if position + wanted > last and (shape.trailer or work.length != work.packets * mtu):
                wanted -= 1
            source = work.spans.contiguous(position * mtu, wanted * mtu)
            count = len(source) // mtu
            if count > 1:
                ends = position + count > last
                row = device.writer.rows(
                    qp.path,
                    mtu,
                    shape.middle,
                    qp.attributes.dest_qpn,
                    self._cursor,
                    source[: count * mtu],
                    first=shape.first if not position else None,
                    last=shape.last if ends else None,
                    acknowledge=self._asks(work, count, room, ends),
                )
                # A volley of whole bursts has no room in the last of them.
                if ends and count % rows and count < room and not qp.path.numbered and self._follows(work):
                    return self._with_following(row, room - count)
                return row
        psn = self._cursor
        acknowledge = self._asks(work, 1, room, position == last)
        return _message_packet(qp, work, psn, acknowledge=acknowledge)

    def _with_following(self, row: Burst, room: int) -> Burst:
        """The end of a message, and with it the one that follows if that is a small packet: a completion
        comes right behind its data, and by itself costs either side a call of the socket, and a wake-up."""
        qp = self._qp
        if not self._begin():
            return row
        work = self._open[-1]
        if work.packets != 1 or work.length > SMALL_BYTES:
            return row
        psn = self._cursor
        try:
            packet = _message_packet(qp, work, psn, acknowledge=self._asks(work, 1, room, True))
        except ProtectionFault:
            # Its own turn is next, and finds the same.
            self._cursor = psn
            return row
        return qp.device.writer.with_last(row, qp.mtu, packet)

    def _asks(self, work: Work, count: int, room: int, ends: bool) -> bool:
        """`count` packets go out: does the last one ask for an acknowledgement? It moves the cursor.

        It does at the end of a message, unless the next one follows at once, whose answer speaks for both. It
        does in every half of a window. It does where the window is used up by it, or what the path allows to
        all.
        """
        self._cursor += count
        self._unasked += count
        qp = self._qp
        fresh = self._cursor - self._sent
        asks = (
            (ends and not self._follows(work))
            or fresh <= 0
            or count == room
            or self._unasked * 2 >= qp.device.window_packets(qp.mtu)
            or qp.path.in_flight + fresh * qp.mtu >= qp.path.budget
        )
        if asks:
            self._unasked = 0
        return asks

    def _follows(self, work: Work) -> bool:
        """Whether a message comes right behind `work`, that nothing keeps from going out."""
        if work.signaled or self._open[-1] is not work or not self._waiting:
            return False
        following = self._waiting[0]
        return following.opcode in MESSAGES and not int(following.flags) & _FENCE

    def _ask(self, work: Work, room: int) -> Burst | None:
        """The request of an atomic, or of the next piece of a READ; None while too many are under way."""
        qp = self._qp
        while self._pieces and self._pieces[0] <= self.unacked:
            self._pieces.popleft()
        if len(self._pieces) >= qp.attributes.max_rd_atomic:
            return None
        psn, end = self._cursor, work.end
        if work.request.opcode not in ONE_PACKET:
            end = self._piece_end(work, psn)
            if end - psn > room and psn != self.unacked:
                return None
        # The memory must be there before the peer is asked; ProtectionFault else.
        work.spans.contiguous(0, 1)
        self._cursor, self._unasked = end, 0
        self._pieces.append(end)
        return _answered_packet(qp, work, psn, end)

    def _piece_end(self, work: Work, psn: int) -> int:
        """Where the piece of a READ ends that `psn` is part of."""
        piece = self._qp.device.piece_packets(self._qp.mtu)
        return min(work.end, work.first + ((psn - work.first) // piece + 1) * piece)

    def advance(self, now: float) -> None:
        """Handle the clock's next event."""
        due = self.clock.advance(now)
        if due is Due.RECEIVER_READY:
            self._qp.schedule()
        if due in (Due.NOTHING, Due.RECEIVER_READY):
            return
        self._count(Count.TIMEOUTS if due is Due.TIMEOUT else Count.PROBES)
        if due is Due.TIMEOUT and not self.clock.take_retry():
            self._fail(self._oldest(), WcStatus.RETRY_EXC_ERR)
            return
        self._went_back_at = -1
        # It is not in the peer's socket buffer any more, so it keeps no other connection waiting.
        self._share.hold(self._qp.path, 0)
        self._go_back(self.unacked)

    def _oldest(self) -> Work:
        return next(work for work in self._open if work.end > self.unacked)

    def _go_back(self, psn: int) -> None:
        """Send again from `psn` on."""
        self._cursor = psn
        self._index = 0
        self._pieces.clear()
        self._qp.schedule()

    def _first_unanswered(self) -> Work | None:
        """The oldest READ or atomic whose answer is not complete."""
        for work in self._open:
            if work.shape is not None and work.shape.answered and work.end > self.unacked:
                return work
        return None

    def acknowledged(self, psn: int, now: float) -> None:
        """A positive acknowledgement of everything up to `psn`, as 24 bits."""
        at = extended_psn(psn, self.unacked)
        if self.unacked <= at < self._sent:
            self._acknowledge(at + 1, now)
        else:
            self._count(Count.GHOST)

    def receive(self, packet: Packet, now: float) -> None:
        """An answer from the responder, whose form has been checked."""
        psn = extended_psn(packet.psn, self.unacked)
        if not self.unacked <= psn < self._sent:
            self._count(Count.GHOST)
            return
        operation = class_of(packet.opcode).operation
        if operation is Operation.ACKNOWLEDGE:
            assert packet.aeth is not None
            kind, code = packet.aeth.kind, packet.aeth.code
            if kind is AethKind.ACK:
                self._acknowledge(psn + 1, now)
            elif kind is AethKind.RNR_NAK:
                self._receiver_not_ready(psn, code, now)
            elif kind is AethKind.NAK:
                self._refused(psn, code, now)
            else:
                self._count(Count.GHOST)
            return
        work = self._first_unanswered()
        if work is None:
            self._count(Count.GHOST)
            return
        expected = max(self.unacked, work.first)
        if psn != expected:
            if psn > expected:
                self._count(Count.LOST_RESPONSE)
                self._implied_nak(expected)
            else:
                self._count(Count.GHOST)
            return
        self._take_answer(work, packet, psn, operation, now)

    def _take_answer(self, work: Work, packet: Packet, psn: int, operation: Operation, now: float) -> None:
        self._progress(work.first, now)
        if (operation is Operation.ATOMIC_ACKNOWLEDGE) != (work.request.opcode in ATOMICS):
            self._fail(work, WcStatus.BAD_RESP_ERR)
            return
        position = psn - work.first
        if operation is Operation.ATOMIC_ACKNOWLEDGE:
            assert packet.original is not None
            data = memoryview(packet.original.to_bytes(ATOMIC_BYTES, "little"))
        else:
            # First and middle, last and only, mix freely where answers to a repeated request meet late ones.
            ends = psn + 1 == self._piece_end(work, psn)
            data = memoryview(packet.payload)
            mtu = self._qp.mtu
            expected = min(mtu, work.length - position * mtu)
            if work.request.opcode is SendOpcode.ATOMIC_WRITE:
                expected = 0
            if ends != class_of(packet.opcode).last or len(data) != expected:
                self._fail(work, WcStatus.BAD_RESP_ERR)
                return
        try:
            work.spans.place(position * self._qp.mtu, data)
        except ProtectionFault:
            self._fail(work, WcStatus.LOC_PROT_ERR)
            return
        self._progress(psn + 1, now)

    def row_target(self, psn: int, most: int) -> tuple[int, Bytes] | None:
        """Where a row of middle packets of a READ response would go that begins with `psn`: the most packets
        that it can have, and the memory. None if it is not what comes next."""
        work = self._first_unanswered()
        if work is None or work.request.opcode in ONE_PACKET or self.unacked >= self._sent:
            return None
        expected = max(self.unacked, work.first)
        if extended_psn(psn, self.unacked) != expected:
            return None
        mtu = self._qp.mtu
        most = min(most, self._piece_end(work, expected) - 1 - expected, self._sent - expected)
        if most < 2:
            return None
        try:
            target = work.spans.contiguous((expected - work.first) * mtu, most * mtu)
        except ProtectionFault:
            return None
        return len(target) // mtu, target

    def take_row(self, row: Row, target: Bytes, now: float) -> int:
        """A row for `row_target` has come. Returns how much was asked for that is still to come."""
        work = self._first_unanswered()
        assert work is not None
        row.place(target)
        self._progress(max(self.unacked, work.first) + row.count, now)
        return (self._sent - self.unacked) * self._qp.mtu

    def _acknowledge(self, end: int, now: float) -> None:
        """The responder has carried out everything before `end`."""
        work = self._first_unanswered()
        if work is not None and work.first < end:
            # It went past a request whose answer has not come: that answer is lost (IBTA 9.7.5.1.1).
            self._progress(work.first, now)
            self._implied_nak(max(self.unacked, work.first))
            return
        self._progress(end, now)

    def _implied_nak(self, psn: int) -> None:
        # Once for a PSN: what was under way behind a lost answer must not make us repeat it over and over.
        if self._went_back_at != psn:
            self._went_back_at = psn
            self._go_back(psn)

    def _receiver_not_ready(self, psn: int, timer: int, now: float) -> None:
        self._count(Count.RNR_NAK_RECEIVED)
        self._acknowledge(psn, now)
        if self.unacked != psn or (self.clock.rnr_until is not None and self._cursor == psn):
            return
        if self.clock.wait_for_receiver(timer, now):
            self._go_back(psn)
        else:
            self._fail(self._oldest(), WcStatus.RNR_RETRY_EXC_ERR)

    def _refused(self, psn: int, code: int, now: float) -> None:
        self._count(Count.NAK_RECEIVED)
        self._acknowledge(psn, now)
        if self.unacked != psn or not self._open:
            return
        if code == NakCode.PSN_SEQUENCE_ERROR:
            if self._cursor == psn:
                return
            if self.clock.take_retry():
                self._go_back(psn)
            else:
                self._fail(self._oldest(), WcStatus.RETRY_EXC_ERR)
        elif code in NAK_STATUS:
            self._fail(self._oldest(), NAK_STATUS[NakCode(code)])
        else:
            self._count(Count.GHOST)

    def _progress(self, psn: int, now: float) -> None:
        """Everything before `psn` is answered."""
        if psn <= self.unacked:
            return
        self.unacked = psn
        self._share.hold(self._qp.path, (self._sent - psn) * self._qp.mtu)
        if self._cursor < psn:
            self._cursor = psn
        clock = self.clock
        clock.forget_failures()
        if psn != self._sent:
            clock.restart(now)
        else:
            clock.stop()
        self._retire()
        self._qp.schedule()

    def _retire(self) -> None:
        """Complete answered requests, in order."""
        while self._open and self._open[0].end <= self.unacked:
            work = self._open[0]
            if work.failure is not None:
                self._fail(work, work.failure)
                return
            self._open.popleft()
            self._index = max(0, self._index - 1)
            if work.signaled:
                self._qp.complete_send(work.request, WcStatus.SUCCESS, work.length)
        if not self._open and self._qp.state is QpState.SQD:
            self._qp.send_queue_drained()

    def _fail(self, failed: Work, status: WcStatus) -> None:
        """A request fails the queue: flush those before it, then it, then the rest."""
        while self._open and (work := self._open.popleft()) is not failed:
            self._qp.complete_send(work.request, WcStatus.WR_FLUSH_ERR)
        self._qp.complete_send(failed.request, status)
        self._request_failed()

    def _request_failed(self) -> None:
        self._qp.enter_error()

    def _count(self, what: Count) -> None:
        self._qp.device.counters[what] += 1


# --- single packets: what is no part of a row, and the requests for data -------------------------------


_SOLICITED: Final = int(SendFlags.SOLICITED)


def _prepare(qp: QpContext, work: Work) -> None:
    """Carry a local request out, or find the memory of another and let it take its PSNs; `failure` where it
    cannot be done. ProtectionFault where its memory may not be used so."""
    request = work.request
    if request.opcode in LOCAL_COMPLETION:
        try:
            _carry_out(qp, request)
        except ProtectionFault:
            binding = request.opcode is SendOpcode.BIND_MW
            work.failure = WcStatus.MW_BIND_ERR if binding else WcStatus.LOC_QP_OP_ERR
        return
    assert work.shape is not None
    if work.shape.answered and not qp.attributes.max_rd_atomic:
        work.failure = WcStatus.LOC_QP_OP_ERR
        return
    writes = work.shape.answered and request.opcode is not SendOpcode.ATOMIC_WRITE
    spans = qp.payload_of(request, write=writes)
    packets = 1 if request.opcode in ONE_PACKET else read_packets(spans.length, qp.mtu)
    work.take_psns(spans, packets)


def _carry_out(qp: QpContext, request: SendRequest) -> None:
    if request.opcode is SendOpcode.LOCAL_INV:
        qp.keys.invalidate(qp.pd, qp.number, request.invalidate_rkey)
    else:
        assert request.window is not None
        assert request.bind is not None
        qp.keys.bind(request.window, qp.number, qp.pd, request.bind, request.window_rkey)


def _message_packet(qp: QpContext, work: Work, psn: int, *, acknowledge: bool) -> Burst:
    """The packet `psn` of a SEND or WRITE. ProtectionFault where its memory is gone."""
    request, shape = work.request, work.shape
    assert shape is not None
    position, mtu = psn - work.first, qp.mtu
    last = position == work.packets - 1
    if last:
        opcode = shape.last if position else shape.only
    else:
        opcode = shape.middle if position else shape.first
    known = class_of(opcode)
    extended = b""
    if known.reth:
        extended = RETH.pack(request.remote_address, request.rkey, work.length)
    if known.immediate:
        extended += IMM_DT.pack(request.imm)
    elif known.invalidate:
        extended += IMM_DT.pack(request.invalidate_rkey)
    return qp.device.writer.single(
        qp.path,
        opcode,
        qp.attributes.dest_qpn,
        psn,
        extended,
        acknowledge=acknowledge,
        solicited=last and int(request.flags) & _SOLICITED != 0,
        spans=work.spans,
        start=position * mtu,
        length=min(mtu, work.length - position * mtu),
    )


def _answered_packet(qp: QpContext, work: Work, psn: int, end: int) -> Burst:
    """The request for the answer with the PSNs `psn` to `end` - 1: of an atomic, or of a piece of a READ. An
    atomic write brings its eight bytes (IBTA annex A19)."""
    request = work.request
    spans, length = EMPTY, 0
    if request.opcode in ATOMICS:
        adding = request.opcode is SendOpcode.ATOMIC_FETCH_AND_ADD
        opcode = Opcode.FETCH_ADD if adding else Opcode.COMPARE_SWAP
        extended = ATOMIC_ETH.pack(
            request.remote_address,
            request.rkey,
            request.compare_add if adding else request.swap,
            0 if adding else request.compare_add,
        )
    elif request.opcode is SendOpcode.ATOMIC_WRITE:
        opcode, spans, length = Opcode.ATOMIC_WRITE, work.spans, ATOMIC_BYTES
        extended = RETH.pack(request.remote_address, request.rkey, length)
    else:
        opcode, start = Opcode.READ_REQUEST, (psn - work.first) * qp.mtu
        wanted = min(work.length, (end - work.first) * qp.mtu) - start
        extended = RETH.pack(request.remote_address + start, request.rkey, wanted)
    return qp.device.writer.single(
        qp.path,
        opcode,
        qp.attributes.dest_qpn,
        psn,
        extended,
        acknowledge=True,
        spans=spans,
        length=length,
    )
