"""What an operation costs: round trips, reads, writes and bytes on flash."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Generator
from typing import Any

import pytest

from agent.pool.counters import MissCause
from agent.pool.read.get import SlotReader
from agent.pool.volume.directory_cache import APPROXIMATE_BYTES, DirectoryCache
from agent.pool.volume.settings import Timing
from agent.pool.volume.volume import Volume
from agent.pool.write.put import SlotWriter
from agent.sim.faulty_flash import SimChannel, SimNamespace
from agent.sim.seeded_scheduler import StepScheduler
from tests.support.pool.memory_pool import MemoryPool, PoolAgent, fixed_secret, key_of, volume_settings

SLOW = Timing(read_deadline=100.0, write_deadline=100.0, directory_fresh=1000.0)


class Timed:
    """A volume on flash where every read and write takes exactly one second."""

    def __init__(self, sets: tuple[int, ...] = (2, 2), **settings: Any) -> None:
        self.scheduler = StepScheduler("costs")
        self.namespaces = [SimNamespace(1 << 40, latency=(1.0, 1.0)) for _ in sets]
        self.settings = volume_settings(sets, **settings)
        self.channel = SimChannel(self.scheduler, self.namespaces)
        self.volume = self.open()

    def open(self, directory_fresh: float = SLOW.directory_fresh) -> Volume:
        timing = dataclasses.replace(SLOW, directory_fresh=directory_fresh)
        return Volume(self.settings, fixed_secret(), DirectoryCache(1 << 20), timing)

    def took(self, steps: Generator[Any, bool, Any]) -> tuple[float, int, int]:
        """Seconds (that is, round trips), reads and writes."""
        before = self.scheduler.now, self.reads(), self.writes()
        self.scheduler.finish(steps)
        after = self.scheduler.now, self.reads(), self.writes()
        return round(after[0] - before[0], 3), after[1] - before[1], after[2] - before[2]

    def reads(self) -> int:
        return sum(namespace.reads for namespace in self.namespaces)

    def writes(self) -> int:
        return sum(namespace.writes for namespace in self.namespaces)

    def put(self, key: bytes, value: bytes) -> Generator[Any, bool, Any]:
        writing = SlotWriter(self.volume, key, length=len(value))
        return writing.write(self.channel, 0, memoryview(value), self.channel.now() + 100)

    def get(self, key: bytes, volume: Volume | None = None, offset: int = 0) -> Generator[Any, bool, Any]:
        reading = SlotReader(volume or self.volume, key)
        into = memoryview(bytearray(self.settings.value_bytes))
        return reading.read(self.channel, offset, into, self.channel.now() + 100)


def test_round_trips_of_a_put_and_a_get() -> None:
    timed = Timed()
    assert timed.took(timed.put(key_of(1), b"v" * 9000)) == (2.0, 2, 2), "cold: two directories, then both"
    warm = next(number for number in range(2, 99) if _all_known(timed, key_of(number)))
    assert timed.took(timed.put(key_of(warm), b"v" * 9000)) == (1.0, 0, 2), "one slot and one directory"
    assert timed.took(timed.get(key_of(1))) == (1.0, 1, 0), "one round trip, one read"
    cold = timed.open()
    assert timed.took(timed.get(key_of(1), cold)) == (2.0, 3, 0)
    assert timed.took(timed.get(key_of(1), cold)) == (1.0, 1, 0)
    assert timed.took(timed.put(key_of(1), b"v" * 9000)) == (0.0, 0, 0), "there already"


def _all_known(timed: Timed, key: bytes) -> bool:
    sets = timed.volume.borrow_sets(timed.volume.placement.pseudonym(key))
    timed.volume.give_back_sets(sets)
    return all(cached.directory is not None for cached in sets)


def test_a_range_in_the_middle_costs_one_round_trip_too() -> None:
    timed = Timed(value_bytes=1 << 18)
    timed.took(timed.put(key_of(1), random.Random(1).randbytes(200_000)))
    assert timed.took(timed.get(key_of(1), offset=150_000)) == (1.0, 2, 0), "header and unit side by side"


def test_an_absent_key_costs_nothing_while_the_directories_are_fresh() -> None:
    timed = Timed((1,))
    assert timed.took(timed.get(key_of(1)))[:2] == (1.0, 1)
    assert timed.took(timed.get(key_of(1))) == (0.0, 0, 0)
    many = [key_of(number) for number in range(200)]
    assert timed.took(timed.volume.lookup(timed.channel, many, timed.channel.now() + 9)) == (0.0, 0, 0)


def test_a_lookup_asks_for_many_keys_in_one_round_trip() -> None:
    timed = Timed((4, 4))
    for number in range(6):
        timed.took(timed.put(key_of(number), b"v"))
    timed.volume = timed.open()
    keys = [key_of(number) for number in range(12)]
    task = timed.scheduler.spawn("lookup", timed.volume.lookup(timed.channel, keys, timed.channel.now() + 99))
    before = timed.scheduler.now
    timed.scheduler.run()
    assert task.result == [None] * 6 + [MissCause.NEVER_STORED] * 6
    assert timed.scheduler.now - before == pytest.approx(1.0, abs=0.01)
    assert timed.reads() <= 12 + 8


@pytest.mark.parametrize("pieces", [1, 4, 7])
def test_write_amplification_at_one_mebibyte(pieces: int) -> None:
    """Bytes to the namespaces by bytes of values: header and directory come to 0.8 %."""
    pool = MemoryPool((2, 2), value_bytes=1 << 20, unit_bytes=1 << 18)
    agent = pool.agent()
    value = random.Random(1).randbytes(1 << 20)
    step = -(-len(value) // pieces)
    for number in range(16):
        writing = SlotWriter(agent.volume, key_of(number), length=len(value) if pieces == 1 else None)
        for at in range(0, len(value), step):
            piece = memoryview(value)[at : at + step]
            agent.channel.run(writing.write(agent.channel, at, piece, agent.deadline()))
        agent.channel.run(writing.finish(agent.channel, agent.deadline()))
    written = sum(namespace.bytes_written for namespace in pool.namespaces)
    ratio = written / (16 * len(value))
    assert ratio < 1.02, f"{ratio:.4f}"
    assert ratio == pytest.approx(1 + 8192 / (1 << 20))


def test_a_range_reads_only_the_units_it_needs() -> None:
    pool = MemoryPool((1,), value_bytes=1 << 20, unit_bytes=1 << 16)
    agent = pool.agent()
    value = random.Random(1).randbytes(1 << 20)
    agent.put(key_of(1), value)

    def bytes_read(run: Callable[[], object]) -> int:
        before = agent.channel.tallies[""].flash_bytes_read
        run()
        return agent.channel.tallies[""].flash_bytes_read - before

    assert bytes_read(lambda: agent.get(key_of(1), 4096, 0)) == 4096 + 65536
    assert bytes_read(lambda: agent.get(key_of(1), 4096, 300_000)) == 4096 + 65536
    assert bytes_read(lambda: agent.get(key_of(1), 65537, 65535)) == 4096 + 2 * 65536
    reading = SlotReader(agent.volume, key_of(1))
    agent.read(reading, 65536, 0)
    assert bytes_read(lambda: agent.read(reading, 65536, 65536)) == 65536, "the header is read once"


def test_only_ends_of_ranges_are_copied() -> None:
    agent = MemoryPool((1,), value_bytes=1 << 20, unit_bytes=1 << 16).agent()
    value = random.Random(1).randbytes(1 << 20)
    agent.put(key_of(1), value)
    agent.get(key_of(1), 1 << 20, 0)
    assert agent.tally.bytes_copied == 0
    agent.get(key_of(1), 1 << 19, 1000)
    assert agent.tally.bytes_copied <= 2 * 65536


def test_the_directory_cache_stays_within_its_bound() -> None:
    pool = MemoryPool((40, 40))
    agent: PoolAgent = pool.agent(cache_bytes=20 * APPROXIMATE_BYTES)
    for number in range(300):
        agent.put(key_of(number), b"v")
    assert len(agent.cache) <= 20
    # A batch that uses more sets at once than the cache has room for gives the room back afterwards.
    keys = [key_of(number) for number in range(300)]
    there = agent.channel.run(agent.volume.lookup(agent.channel, keys, agent.deadline()))
    assert there == [None] * 300
    agent.get(key_of(1000))
    assert len(agent.cache) <= 20
    assert all(cached.users == 0 for cached in agent.cache.snapshot())
    assert [agent.get(key) for key in keys] == [b"v"] * 300
