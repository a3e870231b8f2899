"""A value that is acknowledged leaves no mark of an older one, wherever the mark stands."""

from __future__ import annotations

import pytest

from agent.pool.counters import MissCause
from agent.pool.errors import PutRefused
from agent.pool.write.put import MARK_STAYS
from tests.support.pool.memory_pool import MemoryPool, key_of
from tests.support.pool.spill_pool import SLOTS, MemoryTarget, SpillingAgent, evict_all, value_of


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
