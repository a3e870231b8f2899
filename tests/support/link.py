"""An in-memory link between two protocol objects without I/O: a TCP connection made of nothing.

Each end is wrapped in an `End`, which hides that host and controller name their calls differently. The link
moves bytes in chunks of a chosen size (1: one byte at a time), or of seeded random sizes, in both directions
in turn; it can cut the connection after so many bytes, and spoil a byte on its way.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Protocol

from nvmeof.tcp.crc32c import Buffer


class End(Protocol):
    """One end of the link."""

    @property
    def over(self) -> bool:
        """It wants no more bytes and sends none."""

    def outgoing(self) -> Sequence[Buffer]:
        """What it wants to send."""

    def sent(self, count: int) -> None:
        """So many bytes of it have gone."""

    def next_buffer(self) -> memoryview:
        """Where the next bytes for it go."""

    def received(self, count: int) -> None:
        """So many bytes are there."""

    def closed(self) -> None:
        """The other end has gone, and everything it sent has arrived."""


class _Way:
    """One direction."""

    def __init__(self) -> None:
        self.moved = 0
        self.cut_after: int | None = None
        self.spoil_at: int | None = None


class Link:
    """Between `first` and `second`; moves `chunk` bytes at a time, or 1 to `chunk` where there are `dice`."""

    def __init__(
        self, first: End, second: End, *, chunk: int = 1 << 16, dice: random.Random | None = None
    ) -> None:
        self.ends = (first, second)
        self.ways = (_Way(), _Way())
        """Bytes from the first end, bytes from the second."""
        self.broken = False
        self._chunk = chunk
        self._dice = dice

    def cut(self) -> None:
        """End the connection at once, for both."""
        if not self.broken:
            self.broken = True
            for end in self.ends:
                end.closed()

    def step(self) -> bool:
        """Move one chunk in each direction; False if there was nothing to move."""
        moved = False
        for index, way in enumerate(self.ways):
            if self.broken:
                return moved
            moved |= self._move(way, self.ends[index], self.ends[1 - index])
        return moved

    def run(self, until: Callable[[], object] | None = None, *, most_steps: int = 10_000_000) -> None:
        """Move bytes until the condition holds, or there is nothing left to move."""
        for _ in range(most_steps):
            if until is not None and until():
                return
            if not self.step():
                return
        raise AssertionError("the link does not come to rest")

    def _move(self, way: _Way, source: End, sink: End) -> bool:
        size = self._chunk if self._dice is None else self._dice.randint(1, self._chunk)
        parts = [part for part in source.outgoing() if len(part)]
        if not parts:
            if source.over:
                self.cut()
            return False
        data = bytearray(memoryview(parts[0])[:size])
        for part in parts[1:]:
            if len(data) >= size:
                break
            data += memoryview(part)[: size - len(data)]
        if way.cut_after is not None:
            del data[max(way.cut_after - way.moved, 0) :]
        if way.spoil_at is not None and 0 <= way.spoil_at - way.moved < len(data):
            data[way.spoil_at - way.moved] ^= 0x40
        source.sent(len(data))
        way.moved += len(data)
        rest = memoryview(data)
        while rest and not sink.over:
            buffer = sink.next_buffer()
            count = min(len(buffer), len(rest))
            buffer[:count] = rest[:count]
            sink.received(count)
            rest = rest[count:]
        if way.cut_after is not None and way.moved >= way.cut_after:
            self.cut()
        return True
