"""What a file of /shared holds while it is written: its lock, and its chunks on their way to flash.

A chunk is in one of these places, and moves from the first three to `stored`:

| place | its bytes |
| --- | --- |
| `_staged` | in memory, some of which nobody has written |
| `_growing` | some units on flash, in a slot without a header (growing_chunk.py) |
| `_in_flight` | in a buffer of their own, or of a door, on their way; others wait for its end |
| `_stored` | on flash; of those in `_unnamed` no directory says so (agent/pool/write/name_together.py) |
| none of them | as the content has them that the file began with, or zeros |

The lock is let go of while a chunk is on its way.
"""

# One idea in one file: where the chunks of one content are, and each step from one place to the next.

import errno
import itertools
import threading
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from typing import Final

from agent.fs.after_reply import AfterReply
from agent.fs.interface import FsError
from agent.fs.shared.chunks import (
    STAGED_CHUNKS_MAX,
    ChunkLater,
    Put,
    Staged,
    chunk_writer,
    put_before_next,
    put_chunk,
    read_chunk,
)
from agent.fs.shared.discards import Discards
from agent.fs.shared.gaps import Gaps
from agent.fs.shared.growing_chunk import GROWING_MAX, GrowingChunk
from agent.fs.shared.manifest import HOLE, Manifest, Origins
from agent.fs.shared.paths import chunk_key, path_key
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
from agent.pool.errors import BadPut, PutRefused
from agent.pool.mutable.look_ahead import Look
from agent.pool.steps import Acquire, IoChannel, Steps, beside
from agent.pool.write.writer_base import Writer

NO_END: Final = "another operation of the file does not come to its end"
KEPT_SECONDS: Final = 1.0
"""Chunks that found no room to be held are tried again after this."""
PUT_TRIES: Final = 3
"""A chunk that an enclosure does not take goes to another place, under another origin."""


class FileContent:
    """The chunks of one file that is written. Safe from any thread."""

    def __init__(
        self,
        volume: SharedVolume,
        path: bytes,
        holder: Holder,
        staged: Bound,
        discards: Discards,
        base: Manifest | None,
        identity: bytes | None,
        unnamed: UnnamedChunks | None,
        after_reply: AfterReply | None,
    ) -> None:
        self.volume: Final = volume
        self._chunk_bytes: Final = volume.chunk_bytes
        self._unit_bytes: Final = volume.chunks.settings.unit_bytes
        self._chunks_max: Final = volume.chunks_max
        self.path = path
        self.holder: Final = holder
        self.gaps = Gaps(base)
        self.manifest: Manifest | None = None
        """The manifest that was published last."""
        self._bound = staged
        self._discards = discards
        self._stale = UnnamedChunks() if unnamed is None else unnamed
        self._after_reply = after_reply or AfterReply(0)
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
        self._growing: dict[int, GrowingChunk] = {}
        """Chunks that are neither staged nor stored: part of them is on flash."""
        self._unnamed: dict[int, Writer] = {}
        """Chunks that are on flash, and that no directory names."""
        self._stored_at = float("-inf")
        """When a chunk was stored last; long ago where none was."""
        self._pace = 0.0
        """Seconds from the last chunk but one to the last."""
        self._unnamed_since = 0.0
        self._look: Look | None = None
        """What the directories of its name said, read beside a chunk."""
        self._held: Final = volume.chunks.new_hold(holder)
        """Chunks that this agent does not evict while the file is written."""
        self._kept: dict[int, bytes] = {}
        """Those chunks, and others that it tried to hold, by their pseudonyms."""
        self._is_crowded = False
        """A chunk is not held, for want of room (agent/pool/mutable/lookup_and_hold.py)."""
        self._kept_at = 0.0
        """When it was tried again to hold such chunks."""
        self._first_at: float | None = None
        """When the first chunk of all was stored."""
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
        self._held.let_go()
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
        for number in self._growing.keys() - self._in_flight.keys():
            self._drop_growing(number)

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

    def _grows(self, channel: IoChannel, number: int, at: int, size: int, deadline: float) -> Steps[bool]:
        """Whether a piece of a chunk goes to flash as it came. A chunk that takes it not grows no more."""
        growing = self._growing.get(number)
        if growing is None:
            may_begin = self._may_grow(number, at, size)
            if may_begin:
                self._growing[number] = GrowingChunk(self.volume)
                self._stale.add(self)
            return may_begin
        if not growing.takes(at, size):
            yield from self._end_growing(channel, number, deadline)
            return False
        return True

    def _may_grow(self, number: int, at: int, size: int) -> bool:
        if not self.volume.timing.directory_fresh:
            # Another agent may name a value in a slot that nobody sees for as long as the program pauses, and
            # the next piece would go over it.
            return False
        unit = self._unit_bytes
        if at % unit or size % unit or number in self._staged or (self._short and not number and at):
            return False
        are_many = self.volume.chunks.waiting * UNNAMED_PART > self._chunks_max
        return len(self._growing) < GROWING_MAX and not are_many

    def _end_growing(
        self, channel: IoChannel, number: int, deadline: float, *, is_end: bool = False
    ) -> Steps[None]:
        """Store a chunk that grows as it is, with older bytes where it lacks some. `is_end`: the file is
        closed."""
        growing = self._growing[number]
        origin, older = self._origin(number)
        if number in self._unnamed and growing.lacks(older):
            yield from self._name(channel, deadline)
        channel.waits_for_slow()
        busy = self._begin_store(number)
        self._lock.release()
        completing = growing.complete(channel, chunk_key(origin, number), older, deadline)
        yield from self._run_store(channel, number, completing, busy, deadline)
        if growing.end < min(self._chunk_bytes, self.length - number * self._chunk_bytes):
            self.gaps.add(number)
        elif is_end and not growing.is_filled:
            self.gaps.filled(number)

    def _drop_growing(self, number: int) -> None:
        growing = self._growing.pop(number, None)
        if growing is not None:
            growing.drop()

    def _write_staged(
        self, channel: IoChannel, number: int, at: int, part: memoryview, deadline: float
    ) -> Steps[None]:
        """Put bytes into a chunk in memory. Once it is covered it is stored."""
        chunk = yield from self._stage(channel, number, deadline)
        chunk.buffer[at : at + len(part)] = part
        if chunk.cover(at, at + len(part)):
            yield from self._store_staged(channel, number, chunk, self._chunk_bytes, deadline)

    def _stage(self, channel: IoChannel, number: int, deadline: float) -> Steps[Staged]:
        """A chunk in memory, with what it holds so far."""
        size = self._chunk_bytes
        while number not in self._staged:
            if number in self._growing:  # begun by another while this one waited
                yield from self._end_growing(channel, number, deadline)
                continue
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
            yield from self._store(channel, number, 0, memoryview(chunk.buffer)[:size], deadline)
        finally:
            self._bound.give_back(self.holder, len(chunk.buffer))

    def _store(
        self, channel: IoChannel, number: int, at: int, data: memoryview, deadline: float
    ) -> Steps[None]:
        """Store a chunk, or a piece of one that grows, from a buffer that nobody writes to, with the lock let
        go of meanwhile."""
        busy = self._begin_store(number)
        self._lock.release()
        yield from self._run_store(
            channel, number, self._put(channel, number, at, data, deadline), busy, deadline
        )

    def _begin_store(self, number: int) -> threading.Lock:
        """Begin to store a chunk, with the lock held. From now on others wait for this chunk."""
        busy = self._in_flight[number] = threading.Lock()
        busy.acquire()
        return busy

    def _store_later(
        self, channel: IoChannel, number: int, at: int, data: memoryview, deadline: float
    ) -> bool:
        """Whether the chunk or piece, the last of a request, is stored after the answer: its buffer stays so
        long."""
        if number in self._growing:
            return False  # the program's next piece is of this chunk, and would wait for it
        if not (self._after_reply.has_room() and self._after_reply.has_free_worker()):
            return False
        later = ChunkLater(self, channel, (number, at), data, self._begin_store(number), deadline)
        if not (is_later := self._after_reply.put_off(later)):
            self._in_flight.pop(number).release()
        return is_later

    def store_begun(
        self,
        channel: IoChannel,
        place: tuple[int, int],
        data: memoryview,
        busy: threading.Lock,
        deadline: float,
    ) -> Steps[None]:
        """Store a chunk after the answer. A failure is the file's: later calls hear of it."""
        number, at = place
        try:
            putting = self._put(channel, number, at, data, deadline)
            yield from self._run_store(channel, number, putting, busy, deadline)
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

    def _run_store(
        self, channel: IoChannel, number: int, putting: Steps[Put], busy: threading.Lock, deadline: float
    ) -> Steps[None]:
        """Store a begun chunk, or a piece of one. The lock is let go of at first, and held at the end, also
        after a failure."""
        failure: PutRefused | BadPut | None = None
        origin, size, writing, is_sound = HOLE, 0, None, False
        try:
            origin, size, writing = yield from putting
            is_sound = True
        except (PutRefused, BadPut) as refused:
            failure = refused
        except FsError:
            is_sound = True  # older bytes did not come; what is on flash of the chunk stays as it is
            raise
        finally:
            yield from self._take_again(channel)
            del self._in_flight[number]
            busy.release()
            growing = self._growing.get(number)
            if growing is not None and not is_sound:
                self._discards.add(self.volume, [(growing.origin, number)])  # it may land late
                self._fail(self._failed or errno.EIO)
        if failure is not None:
            error = errno_of(failure) if isinstance(failure, PutRefused) else errno.EIO
            raise self._fail(error, str(failure)) from None
        if self._failed:
            self._drop_growing(number)
            if writing is not None and writing.is_unnamed:
                writing.drop()
            elif writing is not None:
                self._discards.add(self.volume, [(origin, number)])
            self._check()
        if writing is None:
            return  # more of it is to come
        if growing is not None:
            del self._growing[number]
            if growing.is_filled:
                self.gaps.add(number)
            elif size == self._chunk_bytes:
                self.gaps.filled(number)
        self._discard(number)
        self._stored[number] = (origin, size)
        before, self._stored_at = self._stored_at, channel.now()
        if self._first_at is None:
            self._first_at = self._stored_at
        self._pace = self._stored_at - before
        # One that was given up while the lock was waited for is refused there, and the file with it.
        if writing.stored:
            self._keep(channel, [number])
        else:
            yield from self._name_later(channel, number, writing, before, deadline)

    def _keep(self, channel: IoChannel, numbers: Iterable[int]) -> None:
        """Hold chunks that are named from now on, so that the file does not lose them to others: until they
        are written again or cut, nobody has the file open, or it fails. Before, their slots are its own."""
        chunks, names = self.volume.chunks, []
        for number in numbers:
            self._leave(number)
            stored = self._stored.get(number)
            if stored is not None:
                name = self._kept[number] = chunks.pseudonym(chunk_key(stored[0], number))
                names.append(name)
        if names and not chunks.keep(channel, names, self._held):
            self._is_crowded = True

    def _keep_rest(self, channel: IoChannel) -> None:
        """Try again to hold what found no room, where that was long ago: others let go."""
        if not self._is_crowded or channel.now() - self._kept_at < KEPT_SECONDS:
            return
        self._kept_at = channel.now()
        names = [each for each in self._kept.values() if each not in self._held.pseudonyms]
        self.volume.chunks.keep(channel, names, self._held)
        self._is_crowded = self._held.kept < len(self._kept)

    def _leave(self, number: int) -> None:
        name = self._kept.pop(number, None)
        if name is not None:
            self._held.leave(name)

    def _discard(self, number: int) -> None:
        """What was stored of a chunk goes."""
        self._leave(number)
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
        channel.waits_for_slow()
        unnamed, self._unnamed = self._unnamed, {}
        if not self._growing:
            self._stale.discard(self)
        try:
            yield from self.volume.chunks.name_all(channel, list(unnamed.values()), deadline)
        except PutRefused as refused:
            raise self._fail(errno_of(refused), str(refused)) from None
        self._keep(channel, unnamed)

    def name_stale(self, channel: IoChannel) -> Steps[None]:
        """Name what has waited long, for a program that stops amid its file. Its next call hears errors."""
        if not self._is_stale(channel):
            return
        deadline = channel.now() + min(self.volume.timing.write_deadline, WAIT_SECONDS)
        yield from self._take(channel, deadline)
        try:
            now = channel.now()
            idle = [number for number, growing in self._growing.items() if growing.is_idle(now)]
            for number in idle:
                if number in self._growing and number not in self._in_flight:
                    until = channel.now() + self.volume.timing.write_deadline
                    yield from self._end_growing(channel, number, until)
            if not (self._unnamed or self._growing):
                self._stale.discard(self)
            elif channel.now() - self._unnamed_since >= UNNAMED_SECONDS:
                yield from self._name(channel, deadline)
        finally:
            self._lock.release()

    def _is_stale(self, channel: IoChannel) -> bool:
        now = channel.now()
        if any(growing.is_idle(now) for growing in list(self._growing.values())):
            return True
        return now - self._unnamed_since >= UNNAMED_SECONDS and not (self._growing and not self._unnamed)

    def _put(self, channel: IoChannel, number: int, at: int, data: memoryview, deadline: float) -> Steps[Put]:
        """Store a chunk, or send a piece of one that grows."""
        growing, size = self._growing.get(number), len(data)
        if growing is not None and growing.writing is not None:
            channel.waits_for_slow()
            adding = growing.add(channel, at, data, deadline)
            return (yield from self._beside(channel, number, at + size, adding, False, deadline))
        # So many are stored, or on their way: its own is one of them.
        under_way = len(self._in_flight.keys() | self._growing.keys())
        is_first = len(self._stored) + under_way <= NAMED_WITH_DATA
        is_slow = max(self._pace, channel.now() - self._stored_at) >= self._together_seconds
        tries = PUT_TRIES
        while True:
            origin, tries = self._origins.next_of(number), tries - 1
            length = None if growing is not None else size
            writing = chunk_writer(
                self.volume, chunk_key(origin, number), length, is_named=is_first or is_slow
            )
            if growing is not None:
                growing.begin(origin, writing)
                putting = growing.add(channel, at, data, deadline)
            else:
                putting = put_chunk(channel, writing, origin, data, deadline)
            try:
                return (yield from self._beside(channel, number, at + size, putting, is_first, deadline))
            except (PutRefused, BadPut) as refused:
                self._discards.add(self.volume, [(origin, number)])  # it may land late
                is_over = not tries or channel.now() >= deadline
                if is_over or isinstance(refused, BadPut) or refused.cause is None:
                    raise
                channel.waits_for_slow()  # both places of a chunk may be slow: then one is waited for

    def _beside(
        self, channel: IoChannel, number: int, end: int, putting: Steps[Put], is_first: bool, deadline: float
    ) -> Steps[Put]:
        """Put bytes of a chunk up to `end`, and read beside it what the next step needs."""
        if end == self._chunk_bytes:
            is_next, self._last = number == self._last + 1, number
            if is_next and not self._origins.were_given(number + 1):
                next_key = chunk_key(self._origins.identity, number + 1)
                putting = put_before_next(channel, self.volume, putting, next_key, deadline)
        if is_first and self._look is None:
            # The file may end here, so the directories of its name are read.
            looking = self.volume.names.look_ahead(channel, path_key(self.path), deadline)
            put, self._look = yield from beside(putting, looking)
            return put
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
        while rest and number in self._growing:
            yield from self._end_growing(channel, number, deadline)
            yield from self._until_quiet(channel, deadline)  # others wrote meanwhile
        for gone in [each for each in self._growing if each >= number]:
            self._drop_growing(gone)
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
        for gone in [each for each in self._stored.keys() | self._kept.keys() if each >= first]:
            self._discard(gone)
        self._base_chunks = min(self._base_chunks, first)
