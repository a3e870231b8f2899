"""What `/kv` says of a value in G4 by path agrees with what a session says of it."""

from __future__ import annotations

import pytest

from agent.pool.counters import MissCause
from agent.pool.format.sealed_slot import HEADER_BYTES
from tests.support.pool.memory_pool import SUITES, MemoryPool, key_of
from tests.support.pool.spill_pool import MemoryTarget, SpillingAgent, evict_all, full, value_of

pytestmark = pytest.mark.usefixtures("mark_blocks")


def spilled(suite: str = SUITES[0]) -> tuple[SpillingAgent, MemoryTarget]:
    target = MemoryTarget()
    spilling = full(target, MemoryPool((1,), suite=suite))
    evict_all(spilling)
    target.fetched.clear()
    return spilling, target


def length_of(spilling: SpillingAgent, number: int) -> int | None:
    agent = spilling.agent
    return agent.channel.run(agent.served.find_length(agent.channel, key_of(number)))


@pytest.mark.parametrize("suite", SUITES)
def test_the_length_of_a_value_in_g4_is_what_its_header_proves(suite: str) -> None:
    spilling, target = spilled(suite)
    agent = spilling.agent
    lookup = agent.volume.lookup(agent.channel, [key_of(1), key_of(9999)], agent.deadline())
    assert agent.channel.run(lookup) == [None, MissCause.NEVER_STORED]
    assert length_of(spilling, 1) == len(value_of(1))
    assert length_of(spilling, 9999) is None
    ((_, _, size),) = target.fetched
    assert HEADER_BYTES <= size < len(value_of(1)), "the header is asked for, and not the value"
    assert agent.get(key_of(1)) == value_of(1)
    assert agent.tally.gets_from_g4 == 1, "a length is no get"


def test_where_g4_does_not_give_the_header_there_is_no_length() -> None:
    spilling, target = spilled()
    target.damage = lambda data: bytes(len(data))
    assert length_of(spilling, 1) is None
    target.damage = lambda data: data[:100]
    assert length_of(spilling, 1) is None
    target.objects.clear()
    assert length_of(spilling, 1) is None


def test_a_deleted_value_has_no_length() -> None:
    spilling, target = spilled()
    assert spilling.agent.delete(key_of(1))
    assert length_of(spilling, 1) is None
    assert not target.fetched
