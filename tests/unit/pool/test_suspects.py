"""A namespace under suspicion gets new values only where the key's other set has no room."""

from __future__ import annotations

from collections import Counter

from agent.pool.format.directory import SLOTS_PER_SET
from tests.support.pool.memory_pool import MemoryPool, PoolAgent, key_of


def places(agent: PoolAgent, numbers: range) -> Counter[int]:
    return Counter(agent.where(key_of(number))[0] for number in numbers)


def test_new_values_go_to_the_other_until_it_is_full() -> None:
    pool = MemoryPool((1, 1))
    agent = pool.agent()
    pool.namespaces[0].suspect = True
    for number in range(SLOTS_PER_SET):
        agent.put(key_of(number), b"value")
    assert places(agent, range(SLOTS_PER_SET)) == {1: SLOTS_PER_SET}
    for number in range(SLOTS_PER_SET, 2 * SLOTS_PER_SET):
        agent.put(key_of(number), b"value")
    assert agent.tally.evictions == 0, "a suspect with room is better than a live value lost"
    assert places(agent, range(2 * SLOTS_PER_SET)) == {0: SLOTS_PER_SET, 1: SLOTS_PER_SET}
    agent.put(key_of(1000), b"value")
    assert agent.tally.evictions == 1


def test_with_all_under_suspicion_everything_is_as_ever() -> None:
    pool = MemoryPool((1, 1))
    agent = pool.agent()
    for namespace in pool.namespaces:
        namespace.suspect = True
    for number in range(SLOTS_PER_SET):
        agent.put(key_of(number), b"value")
    taken = places(agent, range(SLOTS_PER_SET))
    assert taken[0] == taken[1] == SLOTS_PER_SET // 2


def test_what_lies_at_a_suspect_is_served_from_there() -> None:
    pool = MemoryPool((1, 1))
    agent = pool.agent()
    values = {number: bytes([number]) * 100 for number in range(40)}
    for number, value in values.items():
        agent.put(key_of(number), value)
    pool.namespaces[0].suspect = True
    for number, value in values.items():
        assert agent.get(key_of(number), 100) == value
    for number in values:
        assert not agent.put(key_of(number), b"again").stored, (
            "it is there, so it is not stored a second time"
        )
