"""One NVMe/RDMA queue pair of the controller role, without I/O. Read `queue_session.py` and
`nvmeof/rdma/work.py` first.

A SEND of the host is a capsule; its data come in the capsule or by RDMA READ. Data for the host leave by RDMA
WRITE, and the completion is a SEND behind it. The owner of the queue pair does

    queue.start()                                        # receives for capsules, before the host is accepted
    queue.completed(done, now)                           # for each completion
    queue.run(now)                                       # after each wake-up and at queue.deadline()
    post(queue.take_receives(), queue.sends.take())      # after each of these; receives first

until `queue.finished`. Payload moves between the host's memory and the drive's where that is registered
(`buffers`), else through a loan.

Bounds: `entries` commands are in flight, because so many receives are posted, and a receive is posted again
just before its answer. An answer that finds no room in the send queue keeps its receive, so a host that
acknowledges nothing is heard no more (receiver not ready). `max_reads` RDMA READs; loans to one queue stay
under `LENT_LIMIT` and one command.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final

from nvmeof.controller.queue_session import HANDSHAKE_S, QueueSession, is_connect
from nvmeof.controller.request import Direction, Outcome, Refusal, Request
from nvmeof.controller.settings import ControllerSettings
from nvmeof.controller.storage import Scratch
from nvmeof.controller.target import Target
from nvmeof.rdma.buffers import Loan, Place, RegisteredBuffers
from nvmeof.rdma.send_queue import SIGNAL_EVERY, SendQueue
from nvmeof.rdma.work import Done, Read, Receive, Send, Span, WorkKind, Write, describe_status, work_id
from nvmeof.wire.cqe import Cqe
from nvmeof.wire.log_page import TransportType
from nvmeof.wire.rdma import (
    CAPSULE_BYTES,
    COMPLETION_BYTES,
    ConnectRequest,
    RejectStatus,
    UnacceptableRequest,
    wrong_sgl,
)
from nvmeof.wire.sgl import SUBTYPE_INVALIDATE, SglKind
from nvmeof.wire.sqe import Sqe, decode_sqe_untrusted
from nvmeof.wire.status import Status

LENT_LIMIT: Final = 8 << 20
"""Nothing more is begun for a queue while it has this much in loans."""

GOODBYE_S: Final = 1.0
"""The answer to Disconnect has this many seconds to leave."""

_WRITE: Final = work_id(WorkKind.WRITE)

WORK_FOR_A_COMMAND: Final = 2
"""A READ and later a SEND, or a WRITE and a SEND; no more than two are out at any time."""


@dataclass(frozen=True, slots=True)
class RdmaSettings:
    """The settings of RDMA alone.

    `in_capsule_bytes` of a write travel in the capsule on I/O queues, a multiple of 16; each queue has
    receives of that size for all its entries, so it is small. `max_reads` RDMA READs of one queue pair are
    out at a time (ORD), or fewer where the host takes no more (its IRD).
    """

    in_capsule_bytes: int = 4096
    max_queue_entries: int = 128
    max_reads: int = 16

    def __post_init__(self) -> None:
        if self.in_capsule_bytes % 16 or not 0 <= self.in_capsule_bytes <= 16 << 10:
            raise ValueError("in_capsule_bytes is a multiple of 16, at most 16 KiB")
        if not 32 <= self.max_queue_entries <= 1024:
            raise ValueError("max_queue_entries is between 32 and 1024")
        if not 1 <= self.max_reads <= 128:
            raise ValueError("max_reads is between 1 and 128")

    def narrow(self, settings: ControllerSettings) -> ControllerSettings:
        """The target's settings for a controller that is reached by RDMA."""
        return replace(
            settings,
            in_capsule_bytes=self.in_capsule_bytes,
            max_queue_entries=min(settings.max_queue_entries, self.max_queue_entries),
        )


def send_room(entries: int) -> int:
    """Work requests that the send queue of a controller must hold."""
    return max(4 * SIGNAL_EVERY, WORK_FOR_A_COMMAND * entries + SIGNAL_EVERY)


def judge_request(
    request: ConnectRequest, settings: RdmaSettings, *, max_io_queues: int, host_reads: int
) -> None:
    """Raise `UnacceptableRequest` for a connection that cannot be.

    `host_reads` are the responder resources of the host (IRD): with none we could read no data of a write.
    """
    if request.qid > max_io_queues:
        raise UnacceptableRequest(RejectStatus.INVALID_QUEUE_ID, f"queue {request.qid} of {max_io_queues}")
    if not 2 <= request.host_send_entries <= settings.max_queue_entries:
        raise UnacceptableRequest(
            RejectStatus.INVALID_HSQSIZE, f"a send queue of {request.host_send_entries} entries"
        )
    if request.host_receive_entries < 1:
        raise UnacceptableRequest(RejectStatus.INVALID_HRQSIZE, "a host without receives")
    if host_reads < 1:
        raise UnacceptableRequest(RejectStatus.INVALID_IRD, "a host that lets nothing be read")


class _Flight:
    """A command: the receive that it holds, and the R_Key that its answer is to invalidate."""

    __slots__ = ("invalidate", "loan", "request", "slot")

    def __init__(self, request: Request, slot: int) -> None:
        sgl = request.sqe.sgl
        wanted = sgl.kind == SglKind.KEYED and sgl.subtype == SUBTYPE_INVALIDATE and sgl.length
        self.invalidate = sgl.key if wanted else None
        self.loan: Loan | None = None
        self.request = request
        self.slot = slot


class _LoanScratch(Scratch):
    """Scratch for one answer: a drive whose bytes lie nowhere in memory fills it, and it is sent as it is."""

    def __init__(self, borrow: Callable[[int], Loan]) -> None:
        self._borrow = borrow
        self.loan: Loan | None = None

    def take(self, length: int) -> memoryview:
        if self.loan is None:
            self.loan = self._borrow(length)
        return self.loan.view[:length]


class RdmaControllerQueue:
    """See the module's docstring. Used by one thread; `wake` is called from any."""

    def __init__(
        self,
        target: Target,
        buffers: RegisteredBuffers,
        request: ConnectRequest,
        *,
        now: float,
        host_reads: int,
        wake: Callable[[], None] | None = None,
        settings: RdmaSettings | None = None,
    ) -> None:
        settings = settings or RdmaSettings()
        narrowed = settings.narrow(target.settings)
        self.session = QueueSession(target, wake, settings=narrowed, transport=TransportType.RDMA)
        self.request = request
        self.entries = request.host_send_entries
        self.sends = SendQueue(send_room(self.entries))
        self.end_reason: str | None = None
        self._buffers = buffers
        self._max_reads = min(settings.max_reads, host_reads)
        self._now = now
        self._until = now + HANDSHAKE_S
        self._lost = False
        self._inside = settings.in_capsule_bytes if request.qid else 0
        self._step = CAPSULE_BYTES + self._inside
        self._capsules = buffers.borrow(self.entries * self._step)
        self._answer_slots = send_room(self.entries) + self.entries
        self._answers = buffers.borrow(self._answer_slots * COMPLETION_BYTES)
        self._next_answer = 0
        self._receives: list[Receive] = []
        self._flights: dict[int, _Flight] = {}
        self._wanted: deque[_Flight] = deque()
        self._reads: dict[int, _Flight] = {}
        self._runnable: deque[Request] = deque()
        self._lent = 0
        self._scratch = Scratch(narrowed.max_transfer_bytes)

    @property
    def finished(self) -> bool:
        """Nothing more will happen: break the queue pair."""
        if self.end_reason is None:
            return False
        return not self.session.closes_when_answered or self.sends.idle or self._now >= self._until

    def start(self) -> None:
        self._receives = [self._receive(slot) for slot in range(self.entries)]

    def take_receives(self) -> list[Receive]:
        """Receives to post now, before `sends.take()`: an answer gives the host its credit back."""
        receives, self._receives = self._receives, []
        receives += self.sends.take_receives()
        return receives

    def completed(self, done: Done, now: float) -> None:
        """A work request has completed. What it causes is in `sends` and `take_receives` afterwards."""
        self._now = now
        kind = WorkKind(done.work_id >> 32)
        if done.status:
            # Whatever it is, the queue pair is in error now.
            self._end(f"{kind.name.lower()}: {describe_status(done.status)}")
            self.session.closes_when_answered = False
            return
        if kind is not WorkKind.RECEIVE:
            self.sends.completed()
        if self.end_reason is not None:
            return
        if kind is WorkKind.RECEIVE:
            self._capsule(done.work_id & 0xFFFF_FFFF, done.length)
        elif kind is WorkKind.READ:
            self._fetched(self._reads.pop(done.work_id & 0xFFFF_FFFF))
        self._go_on()

    def run(self, now: float) -> None:
        """Do everything that is due at `now`: waiting commands, events, time-outs, a close on demand."""
        self._now = now
        if self.end_reason is not None:
            return
        session = self.session
        reason = session.reason_to_end(now, self._until)
        if reason is not None:
            self._end(reason)
            return
        for completion in session.take_completions():
            flight = self._flights.get(completion.cid)
            if flight is not None:
                flight.request.status, flight.request.result = completion.status, completion.result
                self._answer(flight)
        if session.waiting:
            self._runnable.extend(session.ready(now))
        self._go_on()

    def deadline(self) -> float:
        """When `run` should be called at the latest; infinity if only completions or a wake-up can matter."""
        if self.end_reason is not None or self.session.controller is None:
            return self._until
        return self.session.deadline()

    def connection_lost(self, reason: str = "the connection was lost") -> None:
        """The queue pair is gone; gives up the queue, and with the admin queue the controller."""
        if self._lost:
            return
        self._lost = True
        self._end(reason)
        self.sends.abandon()
        for flight in (*self._wanted, *self._reads.values()):
            self._give_back(flight)
        self._reads.clear()
        self._wanted.clear()
        for flight in self._flights.values():
            flight.request.let_go()
        self._buffers.give_back(self._capsules)
        self._buffers.give_back(self._answers)
        self.session.connection_lost()

    def _end(self, reason: str) -> None:
        if self.end_reason is None:
            self.end_reason = reason
            self._until = self._now + GOODBYE_S
            self._runnable.clear()
            self.session.waiting.clear()

    def _receive(self, slot: int) -> Receive:
        span = self._capsules.place.span
        at = span.address + slot * self._step
        return Receive(work_id(WorkKind.RECEIVE, slot), Span(at, self._step, span.lkey))

    def _capsule(self, slot: int, length: int) -> None:
        if length < CAPSULE_BYTES:
            self._end(f"a capsule of {length} bytes")
            return
        capsule = self._capsules.view[slot * self._step : slot * self._step + length]
        sqe = decode_sqe_untrusted(capsule[:CAPSULE_BYTES])
        session = self.session
        if len(self._flights) >= session.most_in_flight:
            self._end(session.count_overfull())
            return
        session.take_entry()
        other = self._flights.get(sqe.cid)
        if other is not None:
            if not session.gave_up_event(sqe, other.request):
                flight = _Flight(Request(sqe), slot)
                session.refuse(flight.request, Refusal(Status.COMMAND_ID_CONFLICT))
                self._answer(flight)
                return
            self._receives.append(self._receive(other.slot))
        request = self._begin(sqe, length - CAPSULE_BYTES)
        flight = self._flights[sqe.cid] = _Flight(request, slot)
        if request.direction is not Direction.FROM_HOST:
            self._runnable.append(request)
        elif sqe.sgl.in_capsule:
            start = CAPSULE_BYTES + sqe.sgl.address
            session.open_window(request)
            self._accept(request, capsule[start : start + request.length])
        else:
            self._wanted.append(flight)

    def _begin(self, sqe: Sqe, capsule_data: int) -> Request:
        session = self.session
        if self.request.qid and session.controller is None and not is_connect(sqe):
            # An I/O queue of a controller that has ended: nothing but Connect makes sense.
            self._end("a command before Connect")
        request = session.begin(sqe, self._now)
        if request.direction is not Direction.NONE:
            from_host = request.direction is Direction.FROM_HOST
            wrong = wrong_sgl(sqe.sgl, request.length, capsule_data, from_host=from_host)
            if wrong:
                session.refuse(request, Refusal(wrong))
        return request

    def _accept(self, request: Request, data: memoryview) -> None:
        """All data of the host are here; `data` may be their window, or have to be copied into it."""
        window = request.window
        if window is not None and window is not data:
            window[:] = data
            data = window
        self.session.accept(request, 0, data, self._scratch)
        self._runnable.append(request)

    def _fetch(self) -> None:
        """Read data of the host, as many commands' at a time as the two ends allow."""
        while self._wanted and len(self._reads) < self._max_reads and self._lent < LENT_LIMIT:
            flight = self._wanted.popleft()
            request = flight.request
            self.session.open_window(request)
            place = None if request.window is None else self._buffers.find(request.window)
            if place is None:
                loan = flight.loan = self._borrow(request.length)
                place = loan.place
            number = flight.slot
            self._reads[number] = flight
            sgl = request.sqe.sgl
            self.sends.put(Read(work_id(WorkKind.READ, number), place.span, sgl.address, sgl.key))

    def _fetched(self, flight: _Flight) -> None:
        request = flight.request
        if flight.loan is not None:
            self._accept(request, flight.loan.view)
            self._give_back(flight)
        else:
            assert request.window is not None
            self._accept(request, request.window)

    def _go_on(self) -> None:
        """Carry out what is runnable as long as there are loans, and fetch what commands wait for."""
        runnable = self._runnable
        while runnable and self.end_reason is None and self._lent < LENT_LIMIT:
            request = runnable.popleft()
            scratch = _LoanScratch(self._borrow)
            outcome = self.session.execute(request, self._now, scratch)
            flight = self._flights[request.sqe.cid]
            flight.loan = scratch.loan
            if outcome is Outcome.DONE:
                self._answer(flight)
            else:
                self._give_back(flight)
        if self.end_reason is None and self._wanted:
            self._fetch()

    def _answer(self, flight: _Flight) -> None:
        """Data, if there are any, and the completion behind them."""
        request, session = flight.request, self.session
        sqe = request.sqe
        if self._flights.get(sqe.cid) is flight:
            del self._flights[sqe.cid]
        head = session.head_for(request)
        cqe = Cqe(sqe.cid, request.status, request.result, head, session.qid, request.do_not_retry)
        receive = self._receive(flight.slot)
        data, request.data = request.data, None
        place: Place | None = None
        if data is None or request.status:
            self._give_back(flight)
        else:
            place = self._place(flight, data)
        # A loan is back only when it is known to have been sent; were nothing signaled, all could be out.
        signaled = self.sends.signal_due or flight.loan is not None or session.closes_when_answered
        send = Send(work_id(WorkKind.SEND, flight.slot), self._completion(cqe), signaled, flight.invalidate)
        if place is None:
            self.sends.put(send, receive=receive)
        else:
            write = Write(_WRITE, place.span, sqe.sgl.address, sqe.sgl.key)
            then = None if flight.loan is None else lambda: self._give_back(flight)
            self.sends.put(write, send, receive=receive, then=then)
        if session.closes_when_answered:
            self._end(session.farewell)

    def _place(self, flight: _Flight, data: memoryview) -> Place:
        """Where the data of an answer are sent from: the drive's memory, or a loan."""
        place = self._buffers.find(data)
        if place is not None:
            return place
        loan = flight.loan
        if loan is None or data.obj is not loan.view.obj or len(data) != len(loan.view):
            self._give_back(flight)
            loan = flight.loan = self._borrow(len(data))
            loan.view[:] = data
        return loan.place

    def _completion(self, cqe: Cqe) -> Span:
        """A place for a completion. They go round: there are more than can be out."""
        at = self._next_answer * COMPLETION_BYTES
        self._next_answer = (self._next_answer + 1) % self._answer_slots
        self._answers.view[at : at + COMPLETION_BYTES] = cqe.encode()
        span = self._answers.place.span
        return Span(span.address + at, COMPLETION_BYTES, span.lkey)

    def _borrow(self, size: int) -> Loan:
        loan = self._buffers.borrow(size)
        self._lent += size
        return loan

    def _give_back(self, flight: _Flight) -> None:
        loan, flight.loan = flight.loan, None
        if loan is not None:
            self._lent -= len(loan.view)
            self._buffers.give_back(loan)
