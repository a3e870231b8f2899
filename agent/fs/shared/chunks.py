"""Pieces of a file by chunks: ranges, one chunk read whole, one that is filled in memory."""

import errno
from collections.abc import Iterator
from typing import Final

from agent.fs.interface import FsError
from agent.fs.shared.volume import SharedVolume
from agent.pool.steps import IoChannel, Steps


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
        """A range was written. True where that covered the chunk."""
        if self.whole:
            return False
        ranges = []
        for first, last in self.covered:
            if last < begin or first > end:
                ranges.append((first, last))
            else:
                begin, end = min(begin, first), max(end, last)
        ranges.append((begin, end))
        self.covered = sorted(ranges)
        self.whole = self.covered == [(0, len(self.buffer))]
        return self.whole


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
    reading = volume.chunks.reader(key)
    try:
        count = yield from reading.read(channel, at, into, deadline)
        if count != len(into) or reading.length != size:
            cause = "another length" if reading.cause is None else reading.cause.name.lower()
            raise FsError(errno.EIO, f"a chunk of the file is lost: {cause}")
    finally:
        reading.close()


def wall_ns(channel: IoChannel) -> int:
    return int(channel.wall() * 1e9)
