"""A pod's map with drives more or less, and the agent that moves values to those that joined."""

from collections import Counter
from collections.abc import Generator, Set
from dataclasses import replace
from typing import Any, Protocol

from agent.pool.counters import Tally
from agent.pool.maintenance.rebalance import Rebalancer
from agent.pool.volume.directory_cache import DirectoryCache
from agent.pool.volume.settings import Timing
from agent.pool.volume.volume import Volume
from agent.sim.faulty_flash import SimChannel
from agent.sim.medium import fixed_secret
from agent.sim.pod_agent import PodAgent, Stored
from agent.sim.pod_flash import Flash, PodMap
from agent.sim.seeded_scheduler import Sleep, StepScheduler

RATE = 8 << 20
FOLLOW_SECONDS, GRACE_SECONDS = 0.25, 0.1
"""Shorter than an agent's: the pod's agents learn of a map within 0.2 s, and read for 0.05 s at the most."""
SETTLE_SECONDS = 0.6
"""Longer than a put may take that began with the map of before."""


class Pod(Protocol):
    """What a change of the map needs of a simulation."""

    map: PodMap
    over: bool
    scheduler: StepScheduler
    flash: Flash
    agents: list[PodAgent]
    acknowledged: dict[tuple[int, int], Stored]
    counts: Counter[str]
    tallies: list[dict[str, Tally]]

    def all_places(self, volume: Volume, number: int) -> frozenset[tuple[int, int]]: ...

    def tell(self) -> None: ...


def changed(before: PodMap, group: Set[int]) -> PodMap:
    """The next map: drives that are in it leave, others join behind the rest."""
    kept = tuple(number for number in before.members if number not in group)
    if len(kept) == len(before.members):
        return PodMap(before.version + 1, kept + tuple(sorted(group)), before.sets, len(kept))
    settled = sum(number in kept for number in before.members[: before.settled])
    return PodMap(before.version + 1, kept, before.sets, settled if settled < len(kept) else 0)


def forget_what_left(pod: Pod, before: PodMap, group: Set[int]) -> None:
    """Values that may have lain on drives that leave need not be there any more."""
    for number in range(len(before.sets)):
        opened = Volume(before.settings(number), fixed_secret(number), DirectoryCache(1 << 20), Timing())
        for key in [key for key in pod.acknowledged if key[0] == number]:
            if any(namespace in group for namespace, _ in pod.all_places(opened, key[1])):
                del pod.acknowledged[key]


def moving(pod: Pod, agent: PodAgent) -> Generator[Any, bool, Any]:
    """The upkeep of an agent that moves values; when nothing is left to move, the pool is settled."""
    channel = SimChannel(pod.scheduler, pod.flash.drives, f"a{agent.number}.{agent.lives}.move", agent.health)
    agent.channels.append(channel)
    pod.tallies.append(channel.tallies)
    mover = Rebalancer(agent.volumes, RATE, follow_seconds=FOLLOW_SECONDS, grace_seconds=GRACE_SECONDS)
    since = pod.scheduler.now
    while not pod.over:
        yield Sleep(pod.scheduler.now + 0.05)
        values, count = mover.moves.values, mover.moves.bytes
        yield from mover.turn(channel)
        pod.counts["values moved"] += mover.moves.values - values
        pod.counts["bytes moved"] += mover.moves.bytes - count
        if not agent.map.settled:
            since = pod.scheduler.now
        all_follow = all(each.map is pod.map for each in pod.agents if each.alive)
        done = mover.moves.left == 0 and pod.scheduler.now > since + SETTLE_SECONDS
        if done and all_follow and pod.map.settled:
            pod.counts["settled"] += 1
            pod.map = replace(pod.map, version=pod.map.version + 1, settled=0)
            pod.tell()
