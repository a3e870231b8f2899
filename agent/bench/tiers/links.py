"""Bytes over each link of a way, and processor time of its processes."""

from __future__ import annotations

import operator
from dataclasses import dataclass, fields


@dataclass(frozen=True, slots=True)
class Links:
    """Sums so far. *To* the host, *from* an enclosure and so on are as the agent sees them, and in bytes:
    what requests and answers carry, without the frames round it."""

    to_host: int = 0
    from_host: int = 0
    from_enclosures: int = 0
    to_enclosures: int = 0
    from_local: int = 0
    to_local: int = 0
    from_g4: int = 0
    to_g4: int = 0
    drive_commands: int = 0
    """That the enclosure's drives were given."""

    def since(self, earlier: Links) -> Links:
        return Links(*map(operator.sub, self._counts(), earlier._counts()))

    def bytes_written(self) -> int:
        """To all that stores, to see whether something is on its way. An agent reads its map for ever."""
        return self.to_enclosures + self.to_local + self.to_g4

    def _counts(self) -> tuple[int, ...]:
        return tuple(getattr(self, each.name) for each in fields(self))


@dataclass(frozen=True, slots=True)
class Busy:
    """Processor time of the agent and of the enclosure, and how long that was looked at, in seconds."""

    agent: float = 0.0
    enclosure: float = 0.0
    seconds: float = 0.0

    def __add__(self, other: Busy) -> Busy:
        seconds = self.seconds + other.seconds
        return Busy(self.agent + other.agent, self.enclosure + other.enclosure, seconds)

    def __sub__(self, other: Busy) -> Busy:
        seconds = self.seconds - other.seconds
        return Busy(self.agent - other.agent, self.enclosure - other.enclosure, seconds)

    def beyond(self, idle: Busy) -> Busy:
        """The same without what both take when nobody asks."""
        times = self.seconds / idle.seconds
        agent, enclosure = self.agent - times * idle.agent, self.enclosure - times * idle.enclosure
        return Busy(max(0.0, agent), max(0.0, enclosure), self.seconds)
