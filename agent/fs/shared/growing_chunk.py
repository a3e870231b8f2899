"""A chunk that grows on flash: its pieces are sealed and sent as they come, and none of them waits in memory.

A chunk may be longer than the longest write of the kernel (1 MiB). Then whole units of it go to its slot in
any order, and the end of a file behind them. The chunk is there once its header is, and named as any other.

The key of a slot seals each unit once. So bytes that are here already are never written over: the chunk is
ended as it is, and what changes it is put together in memory and stored under another origin, in another slot
(file_writer.py). Where units are missing, or an older chunk is longer, the older bytes are sealed in between.
"""

from typing import Final

from agent.fs.shared.chunks import Put, read_chunk, was_kept
from agent.fs.shared.unnamed import UNNAMED_SECONDS
from agent.fs.shared.volume import SharedVolume
from agent.pool.counters import MissCause
from agent.pool.errors import PutRefused
from agent.pool.steps import IoChannel, Steps
from agent.pool.write.writer_base import FORGETFUL, Writer

GROWING_MAX: Final = 16
"""Chunks of one file that grow at the same time. Each has a slot that nothing evicts."""
GROWS_SECONDS: Final = 10.0
"""A chunk that got no piece for so long is ended as it is (unnamed.py). Its slot may go to another put after
30 s."""


class GrowingChunk:
    """One chunk of a file. Only one operation at a time works on it: file_writer.py sees to that."""

    __slots__ = ("_sent", "_unit_bytes", "_volume", "end", "is_filled", "last_at", "origin", "writing")

    def __init__(self, volume: SharedVolume) -> None:
        self._volume: Final = volume
        self._unit_bytes: Final = volume.chunks.settings.unit_bytes
        self._sent = 0
        """The whole units that were sent, a bit for each."""
        self.end = 0
        """One past the last byte that came."""
        self.origin = b""
        self.writing: Writer | None = None
        """None before the first piece."""
        self.is_filled = False
        """It has bytes that the writers of its file did not write."""
        self.last_at = 0.0
        """When a piece came last."""

    def is_idle(self, now: float) -> bool:
        """Whether it got no piece for long. A part of a unit waits in memory that others may want soon."""
        return now - self.last_at >= (UNNAMED_SECONDS if self.end % self._unit_bytes else GROWS_SECONDS)

    def takes(self, at: int, size: int) -> bool:
        """Whether a piece may be sent: whole units that were not, or what comes right behind all others."""
        unit = self._unit_bytes
        if at == self.end and self._sent + 1 == 1 << (at // unit):
            return True
        if at % unit or size % unit or self.end % unit:
            return False
        return not self._sent & _units(at // unit, size // unit)

    def begin(self, origin: bytes, writing: Writer) -> None:
        """Its pieces go to another slot from now on; none is there yet."""
        self.origin, self.writing = origin, writing

    def write(self, channel: IoChannel, at: int, data: memoryview, deadline: float) -> Steps[None]:
        """Seal and send a piece. Raises PutRefused and BadPut; after that only `drop` is left."""
        writing, unit, end = self.writing, self._unit_bytes, at + len(data)
        assert writing is not None
        yield from writing.write(channel, at, data, deadline)
        if writing.state in FORGETFUL:
            # As in chunks.py: the key is random, so another's value lies there; or a policy keeps nothing.
            raise PutRefused("the volume did not keep a chunk", MissCause.CORRUPT)
        self._sent |= _units(at // unit, end // unit - at // unit)
        self.end = max(self.end, end)
        self.last_at = channel.now()

    def has_all(self, size: int) -> bool:
        """Whether all of the first bytes came, so many, and no more."""
        return self.end == size and self._sent + 1 == 1 << (size // self._unit_bytes)

    def lacks(self, older: int) -> bool:
        """Whether bytes of an older chunk, so long, or zeros belong between its pieces or behind them."""
        return self.end < older or not self.has_all(self.end)

    def fill(self, channel: IoChannel, key: bytes, older: int, deadline: float) -> Steps[None]:
        """Seal what it lacks: bytes of the chunk `key`, which is `older` bytes long, and zeros. Raises
        FsError where they do not come, and PutRefused."""
        unit, size, at = self._unit_bytes, max(self.end, older), 0
        buffer = memoryview(bytearray(min(unit, size)))
        while at < size:
            if self._sent >> (at // unit) & 1:
                at += unit
                continue
            if at < self.end < at + unit:
                at = self.end  # a part of its last unit is there
            part = buffer[: min(unit - at % unit, size - at)]
            old = max(0, min(len(part), older - at))
            if old:
                yield from read_chunk(channel, self._volume, key, older, at, part[:old], deadline)
            part[old:] = bytes(len(part) - old)
            self.is_filled = True
            yield from self.write(channel, at, part, deadline)
            at += len(part)

    def add(self, channel: IoChannel, at: int, data: memoryview, deadline: float) -> Steps[Put]:
        """Seal and send a piece. The last one of a full chunk completes it."""
        writing, unit, size, end = self.writing, self._unit_bytes, self._volume.chunk_bytes, at + len(data)
        assert writing is not None
        units = self._sent | _units(at // unit, end // unit - at // unit)
        if units + 1 == 1 << size // unit and max(self.end, end) == size:
            yield from writing.finish_with(channel, at, data, deadline)
            self._sent, self.end = units, size
            return self.origin, size, was_kept(writing)
        yield from self.write(channel, at, data, deadline)
        return self.origin, self.end, None

    def complete(self, channel: IoChannel, key: bytes, older: int, deadline: float) -> Steps[Put]:
        """Store it as it is, over an older chunk: its key and length. Raises as `fill` does."""
        if self.lacks(older):
            yield from self.fill(channel, key, older, deadline)
        return (yield from self._finish(channel, deadline))

    def _finish(self, channel: IoChannel, deadline: float) -> Steps[Put]:
        writing = self.writing
        assert writing is not None
        yield from writing.finish(channel, deadline)
        return self.origin, self.end, was_kept(writing)

    def drop(self) -> None:
        """Give its slot back."""
        if self.writing is not None:
            self.writing.drop()


def _units(first: int, count: int) -> int:
    """A bit for each of these units."""
    return ((1 << count) - 1) << first
