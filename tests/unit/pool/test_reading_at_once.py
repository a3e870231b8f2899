"""Several readers of one open value: a program that reads a file ahead, or with many requests in flight."""

from __future__ import annotations

import pytest

from agent.pool.counters import MissCause
from agent.pool.read.get import SlotReader
from agent.pool.steps import Acquire, Steps
from tests.support.pool.memory_channel import rest_of
from tests.support.pool.memory_pool import MemoryPool, PoolAgent, key_of

LENGTH = 9000


@pytest.fixture
def agent() -> PoolAgent:
    agent = MemoryPool(value_bytes=16384).agent()
    agent.put(key_of(1), bytes(range(250)) * (LENGTH // 250))
    return agent


def waiting_for_another(agent: PoolAgent, reading: SlotReader, into: memoryview) -> Steps[int]:
    """A read that has begun while another reader looks for the slot, which goes on once that has found it."""
    with reading._beginning:
        steps = reading.read(agent.channel, 0, into, agent.deadline())
        first = next(steps)
        assert isinstance(first, Acquire)
    return _going_on(steps, first)


def _going_on(steps: Steps[int], wanted: Acquire) -> Steps[int]:
    return (yield from rest_of(steps, (yield wanted)))


def test_one_that_waited_reads_what_the_other_has_found(agent: PoolAgent) -> None:
    reading = agent.served.reader(key_of(1))
    assert isinstance(reading, SlotReader)
    one, two = bytearray(LENGTH), bytearray(LENGTH)
    waits = waiting_for_another(agent, reading, memoryview(two))
    assert agent.channel.run(reading.read(agent.channel, 0, memoryview(one), agent.deadline())) == LENGTH
    assert agent.channel.run(waits) == LENGTH
    assert one == two == bytes(range(250)) * (LENGTH // 250)
    assert (agent.tally.gets_hit, agent.tally.gets_missed) == (1, 0)


def test_one_that_waited_for_what_is_not_there_misses_with_it(agent: PoolAgent) -> None:
    reading = agent.served.reader(key_of(2))
    assert isinstance(reading, SlotReader)
    into = memoryview(bytearray(LENGTH))
    waits = waiting_for_another(agent, reading, into)
    assert agent.channel.run(reading.read(agent.channel, 0, into, agent.deadline())) == 0
    assert agent.channel.run(waits) == 0
    assert reading.cause is MissCause.NEVER_STORED
    assert (agent.tally.gets_hit, agent.tally.gets_missed) == (0, 1)
