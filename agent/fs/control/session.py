"""What the agent keeps of one control session: its answers, tickets and registered memory.

host_shim/control_wire.py says what they are. Nothing of a session outlives it.
"""

import enum
import errno
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

from agent.fs.control.registered_memory import Region
from agent.fs.guest_sessions import Binding, GuestWords
from agent.fs.interface import FsError
from agent.fs.value_writer import errno_of
from agent.host_os.per_user_bounds import Holder
from agent.pool.access import ServedVolume
from agent.pool.errors import BadPut, PutRefused
from agent.pool.prestage.readahead import Readahead, Trail
from agent.pool.read.prestage_cache import PrestageCache
from agent.pool.read.reader_base import Reader
from agent.pool.steps import Acquire, IoChannel, Steps
from agent.pool.write.writer_base import Writer
from host_shim.control_wire import Outcome

ELSEWHERE: Final = "the first process of the agent serves that"
NOT_FOR_READING: Final = "no key is bound to this ticket for reading"
NOT_FOR_WRITING: Final = "no key is bound to this ticket for writing"


class SessionState(enum.Enum):
    """What the tickets of a session are."""

    NEW = "none was bound yet"
    BOUND = "bound to keys"
    TAKEN = "taken back, for others of its user: a read or write is ESTALE until the session binds anew"
    CLOSED = "gone with the file"


LEGAL: Final = {
    SessionState.NEW: {SessionState.BOUND, SessionState.CLOSED},
    SessionState.BOUND: {SessionState.BOUND, SessionState.TAKEN, SessionState.CLOSED},
    SessionState.TAKEN: {SessionState.BOUND, SessionState.CLOSED},
    SessionState.CLOSED: set[SessionState](),
}


def outcome_of(refused: PutRefused | BadPut) -> Outcome:
    """What a client is told of a put that was refused."""
    cause = refused.cause if isinstance(refused, PutRefused) else None
    return Outcome.REFUSED if cause is None else Outcome(cause.value)


class Ahead:
    """What the tickets of one binding share: that reading them leads on, behind the last of their keys."""

    __slots__ = ("key",)

    def __init__(self, key: bytes) -> None:
        self.key: bytes | None = key

    def read(self, continuer: Readahead, volume: ServedVolume) -> None:
        """One of the tickets is read: set out for what follows, the first time."""
        key, self.key = self.key, None
        if key is not None:
            continuer.reads(volume.in_sets, key)


class Ticket:
    """A bound key: a value being read, or one being written."""

    __slots__ = (
        "ahead", "key", "length", "lock", "reading", "refused", "serial", "ttl_seconds", "volume", "writing",
    )  # fmt: skip

    def __init__(
        self, volume: ServedVolume, key: bytes, ahead: Ahead | None, length: int = 0, ttl_seconds: int = 0
    ) -> None:
        """`length`: of a value to be written; 0 for one to be read. Raises FsError where it is too long."""
        if length > volume.settings.value_bytes:
            raise FsError(errno.EFBIG, f"{length} bytes; a value has {volume.settings.value_bytes} at most")
        self.volume = volume
        self.key = key
        self.length = length
        self.ttl_seconds = ttl_seconds
        self.writing: Writer | None = None
        self.reading: Reader | None = None
        self.refused: Outcome | None = None
        self.ahead = ahead
        self.serial = 0
        """Where other processes of the agent may read it for a guest: that of its `Binding`."""
        self.lock = threading.Lock()

    def to_read(self, prestage: PrestageCache | None) -> Reader:
        """The reading, begun with the first call. Raises FsError for a ticket that is none to read."""
        if self.length:
            raise FsError(errno.EINVAL, NOT_FOR_READING)
        reading = self.reading
        if reading is None:
            with self.lock:
                reading = self.reading
                if reading is None:
                    reading = self.reading = self.volume.reader(self.key, prestage)
        return reading

    def put(self, channel: IoChannel, within: int, data: memoryview) -> Steps[None]:
        """Take bytes of the value that is written. Raises FsError, also for a ticket not bound for that."""
        if not self.length:
            raise FsError(errno.EINVAL, NOT_FOR_WRITING)
        channel.gives_way()
        deadline = channel.now() + self.volume.timing.write_deadline
        if not self.lock.acquire(blocking=False) and not (yield Acquire(self.lock, deadline, gives_way=True)):
            raise FsError(errno.EIO)
        try:
            # Made with the first bytes: it costs more than the ticket, and a client may send nothing.
            writing = self.writing
            if writing is None:
                writing = self.writing = self.volume.writer(
                    self.key, length=self.length, ttl_seconds=self.ttl_seconds
                )
            yield from writing.write(channel, within, data, deadline)
        except BadPut as bad:
            self.refused = outcome_of(bad)
            raise FsError(errno.EINVAL, str(bad)) from None
        except PutRefused as refused:
            self.refused = outcome_of(refused)
            raise FsError(errno_of(refused), str(refused)) from None
        finally:
            self.lock.release()

    def drop(self) -> None:
        """Nobody goes on with it: a put that is not whole is given up."""
        if self.reading is not None:
            self.reading.close()
        if self.writing is not None and not self.writing.finished:
            self.writing.drop()

    def outcome(self) -> Outcome:
        if self.refused is not None:
            return self.refused
        if self.writing is not None:
            return Outcome.HIT if self.writing.finished else Outcome.UNKNOWN
        if self.reading is None:
            return Outcome.UNKNOWN
        if self.reading.cause is not None:
            return Outcome(self.reading.cause.value)
        return Outcome.HIT if self.reading.length is not None else Outcome.UNKNOWN


@dataclass(slots=True)
class ControlSession:
    holder: Holder
    """Who opened it."""
    handle: int = 0
    answer_bytes: int = 0
    """The bytes of answers that wait, and of answers that are being made."""
    answers: deque[bytes] = field(default_factory=deque)
    tickets: dict[int, Ticket] = field(default_factory=dict)
    state: SessionState = SessionState.NEW
    bound_at: float = 0.0
    """When tickets were last bound, in the seconds of the channel's clock."""
    trail: Trail = field(default_factory=Trail)
    regions: dict[int, Region] = field(default_factory=dict)
    """Registered memory, by its number in this session."""
    binding: threading.Lock = field(default_factory=threading.Lock)
    """Guards the counts: added tickets, and bytes of answers."""
    registering: threading.Lock = field(default_factory=threading.Lock)
    """Guards the numbers of regions."""

    def _become(self, state: SessionState) -> None:
        if state not in LEGAL[self.state]:
            raise AssertionError(f"{state} after {self.state}")
        self.state = state

    def bind(
        self, first: int, tickets: Sequence[Ticket], now: float, take: Callable[[int], bool]
    ) -> list[Ticket] | None:
        """Bind tickets from number `first` on: those that had their numbers. None, and nothing done: no room.

        `take` asks for room for so many more.
        """
        with self.binding:
            numbers = range(first, first + len(tickets))
            added = sum(number not in self.tickets for number in numbers)
            if self.state is SessionState.CLOSED or (added and not take(added)):
                return None
            self._become(SessionState.BOUND)
            self.bound_at = now
            replaced = [self.tickets[number] for number in numbers if number in self.tickets]
            self.tickets.update(zip(numbers, tickets, strict=True))
            return replaced

    def take_back(self, last_bound_before: float) -> list[Ticket]:
        """Tickets that were bound before then: they are the caller's to count and to drop."""
        with self.binding:
            if self.state is not SessionState.BOUND or self.bound_at >= last_bound_before or not self.tickets:
                return []
            self._become(SessionState.TAKEN)
            return self._without_tickets()

    def close(self) -> list[Ticket]:
        """End the session: its file was closed. The caller counts and drops the session's tickets."""
        with self.binding:
            self._become(SessionState.CLOSED)
            return self._without_tickets()

    def _without_tickets(self) -> list[Ticket]:
        tickets, self.tickets = list(self.tickets.values()), {}
        return tickets

    def reading_at(
        self,
        number: int,
        prestage: PrestageCache | None,
        continuer: Readahead,
        may_read: Callable[[ServedVolume], bool] | None = None,
    ) -> Reader:
        """What a ticket reads; the first read of a binding leads on. Raises FsError for none to read, and
        EREMOTE where another process of the agent serves the volume by now: see `ControlFace`."""
        ticket = self._ticket(number, NOT_FOR_READING)
        # Since it was bound, its tenant may have got a rate, or not all processes go by the same map.
        if may_read is not None and not may_read(ticket.volume):
            raise FsError(errno.EREMOTE, ELSEWHERE)
        reading = ticket.to_read(prestage)
        if ticket.ahead is not None:
            ticket.ahead.read(continuer, ticket.volume)
        return reading

    def bindings(self) -> list[Binding]:
        """Tickets to be read of which this process has read nothing, where others may read them."""
        with self.binding:
            return [
                Binding(number, ticket.serial, ticket.volume.settings.name, ticket.key)
                for number, ticket in self.tickets.items()
                if ticket.serial and not ticket.length and ticket.reading is None and ticket.ahead is None
            ]

    def has_ended(self, number: int, within: int, words: GuestWords) -> bool:
        """Whether another process may have served a ticket's whole value, and it ends before this byte. What
        is stored under its key by now may be longer, and is no part of what was served."""
        ticket = self.tickets.get(number)
        if ticket is None or ticket.length or ticket.reading is not None:
            return False
        return words.may_have_ended(ticket.serial, within)

    def ticket_to_write(self, number: int) -> Ticket:
        """Raises FsError where nothing is bound to it; `Ticket.put` does where that is not to be written."""
        return self._ticket(number, NOT_FOR_WRITING)

    def _ticket(self, number: int, where_none: str) -> Ticket:
        ticket = self.tickets.get(number)
        if ticket is None:
            is_stale = self.state is SessionState.TAKEN
            raise FsError(errno.ESTALE if is_stale else errno.EINVAL, where_none)
        return ticket

    def count_answer_bytes(self, change: int) -> None:
        with self.binding:
            self.answer_bytes += change
