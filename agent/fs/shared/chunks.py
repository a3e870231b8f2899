"""Pieces of a file by chunks: ranges, one chunk read whole, one that is filled in memory."""

import errno
import threading
from collections.abc import Iterator
from typing import Final, Protocol

from agent.fs.interface import FsError
from agent.fs.shared.volume import SharedVolume
from agent.host_os.per_user_bounds import SHARED, Limit
from agent.pool.counters import MissCause
from agent.pool.errors import PutRefused
from agent.pool.steps import IoChannel, Steps, beside
from agent.pool.write.writer_base import Writer

STAGED: Final = Limit(
    "shared-staged-bytes", "bytes of chunks of /shared that are written in part", 512 << 20,
    by="user, guest", share=SHARED, refused="the file's oldest chunk is stored early; ENOMEM", bytes_each=0,
)  # fmt: skip
PIECE_BYTES: Final = 1 << 20
"""A channel has buffers for little more. It is a whole number of units of any volume."""
STAGED_CHUNKS_MAX: Final = 16
"""The chunks of one file that may be filled at the same time. Beyond that the oldest is stored as it is."""


class Staged:
    """One chunk in memory."""

    __slots__ = ("buffer", "covered", "whole")

    def __init__(self, size: int) -> None:
        self.buffer: Final = bytearray(size)
        self.covered: list[tuple[int, int]] = []
        """The ranges that were written, in order."""
        self.whole = False
        """Every byte is known: it was stored before, or it was covered."""

    def cover(self, begin: int, end: int) -> bool:
        """A range was written. True where that covered a chunk of which bytes were unknown."""
        ranges = []
        for first, last in self.covered:
            if last < begin or first > end:
                ranges.append((first, last))
            else:
                begin, end = min(begin, first), max(end, last)
        ranges.append((begin, end))
        self.covered = sorted(ranges)
        if self.whole:
            return False
        self.whole = self.covered == [(0, len(self.buffer))]
        return self.whole

    def cut(self, size: int) -> None:
        """What lies beyond the first bytes, so many, goes; zeros come to lie there."""
        self.buffer[size:] = bytes(len(self.buffer) - size)
        self.covered = [(first, min(last, size)) for first, last in self.covered if first < size]
        self.whole = True

    def covers(self, size: int) -> bool:
        """Whether the first bytes, so many, were all written since the chunk is in memory."""
        return bool(self.covered) and self.covered[0][0] == 0 and self.covered[0][1] >= size


class StoresLater(Protocol):
    """The file of a chunk that is stored after the answer to its writer."""

    def store_begun(
        self,
        channel: IoChannel,
        place: tuple[int, int],
        data: memoryview,
        busy: threading.Lock,
        deadline: float,
    ) -> Steps[None]:
        """Store it. Raises nothing of its own: later calls hear of a failure."""

    def never_stored(self, number: int, busy: threading.Lock) -> None:
        """Note that the chunk is not stored, nor ever will be."""


class ChunkLater:
    """A chunk that is stored after the answer to its writer (agent/fs/after_reply.py)."""

    def __init__(
        self,
        writer: StoresLater,
        channel: IoChannel,
        place: tuple[int, int],
        data: memoryview,
        busy: threading.Lock,
        deadline: float,
    ) -> None:
        """`place`: the number of the chunk, and where in it the bytes begin."""
        self._writer: Final = writer
        self._channel: Final = channel
        self._place: Final = place
        self._data: Final = data
        self._busy: Final = busy
        self._deadline: Final = deadline
        self._has_begun = False

    def steps(self) -> Steps[None]:
        self._has_begun = True
        yield from self._writer.store_begun(
            self._channel, self._place, self._data, self._busy, self._deadline
        )

    def end(self) -> None:
        if not self._has_begun:
            self._has_begun = True
            self._writer.never_stored(self._place[0], self._busy)


def pieces(offset: int, data: memoryview, chunk_bytes: int) -> Iterator[tuple[int, int, memoryview]]:
    """A range of a file by chunks: the number of each, where in it the range begins, and that part of
    `data`."""
    at = 0
    while at < len(data):
        number, within = divmod(offset + at, chunk_bytes)
        size = min(chunk_bytes - within, len(data) - at)
        yield number, within, data[at : at + size]
        at += size


def read_chunk(
    channel: IoChannel,
    volume: SharedVolume,
    key: bytes,
    size: int,
    at: int,
    into: memoryview,
    deadline: float,
) -> Steps[None]:
    """Fill `into` from `at` of a chunk of `size` bytes. Raises FsError: never fewer bytes, never others."""
    channel.has_patience()
    reading = volume.chunks.reader(key)
    try:
        for done in range(0, len(into), PIECE_BYTES):
            piece = into[done : done + PIECE_BYTES]
            count = yield from reading.read(channel, at + done, piece, deadline)
            if count != len(piece) or reading.length != size:
                cause = "another length" if reading.cause is None else reading.cause.name.lower()
                raise FsError(errno.EIO, f"a chunk of the file is lost: {cause}")
    finally:
        reading.close()


Put = tuple[bytes, int, Writer | None]
"""Origin and length of a chunk that was stored, and its writer; None in place of that: more is to come."""


def chunk_writer(volume: SharedVolume, key: bytes, length: int | None, *, is_named: bool) -> Writer:
    """For one chunk. `is_named`: the write of its directory goes beside its last byte."""
    return (volume.chunks.writer if is_named else volume.chunks.unnamed_writer)(key, length=length)


def was_kept(writing: Writer) -> Writer:
    """The writer of a value that came whole. Raises PutRefused where it is not on flash."""
    if not (writing.stored or writing.is_unnamed):
        # The key is random, so another's value lies there; or a policy keeps nothing of a first write.
        raise PutRefused("the volume did not keep a chunk", MissCause.CORRUPT)
    return writing


def put_chunk(
    channel: IoChannel, writing: Writer, origin: bytes, data: memoryview, deadline: float
) -> Steps[Put]:
    """Store a chunk that is in memory. Raises PutRefused and BadPut."""
    size = len(data)
    if size <= PIECE_BYTES:
        yield from writing.write(channel, 0, data, deadline)
    else:
        for at in range(0, size, PIECE_BYTES):
            yield from writing.write(channel, at, data[at : at + PIECE_BYTES], deadline)
    return origin, size, was_kept(writing)


def put_before_next(
    channel: IoChannel, volume: SharedVolume, putting: Steps[Put], key: bytes, deadline: float
) -> Steps[Put]:
    """Store a chunk, and read the directories of the next one, `key`, beside it where they are not known."""
    if volume.chunks.knows(channel, key):
        return (yield from putting)
    put, _ = yield from beside(putting, volume.chunks.lookup(channel, [key], deadline))
    return put


def wall_ns(channel: IoChannel) -> int:
    return int(channel.wall() * 1e9)
