"""The last units of a value in pieces, which go out together with its header and its entry."""

from __future__ import annotations

import pytest

from agent.pool.counters import MissCause
from agent.pool.errors import BadPut, PutRefused, TooLong
from agent.pool.write.name_together import UnnamedWriter, name_all
from agent.pool.write.put import SlotWriter
from agent.pool.write.writer_base import PutState
from tests.support.pool.memory_pool import MemoryPool, PoolAgent, key_of

UNIT = 1 << 16
VALUE = bytes(range(251)) * (4 * UNIT // 251 + 1)
KEY = key_of(1)


@pytest.fixture
def agent() -> PoolAgent:
    return MemoryPool(value_bytes=4 * UNIT, unit_bytes=UNIT).agent()


def part(first: int, end: int) -> memoryview:
    return memoryview(VALUE)[first:end]


def write(agent: PoolAgent, writing: SlotWriter, first: int, end: int) -> None:
    agent.channel.run(writing.write(agent.channel, first, part(first, end), agent.deadline()))


def finish_with(agent: PoolAgent, writing: SlotWriter, first: int, end: int) -> None:
    agent.channel.run(writing.finish_with(agent.channel, first, part(first, end), agent.deadline()))


def reserved(agent: PoolAgent) -> int:
    return sum(len(cached.reserved) for cached in agent.cache.snapshot())


def held(agent: PoolAgent) -> tuple[int, int, int]:
    puts = agent.volume.puts_in_pieces
    return puts.bytes_held, len(puts), reserved(agent)


@pytest.mark.parametrize(
    ("sent", "last"),
    [
        ([(0, 1)], (1, 2)),
        ([(0, 3)], (3, 4)),
        ([(0, 1), (2, 4)], (1, 2)),
        ([(3, 4), (1, 3)], (0, 1)),
        ([(0, 1)], (1, 4)),
        ([], (0, 2)),
    ],
)
def test_the_value_is_there_whole(
    agent: PoolAgent, sent: list[tuple[int, int]], last: tuple[int, int]
) -> None:
    writing = SlotWriter(agent.volume, KEY)
    for first, end in sent:
        write(agent, writing, first * UNIT, end * UNIT)
    finish_with(agent, writing, last[0] * UNIT, last[1] * UNIT)
    assert writing.stored
    end = max(end for _, end in [*sent, last])
    assert agent.get(KEY) == VALUE[: end * UNIT]
    assert held(agent) == (0, 0, 0)


@pytest.mark.parametrize("tail", [1, UNIT - 1])
def test_an_end_of_less_than_a_unit_is_taken_as_well(agent: PoolAgent, tail: int) -> None:
    writing = SlotWriter(agent.volume, KEY)
    write(agent, writing, 0, UNIT)
    finish_with(agent, writing, UNIT, UNIT + tail)
    assert agent.get(KEY) == VALUE[: UNIT + tail]
    other = SlotWriter(agent.volume, key_of(2))
    write(agent, other, 0, UNIT + tail)
    finish_with(agent, other, UNIT + tail, 3 * UNIT)
    assert agent.get(key_of(2)) == VALUE[: 3 * UNIT]
    assert held(agent) == (0, 0, 0)


def test_a_value_with_a_hole_is_refused(agent: PoolAgent) -> None:
    writing = SlotWriter(agent.volume, KEY)
    write(agent, writing, 0, UNIT)
    with pytest.raises(BadPut):
        finish_with(agent, writing, 2 * UNIT, 3 * UNIT)
    assert agent.get(KEY) is MissCause.NEVER_STORED
    assert held(agent) == (0, 0, 0)


def test_a_unit_is_sealed_once(agent: PoolAgent) -> None:
    writing = SlotWriter(agent.volume, KEY)
    write(agent, writing, 0, 2 * UNIT)
    with pytest.raises(BadPut):
        finish_with(agent, writing, UNIT, 2 * UNIT)
    assert writing.state is PutState.REFUSED
    assert held(agent) == (0, 0, 0)


def test_bytes_beyond_the_slot_are_refused(agent: PoolAgent) -> None:
    writing = SlotWriter(agent.volume, KEY)
    write(agent, writing, 0, 3 * UNIT)
    with pytest.raises(TooLong):
        agent.channel.run(
            writing.finish_with(agent.channel, 3 * UNIT, memoryview(bytes(2 * UNIT)), agent.deadline())
        )
    writing.drop()
    assert held(agent) == (0, 0, 0)


@pytest.mark.parametrize("is_unnamed", [False, True])
@pytest.mark.parametrize("fault", ["broken", "down", "hung"])
def test_an_enclosure_that_fails_refuses_the_put(agent: PoolAgent, fault: str, is_unnamed: bool) -> None:
    writing = (UnnamedWriter if is_unnamed else SlotWriter)(agent.volume, KEY)
    write(agent, writing, 0, UNIT)
    for namespace in agent.channel.namespaces:
        setattr(namespace, fault, True)
    with pytest.raises(PutRefused):
        finish_with(agent, writing, UNIT, 2 * UNIT)
    for namespace in agent.channel.namespaces:
        setattr(namespace, fault, False)
    assert not writing.stored
    assert held(agent) == (0, 0, 0)
    assert isinstance(agent.get(KEY), MissCause)


def test_an_unnamed_value_is_there_once_it_is_named(agent: PoolAgent) -> None:
    writing = UnnamedWriter(agent.volume, KEY)
    write(agent, writing, 0, 2 * UNIT)
    assert not writing.is_unnamed
    finish_with(agent, writing, 2 * UNIT, 4 * UNIT)
    assert writing.is_unnamed
    assert agent.get(KEY) is MissCause.NEVER_STORED
    agent.channel.run(name_all(agent.volume, agent.channel, [writing], agent.deadline()))
    assert writing.stored
    assert agent.get(KEY) == VALUE[: 4 * UNIT]
    assert held(agent) == (0, 0, 0)


def test_one_that_waits_in_pieces_notices_another_agents_value_in_its_slot() -> None:
    pool = MemoryPool((1,), value_bytes=4 * UNIT, unit_bytes=UNIT)
    agent, other = pool.agent(), pool.agent()
    writing = UnnamedWriter(agent.volume, KEY)
    write(agent, writing, 0, UNIT)
    for number in range(64):
        other.put(key_of(100 + number), VALUE[:UNIT])
    agent.age_directories()
    agent.channel.clock += 1.0
    assert agent.get(key_of(100)) == VALUE[:UNIT]
    finish_with(agent, writing, UNIT, 2 * UNIT)
    with pytest.raises(PutRefused, match="another agent"):
        agent.channel.run(name_all(agent.volume, agent.channel, [writing], agent.deadline()))
    assert held(agent) == (0, 0, 0)
