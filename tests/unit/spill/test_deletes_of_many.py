"""Deletes of many keys by one call, of values that are in G4: none is served again."""

from __future__ import annotations

import pytest

from agent.pool.counters import MissCause
from tests.support.pool.memory_pool import MemoryPool, key_of
from tests.support.pool.spill_pool import MemoryTarget, causes_once_deleted, evict_all, full, value_of

pytestmark = pytest.mark.usefixtures("mark_blocks")


def test_values_in_g4_are_gone() -> None:
    spilling = full(MemoryTarget(), MemoryPool((1,)))
    evict_all(spilling)
    agent = spilling.agent
    keys = [key_of(number) for number in (0, 1, 2, 3, 5000)]
    assert agent.get(key_of(0)) == value_of(0)
    became = agent.channel.run(agent.served.delete_many(agent.channel, keys, 5.0))
    assert became == [True, True, True, True, False]
    assert all(agent.get(key) in causes_once_deleted() for key in keys)
    assert agent.get(key_of(4)) == value_of(4)


def test_a_removal_is_remembered_of_each() -> None:
    """For marks of it that another agent's image may bring back."""
    spilling = full(MemoryTarget(), MemoryPool((1,)))
    spilling.spill()
    agent, removed = spilling.agent, spilling.agent.volume.removed_marks
    before = len(removed)
    keys = [key_of(number) for number in range(4)]
    assert agent.channel.run(agent.served.delete_many(agent.channel, keys, 5.0)) == [True] * 4
    assert len(removed) - before == 4
    assert all(isinstance(agent.get(key), MissCause) for key in keys)
