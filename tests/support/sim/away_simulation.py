"""Values that are replaced while enclosures go and come back: the simulation of mutable values, on a volume
whose namespaces are left out while they are away (agent/pool/volume/in_sync.py).

One namespace after another is away for all agents (down, or hung), or one agent alone is cut from one
namespace; two may be away at once, and in turn. Agents crash, and boot again while something is away. All
have upkeep, which brings namespaces back. The oracle's rule is the strict one for any number of agents: once
a replace or a delete was acknowledged, no older value is returned, whoever asks, whatever was away meanwhile.
Where two agents write one directory within a moment, decision 52 says what may happen; that is counted.

What is not played is that two agents are cut from two namespaces at the same time, each from the other's: no
rule can hold there that lets both go on (decision 54).
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence

from agent.pool.maintenance.resync import Resync
from agent.pool.volume.in_sync import InSync, SyncTiming
from agent.pool.volume.settings import Timing
from agent.sim.faulty_flash import SimChannel, SimNamespace
from agent.sim.seeded_scheduler import Sleep, StepScheduler
from tests.support.pool.memory_pool import SUITES, volume_settings
from tests.support.sim.mutable_simulation import MutableSimulation
from tests.support.sim.pool_simulation import READ_DEADLINE, WRITE_DEADLINE, SimAgent, Steps, Wrong

SYNC = SyncTiming(fresh=0.03, unbroken=0.12, away=0.2, retry=0.02, settle=1.3, again=0.5)
"""Less than a tenth of what agents take; `settle` is longer than an operation."""
TURN_SECONDS = 0.02
AWAY = (0.05, 0.4, 1.0, 2.0)


class CutChannel(SimChannel):
    """A channel of an agent that may be cut from a namespace."""

    def __init__(
        self, scheduler: StepScheduler, namespaces: Sequence[SimNamespace], name: str, cut: set[int]
    ) -> None:
        super().__init__(scheduler, namespaces, name)
        self._cut = cut

    def _submit(self, namespace, pending, effect, end):  # type: ignore[no-untyped-def]
        if namespace in self._cut:
            pending.fail("no way there", unreachable=True)
            if pending.land is not None:
                pending.land("not")
            return
        super()._submit(namespace, pending, effect, end)


class AwaySimulation(MutableSimulation):
    """Build it with a seed, `run` it, and look at what it counted."""

    seconds = 10.0

    def __init__(self, seed: object, *, agents: int | None = None) -> None:
        super().__init__(("away", seed))
        rng = random.Random(f"away simulation {seed}")
        sets = rng.choice([(1, 1), (1, 1), (2, 2), (1, 1, 1), (1, 1, 1, 1)])
        self.agents_count = rng.choice([1, 2, 2, 3]) if agents is None else agents
        self.value_bytes = 12288
        settings = volume_settings(sets, value_bytes=self.value_bytes, suite=rng.choice(SUITES))
        self.settings = dataclasses.replace(settings, kind="shared-names", names_of=bytes(range(16)))
        self.timing = Timing(READ_DEADLINE, WRITE_DEADLINE, rng.choice([0.0, 0.0, 0.0, 0.1]))
        self.keys = rng.choice([4, 10, 30, 90])
        """The most are more than some sets have room for."""
        self.namespaces = [SimNamespace(1 << 40) for _ in sets]
        self.cuts: dict[int, set[int]] = {}
        self.agents = [self._boot(number, 1) for number in range(self.agents_count)]
        self.crashes = rng.random() < 0.6
        self.partitions = rng.random() < 0.6
        self.under_way = 0
        self.cutting = False

    def _boot(self, number: int, lives: int) -> SimAgent:
        agent = super()._boot(number, lives)
        if agent.volume.settings.names_of:
            agent.volume.in_sync = InSync(agent.volume._nguid_of, SYNC)
        return agent

    def _channel(self, agent: SimAgent, name: str) -> CutChannel:
        cut = self.cuts.setdefault(agent.number, set())
        channel = CutChannel(self.scheduler, self.namespaces, name, cut)
        agent.channels.append(channel)
        self.tallies.append(channel.tallies)
        return channel

    def _start_workers(self, agent: SimAgent) -> None:
        skew = self.rng.choice([0.0, 0.0, 0.4, -0.3])
        for number in range(self.rng.randint(1, 3)):
            name = f"a{agent.number}.{agent.lives}.w{number}"
            channel = self._channel(agent, name)
            channel.skew = skew
            self.scheduler.spawn(name, self._work(agent, channel, name), agent.number)
        name = f"a{agent.number}.{agent.lives}.upkeep"
        self.scheduler.spawn(name, self._keep(agent, self._channel(agent, name)), agent.number)

    def _keep(self, agent: SimAgent, channel: SimChannel) -> Steps:
        assert agent.volume.in_sync is not None
        resync = Resync(agent.volume, agent.volume.in_sync)
        while not self.over:
            yield Sleep(channel.now() + TURN_SECONDS)
            done = resync.done
            yield from resync.turn(channel)
            self.counts["brought back"] += resync.done - done

    # -- faults -----------------------------------------------------------------------------------

    def _faults(self) -> Steps:
        rng, scheduler = self.rng, self.scheduler
        while not self.over:
            yield Sleep(scheduler.now + rng.expovariate(1 / 0.5))
            if self.over:
                return
            if self.crashes and rng.random() < 0.2:
                self.counts["fault crash"] += 1
                self.crash(rng.choice(self.agents))
            elif self.partitions and rng.random() < 0.4:
                if not self.under_way:
                    self._cut(rng.choice(self.agents), rng.randrange(len(self.namespaces)))
            elif not self.cutting:
                self._go(rng.choice(self.namespaces), rng.choice(["down", "hang"]))

    def _cut(self, agent: SimAgent, namespace: int) -> None:
        self.counts["fault cut"] += 1
        cut = self.cuts.setdefault(agent.number, set())
        self.namespaces[namespace].tainted = True
        cut.add(namespace)
        self.under_way += 1
        self.cutting = True

        def end() -> None:
            cut.discard(namespace)
            self.under_way -= 1
            self.cutting = False

        self.scheduler.call_at(self.scheduler.now + self.rng.choice(AWAY), end)

    def _go(self, sick: SimNamespace, how: str) -> None:
        if sick.down or sick.hung:
            return
        self.counts[f"fault {how}"] += 1
        sick.tainted = True
        self.under_way += 1

        def end() -> None:
            self.under_way -= 1
            sick.down = False
            sick.wake(self.scheduler)

        if how == "down":
            sick.down = True
        else:
            sick.hang()
        self.scheduler.call_at(self.scheduler.now + self.rng.choice(AWAY), end)

    # -- what must hold ---------------------------------------------------------------------------

    def _done(self, number, change) -> None:  # type: ignore[no-untyped-def]
        super()._done(number, change)
        agent = self.agents[0]
        if change.value is not None and any(each.down or each.hung for each in self._places(agent, number)):
            self.counts["stored while away"] += 1

    def _heal(self) -> None:
        for cut in self.cuts.values():
            cut.clear()
        super()._heal()
        agent = self._boot(98, 1)
        channel = SimChannel(self.scheduler, self.namespaces, "back")
        in_sync = agent.volume.in_sync
        assert in_sync is not None
        resync = Resync(agent.volume, in_sync)
        for _ in range(400):
            self.scheduler.finish(resync.turn(channel))
            self.scheduler.now += TURN_SECONDS
            if not in_sync.waiting():
                return
        raise Wrong("a namespace that is well does not count")
