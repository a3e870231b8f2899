"""A whole pool in virtual time from one seed: agents, workers, namespaces and everything that goes wrong.

The seed draws the shape of the pool and which faults it meets, and every choice after that. The oracle
knows every value that anybody began to store under a key and checks

* always: what is served is, byte for byte, the range of one such value; a get ends in time; the misses'
  causes add up; nothing raises but what is promised;
* with one agent (its crashes and restarts included): a value that was acknowledged, not deleted and not
  evicted, whose two candidate namespaces met no fault, is served;
* at the end, when all faults are over: every key can be stored and is then served.

Between several agents a directory update can be lost, which costs a hit; there the second rule is a
statistic (`lost_between_agents`).
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from typing import Any

from agent.pool.access import serve
from agent.pool.counters import MissCause, Tally, total
from agent.pool.errors import PutRefused
from agent.pool.read.batch import PART_BYTES, read_together
from agent.pool.read.get import SlotReader
from agent.pool.read.prestage_cache import PrestageCache
from agent.pool.volume.directory_cache import DAMAGE_LOOK_SECONDS, DirectoryCache
from agent.pool.volume.settings import Timing
from agent.pool.volume.volume import Volume
from agent.pool.write.batch import Untried, write_together
from agent.pool.write.delete_and_pin import pin
from agent.pool.write.put import SlotWriter
from agent.sim.faulty_flash import SimChannel, SimNamespace
from agent.sim.seeded_scheduler import Sleep, StepScheduler
from host_shim.transfer_wire import SHORT_BYTES
from tests.support.pool.memory_pool import SUITES, fixed_secret, key_of, stage_now, volume_settings

Steps = Generator[Any, bool, Any]
READ_DEADLINE, WRITE_DEADLINE = 0.05, 0.5
SECONDS = 4.0
"""How long the faults and the workers go on, in virtual time."""
STORE_TRIES = 4
"""Puts of one key once all is well: the looks at a directory that rotted, each with time between."""


@dataclass
class Wrong(AssertionError):
    """The oracle's objection."""

    what: str

    def __str__(self) -> str:
        return self.what


@dataclass
class SimAgent:
    """One agent: what it remembers is gone when it crashes."""

    number: int
    volume: Volume
    prestage: PrestageCache | None
    channels: list[SimChannel] = field(default_factory=list)
    alive: bool = True
    lives: int = 1


class PoolSimulation:
    """Build it with a seed, `run` it, and look at what it counted."""

    def __init__(self, seed: object) -> None:
        self.seed = seed
        self.rng = rng = random.Random(f"pool simulation {seed}")
        self.scheduler = StepScheduler(seed)
        self.agents_count = rng.choice([1, 1, 2, 3])
        members = rng.randint(1, 5)
        sets = tuple(rng.choice([1, 1, 1, 2]) for _ in range(members))
        self.value_bytes = rng.choice([4096, 12288, 131072, 196608])
        self.settings = volume_settings(sets, value_bytes=self.value_bytes, suite=rng.choice(SUITES))
        slots = self.settings.slots
        self.keys = max(4, int(min(slots, 70) * rng.choice([0.1, 0.3, 0.5, 1.4])))
        self.timing = Timing(READ_DEADLINE, WRITE_DEADLINE, rng.choice([0.0, 0.0, 0.2]))
        self.faults = {
            name: rng.random() < 0.5
            for name in ("hang", "down", "broken", "rot", "lose", "crash", "sabotage", "suspect")
        }
        self.namespaces = [SimNamespace(1 << 40) for _ in sets]
        self.agents = [self._boot(number, 1) for number in range(self.agents_count)]
        self.tallies: list[dict[str, Tally]] = []
        self.stored: dict[int, set[bytes]] = {}
        self.acknowledged: dict[int, bytes] = {}
        self.deletes_begun: Counter[int] = Counter()
        self.being_deleted: Counter[int] = Counter()
        """Deletes under way, of many keys perhaps: any put that ends meanwhile may be what they remove."""
        self.counts: Counter[str] = Counter()
        self.lost_between_agents = 0
        self.over = False

    # -- agents -----------------------------------------------------------------------------------

    def _boot(self, number: int, lives: int) -> SimAgent:
        cache = DirectoryCache(1 << 20)
        volume = Volume(self.settings, fixed_secret(), cache, self.timing)
        prestage = PrestageCache(1 << 20) if self.rng.random() < 0.5 else None
        return SimAgent(number, volume, prestage, lives=lives)

    def _start_workers(self, agent: SimAgent) -> None:
        for number in range(self.rng.randint(1, 3)):
            name = f"a{agent.number}.{agent.lives}.w{number}"
            channel = SimChannel(self.scheduler, self.namespaces, name)
            channel.skew = self.rng.choice([0.0, 0.0, 0.4, -0.3])
            agent.channels.append(channel)
            self.tallies.append(channel.tallies)
            self.scheduler.spawn(name, self._work(agent, channel, name), agent.number)

    def _work(self, agent: SimAgent, channel: SimChannel, name: str) -> Steps:
        rng = random.Random(f"{self.seed} {name}")
        while not self.over:
            yield Sleep(channel.now() + rng.expovariate(1 / 0.04))
            number = rng.randrange(self.keys)
            what = rng.choices(
                ["get", "put", "delete", "lookup", "stage", "pin", "get many", "put many"],
                [50, 40, 4, 4, 6, 2, 8, 6],
            )[0]
            self.counts[what] += 1
            if what == "get":
                yield from self._get(agent, channel, number, rng)
            elif what == "put":
                yield from self._put(agent, channel, number, rng)
            elif what == "delete":
                yield from self._delete(agent, channel, self._with_others(number, rng))
            elif what == "get many":
                yield from self._get_many(agent, channel, rng)
            elif what == "put many":
                yield from self._put_many(agent, channel, rng)
            elif what == "lookup":
                keys = [key_of(rng.randrange(self.keys)) for _ in range(8)]
                yield from agent.volume.lookup(channel, keys, channel.now() + READ_DEADLINE)
            elif what == "pin":
                until = int(channel.wall()) + 5
                deadline = channel.now() + WRITE_DEADLINE
                yield from pin(agent.volume, channel, key_of(number), until, deadline)
            elif agent.prestage is not None:
                yield from stage_now(agent.volume, agent.prestage, channel, key_of(number))
            if channel.unsettled():
                raise Wrong(f"a {what} ended with a read or write still under way in the worker's buffers")

    def crash(self, agent: SimAgent) -> None:
        """kill -9, and a restart a while later with nothing remembered."""
        if not agent.alive or self.over:
            return
        self.counts["crashes"] += 1
        agent.alive = False
        self.scheduler.kill(agent.number)
        for channel in agent.channels:
            channel.crash()

        def restart() -> None:
            if not self.over:
                fresh = self.agents[agent.number] = self._boot(agent.number, agent.lives + 1)
                self._start_workers(fresh)

        self.scheduler.call_at(self.scheduler.now + self.rng.uniform(0.001, 0.3), restart)

    # -- operations, with the oracle looking on ---------------------------------------------------

    def _put(self, agent: SimAgent, channel: SimChannel, number: int, rng: random.Random) -> Steps:
        length = min(self.value_bytes, rng.choice([1, 100, 4096, 9000, 65536, 70_001, 196_608]))
        value = rng.randbytes(length)
        self.stored.setdefault(number, set()).add(value)
        deletes = self.deletes_begun[number]
        ttl = 1 if rng.random() < 0.05 else 0
        whole = rng.random() < 0.5
        writing = SlotWriter(agent.volume, key_of(number), length=length if whole else None, ttl_seconds=ttl)
        step = length if whole else rng.choice([length, 65536, 30_000])
        try:
            for at in range(0, length, step):
                piece = memoryview(value)[at : at + step]
                yield from writing.write(channel, at, piece, channel.now() + WRITE_DEADLINE)
            yield from writing.finish(channel, channel.now() + WRITE_DEADLINE)
        except PutRefused:
            self.counts["refused"] += 1
            return
        if writing.stored:
            forgets = bool(ttl) or deletes != self.deletes_begun[number]
            self._note_stored(number, value, forgets=forgets)

    def _put_many(self, agent: SimAgent, channel: SimChannel, rng: random.Random) -> Steps:
        """Several keys by one call, one of them perhaps twice."""
        numbers = [rng.randrange(self.keys) for _ in range(rng.randint(2, 24))]
        longest = min(self.value_bytes, SHORT_BYTES)
        values = [rng.randbytes(min(longest, rng.choice([1, 100, 4096, 9000, 70_001]))) for _ in numbers]
        for number, value in zip(numbers, values, strict=True):
            self.stored.setdefault(number, set()).add(value)
            self._put_begins(number)
        deletes = [self.deletes_begun[number] for number in numbers]
        keys = [key_of(number) for number in numbers]
        began = channel.now()
        became = yield from write_together(
            agent.volume, channel, keys, [memoryview(value) for value in values], WRITE_DEADLINE
        )
        if channel.now() > began + WRITE_DEADLINE + 1e-9:
            raise Wrong(f"a put of many took {channel.now() - began:.3f} s")
        for number, value, before, one in zip(numbers, values, deletes, became, strict=True):
            self._put_ends(number, refused=not isinstance(one, bool | Untried))
            if one is True:
                self.counts["stored of many"] += 1
                self._note_stored(number, value, forgets=before != self.deletes_begun[number])
            elif isinstance(one, Untried):
                self.counts["untried"] += 1
            elif not isinstance(one, bool):
                self.counts["refused"] += 1

    def _put_begins(self, number: int) -> None:
        """For an oracle that counts the puts of a key."""

    def _put_ends(self, number: int, *, refused: bool) -> None:
        """As `_put_begins`; `refused`: it may still land."""

    def _note_stored(self, number: int, value: bytes, *, forgets: bool) -> None:
        self.counts["stored"] += 1
        if forgets or self.being_deleted[number]:
            self.acknowledged.pop(number, None)
        else:
            self.acknowledged[number] = value

    def _with_others(self, number: int, rng: random.Random) -> list[int]:
        """The keys of one delete: mostly this one alone, or some more, one of them perhaps twice."""
        more = rng.choice([0, 0, 0, 1, 5, 12])
        return [number, *(rng.randrange(self.keys) for _ in range(more))]

    def _delete(self, agent: SimAgent, channel: SimChannel, numbers: Sequence[int]) -> Steps:
        for number in numbers:
            self.acknowledged.pop(number, None)
            self.deletes_begun[number] += 1
        self.being_deleted.update(numbers)
        keys = [key_of(number) for number in numbers]
        try:
            became = yield from serve(agent.volume).delete_many(channel, keys, WRITE_DEADLINE)
        finally:
            self.being_deleted.subtract(numbers)
        for number, one in zip(numbers, became, strict=True):
            self.counts["delete refused"] += isinstance(one, PutRefused)
            self.counts["deleted of many"] += len(numbers) > 1 and one is True
            self.acknowledged.pop(number, None)
            self.deletes_begun[number] += 1
        return became

    def _get(self, agent: SimAgent, channel: SimChannel, number: int, rng: random.Random) -> Steps:
        expected = self.acknowledged.get(number)
        reading = SlotReader(agent.volume, key_of(number), agent.prestage)
        ranges = rng.choice(
            [[(0, self.value_bytes)], [(0, 5000), (5000, 70_000)], [(65_536, 1000), (0, 4096)]]
        )
        candidates = {value: True for value in self.stored.get(number, ())}
        served = False
        for offset, size in ranges:
            into = memoryview(bytearray(size))
            began = channel.now()
            count = yield from reading.read(channel, offset, into, began + READ_DEADLINE)
            if channel.now() > began + READ_DEADLINE + 1e-9:
                raise Wrong(f"a read took {channel.now() - began:.3f} s")
            if reading.cause is not None:
                break
            got = bytes(into[:count])
            # Values that were begun meanwhile count as well.
            candidates = {
                value: True
                for value in self.stored.get(number, ())
                if value[offset : offset + size] == got and len(value) == reading.length
            }
            if not candidates:
                raise Wrong(f"key {number}: bytes {offset}+{count} of a value that nobody stored")
            served = True
            self.counts["bytes checked"] += count
        self.counts["hits" if reading.cause is None else f"miss {reading.cause.name.lower()}"] += 1
        self.counts["counted gets"] += 1
        if reading.cause is not None and not served and self._must_be_there(agent, number, expected):
            if self.agents_count == 1:
                raise Wrong(f"key {number} was acknowledged and is {reading.cause.name}")
            self.lost_between_agents += 1
        return reading.cause is None

    def _get_many(self, agent: SimAgent, channel: SimChannel, rng: random.Random) -> Steps:
        """Several keys by one call, those that it leaves by a get of their own."""
        numbers = [rng.randrange(self.keys) for _ in range(rng.randint(2, 9))]
        if agent.volume.hedge is not None:  # as access.py has it: copies are read one by one
            for number in numbers:
                yield from self._get(agent, channel, number, rng)
            return
        room = rng.choice([self.value_bytes, self.value_bytes, 9000, 8192])
        targets = [memoryview(bytearray(room)) for _ in numbers]
        keys = [key_of(number) for number in numbers]
        began = channel.now()
        became = yield from read_together(agent.volume, channel, keys, targets, READ_DEADLINE)
        parts = 2 + sum(map(len, targets)) // (PART_BYTES // 2)
        if channel.now() > began + parts * READ_DEADLINE + 1e-9:
            raise Wrong(f"a read of many took {channel.now() - began:.3f} s")
        for number, target, length in zip(numbers, targets, became, strict=True):
            if length is None:
                yield from self._get(agent, channel, number, rng)
                continue
            if isinstance(length, MissCause):
                self.counts[f"miss {length.name.lower()}"] += 1
                self.counts["counted gets"] += 1
                continue
            if bytes(target[:length]) not in self.stored.get(number, ()):
                raise Wrong(f"key {number}: {length} bytes, by a read of many, that nobody stored")
            self.counts["bytes checked"] += length
            self.counts["hits"] += 1
            self.counts["hits of many"] += 1
            self.counts["counted gets"] += 1

    def _must_be_there(self, agent: SimAgent, number: int, expected: bytes | None) -> bool:
        if expected is None or self.acknowledged.get(number) != expected:
            return False
        if self.tally().evictions:
            return False
        first, second = agent.volume.placement.candidates(agent.volume.placement.pseudonym(key_of(number)))
        return not any(self.namespaces[each.namespace].tainted for each in (first, second))

    # -- faults -----------------------------------------------------------------------------------

    def _faults(self) -> Steps:
        rng = self.rng
        names = [name for name, on in self.faults.items() if on]
        healthy_from = rng.randint(1, len(self.namespaces))
        while not self.over:
            yield Sleep(self.scheduler.now + rng.expovariate(1 / 0.25))
            if not names or self.over:
                continue
            name = rng.choice(names)
            self.counts[f"fault {name}"] += 1
            if name == "crash":
                self.crash(rng.choice(self.agents))
                continue
            if name == "suspect":
                # Where new values go may change nothing of what is there.
                suspected = rng.choice(self.namespaces)
                suspected.suspect = not suspected.suspect
                continue
            # Some namespaces are left alone, so that the second rule has something to hold on to.
            self._hurt(rng.choice(self.namespaces[:healthy_from]), name)

    def _hurt(self, sick: SimNamespace, name: str) -> None:
        rng, scheduler = self.rng, self.scheduler
        sick.tainted = True
        until = scheduler.now + rng.choice([0.003, 0.03, 0.3, 1.0])
        if name == "hang":
            sick.hang()
            scheduler.call_at(until, lambda: sick.wake(scheduler))
        elif name == "rot":
            sick.rot(rng, rng.choice([1, 5, 40]))
        elif name == "sabotage":
            self._sabotage(sick)
        elif name == "lose":
            sick.lose_writes = rng.choice([0.1, 0.9])
            scheduler.call_at(until, lambda: setattr(sick, "lose_writes", 0.0))
        else:
            setattr(sick, name, True)
            scheduler.call_at(until, lambda: setattr(sick, name, False))

    def _sabotage(self, sick: SimNamespace) -> None:
        """Blocks moved, swapped, blanked or put back as they once were."""
        rng = self.rng
        places = sorted(sick.blocks)
        snapshot = getattr(sick, "snapshot", None)
        for _ in range(rng.choice([1, 8]) if places else 0):
            at, other = rng.choice(places), rng.choice(places)
            old = snapshot.get(at) if snapshot else None
            sick.blocks[at] = rng.choice([sick.blocks[other], bytes(4096), old or sick.blocks[other]])
        sick.snapshot = dict(sick.blocks)  # type: ignore[attr-defined]

    # -- the run ----------------------------------------------------------------------------------

    def tally(self) -> Tally:
        return total(tally for tallies in self.tallies for tally in tallies.values())

    def run(self) -> str:
        """The digest of the run. Raises Wrong, or whatever the code under test should not have raised."""
        for agent in self.agents:
            self._start_workers(agent)
        self.scheduler.spawn("faults", self._faults())

        def stop() -> None:
            self.over = True

        self.scheduler.call_at(self.scheduler.now + SECONDS, stop)
        self.scheduler.run()
        self._check_books()
        self._heal()
        self._check_the_end()
        self.scheduler.note(sorted(self.counts.items()))
        return self.scheduler.digest()

    def _check_books(self) -> None:
        tally = self.tally()
        # A get that a crash cut off may have been counted by the agent and not here.
        if not self.counts["crashes"] and tally.gets_hit + tally.gets_missed != self.counts["counted gets"]:
            raise Wrong(
                f"{tally.gets_hit} hits and {tally.gets_missed} misses of {self.counts['counted gets']}"
            )
        for agent in self.agents:
            for cached in agent.volume.cache.snapshot():
                if agent.alive and (cached.users or cached.reserved or cached.writer.locked()):
                    raise Wrong("a set was left in use")

    def _heal(self) -> None:
        for namespace in self.namespaces:
            namespace.down = namespace.broken = False
            namespace.lose_writes = 0.0
            namespace.wake(self.scheduler)
        self.scheduler.now += 1.0

    def _store_at_the_end(
        self, agent: SimAgent, channel: SimChannel, number: int, rng: random.Random
    ) -> None:
        """A directory that has rotted is written again once looks with time between found the same."""
        for _ in range(STORE_TRIES):
            refused = self.counts["refused"]
            self.scheduler.finish(self._put(agent, channel, number, rng))
            if self.counts["refused"] == refused:
                return
            self.scheduler.now += DAMAGE_LOOK_SECONDS + 0.1
        raise Wrong(f"key {number} cannot be stored although all is well")

    def _check_the_end(self) -> None:
        """A new agent finds what must be there, and can store what is not."""
        agent = self._boot(99, 1)
        channel = SimChannel(self.scheduler, self.namespaces, "end")
        self.tallies.append(channel.tallies)
        before = self.tally().evictions
        rng = random.Random(f"{self.seed} end")
        for number in range(self.keys):
            expected = self.acknowledged.get(number)
            served = self.scheduler.finish(self._whole(agent, channel, number))
            if served is None and self._must_be_there(agent, number, expected):
                if self.agents_count == 1:
                    raise Wrong(f"key {number} was acknowledged and is gone at the end")
                self.lost_between_agents += 1
            self.counts["checked at the end"] += expected is not None
        for number in range(min(self.keys, 20)):
            if self.scheduler.finish(self._whole(agent, channel, number)) is None:
                self._store_at_the_end(agent, channel, number, rng)
                if self.scheduler.finish(self._whole(agent, channel, number)) is None and before == 0:
                    raise Wrong(f"key {number} was stored although all is well, and is not served")

    def _whole(self, agent: SimAgent, channel: SimChannel, number: int) -> Steps:
        reading = SlotReader(agent.volume, key_of(number))
        into = memoryview(bytearray(self.value_bytes))
        count = yield from reading.read(channel, 0, into, channel.now() + READ_DEADLINE)
        if reading.cause is not None:
            return None
        if bytes(into[:count]) not in self.stored.get(number, ()):
            raise Wrong(f"key {number}: a value that nobody stored")
        return bytes(into[:count])
