"""A path that damages what it brings: bits flipped in what reads return, while flash keeps every byte."""

from __future__ import annotations

import random

from tests.support.pool.memory_channel import MemoryChannel, MemoryPending


class ReadFlips:
    """Over the reads of a channel, from here on. Nothing is damaged until `share` is set."""

    def __init__(self, channel: MemoryChannel, seed: object) -> None:
        self.share = 0.0
        """Of the reads."""
        self.namespaces: set[int] | None = None
        """Where; None: everywhere."""
        self.bits = 1
        self.flipped = 0
        self._chance = random.Random(f"flips {seed}")
        self._read = channel.read
        channel.read = self._damaging  # type: ignore[method-assign]

    def _damaging(
        self, namespace: int, offset: int, into: memoryview, *, more: bool = False
    ) -> MemoryPending:
        pending = self._read(namespace, offset, into)
        here = self.namespaces is None or namespace in self.namespaces
        if here and pending.done and pending.fault is None and self._chance.random() < self.share:
            self.flipped += 1
            for _ in range(self.bits):
                into[self._chance.randrange(len(into))] ^= 1 << self._chance.randrange(8)
        return pending
