"""Values that are replaced, in a whole pool in virtual time: agents that store one key at once, and faults.

As the simulation of puts (pool_simulation.py), with `replace`, `newest`, `hold` and `delete`. The oracle
knows when each value was given and when it was acknowledged. It checks

* always: what `newest` returns is, byte for byte, a value that was given to `replace` under that key;
* with one agent, its crashes included, and flash that keeps what it is given: once a replace or a delete was
  acknowledged, no value is returned whose own replace was over before that one began; a value that was
  acknowledged, or the one that was to replace it when the agent died, is there unless it was evicted; a key
  that is held is there;
* at the end, when all faults are over: every key can be replaced, and then has that value.

Between agents an image of a directory may undo another's: a miss, or, where a third agent's image follows,
an older value. How often is a statistic (`stale_between_agents`). In a third of the runs directories are
believed for a while (`directory_fresh`); with several agents a change is then seen as late as that.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from agent.pool.access import ServedVolume, serve
from agent.pool.counters import MissCause
from agent.pool.errors import PutRefused
from agent.pool.volume.directory_cache import DAMAGE_LOOK_SECONDS
from agent.sim.faulty_flash import SimChannel, SimNamespace
from agent.sim.seeded_scheduler import Sleep
from tests.support.pool.memory_pool import key_of
from tests.support.sim.pool_simulation import (
    READ_DEADLINE,
    STORE_TRIES,
    WRITE_DEADLINE,
    PoolSimulation,
    SimAgent,
    Steps,
    Wrong,
)

DAMAGING = ("rot", "lose", "sabotage")
"""Faults after which flash has other bytes than it was given."""
VALUE_MAX = 65536
FOREVER = float("inf")


@dataclass(eq=False)
class Change:
    """One replace of a key, or its delete, where `value` is None. Times are virtual; not over: for ever."""

    value: bytes | None
    began: float
    ended: float = FOREVER
    acknowledged: float = FOREVER


class MutableSimulation(PoolSimulation):
    """Build it with a seed, `run` it, and look at what it counted."""

    def __init__(self, seed: object) -> None:
        super().__init__(("mutable", seed))
        self.changes: dict[int, list[Change]] = {}
        self.standing: dict[int, list[Change]] = {}
        """Changes of a key of which one must be there; none where nothing must be."""
        self.damaged: list[SimNamespace] = []
        self.stale_between_agents = 0

    def _served(self, agent: SimAgent) -> ServedVolume:
        return serve(agent.volume)

    def _work(self, agent: SimAgent, channel: SimChannel, name: str) -> Steps:
        rng = random.Random(f"{self.seed} {name}")
        while not self.over:
            yield Sleep(channel.now() + rng.expovariate(1 / 0.02))
            number = rng.randrange(self.keys)
            what = rng.choices(["newest", "replace", "delete", "hold"], [45, 45, 4, 6])[0]
            self.counts[what] += 1
            if what == "newest":
                yield from self._newest(agent, channel, number)
            elif what == "replace":
                yield from self._replace(agent, channel, number, rng)
            elif what == "delete":
                yield from self._take_away(agent, channel, number)
            else:
                yield from self._hold(agent, channel, rng)
            if channel.unsettled():
                raise Wrong(f"a {what} ended with a read or write still under way in the worker's buffers")

    # -- operations, with the oracle looking on ---------------------------------------------------

    def _begin(self, number: int, value: bytes | None) -> Change:
        change = Change(value, self.scheduler.now)
        self.changes.setdefault(number, []).append(change)
        if self.standing.get(number):
            self.standing[number].append(change)
        return change

    def _done(self, number: int, change: Change) -> None:
        change.ended = change.acknowledged = self.scheduler.now
        under_way = [each for each in self.changes[number] if each.ended == FOREVER]
        self.standing[number] = [change, *under_way] if change.value is not None else []

    def _replace(self, agent: SimAgent, channel: SimChannel, number: int, rng: random.Random) -> Steps:
        length = min(self.value_bytes, VALUE_MAX, rng.choice([20, 100, 4096, 9000, VALUE_MAX]))
        value = rng.randbytes(length)
        change = self._begin(number, value)
        served, deadline = self._served(agent), channel.now() + WRITE_DEADLINE
        try:
            yield from served.replace(channel, key_of(number), value, deadline)
        except PutRefused:
            self.counts["refused"] += 1
            change.ended = self.scheduler.now
            return
        except GeneratorExit:
            change.ended = self.scheduler.now
            raise
        if channel.now() > deadline + 1e-9:
            raise Wrong("a replace ended after its deadline")
        self.counts["replaced"] += 1
        self._done(number, change)

    def _take_away(self, agent: SimAgent, channel: SimChannel, number: int) -> Steps:
        change = self._begin(number, None)
        self.standing[number] = []
        try:
            yield from self._served(agent).delete(channel, key_of(number), channel.now() + WRITE_DEADLINE)
        except PutRefused:
            self.counts["delete refused"] += 1
            change.ended = self.scheduler.now
        except GeneratorExit:
            change.ended = self.scheduler.now
            raise
        else:
            self._done(number, change)
        self.standing[number] = []

    def _newest(self, agent: SimAgent, channel: SimChannel, number: int) -> Steps:
        began, standing = channel.now(), list(self.standing.get(number, ()))
        deletes = self._deletes(number)
        deadline = began + READ_DEADLINE
        found = yield from self._served(agent).newest(channel, key_of(number), deadline)
        if channel.now() > deadline + 1e-9:
            raise Wrong(f"a read took {channel.now() - began:.3f} s")
        self.counts["counted gets"] += 1
        if isinstance(found, MissCause):
            self.counts[f"miss {found.name.lower()}"] += 1
            if standing and self._deletes(number) == deletes and self._must_stand(agent, number):
                raise Wrong(f"key {number} was acknowledged and is {found.name}")
            return None
        self.counts["hits"] += 1
        self._check_value(agent, number, found, began)
        return found

    def _hold(self, agent: SimAgent, channel: SimChannel, rng: random.Random) -> Steps:
        numbers = sorted({rng.randrange(self.keys) for _ in range(rng.choice([1, 3, 12]))})
        served = self._served(agent)
        deletes = [self._deletes(number) for number in numbers]
        keys = [key_of(number) for number in numbers]
        held = yield from served.hold(channel, keys, channel.now() + READ_DEADLINE)
        if isinstance(held, MissCause):
            self.counts["hold missed"] += 1
            return
        self.counts["held"] += 1
        try:
            yield Sleep(channel.now() + rng.expovariate(1 / 0.2))
            for number, before in zip(numbers, deletes, strict=True):
                found = yield from served.newest(channel, key_of(number), channel.now() + READ_DEADLINE)
                self.counts["counted gets"] += 1
                undisturbed = self._deletes(number) == before and not self._is_hurt(agent, number)
                if not isinstance(found, MissCause) or self.agents_count > 1 or held.kept < len(numbers):
                    continue
                if undisturbed:
                    raise Wrong(f"key {number} is held, and is {found.name}")
        finally:
            held.let_go()

    # -- what must hold ---------------------------------------------------------------------------

    def _deletes(self, number: int) -> int:
        return sum(change.value is None for change in self.changes.get(number, ()))

    def _places(self, agent: SimAgent, number: int) -> Sequence[SimNamespace]:
        places = agent.volume.placement.candidates(agent.volume.placement.pseudonym(key_of(number)))
        return [self.namespaces[each.namespace] for each in places]

    def _is_hurt(self, agent: SimAgent, number: int) -> bool:
        return any(each.tainted for each in self._places(agent, number))

    def _must_stand(self, agent: SimAgent, number: int) -> bool:
        return self.agents_count == 1 and not self.tally().evictions and not self._is_hurt(agent, number)

    def _check_value(self, agent: SimAgent, number: int, found: bytes, began: float) -> None:
        changes = self.changes.get(number, [])
        given = [change for change in changes if change.value == found]
        if not given:
            raise Wrong(f"key {number}: {len(found)} bytes of a value that nobody gave to it")
        self.counts["bytes checked"] += len(found)
        over = max(change.ended for change in given)
        # What another agent has changed is seen as late as the operator lets directories be believed.
        seen = began - (self.timing.directory_fresh if self.agents_count > 1 else 0.0)
        newer = [each for each in changes if each.acknowledged < seen and each.began > over]
        if not newer:
            return
        if any(each is bad for each in self._places(agent, number) for bad in self.damaged):
            return
        if self.agents_count == 1:
            raise Wrong(f"key {number} has an older value again")
        self.stale_between_agents += 1

    def _hurt(self, sick: SimNamespace, name: str) -> None:
        if name in DAMAGING:
            self.damaged.append(sick)
        super()._hurt(sick, name)

    # -- the end ----------------------------------------------------------------------------------

    def _check_books(self) -> None:
        super()._check_books()
        for agent in self.agents:
            if agent.alive and len(agent.volume.holds):
                raise Wrong("a key is held for ever")

    def _check_the_end(self) -> None:
        """A new agent finds what must be there, and can replace it."""
        agent = self._boot(99, 1)
        channel = SimChannel(self.scheduler, self.namespaces, "end")
        self.tallies.append(channel.tallies)
        rng = random.Random(f"{self.seed} end")
        for number in range(self.keys):
            standing = self.standing.get(number)
            found = self.scheduler.finish(self._newest(agent, channel, number))
            if (
                standing
                and self._must_stand(agent, number)
                and found not in [each.value for each in standing]
            ):
                raise Wrong(f"key {number} has neither of the values that it may have")
            self.counts["checked at the end"] += bool(standing)
        for number in range(min(self.keys, 20)):
            self._replace_at_the_end(agent, channel, number, rng)
            found = self.scheduler.finish(self._newest(agent, channel, number))
            if found is None or found != self.changes[number][-1].value:
                raise Wrong(f"key {number} was replaced although all is well, and is not served")

    def _replace_at_the_end(
        self, agent: SimAgent, channel: SimChannel, number: int, rng: random.Random
    ) -> None:
        for _ in range(STORE_TRIES):
            refused = self.counts["refused"]
            self.scheduler.finish(self._replace(agent, channel, number, rng))
            if self.counts["refused"] == refused:
                return
            self.scheduler.now += DAMAGE_LOOK_SECONDS + 0.1
        raise Wrong(f"key {number} cannot be replaced although all is well")
