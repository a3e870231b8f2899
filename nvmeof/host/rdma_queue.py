"""One NVMe/RDMA queue of the host role, without I/O. Read `nvmeof/rdma/work.py` and `command.py` first.

    queue = RdmaQueue(32, buffers, in_capsule_bytes=4096, windows=rkeys)
    queue.start()                                  # receives for completions are in `receives`
    queue.submit(command, now)                     # a bind and a SEND are in `sends`
    post(queue.take_receives(), queue.sends.take())
    ended = queue.completed(done)                  # for each completion
    queue.fail(reason)                             # once the queue pair can touch no memory any more

Where the data of a command lie while it is in flight:

* up to `in_capsule_bytes` of the host's data travel in the capsule;
* memory that was registered (`buffers.register`) is named to the controller, which reads and writes it;
* anything else is copied through a loan, which the queue keeps until the command is answered.

With memory windows (type 2) every command has an R_Key of its own, bound just before its capsule and gone
with its answer. The SGL asks the controller to invalidate it (4Fh); where its answer did not, we do before
the command ends. Without them the registration's own key goes out (40h), and a controller that means
harm may use it for longer; what it can reach that way is sealed, and proves itself when it is opened.
`windows` are the R_Keys of windows that may be bound again and again, or, with `renew_window`, once: it
makes a new one of that number and tells its key.

An abandoned command whose data are in the owner's memory is the one case that ends a queue: `abandon` says
so, and the owner must break the queue pair before it lets go of the buffer. Invalidating the window instead
would keep the queue only until the late answer comes. Then the access error takes the queue pair down all the
same, at a moment of the peer's choosing, with whatever is in flight by then.

Credits: no more capsules are out than the controller has receives for, because a command counts until it is
answered, and the controller has posted its receive again when it answers.
"""

from collections.abc import Callable, Sequence
from typing import Final

from nvmeof.errors import LocalProtocolError, MalformedPdu, QueueFull, RemoteProtocolError
from nvmeof.host.command import CID_COUNT, Command
from nvmeof.limits import MAX_QUEUE_DEPTH
from nvmeof.rdma.buffers import LEAST_LOAN, Loan, Place, RegisteredBuffers, gather
from nvmeof.rdma.send_queue import SendQueue
from nvmeof.rdma.work import (
    FLUSHED,
    Access,
    BindWindow,
    Done,
    Invalidate,
    Receive,
    Send,
    Span,
    Work,
    WorkKind,
    describe_status,
    work_id,
)
from nvmeof.wire.cqe import CQE
from nvmeof.wire.rdma import CAPSULE_BYTES, COMPLETION_BYTES, MAX_KEYED_LENGTH
from nvmeof.wire.sgl import SGL_IN_CAPSULE
from nvmeof.wire.sqe import FLAGS_SGL, SQE

SGL_KEYED: Final = 0x40 << 56
SGL_KEYED_INVALIDATE: Final = 0x4F << 56
"""The high halves of the descriptors, less key and length (`wire/sgl.py`)."""

CAPSULE_ALIGNMENT: Final = 64
SPARE_RECEIVES: Final = 2
"""More receives than commands: the controller may answer before we have seen to the last answer."""

WORK_FOR_A_COMMAND: Final = 3
"""Bind, SEND, invalidate."""

BIND: Final = work_id(WorkKind.BIND)
INVALIDATE: Final = work_id(WorkKind.INVALIDATE)


def send_room(depth: int) -> int:
    """Work requests that the send queue must hold."""
    return max(64, WORK_FOR_A_COMMAND * depth)


class _Window:
    """A type 2 memory window: its number, and the key it was or is bound under."""

    __slots__ = ("number", "rkey")

    def __init__(self, number: int, rkey: int) -> None:
        self.number = number
        self.rkey = rkey

    def next_key(self) -> int:
        """The key of the next bind: the low byte is ours to choose, and never the same twice running."""
        self.rkey = self.rkey & ~0xFF | (self.rkey + 1) & 0xFF
        return self.rkey


class _Flight:
    """A command on its way."""

    __slots__ = ("command", "direct", "loan", "slot", "window")

    def __init__(self, command: Command, slot: int) -> None:
        self.command = command
        self.slot = slot
        self.loan: Loan | None = None
        self.direct = False
        self.window: _Window | None = None


class RdmaQueue:
    """See the top of this file. Used by one thread or task."""

    def __init__(
        self,
        depth: int,
        buffers: RegisteredBuffers,
        *,
        in_capsule_bytes: int = 0,
        windows: Sequence[int] = (),
        renew_window: Callable[[int], int] | None = None,
    ) -> None:
        if not 1 <= depth <= MAX_QUEUE_DEPTH:
            raise LocalProtocolError(f"a queue of depth {depth}")
        if windows and len(windows) < depth:
            raise LocalProtocolError(f"{len(windows)} memory windows for {depth} commands")
        self.depth = depth
        self.in_capsule_bytes = in_capsule_bytes
        self.sends = SendQueue(send_room(depth))
        self.failed: str | None = None
        self._buffers = buffers
        self._receives: list[Receive] = []
        self._flights: dict[int, _Flight] = {}
        self._next_cid = 0
        self._renew_window = renew_window
        self._windows = [_Window(number, rkey) for number, rkey in enumerate(windows)]
        # Commands that are answered but wait for their window to be closed, in the order of the work.
        self._closing: list[tuple[_Flight, int, int, bool]] = []
        step = CAPSULE_BYTES + in_capsule_bytes
        self._capsule_step = -(-step // CAPSULE_ALIGNMENT) * CAPSULE_ALIGNMENT
        self._capsules = buffers.borrow(depth * self._capsule_step)
        self._free_slots = list(range(depth))
        self._answers = buffers.borrow((depth + SPARE_RECEIVES) * COMPLETION_BYTES)

    @property
    def in_flight(self) -> int:
        """Commands without an end, the abandoned ones included."""
        return len(self._flights)

    @property
    def abandoned(self) -> int:
        """Those that nobody waits for."""
        return sum(flight.command.abandoned for flight in self._flights.values())

    @property
    def to_post(self) -> bool:
        return bool(self._receives) or self.sends.pending

    def oldest_abandoned(self) -> float | None:
        """When the oldest command was submitted that was abandoned and has not been answered."""
        flights = self._flights.values()
        return min((f.command.submitted_at for f in flights if f.command.abandoned), default=None)

    def limit_depth(self, entries: int) -> None:
        """The controller has so many receives, and so many commands may be out."""
        self.depth = max(1, min(self.depth, entries))

    def start(self) -> None:
        """Post the receives for completions; before the connection is made."""
        self._receives = [self._receive(n) for n in range(self.depth + SPARE_RECEIVES)]

    def take_receives(self) -> list[Receive]:
        receives, self._receives = self._receives, []
        return receives

    def _receive(self, number: int) -> Receive:
        span = self._answers.place.span
        at = span.address + number * COMPLETION_BYTES
        return Receive(work_id(WorkKind.RECEIVE, number), Span(at, COMPLETION_BYTES, span.lkey))

    def fail(self, reason: str) -> list[Command]:
        """The queue pair is gone: every command in flight ends, lost.

        Returns those that somebody waits for.
        """
        if self.failed is not None:
            return []
        self.failed = reason
        flights = [*self._flights.values(), *(closing[0] for closing in self._closing)]
        self._flights.clear()
        self._closing.clear()
        self._receives.clear()
        self.sends.abandon()
        ended = []
        for flight in flights:
            if flight.loan is not None:
                self._buffers.give_back(flight.loan)
            if flight.command.abandoned:
                flight.command.orphaned = True
            else:
                flight.command.lose(reason)
                ended.append(flight.command)
        self._buffers.give_back(self._capsules)
        self._buffers.give_back(self._answers)
        return ended

    def has_room(self, commands: int) -> bool:
        return len(self._flights) + len(self._closing) + commands <= self.depth

    def submit(self, command: Command, now: float) -> None:
        """Put a command into `sends`. Raises `QueueFull`, `LocalProtocolError`, and `ConnectionLost` where
        the device registers no more memory; then nothing happened."""
        if self.failed is not None:
            raise LocalProtocolError("a host queue that has failed takes no command")
        if not self.has_room(1):
            raise QueueFull(f"{self.depth} commands are in flight")
        if command.cid != -1:
            raise LocalProtocolError(f"{command!r} was submitted before")
        size = command.out_bytes or command.in_bytes
        if size > MAX_KEYED_LENGTH:
            raise LocalProtocolError(f"{command!r} moves {size} bytes, more than a descriptor can name")
        flight = _Flight(command, self._free_slots[-1])
        inside = 0
        address = sgl = 0
        bind: BindWindow | None = None
        if command.out_bytes and command.out_bytes <= self.in_capsule_bytes:
            inside = command.out_bytes
            sgl = SGL_IN_CAPSULE | inside
        elif size:
            place = self._place(flight, command, size)
            address, key = place.span.address, place.rkey
            identifier = SGL_KEYED
            if self._windows:
                window = flight.window = self._windows.pop()
                key = window.next_key()
                access = Access.REMOTE_READ if command.out_bytes else Access.REMOTE_WRITE
                bind = BindWindow(BIND, window.number, key, place.span, access)
                identifier = SGL_KEYED_INVALIDATE
            sgl = identifier | key << 24 | size
        else:
            # A descriptor must be there; a keyed one of length 0 says that no data are (as Linux has it).
            sgl = SGL_KEYED
        self._free_slots.pop()
        command.cid = self._new_cid()
        command.submitted_at = now
        self._flights[command.cid] = flight
        self._send(flight, address, sgl, inside, bind)

    def _new_cid(self) -> int:
        cid = self._next_cid
        while cid in self._flights:
            cid = (cid + 1) % CID_COUNT
        self._next_cid = (cid + 1) % CID_COUNT
        return cid

    def _place(self, flight: _Flight, command: Command, size: int) -> Place:
        """Memory that the controller may read or write: the owner's own where it is registered."""
        place: Place | None = None
        if command.in_bytes:
            place = self._buffers.find(command.data_in)  # type: ignore[arg-type]
        elif len(command.data_out) == 1:
            place = self._buffers.find(command.data_out[0])
        if place is not None:
            flight.direct = True
            return place
        loan = flight.loan = self._buffers.borrow(size)
        if command.out_bytes:
            gather(command.data_out, loan.view)
        elif size <= LEAST_LOAN or command.may_be_short:
            # Nobody tells how much of it the controller has written, and its last user's bytes are no answer.
            loan.view[:] = bytes(size)
        return loan.place

    def _send(self, flight: _Flight, address: int, sgl: int, inside: int, bind: BindWindow | None) -> None:
        command, step = flight.command, self._capsule_step
        at = flight.slot * step
        view = self._capsules.view
        SQE.pack_into(
            view, at, command.opcode, FLAGS_SGL, command.cid, command.nsid, command.cdw2, command.cdw3, 0,
            address, sgl,
            command.cdw10, command.cdw11, command.cdw12, command.cdw13, command.cdw14, command.cdw15,
        )  # fmt: skip
        if inside:
            gather(command.data_out, view[at + CAPSULE_BYTES : at + CAPSULE_BYTES + inside])
        span = self._capsules.place.span
        capsule = Span(span.address + at, CAPSULE_BYTES + inside, span.lkey)
        send = Send(work_id(WorkKind.SEND, flight.slot), capsule, self.sends.signal_due)
        chain: tuple[Work, ...] = (send,) if bind is None else (bind, send)
        self.sends.put(*chain)

    def abandon(self, command: Command) -> bool:
        """Nobody waits for it any more; its end is swallowed.

        True: the controller may still touch the owner's buffer, so the queue pair has to be broken (and
        `fail` called) before the owner gets it back. False: the data are in a loan, which stays out until
        the answer.
        """
        if command.done or command.abandoned:
            return False
        flight = self._flights.get(command.cid)
        if flight is None or flight.command is not command:
            # Answered, but its window is not closed yet.
            flight = next((c[0] for c in self._closing if c[0].command is command), None)
            if flight is None:
                raise LocalProtocolError(f"{command!r} is not in flight here")
        command.abandoned = True
        command.data_in = None
        command.data_out = ()
        return flight.direct

    def completed(self, done: Done) -> list[Command]:
        """Something has completed; the commands that ended by it.

        Raises `RemoteProtocolError`: the owner breaks the queue pair and calls `fail`.
        """
        kind = done.work_id >> 32
        if done.status:
            raise RemoteProtocolError(
                f"{WorkKind(kind).name.lower()}: {describe_status(done.status)}"
                + (", the queue pair is in error" if done.status == FLUSHED else ""),
                fatal_error_status=None,
            )
        if kind == WorkKind.RECEIVE:
            return self._answered(done)
        self.sends.completed()
        if kind == WorkKind.INVALIDATE:
            flight, status, result, do_not_retry = self._closing.pop(0)
            return self._settle(flight, status, result, do_not_retry)
        return []

    def _answered(self, done: Done) -> list[Command]:
        number = done.work_id & 0xFFFF_FFFF
        if done.length != COMPLETION_BYTES:
            raise MalformedPdu(f"a completion of {done.length} bytes")
        result, _, _, cid, word = CQE.unpack_from(self._answers.view, number * COMPLETION_BYTES)
        self._receives.append(self._receive(number))
        flight = self._flights.pop(cid, None)
        if flight is None:
            raise RemoteProtocolError(f"command {cid} is answered, but not in flight")
        status, do_not_retry = word >> 1 & 0x7FF, word & 0x8000 != 0
        window = flight.window
        if done.invalidated is not None and (window is None or window.rkey != done.invalidated):
            self._flights[cid] = flight
            raise RemoteProtocolError("the controller invalidated a key that is not the command's")
        if window is not None and done.invalidated is None:
            self._closing.append((flight, status, result, do_not_retry))
            self.sends.put(Invalidate(INVALIDATE, window.rkey))
            return []
        return self._settle(flight, status, result, do_not_retry)

    def _settle(self, flight: _Flight, status: int, result: int, do_not_retry: bool) -> list[Command]:
        """The one place where a command of a live queue ends."""
        command, loan = flight.command, flight.loan
        command.result = result
        self._free_slots.append(flight.slot)
        window = flight.window
        if window is not None:
            if self._renew_window is not None:
                window.rkey = self._renew_window(window.number)
            self._windows.append(window)
        if loan is not None:
            if status == 0 and command.data_in is not None:
                filled = command.answer_bytes
                command.data_in[:filled] = loan.view[:filled]
            self._buffers.give_back(loan)
        if command.abandoned:
            command.answered_late = True
            return []
        if status == 0:
            command.received = command.answer_bytes
        command.end(status, result, do_not_retry=do_not_retry)
        return [command]
