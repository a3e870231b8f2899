"""Links with a rate and a latency, without I/O: what carries the bytes of a simulated pod.

Two disciplines, by what they stand for:

* `QueueLink` serves one transfer after another, in the order in which they came: a drive.
* `SharedLink` gives each of n transfers an nth of its rate (processor sharing): a NIC, PCIe, shared storage.

Both are exact: a queue with Poisson arrivals of equal sizes waits as M/D/1 does, and a shared one takes
size / rate / (1 - load) (tests/unit/agent/sim/test_links.py). Seconds, bytes, bytes a second.

A transfer that crosses several links is in all of them at once, cut through, and ends when the last of them
has carried it. So no link ever carries more than its rate. A transfer that waits for a slow link leaves a
fast one early: the fast link looks a little less busy than it would be.
"""

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

INFINITY: Final = float("inf")


@dataclass(slots=True)
class QueueLink:
    """One transfer at a time, first come, first served. `began`: bytes, for the books."""

    rate: float
    latency: float = 0.0
    free_at: float = 0.0
    began: int = 0
    slower: float = 1.0
    """How many times longer everything takes, while it is ill."""

    def begin(self, now: float, size: int) -> float:
        """When a transfer that comes now will have been carried."""
        takes = size * self.slower / self.rate
        free_at = self.free_at
        self.free_at = free_at = (now if now > free_at else free_at) + takes
        self.began += size
        return free_at + self.latency * self.slower


@dataclass(slots=True)
class SharedLink:
    """All transfers at once, each at its share of the rate.

    `_served` is what one transfer would have been given so far, had it been there from the start: a transfer
    of `size` bytes ends when that has grown by `size`, however many others there are.
    """

    rate: float
    carried: int = 0
    parts: tuple[float, ...] = ()
    """What part of the rate one, two, three transfers use together, and more than there are here as the last;
    empty: all of it. `waits`: how long a packet waits behind so many, in seconds."""
    waits: tuple[float, ...] = ()
    most: int = 0
    """Transfers that were under way at once."""
    planned_at: float = INFINITY
    """The event that its owner has planned for the next end."""
    _served: float = 0.0
    _since: float = 0.0
    _number: int = 0
    _under_way: list[tuple[float, int, int, Callable[[], None]]] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self._under_way)

    def begin(self, now: float, size: int, ended: Callable[[], None]) -> None:
        """A transfer comes; `ended` is called by `end_due` when its bytes have been carried."""
        self._pass_time(now)
        self._number += 1
        heapq.heappush(self._under_way, (self._served + size, self._number, size, ended))
        if len(self._under_way) > self.most:
            self.most = len(self._under_way)

    def used_rate(self) -> float:
        """What all transfers that are under way get together."""
        parts = self.parts
        return self.rate * parts[min(len(self._under_way), len(parts)) - 1] if parts else self.rate

    def wait(self) -> float:
        """How long a packet that comes now waits in the queue."""
        waits = self.waits
        return waits[min(len(self._under_way), len(waits)) - 1] if waits and self._under_way else 0.0

    def next_end(self) -> float:
        """When the next transfer ends if none comes before."""
        under_way = self._under_way
        if not under_way:
            return INFINITY
        left = under_way[0][0] - self._served
        if left <= 0.0:
            return self._since
        return self._since + left * len(under_way) / (self.used_rate() if self.parts else self.rate)

    def end_due(self, now: float) -> None:
        """End the transfers whose time has come."""
        due = self.next_end()
        if due > now:
            self._pass_time(now)
            return
        while self._under_way and due <= now:
            self._pass_time(max(due, self._since))
            target, _, size, ended = heapq.heappop(self._under_way)
            # What rounding has left over would add up.
            self._served = max(self._served, target)
            self.carried += size
            if not self._under_way:
                self._served = 0.0
            ended()
            due = self.next_end()
        self._pass_time(now)

    def _pass_time(self, now: float) -> None:
        passed = now - self._since
        if passed <= 0.0:
            return
        under_way = self._under_way
        if under_way:
            rate = self.used_rate() if self.parts else self.rate
            self._served += passed * rate / len(under_way)
        self._since = now
