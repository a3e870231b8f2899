"""The control face: `/.g35/session`, where batches cross the mount in one round trip, and
`/.g35/status.json`.

host_shim/control_wire.py defines the bytes; read it first. Each open of the session's file is a session with
its own answers and tickets. `status.json` is what `g35 status` shows.
"""

import errno
import itertools
import json
import stat
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

from agent.fs.control.registered_memory import RegisteredMemory
from agent.fs.control.reports import count_reports
from agent.fs.control.session import ELSEWHERE, Ahead, ControlSession, Ticket, outcome_of
from agent.fs.control.start_prestage import StartPrestage
from agent.fs.control.transfers import Transfers
from agent.fs.guest_sessions import Binding, GuestWords
from agent.fs.interface import (
    FACE_CONTROL,
    FACE_SHIFT,
    NOBODY,
    ROOT_INODE,
    Attributes,
    Caller,
    DirectoryEntry,
    Entry,
    FileSystem,
    FsError,
    LockOwner,
    Opened,
    SetAttributes,
    StatFs,
    Xattr,
)
from agent.host_os.per_user_bounds import SHARED, Bounds, Holder, Limit
from agent.pool.access import ServedVolume
from agent.pool.errors import PutRefused
from agent.pool.format.directory import TIME_MAX
from agent.pool.prestage.readahead import INACTIVE, Readahead
from agent.pool.read.prestage_cache import PrestageCache
from agent.pool.read.reader_base import Reader
from agent.pool.steps import IoChannel, Steps
from agent.pool.steps import Outcome as Settled
from agent.pool.volume.volume import LOADS_IN_FLIGHT
from host_shim.control_wire import (
    ANSWERS_MAX,
    FLAG_NO_ANSWER,
    PROCESS_FOLDER,
    SESSION_FILE_BYTES,
    TICKETS_MAX,
    Answer,
    MalformedControl,
    Operation,
    Outcome,
    Request,
    decode_request_untrusted,
    decode_value_xattr_untrusted,
    ticket_at,
)

CONTROL_ROOT: Final = FACE_CONTROL << FACE_SHIFT | 1
SESSION_INO: Final = CONTROL_ROOT + 1
_STATUS_INO: Final = CONTROL_ROOT + 2
_FOLDERS_FROM: Final = CONTROL_ROOT + 16
_READS: Final = frozenset({Operation.GET, Operation.EXISTS})
SESSIONS: Final = Limit(
    "sessions", "opens of /.g35/session", 1024,
    by="user, guest", share=SHARED, refused="ENFILE", bytes_each=4096,
)  # fmt: skip
STATUS_FILES: Final = Limit(
    "status-files", "opens of /.g35/status.json, with the status of that moment", 256,
    by="user, guest", share=SHARED, refused="ENFILE", bytes_each=1 << 20,
)  # fmt: skip
TICKETS: Final = Limit(
    "tickets", f"keys bound to tickets of sessions, {TICKETS_MAX} of one session", 131_072,
    by="user, guest", share=SHARED, refused="EAGAIN", bytes_each=4096,
)  # fmt: skip
ANSWERS: Final = Limit(
    "answer-bytes", f"bytes of answers that sessions have not read, {ANSWERS_MAX} answers of one", 64 << 20,
    by="user, guest", share=SHARED, refused="EAGAIN", bytes_each=0,
)  # fmt: skip
TICKETS_IDLE_SECONDS: Final = 10.0
"""Longer than the values of a binding take to be moved. Then a session's tickets are its user's."""
SESSION_ANSWER_BYTES: Final = 1 << 20
"""Of one session; the answer that goes beyond it is the last until they are read."""
USUAL_ANSWER_BYTES: Final = 8 << 10
"""An answer with a byte for each key of the largest request; only that to STATS is longer."""
STATUS_FILE_BYTES: Final = 64 << 10
"""The size that stat shows: a look at the attributes must not cost a snapshot. Reads end where it ends."""


class ControlFace(FileSystem):
    """`/.g35`. Safe from any thread; one session may be used by several at once."""

    def __init__(
        self,
        volumes: Sequence[ServedVolume],
        channel: Callable[[], IoChannel],
        stats: Callable[[], Mapping[str, Any]],
        start_prestage: StartPrestage,
        prestage: PrestageCache | None = None,
        owner: tuple[int, int] = (0, 0),
        continuer: Readahead = INACTIVE,
        memory: RegisteredMemory | None = None,
        bounds: Bounds | None = None,
        may_read: Callable[[ServedVolume], bool] | None = None,
        first_handle: int = 1,
        readers: int = 0,
        words: GuestWords | None = None,
    ) -> None:
        """`memory`: where those who use the face are processes of this machine, what they may register.

        `may_read`: where this process of the agent serves gets alone, whether it may serve those of a volume
        now; all else is EREMOTE. Handles begin with `first_handle`. `readers`: such processes of the agent,
        for each of which there is a folder to mount it at. `words`: of a guest, some of whose queues they
        serve.
        """
        self._may_read = may_read
        self._folders = {
            f"{PROCESS_FOLDER}{number}".encode(): _FOLDERS_FROM + number for number in range(1, readers + 1)
        }
        self._continuer = continuer
        self._words, self._serials = words, itertools.count(1)
        self._volumes = {volume.settings.name: volume for volume in volumes}
        self._channel = channel
        self._stats = stats
        self._start_prestage = start_prestage
        self._prestage = prestage
        self._owner = owner
        self._sessions: dict[int, ControlSession] = {}
        self._status_files: dict[int, tuple[bytes, Holder]] = {}
        bounds = bounds or Bounds()
        self._open_sessions, self._open_status = bounds.of(SESSIONS), bounds.of(STATUS_FILES)
        self._tickets, self._answer_bytes = bounds.of(TICKETS), bounds.of(ANSWERS)
        self._handles = itertools.count(first_handle)
        self._lock = threading.Lock()
        self._transfers = (
            None
            if memory is None
            else Transfers(
                memory, channel, self._volume, self._reading_at, prestage, continuer, may_read is not None
            )
        )

    def lookup(self, caller: Caller, parent: int, name: bytes) -> Settled[Entry]:
        if parent != CONTROL_ROOT:
            raise FsError(errno.ENOTDIR)
        if name == b"session":
            return Entry(self._attributes(SESSION_INO), 60.0, 60.0)
        if name == b"status.json":
            return Entry(self._attributes(_STATUS_INO), 60.0, 0.0)
        if name in self._folders:
            return Entry(self._attributes(self._folders[name]), 60.0, 60.0)
        raise FsError(errno.ENOENT)

    def getattr(self, caller: Caller, ino: int, handle: int | None) -> Settled[Attributes]:
        return self._attributes(ino)

    def setattr(
        self, caller: Caller, ino: int, changes: SetAttributes, handle: int | None
    ) -> Settled[Attributes]:
        if ino != SESSION_INO or changes.mode is not None or changes.uid is not None:
            raise FsError(errno.EPERM)
        # An O_TRUNC on the way to a session means nothing here and harms nothing.
        return self._attributes(ino)

    def _attributes(self, ino: int) -> Attributes:
        uid, gid = self._owner
        if ino == CONTROL_ROOT or ino in self._folders.values():
            return Attributes(ino, stat.S_IFDIR | 0o755, nlink=2, uid=uid, gid=gid)
        if ino == SESSION_INO:
            return Attributes(ino, stat.S_IFREG | 0o600, SESSION_FILE_BYTES, uid=uid, gid=gid)
        if ino == _STATUS_INO:
            return Attributes(ino, stat.S_IFREG | 0o444, STATUS_FILE_BYTES, uid=uid, gid=gid)
        raise FsError(errno.ENOENT)

    def statfs(self, ino: int) -> Settled[StatFs]:
        return StatFs(0, 0, 0)

    def opendir(self, caller: Caller, ino: int, flags: int) -> Settled[Opened]:
        if ino != CONTROL_ROOT and ino not in self._folders.values():
            raise FsError(errno.ENOTDIR)
        return Opened(0)

    def readdir(self, ino: int, handle: int, cookie: int) -> Settled[Iterable[DirectoryEntry]]:
        rows = [(b".", ino, stat.S_IFDIR), (b"..", ROOT_INODE, stat.S_IFDIR)]
        if ino == CONTROL_ROOT:
            rows += [
                (b"session", SESSION_INO, stat.S_IFREG),
                (b"status.json", _STATUS_INO, stat.S_IFREG),
                *((name, folder, stat.S_IFDIR) for name, folder in self._folders.items()),
            ]
        return [DirectoryEntry(name, ino, mode, at) for at, (name, ino, mode) in enumerate(rows, 1)][cookie:]

    def open(self, caller: Caller, ino: int, flags: int) -> Settled[Opened]:
        if ino not in (SESSION_INO, _STATUS_INO):
            raise FsError(errno.EISDIR)
        bound = self._open_sessions if ino == SESSION_INO else self._open_status
        if not bound.take(caller.holder):
            raise FsError(errno.ENFILE)
        handle = next(self._handles)
        try:
            if ino == SESSION_INO:
                self._sessions[handle] = ControlSession(caller.holder, handle)
            else:
                status = json.dumps(self._stats(), indent=1).encode() + b"\n"
                self._status_files[handle] = (status, caller.holder)
        except BaseException:
            bound.give_back(caller.holder)
            raise
        return Opened(handle, direct_io=True, parallel_direct_writes=True, no_flush=True)

    def release(self, ino: int, handle: int) -> None:
        with self._lock:
            session = self._sessions.pop(handle, None)
            status = self._status_files.pop(handle, None)
        if status is not None:
            self._open_status.give_back(status[1])
        if session is None:
            return
        self._open_sessions.give_back(session.holder)
        tickets = session.close()
        self._changed(session)
        self._tickets.give_back(session.holder, len(tickets))
        self._answer_bytes.give_back(session.holder, session.answer_bytes)
        for region in session.regions.values():
            region.give_back()
        for ticket in tickets:
            ticket.drop()

    def read(self, ino: int, handle: int, offset: int, into: memoryview) -> Settled[int]:
        session = self._sessions.get(handle)
        if session is None:
            status = self._status_files.get(handle)
            if status is None:
                raise FsError(errno.EBADF)
            part = status[0][offset : offset + len(into)]
            into[: len(part)] = part
            return len(part)
        number, within = ticket_at(offset)
        if number < 0:
            return self._read_answer(session, within, into)
        if within and self._words is not None and session.has_ended(number, within, self._words):
            return 0
        return self._get(self._reading_at(session, number), within, into)

    def _reading_at(self, session: ControlSession, number: int) -> Reader:
        """What a ticket reads. Raises FsError."""
        return session.reading_at(number, self._prestage, self._continuer, self._may_read)

    def _get(self, reading: Reader, within: int, into: memoryview) -> Steps[int]:
        channel = self._channel()
        deadline = channel.now() + reading.volume.timing.read_deadline
        return (yield from reading.read(channel, within, into, deadline))

    def _read_answer(self, session: ControlSession, within: int, into: memoryview) -> int:
        if within:
            return 0
        try:
            answer = session.answers.popleft()
        except IndexError:
            return 0
        if len(answer) > len(into):
            session.answers.appendleft(answer)
            raise FsError(errno.EMSGSIZE, f"the answer has {len(answer)} bytes")
        into[: len(answer)] = answer
        self._let_go(session, len(answer))
        return len(answer)

    def _let_go(self, session: ControlSession, size: int) -> None:
        session.count_answer_bytes(-size)
        self._answer_bytes.give_back(session.holder, size)

    def write(
        self, ino: int, handle: int, offset: int, data: memoryview, by: LockOwner = NOBODY
    ) -> Settled[int]:
        session = self._sessions.get(handle)
        if session is None:
            raise FsError(errno.EBADF)
        number, within = ticket_at(offset)
        if number >= 0:
            return self._put(session.ticket_to_write(number), within, data)
        if within:
            raise FsError(errno.EINVAL, "a request is written at offset 0, by one write")
        try:
            request = decode_request_untrusted(data)
        except MalformedControl as malformed:
            raise FsError(errno.EINVAL, str(malformed)) from None
        return self._request(session, request, len(data))

    def _put(self, ticket: Ticket, within: int, data: memoryview) -> Steps[int]:
        yield from ticket.put(self._channel(), within, data)
        return len(data)

    def ioctl(self, caller: Caller, ino: int, handle: int, command: int, data: memoryview) -> Settled[bytes]:
        session = self._sessions.get(handle)
        if session is None or self._transfers is None:
            raise FsError(errno.ENOTTY)
        return self._transfers.ioctl(session, caller.pid, command, data)

    def getxattr(self, caller: Caller, ino: int, name: bytes, room: memoryview) -> Settled[Xattr]:
        """A value by its name on the session's file. The kernel asks whether the caller may read that one."""
        # What followed what is learned of a session's gets, and this is of no session.
        if ino != SESSION_INO or self._continuer.active:
            raise FsError(errno.EOPNOTSUPP)
        try:
            volume_name, key = decode_value_xattr_untrusted(name)
        except MalformedControl as other:
            raise FsError(errno.EOPNOTSUPP, str(other)) from None
        return self._value(self._volume(volume_name), key, room)

    def _value(self, volume: ServedVolume, key: bytes, room: memoryview) -> Steps[Xattr]:
        reading, channel = volume.reader(key, self._prestage), self._channel()
        deadline = channel.now() + volume.timing.read_deadline
        try:
            got = yield from reading.read(channel, 0, room, deadline)
            if reading.cause is None and reading.length is not None:
                if reading.length > len(room):
                    raise FsError(errno.ERANGE)
                if got == reading.length:
                    return room[:got]
        finally:
            reading.close()
        raise FsError(errno.ENODATA)

    def _volume(self, name: str) -> ServedVolume:
        volume = self._volumes.get(name)
        if self._may_read is not None and (volume is None or not self._may_read(volume)):
            raise FsError(errno.EREMOTE, ELSEWHERE)
        if volume is None or volume.erased:
            raise FsError(errno.ENOENT, f"there is no volume {name}")
        return volume

    def _request(self, session: ControlSession, request: Request, size: int) -> Steps[int]:
        wants_answer = not request.flags & FLAG_NO_ANSWER
        if not wants_answer:
            yield from self._perform(session, request)
            return size
        wait = FsError(errno.EAGAIN, "read the answers that wait before asking on")
        if len(session.answers) >= ANSWERS_MAX or session.answer_bytes >= SESSION_ANSWER_BYTES:
            raise wait
        # Room for the answer comes first: what was done cannot be told otherwise.
        if not self._answer_bytes.take(session.holder, USUAL_ANSWER_BYTES):
            raise wait
        session.count_answer_bytes(USUAL_ANSWER_BYTES)
        answer = b""
        try:
            answer = yield from self._answered(session, request)
            beyond = len(answer) - USUAL_ANSWER_BYTES
            if beyond > 0 and not self._answer_bytes.take(session.holder, beyond):
                answer = b""
                raise wait
            session.count_answer_bytes(max(0, beyond))
        finally:
            if len(answer) < USUAL_ANSWER_BYTES:
                self._let_go(session, USUAL_ANSWER_BYTES - len(answer))
        session.answers.append(answer)
        return size

    def _answered(self, session: ControlSession, request: Request) -> Steps[bytes]:
        status, body = 0, b""
        try:
            body = yield from self._perform(session, request)
        except FsError as refused:
            status = refused.errno
        return Answer(request.operation, request.request_id, status, body).encode()

    def _perform(self, session: ControlSession, request: Request) -> Steps[bytes]:
        operation = request.operation
        if operation is Operation.STATS:
            return json.dumps(self._stats()).encode()
        if operation is Operation.OUTCOME:
            numbers = range(request.first_ticket, request.first_ticket + len(request.keys))
            return bytes(self._outcome(session.tickets.get(number)) for number in numbers)
        if self._may_read is not None and operation not in _READS:
            raise FsError(errno.EREMOTE, ELSEWHERE)
        volume = self._volume(request.volume)
        if operation in (Operation.GET, Operation.PUT):
            return self._bind(session, volume, request)
        channel = self._channel()
        if operation is Operation.EXISTS:
            # A long batch reads its directories a few at a time, and each few has the deadline of one read.
            turns = 1 + 2 * len(request.keys) // LOADS_IN_FLIGHT
            deadline = channel.now() + turns * volume.timing.read_deadline
            causes = yield from volume.lookup(channel, request.keys, deadline)
            if self._continuer.active:
                there = next((at for at, cause in enumerate(causes) if cause is not None), len(causes))
                self._continuer.chain(volume.in_sets, request.keys[:there])
            return bytes(Outcome.HIT if cause is None else Outcome(cause.value) for cause in causes)
        if operation is Operation.PRESTAGE:
            if self._words is not None:
                for key in request.keys:
                    self._words.mark(key)
            return bytes(self._start_prestage(volume, key, request.ttl_seconds) for key in request.keys)
        if operation is Operation.REPORT:
            count_reports(channel.tally(volume.settings.name), request.keys)
            return b""
        outcomes = bytearray()
        channel.gives_way()
        if operation is Operation.DELETE:
            return (yield from self._delete(volume, channel, request.keys))
        for key in request.keys:
            deadline = channel.now() + volume.timing.write_deadline
            outcomes.append((yield from self._pin(volume, channel, key, request.ttl_seconds, deadline)))
        return bytes(outcomes)

    def _bind(self, session: ControlSession, volume: ServedVolume, request: Request) -> bytes:
        """Bind tickets. What an earlier binding had under way is given up: its number means another now."""
        ahead = None
        if self._continuer.active and request.keys:
            self._continuer.chain(volume.in_sets, request.keys, session.trail)
            ahead = Ahead(request.keys[-1]) if request.operation is Operation.GET else None
        lengths = request.lengths if request.operation is Operation.PUT else [0] * len(request.keys)
        tickets = [
            Ticket(volume, key, ahead, length, request.ttl_seconds)
            for key, length in zip(request.keys, lengths, strict=True)
        ]

        if self._words is not None:
            for ticket in tickets:
                ticket.serial = next(self._serials)

        def bind() -> list[Ticket] | None:
            return session.bind(
                request.first_ticket,
                tickets,
                self._channel().now(),
                lambda more: self._tickets.take(session.holder, more),
            )

        replaced = bind()
        # A session keeps its tickets when its call is over. Those of an idle engine are not to keep another
        # one of its user from all of them.
        if replaced is None and (idle := self._idle_tickets(session.holder)):
            for ticket in idle:
                ticket.drop()
            replaced = bind()
        if replaced is None:
            raise FsError(errno.EAGAIN, "too many keys are bound to tickets of all sessions")
        self._changed(session)
        for ticket in replaced:
            ticket.drop()
        return b""

    def _changed(self, session: ControlSession) -> None:
        """Its tickets are others now: what other processes remember of them is old."""
        if self._words is not None:
            self._words.raise_version(session.handle)

    def bindings(self, handle: int) -> list[Binding]:
        """What another process of the agent may read of the session that is open under the handle."""
        session = self._sessions.get(handle)
        return [] if session is None else session.bindings()

    def _outcome(self, ticket: Ticket | None) -> int:
        if ticket is None:
            return Outcome.UNKNOWN
        outcome = ticket.outcome()
        if outcome is Outcome.UNKNOWN and self._words is not None:
            return self._words.outcome_of(ticket.serial, Outcome.UNKNOWN)
        return outcome

    def _idle_tickets(self, holder: Holder) -> list[Ticket]:
        """Of the holder's sessions that have bound none for TICKETS_IDLE_SECONDS, which lose them."""
        found: list[Ticket] = []
        before = self._channel().now() - TICKETS_IDLE_SECONDS
        for session in list(self._sessions.values()):
            if session.holder == holder:
                taken = session.take_back(before)
                self._changed(session)
                self._tickets.give_back(holder, len(taken))
                found += taken
        return found

    def _pin(
        self, volume: ServedVolume, channel: IoChannel, key: bytes, ttl: int, deadline: float
    ) -> Steps[int]:
        # Without a time of its own, for as long as the volume keeps values: at the most, until it is deleted.
        seconds = ttl or volume.settings.ttl_seconds
        until = int(channel.wall()) + seconds if seconds else TIME_MAX
        try:
            pinned = yield from volume.pin(channel, key, until, deadline)
        except PutRefused as refused:
            return outcome_of(refused)
        if pinned is None:
            return Outcome.NEVER_STORED
        return Outcome.HIT if pinned else Outcome.REFUSED

    def _delete(self, volume: ServedVolume, channel: IoChannel, keys: Sequence[bytes]) -> Steps[bytes]:
        if self._prestage is not None:
            for key in keys:
                self._prestage.discard(volume.settings.volume_id, volume.pseudonym(key))
        became = yield from volume.delete_many(channel, keys, volume.timing.write_deadline)
        there = {True: Outcome.HIT, False: Outcome.NEVER_STORED}
        return bytes(outcome_of(one) if isinstance(one, PutRefused) else there[one] for one in became)
