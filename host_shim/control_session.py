"""Control sessions: opens of `/.g35/session`, a bounded number of them, each lent to one call at a time.

Read control_wire.py first. A session dies with its agent, with the mount and with the first answer that makes
no sense. From then on every call raises `SessionDead`, and pool.py turns that into misses and opens another.
A refusal of the agent is an `OSError` with its errno, and the session lives on.

To lend a free session takes no lock: `list.pop` and `list.append` are atomic under the interpreter's lock.
The condition is for opening, closing and waiting.
"""

# One idea in one file: a session, and how long it lives. Every get goes through both.

import ctypes
import errno
import fcntl
import json
import os
import stat
import threading
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Any, ClassVar

from host_shim.control_wire import (
    ANSWER_BYTES_MAX,
    AT_ONCE_BYTES,
    FLAG_NO_ANSWER,
    HEADER_BYTES,
    PROCESS_FOLDER,
    SESSION_FILE_BYTES,
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
FCNTL_BYTES = 1024
"""`fcntl.ioctl` lets go of the interpreter's lock for so many bytes at the most: for more it holds the lock
through the whole call, in which the agent moves up to 16 MiB and may wait for an enclosure."""


ONE_BY_ONE_SECONDS = 1.0
"""A volume is not asked for many values again, once the agent has said that it does not serve them so now."""
REOPEN_SECONDS = 0.05
"""While there is no agent, the mount is asked for one this often and not with every call."""


class SessionDead(Exception):
    """There is no agent behind this session any more."""


_libc = ctypes.CDLL(None, use_errno=True)
_libc.fgetxattr.argtypes = (ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p, ctypes.c_size_t)
_libc.fgetxattr.restype = ctypes.c_ssize_t
_libc.ioctl.argtypes = (ctypes.c_int, ctypes.c_ulong, ctypes.c_void_p)
_libc.ioctl.restype = ctypes.c_int


class Files:
    """The system calls of a session. A subclass has them elsewhere: a scripted agent, a virtio-fs device."""

    ENDS_BEFORE_IT_RAISES: ClassVar[bool] = True
    """Nobody works on an ioctl any more when an exception comes out of it. Python runs handlers of signals
    once a system call has returned. FUSE returns when the agent has answered, or never had the request, or
    is gone (`NO_ANSWER`)."""

    def open(self, path: str) -> int:
        """A session. ENOTSUP for an ordinary file of this name: what it gives back would be no values."""
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            found = os.fstat(descriptor)
            if not stat.S_ISREG(found.st_mode) or found.st_size != SESSION_FILE_BYTES:
                raise OSError(errno.ENOTSUP, "an ordinary file, and not the session of a g35 agent", path)
        except OSError:
            os.close(descriptor)
            raise
        return descriptor

    def processes(self, folder: str) -> list[str]:
        """The names of the folders of other processes of the agent, in the folder of the session's file."""
        try:
            return sorted(name for name in os.listdir(folder) if name.startswith(PROCESS_FOLDER))
        except OSError:
            return []

    def close(self, descriptor: int) -> None:
        os.close(descriptor)

    def pwrite(self, descriptor: int, data: bytes | memoryview, offset: int) -> int:
        return os.pwrite(descriptor, data, offset)

    def preadv(self, descriptor: int, into: memoryview, offset: int) -> int:
        return os.preadv(descriptor, [into], offset)

    def pwritev(self, descriptor: int, parts: Sequence[memoryview], offset: int) -> int:
        return os.pwritev(descriptor, parts, offset)

    def preadv_parts(self, descriptor: int, parts: Sequence[memoryview], offset: int) -> int:
        return os.preadv(descriptor, parts, offset)

    def ioctl(self, descriptor: int, command: int, data: bytearray) -> None:
        call = fcntl_ioctl if len(data) <= FCNTL_BYTES else unlocked_ioctl
        while True:
            try:
                call(descriptor, command, data)
            except InterruptedError:
                continue  # before the agent had it
            return

    def fgetxattr(self, descriptor: int, name: bytes, into: memoryview) -> int:
        """`os.getxattr` into the caller's memory, which that one cannot: it asks twice, and copies."""
        start = ctypes.byref(ctypes.c_char.from_buffer(into))
        while True:
            length: int = _libc.fgetxattr(descriptor, name, start, len(into))
            if length >= 0:
                return length
            code = ctypes.get_errno()
            if code != errno.EINTR:
                raise OSError(code, os.strerror(code))


def fcntl_ioctl(descriptor: int, command: int, data: bytearray) -> None:
    fcntl.ioctl(descriptor, command, data, True)


def unlocked_ioctl(descriptor: int, command: int, data: bytearray) -> None:
    """The same without the interpreter's lock, whatever the length. For few bytes it takes longer."""
    if _libc.ioctl(descriptor, command, ctypes.byref(ctypes.c_char.from_buffer(data))) < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


class Session:
    """Requests, answers and values through one open file. Not thread-safe, except `read` and `write`."""

    def __init__(self, path: str, files: Files, memory: RegisteredMemory | None = None) -> None:
        self._files = files
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
        try:
            self._descriptor = files.open(path)
        except OSError as error:
            raise SessionDead(str(error)) from None

    def close(self) -> None:
        """Close the file; the agent forgets the tickets."""
        self.dead = True
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            try:
                self._files.close(descriptor)
            except OSError:
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
        except (OSError, ValueError):
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
        except OSError as refused:
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
            except OSError as refused:
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
        except OSError as error:
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
        except OSError as error:
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
                raise OSError(errno.ERANGE, os.strerror(errno.ERANGE))
            return length
        name = value_xattr(volume, key)
        if not self._gives_at_once or len(into) > AT_ONCE_BYTES or b"\0" in name:
            return None
        try:
            return self._files.fgetxattr(self._descriptor, name, into)
        except OSError as error:
            if error.errno in (errno.ENODATA, errno.EIO):
                return 0
            if error.errno == errno.E2BIG:  # what Linux makes of ERANGE where the buffer has 64 KiB
                raise OSError(errno.ERANGE, os.strerror(errno.ERANGE)) from None
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
        except OSError as error:
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
            except OSError as error:
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
            except OSError as error:
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
            except OSError as error:
                if error.errno == errno.EIO:
                    raise  # this value cannot be stored: its enclosure is away, the agent is not
                raise self._seen(error) from None
            if written <= 0:
                raise OSError(errno.EAGAIN, "the agent took none of the value")
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
        except OSError as error:
            raise self._seen(error) from None
        if written != len(request):
            raise self._ended(f"the agent took {written} of the request's {len(request)} bytes")

    def _exchange(self, request: Request, room: int) -> bytes:
        """Send a request and read its answer, of up to `room` bytes; the answer's body."""
        buffer = new_memory(room)  # where there is none, nothing has been sent
        self._send(request.encode())
        try:
            length = self._files.preadv(self._descriptor, buffer, 0)
            answer = decode_answer_untrusted(buffer[:length])
        except OSError as error:
            self.dead = True  # the answer may still be waiting, and would be taken for the next one's
            raise self._seen(error) from None
        except MalformedControl as nonsense:
            raise self._ended(nonsense) from None
        if answer.request_id != request.request_id or answer.operation != request.operation:
            raise self._ended(f"answer {answer.request_id} to request {request.request_id}")
        if answer.errno:
            raise OSError(answer.errno, os.strerror(answer.errno))
        return answer.body

    def _seen(self, error: OSError) -> Exception:
        return self._ended(error) if error.errno in AGENT_GONE else error

    def _ended(self, why: object) -> SessionDead:
        self.dead = True
        return SessionDead(str(why))


class Loan:
    """One call's session, as a context; `None` while there is no agent.

    The block ends without an exception where the agent dies or memory runs out: what it left is a miss.
    """

    __slots__ = ("_lender", "_session")

    def __init__(self, lender: "SessionLender") -> None:
        self._lender = lender
        self._session: Session | None = None

    def __enter__(self) -> Session | None:
        self._session = self._lender.take()
        return self._session

    def __exit__(
        self, kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> bool:
        session = self._session
        if session is not None:
            if kind is MemoryError:
                session.dead = True  # an answer may wait in it, and would be taken for the next request's
            self._lender.give_back(session)
        return kind is MemoryError or kind is SessionDead


class SessionLender:
    """Opens sessions as they are needed, `maximum` of them, and forgets those whose agent has died."""

    def __init__(self, path: str, files: Files, maximum: int, memory: RegisteredMemory | None = None) -> None:
        self._memory = memory
        self._path = path
        self._files = files
        self._maximum = maximum
        self._changed = threading.Condition()
        self._free: list[Session] = []
        self._open = 0
        self._waiting = 0
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
        """A session for the caller alone: `with lender.lend() as session`. Waits while all are lent."""
        return Loan(self)

    def ask_at_once(self) -> None:
        """Look for an agent with the next call, even if there was none a moment ago."""
        self._ask_again_at = 0.0

    def take(self) -> Session | None:
        """See `lend`. None also where this machine has no memory for one."""
        try:
            session = self._free.pop()
        except IndexError:
            try:
                return self._open_or_wait()
            except MemoryError:
                return None
        if self.closed:
            self.give_back(session)
            raise RuntimeError("the pool is closed")
        return session

    def give_back(self, session: Session) -> None:
        if session.dead or self.closed:
            # Its agent is gone, so those of the same agent that wait here are dead as well.
            self._drop(session)
            self._drop_free()
            self._note_answer()
            return
        try:
            self._free.append(session)
        except MemoryError:
            self._drop(session)
        self.answers += 1  # as `_note_answer`, whose call would cost a get more than its work
        self._left = self._open - len(self._free)
        if self._waiting:
            with self._changed:
                self._changed.notify()
        if self.closed:  # close() may have looked before this one was back
            self._drop_free()  # type: ignore[unreachable]

    def under_way(self) -> int:
        """Sessions that are lent, or being opened: calls to which this process owes an answer."""
        return self._open - len(self._free)

    def unheard(self) -> int:
        """How many calls have begun since one ended last, of those under way. A process that hangs has ever
        more of them. Threads look without a lock, so it may be wrong by a few, until the next call ends."""
        return self._open - len(self._free) - self._left

    def _note_answer(self) -> None:
        self.answers += 1
        self._left = self._open - len(self._free)

    def close(self) -> None:
        """Close the free sessions now, lent ones when they come back. Later calls raise RuntimeError."""
        self.closed = True
        self._drop_free()

    def wait_until_all_are_back(self, seconds: float) -> bool:
        """After `close`: wait for the sessions that are lent; False where that took longer than `seconds`."""
        with self._changed:
            return self._changed.wait_for(lambda: self._open <= 0, timeout=seconds)

    def abandon(self) -> None:
        """In the child of a fork: close what belongs to the parent, and begin anew."""
        sessions, self._free = self._free, []
        self._changed = threading.Condition()
        self._open = self._waiting = self._left = 0
        for session in sessions:
            session.close()

    def _drop_free(self) -> None:
        while self._free:
            try:
                session = self._free.pop()
            except IndexError:
                return  # another thread had the last one
            self._drop(session)

    def _drop(self, session: Session) -> None:
        try:
            session.close()
        finally:
            self._drop_place()

    def _open_or_wait(self) -> Session | None:
        with self._changed:
            self._waiting += 1
            try:
                while True:
                    if self.closed:
                        raise RuntimeError("the pool is closed")
                    if self._free:
                        try:
                            return self._free.pop()
                        except IndexError:
                            continue
                    if self._open < self._maximum:
                        break
                    try:
                        self._changed.wait()
                    except RuntimeError:  # no memory for the lock of a waiter
                        return None
                if time.monotonic() < self._ask_again_at:
                    return None
                self._open += 1
            finally:
                self._waiting -= 1
        try:
            session = Session(self._path, self._files, self._memory)
        except SessionDead as dead:
            self.why_not = str(dead)
            self._ask_again_at = time.monotonic() + REOPEN_SECONDS
            self._drop_place()
            return None
        except BaseException:  # an interrupt: the place is free again
            self._drop_place()
            raise
        self.reached = True
        return session

    def _drop_place(self) -> None:
        with self._changed:
            self._open -= 1
            self._changed.notify_all()
