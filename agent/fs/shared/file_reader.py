"""A file of /shared that is open for reading: its chunks are held, and each read gives all it was asked for.

A chunk that is lost all the same (its enclosure went, another agent evicted it) is EIO, never zeros and never
a shorter file.
"""

import errno
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import Final

from agent.fs.interface import FsError
from agent.fs.shared.chunks import pieces
from agent.fs.shared.manifest import HOLE, Manifest
from agent.fs.shared.paths import chunk_key
from agent.fs.shared.volume import HELD_AT_ONCE, Hold, Reader, SharedVolume
from agent.host_os.per_user_bounds import Holder
from agent.pool.counters import MissCause
from agent.pool.read.prestage_cache import PrestageCache
from agent.pool.steps import IoChannel, Steps

READERS_MAX: Final = 4
"""Chunks of one open file whose readers are kept: a program reads on in one, or in a few at once."""
AHEAD: Final = 4
"""Chunks that are prestaged before the one that is read, at the most."""
AHEAD_BYTES: Final = 8 << 20
"""Of longer chunks fewer are prestaged, and one at the least."""
ASKED_AT_ONCE_BYTES: Final = 2 << 20
"""The longest file that the kernel asks for at once, 1 MiB with each request. Four requests were too many:
twenty programs that read such files filled the kernel's queue (64 requests), and others waited three to five
times as long."""


class ReadsUnderWay:
    """How many reads of chunks a door has under way. Nothing is prestaged where it is more than one: readers
    beside each other keep the queues busy, and prestaging would only take their processors."""

    def __init__(self) -> None:
        self.count = 0
        self._lock = threading.Lock()

    def __enter__(self) -> None:
        with self._lock:
            self.count += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self.count -= 1


Prestage = Callable[[SharedVolume, bytes], object]
"""Set out to bring a chunk into memory, by its key."""


def asks_in_turn(manifest: Manifest, flags: int) -> bool:
    """Whether the kernel is to ask for one piece after the other of a file that is opened with O_DIRECT.

    Else it asks for all of a read at once, so a short file comes in one round trip. Of a long one that would
    be so many requests that those of other programs wait behind them (64 chunks: 75 ms in place of 22).
    """
    return bool(flags & os.O_DIRECT) and manifest.length > ASKED_AT_ONCE_BYTES


def hold_all(
    channel: IoChannel, volume: SharedVolume, keys: Sequence[bytes], holder: Holder
) -> Steps[list[Hold] | MissCause]:
    """All these chunks are there and stay; or why one is not."""
    deadline = channel.now() + volume.timing.write_deadline
    holds: list[Hold] = []
    for at in range(0, len(keys), HELD_AT_ONCE):
        held = yield from volume.chunks.hold(channel, keys[at : at + HELD_AT_ONCE], deadline, holder)
        if isinstance(held, MissCause):
            for each in holds:
                each.let_go()
            return held
        holds.append(held)
    return holds


def let_go(holds: Iterable[Hold]) -> None:
    for each in holds:
        each.let_go()


class _ChunkReader:
    """The reader of one chunk, and how many reads use it just now: the last of them closes it."""

    __slots__ = ("dropped", "reading", "users")

    def __init__(self, reading: Reader) -> None:
        self.reading: Final = reading
        self.users = 0
        self.dropped = False


class OpenFile:
    """One open of a file. Safe from any thread."""

    def __init__(
        self,
        volume: SharedVolume,
        manifest: Manifest,
        holds: Sequence[Hold],
        prestage: PrestageCache | None = None,
        ahead: Prestage | None = None,
        under_way: ReadsUnderWay | None = None,
    ) -> None:
        self.volume: Final = volume
        self.manifest: Final = manifest
        self._holds = holds
        self._prestage = prestage
        self._ahead = ahead
        self._under_way = under_way or ReadsUnderWay()
        self._ahead_chunks = max(1, min(AHEAD, AHEAD_BYTES // max(1, manifest.chunk_bytes)))
        self._next = 0
        """The chunk that a program reads next which reads the file from its beginning; -1: it does not."""
        self._readers: OrderedDict[int, _ChunkReader] = OrderedDict()
        self._lock = threading.Lock()

    def read(self, channel: IoChannel, offset: int, into: memoryview) -> Steps[int]:
        """Fill `into` from `offset`; fewer bytes are the end of the file. Raises FsError."""
        manifest = self.manifest
        size = min(len(into), manifest.length - offset)
        if size <= 0:
            return 0
        if manifest.content is not None:
            into[:size] = manifest.content[offset : offset + size]
            return size
        # A program that maps the file gets SIGBUS for what does not come.
        channel.has_patience()
        deadline = channel.now() + self.volume.timing.write_deadline
        chunk_bytes = manifest.chunk_bytes
        number, at = divmod(offset, chunk_bytes)
        with self._under_way:
            if self._ahead is not None and self._under_way.count == 1:
                self._look_ahead(number, at)
            if at + size <= chunk_bytes:
                part = into if size == len(into) else into[:size]
                yield from self._read(channel, number, at, part, deadline)
                return size
            for number, at, part in pieces(offset, into[:size], chunk_bytes):
                yield from self._read(channel, number, at, part, deadline)
            return size

    def _read(
        self, channel: IoChannel, number: int, at: int, into: memoryview, deadline: float
    ) -> Steps[None]:
        origin = self.manifest.origin(number)
        if origin == HOLE:
            into[:] = bytes(len(into))
            return
        chunk = self._borrow(number, origin)
        reading, size, is_over = chunk.reading, self.manifest.chunk_length(number), True
        try:
            count = yield from reading.read(channel, at, into, deadline)
            if count == len(into) and reading.length == size:
                # What is proven stays so, also where another worker's read of the chunk came late meanwhile.
                is_over = at + count == size or reading.cause is not None
                return
            if reading.cause is None:
                reading.give_up(channel, MissCause.CORRUPT)
            why = "another length" if reading.cause is None else reading.cause.name.lower()
            raise FsError(errno.EIO, f"a chunk of the file is lost: {why}")
        finally:
            self._give_back(number, chunk, is_over)

    def _borrow(self, number: int, origin: bytes) -> _ChunkReader:
        with self._lock:
            chunk = self._readers.get(number)
            # Another worker begins to read it, perhaps for long: a header costs less than to wait for that.
            is_own = chunk is not None and bool(chunk.users) and chunk.reading.length is None
            if chunk is None or is_own:
                key = chunk_key(origin, number)
                chunk = _ChunkReader(self.volume.chunks.reader(key, self._prestage))
                chunk.dropped = is_own
            if not is_own:
                self._readers[number] = chunk
                while len(self._readers) > READERS_MAX:
                    self._drop(next(iter(self._readers)))
            chunk.users += 1
            return chunk

    def _give_back(self, number: int, chunk: _ChunkReader, is_over: bool) -> None:
        """`is_over`: the end of the chunk was read, or it is lost."""
        with self._lock:
            chunk.users -= 1
            if is_over and self._readers.get(number) is chunk:
                self._drop(number)
            elif chunk.dropped and not chunk.users:
                chunk.reading.close()

    def _drop(self, number: int) -> None:
        """Drop the reader of a chunk. Called with the lock held."""
        chunk = self._readers.pop(number)
        chunk.dropped = True
        if not chunk.users:
            chunk.reading.close()

    def _look_ahead(self, number: int, at: int) -> None:
        """Have the next chunks brought, for a program that reads from the beginning."""
        if at or number != self._next or self._ahead is None:
            return
        ahead = self._ahead_chunks
        first = number + 1 if not number else number + ahead
        for each in range(first, min(number + ahead + 1, self.manifest.chunks)):
            origin = self.manifest.origin(each)
            if origin != HOLE:
                self._ahead(self.volume, chunk_key(origin, each))
        self._next = number + 1

    def close(self) -> None:
        with self._lock:
            for number in list(self._readers):
                self._drop(number)
            holds, self._holds = self._holds, ()
        for hold in holds:
            hold.let_go()
