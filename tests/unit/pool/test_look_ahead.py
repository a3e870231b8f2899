"""A replace by directories that were read a while before: what a look saves, and when it does not hold."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from agent.pool.counters import MissCause
from agent.pool.errors import PutRefused
from agent.pool.format.directory import SLOTS_PER_SET
from agent.pool.mutable.look_ahead import Look
from agent.pool.volume.settings import Timing
from agent.pool.write.put import PUT_FRESH_SECONDS, SlotWriter
from tests.support.pool.memory_pool import MemoryPool, PoolAgent, key_of
from tests.unit.pool.test_replaced_values import KEY, named, newest, replace

ALONE = Timing(directory_fresh=1.0)


@pytest.fixture
def pool() -> MemoryPool:
    return MemoryPool((1, 1), value_bytes=1 << 17)


@pytest.fixture
def agent(pool: MemoryPool) -> PoolAgent:
    return pool.agent(timing=ALONE)


def look(agent: PoolAgent) -> Look | None:
    return agent.channel.run(agent.served.look_ahead(agent.channel, KEY, agent.deadline()))


def replace_by(agent: PoolAgent, seen: Look | None, value: bytes) -> int:
    """How many directories it has read."""
    before = agent.tally.directory_reads
    agent.channel.run(agent.served.replace(agent.channel, KEY, value, agent.deadline(), None, seen))
    return agent.tally.directory_reads - before


def the_newest_alone(pool: MemoryPool, agent: PoolAgent, value: bytes) -> None:
    assert newest(agent) == newest(pool.agent()) == value
    assert len(named(pool, agent)) == 1


def test_a_replace_reads_no_directory_after_a_look(pool: MemoryPool, agent: PoolAgent) -> None:
    for value in (b"first", b"second"):
        assert replace_by(agent, look(agent), value) == 0
        the_newest_alone(pool, agent, value)
        agent.age_directories()
    assert replace_by(agent, None, b"third") == 2
    the_newest_alone(pool, agent, b"third")


def test_a_look_reads_what_would_not_hold_for_half_of_the_time_of_a_directory(agent: PoolAgent) -> None:
    reads = []
    for seconds in (0.0, PUT_FRESH_SECONDS, ALONE.directory_fresh / 2):
        agent.channel.clock += seconds
        before = agent.tally.directory_reads
        assert look(agent) is not None
        reads.append(agent.tally.directory_reads - before)
    assert reads == [2, 0, 2]


def test_a_look_holds_no_longer_for_that_its_directories_were_known_before_it(
    pool: MemoryPool, agent: PoolAgent
) -> None:
    look(agent)
    agent.channel.clock += ALONE.directory_fresh * 0.4
    seen = look(agent)
    agent.channel.clock += ALONE.directory_fresh * 0.7
    replace(pool.agent(), b"another's")
    assert replace_by(agent, seen, b"new") == 2
    the_newest_alone(pool, agent, b"new")


def test_a_look_of_long_ago_does_not_hold(pool: MemoryPool, agent: PoolAgent) -> None:
    seen = look(agent)
    agent.channel.clock += ALONE.directory_fresh
    replace(pool.agent(), b"another's")
    assert replace_by(agent, seen, b"new") == 2
    the_newest_alone(pool, agent, b"new")


def test_where_other_agents_write_there_is_no_look(pool: MemoryPool) -> None:
    agent = pool.agent()
    assert look(agent) is None
    assert agent.tally.directory_reads == 0
    assert replace_by(agent, None, b"value") == 2


def test_a_look_at_another_key_does_not_hold(pool: MemoryPool, agent: PoolAgent) -> None:
    seen = agent.channel.run(agent.served.look_ahead(agent.channel, key_of(2), agent.deadline()))
    assert replace_by(agent, seen, b"value") == 2


@pytest.mark.parametrize("has_older", [False, True])
def test_a_look_does_not_hold_once_the_key_was_replaced(
    pool: MemoryPool, agent: PoolAgent, has_older: bool
) -> None:
    if has_older:
        replace(agent, b"old")
    seen = look(agent)
    replace(agent, b"between")
    assert replace_by(agent, seen, b"new") == 2
    the_newest_alone(pool, agent, b"new")


def _is_deleted_in_vain(pool: MemoryPool, agent: PoolAgent) -> None:
    """The entry is taken out here, and flash has it."""
    ((namespace, offset, _, _),) = named(pool, agent)
    pool.namespaces[namespace].unwritable.add(offset)
    with pytest.raises(PutRefused):
        agent.delete(KEY)
    pool.namespaces[namespace].unwritable.clear()
    assert named(pool, agent)


def _is_evicted_in_vain(pool: MemoryPool, agent: PoolAgent) -> None:
    """A put takes the slot, and is given up before it names its own value."""
    channel, pseudonym = agent.channel, agent.volume.placement.pseudonym(KEY)
    for number in range(2, 2 + 2 * SLOTS_PER_SET):
        with agent.volume.borrowed(pseudonym) as sets:
            if all(len(list(cached.directory or ())) == SLOTS_PER_SET for cached in sets):
                break
        agent.put(key_of(number), b"value")
    unit = agent.volume.codec.unit_bytes
    writing = SlotWriter(agent.volume, key_of(1000), length=2 * unit)
    channel.run(writing.write(channel, 0, memoryview(bytes(unit)), agent.deadline()))
    with agent.volume.borrowed(pseudonym) as sets:
        assert not agent.volume.find(sets, pseudonym), "the oldest goes"
    writing.drop()
    assert named(pool, agent)


@pytest.mark.parametrize("happens", [_is_deleted_in_vain, _is_evicted_in_vain])
@pytest.mark.parametrize("is_before", [False, True])
def test_an_older_value_that_flash_alone_names_is_taken_out(
    pool: MemoryPool, agent: PoolAgent, happens: Callable[[MemoryPool, PoolAgent], None], is_before: bool
) -> None:
    replace(agent, b"old")
    seen = None if is_before else look(agent)
    happens(pool, agent)
    # A look after a failed delete reads the directories itself, and sees the entry.
    reads = 0 if is_before and happens is _is_deleted_in_vain else 2
    assert replace_by(agent, look(agent) if is_before else seen, b"new") == reads
    the_newest_alone(pool, agent, b"new")


@pytest.mark.parametrize("fault", ["down", "broken"])
def test_a_set_that_cannot_be_read_is_no_look(pool: MemoryPool, agent: PoolAgent, fault: str) -> None:
    setattr(pool.namespaces[1], fault, True)
    assert look(agent) is None
    with pytest.raises(PutRefused):
        replace_by(agent, None, b"value")
    setattr(pool.namespaces[1], fault, False)
    assert newest(agent) is MissCause.NEVER_STORED
