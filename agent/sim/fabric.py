"""The network between the NICs of a simulated pod: leaves, spines, and how transfers find their way.

    hosts ── leaf ──┬── spine ──┬── leaf ── enclosures
                    └── spine ──┘

A leaf has hosts or enclosures, and one link to each spine, each way. Together they carry what its ports do,
divided by `oversubscription`. A transfer between two leaves crosses a link up and a link down:

    ecmp     all of it by one spine, chosen by a hash of its flow (host, worker, enclosure): flows collide
    spray    its packets by all spines alike, so that the links of a leaf are one link

Spraying takes NICs that place packets in any order. With `ecn` the flows of a link have the utilisation and
the queue that DCQCN leaves them (dcqcn.py); without, the queue that their windows make. A lossy link repeats
what was under way, and a lost last packet waits for a time-out. A noisy neighbour sends between leaves, too.

What happens inside a leaf crosses no spine. Seconds, bytes, bytes a second.
"""

import random
from collections import Counter
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any, Final, Protocol

from agent.pool.volume.placement import splitmix
from agent.sim.dcqcn import FluidSettings, steady_state
from agent.sim.links import SharedLink
from agent.sim.pod_plan import PodPlan
from agent.sim.virtual_time import Sleep, VirtualLoop

Steps = Generator[Any, bool, Any]
_WORD: Final = (1 << 64) - 1
PACKET_BYTES: Final = 4096
RETRY_S: Final = 0.02
"""Until a lost last packet is sent again: as the emulated NIC has it."""
NOISE_S: Final = 0.01
"""A neighbour's flow takes so long on an idle link."""


class Carries(Protocol):
    """What begins a transfer on a link and calls when it has ended."""

    def __call__(self, link: SharedLink, size: int, ended: Callable[[], None]) -> None: ...


@dataclass(frozen=True, slots=True)
class Way:
    """How one transfer crosses the fabric: its links, the bytes on each, and seconds beside them."""

    links: tuple[SharedLink, ...] = ()
    size: int = 0
    latency: float = 0.0


STRAIGHT: Final = Way()


def link_of(plan: PodPlan, rate: float) -> SharedLink:
    """A link of the pod's network, one way, as its flows' control lets them use it."""
    if plan.fabric == "none":
        return SharedLink(rate)
    base = 2 * plan.network_latency
    settings = FluidSettings(rate, plan.ecn, base_s=base, window_bytes=window_of(plan, rate))
    parts, waits = steady_state(settings)
    return SharedLink(rate, parts=parts, waits=waits)


def window_of(plan: PodPlan, rate: float) -> int:
    """Bytes that a flow has under way at most: twice what an idle link has on its way and back."""
    return max(2 * PACKET_BYTES, int(2 * rate * 2 * plan.network_latency))


class Fabric:
    """All links between leaves, and what becomes of transfers on them."""

    def __init__(self, loop: VirtualLoop, plan: PodPlan, seed: object, carry: Carries) -> None:
        self.loop = loop
        self.plan = plan
        self._carry = carry
        self._dice = random.Random(f"fabric {seed}")
        self.host_leaves = -(-plan.hosts // plan.hosts_per_leaf)
        self.leaves = self.host_leaves + -(-plan.enclosures // plan.enclosures_per_leaf)
        self._paths = 1 if plan.fabric == "spray" else plan.spines
        self._rates = [self._leaf_rate(leaf) / plan.oversubscription for leaf in range(self.leaves)]
        self.up = [self._links(leaf) for leaf in range(self.leaves)]
        self.down = [self._links(leaf) for leaf in range(self.leaves)]
        self.counts: Counter[str] = Counter()
        self.crossed = 0
        """Bytes that went from one leaf to another, counted once."""
        self.repeated = 0
        """Bytes that went again because of a loss."""
        self.noise = 0
        """Bytes of the neighbour."""

    def _leaf_rate(self, leaf: int) -> float:
        plan = self.plan
        if leaf < self.host_leaves:
            return plan.host_nic * min(plan.hosts_per_leaf, plan.hosts)
        return plan.enclosure_nic * min(plan.enclosures_per_leaf, plan.enclosures)

    def _links(self, leaf: int) -> list[SharedLink]:
        rate = self._rates[leaf] / self._paths
        return [link_of(self.plan, rate) for _ in range(self._paths)]

    def leaf_of_host(self, host: int) -> int:
        return host // self.plan.hosts_per_leaf

    def leaf_of_enclosure(self, enclosure: int) -> int:
        return self.host_leaves + enclosure // self.plan.enclosures_per_leaf

    def way(self, source: int, target: int, size: int, flow: int) -> Way:
        """The way of `size` bytes from one leaf to another. `flow` is what a hash sees of them."""
        if source == target:
            return STRAIGHT
        path = hashed(flow, source, target) % self._paths
        up, down = self.up[source][path], self.down[target][path]
        latency = up.wait() + down.wait()
        again, late = self._lost(source, path, size, up.rate)
        self.crossed += size
        self.repeated += again
        self.counts["fabric transfers"] += 1
        return Way((up, down), size + again, latency + late)

    def way_of(self, host_leaf: int, enclosure: int, flow: int, size: int, *, write: bool) -> Way:
        """The way between a host and an enclosure, of a read or a write."""
        leaf = self.leaf_of_enclosure(enclosure)
        seen = flow * self.plan.enclosures + enclosure
        if write:
            return self.way(host_leaf, leaf, size, seen)
        return self.way(leaf, host_leaf, size, seen)

    def wait_of(self, host_leaf: int, enclosure: int, flow: int, *, write: bool) -> float:
        """How long a packet by itself waits on its way, which is that of its flow."""
        leaf = self.leaf_of_enclosure(enclosure)
        source, target = (host_leaf, leaf) if write else (leaf, host_leaf)
        path = hashed(flow * self.plan.enclosures + enclosure, source, target) % self._paths
        return self.up[source][path].wait() + self.down[target][path].wait()

    def _lost(self, leaf: int, path: int, size: int, rate: float) -> tuple[int, float]:
        """Bytes that a transfer repeats, and seconds that it waits. The first link up of the first leaf of
        enclosures loses packets."""
        plan = self.plan
        if not plan.loss or leaf != self.host_leaves or path:
            return 0, 0.0
        part = plan.loss / (plan.spines if plan.fabric == "spray" else 1)
        packets = -(-size // PACKET_BYTES)
        window = min(size, window_of(plan, rate))
        again, late, at = 0, 0.0, self._gap(part)
        while at < packets:
            self.counts["fabric losses"] += 1
            if at == packets - 1:
                again, late = again + PACKET_BYTES, late + RETRY_S
            else:
                # Go-back-N: what was under way behind the lost packet goes again.
                again += min(window, (packets - at) * PACKET_BYTES)
                late += 2 * plan.network_latency
            at += 1 + self._gap(part)
        return again, late

    def _gap(self, part: float) -> int:
        """Packets between two that are lost."""
        return int(self._dice.expovariate(part))

    def neighbour(self, is_over: Callable[[], bool]) -> Steps:
        """Flows of others between leaves, at random, which take the part `noise` of all links up."""
        plan, dice = self.plan, self._dice
        if self.leaves < 2:
            return
        sizes = [int(rate / self.plan.spines * NOISE_S) for rate in self._rates]
        rate = sum(self._rates) * plan.noise
        mean = sum(sizes) / len(sizes)
        while not is_over():
            yield Sleep(self.loop.now + dice.expovariate(rate / mean))
            source = dice.randrange(self.leaves)
            target = (source + dice.randrange(1, self.leaves)) % self.leaves
            path = dice.randrange(self._paths)
            self.counts["fabric flows of the neighbour"] += 1
            for link in (self.up[source][path], self.down[target][path]):
                self.noise += sizes[source]
                self._carry(link, sizes[source], _nothing)

    # -- the books ----------------------------------------------------------------------------------

    def carried(self) -> tuple[int, int]:
        """Bytes that links up, and links down, have carried."""
        sides = (self.up, self.down)
        up, down = (sum(link.carried for links in side for link in links) for side in sides)
        return up, down

    def balanced(self) -> bool:
        """Whether what went up came down, and is what was sent."""
        up, down = self.carried()
        return up == down == self.crossed + self.repeated + self.noise // 2

    def unevenness(self) -> float:
        """How busy the busiest link up of a leaf is, beside the mean of the leaf: 1 is even. The largest of
        all leaves; 0 where nothing crossed."""
        found = 0.0
        for links in self.up:
            busy = [link.carried for link in links]
            if any(busy):
                found = max(found, max(busy) * len(busy) / sum(busy))
        return found


def _nothing() -> None: ...


def hashed(flow: int, source: int, target: int) -> int:
    """What a switch makes of a flow's addresses: the same each time, and as good as any number."""
    return mixed(flow << 32 ^ source << 16 ^ target, 0)


def mixed(block: int, number: int) -> int:
    """A number of 64 bits that looks drawn at random, the same each time."""
    return splitmix((block + (number + 1) * 0x9E3779B97F4A7C15) & _WORD)
