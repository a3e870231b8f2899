"""Prestaged values that wait opened."""

from __future__ import annotations

import random

import pytest

from agent.pool.counters import MissCause
from agent.pool.format.sealed_slot import HEADER_BYTES
from agent.pool.prestage.prefetcher import stage
from agent.pool.read.prestage_cache import PrestageCache
from agent.pool.read.reader_base import MemoryReader
from tests.support.pool.memory_pool import SUITES, MemoryPool, PoolAgent, key_of, stage_now

SIZE = 150_000


@pytest.fixture(params=SUITES)
def agent(request: pytest.FixtureRequest) -> PoolAgent:
    agent = MemoryPool(value_bytes=262_144, suite=request.param).agent()
    agent.prestage = PrestageCache(1 << 20, waits_open=True)
    agent.put(key_of(1), VALUE, ttl_seconds=100)
    return agent


VALUE = random.Random(35).randbytes(SIZE)


def staged(agent: PoolAgent) -> MemoryReader:
    assert agent.prestage is not None
    assert agent.channel.run(stage_now(agent.volume, agent.prestage, agent.channel, key_of(1)))
    reading = agent.served.reader(key_of(1), agent.prestage)
    assert isinstance(reading, MemoryReader)
    return reading


def read(agent: PoolAgent, reading: MemoryReader, offset: int = 0, size: int = 262_144) -> bytes:
    into = bytearray(size)
    count = agent.channel.run(reading.read(agent.channel, offset, memoryview(into), agent.deadline()))
    assert not any(into[count:])
    return bytes(into[:count])


def test_it_is_served_in_any_range_without_a_read(agent: PoolAgent) -> None:
    reading = staged(agent)
    reads = sum(each.reads for each in agent.channel.namespaces)
    assert reading.length is None
    assert read(agent, reading) == VALUE
    assert reading.length == SIZE
    for offset, size in ((0, 1), (65_535, 2), (SIZE - 1, 9), (SIZE, 9), (SIZE + 5, 9)):
        assert read(agent, reading, offset, size) == VALUE[offset : offset + size]
    assert sum(each.reads for each in agent.channel.namespaces) == reads
    assert (agent.tally.gets_hit, agent.tally.prestage_hits) == (1, 1)
    assert agent.prestage is not None
    size = HEADER_BYTES + agent.volume.codec.padded(SIZE)
    assert agent.prestage.bytes_held == size
    assert agent.prestage.counts(agent.volume.settings.volume_id).useful_bytes == size


def test_another_write_of_the_key_is_not_served_from_it(agent: PoolAgent) -> None:
    staged(agent).close()
    assert agent.delete(key_of(1))
    agent.put(key_of(1), b"another")
    reading = agent.served.reader(key_of(1), agent.prestage)
    assert not isinstance(reading, MemoryReader)
    assert agent.prestage is not None
    assert agent.prestage.bytes_held == 0
    assert agent.get(key_of(1)) == b"another"


def test_it_expires_and_is_erased_like_any_other(agent: PoolAgent) -> None:
    reading, another = staged(agent), staged(agent)
    assert read(agent, reading, size=10) == VALUE[:10]
    agent.channel.clock += 101.0
    for each in (reading, another):
        assert read(agent, each) == b""
        assert each.cause is MissCause.EXPIRED
    agent.channel.clock -= 101.0
    reading = staged(agent)
    agent.volume.change(erased=True)
    assert read(agent, reading) == b""
    assert reading.cause is MissCause.WRONG_KEY
    assert (agent.tally.gets_hit, agent.tally.gets_missed) == (0, 3)


def test_what_does_not_prove_itself_waits_sealed_and_flash_decides(agent: PoolAgent) -> None:
    namespace, offset, _ = agent.where(key_of(1))
    agent.channel.namespaces[namespace].flip(offset + 4096 + 70_000)
    assert agent.prestage is not None
    assert agent.channel.run(stage_now(agent.volume, agent.prestage, agent.channel, key_of(1)))
    assert not isinstance(agent.served.reader(key_of(1), agent.prestage), MemoryReader)
    assert agent.get(key_of(1)) is MissCause.CORRUPT


def test_a_guess_waits_sealed(agent: PoolAgent) -> None:
    assert agent.prestage is not None
    pseudonym = agent.volume.placement.pseudonym(key_of(1))
    assert agent.prestage.expect(agent.volume.settings.volume_id, pseudonym)
    assert agent.channel.run(stage(agent.volume, agent.prestage, agent.channel, pseudonym))
    assert not isinstance(agent.served.reader(key_of(1), agent.prestage), MemoryReader)
    assert agent.get(key_of(1)) == VALUE
    assert agent.tally.prestage_hits == 1
