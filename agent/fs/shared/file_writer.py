"""A file of /shared that is being written: any order of writes, whole or absent for everybody else.

A chunk that one write covers is stored at once, from the door's buffer. The others are staged in memory until
they are covered, or until the file is closed. Directories name the chunks later, many in one step, and before
the manifest goes (agent/pool/write/name_together.py). A chunk that was stored and is written again is stored
under another origin (manifest.py), so a reader of an earlier content finds what it was promised. The manifest
goes last and makes the file visible, under the name that the file has then.

| event | the file |
| --- | --- |
| a close that says it is whole (file_users.py: WHOLE), or that nobody can judge (UNTOLD) | is published |
| nobody has it open any more, and all that wrote have closed it | is published |
| a process that wrote dies with it open, or its maker does (DYING) | is dropped, later calls get EIO |
| a chunk cannot be stored, or the volume has no room for the file | is dropped, later calls get that error |
| a write after it was published | begins the next content, from the published one |

Chunks of a file that is dropped are deleted. Several threads may write whole chunks at the same time.
"""

# One idea in one file: the life of one file from its first write to its manifest, which is one class.

import contextlib
import errno
import itertools
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Final

from agent.fs.after_reply import AfterReply
from agent.fs.close_cause import how_closed
from agent.fs.file_users import Closed, FileUsers, Judge
from agent.fs.interface import Caller, FsError, LockOwner, SetAttributes
from agent.fs.shared.chunks import (
    STAGED_CHUNKS_MAX,
    ChunkLater,
    Staged,
    pieces,
    put_before_next,
    put_chunk,
    read_chunk,
    wall_ns,
)
from agent.fs.shared.discards import BuiltOn, Discards
from agent.fs.shared.gaps import Gaps, is_newest, stays, why_not_whole
from agent.fs.shared.manifest import HOLE, Kind, Manifest, Origins, runs_of, time_told
from agent.fs.shared.paths import chunk_key, path_key, split
from agent.fs.shared.unnamed import (
    NAMED_WITH_DATA,
    TOGETHER_SECONDS,
    UNNAMED_MAX,
    UNNAMED_PART,
    UNNAMED_SECONDS,
    WAIT_SECONDS,
    UnnamedChunks,
)
from agent.fs.shared.volume import SharedVolume
from agent.fs.value_writer import errno_of
from agent.host_os.per_user_bounds import Bound, Holder
from agent.pool.errors import BadPut, PutRefused, ReplacedMeanwhile
from agent.pool.mutable.look_ahead import Look
from agent.pool.steps import Acquire, IoChannel, Steps, beside
from agent.pool.write.writer_base import Writer

NO_END: Final = "another operation of the file does not come to its end"
PUT_TRIES: Final = 3
"""A chunk that an enclosure does not take goes to another place, under another origin."""
ASKED_FROM: Final = 8
"""A file of more than this part of the volume is asked for before it is published: it may have evicted
itself."""


class FileWriter:
    """One file on its way in. Safe from any thread."""

    def __init__(
        self,
        volume: SharedVolume,
        path: bytes,
        ino: int,
        caller: Caller,
        mode: int,
        now_ns: int,
        staged: Bound,
        discards: Discards,
        judge: Judge = how_closed,
        base: Manifest | None = None,
        replaced: Manifest | None = None,
        published: "Callable[[FileWriter], None]" = lambda _: None,
        identity: bytes | None = None,
        unnamed: UnnamedChunks | None = None,
        after_reply: AfterReply | None = None,
    ) -> None:
        """`base`: the content that it begins with. `replaced`: what its name led to before, if that is
        known. `identity`: of the content, where the directories of its first chunk were read already."""
        self.volume: Final = volume
        self._chunk_bytes: Final = volume.chunk_bytes
        self._chunks_max: Final = volume.chunks_max
        self.path = path
        self.holder: Final[Holder] = caller.holder
        self.opens = self.ending = 0  # how often it is open, and how many last closes are under way
        self.unlinked = False  # or its name was taken away, so that the file is never published
        self.mode, self.uid, self.gid = mode, caller.uid, caller.gid
        before = base or replaced
        if before is not None:
            self.uid, self.gid = before.uid, before.gid
        self.opener_uid: Final = caller.uid
        self.gaps = Gaps(base)
        self._over = [] if before is None else [before.identity]
        """The contents whose place it may take where it has bytes that nobody wrote here."""
        self.atime_ns = self.mtime_ns = self.ctime_ns = now_ns
        self.manifest: Manifest | None = None
        """The manifest that was published last."""
        self.users: Final = FileUsers(ino, caller.pid, judge)
        self._bound = staged
        self._discards = discards
        self.built_on: Final = BuiltOn(discards)
        self._published = published
        self._stale = UnnamedChunks() if unnamed is None else unnamed
        self._after_reply = after_reply or AfterReply(0)
        self._replaced = replaced
        self._failed = 0
        self._lock = threading.Lock()
        self._in_flight: dict[int, threading.Lock] = {}
        """Chunks that are being stored from a buffer of their own."""
        self._changing: dict[int, threading.Lock] = {}
        """Operations that change the content, and let go of the lock amid their work."""
        self._publishing: threading.Lock | None = None
        """Held while the content is published. Operations that begin meanwhile wait for the end of it: what
        they changed would be in no manifest."""
        self._numbers = itertools.count()
        self._staged: OrderedDict[int, Staged] = OrderedDict()
        self._unnamed: dict[int, Writer] = {}
        """Chunks that are on flash, and that no directory names."""
        self._stored_at = float("-inf")
        """When a chunk was stored last; long ago where none was."""
        self._pace = 0.0
        """Seconds from the last chunk but one to the last."""
        self._unnamed_since = 0.0
        self._look: Look | None = None
        """What the directories of its name said, read beside a chunk."""
        self._begin(base, identity)
        self.changed = base is None  # something is to be published

    def _begin(self, base: Manifest | None, identity: bytes | None = None) -> None:
        """The next content, from an earlier one."""
        self._base = base
        self._base_chunks = 0 if base is None else base.chunks
        self.length = 0 if base is None else base.length
        self._last = -1
        """The chunk that was stored last."""
        self._origins = Origins(identity)
        self._stored: dict[int, tuple[bytes, int]] = {}
        """Origin and size of every chunk that this content has stored."""
        self._short = b"" if base is None or base.content is None else base.content
        """The bytes of a short file, until its chunk is staged."""

    # -- what a door asks -------------------------------------------------------------------------

    def write(self, channel: IoChannel, offset: int, data: memoryview, holder: LockOwner) -> Steps[None]:
        """Take bytes. Raises FsError; after a failure for good."""
        deadline = channel.now() + self.volume.timing.write_deadline
        yield from self._take(channel, deadline)
        change = self._begin_change()
        try:
            self._check()
            self.users.note(holder)
            self._check_room(offset + len(data))
            self._go_on()
            chunk_bytes, end = self._chunk_bytes, offset + len(data)
            if offset > self.length:
                self.gaps.add(self.length // chunk_bytes)
            for number, at, part in pieces(offset, data, chunk_bytes):
                yield from self._until_quiet(channel, deadline, number)
                if len(part) == chunk_bytes:
                    self._unstage(number)
                    self.gaps.filled(number)
                    self._short = b"" if not number else self._short
                    is_last = (number + 1) * chunk_bytes == end
                    if not (is_last and self._store_later(channel, number, part, deadline)):
                        yield from self._store(channel, number, part, deadline)
                    continue
                chunk = yield from self._stage(channel, number, deadline)
                chunk.buffer[at : at + len(part)] = part
                if chunk.cover(at, at + len(part)):
                    yield from self._store_staged(channel, number, chunk, chunk_bytes, deadline)
            self._check()
            self.length = max(self.length, end)
            self.mtime_ns = self.ctime_ns = wall_ns(channel)
        finally:
            self._end_change(change)
            self._lock.release()

    def read(self, channel: IoChannel, offset: int, into: memoryview) -> Steps[int]:
        """What the file holds so far; holes are zeros."""
        deadline = channel.now() + self.volume.timing.write_deadline
        yield from self._take(channel, deadline)
        try:
            self._check()
            count = max(0, min(len(into), self.length - offset))
            for number, at, part in pieces(offset, into[:count], self._chunk_bytes):
                yield from self._until_quiet(channel, deadline, number)
                yield from self._read_chunk(channel, number, at, part, deadline)
            return count
        finally:
            self._lock.release()

    def resize(self, channel: IoChannel, length: int) -> Steps[None]:
        """ftruncate(2): cut it, or lengthen it by a hole."""
        deadline = channel.now() + self.volume.timing.write_deadline
        yield from self._take(channel, deadline)
        change = self._begin_change()
        try:
            self._check()
            self._check_room(length)
            self.gaps.is_bare = False
            if length == self.length:
                return
            self._go_on()
            yield from self._until_quiet(channel, deadline)
            if length < self.length:
                yield from self._cut(channel, length, deadline)
            elif self.length % self._chunk_bytes:
                self.gaps.add(self.length // self._chunk_bytes)
            self.length = length
            self.mtime_ns = self.ctime_ns = wall_ns(channel)
        finally:
            self._end_change(change)
            self._lock.release()

    def change(self, channel: IoChannel, changes: SetAttributes) -> Steps[None]:
        """Mode, owner and times, which are published with the file."""
        yield from self._take(channel, channel.now() + self.volume.timing.write_deadline)
        try:
            now_ns = wall_ns(channel)
            self.mode = self.mode if changes.mode is None else changes.mode
            self.uid = self.uid if changes.uid is None else changes.uid
            self.gid = self.gid if changes.gid is None else changes.gid
            self.atime_ns = time_told(self.atime_ns, changes.atime_ns, changes.touch_atime, now_ns)
            self.mtime_ns = time_told(self.mtime_ns, changes.mtime_ns, changes.touch_mtime, now_ns)
            self.ctime_ns = now_ns
        finally:
            self._lock.release()

    def move(
        self, channel: IoChannel, path: bytes, replaced: Manifest | None, *, is_moved: bool
    ) -> Steps[None]:
        """Give the file another name. `replaced`: what is behind it. `is_moved`: that was behind the old."""
        yield from self._take(channel, channel.now() + self.volume.timing.write_deadline)
        self.path, self._replaced = path, replaced
        if not is_moved and replaced is not None:
            self._over.append(replaced.identity)
        self._lock.release()

    def told(self, before: Manifest | None, now: Manifest | None) -> None:
        """Note what the name leads to, which goes with the close; with `before`, if that led there."""
        if before is None or (self._replaced is not None and self._replaced.identity == before.identity):
            self._replaced = now

    def unlink(self, channel: IoChannel) -> Steps[Manifest | None]:
        """Have the file never published from now on. Returns what was published by then, if anything."""
        yield from self._take(channel, channel.now() + self.volume.timing.write_deadline)
        self.unlinked = True
        self._lock.release()
        return self.manifest

    def has_failed(self) -> bool:
        return self._failed != 0

    def sync(self, channel: IoChannel) -> Steps[None]:
        """fsync(2): nothing that was acknowledged so far has failed, chunks under way included. The file is
        stored by its close."""
        deadline = channel.now() + self.volume.timing.write_deadline
        yield from self._take(channel, deadline)
        try:
            yield from self._until_quiet(channel, deadline)
            self._check()
        finally:
            self._lock.release()

    def close(self, channel: IoChannel, holder: LockOwner) -> Steps[None]:
        """A descriptor was closed (FLUSH). Raises FsError where the file should be there and is not."""
        deadline = channel.now() + self.volume.timing.write_deadline
        yield from self._take(channel, deadline)
        try:
            self._check()
            closed = self.users.close(holder, split(self.path)[1])
            # A process of a guest that has written nothing is known by nothing.
            alone = closed is Closed.NOT_YET and holder.pid <= 0 and not self.users.wrote
            if closed is Closed.DYING:
                self._fail(errno.EIO)
            elif self.changed and (closed in (Closed.WHOLE, Closed.UNTOLD) or alone):
                yield from self._publish(channel, deadline)
        finally:
            self._lock.release()

    def end(self, channel: IoChannel) -> Steps[None]:
        """Nobody has it open any more (RELEASE)."""
        yield from self._take_again(channel)  # however long it takes: nobody comes back for what is staged
        try:
            deadline = channel.now() + self.volume.timing.write_deadline
            while (busy := self._publishing) is not None:
                yield from self._wait_for(channel, busy, deadline)
                deadline = channel.now() + self.volume.timing.write_deadline
            if self.opens or self._failed or not self.changed:
                return  # opened by somebody meanwhile, or nothing is to be published
            if self.users.unclosed:
                self._fail(errno.EIO)
                return
            with contextlib.suppress(FsError):  # nobody hears of it; the file is not there
                yield from self._publish(channel, deadline)
        finally:
            self._lock.release()

    def abandon(self) -> None:
        """Nobody has it open, nor will: not before that is certain. What is in no manifest goes."""
        if self.changed:
            self._fail(self._failed or errno.EIO)
        self._let_go()
        self.built_on.end()

    def publish(self, channel: IoChannel) -> Steps[None]:
        """Make it visible as it is. Raises FsError."""
        deadline = channel.now() + self.volume.timing.write_deadline
        yield from self._take(channel, deadline)
        try:
            self._check()
            if self.changed:
                yield from self._publish(channel, deadline)
        finally:
            self._lock.release()

    # -- the lock, and failing ----------------------------------------------------------------------

    def _take(self, channel: IoChannel, deadline: float) -> Steps[None]:
        """Take the lock, once nothing is being published."""
        if not (yield Acquire(self._lock, deadline)):
            raise FsError(errno.EIO, NO_END)
        while (busy := self._publishing) is not None:
            if not (yield from self._wait_for(channel, busy, deadline)):
                self._lock.release()
                raise FsError(errno.EIO, NO_END)

    def _wait_for(self, channel: IoChannel, busy: threading.Lock, deadline: float) -> Steps[bool]:
        """Wait, with the lock let go of, until another operation has ended. False: it did not end by the
        deadline."""
        self._lock.release()
        if came := (yield Acquire(busy, deadline)):
            busy.release()
        yield from self._take_again(channel)
        return came

    def _begin_change(self) -> int:
        number = next(self._numbers)
        self._changing[number] = busy = threading.Lock()
        busy.acquire()
        return number

    def _end_change(self, number: int) -> None:
        self._changing.pop(number).release()

    def _until_quiet(self, channel: IoChannel, deadline: float, number: int | None = None) -> Steps[None]:
        """Wait until nobody stores the chunk `number`, or any chunk. Called with the lock held."""
        while True:
            chunks = self._in_flight
            busy = next(iter(chunks.values()), None) if number is None else chunks.get(number)
            if busy is None:
                return
            came = yield from self._wait_for(channel, busy, deadline)
            self._check()
            if not came:
                raise FsError(errno.EIO, "a chunk does not come to its place")

    def _take_again(self, channel: IoChannel) -> Steps[None]:
        """Who holds the lock has a deadline, so this ends."""
        while not (yield Acquire(self._lock, channel.now() + self.volume.timing.write_deadline)):
            continue

    def _check(self) -> None:
        if self._failed:
            raise FsError(self._failed, "a write was refused, or a writer died: nothing is stored")

    def _check_room(self, length: int) -> None:
        if length > self.length and -(-length // self._chunk_bytes) > self._chunks_max:
            raise self._fail(errno.ENOSPC, "the file is larger than its volume")

    def _fail(self, number: int, why: str = "") -> FsError:
        """It makes no file any more, but the published content stays. Returns what its caller is told."""
        self._failed = number
        self._discards.add(self.volume, self._new_chunks())
        self._stored.clear()
        self._let_go()
        return FsError(number, why)

    def _new_chunks(self) -> Iterator[tuple[bytes, int]]:
        for number, (origin, _) in list(self._stored.items()):
            if self.changed and number not in self._unnamed:  # else they are published
                yield origin, number

    def _let_go(self) -> None:
        for writing in self._unnamed.values():
            writing.drop()
        self._unnamed.clear()
        self._stale.discard(self)
        for number in list(self._staged):
            self._unstage(number)

    def _go_on(self) -> None:
        """Something is written: into the next content, where the last is published."""
        if not self.changed and self.manifest is not None:
            self._let_go()
            self._begin(self.manifest)
            self.gaps = Gaps(self.manifest)
        self.changed, self.gaps.is_bare = True, False

    # -- chunks ---------------------------------------------------------------------------------------

    def _origin(self, number: int) -> tuple[bytes, int]:
        """Where a chunk lies, and how many bytes it has there."""
        stored = self._stored.get(number)
        if stored is not None:
            return stored
        if self._base is None or number >= self._base_chunks:
            return HOLE, 0
        origin = self._base.origin(number)
        return origin, 0 if origin == HOLE else self._base.chunk_length(number)

    def _stage(self, channel: IoChannel, number: int, deadline: float) -> Steps[Staged]:
        """A chunk in memory, with what it holds so far."""
        size = self._chunk_bytes
        while number not in self._staged:
            if len(self._staged) < STAGED_CHUNKS_MAX and self._bound.take(self.holder, size):
                break
            if not self._staged:
                raise FsError(errno.ENOMEM, "too much is being written in part")
            oldest, early = next(iter(self._staged.items()))
            yield from self._store_staged(channel, oldest, early, size, deadline)
            yield from self._until_quiet(channel, deadline, number)
        chunk = self._staged.get(number)
        if chunk is not None:
            self._staged.move_to_end(number)
            return chunk
        try:
            chunk = Staged(size)
        except MemoryError:
            self._bound.give_back(self.holder, size)
            raise
        self._staged[number] = chunk
        if not number and self._short:
            chunk.buffer[: len(self._short)] = self._short
            self._short, chunk.whole = b"", True
            if self.gaps.are_left:
                self.gaps.add(0)
            return chunk
        origin, stored = self._origin(number)
        if origin != HOLE:
            if self.gaps.are_left and number not in self._stored:
                self.gaps.add(number)
            try:
                if number in self._unnamed:
                    yield from self._name(channel, deadline)
                into, key = memoryview(chunk.buffer)[:stored], chunk_key(origin, number)
                yield from read_chunk(channel, self.volume, key, stored, 0, into, deadline)
            except BaseException:
                # Whatever it was, for instance no memory: bytes that did not come are no zeros.
                self._unstage(number)
                raise
            chunk.whole = True
        return chunk

    def _unstage(self, number: int) -> None:
        chunk = self._staged.pop(number, None)
        if chunk is not None:
            self._bound.give_back(self.holder, len(chunk.buffer))

    def _store_staged(
        self, channel: IoChannel, number: int, chunk: Staged, size: int, deadline: float
    ) -> Steps[None]:
        """Store the first `size` bytes of a staged chunk, and let go of its memory."""
        del self._staged[number]
        self.gaps.stored(number, chunk, size)
        try:
            yield from self._store(channel, number, memoryview(chunk.buffer)[:size], deadline)
        finally:
            self._bound.give_back(self.holder, len(chunk.buffer))

    def _store(self, channel: IoChannel, number: int, data: memoryview, deadline: float) -> Steps[None]:
        """Store a chunk from a buffer that nobody writes to, with the lock let go of meanwhile."""
        busy = self._begin_store(number)
        self._lock.release()
        yield from self._store_begun(channel, number, data, busy, deadline)

    def _begin_store(self, number: int) -> threading.Lock:
        """Begin to store a chunk, with the lock held. From now on others wait for this chunk."""
        busy = self._in_flight[number] = threading.Lock()
        busy.acquire()
        return busy

    def _store_later(self, channel: IoChannel, number: int, data: memoryview, deadline: float) -> bool:
        """Whether the chunk, the last of a request, is stored after the answer: its buffer stays so long."""
        if not (self._after_reply.has_room() and self._after_reply.has_free_worker()):
            return False
        later = ChunkLater(self, channel, number, data, self._begin_store(number), deadline)
        if not (is_later := self._after_reply.put_off(later)):
            self._in_flight.pop(number).release()
        return is_later

    def store_begun(
        self, channel: IoChannel, number: int, data: memoryview, busy: threading.Lock, deadline: float
    ) -> Steps[None]:
        """Store a chunk after the answer. A failure is the file's: later calls hear of it."""
        try:
            yield from self._store_begun(channel, number, data, busy, deadline)
        except BaseException as why:
            # The program believes that the chunk is there: without it there must be no file.
            self._fail(self._failed or errno.EIO)
            if not isinstance(why, FsError):
                raise
        finally:
            self._lock.release()

    def never_stored(self, number: int, busy: threading.Lock) -> None:
        """The worker that had put a chunk off has ended: there is no file to be had from this."""
        self._failed = self._failed or errno.EIO
        self._in_flight.pop(number, None)
        busy.release()

    def _store_begun(
        self, channel: IoChannel, number: int, data: memoryview, busy: threading.Lock, deadline: float
    ) -> Steps[None]:
        """Store a begun chunk. The lock is let go of at first, and held at the end, also after a failure."""
        failure: PutRefused | BadPut | None = None
        origin, writing = HOLE, None
        try:
            for _ in range(PUT_TRIES):
                origin = self._origins.next_of(number)
                try:
                    failure = None
                    writing = yield from self._put_beside(channel, origin, number, data, deadline)
                    break
                except (PutRefused, BadPut) as refused:
                    failure = refused
                    self._discards.add(self.volume, [(origin, number)])  # it may land late
                    if isinstance(refused, BadPut) or refused.cause is None or channel.now() >= deadline:
                        break
        finally:
            yield from self._take_again(channel)
            del self._in_flight[number]
            busy.release()
        if failure is not None:
            error = errno_of(failure) if isinstance(failure, PutRefused) else errno.EIO
            raise self._fail(error, str(failure)) from None
        assert writing is not None
        if self._failed:
            if writing.is_unnamed:
                writing.drop()
            else:
                self._discards.add(self.volume, [(origin, number)])
            self._check()
        self._discard(number)
        self._stored[number] = (origin, len(data))
        before, self._stored_at = self._stored_at, channel.now()
        self._pace = self._stored_at - before
        # One that was given up while the lock was waited for is refused there, and the file with it.
        if not writing.stored:
            yield from self._name_later(channel, number, writing, before, deadline)

    def _discard(self, number: int) -> None:
        """What was stored of a chunk goes."""
        unnamed, stored = self._unnamed.pop(number, None), self._stored.pop(number, None)
        if unnamed is not None:
            unnamed.drop()
        elif stored is not None:
            self._discards.add(self.volume, [(stored[0], number)])

    @property
    def _together_seconds(self) -> float:
        """The longest time between two chunks that are named together."""
        return min(UNNAMED_SECONDS, max(TOGETHER_SECONDS, self.volume.timing.directory_fresh))

    def _name_later(
        self, channel: IoChannel, number: int, writing: Writer, before: float, deadline: float
    ) -> Steps[None]:
        """A chunk is on flash, and is to be named: with those that wait already, where it is time. `before`:
        when one was stored before it."""
        now = self._stored_at
        if not self._unnamed:
            self._unnamed_since = now
            self._stale.add(self)
        self._unnamed[number] = writing
        is_slow = len(self._stored) > 1 and now - min(before, self._unnamed_since) >= self._together_seconds
        are_many = writing.waiting * UNNAMED_PART > self._chunks_max
        if is_slow or are_many or len(self._unnamed) >= UNNAMED_MAX:
            yield from self._name(channel, deadline)

    def _name(self, channel: IoChannel, deadline: float) -> Steps[None]:
        """Name the chunks that wait for it, with the lock held. Raises FsError."""
        if not self._unnamed:
            return
        unnamed, self._unnamed = self._unnamed, {}
        self._stale.discard(self)
        try:
            yield from self.volume.chunks.name_all(channel, list(unnamed.values()), deadline)
        except PutRefused as refused:
            raise self._fail(errno_of(refused), str(refused)) from None

    def name_stale(self, channel: IoChannel) -> Steps[None]:
        """Name what has waited long, for a program that stops amid its file. Its next call hears errors."""
        if channel.now() - self._unnamed_since < UNNAMED_SECONDS:
            return
        deadline = channel.now() + min(self.volume.timing.write_deadline, WAIT_SECONDS)
        yield from self._take(channel, deadline)
        try:
            if not self._unnamed:
                self._stale.discard(self)
            elif channel.now() - self._unnamed_since >= UNNAMED_SECONDS:
                yield from self._name(channel, deadline)
        finally:
            self._lock.release()

    def _put_beside(
        self, channel: IoChannel, origin: bytes, number: int, data: memoryview, deadline: float
    ) -> Steps[Writer]:
        """Store a chunk, and read beside it what the next step needs."""
        # So many are stored, or on their way: its own is one of them.
        is_first = len(self._stored) + len(self._in_flight) <= NAMED_WITH_DATA
        is_slow = max(self._pace, channel.now() - self._stored_at) >= self._together_seconds
        key = chunk_key(origin, number)
        putting = put_chunk(channel, self.volume, key, data, deadline, is_named=is_first or is_slow)
        is_next, self._last = number == self._last + 1, number
        if is_next and not self._origins.were_given(number + 1) and len(data) == self._chunk_bytes:
            next_key = chunk_key(self._origins.identity, number + 1)
            putting = put_before_next(channel, self.volume, putting, next_key, deadline)
        if is_first and self._look is None:
            # The file may end here, so the directories of its name are read.
            looking = self.volume.names.look_ahead(channel, path_key(self.path), deadline)
            writing, self._look = yield from beside(putting, looking)
            return writing
        return (yield from putting)

    def _read_chunk(
        self, channel: IoChannel, number: int, at: int, into: memoryview, deadline: float
    ) -> Steps[None]:
        chunk = self._staged.get(number)
        if chunk is not None:
            into[:] = memoryview(chunk.buffer)[at : at + len(into)]
            return
        origin, size = self._origin(number)
        if not number and self._short:
            size = len(self._short)
        there = max(0, min(len(into), size - at))
        if there and not number and self._short:
            into[:there] = self._short[at : at + there]
        elif there:
            if number in self._unnamed:
                yield from self._name(channel, deadline)
            key = chunk_key(origin, number)
            yield from read_chunk(channel, self.volume, key, size, at, into[:there], deadline)
        if there < len(into):
            into[there:] = bytes(len(into) - there)

    def _cut(self, channel: IoChannel, length: int, deadline: float) -> Steps[None]:
        """What lies beyond `length` goes; what comes to lie there later begins as zeros."""
        chunk_bytes = self._chunk_bytes
        number, rest = divmod(length, chunk_bytes)
        if not number:
            self._short = self._short[:length]
        if rest and (number in self._staged or self._origin(number)[1] > rest):
            chunk = yield from self._stage(channel, number, deadline)
            self.gaps.stored(number, chunk, rest)
            chunk.cut(rest)
        first = number + (1 if rest else 0)
        self.gaps.cut(first)
        for staged in [each for each in self._staged if each >= first]:
            self._unstage(staged)
        for gone in [each for each in self._stored if each >= first]:
            self._discard(gone)
        self._base_chunks = min(self._base_chunks, first)

    # -- the manifest -----------------------------------------------------------------------------------

    def _publish(self, channel: IoChannel, deadline: float) -> Steps[None]:
        """Publish the content, which does not change meanwhile."""
        self._publishing = publishing = threading.Lock()
        publishing.acquire()
        try:
            while self._changing:
                busy = next(iter(self._changing.values()))
                if not (yield from self._wait_for(channel, busy, deadline)):
                    raise FsError(errno.EIO, NO_END)
            self._check()
            yield from self._store_all(channel, deadline)
        finally:
            self._publishing = None
            publishing.release()

    def _store_all(self, channel: IoChannel, deadline: float) -> Steps[None]:
        """Store what is staged, then the manifest, with the lock held."""
        yield from self._until_quiet(channel, deadline)
        if self.unlinked:
            self._discards.add(self.volume, self._new_chunks())
            self._let_go()
            self.changed = False
            return
        content = self._short_content()
        if content is None:
            yield from self._store_rest(channel, deadline)
            yield from self._ask(channel, deadline)
        manifest = self._manifest(content)
        if len(manifest.runs) > self.volume.runs_max:
            raise self._fail(errno.EFBIG, "the file was written over in too many places")
        names, look, self._look, earlier = self.volume.names, self._look, None, self._replaced
        if look is not None:
            # Nothing is read beside it, and other files of these directories do not wait for it.
            yield from self._name(channel, deadline)
        naming = self._name(channel, deadline) if self._unnamed else None
        only_over = self.gaps.only_over(manifest, self._stored, self._over)
        key, raw, began = path_key(self.path), manifest.encode(), channel.now()
        try:
            had_value = yield from names.replace(channel, key, raw, deadline, naming, look, only_over)
        except (PutRefused, BadPut) as refused:
            if self.gaps.is_bare and isinstance(refused, ReplacedMeanwhile):
                self.changed = False  # the file is there, which is all that was asked for
                return
            number = errno_of(refused) if isinstance(refused, PutRefused) else errno.EIO
            raise self._fail(number, str(refused)) from None
        own, is_judged = set(self._new_chunks()), only_over is not None and not self.gaps.is_bare
        if is_judged and not (yield from stays(channel, self.volume, manifest, own, began)):
            raise self._fail(errno.ESTALE, "another host stored the file at the same time")
        # With no value there another agent has renamed it, and its chunks with it.
        gone, self._replaced = self._replaced if had_value else None, manifest
        self.manifest, self.changed, self._over = manifest, False, [manifest.identity]
        self.built_on.go_on(manifest)
        if gone is not None and (gone is earlier or (yield from is_newest(channel, self.volume, manifest))):
            self._discards.replaced(self.volume, gone, manifest)
        self._published(self)

    def _short_content(self) -> bytes | None:
        """The bytes of a file that its manifest has room for."""
        if self.length > self.volume.room or self._stored or any(self._staged) or not self.length:
            return None
        if self._base is not None and self._base_chunks:
            return None
        chunk = self._staged.get(0)
        self.gaps.kept(chunk, self._short, self.length)
        content = self._short if chunk is None else bytes(memoryview(chunk.buffer)[: self.length])
        return content.ljust(self.length, b"\0")

    def _store_rest(self, channel: IoChannel, deadline: float) -> Steps[None]:
        if self._short:
            yield from self._stage(channel, 0, deadline)
        for number in sorted(self._staged):
            size = min(self._chunk_bytes, self.length - number * self._chunk_bytes)
            if size > 0:
                yield from self._store_staged(channel, number, self._staged[number], size, deadline)
            else:
                self._unstage(number)
        # The end moved after the last chunk was stored, or the file was lengthened behind it.
        for number in self._of_wrong_size():
            chunk = yield from self._stage(channel, number, deadline)
            size = min(self._chunk_bytes, self.length - number * self._chunk_bytes)
            yield from self._store_staged(channel, number, chunk, size, deadline)

    def _of_wrong_size(self) -> list[int]:
        chunk_bytes, stored = self._chunk_bytes, self._stored.items()
        last = -(-self.length // chunk_bytes) - 1
        suspects = {last, *(number for number, (_, size) in stored if size != chunk_bytes)}
        if self._base is not None and self._base_chunks:
            suspects.add(self._base_chunks - 1)
        return sorted(number for number in suspects if 0 <= number <= last and self._is_wrong(number))

    def _is_wrong(self, number: int) -> bool:
        origin, size = self._origin(number)
        return origin != HOLE and size != min(self._chunk_bytes, self.length - number * self._chunk_bytes)

    def _ask(self, channel: IoChannel, deadline: float) -> Steps[None]:
        """Ask whether the beginning of a file is still there that is large beside its volume."""
        if len(self._stored) * ASKED_FROM <= self._chunks_max:
            return
        yield from self._name(channel, deadline)
        keys = [chunk_key(origin, number) for number, (origin, _) in self._stored.items()]
        causes = yield from self.volume.chunks.lookup(channel, keys, deadline)
        if (why := why_not_whole(causes)) is not None:
            self._fail(why.errno)
            raise why

    def _manifest(self, content: bytes | None) -> Manifest:
        identity = self._origins.identity
        chunks = range(-(-self.length // self._chunk_bytes))
        runs = runs_of(identity, (self._origin(number)[0] for number in chunks))
        return Manifest(
            Kind.FILE, self.path, self.mode, self.uid, self.gid, self.atime_ns, self.mtime_ns, self.ctime_ns,
            identity, self.length, self._chunk_bytes,
            () if content is not None else tuple(runs), content,
        )  # fmt: skip
