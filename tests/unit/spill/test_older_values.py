"""A value that is acknowledged leaves no mark of an older one, wherever the mark stands."""

from __future__ import annotations

import pytest

from agent.pool.counters import MissCause
from agent.pool.errors import PutRefused
from agent.pool.write.admission import SecondUse, SecondUseWriter
from agent.pool.write.put import MARK_STAYS
from agent.pool.write.write_back import BackWriter, WriteBack
from agent.pool.write.writer_base import PutState
from tests.support.pool.memory_pool import MemoryPool, key_of
from tests.support.pool.spill_pool import SLOTS, MemoryTarget, SpillingAgent, evict_all, full, value_of

pytestmark = pytest.mark.usefixtures("mark_blocks")


def two_sets() -> tuple[MemoryPool, MemoryTarget, SpillingAgent, dict[int, int]]:
    """A pool of two sets, each on an enclosure, and where the marks of some keys stand."""
    target, pool = MemoryTarget(), MemoryPool((1, 1))
    spilling = SpillingAgent(pool.agent(), target)
    for number in range(2 * SLOTS):
        spilling.put(key_of(number), value_of(number))
    for number in range(8):
        spilling.agent.get(key_of(number))
    evict_all(spilling, count=6 * SLOTS)
    volume, marked = spilling.agent.volume, {}
    for number in range(8):
        pseudonym = volume.placement.pseudonym(key_of(number))
        with volume.borrowed(pseudonym) as sets:
            for cached, _ in volume.marks(sets, pseudonym):
                marked[number] = cached.namespace
    assert marked
    return pool, target, spilling, marked


def free_a_slot(spilling: SpillingAgent, namespace: int) -> None:
    agent = spilling.agent
    for number in range(1000 + 6 * SLOTS - 1, 1000, -1):
        if isinstance(agent.get(key_of(number)), bytes) and agent.where(key_of(number))[0] == namespace:
            assert agent.delete(key_of(number))
            return


def test_a_put_is_refused_while_the_enclosure_that_may_have_an_older_values_mark_is_away() -> None:
    pool, target, spilling, marked = two_sets()
    number, namespace = next(iter(marked.items()))
    free_a_slot(spilling, 1 - namespace)
    anew = SpillingAgent(pool.agent(), target).agent
    anew.channel.clock = spilling.agent.channel.clock + 100
    pool.namespaces[namespace].down = True
    with pytest.raises(PutRefused, match=MARK_STAYS):
        anew.put(key_of(number), value_of(501), ttl_seconds=5)
    pool.namespaces[namespace].down = False
    anew.put(key_of(number), value_of(501), ttl_seconds=5)
    assert anew.get(key_of(number)) == value_of(501)
    anew.channel.clock += 10
    assert isinstance(anew.get(key_of(number)), MissCause), "and not the older value"


def test_without_a_place_in_g4_the_other_enclosure_takes_it() -> None:
    pool, _, spilling, marked = two_sets()
    number, namespace = next(iter(marked.items()))
    free_a_slot(spilling, 1 - namespace)
    plain = pool.agent()
    plain.channel.clock = spilling.agent.channel.clock + 100
    pool.namespaces[namespace].down = True
    plain.put(key_of(number), value_of(501))
    assert plain.get(key_of(number)) == value_of(501)


def test_a_put_that_is_taken_and_forgotten_takes_the_older_values_mark_out() -> None:
    spilling = full(MemoryTarget())
    evict_all(spilling)
    agent, value = spilling.agent, value_of(501)
    agent.channel.clock += 1
    writing = SecondUseWriter(agent.volume, key_of(1), SecondUse(), length=len(value), ttl_seconds=0)
    agent.channel.run(writing.write(agent.channel, 0, memoryview(value), agent.deadline()))
    assert writing.state is PutState.DECLINED
    assert isinstance(agent.get(key_of(1)), MissCause)
    assert agent.get(key_of(2)) == value_of(2)


def test_of_a_put_into_memory_that_is_lost_the_older_value_does_not_come_up() -> None:
    spilling = full(MemoryTarget())
    evict_all(spilling)
    agent, value, back = spilling.agent, value_of(501), WriteBack(spilling.agent.volume, 1 << 20)
    agent.channel.clock += 1
    assert back.set_aside(len(value))
    writing = BackWriter(back, key_of(1), len(value), 0)
    agent.channel.run(writing.write(agent.channel, 0, memoryview(value), agent.deadline()))
    assert writing.state is PutState.STORED
    waiting = back.find(writing.pseudonym)
    assert waiting is not None
    assert back.give_up_idle(waiting, agent.channel)
    assert isinstance(agent.get(key_of(1)), MissCause)


def test_a_put_into_memory_is_refused_while_an_older_values_mark_cannot_be_taken_out() -> None:
    pool, target, spilling, marked = two_sets()
    number, namespace = next(iter(marked.items()))
    anew = SpillingAgent(pool.agent(), target).agent
    anew.channel.clock = spilling.agent.channel.clock + 100
    value, back = value_of(501), WriteBack(anew.volume, 1 << 20)
    assert back.set_aside(len(value))
    pool.namespaces[namespace].down = True
    writing = BackWriter(back, key_of(number), len(value), 0)
    with pytest.raises(PutRefused, match=MARK_STAYS):
        anew.channel.run(writing.write(anew.channel, 0, memoryview(value), anew.deadline()))
    assert not len(back)
    assert back.bytes_held == 0
