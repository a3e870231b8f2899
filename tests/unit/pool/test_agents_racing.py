"""Agents that share a pool, and workers that share an agent, racing at every yield.

The step scheduler draws who goes on; a seed is one interleaving. What must hold in all of them: what is
served is what somebody stored under that key; within one agent nothing acknowledged is lost; between
agents a lost directory update may cost a hit, and how often is measured.
"""

from __future__ import annotations

import random
from collections.abc import Generator
from typing import Any

import pytest

from agent.pool.counters import MissCause, Tally, total
from agent.pool.errors import PutRefused
from agent.pool.format.directory import DIRECTORY_BYTES, Directory
from agent.pool.read.get import SlotReader
from agent.pool.volume.directory_cache import DirectoryCache
from agent.pool.volume.settings import Timing
from agent.pool.volume.volume import Volume
from agent.pool.write.batch import write_together
from agent.pool.write.delete_and_pin import delete
from agent.pool.write.put import SlotWriter
from agent.sim.faulty_flash import SimChannel, SimNamespace
from agent.sim.seeded_scheduler import Sleep, StepScheduler
from tests.support.pool.memory_pool import (
    SUITES,
    MemoryPool,
    PoolAgent,
    fixed_secret,
    key_of,
    volume_settings,
)

Steps = Generator[Any, bool, Any]
TIMING = Timing(read_deadline=5.0, write_deadline=20.0)


class Race:
    """One pool, some agents with directories of their own, each with some workers."""

    def __init__(
        self,
        seed: object,
        *,
        agents: int,
        sets: tuple[int, ...] = (1, 1),
        timing: Timing = TIMING,
        **settings: Any,
    ) -> None:
        self.rng = random.Random(f"race {seed}")
        self.scheduler = StepScheduler(seed)
        self.namespaces = [SimNamespace(1 << 40) for _ in sets]
        self.settings = volume_settings(sets, **{"value_bytes": 131072, **settings})
        self.volumes = [
            Volume(self.settings, fixed_secret(), DirectoryCache(1 << 20), timing) for _ in range(agents)
        ]
        self.channels: list[SimChannel] = []
        self.stored: dict[bytes, set[bytes]] = {}
        """Every value that somebody began to store under a key."""
        self.under_way: set[bytes] = set()
        """Of these, those whose puts have not ended."""
        self.acknowledged: dict[bytes, bytes] = {}
        self.gets = 0
        self.wrong: list[str] = []

    def worker(self, name: str, volume: Volume, work: list[tuple[str, int]], owner: object = None) -> None:
        channel = SimChannel(self.scheduler, self.namespaces, name)
        self.channels.append(channel)
        self.scheduler.spawn(name, self._work(name, volume, channel, work), owner)

    def _work(self, name: str, volume: Volume, channel: SimChannel, work: list[tuple[str, int]]) -> Steps:
        for what, number in work:
            yield Sleep(channel.now() + self.rng.random() * 0.001)
            if what == "put":
                yield from self.put(name, volume, channel, number)
            elif what == "get":
                yield from self.get(volume, channel, number)
            else:
                try:
                    yield from delete(volume, channel, key_of(number), channel.now() + 20)
                    self.acknowledged.pop(key_of(number), None)
                except PutRefused:
                    pass

    def put(self, name: str, volume: Volume, channel: SimChannel, number: int) -> Steps:
        key = key_of(number)
        value = random.Random(f"{name} {number} {self.rng.random()}").randbytes(
            min(self.settings.value_bytes, self.rng.choice([100, 5000, 65536, 100_000]))
        )
        self.stored.setdefault(key, set()).add(value)
        self.under_way.add(value)
        writing = SlotWriter(volume, key, length=len(value) if self.rng.random() < 0.5 else None)
        at = 0
        try:
            while at < len(value):
                size = self.rng.choice([len(value), 40_000, 65536])
                piece = memoryview(value)[at : at + size]
                yield from writing.write(channel, at, piece, channel.now() + 20)
                at += len(piece)
            yield from writing.finish(channel, channel.now() + 20)
        except PutRefused:
            return False
        finally:
            self.under_way.discard(value)
        if writing.stored:
            self.acknowledged[key] = value
        return writing.stored

    def get(self, volume: Volume, channel: SimChannel, number: int) -> Steps:
        """Read in ranges; what was served must be the beginning of one single stored value."""
        reading = SlotReader(volume, key_of(number))
        self.gets += 1
        got = b""
        while True:
            into = bytearray(self.rng.choice([131072, 30_000]))
            count = yield from reading.read(channel, len(got), memoryview(into), channel.now() + 5)
            if not count:
                break
            got += into[:count]
        if got and not any(value.startswith(got) for value in self.stored.get(key_of(number), ())):
            self.wrong.append(f"key {number}: {len(got)} bytes that nobody stored")
        if reading.cause is None and got not in self.stored.get(key_of(number), ()):
            self.wrong.append(f"key {number}: ended after {len(got)} bytes without a cause")
        return reading.cause if reading.cause is not None else got

    def directories(self) -> list[Directory]:
        """Every directory as it lies on flash."""
        found = []
        for extent in self.settings.extents:
            for number in range(extent.sets):
                block = memoryview(bytearray(DIRECTORY_BYTES))
                offset = extent.offset + number * self.settings.set_bytes
                self.namespaces[extent.namespace].load(offset, block)
                found.append(Directory(block))
        return found

    def tally(self) -> Tally:
        return total(tally for channel in self.channels for tally in channel.tallies.values())

    def run(self) -> None:
        self.scheduler.run()
        assert not self.wrong, self.wrong
        tally = self.tally()
        assert tally.gets_hit + tally.gets_missed == self.gets, "the causes do not add up"
        for volume in self.volumes:
            for cached in volume.cache.snapshot():
                assert not cached.users, "a set was not given back"
                assert not cached.reserved
                assert not cached.writer.locked()


def mixed_work(rng: random.Random, keys: int, count: int, *, deletes: bool) -> list[tuple[str, int]]:
    kinds = ["put", "put", "get", "get", "get"] + ["delete"] * deletes
    return [(rng.choice(kinds), rng.randrange(keys)) for _ in range(count)]


@pytest.mark.parametrize("suite", SUITES)
@pytest.mark.parametrize("agents", [1, 2, 3])
def test_racing_agents_serve_nothing_wrong(agents: int, suite: str, seed: int) -> None:
    """Few keys, few slots, deletions and evictions: everybody is in everybody's way."""
    for run in range(12):
        race = Race((seed, run, suite), agents=agents, sets=(1, 1), suite=suite)
        for number in range(4):
            work = mixed_work(race.rng, keys=6, count=14, deletes=True)
            race.worker(f"w{number}", race.volumes[number % agents], work)
        race.run()


def test_racing_agents_in_a_full_volume(seed: int) -> None:
    """Slots are reused all the time, so directories remembered elsewhere lead to other keys' values."""
    evictions = stale = 0
    for run in range(4):
        race = Race((seed, "full", run), agents=2, sets=(1,), value_bytes=8192)
        for number in range(6):
            work = mixed_work(race.rng, keys=250, count=90, deletes=False)
            race.worker(f"w{number}", race.volumes[number % 2], work)
        race.run()
        evictions += race.tally().evictions
        stale += race.tally().stale_hints
    assert evictions > 50
    assert stale > 10, "the hints were never old; the test does not test"


def test_workers_of_one_agent_lose_nothing(seed: int) -> None:
    """Six workers put different keys into two sets at once; each acknowledged value is there afterwards,
    for this agent and for one that starts afresh."""
    for run in range(8):
        race = Race((seed, "one agent", run), agents=2, sets=(1, 1))
        for number in range(6):
            work: list[tuple[str, int]] = []
            for each in range(10):
                work.append(("put", number * 10 + each))
                work.append(("get", race.rng.randrange(60)))
            race.worker(f"w{number}", race.volumes[0], work)
        race.run()
        assert len(race.acknowledged) == 60
        found = read_all(race, race.volumes[0])
        assert found == race.acknowledged, f"seed {seed} run {run}"
        assert read_all(race, race.volumes[1]) == race.acknowledged, f"seed {seed} run {run}, after a restart"


def test_workers_of_one_agent_store_one_key_once(seed: int) -> None:
    """Whole and in pieces, all at once: the first to be named stays, and nobody hears of it before it is
    on flash."""
    for run in range(30):
        race = Race((seed, "one key", run), agents=2, sets=(1, 1))
        for number in range(6):
            race.worker(f"w{number}", race.volumes[0], [("put", 1), ("get", 1), ("get", 1)])
        race.run()
        assert race.tally().puts == 1, f"seed {seed} run {run}"
        assert race.tally().puts_already_there == 5
        assert race.tally().gets_hit == 12, "acknowledged, and then not there"
        named = [entry for directory in race.directories() for _, entry in directory]
        assert len(named) == 1
        assert read_all(race, race.volumes[1]) == race.acknowledged
        race.worker("d", race.volumes[0], [("delete", 1)])
        race.run()
        assert key_of(1) not in read_all(race, race.volumes[0]), "a copy outlived the delete"


def test_a_put_that_fails_or_is_cut_off_lets_the_next_one_store(seed: int) -> None:
    """Whoever waits for a key's turn gets it when the put before ends, however that ends."""
    stored = refused = 0
    for run in range(40):
        race = Race((seed, "turns", run), agents=1, sets=(1, 1), timing=Timing(5.0, 0.05))
        scheduler = race.scheduler
        heal_at = scheduler.now + race.rng.uniform(0.001, 0.006)

        def heal(race: Race = race) -> None:
            for namespace in race.namespaces:
                namespace.broken = False

        for namespace in race.namespaces:
            namespace.broken = True
        scheduler.call_at(heal_at, heal)
        for number in range(3):
            race.worker(f"w{number}", race.volumes[0], [("put", 1)] * 3)
        race.worker("victim", race.volumes[0], [("put", 1)] * 3, owner="victim")
        scheduler.call_at(heal_at + race.rng.uniform(0.0, 0.002), lambda s=scheduler: s.kill("victim"))
        scheduler.run()
        assert not len(race.volumes[0].key_locks), f"seed {seed} run {run}: a turn was kept"
        assert race.tally().puts <= 1
        stored += race.tally().puts
        refused += race.tally().puts_refused
        race.worker("last", race.volumes[0], [("put", 1)])
        scheduler.run()
        assert key_of(1) in read_all(race, race.volumes[0]), f"seed {seed} run {run}"
    assert stored > 10
    assert refused > 10


def read_all(race: Race, volume: Volume) -> dict[bytes, bytes]:
    channel = SimChannel(race.scheduler, race.namespaces, "reader")
    race.channels.append(channel)
    found = {}
    for number in range(110):
        if key_of(number) in race.stored:
            served = race.scheduler.finish(race.get(volume, channel, number))
            if not isinstance(served, MissCause):
                found[key_of(number)] = served
    return found


@pytest.mark.parametrize(("sets", "most"), [(2, 0.7), (32, 0.15)])
def test_between_agents_an_update_is_seldom_lost(sets: int, most: float, seed: int) -> None:
    """Two agents put different keys as fast as they can: what lost directory updates cost, in hits.

    Far denser than a pool is: 4 or 64 sets, against thousands. The bounds are tripwires.
    """
    stored = lost = 0
    for run in range(8 if sets == 2 else 3):
        race = Race((seed, "two agents", run), agents=3, sets=(sets, sets), value_bytes=8192)
        for number in range(4):
            work = [("put", number * 25 + each) for each in range(25)]
            race.worker(f"w{number}", race.volumes[number % 2], work)
        race.run()
        found = read_all(race, race.volumes[2])
        stored += len(race.acknowledged)
        lost += len(race.acknowledged) - len(found)
        assert all(found[key] in race.stored[key] for key in found)
    print(f"{lost} of {stored} lost between two agents putting without a pause into {2 * sets} sets")
    assert lost / stored < most


def test_delete_wins_over_old_directories_of_others(seed: int) -> None:
    """After an acknowledged delete nobody who starts to read later gets the value, whatever they remember."""
    for run in range(10):
        race = Race((seed, "delete", run), agents=3, sets=(1, 1))
        for number in range(8):
            race.worker(f"p{number}", race.volumes[0], [("put", number)])
        race.run()
        for volume in race.volumes:
            read_all(race, volume)
        deleters = SimChannel(race.scheduler, race.namespaces, "d")
        gone: set[int] = set()

        def deleting(race: Race = race, channel: SimChannel = deleters, gone: set[int] = gone) -> Steps:
            for number in range(8):
                there = yield from delete(race.volumes[0], channel, key_of(number), channel.now() + 20)
                assert there
                gone.add(number)

        def watching(race: Race, volume: Volume, channel: SimChannel, gone: set[int]) -> Steps:
            for _ in range(40):
                number = race.rng.randrange(8)
                was_gone = number in gone
                served = yield from race.get(volume, channel, number)
                assert not (was_gone and isinstance(served, bytes)), f"seed {seed}: key {number} came back"

        race.scheduler.spawn("deleter", deleting())
        for number in (1, 2):
            channel = SimChannel(race.scheduler, race.namespaces, f"watch{number}")
            race.channels.append(channel)
            race.scheduler.spawn(f"watch{number}", watching(race, race.volumes[number], channel, gone))
        race.run()


def test_the_same_seed_is_the_same_run(seed: int) -> None:
    digests = set()
    for _ in range(2):
        race = Race((seed, "same"), agents=2)
        for number in range(4):
            race.worker(f"w{number}", race.volumes[number % 2], mixed_work(race.rng, 6, 12, deletes=True))
        race.run()
        digests.add(race.scheduler.digest())
    assert len(digests) == 1


SECONDS = 0.01
"""Between two puts of one agent: a put trusts what was read for twice as long."""


def in_turn(*agents: PoolAgent) -> None:
    for agent in agents:
        agent.channel.clock += SECONDS


@pytest.mark.parametrize("together", [False, True])
def test_an_agent_that_writes_a_set_all_the_time_hears_of_others(together: bool) -> None:
    """Its own writes are no reads of the directory: one that was read 20 ms ago is read again."""
    pool = MemoryPool((1,))
    busy, other = pool.agent(), pool.agent()
    theirs: list[bytes] = []
    heard: list[bytes] = []
    for number in range(40):
        in_turn(busy, other)
        if number % 7 == 0:
            theirs.append(key_of(100 + number))
            other.put(theirs[-1], b"theirs" * 1000)
        reads = busy.tally.directory_reads
        if together:
            values = [memoryview(b"ours" * 100)]
            storing = write_together(busy.volume, busy.channel, [key_of(number)], values, 5.0)
            assert busy.channel.run(storing) == [True]
        else:
            busy.put(key_of(number), b"ours" * 1000)
        if number % 7 == 0 and busy.tally.directory_reads > reads:
            heard.append(theirs[-1])
    assert 10 <= busy.tally.directory_reads <= 30, "not with each put"
    third = pool.agent()
    assert [key for key in theirs if third.get(key) == b"theirs" * 1000] == heard != []


def test_a_value_in_pieces_is_named_beside_what_others_stored_meanwhile() -> None:
    pool = MemoryPool((1,))
    agent, other = pool.agent(), pool.agent()
    value = bytes(range(250)) * 48
    writing = SlotWriter(agent.volume, key_of(1), length=len(value))
    half = len(value) // 2
    agent.channel.run(writing.write(agent.channel, 0, memoryview(value)[:half], agent.deadline()))
    other.put(key_of(2), b"theirs")
    in_turn(agent, other, agent, agent)
    agent.channel.run(writing.write(agent.channel, half, memoryview(value)[half:], agent.deadline()))
    assert writing.stored
    third = pool.agent()
    assert third.get(key_of(1)) == value
    assert third.get(key_of(2)) == b"theirs"


def test_what_the_operator_says_is_read_by_nobody_else_is_not_read_again() -> None:
    pool = MemoryPool((1,))
    agent = pool.agent(timing=Timing(directory_fresh=1.0))
    for number in range(40):
        in_turn(agent)
        agent.put(key_of(number), b"ours" * 1000)
    assert agent.tally.directory_reads == 1
