"""A pool in virtual time with a place in G4 below it: evictions all the time, and faults of the place too.

As the simulation of puts (pool_simulation.py), with fewer slots than keys and a spill task for each agent.
The place damages, cuts and loses objects, refuses and falls silent. The oracle checks, beside what it checks
there,

* with one agent, and flash that keeps what it is given: once a put or a delete of a key was acknowledged, no
  value is served whose own put was over before that one began. So nothing comes up from G4 that was deleted,
  or that a newer value had taken the place of;
* with several agents, and such flash: no value that was deleted is served out of flash, but by an agent that
  put it itself and whose image of the directory another one's took the place of (docs/limits.md). Out of G4
  the agent that deleted it serves it no more; another one does so until the first has looked again, and for
  longer only where that crashed meanwhile. A put of other bytes without a delete may be undone on flash by
  the image of another agent, and the older value is in force again (decision 2): that is counted.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from agent.pool.access import serve
from agent.pool.errors import PutRefused
from agent.pool.read.get import SlotReader
from agent.pool.volume.removed_marks import LOOKS
from agent.pool.write.delete_and_pin import pin
from agent.pool.write.put import SlotWriter
from agent.sim.faulty_flash import SimChannel, SimNamespace
from agent.sim.seeded_scheduler import Sleep
from agent.spill.copy_down import Spiller
from agent.spill.read_up import Below, PlaceHealth
from agent.spill.room import Room
from agent.spill.target import TargetError
from tests.support.pool.memory_pool import SUITES, key_of, volume_settings
from tests.support.pool.spill_pool import POOL_ID, MemoryTarget
from tests.support.sim.pool_simulation import (
    READ_DEADLINE,
    WRITE_DEADLINE,
    PoolSimulation,
    SimAgent,
    Steps,
    Wrong,
)

BUNDLE_BYTES = 2 << 20
SETTLED_SECONDS = LOOKS[-2] + 1.0
"""From a delete to the last look that counts here, and what the spill task and the look itself may take."""
LOSSY = ("hang", "down", "broken", "rot", "lose", "sabotage")


def _flipped(data: bytes, at: int) -> bytes:
    return data[:at] + bytes(each ^ 8 for each in data[at : at + 1]) + data[at + 1 :]


class Ended(NamedTuple):
    """How a value came to its end."""

    at: float
    by: SimAgent
    deleted: bool


class SpillSimulation(PoolSimulation):
    """See the module's docstring."""

    def __init__(self, seed: object, *, strict: bool = False, several: bool = False) -> None:
        """`strict`: one agent, and flash that keeps what it is given. `several`: more than one, likewise."""
        self._spillers: dict[tuple[int, int], Spiller] = {}
        self.target = MemoryTarget()
        self.below_rng = random.Random(f"spill {seed}")
        self.over_values: defaultdict[int, set[bytes]] = defaultdict(set)
        """Values whose own puts are over."""
        self.ended: defaultdict[int, dict[bytes, Ended]] = defaultdict(dict)
        self.put_by: dict[bytes, SimAgent] = {}
        """By value: no two are alike."""
        super().__init__(seed)
        if strict:
            self.agents_count, self.agents = 1, self.agents[:1]
        if several and self.agents_count == 1:
            self.agents_count = 2
            self.agents.append(self._boot(1, 1))
        if strict or several:
            self.faults |= dict.fromkeys(LOSSY, False)

    def _shape(self) -> None:
        """Called before the first agent is made."""
        rng = self.below_rng
        sets = (1,) * rng.choice([1, 1, 1, 2])
        self.namespaces = [SimNamespace(1 << 40) for _ in sets]
        self.value_bytes = rng.choice([4096, 12288])
        suite, mark_blocks = rng.choice(SUITES), rng.choice([0, 1])
        self.settings = volume_settings(
            sets, value_bytes=self.value_bytes, suite=suite, mark_blocks=mark_blocks
        )
        self.keys = int(self.settings.slots * 1.3)
        self.place_faults = rng.random() < 0.6

    @property
    def keeps(self) -> bool:
        """Whether flash keeps what it is given."""
        return not any(self.faults[each] for each in LOSSY)

    def _boot(self, number: int, lives: int) -> SimAgent:
        if not self._spillers:
            self._shape()
        agent = super()._boot(number, lives)
        # A future that is not done now is late: virtual time does not pass within a step.
        health = PlaceHealth(4, 64 << 20, 0.0)
        below = Below(agent.volume, POOL_ID, self.target, health, clock=lambda: self.scheduler.now)
        agent.volume.change(below=below)
        spiller = Spiller(
            agent.volume,
            POOL_ID,
            self.target,
            Room(self.target, POOL_ID, agent.volume.settings.volume_id, 1 << 40),
            BUNDLE_BYTES,
            all_values=self.below_rng.random() < 0.7,
            below=below,
            number_at=lambda wall: self.below_rng.randrange(1 << 28),
        )
        self._spillers[number, lives] = spiller
        return agent

    def _start_workers(self, agent: SimAgent) -> None:
        super()._start_workers(agent)
        name = f"a{agent.number}.{agent.lives}.spill"
        channel = SimChannel(self.scheduler, self.namespaces, name)
        agent.channels.append(channel)
        self.tallies.append(channel.tallies)
        self.scheduler.spawn(name, self._spill(agent, channel), agent.number)

    def _work(self, agent: SimAgent, channel: SimChannel, name: str) -> Steps:
        rng = random.Random(f"{self.seed} {name}")
        while not self.over:
            yield Sleep(channel.now() + rng.expovariate(1 / 0.008))
            # Some keys are asked for all the time, others are new most of the time.
            number = rng.randrange(self.keys) if rng.random() < 0.6 else rng.randrange(self.keys // 6)
            what = rng.choices(["get", "put", "delete", "pin"], [40, 50, 2, 1])[0]
            self.counts[what] += 1
            if what == "get":
                if not (yield from self._get(agent, channel, number, rng)) and rng.random() < 0.7:
                    yield from self._put(agent, channel, number, rng)
            elif what == "put":
                yield from self._put(agent, channel, number, rng)
            elif what == "delete":
                more = rng.choice([0, 1, 3])
                others = [rng.randrange(self.keys) for _ in range(more)]
                yield from self._delete(agent, channel, [number, *others])
            else:
                until, deadline = int(channel.wall()) + 1, channel.now() + WRITE_DEADLINE
                yield from pin(agent.volume, channel, key_of(number), until, deadline)
            if channel.unsettled():
                raise Wrong(f"a {what} ended with a read or write still under way in the worker's buffers")

    def _spill(self, agent: SimAgent, channel: SimChannel) -> Steps:
        spiller = self._spillers[agent.number, agent.lives]
        rng = random.Random(f"{self.seed} spill {agent.number} {agent.lives}")
        while not self.over:
            yield Sleep(channel.now() + rng.expovariate(1 / 0.01))
            yield from spiller.turn(channel)
            if rng.random() < 0.3:
                spiller.store(channel.wall())
            self._hurt_place(rng)
        self.counts["spilled"] += spiller.counts.values
        self.counts["returned"] += spiller.counts.returned

    def _hurt_place(self, rng: random.Random) -> None:
        target = self.target
        if not self.place_faults or rng.random() > 0.05:
            return
        what = rng.choice(["well", "well", "damage", "cut", "refuse", "silent", "lose", "swap"])
        self.counts[f"place {what}"] += 1
        target.silent, target.refusal, target.damage = False, None, lambda data: data
        if what == "damage":
            at = rng.randrange(8192)
            target.damage = lambda data: _flipped(data, at)
        elif what == "cut":
            size = rng.randrange(12_000)
            target.damage = lambda data: data[:size]
        elif what == "refuse":
            target.refusal = TargetError("503")
        elif what == "silent":
            target.silent = True
        elif what in ("lose", "swap") and target.objects:
            names = sorted(target.objects)
            name = rng.choice(names)
            if what == "lose":
                del target.objects[name]
            else:
                other = rng.choice(names)
                target.objects[name], target.objects[other] = target.objects[other], target.objects[name]

    # -- operations, with the stricter oracle ------------------------------------------------------

    def _put(self, agent: SimAgent, channel: SimChannel, number: int, rng: random.Random) -> Steps:
        before = set(self.over_values[number])
        # No two are alike, or the oracle would take one for the other.
        value = rng.randbytes(min(self.value_bytes, rng.choice([16, 100, 4096, 9000])))
        self.stored.setdefault(number, set()).add(value)
        self.put_by[value] = agent
        deletes = self.deletes_begun[number]
        writing = SlotWriter(agent.volume, key_of(number), length=len(value))
        try:
            yield from writing.write(channel, 0, memoryview(value), channel.now() + WRITE_DEADLINE)
        except PutRefused:
            self.counts["refused"] += 1
            return
        if writing.stored:
            self.counts["stored"] += 1
            self.over_values[number].add(value)
            self._end(agent, number, before, deleted=False)
            if deletes != self.deletes_begun[number] or self.being_deleted[number]:
                self.acknowledged.pop(number, None)
            else:
                self.acknowledged[number] = value

    def _delete(self, agent: SimAgent, channel: SimChannel, numbers: Sequence[int]) -> Steps:
        before = [set(self.over_values[number]) for number in numbers]
        for number in numbers:
            self.acknowledged.pop(number, None)
            self.deletes_begun[number] += 1
        self.being_deleted.update(numbers)
        keys = [key_of(number) for number in numbers]
        try:
            became = yield from serve(agent.volume).delete_many(channel, keys, WRITE_DEADLINE)
        finally:
            self.being_deleted.subtract(numbers)
        for number, values, one in zip(numbers, before, became, strict=True):
            if isinstance(one, PutRefused):
                self.counts["delete refused"] += 1
            else:
                self._end(agent, number, values, deleted=True)
            self.counts["deleted of many"] += len(numbers) > 1 and one is True
            self.acknowledged.pop(number, None)
            self.deletes_begun[number] += 1

    def _end(self, agent: SimAgent, number: int, values: set[bytes], *, deleted: bool) -> None:
        ended = self.ended[number]
        for value in values:
            before = ended.get(value)
            was_deleted = before is not None and before.deleted
            ended[value] = Ended(self.scheduler.now, agent, deleted or was_deleted)

    def _judge_older(
        self, agent: SimAgent, number: int, value: bytes, ended: Ended, began: float, *, is_g4: bool
    ) -> None:
        """A value was served that had come to its end before the get began."""
        what = f"key {number}: a value that was deleted, or that another took the place of"
        self.counts[f"older value, {'g4' if is_g4 else 'flash'}"] += 1
        if not self.keeps:
            return
        if self.agents_count == 1:
            raise Wrong(what)
        if not ended.deleted:
            self.counts["older value, put undone"] += 1
            return
        if not is_g4:
            if agent is ended.by or agent is not self.put_by[value]:
                raise Wrong(f"{what}, out of flash")
            self.counts["older value, own image"] += 1
            return
        if not ended.by.alive:
            self.counts["older value, of one that crashed"] += 1
            return
        if agent is ended.by:
            raise Wrong(f"{what} by this very agent")
        if began - ended.at > SETTLED_SECONDS:
            raise Wrong(f"{what} {began - ended.at:.3f} s ago")

    def _get(self, agent: SimAgent, channel: SimChannel, number: int, rng: random.Random) -> Steps:
        ended = dict(self.ended[number])
        of_g4 = channel.tally(self.settings.name).gets_from_g4
        reading = SlotReader(agent.volume, key_of(number), agent.prestage)
        into = memoryview(bytearray(self.value_bytes))
        began = channel.now()
        count = yield from reading.read(channel, 0, into, began + READ_DEADLINE)
        reading.close()
        if channel.now() > began + READ_DEADLINE + 1e-9:
            raise Wrong(f"a read took {channel.now() - began:.3f} s")
        if reading.cause is None:
            got = bytes(into[:count])
            if got not in self.stored.get(number, ()):
                raise Wrong(f"key {number}: a value that nobody stored")
            if got in ended:
                is_g4 = channel.tally(self.settings.name).gets_from_g4 > of_g4
                self._judge_older(agent, number, got, ended[got], began, is_g4=is_g4)
            self.counts["bytes checked"] += count
        self.counts["hits" if reading.cause is None else f"miss {reading.cause.name.lower()}"] += 1
        self.counts["counted gets"] += 1
        return reading.cause is None
