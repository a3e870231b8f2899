"""Control sessions: opens of `/.g35/session`, a bounded number of them, each lent to one call at a time.

Read control_wire.py first. A session dies with its agent, with the mount and with the first answer that makes
no sense. From then on every call raises `SessionDead`, and pool.py turns that into misses and opens another.
A refusal of the agent is a `Refusal` with its errno, and the session lives on.

To lend a free session takes no lock: `list.pop` and `list.append` are atomic under the interpreter's lock.

A handler of a signal may raise wherever a function begins or a call into C has returned (Ctrl-C, a time-out).
So a session goes back by one call into C, and nothing comes before that. A session that is lost on its way to
a variable is closed with its last use, and its place is free then.
"""

# One idea in one file: a session, and how long it lives. Every get goes through both.

import errno
import json
import os
import queue
import threading
import time
import weakref
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Final

from host_shim.control_wire import (
    ANSWER_BYTES_MAX,
    AT_ONCE_BYTES,
    FLAG_NO_ANSWER,
    HEADER_BYTES,
    VALUE_BYTES_MAX,
    MalformedControl,
    Operation,
    Outcome,
    Request,
    data_offset,
    decode_answer_untrusted,
    outcomes,
    value_xattr,
)
from host_shim.registered_memory import RegisteredMemory, Transfers
from host_shim.session_files import Files, Refusal
from host_shim.transfer_wire import Ioctl
from host_shim.unlocked_memory import new_memory

AGENT_GONE = frozenset(
    {
        errno.ENOTCONN,  # the agent died, the mount is still there
        errno.ECONNABORTED,  # the connection was aborted under the request
        errno.EIO,
        errno.ENODEV,
        errno.ENXIO,
        errno.ESTALE,
        errno.EBADF,
        errno.ETIMEDOUT,
    }
)
"""What a system call on the session reports when there is no agent behind it."""
TOO_LONG = frozenset({errno.EFBIG, errno.EMSGSIZE})
"""What the agent says of a value that no slot of the volume holds."""

ONE_REQUEST_BYTES = (128 << 10) - 4096
"""Reads up to this many bytes are one FUSE request on every kernel; longer ones may be several."""
PARTS_MAX = 1000
"""Parts of one value that one system call takes; Linux allows 1,024 (IOV_MAX)."""
ONE_BY_ONE_SECONDS = 1.0
"""A volume is not asked for many values again, once the agent has said that it does not serve them so now."""
REOPEN_SECONDS = 0.05
"""While there is no agent, the mount is asked for one this often and not with every call."""
LOOK_AGAIN_SECONDS: Final = 0.2
"""A call that waits for a session looks this often: an interrupt may come before it is told of one."""


class SessionDead(Exception):
    """There is no agent behind this session any more."""


class Session:
    """Requests, answers and values through one open file. Not thread-safe, except `read` and `write`."""

    def __init__(self, path: str, files: Files, memory: RegisteredMemory | None = None) -> None:
        """Not open yet: see `open`."""
        self._path = path
        self._files = files
        self._descriptor = -1
        self._transfers: Transfers | None = None
        if memory is not None:
            ends = files.ENDS_BEFORE_IT_RAISES
            self._transfers = Transfers(files.ioctl, memory, ends_before_it_raises=ends)
        self._gives_at_once = True
        self._one_by_one: dict[tuple[Ioctl, str], float] = {}
        """Volumes whose values the agent wants to be moved one by one, and until when it is believed."""
        self._unknown: frozenset[Ioctl] = frozenset()
        """Of LOAD_MANY and STORE_MANY what the agent has said that it does not know."""
        self._next_id = 0
        self._room: dict[str, int] | None = None
        self.dead = False

    def open(self) -> None:
        """Raises SessionDead where there is no agent."""
        try:
            self._descriptor = self._files.open(self._path)
        except Refusal as error:
            raise SessionDead(str(error)) from None

    def close(self) -> None:
        """Close the file; the agent forgets the tickets."""
        self.dead = True
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            try:
                self._files.close(descriptor)
            except Refusal:
                return  # nothing is lost: what was acknowledged is on flash

    def ask(
        self, operation: Operation, volume: str, keys: Sequence[bytes] = (), ttl_seconds: int = 0
    ) -> bytes:
        """One request and its answer's body."""
        room = ANSWER_BYTES_MAX if operation is Operation.STATS else HEADER_BYTES + len(keys)
        return self._exchange(Request(operation, self._new_id(), volume, tuple(keys), 0, ttl_seconds), room)

    def tell(self, operation: Operation, volume: str, keys: Sequence[bytes]) -> None:
        """One request that has no answer."""
        self._send(Request(operation, self._new_id(), volume, tuple(keys), flags=FLAG_NO_ANSWER).encode())

    def stats(self) -> dict[str, Any]:
        """The agent's counters; empty where it does not tell them."""
        try:
            found = json.loads(self.ask(Operation.STATS, ""))
        except (Refusal, ValueError):
            return {}
        return found if isinstance(found, dict) else {}

    def value_bytes_max(self, volume: str) -> int:
        """What a slot of the volume holds, or a slot of any where the agent does not say. Asked once."""
        if self._room is None and not self.dead:
            try:
                volumes = self.stats()["volumes"]
                self._room = {str(each["name"]): int(each["value_bytes"]) for each in volumes}
            except (ValueError, LookupError, TypeError):
                self._room = {}
        return (self._room or {}).get(volume, VALUE_BYTES_MAX)

    def bind_reads(self, volume: str, keys: Sequence[bytes]) -> None:
        """From now on the value of the i-th key is read at ticket i."""
        asked = Request(Operation.GET, self._new_id(), volume, tuple(keys), flags=FLAG_NO_ANSWER)
        try:
            self._send(asked.encode())
        except Refusal as refused:
            if refused.errno != errno.EAGAIN:
                raise
            # The agent has no room for more tickets. Closing this session frees those that it has.
            raise self._ended(refused) from None

    def bind_writes(
        self, volume: str, keys: Sequence[bytes], lengths: Sequence[int], ttl_seconds: int
    ) -> None:
        """From now on the value of the i-th key, of the i-th length, is written at ticket i."""
        asked = Request(
            Operation.PUT, self._new_id(), volume, tuple(keys), 0, ttl_seconds, FLAG_NO_ANSWER, tuple(lengths)
        )
        self._send(asked.encode())

    def bind_writes_that_fit(
        self, volume: str, keys: Sequence[bytes], lengths: Sequence[int], ttl_seconds: int
    ) -> Sequence[int]:
        """`bind_writes` of the values that the volume's slots hold. Which these are, in the order of their
        tickets: of others the agent refuses all of a request."""
        fitting: Sequence[int] = range(len(keys))
        is_asked_anew = False
        while fitting:
            some = [lengths[number] for number in fitting]
            try:
                self.bind_writes(volume, [keys[number] for number in fitting], some, ttl_seconds)
                break
            except Refusal as refused:
                if refused.errno not in TOO_LONG:
                    raise
            longest = max(some)
            if self.value_bytes_max(volume) >= longest and not is_asked_anew:
                self._room = None  # it may have been asked before there was this volume
                is_asked_anew = True
            most = min(self.value_bytes_max(volume), longest - 1)
            fitting = [number for number in fitting if lengths[number] <= most]
        return fitting

    def _move(
        self,
        which: Ioctl,
        buffers: Sequence[memoryview],
        ticket: int | None,
        volume: str = "",
        key: bytes = b"",
        ttl_seconds: int = 0,
    ) -> int | None:
        """A whole value from or to registered memory: its length, 0 for a miss; None for other memory.

        Raises EIO of a STORE: this value cannot be stored.
        """
        if self._transfers is None:
            return None
        try:
            return self._transfers.move(self._descriptor, which, buffers, volume, key, ticket, ttl_seconds)
        except MalformedControl as nonsense:
            raise self._ended(nonsense) from None
        except Refusal as error:
            if error.errno == errno.EIO:
                if which is Ioctl.STORE:
                    raise
                return 0
            raise self._seen(error) from None

    def read(self, ticket: int, into: memoryview, at: int = 0) -> int:
        """Bytes of the ticket's value from `at` on that came into `into`; 0 for a miss or the end."""
        if not at:
            length = self._move(Ioctl.LOAD, (into,), ticket)
            if length is not None:
                return min(length, len(into))
        try:
            return self._files.preadv(self._descriptor, into, data_offset(ticket) + at)
        except Refusal as error:
            if error.errno == errno.EIO:
                return 0  # this value cannot be had; `outcomes` may know why
            raise self._seen(error) from None

    def read_at_once(self, volume: str, key: bytes, into: memoryview) -> int | None:
        """A key's value by one request, of `AT_ONCE_BYTES` at most outside registered memory; 0 for a miss.

        None where that cannot be had here. ERANGE: the value is longer.
        """
        length = self._move(Ioctl.LOAD, (into,), None, volume, key)
        if length is not None:
            if length > len(into):
                raise Refusal(errno.ERANGE, os.strerror(errno.ERANGE))
            return length
        name = value_xattr(volume, key)
        if not self._gives_at_once or len(into) > AT_ONCE_BYTES or b"\0" in name:
            return None
        try:
            return self._files.fgetxattr(self._descriptor, name, into)
        except Refusal as error:
            if error.errno in (errno.ENODATA, errno.EIO):
                return 0
            if error.errno == errno.E2BIG:  # what Linux makes of ERANGE where the buffer has 64 KiB
                raise Refusal(errno.ERANGE, os.strerror(errno.ERANGE)) from None
            if error.errno in (errno.ERANGE, errno.ENOENT, errno.EREMOTE):
                raise
            seen = self._seen(error)
            if self.dead:
                raise seen from None
            self._gives_at_once = False
            return None

    def moves_many(self, which: Ioctl) -> bool:
        """Whether LOAD_MANY or STORE_MANY is to be had, as far as is known."""
        return self._transfers is not None and not self.dead and which not in self._unknown

    def move_many(
        self,
        which: Ioctl,
        volume: str,
        keys: Sequence[bytes],
        views: Sequence[memoryview],
        ttl_seconds: int = 0,
    ) -> list[tuple[Outcome, int]] | None:
        """LOAD_MANY or STORE_MANY of one of `groups_of` (many_values.py): outcome and length of each value.

        None where that cannot be had now: they are moved one by one. Raises EIO of a STORE_MANY, of whose
        values nothing is known then.
        """
        if self._transfers is None or not self.moves_many(which):
            return None
        if self._one_by_one and time.monotonic() < self._one_by_one.get((which, volume), 0.0):
            return None
        try:
            return self._transfers.move_many(self._descriptor, which, volume, keys, views, ttl_seconds)
        except MalformedControl as nonsense:
            raise self._ended(nonsense) from None
        except Refusal as error:
            if error.errno == errno.ENOTTY:  # an agent that does not know it
                self._unknown |= {which}
            elif error.errno == errno.EOPNOTSUPP:
                self._one_by_one[which, volume] = time.monotonic() + ONE_BY_ONE_SECONDS
            elif error.errno != errno.EIO or which is Ioctl.STORE_MANY:
                raise self._seen(error) from None
            return None

    def read_parts(self, ticket: int, parts: Sequence[memoryview]) -> int:
        """Bytes of the ticket's value that came into the parts, one after another; 0 for a miss."""
        length = self._move(Ioctl.LOAD, parts, ticket)
        if length is not None:
            return min(length, sum(map(len, parts)))
        done = 0
        for start in range(0, len(parts), PARTS_MAX):
            some = parts[start : start + PARTS_MAX]
            try:
                got = self._files.preadv_parts(self._descriptor, some, data_offset(ticket) + done)
            except Refusal as error:
                if error.errno == errno.EIO:
                    return 0
                raise self._seen(error) from None
            done += got
            if got < sum(len(part) for part in some):
                break
        return done

    def write_at_once(self, volume: str, key: bytes, data: memoryview, ttl_seconds: int) -> bool:
        """Store a whole value by one request; False where that is not to be had: nothing was done then."""
        return self._move(Ioctl.STORE, (data,), None, volume, key, ttl_seconds) is not None

    def write_parts(self, ticket: int, parts: Sequence[memoryview]) -> None:
        """`write` of a value that lies in several places; its length is that of all parts."""
        if self._move(Ioctl.STORE, parts, ticket) is not None:
            return
        done = 0
        if len(parts) <= PARTS_MAX:
            try:
                done = self._files.pwritev(self._descriptor, parts, data_offset(ticket))
            except Refusal as error:
                if error.errno == errno.EIO:
                    raise
                raise self._seen(error) from None
        at = 0
        for part in parts:
            if done < at + len(part):  # what the one call did not take
                self.write(ticket, part[max(0, done - at) :], max(done, at))
            at += len(part)

    def write(self, ticket: int, data: memoryview, at: int = 0) -> None:
        """Write a whole value, or its rest from `at` on; its last byte stores it. EIO is about this value."""
        if not at and self._move(Ioctl.STORE, (data,), ticket) is not None:
            return
        done = 0
        while done < len(data):
            try:
                written = self._files.pwrite(self._descriptor, data[done:], data_offset(ticket) + at + done)
            except Refusal as error:
                if error.errno == errno.EIO:
                    raise  # this value cannot be stored: its enclosure is away, the agent is not
                raise self._seen(error) from None
            if written <= 0:
                raise Refusal(errno.EAGAIN, "the agent took none of the value")
            done += written

    def outcomes(self, count: int) -> list[Outcome]:
        """What became of the first `count` tickets."""
        request = Request(Operation.OUTCOME, self._new_id(), "", (b"",) * count)
        return self.outcomes_in(self._exchange(request, HEADER_BYTES + count), count)

    def outcomes_in(self, body: bytes, count: int) -> list[Outcome]:
        """One outcome a key out of an answer; what makes no sense ends the session."""
        try:
            found = outcomes(body)
        except MalformedControl as nonsense:
            raise self._ended(nonsense) from None
        if len(found) != count:
            raise self._ended(f"{len(found)} outcomes for {count} keys")
        return found

    def _new_id(self) -> int:
        self._next_id = (self._next_id + 1) & 0xFFFF_FFFF
        return self._next_id

    def _send(self, request: bytes) -> None:
        try:
            written = self._files.pwrite(self._descriptor, request, 0)
        except Refusal as error:
            raise self._seen(error) from None
        if written != len(request):
            raise self._ended(f"the agent took {written} of the request's {len(request)} bytes")

    def _exchange(self, request: Request, room: int) -> bytes:
        """Send a request and read its answer, of up to `room` bytes; the answer's body."""
        buffer = new_memory(room)  # where there is none, nothing has been sent
        may_wait = True
        try:
            try:
                self._send(request.encode())
            except Refusal:
                may_wait = False
                raise
            length = self._files.preadv(self._descriptor, buffer, 0)
            may_wait = False
            answer = decode_answer_untrusted(buffer[:length])
        except Refusal as error:
            raise self._seen(error) from None
        except MalformedControl as nonsense:
            raise self._ended(nonsense) from None
        finally:
            if may_wait:
                self.dead = True  # its answer would be taken for the next request's, whatever ended this one
        if answer.request_id != request.request_id or answer.operation != request.operation:
            raise self._ended(f"answer {answer.request_id} to request {request.request_id}")
        if answer.errno:
            raise Refusal(answer.errno, os.strerror(answer.errno))
        return answer.body

    def _seen(self, error: Refusal) -> Exception:
        return self._ended(error) if error.errno in AGENT_GONE else error

    def _ended(self, why: object) -> SessionDead:
        self.dead = True
        return SessionDead(str(why))


class Loan:
    """One call's session, as a context; `None` while there is no agent.

    It is entered twice, `with (loan := lender.lend()), loan as session`: where an interrupt comes just before
    the inner end of the block, the outer one gives the session back.
    The block ends without an exception where the agent dies or memory runs out: what it left is a miss.
    """

    __slots__ = ("_has_taken", "_lender", "_session")

    def __init__(self, lender: "SessionLender") -> None:
        self._lender = lender
        self._session: Session | None = None
        self._has_taken = False

    def __enter__(self) -> Session | None:
        if not self._has_taken:
            self._session = self._lender.take()
            self._has_taken = True
        return self._session

    def __exit__(
        self, kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> bool:
        session = self._session
        if session is not None:
            lender = self._lender
            if kind is MemoryError:
                session.dead = True
            self._session = None
            lender.free.append(session)  # and no call between these two lines
            lender.tend(session)
        return kind is MemoryError or kind is SessionDead


class SessionLender:
    """Opens sessions as they are needed, `maximum` of them, and forgets those whose agent has died."""

    def __init__(self, path: str, files: Files, maximum: int, memory: RegisteredMemory | None = None) -> None:
        self._memory = memory
        self._path = path
        self._files = files
        self._maximum = maximum
        self._lock = threading.Lock()
        self.free: list[Session] = []
        """A call appends the session that it took, and calls `tend`."""
        self._open: set[weakref.ref[Session]] = set()
        """Those that are open, or about to be. One that is lost leaves by itself."""
        self._waiting: list[None] = []
        """One for each call that waits for a session."""
        self._bell: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._left = 0
        """Calls under way when one ended last."""
        self._ask_again_at = 0.0
        self.answers = 0
        """Calls that have ended. One may be lost where two threads count at once; it grows all the same."""
        self.closed = False
        self.reached = False
        """Whether there ever was an agent."""
        self.why_not = ""
        """Why there was none when one was last looked for."""

    def lend(self) -> Loan:
        """A session for the caller alone, see `Loan`. Waits while all are lent."""
        return Loan(self)

    def ask_at_once(self) -> None:
        """Look for an agent with the next call, even if there was none a moment ago."""
        self._ask_again_at = 0.0

    def take(self) -> Session | None:
        """See `lend`, and `free` for the way back. None also where this machine has no memory for one."""
        try:
            session = self.free.pop()
        except IndexError:
            pass
        else:
            if not session.dead and not self.closed:
                return session
            self._drop(session)
        try:
            return self._open_or_wait()
        except MemoryError:
            return None

    def tend(self, session: Session) -> None:
        """This one has come back: see `free`."""
        self.answers += 1
        self._left = len(self._open) - len(self.free)
        if session.dead or self.closed:
            self._drop_free()  # its agent is gone, so those of the same agent that wait here are dead as well
            self._left = len(self._open)
        if self._waiting:
            self._ring()

    def under_way(self) -> int:
        """Sessions that are lent, or being opened: calls to which this process owes an answer."""
        return len(self._open) - len(self.free)

    def unheard(self) -> int:
        """How many calls have begun since one ended last, of those under way. A process that hangs has ever
        more of them. Threads look without a lock, so it may be wrong by a few, until the next call ends."""
        return len(self._open) - len(self.free) - self._left

    def close(self) -> None:
        """Close the free sessions now, lent ones when they come back. Later calls raise RuntimeError."""
        self.closed = True
        self._drop_free()
        for _ in range(len(self._waiting)):
            self._bell.put(None)

    def wait_until_all_are_back(self, seconds: float) -> bool:
        """After `close`: wait for the sessions that are lent; False where that took longer than `seconds`."""
        until = time.monotonic() + seconds
        while True:
            self._drop_free()
            left = until - time.monotonic()
            if not self._open or left <= 0:
                return not self._open
            self._wait(left)

    def abandon(self) -> None:
        """In the child of a fork: close what belongs to the parent, and begin anew."""
        sessions, self.free = self.free, []
        self._lock = threading.Lock()
        self._open, self._waiting, self._bell = set(), [], queue.SimpleQueue()
        self._left = 0
        for session in sessions:
            session.close()

    def _drop_free(self) -> None:
        while self.free:
            try:
                session = self.free.pop()
            except IndexError:
                return  # another thread had the last one
            self._drop(session)

    def _drop(self, session: Session) -> None:
        try:
            session.close()
        finally:
            self._open.discard(weakref.ref(session))
        self._ring()

    def _open_or_wait(self) -> Session | None:
        while True:
            if self.closed:
                raise RuntimeError("the pool is closed")
            if self.free:
                try:
                    session = self.free.pop()
                except IndexError:
                    continue
                if not session.dead:
                    return session
                self._drop(session)
                continue
            if len(self._open) >= self._maximum:
                self._wait(LOOK_AGAIN_SECONDS)
                continue
            if time.monotonic() < self._ask_again_at:
                return None
            session = Session(self._path, self._files, self._memory)
            place = weakref.ref(session, self._open.discard)
            try:
                with self._lock:
                    if has_place := len(self._open) < self._maximum:
                        self._open.add(place)
                if has_place:
                    session.open()
                    self.reached = True
                    return session
            except BaseException as error:
                self._open.discard(place)
                self._ring()
                if not isinstance(error, SessionDead):
                    raise
                self.why_not = str(error)
                self._ask_again_at = time.monotonic() + REOPEN_SECONDS
                return None

    def _wait(self, seconds: float) -> None:
        """Until a session is back or closed, or it is time to look for one."""
        waiting = self._waiting
        try:
            waiting.append(None)
            if self._open and not self.free:
                self._bell.get(timeout=min(seconds, LOOK_AGAIN_SECONDS))
        except queue.Empty:
            return
        finally:
            waiting.pop()

    def _ring(self) -> None:
        if self._bell.qsize() < len(self._waiting):
            self._bell.put(None)
