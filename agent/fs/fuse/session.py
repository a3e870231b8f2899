"""`FuseSession`: the FUSE protocol as an object without I/O. The doors read and write; this decides.

Read abi.py for the bytes and operations.py for the opcodes. All workers of a door share the object, which
keeps nothing about a request: the caller of `answer` brings the buffers and a `Runner`.

    reply = session.answer(request, received, data, room, runner)

`request` begins with the header and the arguments; `data` is where the payload of a WRITE lies (from its byte
80 on); `room` is where READ and READDIR put what they found. The reply is a list of buffers for one `writev`,
and READ's second buffer is `room` itself: no payload is copied here. Where a `room` lies in several places
(`Scatter`), the reply to READ is its header alone.

Nothing escapes `answer`. A broken request gets EIO or EINVAL, or no answer where the protocol has none; an
exception other than `FsError` is logged and answered with EIO.
"""

import enum
import errno
import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, TypeAlias, cast

from agent.fs.fuse.abi import (
    IN_HEADER,
    INIT_FLAGS2,
    INIT_IN,
    INIT_OUT,
    MAJOR,
    MINOR,
    MINOR_LEAST,
    OUT_HEADER,
    PAGE_BYTES,
    WRITE_CACHE,
    WRITE_KILL_SUIDGID,
    WRITE_LOCKOWNER,
    FuseFormatError,
    InitFlag,
    Opcode,
    decode_untrusted,
    encode_answer,
)
from agent.fs.fuse.operations import OFFSET_MAX, FuseOperations, Request
from agent.fs.fuse.replies import ATTRIBUTES, ENTRY_OUT, OPEN_OUT, WRITE_OUT, looked_up_in
from agent.fs.fuse.requests import READ_IN, WRITE_IN
from agent.fs.interface import PAGES, FsError, LockOwner, Tree, face_of
from agent.host_os.rate_limited_log import Complaints
from agent.inline.scatter import Target
from agent.pool.steps import GaveWay, Runner, settle

log = logging.getLogger(__name__)

Reply: TypeAlias = list[bytes | memoryview]

TRANSFER_BYTES: Final = 1 << 20
"""The largest READ and WRITE: 256 pages, which is what Linux allows (fs.fuse.max_pages_limit)."""
READ_AHEAD_BYTES: Final = 4 << 20
"""The most that a kernel may have for a file: four requests, which several workers serve."""
BACKGROUND: Final = 64
"""How many requests of read-ahead and other asynchronous ones the kernel may have under way."""

WANTED: Final = (
    InitFlag.ASYNC_READ
    | InitFlag.ATOMIC_O_TRUNC
    | InitFlag.BIG_WRITES
    | InitFlag.AUTO_INVAL_DATA
    | InitFlag.ASYNC_DIO
    | InitFlag.PARALLEL_DIROPS
    | InitFlag.MAX_PAGES
    | InitFlag.HANDLE_KILLPRIV_V2
    | InitFlag.INIT_EXT
    | InitFlag.DIRECT_IO_ALLOW_MMAP
)
"""What we ask for where the kernel offers it.

Not asked for, with the reason:

* EXPORT_SUPPORT: lookups of `.` and `..` would reach the faces.
* WRITEBACK_CACHE: the kernel would decide when a write is acknowledged.
* DONT_MASK: the kernel applies the umask.
* DO_READDIRPLUS: a listing has no attributes at hand, and a request costs this kernel little.
* SPLICE_*: a pipe's pages are 4 KiB each.
* POSIX_LOCKS and FLOCK_LOCKS: locks stay within one host's kernel.
"""

WANTED_BY_GUESTS: Final = WANTED | InitFlag.DO_READDIRPLUS | InitFlag.READDIRPLUS_AUTO
"""What the virtio-fs door asks for: a guest pays an exit for every request, so a listing that will be
followed by a stat of each name (which is what AUTO finds out) brings the attributes along."""

NO_ANSWER: Final = frozenset({Opcode.FORGET, Opcode.BATCH_FORGET, Opcode.NOTIFY_REPLY})
GIVES_ENTRY: Final = frozenset({Opcode.LOOKUP, Opcode.SYMLINK, Opcode.MKNOD, Opcode.MKDIR, Opcode.LINK})

# Needed for every request, and of modules that are not compiled, where each would be looked up by its name.
_IN_HEADER: Final = IN_HEADER
_OUT_HEADER: Final = OUT_HEADER
_READ_IN: Final = READ_IN
_WRITE_IN: Final = WRITE_IN
_WRITE_OUT: Final = WRITE_OUT
IN_HEADER_BYTES: Final[int] = IN_HEADER.size
OUT_HEADER_BYTES: Final[int] = OUT_HEADER.size
WRITE_HEAD_BYTES: Final[int] = IN_HEADER.size + WRITE_IN.size
AGAIN: Final[Reply] = []
"""In place of a reply: the request is to be served again, once another worker has ended its wait."""
_NO_ROOM: Final = memoryview(bytearray())
_READ: Final[int] = Opcode.READ.value
_WRITE: Final[int] = Opcode.WRITE.value
_GETXATTR: Final[int] = Opcode.GETXATTR.value
_INIT: Final[int] = Opcode.INIT.value
_DESTROY: Final[int] = Opcode.DESTROY.value
_KILL_SUIDGID: Final[int] = WRITE_KILL_SUIDGID
_LOCKOWNER: Final[int] = WRITE_LOCKOWNER
_CACHED: Final[int] = WRITE_CACHE
ENTRY_BYTES: Final = ENTRY_OUT.size + ATTRIBUTES.size


class SessionState(enum.Enum):
    NEW = "INIT alone"
    LIVE = "every request"


LEGAL: Final = {
    SessionState.NEW: {SessionState.NEW, SessionState.LIVE},
    SessionState.LIVE: {SessionState.NEW},
}
"""Which state may follow which: INIT and DESTROY, like a kernel that is gone, end what was live."""
_LIVE: Final = SessionState.LIVE


@dataclass(frozen=True, slots=True)
class Negotiated:
    """What INIT agreed on."""

    minor: int
    flags: InitFlag
    transfer_bytes: int


@dataclass(slots=True)
class Traffic:
    """What one worker has moved: bytes that READ and GETXATTR answered with and that WRITE brought."""

    bytes_read: int = 0
    bytes_written: int = 0


class FuseSession:
    """One mount's protocol. Thread-safe: all that it keeps between requests is set by INIT, counts aside."""

    def __init__(
        self,
        tree: Tree,
        *,
        transfer_bytes: int = TRANSFER_BYTES,
        complaints: Complaints | None = None,
        wanted: InitFlag = WANTED,
        begins_anew: Callable[[Runner], None] | None = None,
        agreed: Callable[[Negotiated], None] | None = None,
    ) -> None:
        """`begins_anew` is called before an INIT and after a DESTROY: the kernel that was there gives nothing
        back any more. `agreed` hears the outcome of INIT."""
        self._wanted = wanted
        self._begins_anew = begins_anew
        self._agreed = agreed
        self._traffic: dict[Runner, Traffic] = {}
        self._face = face_of(tree)
        self._operations = FuseOperations(tree)
        self._table = self._operations.table
        self.transfer_bytes: Final = transfer_bytes
        """The size that `room` and `data` need."""
        self.state = SessionState.NEW
        self.complaints = complaints or Complaints(log)
        self.negotiated: Negotiated | None = None
        self.initialised = threading.Event()

    def traffic(self) -> Traffic:
        """What all workers have moved. Each counts for itself, so the sum may be a moment old."""
        each = list(self._traffic.values())
        return Traffic(sum(one.bytes_read for one in each), sum(one.bytes_written for one in each))

    def _traffic_of(self, runner: Runner) -> Traffic:
        # One entry for each worker: a runner is one thread's, for as long as the door serves.
        found = self._traffic.get(runner)
        if found is None:
            found = self._traffic[runner] = Traffic()
        return found

    def begin_anew(self, runner: Runner) -> None:
        """The kernel on the other side is gone, or was reset: the next one begins with INIT."""
        self._become(SessionState.NEW)
        if self._begins_anew is not None:
            self._begins_anew(runner)

    def resume(self, negotiated: Negotiated) -> None:
        """Go on with a kernel that has said INIT to an earlier process and knows nothing of its end."""
        self._agree(negotiated)

    def _agree(self, negotiated: Negotiated) -> None:
        self.negotiated = negotiated
        # Linux has both since 6.6.
        self._operations.drops_pages = bool(negotiated.flags & InitFlag.DIRECT_IO_ALLOW_MMAP)
        self._become(SessionState.LIVE)
        self.initialised.set()

    def _become(self, state: SessionState) -> None:
        if state not in LEGAL[self.state]:
            raise AssertionError(f"{state} after {self.state}")
        self.state = state

    def answer(
        self, request: memoryview, received: int, data: memoryview, room: Target, runner: Runner
    ) -> Reply | None:
        """Serve one request to its end; None where the protocol has no answer to it. `AGAIN`: its steps gave
        way, as only a runner lets them whose door puts requests aside.

        `received` counts all bytes of the request, those in `data` included. The reply's buffers may lie
        in `room` and hold until the worker's next request.
        """
        if received < IN_HEADER_BYTES or len(request) < IN_HEADER_BYTES:
            self.complaints.peer("a request", "shorter than its header")
            return None
        length: int
        opcode: int
        node: int
        words: int
        length, opcode, unique, node, uid, gid, pid, words = _IN_HEADER.unpack_from(request)
        try:
            if length != received:
                raise FuseFormatError("its length is not what was received")
            if self.state is not _LIVE and opcode != _INIT:
                raise FuseFormatError("before INIT")
            if opcode == _READ:
                return self._read(request, received, node, unique, room, runner)
            if opcode == _WRITE:
                return self._write(request, received, node, unique, pid, data, runner)
            if opcode == _INIT:
                body: bytes | memoryview = self._init(request[IN_HEADER_BYTES:received], runner)
            elif opcode == _DESTROY:
                self.begin_anew(runner)
                body = b""
            else:
                handler = self._table.get(opcode)
                if handler is None:
                    # ENOSYS makes the kernel do without: LSEEK, COPY_FILE_RANGE, INTERRUPT, STATX, POLL,
                    # TMPFILE and the rest are asked for once and never again.
                    raise FsError(errno.ENOSYS)
                end = received - 8 * words
                if not IN_HEADER_BYTES <= end <= len(request):
                    raise FuseFormatError("its parts do not fit into it")
                arguments = request[IN_HEADER_BYTES:end]
                place = room if isinstance(room, memoryview) else _NO_ROOM
                body = handler(Request(self._face(node), node, uid, gid, pid, arguments, place, runner))
                if opcode == _GETXATTR:
                    self._traffic_of(runner).bytes_read += len(body)
        except FsError as refusal:
            return self._refuse(opcode, unique, refusal.errno)
        except GaveWay:
            return AGAIN
        except FuseFormatError as broken:
            self.complaints.peer(opcode_name(opcode), str(broken))
            return self._refuse(opcode, unique, errno.EIO)
        except BaseException as bug:
            # The last line of defence, and BaseException on purpose: this is a worker's outermost frame,
            # and even a SystemExit out of an operation must cost one EIO rather than a worker.
            self._report(opcode, bug)
            return self._refuse(opcode, unique, errno.EIO)
        if opcode in NO_ANSWER:
            return None
        if not body:
            return [_OUT_HEADER.pack(OUT_HEADER_BYTES, 0, unique)]
        return [_OUT_HEADER.pack(OUT_HEADER_BYTES + len(body), 0, unique), body]

    def _read(
        self, request: memoryview, received: int, node: int, unique: int, room: Target, runner: Runner
    ) -> Reply:
        if received < WRITE_HEAD_BYTES or len(request) < WRITE_HEAD_BYTES:
            raise FuseFormatError("READ is truncated")
        handle: int
        offset: int
        size: int
        handle, offset, size = _READ_IN.unpack_from(request, IN_HEADER_BYTES)
        # A guest lays out as much room as it likes, and one request must not take for ever.
        if size > len(room) or size > self.transfer_bytes or offset > OFFSET_MAX - size:
            raise FsError(errno.EINVAL)
        place = room[:size]
        # A room in several places comes from a door whose file system takes one (agent/fs/virtiofs).
        outcome = self._face(node).read(node, handle, offset, cast(memoryview, place))
        got = settle(outcome, runner)
        if not 0 <= got <= size:
            raise ValueError(f"read answered {got} of {size} bytes")
        self._traffic_of(runner).bytes_read += got
        header = _OUT_HEADER.pack(OUT_HEADER_BYTES + got, 0, unique)
        if not isinstance(place, memoryview):
            return [header]
        return [header, place if got == size else place[:got]]

    def _write(
        self,
        request: memoryview,
        received: int,
        node: int,
        unique: int,
        pid: int,
        data: memoryview,
        runner: Runner,
    ) -> Reply:
        if received < WRITE_HEAD_BYTES or len(request) < WRITE_HEAD_BYTES:
            raise FuseFormatError("WRITE is truncated")
        handle: int
        offset: int
        size: int
        flags: int
        handle, offset, size, flags, owner = _WRITE_IN.unpack_from(request, IN_HEADER_BYTES)
        if size > received - WRITE_HEAD_BYTES or size > len(data):
            raise FuseFormatError("WRITE has less data than it says")
        if size > self.transfer_bytes:
            raise FsError(errno.EINVAL)
        if offset > OFFSET_MAX - size:
            raise FsError(errno.EFBIG)
        if flags & _KILL_SUIDGID and node in self._operations.set_id_nodes:
            self._operations.clear_set_id(node, handle, runner)
        holder = PAGES if flags & _CACHED else LockOwner(owner if flags & _LOCKOWNER else 0, pid)
        outcome = self._face(node).write(node, handle, offset, data[:size], holder)
        taken = settle(outcome, runner)
        if not 0 <= taken <= size:
            raise ValueError(f"write took {taken} of {size} bytes")
        self._traffic_of(runner).bytes_written += taken
        return [
            _OUT_HEADER.pack(OUT_HEADER_BYTES + _WRITE_OUT.size, 0, unique),
            _WRITE_OUT.pack(taken),
        ]

    def _init(self, arguments: memoryview, runner: Runner) -> bytes:
        major, minor, _, flags = decode_untrusted(INIT_IN, arguments)
        if major < MAJOR or (major == MAJOR and minor < MINOR_LEAST):
            # At a bounded rate, because a guest may say INIT as often as it likes.
            spoken = f"{major}.{minor}"
            self.complaints.peer("INIT", f"the kernel speaks FUSE {spoken}; we need {MAJOR}.{MINOR_LEAST}")
            raise FsError(errno.EPROTO)
        if major > MAJOR:
            # The kernel asks again in the version that we name here.
            return INIT_OUT.pack(MAJOR, MINOR, 0, 0, 0, 0, 0, 0, 0, 0, 0)
        if flags & InitFlag.INIT_EXT and len(arguments) >= INIT_IN.size + INIT_FLAGS2.size:
            flags |= INIT_FLAGS2.unpack_from(arguments, INIT_IN.size)[0] << 32
        agreed = self._wanted & flags
        if not agreed & InitFlag.MAX_PAGES:
            raise FsError(errno.EPROTO)
        self.begin_anew(runner)
        negotiated = Negotiated(min(MINOR, minor), InitFlag(agreed), self.transfer_bytes)
        if self._agreed is not None:
            self._agreed(negotiated)
        self._agree(negotiated)
        return INIT_OUT.pack(
            MAJOR,
            negotiated.minor,
            READ_AHEAD_BYTES,
            agreed & 0xFFFF_FFFF,
            BACKGROUND,
            BACKGROUND * 3 // 4,  # from so many on the kernel slows its writers down
            self.transfer_bytes,
            1,  # granularity of times: a nanosecond
            self.transfer_bytes // PAGE_BYTES,
            0,  # nothing is mapped
            agreed >> 32,
        )

    def _refuse(self, opcode: int, unique: int, code: int) -> Reply | None:
        if opcode in NO_ANSWER:
            return None
        return [_OUT_HEADER.pack(OUT_HEADER_BYTES, -errno_for_kernel(code), unique)]

    def _report(self, opcode: int, bug: BaseException) -> None:
        try:
            self.complaints.bug(opcode_name(opcode), bug)
        except Exception:
            # Out of memory, most likely. The answer matters more than the line.
            self.complaints.count += 1

    def refusal_of(self, request: memoryview) -> Reply:
        """EIO for a request whose reply the kernel would not take."""
        return [encode_answer(errno.EIO, IN_HEADER.unpack_from(request)[2])]

    def reply_was_lost(self, request: memoryview, reply: Reply, runner: Runner) -> None:
        """Nobody waited for this reply any more: give back the reference or the handle that it carried."""
        opcode, node = IN_HEADER.unpack_from(request)[1:4:2]
        if len(reply) < 2:
            return
        body = reply[1]
        try:
            if opcode in GIVES_ENTRY or opcode == Opcode.CREATE:
                entry_node = ENTRY_OUT.unpack_from(body)[0]
                if opcode == Opcode.CREATE:
                    handle = OPEN_OUT.unpack_from(body, ENTRY_BYTES)[0]
                    settle(self._face(entry_node).release(entry_node, handle), runner)
                self._operations.forget(entry_node, 1)
            elif opcode == Opcode.READDIRPLUS:
                for entry_node in looked_up_in(body):
                    self._operations.forget(entry_node, 1)
            elif opcode == Opcode.OPEN:
                settle(self._face(node).release(node, OPEN_OUT.unpack_from(body)[0]), runner)
            elif opcode == Opcode.OPENDIR:
                settle(self._face(node).releasedir(node, OPEN_OUT.unpack_from(body)[0]), runner)
        except FsError:
            return
        except BaseException as bug:
            self._report(opcode, bug)


def errno_for_kernel(code: object) -> int:
    """`code` where the kernel takes it. It ignores a reply with an errno outside 1 to 511, and the
    caller of the system call would then wait for ever."""
    return code if isinstance(code, int) and 0 < code < 512 else errno.EIO


def opcode_name(opcode: int) -> str:
    try:
        return Opcode(opcode).name
    except ValueError:
        return "an unknown opcode"
