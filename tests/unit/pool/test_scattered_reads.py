"""A value read into a buffer that lies in several places, as a guest's pages do."""

from __future__ import annotations

import random

import pytest

from agent.inline.scatter import Scatter
from agent.pool.counters import MissCause
from agent.pool.read.get import SlotReader
from tests.support.pool.memory_pool import SUITES, MemoryPool, key_of

UNIT = 1 << 16
LENGTH = 3 * UNIT
BLOB = random.Random(35).randbytes(LENGTH)


def runs_of(total: int, rng: random.Random) -> list[memoryview]:
    sizes = []
    while total:
        sizes.append(min(total, rng.randint(1, 40_000)))
        total -= sizes[-1]
    return [memoryview(bytearray(size)) for size in sizes]


@pytest.mark.parametrize("suite", SUITES)
def test_any_range_into_any_runs(suite: str, seed: int) -> None:
    agent = MemoryPool((1, 1), value_bytes=4 * UNIT, unit_bytes=UNIT, suite=suite).agent()
    agent.put(key_of(1), BLOB)
    rng = random.Random(f"{seed} {suite}")
    for _ in range(40):
        offset = rng.choice([0, UNIT, rng.randrange(LENGTH)])
        size = rng.choice([LENGTH, UNIT, rng.randint(1, LENGTH)])
        into = runs_of(size, rng)
        reading = SlotReader(agent.volume, key_of(1))
        got = agent.channel.run(reading.read(agent.channel, offset, Scatter(into), agent.deadline()))
        expected = BLOB[offset : offset + size]
        assert b"".join(into)[:got] == expected
        reading.close()


def test_whole_units_of_gcm_are_not_copied() -> None:
    agent = MemoryPool((1, 1), value_bytes=4 * UNIT, unit_bytes=UNIT).agent()
    agent.put(key_of(1), BLOB)
    into = runs_of(LENGTH, random.Random(1))
    reading = SlotReader(agent.volume, key_of(1))
    assert agent.channel.run(reading.read(agent.channel, 0, Scatter(into), agent.deadline())) == LENGTH
    assert agent.tally.bytes_copied == 0


def test_what_does_not_prove_itself_stays_nowhere() -> None:
    pool = MemoryPool((1, 1), value_bytes=4 * UNIT, unit_bytes=UNIT)
    agent = pool.agent()
    agent.put(key_of(1), BLOB)
    namespace, offset, _ = agent.where(key_of(1))
    pool.namespaces[namespace].flip(offset + 4096 + 2 * UNIT + 100)
    into = runs_of(LENGTH, random.Random(1))
    reading = SlotReader(agent.volume, key_of(1))
    assert agent.channel.run(reading.read(agent.channel, 0, Scatter(into), agent.deadline())) == 0
    assert reading.cause is MissCause.CORRUPT
    assert not any(b"".join(into))
