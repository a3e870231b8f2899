"""`hold`: keys that are all there, and that this agent does not evict meanwhile."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import pytest

from agent.pool.access import serve
from agent.pool.counters import MissCause
from agent.pool.errors import BadPut, PutRefused
from agent.pool.mutable.lookup_and_hold import HELD_AT_ONCE
from agent.pool.volume.directory_cache import CachedSet
from agent.pool.volume.eviction_holds import HELD_KEYS, Hold
from agent.pool.volume.quota import Limits, Measured, Quota
from agent.pool.volume.settings import Timing
from agent.pool.volume.volume import Found, TenantShare, Volume
from agent.pool.write.delete_and_pin import PINNED_SLOTS_MAX
from agent.pool.write.quota_eviction import evict_one
from tests.support.pool.memory_pool import MemoryPool, PoolAgent, key_of
from tests.unit.pool.test_costs import Timed


def hold(agent: PoolAgent, numbers: Sequence[int], holder: int = 0) -> Hold | MissCause:
    keys = [key_of(number) for number in numbers]
    return agent.channel.run(agent.served.hold(agent.channel, keys, agent.deadline(), holder))


def held(agent: PoolAgent, numbers: Sequence[int], holder: int = 0) -> Hold:
    found = hold(agent, numbers, holder)
    assert isinstance(found, Hold)
    return found


def stored(count: int = 64, sets: tuple[int, ...] = (1,)) -> tuple[MemoryPool, PoolAgent]:
    pool = MemoryPool(sets, value_bytes=4096)
    agent = pool.agent()
    for number in range(count):
        agent.put(key_of(number), b"value %d" % number)
        agent.channel.clock += 1
    return pool, agent


def test_a_held_key_is_not_evicted_until_it_is_let_go() -> None:
    _, agent = stored()
    hold_of_the_oldest = held(agent, range(20))
    assert hold_of_the_oldest.kept == 20
    agent.channel.clock += 1000
    for number in range(20, 64):
        agent.get(key_of(number))
    for number in range(100, 140):
        agent.put(key_of(number), b"new")
    assert all(agent.get(key_of(number)) == b"value %d" % number for number in range(20))
    hold_of_the_oldest.let_go()
    hold_of_the_oldest.let_go()
    assert len(agent.volume.holds) == agent.volume.holds.bound.held == 0
    agent.channel.clock += 1000
    for number in range(200, 263):
        agent.put(key_of(number), b"new")
    assert sum(agent.get(key_of(number)) is MissCause.EVICTED for number in range(20)) > 10


def test_an_eviction_for_the_quota_leaves_it_alone() -> None:
    _, agent = stored(count=20)
    kept = held(agent, range(20))
    assert not agent.channel.run(evict_one(agent.volume, agent.channel, agent.deadline()))
    kept.let_go()
    assert agent.channel.run(evict_one(agent.volume, agent.channel, agent.deadline()))


def test_one_missing_key_is_its_cause_and_nothing_is_held() -> None:
    pool, agent = stored(count=5)
    assert hold(agent, [0, 1, 7]) is MissCause.NEVER_STORED
    assert len(agent.volume.holds) == 0
    agent.put(key_of(9), b"short", ttl_seconds=1)
    agent.channel.clock += 2
    assert hold(agent, [0, 9]) is MissCause.EXPIRED
    pool.namespaces[0].down = True
    assert hold(agent, [0]) is MissCause.ENCLOSURE_DOWN, "what is remembered is no answer"
    pool.namespaces[0].down, pool.namespaces[0].hung = False, True
    assert hold(agent, [0]) is MissCause.LATE
    assert len(agent.volume.holds) == 0


def test_what_another_agent_took_away_is_missed_at_once() -> None:
    pool, agent = stored(count=5)
    assert pool.agent().delete(key_of(3))
    assert hold(agent, range(5)) is MissCause.NEVER_STORED


def test_holds_of_one_key_are_counted() -> None:
    _, agent = stored()
    first, second = held(agent, [0, 0, 1]), held(agent, [0])
    assert (first.kept, second.kept) == (2, 1)
    first.let_go()
    agent.channel.clock += 1000
    for number in range(1, 64):
        agent.get(key_of(number))
    agent.put(key_of(100), b"new")
    assert agent.get(key_of(0)) == b"value 0"
    second.let_go()


def test_of_one_set_no_more_than_half_is_held_or_pinned() -> None:
    _, agent = stored()
    for number in range(10):
        until = int(agent.channel.wall()) + 10_000
        assert agent.channel.run(agent.served.pin(agent.channel, key_of(number), until, agent.deadline()))
    kept = [held(agent, [number]) for number in range(10, 64)]
    assert sum(each.kept for each in kept) == PINNED_SLOTS_MAX - 10
    until = int(agent.channel.wall()) + 10_000
    assert not agent.channel.run(agent.served.pin(agent.channel, key_of(63), until, agent.deadline()))
    agent.put(key_of(100), b"new")
    for each in kept:
        each.let_go()


def test_a_hold_counts_as_use() -> None:
    _, agent = stored(count=2)
    held(agent, [0]).let_go()
    pseudonym = agent.volume.placement.pseudonym(key_of(0))
    sets = agent.volume.borrow_sets(pseudonym)
    assert agent.volume.find(sets, pseudonym)[0].entry.hits == 1
    agent.volume.give_back_sets(sets)


def test_a_user_leaves_as_much_room_to_others_as_he_has() -> None:
    _, agent = stored(count=2)
    most = HELD_KEYS.most
    names = [number.to_bytes(16, "big") for number in range(1, 1 + most // 2)]
    assert agent.volume.holds.take(names, 1000).kept == 0
    assert agent.volume.holds.take(names[: most // 4], 1000).kept == most // 4
    asked = held(agent, [0], 1000)
    assert asked.kept == 1
    assert held(agent, [1], 1001).kept == 1


def test_more_keys_than_may_be_are_the_callers_fault() -> None:
    _, agent = stored(count=1)
    with pytest.raises(BadPut, match="at once"):
        hold(agent, range(HELD_AT_ONCE + 1))
    assert held(agent, []).kept == 0
    agent.volume.change(erased=True)
    assert hold(agent, [0]) is MissCause.WRONG_KEY


def test_sixteen_keys_cost_one_round_trip_and_each_directory_one_read() -> None:
    timed = Timed((4, 4), value_bytes=4096)
    timed.volume = timed.open(directory_fresh=0.0)
    keys = [key_of(number) for number in range(16)]
    for key in keys:
        timed.took(timed.put(key, b"value"))
    places = {
        (each.namespace, each.set_number)
        for key in keys
        for each in timed.volume.placement.candidates(timed.volume.placement.pseudonym(key))
    }
    cost = timed.took(serve(timed.volume).hold(timed.channel, keys, 1e9))
    assert cost == (1.0, len(places), 0)


def test_the_set_that_names_a_key_is_read_and_the_other_where_it_does_not_any_more() -> None:
    pool = MemoryPool((1, 1), value_bytes=4096)
    agent, other = pool.agent(), pool.agent()

    def holding() -> tuple[Hold | MissCause, list[int]]:
        before = [namespace.reads for namespace in pool.namespaces]
        found = hold(agent, [0])
        return found, [each.reads - at for each, at in zip(pool.namespaces, before, strict=True)]

    pool.namespaces[1].suspect = True
    agent.put(key_of(0), b"value")
    found, reads = holding()
    assert isinstance(found, Hold)
    assert reads == [1, 0]

    # Another agent takes it away, and stores it again in the other set.
    other.delete(key_of(0))
    pool.namespaces[0].suspect, pool.namespaces[1].suspect = True, False
    other.put(key_of(0), b"value")
    found, reads = holding()
    assert isinstance(found, Hold)
    assert reads == [1, 1]
    found, reads = holding()
    assert isinstance(found, Hold)
    assert reads == [0, 1]
    other.delete(key_of(0))
    assert holding() == (MissCause.NEVER_STORED, [1, 1])
    assert holding() == (MissCause.NEVER_STORED, [1, 1]), "nothing is believed to be absent"
    pool.namespaces[0].down = True
    assert holding()[0] is MissCause.ENCLOSURE_DOWN, "it may lie there"


def test_a_hold_after_a_wrong_hint_takes_one_round_trip_more() -> None:
    timed = Timed((4, 4), value_bytes=4096)
    timed.volume = timed.open(directory_fresh=0.0)
    timed.took(timed.put(key_of(0), b"value"))
    took = functools.partial(serve(timed.volume).hold, timed.channel, [key_of(0)], 1e9)
    assert timed.took(took()) == (1.0, 1, 0)
    timed.took(serve(timed.open()).delete(timed.channel, key_of(0), 1e9))
    assert timed.took(took()) == (2.0, 2, 0)
    assert timed.took(took()) == (1.0, 2, 0)


def test_a_put_is_refused_where_all_it_could_evict_is_kept() -> None:
    _, agent = stored()
    for number in range(PINNED_SLOTS_MAX):
        until = int(agent.channel.wall()) + 10_000
        agent.channel.run(agent.served.pin(agent.channel, key_of(number), until, agent.deadline()))
    # Beyond what `hold` grants: the table itself holds whatever it is told.
    rest = [agent.volume.placement.pseudonym(key_of(number)) for number in range(PINNED_SLOTS_MAX, 64)]
    everything = agent.volume.holds.take(rest, 0)
    with pytest.raises(PutRefused, match="no slot"):
        agent.put(key_of(100), b"new")
    everything.let_go()
    agent.put(key_of(100), b"new")


def test_a_single_agent_reads_no_directory_that_it_has_just_read() -> None:
    """With `directory_fresh` the operator says that no other agent changes them."""
    pool = MemoryPool((2, 2), value_bytes=4096)
    agent = pool.agent(timing=Timing(directory_fresh=1.0))
    for number in range(16):
        agent.put(key_of(number), b"value")
    reads = agent.tally.directory_reads
    held(agent, range(16)).let_go()
    assert agent.tally.directory_reads == reads
    agent.delete(key_of(3))
    assert hold(agent, range(16)) is MissCause.NEVER_STORED
    reads = agent.tally.directory_reads
    assert hold(agent, [100]) is MissCause.NEVER_STORED
    assert agent.tally.directory_reads > reads, "that a key is not there is asked"
    other = pool.agent()
    other.put(key_of(3), b"value")
    held(agent, range(16)).let_go()
    agent.age_directories()
    reads = agent.tally.directory_reads
    held(agent, range(16)).let_go()
    assert agent.tally.directory_reads == reads + 4
    other.delete(key_of(5))
    agent.age_directories()
    assert hold(agent, range(16)) is MissCause.NEVER_STORED


@pytest.mark.interpreted
def test_a_single_agent_looks_for_each_key_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each open of a file asks for all of its chunks: what is remembered is gone through once."""
    pool, looks = MemoryPool((2, 2), value_bytes=4096), []
    agent = pool.agent(timing=Timing(directory_fresh=1.0))
    for number in range(16):
        agent.put(key_of(number), b"value")
    find = Volume.find

    def counted(volume: Volume, sets: Sequence[CachedSet], pseudonym: bytes) -> list[Found]:
        looks.append(pseudonym)
        return find(volume, sets, pseudonym)

    monkeypatch.setattr(Volume, "find", counted)
    kept = held(agent, range(16))
    assert kept.kept == 16
    assert len(looks) == len(set(looks)) == 16
    kept.let_go()


def test_a_hold_believes_no_slot_that_is_in_doubt() -> None:
    """Remembered and young, but what the slot holds was disproven, or a write of it has failed."""
    pool = MemoryPool((1, 1), value_bytes=4096)
    agent = pool.agent(timing=Timing(directory_fresh=1000.0))
    agent.put(key_of(0), b"value")
    held(agent, [0]).let_go()
    with agent.volume.borrowed(agent.volume.placement.pseudonym(key_of(0))) as sets:
        (found,) = agent.volume.find(sets, agent.volume.placement.pseudonym(key_of(0)))
        found.cached.disprove(found.slot, found.entry.generation)
    reads = agent.tally.directory_reads
    assert hold(agent, [0]) is MissCause.EVICTED
    assert agent.tally.directory_reads > reads, "it is asked for again"


def kept(agent: PoolAgent, numbers: Sequence[int], hold: Hold) -> bool:
    """As who has just stored these keys."""
    names = [agent.volume.placement.pseudonym(key_of(number)) for number in numbers]
    return agent.served.keep(agent.channel, names, hold)


def test_who_has_just_stored_keys_holds_them_without_a_question() -> None:
    pool, agent = stored(count=40)
    reads, own = pool.namespaces[0].reads, agent.served.new_hold(0)
    assert kept(agent, range(20), own)
    assert not kept(agent, range(20, 40), own), "half of a set"
    assert own.kept == PINNED_SLOTS_MAX
    assert not kept(agent, [70], own), "nothing names it"
    assert own.kept == len(agent.volume.holds) == PINNED_SLOTS_MAX
    assert pool.namespaces[0].reads == reads
    pseudonym = agent.volume.placement.pseudonym(key_of(0))
    sets = agent.volume.borrow_sets(pseudonym)
    assert agent.volume.find(sets, pseudonym)[0].entry.hits == 0, "to store is no use"
    agent.volume.give_back_sets(sets)
    own.leave(pseudonym)
    own.leave(pseudonym)
    assert kept(agent, [30], own)
    own.let_go()
    assert not kept(agent, [1], own), "it was let go of for good"
    assert len(agent.volume.holds) == agent.volume.holds.bound.held == 0


def test_of_a_quota_no_more_than_half_is_held() -> None:
    _, agent = stored(count=8)
    quota = Quota([Measured(agent.volume.occupancy, agent.volume.settings.slot_bytes)], Limits(slots=8))
    agent.volume.change(tenant=TenantShare(quota, None, [agent.volume]))
    own = agent.served.new_hold(0)
    assert not kept(agent, range(8), own)
    assert own.kept == 4
    reading = held(agent, range(8))
    agent.put(key_of(100), b"new")
    assert agent.get(key_of(100)) == b"new"
    for each in own, reading:
        each.let_go()


def test_what_is_remembered_tells_whether_keys_are_there() -> None:
    pool, agent = stored(count=8)
    others = pool.agent()
    keys = [key_of(number) for number in range(8)]
    reads = pool.namespaces[0].reads
    assert agent.served.are_named(agent.channel, keys) is True
    assert agent.served.are_named(agent.channel, [*keys, key_of(70)]) is False
    assert others.served.are_named(others.channel, keys) is None, "it has read nothing"
    assert agent.served.are_named(agent.channel, []) is True
    assert pool.namespaces[0].reads == reads
    agent.put(key_of(9), b"short", ttl_seconds=1)
    agent.channel.clock += 2
    assert agent.served.are_named(agent.channel, [key_of(9)]) is False
