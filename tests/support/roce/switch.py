"""A switch between the stations of a network in memory: an output queue for each station, which marks (ECN).

    network = MemoryNetwork(weather, chance, switch=Switch(rate=1.25e9))

Each station has a link of `rate` from the switch, and the packets for it wait there in one queue. A packet
that finds a long queue is marked: never below `mark_from` bytes, always from `mark_all` on, and in between
with a chance that rises to `mark_part` (RED, as Zhu et al., SIGCOMM 2015, have it). A packet that finds no
room is dropped. Sizes are those of UDP payloads; headers below are not counted. No I/O, no clock.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field


@dataclass(slots=True)
class Switch:
    """See the top of this file. Rates in bytes a second, sizes in bytes."""

    rate: float
    mark_from: int = 5_000
    mark_all: int = 200_000
    mark_part: float = 0.01
    room: int = 1 << 30
    """Of each queue."""
    chance: random.Random = field(default_factory=lambda: random.Random(0))
    marked: int = 0
    dropped: int = 0
    longest: int = 0
    """The longest queue that a packet found, in bytes."""
    carried: dict[str, int] = field(default_factory=dict)
    """Bytes by station."""
    _free_at: dict[str, float] = field(default_factory=dict)

    def carry(self, destination: str, size: int, now: float) -> tuple[float, bool] | None:
        """When a packet that comes now has left the switch, and whether it is marked; None: dropped. The
        caller calls in the order of time."""
        free_at = max(self._free_at.get(destination, 0.0), now)
        queue = round((free_at - now) * self.rate)
        if queue + size > self.room:
            self.dropped += 1
            return None
        self.longest = max(self.longest, queue)
        marked = self._marks(queue)
        self.marked += marked
        self.carried[destination] = self.carried.get(destination, 0) + size
        self._free_at[destination] = free_at + size / self.rate
        return self._free_at[destination], marked

    def _marks(self, queue: int) -> bool:
        if queue <= self.mark_from:
            return False
        if queue >= self.mark_all:
            return True
        part = self.mark_part * (queue - self.mark_from) / (self.mark_all - self.mark_from)
        return self.chance.random() < part
