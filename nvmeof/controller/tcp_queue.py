"""One NVMe/TCP connection of the controller role, without I/O. Read `queue_session.py`, `nvmeof/tcp/` first.

It joins a `PduReceiver` to a `QueueSession`. The owner of the socket does

    n = sock.recv_into(queue.next_buffer()); queue.received(n, now)
    queue.run(now)                          # after each wake-up and at queue.deadline()
    queue.sent(sock.sendmsg(queue.outgoing()))

until `queue.finished`. It never waits for one direction to serve the other, so a host that sends without
reading, or reads without sending, cannot lock the two up.

Bounds: at most `entries` commands are in flight (Connect's SQSIZE; fewer before authentication), refused ones
included; one more ends the connection. A command is not carried out while more than `OUTPUT_LIMIT` bytes wait
to be sent. Payload without a place in memory (a file's) uses three buffers inward, one outward, each of one
PDU's size, and `STAGING_BYTES` more where one receive brings many short PDUs.
"""

import enum
import math
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final

from nvmeof.controller.queue_session import HANDSHAKE_S, QueueSession
from nvmeof.controller.request import Direction, Outcome, Refusal, Request
from nvmeof.controller.storage import Scratch
from nvmeof.controller.target import Target
from nvmeof.controller.tcp_rules import TcpSettings, Transfer, judge_data, out_of_order, wrong_sgl
from nvmeof.errors import FatalErrorStatus, RemoteProtocolError
from nvmeof.tcp.crc32c import Buffer
from nvmeof.tcp.pdu import (
    ADMIN_IN_CAPSULE_BYTES,
    FROM_HOST,
    NO_DIGESTS,
    PLAIN_COMPLETION,
    R2T,
    SMALLEST_PDU,
    C2HData,
    CapsuleCmd,
    CapsuleResp,
    DataPdu,
    Digests,
    H2CData,
    ICReq,
    ICResp,
    TermReq,
    alignment_bytes,
    encode_pdu,
    plain_answer,
    termination_for,
)
from nvmeof.tcp.receiver import BadDataDigest, Event, PduReceiver
from nvmeof.wire.cqe import Cqe
from nvmeof.wire.sqe import AdminOpcode, Sqe
from nvmeof.wire.status import Status

OUTPUT_LIMIT: Final = 256 << 10
"""Commands wait while this much is unsent: a host that does not read holds up itself and nobody's memory."""

HELD_BYTES: Final = 1 << 10
HELD_FOR_BYTES: Final = 128 << 10
"""Of answers that wait for others to leave with; of a payload that they wait for."""

GOODBYE_S: Final = 5.0
"""Unsent bytes have this many seconds to leave when the connection ends."""

_SMALL_PIECE: Final = 4096
_MOST_BUFFERS: Final = 64


class _State(enum.Enum):
    INITIALIZING = "waiting for ICReq"
    RUNNING = "running"
    ENDING = "what is to be sent goes out, then the connection is closed"


_INITIALIZING: Final = _State.INITIALIZING
_RUNNING: Final = _State.RUNNING
_ENDING: Final = _State.ENDING
"""Asked for with every command, and quicker to have than a member of its class."""


class Arrival:
    """Data under way into their place, `offset` bytes into their command; the PDU's event follows."""

    __slots__ = ("offset", "request", "transfer", "view")

    def __init__(
        self, request: Request, offset: int, view: memoryview, transfer: Transfer | None = None
    ) -> None:
        self.request: Final = request
        self.offset: Final = offset
        self.view: Final = view
        self.transfer: Final = transfer


class TcpControllerQueue:
    """See the module's docstring. Used by one thread; `wake` is called from any."""

    def __init__(
        self,
        target: Target,
        *,
        now: float,
        wake: Callable[[], None] | None = None,
        settings: TcpSettings | None = None,
    ) -> None:
        self.session = QueueSession(target, wake)
        self.settings = settings or TcpSettings()
        self._target = target
        self._state: _State = _INITIALIZING
        self._receiver = PduReceiver(self, FROM_HOST)
        self.next_buffers = self._receiver.next_buffers
        self._digests: Digests = NO_DIGESTS
        self._alignment = 4
        self._is_plain = False
        """Whether data follow their header at once, and nothing follows them."""
        self._now = now
        self._handshake_until = now + HANDSHAKE_S
        self._goodbye_until = math.inf
        self._arrivals: deque[Arrival] = deque()
        self._transfers: dict[int, Transfer] = {}
        self._next_ttag = 1
        self._in_flight: dict[int, Request] = {}
        self._conflicting = 0
        """Commands whose id was taken, and that have not been answered: they hold no id."""
        self._runnable: deque[Request] = deque()
        self._output: list[Buffer] = []
        self._output_bytes = 0
        room = max(self.settings.max_h2c_data, target.settings.in_capsule_bytes, ADMIN_IN_CAPSULE_BYTES)
        self._incoming = (Scratch(room), Scratch(room))
        self._comparing = Scratch(room)
        self._reading = Scratch(target.settings.max_transfer_bytes)
        self._reading_busy = False
        self.end_reason: str | None = None
        self.terminated = False

    @property
    def finished(self) -> bool:
        """Nothing more will happen: close the connection."""
        return self._state is _ENDING and not self._output

    @property
    def ending(self) -> bool:
        """The connection is over but for what still has to be sent; input is ignored."""
        return self._state is _ENDING

    @property
    def may_block(self) -> bool:
        """Only bytes from the host can give this queue something to do: wait for them without a deadline."""
        return not self._output and not self._runnable and self._is_quiet

    @property
    def _is_quiet(self) -> bool:
        session = self.session
        return not (
            session.waiting
            or session.qid == 0
            or session.controller is None
            or session.authenticating
            or session.close_reason is not None
            or self._state is not _RUNNING
        )

    @property
    def payload_left(self) -> int:
        """Bytes of payload that are certain to come next: the owner may wait for all of them at once."""
        return self._receiver.payload_left

    def next_buffer(self) -> memoryview:
        """Where the next bytes from the host go."""
        return self._receiver.next_buffer()

    def received(self, count: int, now: float) -> None:
        """`count` bytes are in `next_buffer()`. What they cause is in `outgoing` afterwards."""
        self._now = now
        if self._state is _ENDING:
            return
        try:
            for event in self._receiver.received(count):
                self._handle(event)
                if self.ending:
                    return
        except RemoteProtocolError as error:
            self._terminate(error)
            return
        if self._runnable:
            self._run_queued()

    def end_of_stream(self) -> None:
        self._end("the host closed the connection")

    def run(self, now: float) -> None:
        """Do everything that is due at `now`: waiting commands, events, time-outs, a close on demand."""
        self._now = now
        if self._state is _ENDING:
            if now >= self._goodbye_until or self.session.displaced:
                self._output.clear()
            return
        session = self.session
        reason = session.reason_to_end(now, self._handshake_until)
        if reason is not None:
            self._end(reason)
            if session.displaced:
                self._output.clear()
            return
        for completion in session.take_completions():
            self._complete(completion.cid, completion.status, completion.result)
        if session.waiting:
            self._runnable.extend(session.ready(now))
        if self._runnable:
            self._run_queued()

    def deadline(self) -> float:
        """When `run` should be called at the latest; infinity if only bytes or a wake-up can matter."""
        if self._state is _ENDING:
            return self._goodbye_until
        if self.session.controller is None:
            return self._handshake_until
        return self.session.deadline()

    @property
    def has_outgoing(self) -> bool:
        """Whether there is something to send."""
        return bool(self._output)

    @property
    def may_hold_answers(self) -> bool:
        """Whether there is little to send and nothing else to do, and a short payload is certain to come."""
        is_short = 0 < self._receiver.payload_left <= HELD_FOR_BYTES
        return is_short and 0 < self._output_bytes <= HELD_BYTES and not self._runnable and self._is_quiet

    def outgoing(self) -> Sequence[Buffer]:
        """Buffers to send, in order; empty if there is nothing. Good until anything else is called here."""
        output = self._output
        return output if len(output) <= _MOST_BUFFERS else output[:_MOST_BUFFERS]

    def sent(self, count: int) -> None:
        """`count` bytes of `outgoing` are out. Commands that waited for room go on."""
        output = self._output
        self._output_bytes -= count
        if not self._output_bytes:
            output.clear()
        else:
            whole = 0
            while count >= len(output[whole]):
                count -= len(output[whole])
                whole += 1
            output[whole] = memoryview(output[whole])[count:]
            del output[:whole]
        if not output:
            self._reading_busy = False
        if self._runnable and self._state is _RUNNING:
            self._run_queued()

    def connection_lost(self) -> None:
        """The connection is gone; gives up the queue, and with the admin queue the controller."""
        self._state = _ENDING
        self._output.clear()
        self._output_bytes = 0
        for request in self._in_flight.values():
            request.let_go()
        self.session.waiting.clear()
        self.session.connection_lost()

    def place(self, pdu: DataPdu) -> memoryview | Sequence[memoryview]:
        """`nvmeof.tcp.receiver.Owner`: where payload goes that is about to arrive."""
        if self._state is _INITIALIZING:
            raise out_of_order("a PDU before ICReq")
        if isinstance(pdu, H2CData):
            return self._place_data(pdu)
        if isinstance(pdu, CapsuleCmd):
            return self._place_capsule(pdu)
        raise out_of_order("a PDU that a host does not send")

    def _place_capsule(self, pdu: CapsuleCmd) -> memoryview:
        session = self.session
        is_io = session.qid != 0 and pdu.sqe.opcode != AdminOpcode.FABRICS
        limit = self._target.settings.in_capsule_bytes if is_io else ADMIN_IN_CAPSULE_BYTES
        if pdu.data_length > limit:
            raise RemoteProtocolError(
                f"{pdu.data_length} bytes in a capsule, {limit} allowed",
                fatal_error_status=FatalErrorStatus.LIMIT_EXCEEDED,
            )
        request = self._begin(pdu.sqe, pdu.data_length)
        view: memoryview | None = None
        if request.direction is Direction.FROM_HOST:
            session.open_window(request)
            view = request.window
        if view is None:
            view = self._incoming_piece(pdu.data_length)
        self._arrivals.append(Arrival(request, 0, view))
        return view

    def _place_data(self, pdu: H2CData) -> memoryview:
        transfer = judge_data(pdu, self._transfers.get(pdu.ttag), self.settings.max_h2c_data)
        request = transfer.request
        end = pdu.offset + pdu.data_length
        transfer.placed = end
        window = request.window
        if window is None:
            view = self._incoming_piece(pdu.data_length)
        else:
            view = window[pdu.offset : end]
        self._arrivals.append(Arrival(request, pdu.offset, view, transfer))
        return view

    def _incoming_piece(self, length: int) -> memoryview:
        """A buffer for data without a place. Two take turns: while one is filled, the other is read.

        One receive may bring more pieces than two, and none of them is read before all were placed. Those
        have memory of their own: `STAGING_BYTES` together, and the rest of the last one.
        """
        if length <= _SMALL_PIECE:
            return memoryview(bytearray(length))
        if len(self._arrivals) > 1:
            return Scratch(length).take(length)
        self._incoming = self._incoming[::-1]
        return self._incoming[0].take(length)

    def _handle(self, event: Event) -> None:
        if isinstance(event, CapsuleCmd):
            if self._state is _INITIALIZING:
                raise out_of_order("a PDU before ICReq")
            if event.data_length:
                self._arrived(good=True)
            else:
                self._without_data(self._begin(event.sqe, 0))
        elif isinstance(event, H2CData):
            self._arrived(good=True)
        elif isinstance(event, BadDataDigest):
            self._arrived(good=False)
        elif isinstance(event, ICReq):
            self._initialize(event)
        elif isinstance(event, TermReq):
            self._end(f"the host ended the connection, status {event.fatal_error_status}")
        else:
            raise out_of_order("a PDU that a host does not send")

    def _initialize(self, request: ICReq) -> None:
        if self._state is not _INITIALIZING:
            raise out_of_order("a second ICReq")
        if request.version != 0:
            raise RemoteProtocolError(
                f"PDU format version {request.version}",
                fatal_error_status=FatalErrorStatus.UNSUPPORTED_PARAMETER,
                information=8,
            )
        header = request.header_digest and self.settings.allow_header_digest
        data = request.data_digest and self.settings.allow_data_digest
        answer = ICResp(header_digest=header, data_digest=data, max_h2c_data=self.settings.max_h2c_data)
        self._send(encode_pdu(answer))
        self._digests = self._receiver.digests = Digests(header, data)
        self._alignment = alignment_bytes(request.data_alignment)
        self._is_plain = not header and not data and SMALLEST_PDU % self._alignment == 0
        self._state = _RUNNING

    def _begin(self, sqe: Sqe, capsule_data: int) -> Request:
        session = self.session
        if len(self._in_flight) + self._conflicting >= session.most_in_flight:
            raise out_of_order(session.count_overfull())
        session.take_entry()
        other = self._in_flight.get(sqe.cid)
        if other is not None and not session.gave_up_event(sqe, other):
            self._conflicting += 1
            conflicting = Request(sqe)
            session.refuse(conflicting, Refusal(Status.COMMAND_ID_CONFLICT))
            return conflicting
        request = session.begin(sqe, self._now)
        self._in_flight[sqe.cid] = request
        if request.direction is not Direction.NONE:
            wrong = wrong_sgl(sqe, request, capsule_data)
            if wrong:
                session.refuse(request, Refusal(wrong))
        return request

    def _without_data(self, request: Request) -> None:
        """The capsule was all there is, unless the command now has to be sent an R2T."""
        if request.direction is Direction.FROM_HOST:
            self.session.open_window(request)
            tag = self._new_tag()
            self._transfers[tag] = Transfer(request, tag)
            self._receiver.awaits_long = True
            self._send(
                encode_pdu(R2T(request.sqe.cid, tag, 0, request.length), self._digests, self._alignment)
            )
        else:
            self._runnable.append(request)

    def _new_tag(self) -> int:
        # There are fewer commands in flight than tags, so this ends.
        while self._next_ttag in self._transfers:
            self._next_ttag = self._next_ttag % 0xFFFF + 1
        tag = self._next_ttag
        self._next_ttag = tag % 0xFFFF + 1
        return tag

    def _arrived(self, *, good: bool) -> None:
        arrival = self._arrivals.popleft()
        request, view, transfer = arrival.request, arrival.view, arrival.transfer
        if request.direction is Direction.FROM_HOST:
            if good:
                self.session.accept(request, arrival.offset, view, self._comparing)
            else:
                request.fail(Status.TRANSIENT_TRANSPORT_ERROR)
        if transfer is None:
            self._runnable.append(request)
            return
        transfer.accepted += len(view)
        if transfer.accepted == request.length:
            del self._transfers[transfer.tag]
            self._receiver.awaits_long = len(self._transfers) > 0
            self._runnable.append(request)

    def _run_queued(self) -> None:
        """Carry out what is runnable, as long as its answers find room."""
        runnable = self._runnable
        while runnable and not self._reading_busy and self._output_bytes < OUTPUT_LIMIT:
            self._execute(runnable.popleft())
            if self._state is not _RUNNING:
                return

    def _execute(self, request: Request) -> None:
        session = self.session
        outcome = session.execute(request, self._now, self._reading)
        if outcome is not Outcome.DONE:
            return
        sqe = request.sqe
        data = request.data
        if data is not None and not request.status:
            self._reading_busy = self._reading.holds(data)
            if self._digests.data and not self._reading_busy:
                # It lies in the medium, where a Write may put other bytes before these have left: not those
                # that the digest is of, and the host would take the connection for broken.
                data = memoryview(bytes(data))
            # SUCCESS stands for a completion, but tells no SQ head: only without flow control.
            success = session.no_flow_control and not request.result and not session.closes_when_answered
            length = len(data)
            if self._is_plain:
                self._output += (plain_answer(sqe.cid, length, success=success), data)
                self._output_bytes += SMALLEST_PDU + length
            else:
                pdu = C2HData(sqe.cid, 0, length, True, success)
                self._send(encode_pdu(pdu, self._digests, self._alignment, (data,)))
            request.data = None
            if success:
                self._release(request)
                return
        self._complete(
            sqe.cid, request.status, request.result, do_not_retry=request.do_not_retry, request=request
        )

    def _complete(
        self,
        cid: int,
        status: int,
        result: int,
        *,
        do_not_retry: bool = False,
        request: Request | None = None,
    ) -> None:
        session = self.session
        if request is None:
            request = self._in_flight.get(cid)
        if request is not None:
            self._release(request)
        cqe = Cqe(cid, status, result, session.head_for(request), session.qid, do_not_retry)
        if self._is_plain:
            self._send((PLAIN_COMPLETION + cqe.encode(),))
        else:
            self._send(encode_pdu(CapsuleResp(cqe), self._digests, self._alignment))
        if session.closes_when_answered:
            self._end(session.farewell)

    def _release(self, request: Request) -> None:
        if self._in_flight.get(request.sqe.cid) is request:
            del self._in_flight[request.sqe.cid]
        else:
            self._conflicting -= 1

    def _send(self, parts: Sequence[Buffer]) -> None:
        for part in parts:
            self._output.append(part)
            self._output_bytes += len(part)

    def _terminate(self, error: RemoteProtocolError) -> None:
        """The host broke the protocol: say so, and hang up."""
        pdu = termination_for(error, from_host=False, header=self._receiver.wrong_header)
        if pdu is not None:
            self._send([pdu])
            self.terminated = True
        self._end(error.reason)

    def _end(self, reason: str) -> None:
        if self._state is not _ENDING:
            self._state = _ENDING
            self._goodbye_until = self._now + GOODBYE_S
            self.end_reason = reason
            self._runnable.clear()
            self.session.waiting.clear()
