"""The pool simulation (pool_simulation.py) with a volume that keeps two copies, and a keeper in every agent.

The keeper makes the second copies that puts owe, looks into what gets have met, and scrubs. To the rules of
the pool simulation one is added, for a single agent with its crashes and restarts: what was deleted does
not come back. It holds for a key whose delete was acknowledged, of which no put was begun since, of which
every put before had come to an end that was told (a write that was given up may land late), and whose
drives lost no write and were not put back to an earlier state.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence

from agent.pool.errors import PutRefused
from agent.pool.maintenance.replication import work_off
from agent.pool.maintenance.scrub import Scrubber, ScrubCounters, look_into_reports
from agent.sim.faulty_flash import SimChannel, SimNamespace
from agent.sim.seeded_scheduler import Sleep
from tests.support.pool.memory_pool import SUITES, key_of, volume_settings
from tests.support.sim.pool_simulation import PoolSimulation, SimAgent, Steps, Wrong


class CopiesSimulation(PoolSimulation):
    """Build it with a seed, `run` it, and look at what it counted."""

    def __init__(self, seed: object, *, agents: int | None = None) -> None:
        super().__init__(seed)
        rng = random.Random(f"copies simulation {seed}")
        sets = rng.choice([(1, 1), (1, 1), (1, 1, 1), (2, 1, 1, 2)])
        self.agents_count = rng.choice([1, 1, 1, 2]) if agents is None else agents
        self.settings = volume_settings(
            sets, value_bytes=self.value_bytes, suite=rng.choice(SUITES), copies=2
        )
        self.keys = max(4, int(min(self.settings.slots, 70) * rng.choice([0.1, 0.3, 0.6])))
        self.namespaces = [SimNamespace(1 << 40) for _ in sets]
        for namespace in self.namespaces:
            # Now and then an answer takes longer than most do, as from a drive that tidies up.
            namespace.latency = rng.choice([(0.0001, 0.002), (0.0001, 0.03)])
        self.agents = [self._boot(number, 1) for number in range(self.agents_count)]
        self.scrubbed = ScrubCounters()
        self.put_begun: Counter[int] = Counter()
        self.put_ended: Counter[int] = Counter()
        """Those that were told to have stored the key, or that it was there."""
        self.gone: dict[int, int] = {}
        """Keys whose delete was acknowledged, and how many puts of them had been begun by then."""
        self.last_put = 0
        self.forgetful: set[int] = set()
        """Namespaces that lost writes, or were put back."""

    def _start_workers(self, agent: SimAgent) -> None:
        super()._start_workers(agent)
        name = f"a{agent.number}.{agent.lives}.keeper"
        channel = SimChannel(self.scheduler, self.namespaces, name)
        agent.channels.append(channel)
        self.tallies.append(channel.tallies)
        self.scheduler.spawn(name, self._keep(agent, channel, name), agent.number)
        name = f"a{agent.number}.{agent.lives}.eraser"
        channel = SimChannel(self.scheduler, self.namespaces, name)
        agent.channels.append(channel)
        self.tallies.append(channel.tallies)
        self.scheduler.spawn(name, self._erase(agent, channel, name), agent.number)

    def _erase(self, agent: SimAgent, channel: SimChannel, name: str) -> Steps:
        """Deletes keys, mostly while their second copy is being made, and looks what became of them."""
        rng = random.Random(f"{self.seed} {name}")
        while not self.over:
            yield Sleep(channel.now() + rng.expovariate(1 / 0.06))
            number = self.last_put if rng.random() < 0.7 else rng.randrange(self.keys)
            yield from self._delete(agent, channel, self._with_others(number, rng))
            for _ in range(rng.randrange(3)):
                yield Sleep(channel.now() + rng.expovariate(1 / 0.01))
                yield from self._get(agent, channel, number, rng)

    def _keep(self, agent: SimAgent, channel: SimChannel, name: str) -> Steps:
        rng = random.Random(f"{self.seed} {name}")
        scrubber = Scrubber([agent.volume], self.scrubbed)
        while not self.over:
            yield Sleep(channel.now() + rng.expovariate(1 / 0.01))
            yield from work_off([agent.volume], channel, most=2)
            yield from look_into_reports([agent.volume], channel, self.scrubbed)
            for _ in range(rng.randrange(3)):
                yield from scrubber.advance(channel)
            if channel.unsettled():
                raise Wrong("the keeper left a read or write under way in its buffers")

    def _hurt(self, sick: SimNamespace, name: str) -> None:
        if name in ("lose", "sabotage"):
            self.forgetful.add(id(sick))
        super()._hurt(sick, name)

    def _put(self, agent: SimAgent, channel: SimChannel, number: int, rng: random.Random) -> Steps:
        self._put_begins(number)
        refused = self.counts["refused"]
        yield from super()._put(agent, channel, number, rng)
        self.last_put = number
        # Another put may have been refused meanwhile; then this one counts as refused as well.
        self._put_ends(number, refused=self.counts["refused"] != refused)

    def _put_begins(self, number: int) -> None:
        self.put_begun[number] += 1

    def _put_ends(self, number: int, *, refused: bool) -> None:
        self.put_ended[number] += not refused

    def _delete(self, agent: SimAgent, channel: SimChannel, numbers: Sequence[int]) -> Steps:
        settled = {
            number: self.put_begun[number]
            for number in numbers
            if self.put_ended[number] == self.put_begun[number]
        }
        became = yield from super()._delete(agent, channel, numbers)
        for number, one in zip(numbers, became, strict=True):
            if isinstance(one, PutRefused) or self.agents_count != 1:
                continue
            if settled.get(number, -1) == self.put_begun[number]:
                self.gone[number] = self.put_begun[number]

    def _is_gone(self, agent: SimAgent, number: int) -> bool:
        if self.gone.get(number, -1) != self.put_begun[number]:
            return False
        places = agent.volume.placement.candidates(agent.volume.placement.pseudonym(key_of(number)))
        return not any(id(self.namespaces[place.namespace]) in self.forgetful for place in places)

    def _get(self, agent: SimAgent, channel: SimChannel, number: int, rng: random.Random) -> Steps:
        was_gone = self._is_gone(agent, number)
        hit = yield from super()._get(agent, channel, number, rng)
        if was_gone and self._is_gone(agent, number):
            self.counts["gets of what is gone"] += 1
            if hit:
                raise Wrong(f"key {number} was deleted and is served again")
        return hit

    def _heal(self) -> None:
        for namespace in self.namespaces:
            namespace.latency = (0.0001, 0.002)
        super()._heal()

    def _check_the_end(self) -> None:
        agent = self._boot(98, 1)
        channel = SimChannel(self.scheduler, self.namespaces, "end of the gone")
        self.tallies.append(channel.tallies)
        for number in sorted(self.gone):
            if self._is_gone(agent, number):
                self.counts["gets of what is gone"] += 1
                if self.scheduler.finish(self._whole(agent, channel, number)) is not None:
                    raise Wrong(f"key {number} was deleted and is there at the end")
        super()._check_the_end()
