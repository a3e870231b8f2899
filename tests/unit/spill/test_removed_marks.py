"""A mark that an older image of another agent brings back is followed no more, and is taken out again."""

from __future__ import annotations

import pytest

from agent.pool.counters import MissCause
from agent.pool.format.directory import Directory
from agent.pool.volume.directory_cache import COOLDOWN_SECONDS
from agent.pool.volume.removed_marks import FORGET_SECONDS, KEYS_MAX, LOOKS, MARKS_MAX, RemovedMarks
from tests.support.pool.memory_pool import MemoryPool, key_of
from tests.support.pool.spill_pool import (
    MemoryTarget,
    SpillingAgent,
    causes_once_deleted,
    evict_all,
    full,
    value_of,
)

pytestmark = pytest.mark.usefixtures("mark_blocks")

MARK, OTHER = bytes(range(8)), bytes(range(1, 9))


def pool_with_marks() -> tuple[MemoryPool, SpillingAgent, SpillingAgent]:
    """Two agents, and the values of keys 0 to 7 in G4."""
    target, pool = MemoryTarget(), MemoryPool((1,))
    first = full(target, pool)
    evict_all(first)
    second = SpillingAgent(pool.agent(), target)
    second.agent.channel.clock = first.agent.channel.clock = first.agent.channel.clock + 10.0
    return pool, first, second


def image_of(pool: MemoryPool) -> tuple[int, int, bytes]:
    namespace, offset, directory = pool.directories()[0]
    return namespace, offset, directory.image()


def bring_back(pool: MemoryPool, image: tuple[int, int, bytes]) -> None:
    """What another agent read before lands now."""
    namespace, offset, block = image
    pool.namespaces[namespace].store(offset, [block])


def pass_looks(agent: SpillingAgent, other: SpillingAgent, count: int = 1) -> None:
    for _ in range(count):
        agent.agent.channel.clock += LOOKS[0] + 0.001
        other.agent.channel.clock = agent.agent.channel.clock
        agent.spill(store=False)


def test_a_deleted_value_whose_mark_comes_back_is_served_by_the_deleting_agent_no_more() -> None:
    pool, first, second = pool_with_marks()
    assert second.agent.get(key_of(1)) == value_of(1)
    before = image_of(pool)
    assert first.agent.delete(key_of(1))
    bring_back(pool, before)
    first.agent.channel.clock += 0.001
    assert isinstance(first.agent.get(key_of(1)), MissCause)
    assert first.agent.channel.run(
        first.agent.volume.lookup(first.agent.channel, [key_of(1), key_of(2)], first.agent.deadline())
    ) == [MissCause.EVICTED, None]
    # Until the deleting agent has looked again, the other one finds it.
    assert second.agent.get(key_of(1)) == value_of(1)
    pass_looks(first, second)
    assert first.agent.volume.removed_marks.found_again == 1
    for agent in (first.agent, second.agent):
        assert agent.get(key_of(1)) in causes_once_deleted()
        assert agent.get(key_of(2)) == value_of(2), "the marks of others stay"


def test_what_an_image_brings_back_a_minute_later_goes_as_well() -> None:
    pool, first, second = pool_with_marks()
    before = image_of(pool)
    assert first.agent.delete(key_of(1))
    pass_looks(first, second, 60)
    assert len(first.agent.volume.removed_marks) == 1
    bring_back(pool, before)
    first.agent.channel.clock += COOLDOWN_SECONDS
    assert isinstance(first.agent.get(key_of(1)), MissCause)
    pass_looks(first, second)
    assert second.agent.get(key_of(1)) in causes_once_deleted()


def test_an_entry_that_comes_back_leaves_no_mark() -> None:
    """The other agent copied the value while it was there, and would evict the entry that came back."""
    target, pool = MemoryTarget(), MemoryPool((1,))
    first = full(target, pool, all_values=True)
    second = SpillingAgent(pool.agent(), target, all_values=True)
    second.agent.channel.clock = first.agent.channel.clock = first.agent.channel.clock + 10.0
    second.put(key_of(5000), value_of(5000))
    second.spill()
    assert second.spiller.counts.values
    number = next(each for each in range(8, 64) if isinstance(first.agent.get(key_of(each)), bytes))
    before = image_of(pool)
    assert first.agent.delete(key_of(number))
    bring_back(pool, before)
    pass_looks(first, second)
    pseudonym = first.agent.volume.placement.pseudonym(key_of(number))
    assert Directory(image_of(pool)[2]).find(pseudonym) is None
    evict_all(second)
    assert isinstance(second.agent.get(key_of(number)), MissCause)


def test_of_a_put_anew_the_older_value_does_not_come_up() -> None:
    pool, first, second = pool_with_marks()
    before = image_of(pool)
    first.agent.put(key_of(1), value_of(501))
    bring_back(pool, before)
    first.agent.channel.clock += 0.001
    assert first.agent.get(key_of(1)) != value_of(1)
    pass_looks(first, second)
    assert second.agent.get(key_of(1)) != value_of(1)


def test_an_image_goes_out_over_what_was_read_just_now_alone() -> None:
    """An agent that writes one set all the time has to read it as well."""
    _, first, second = pool_with_marks()
    for number in range(20):
        second.agent.channel.clock += 0.015
        first.agent.channel.clock = second.agent.channel.clock
        if number == 10:
            assert first.agent.delete(key_of(1))
        second.agent.put(key_of(6000 + number), value_of(number))
    second.agent.channel.clock += 1.0
    assert second.agent.get(key_of(1)) in causes_once_deleted()


def test_the_table_knows_the_newest_marks_of_the_newest_keys() -> None:
    removed = RemovedMarks()
    removed.note(b"key", [MARK], 0.0, generations=[7])
    assert removed.is_removed(b"key", OTHER, LOOKS[-2]), "any mark, as long as an image may be on its way"
    assert removed.is_removed(b"key", MARK, 60.0)
    assert not removed.is_removed(b"key", OTHER, 60.0)
    assert not removed.is_removed(b"another key", MARK, 0.0)
    assert removed.was_erased(b"key", 7)
    assert [removed.next_due(at) for at in (0.0, LOOKS[0], LOOKS[0])] == [None, b"key", None]
    removed.note(b"key", [bytes((each,)) * 8 for each in range(MARKS_MAX)], 1.0)
    assert removed.next_due(1.0 + LOOKS[0]) == b"key"
    assert removed.next_due(1.0 + LOOKS[0]) is None, "the looks of before are no more"
    assert not removed.is_removed(b"key", MARK, 60.0)
    for number in range(KEYS_MAX):
        removed.note(number.to_bytes(4, "big"), [], 2.0)
    assert len(removed) == KEYS_MAX
    assert not removed.was_erased(b"key", 7)
    for look in LOOKS:
        assert sum(removed.next_due(2.001 + look) is not None for _ in range(KEYS_MAX + 1)) == KEYS_MAX
    assert len(removed) == KEYS_MAX, "the last look still asks"
    assert removed.next_due(2.001 + LOOKS[-1] + FORGET_SECONDS) is None
    assert len(removed) == 0
