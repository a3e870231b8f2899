"""How long the leading run is, and from where it comes: over a pool in memory."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from agent.pool.access import LOOKED_UP_AT_ONCE, serve
from agent.pool.counters import MissCause
from agent.pool.read.leading_run import LOOKED_AT_TOGETHER, LeadingRun
from agent.pool.volume.directory_cache import CachedSet
from agent.pool.volume.settings import Timing
from agent.pool.write.write_back import WriteBack
from tests.support.pool.memory_pool import MemoryPool, PoolAgent, key_of, stage_now

VALUE = b"v" * 3000
FIELDS = ("in_memory", "memory_bytes", "on_flash", "flash_bytes", "in_g4", "g4_bytes", "hole")
NOBODY: frozenset[int] = frozenset()


def pool() -> MemoryPool:
    return MemoryPool((64, 64), value_bytes=4096)


def run_of(agent: PoolAgent, keys: Sequence[bytes], away: frozenset[int] = NOBODY) -> LeadingRun:
    """The whole run, by itself and as what goes on with the part that is remembered; they say the same."""
    joined = b"".join(keys)

    def followed(run: LeadingRun) -> LeadingRun:
        deadline = agent.deadline(0.05)
        return agent.channel.run(
            agent.served.leading_run(agent.channel, joined, deadline, agent.prestage, away, run)
        )

    remembered = agent.served.remembered_run(joined, agent.channel.wall(), agent.prestage, away)
    run, more = followed(LeadingRun()), followed(remembered)
    assert [getattr(run, name) for name in FIELDS] == [getattr(more, name) for name in FIELDS]
    return run


def stored(agent: PoolAgent, count: int, first: int = 0) -> list[bytes]:
    keys = [key_of(number) for number in range(first, first + count)]
    for key in keys:
        agent.put(key, VALUE)
    return keys


def test_what_remembered_directories_name_costs_no_round_trip() -> None:
    agent = pool().agent()
    keys = stored(agent, 40)
    before = [namespace.reads for namespace in agent.channel.namespaces]
    run = run_of(agent, keys)
    assert (run.length, run.on_flash, run.in_memory, run.flash_bytes, run.hole) == (40, 40, 0, 120_000, None)
    assert [namespace.reads for namespace in agent.channel.namespaces] == before
    assert agent.tally.lookups == 0


def test_an_agent_that_remembers_nothing_reads_directories_once_and_says_the_same() -> None:
    flash = pool()
    keys = stored(flash.agent(), LOOKED_UP_AT_ONCE + 30)
    other = flash.agent()
    run = run_of(other, [*keys, key_of(9999)])
    assert (run.length, run.hole) == (len(keys), MissCause.NEVER_STORED)
    assert run.flash_bytes == len(keys) * len(VALUE)
    before = sum(namespace.reads for namespace in other.channel.namespaces)
    assert run_of(other, keys).length == len(keys)
    assert sum(namespace.reads for namespace in other.channel.namespaces) == before


def test_the_run_ends_at_the_first_hole_and_tells_its_cause() -> None:
    agent = pool().agent()
    keys = stored(agent, 20)
    agent.delete(keys[7])
    run = run_of(agent, keys)
    assert (run.length, run.hole) == (7, MissCause.NEVER_STORED)
    assert (run_of(agent, []).length, run_of(agent, []).hole) == (0, None)


def test_what_expired_is_a_hole() -> None:
    agent = pool().agent()
    keys = stored(agent, 3)
    agent.put(key_of(100), VALUE, ttl_seconds=5)
    agent.channel.clock += 6
    run = run_of(agent, [*keys, key_of(100)])
    assert (run.length, run.hole) == (3, MissCause.EXPIRED)


def test_what_lies_in_an_enclosure_that_is_away_is_a_hole() -> None:
    agent = pool().agent()
    keys = stored(agent, 30)
    places = [agent.where(key)[0] for key in keys]
    for away in (0, 1):
        run = run_of(agent, keys, frozenset({away}))
        assert (run.length, run.hole) == (places.index(away), MissCause.ENCLOSURE_DOWN)


def test_directories_that_do_not_come_in_time_make_a_hole_of_their_cause() -> None:
    flash = pool()
    keys = stored(flash.agent(), 30)
    other = flash.agent()
    for namespace in other.channel.namespaces:
        namespace.down = True
    run = run_of(other, keys)
    assert (run.length, run.hole) == (0, MissCause.ENCLOSURE_DOWN)


def test_what_waits_prestaged_is_of_memory_also_where_its_enclosure_is_away() -> None:
    flash = pool()
    agent = flash.agent(prestage_bytes=1 << 20)
    keys = stored(agent, 4)
    for key in keys[:2]:
        assert agent.prestage is not None
        assert agent.channel.run(stage_now(agent.volume, agent.prestage, agent.channel, key))
    run = run_of(agent, keys)
    assert (run.in_memory, run.on_flash, run.memory_bytes, run.flash_bytes) == (2, 2, 6000, 6000)
    run = run_of(agent, keys, frozenset({0, 1}))
    assert (run.in_memory, run.length, run.hole) == (2, 2, MissCause.ENCLOSURE_DOWN)


def test_what_waits_prestaged_of_an_earlier_write_is_not_of_memory() -> None:
    flash = pool()
    agent, other = flash.agent(prestage_bytes=1 << 20), flash.agent()
    keys = stored(agent, 2)
    assert agent.prestage is not None
    for key in keys:
        assert agent.channel.run(stage_now(agent.volume, agent.prestage, agent.channel, key))
    assert run_of(agent, keys).in_memory == 2
    other.delete(keys[1])
    other.put(keys[1], VALUE[:2000])
    with agent.volume.borrowed(agent.served.pseudonym(keys[1])) as sets:
        agent.channel.run(agent.volume.load(agent.channel, sets, agent.deadline()))
    run = run_of(agent, keys)
    assert (run.in_memory, run.on_flash, run.memory_bytes, run.flash_bytes) == (1, 1, 3000, 2000)
    assert agent.get(keys[1]) == VALUE[:2000]


def test_what_waits_to_be_written_back_behind_what_is_not_remembered_is_no_hole() -> None:
    flash = pool()
    keys = stored(flash.agent(), 1)
    asking = flash.agent()
    asking.served = serve(asking.volume, back=WriteBack(asking.volume, 1 << 16))
    writing = asking.served.writer(key_of(500), length=len(VALUE))
    assert asking.channel.run(writing.write(asking.channel, 0, memoryview(VALUE), asking.deadline()))
    run = run_of(asking, [*keys, key_of(500), key_of(501)])
    assert (run.on_flash, run.in_memory, run.hole) == (1, 1, MissCause.NEVER_STORED)


@pytest.mark.interpreted
def test_a_run_that_ends_soon_looks_at_few_sets_beyond_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    agent = pool().agent()
    keys = stored(agent, 3)
    looked: list[int] = []
    look = agent.cache.look

    def counted(namespaces: Sequence[int], offsets: Sequence[int]) -> list[CachedSet | None]:
        looked.append(len(namespaces))
        return look(namespaces, offsets)

    monkeypatch.setattr(agent.cache, "look", counted)
    many = b"".join([*keys, *(key_of(number) for number in range(1000, 2000))])
    run = agent.served.remembered_run(many, agent.channel.wall(), None, NOBODY)
    assert (run.length, run.has_ended()) == (3, False)
    assert max(looked) <= LOOKED_AT_TOGETHER
    assert len(looked) == 2


@pytest.mark.parametrize("seed", range(10))
def test_the_run_is_what_exists_says(seed: int) -> None:
    dice = random.Random(seed)
    flash = pool()
    writer, asking = flash.agent(), flash.agent(timing=Timing(directory_fresh=dice.choice((0.0, 10.0))))
    keys = [key_of(number) for number in range(dice.randrange(1, 600))]
    there = set(dice.sample(keys, len(keys) - dice.randrange(0, min(4, len(keys)))))
    for key in there:
        writer.put(key, VALUE)
    for _ in range(3):
        run = run_of(asking, keys)
        causes = asking.channel.run(asking.volume.lookup(asking.channel, keys, asking.deadline(), 10.0))
        expected = next((at for at, cause in enumerate(causes) if cause is not None), len(keys))
        assert (
            run.length == expected == next((at for at, key in enumerate(keys) if key not in there), len(keys))
        )
        assert run.hole == (causes[expected] if expected < len(keys) else None)
