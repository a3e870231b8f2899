"""A mark counts in a directory alone that was asked for since the get began."""

from __future__ import annotations

import pytest

from agent.pool.counters import MissCause
from agent.pool.volume.settings import Timing
from tests.support.pool.memory_pool import MemoryPool, key_of
from tests.support.pool.spill_pool import MemoryTarget, SpillingAgent

pytestmark = pytest.mark.usefixtures("mark_blocks")

VALUE = bytes(range(250)) * 40


@pytest.mark.parametrize("milliseconds", [0.0, 1.0, 15.0, 1000.0])
def test_a_delete_that_was_over_before_the_get_is_seen(milliseconds: float) -> None:
    target, pool = MemoryTarget(), MemoryPool((1,))
    first = SpillingAgent(pool.agent(), target)
    for number in range(64):
        first.put(key_of(number), VALUE)
    for number in range(8):
        assert first.agent.get(key_of(number)) == VALUE
    for number in range(1000, 1256):
        first.put(key_of(number), VALUE)
    second = SpillingAgent(pool.agent(timing=Timing(directory_fresh=10.0)), target)
    second.agent.channel.clock = first.agent.channel.clock = first.agent.channel.clock + 60.0
    # The second agent has just read the set.
    assert second.agent.get(key_of(1)) == VALUE
    assert first.agent.delete(key_of(1))
    second.agent.channel.clock += milliseconds / 1e3
    assert isinstance(second.agent.get(key_of(1)), MissCause)
    assert second.agent.get(key_of(2)) == VALUE
