"""Deletes of many keys by one call: each ends as its own would, and each directory is written once.

The oracle is `delete` itself: the same pool is played twice, by one call for many keys and by one for each.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent.pool.counters import MissCause
from agent.pool.errors import PutRefused
from agent.pool.format.directory import Directory
from agent.pool.steps import Acquire
from agent.pool.volume.directory_cache import CachedSet
from agent.pool.volume.side_by_side import AnyOf
from agent.pool.volume.volume import Layout
from agent.pool.write.batch import UNTRIED
from agent.pool.write.delete_and_pin import MAY_LAND, NOT_DELETED, NOT_REACHED
from agent.pool.write.delete_together import SETS_AT_ONCE, delete_together
from tests.support.pool.memory_pool import MemoryPool, PoolAgent, key_of

SECONDS = 5.0
KEYS = 30


def ended(agent: PoolAgent, numbers: Sequence[int]) -> list[Any]:
    """What became of each by one call."""
    keys = [key_of(number) for number in numbers]
    return [shown(one) for one in agent.channel.run(agent.served.delete_many(agent.channel, keys, SECONDS))]


def ended_each(agent: PoolAgent, numbers: Sequence[int]) -> list[Any]:
    """The same, one after the other."""
    found = []
    for number in numbers:
        try:
            found.append(
                agent.channel.run(agent.served.delete(agent.channel, key_of(number), agent.deadline()))
            )
        except PutRefused as refused:
            found.append(shown(refused))
    return found


def shown(one: Any) -> Any:
    return (str(one), one.cause) if isinstance(one, PutRefused) else one


def together(agent: PoolAgent, numbers: Sequence[int], seconds: float = SECONDS) -> list[Any]:
    """What became of each, and which were left to a delete of their own."""
    keys = [key_of(number) for number in numbers]
    return list(map(shown, agent.channel.run(delete_together(agent.volume, agent.channel, keys, seconds))))


def holder_of(agent: PoolAgent, number: int) -> CachedSet:
    pseudonym = agent.volume.placement.pseudonym(key_of(number))
    return agent.volume.find(sets_of(agent, number), pseudonym)[0].cached


def sets_of(agent: PoolAgent, number: int) -> Sequence[CachedSet]:
    sets = agent.volume.borrow_sets(agent.volume.placement.pseudonym(key_of(number)))
    agent.volume.give_back_sets(sets)
    return sets


def is_free(agent: PoolAgent) -> bool:
    """Whether nobody holds anything."""
    return not any(
        each.users or each.writer.locked() or each.guard.locked() for each in agent.cache.snapshot()
    )


def filled(sets: tuple[int, ...] = (2, 3), count: int = KEYS, **options: Any) -> PoolAgent:
    agent = MemoryPool(sets, **options).agent()
    for number in range(count):
        agent.put(key_of(number), b"%d" % number)
    return agent


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("put"), st.integers(0, KEYS - 1)),
        st.tuples(st.just("delete"), st.lists(st.integers(0, KEYS + 4), min_size=1, max_size=40)),
        st.tuples(st.just("get"), st.integers(0, KEYS - 1)),
        st.tuples(st.sampled_from(["down", "broken", "hung", "well", "slow"]), st.integers(0, 1)),
        st.tuples(
            st.sampled_from(["unwritable", "unreadable", "unwritable header"]), st.integers(0, KEYS - 1)
        ),
    ),
    max_size=25,
)


@settings(max_examples=150, deadline=None)
@given(steps=STEPS, sets=st.sampled_from([(1,), (1, 1), (3, 2), (9, 1, 4)]), copies=st.sampled_from([1, 2]))
def test_each_ends_as_a_delete_of_its_own(
    steps: list[tuple[str, Any]], sets: tuple[int, ...], copies: int
) -> None:
    copies = 1 if len(sets) == 1 else copies
    agents = [MemoryPool(sets, copies=copies).agent() for _ in range(2)]
    for what, of in steps:
        if what == "delete":
            assert ended(agents[0], of) == ended_each(agents[1], of)
        else:
            assert step_of(agents[0], what, of) == step_of(agents[1], what, of)
        assert is_free(agents[0])
    for agent in agents:
        for namespace in range(len(sets)):
            step_of(agent, "well", namespace)
        agent.channel.clock += 1000.0
    there = [[agent.get(key_of(number)) for number in range(KEYS)] for agent in agents]
    assert there[0] == there[1]
    assert agents[0].tally.deletes == agents[1].tally.deletes


def step_of(agent: PoolAgent, what: str, of: int) -> Any:
    if what == "put":
        try:
            return agent.put(key_of(of), b"%d" % of).stored
        except PutRefused as refused:
            return shown(refused)
    if what == "get":
        return agent.get(key_of(of))
    if what.startswith("un"):
        cached = sets_of(agent, of)[0]
        medium = agent.channel.namespaces[cached.namespace]
        if what == "unwritable header":
            medium.unwritable.add(agent.volume.slot_offset(cached, of % 4))
        else:
            getattr(medium, what).add(cached.offset)
        return None
    if of < len(agent.channel.namespaces):
        medium = agent.channel.namespaces[of]
        medium.down = what == "down"
        medium.broken = what == "broken"
        medium.hung = what == "hung"
        medium.slow = 0.06 if what == "slow" else 0.0
        if what == "well":
            medium.unwritable.clear()
            medium.unreadable.clear()
    return None


def test_each_directory_is_read_and_written_once() -> None:
    agent = filled()
    media = agent.channel.namespaces
    reads, writes = sum(each.reads for each in media), sum(each.writes for each in media)
    holders = {id(holder_of(agent, number)) for number in range(KEYS)}
    assert together(agent, [*range(KEYS), KEYS, KEYS + 1]) == [True] * KEYS + [False] * 2
    assert sum(each.reads for each in media) - reads == 5
    assert sum(each.writes for each in media) - writes == KEYS + len(holders)
    assert agent.tally.deletes == KEYS
    assert all(isinstance(agent.get(key_of(number)), MissCause) for number in range(KEYS))


def test_headers_and_entries_are_gone_from_flash() -> None:
    pool = MemoryPool((2, 3))
    agent = pool.agent()
    for number in range(KEYS):
        agent.put(key_of(number), b"%d" % number)
    places = [agent.where(key_of(number)) for number in range(KEYS)]
    together(agent, range(0, KEYS, 2))
    fresh = pool.agent()
    for number, (namespace, slot_at, _) in enumerate(places):
        block = memoryview(bytearray(4096))
        agent.channel.read(namespace, slot_at, block)
        is_gone = number % 2 == 0
        assert (not any(block)) == is_gone
        assert (fresh.get(key_of(number)) == MissCause.NEVER_STORED) == is_gone


def test_a_key_that_is_named_twice() -> None:
    agent = filled()
    assert together(agent, [3, 4, 3]) == [True, True, UNTRIED]
    agent = filled()
    assert ended(agent, [3, 4, 3, 3]) == [True, True, False, False]
    assert agent.tally.deletes == 2


def test_a_write_of_the_key_that_may_land() -> None:
    agent = filled()
    cached = holder_of(agent, 5)
    assert cached.directory is not None
    pseudonym = agent.volume.placement.pseudonym(key_of(5))
    slot = cached.directory.find(pseudonym)
    assert slot is not None
    entry = cached.directory.entry(slot)
    assert entry is not None
    agent.volume.in_doubt_writes.write_failed(cached, slot, entry, agent.channel.now())
    assert together(agent, [4, 5, 6]) == [True, (MAY_LAND, MissCause.LATE), True]
    assert is_free(agent)


@pytest.mark.parametrize("bad", [0, 1])
def test_a_namespace_that_hangs_delays_its_own_keys_alone(bad: int) -> None:
    agent = filled((2, 2, 2), 60)
    media = agent.channel.namespaces
    media[bad].hung = True
    touches = [any(each.namespace == bad for each in sets_of(agent, number)) for number in range(60)]
    assert any(touches)
    assert not all(touches)
    freed_at: list[float] = []
    held = [each for number in range(60) if not touches[number] for each in sets_of(agent, number)]
    began = agent.channel.now()

    def look(wanted: Any) -> None:
        if not freed_at and agent.channel.now() > began + 0.001 and not any(e.writer.locked() for e in held):
            freed_at.append(agent.channel.now())

    became = run_watched(agent, range(60), look)
    for number, one in enumerate(became):
        if touches[number]:
            assert one == (NOT_REACHED, MissCause.LATE) or one is UNTRIED
        else:
            assert one is True
    assert (NOT_REACHED, MissCause.LATE) in became
    assert freed_at
    assert freed_at[0] < began + 0.5, "writers of healthy sets were held while another namespace hung"
    assert is_free(agent)
    media[bad].hung = False
    agent.channel.clock += 100
    for number in range(60):
        assert (agent.get(key_of(number)) == b"%d" % number) == touches[number]


def run_watched(agent: PoolAgent, numbers: Sequence[int], look: Callable[[Any], None]) -> list[Any]:
    keys = [key_of(number) for number in numbers]
    steps = delete_together(agent.volume, agent.channel, keys, SECONDS)

    def watched() -> Any:
        answer: Any = None
        while True:
            try:
                wanted = steps.send(answer)
            except StopIteration as end:
                return end.value
            assert not isinstance(wanted, AnyOf)
            assert not isinstance(wanted, Acquire), "a lock is waited for while others are held"
            look(wanted)
            answer = yield wanted

    return list(map(shown, agent.channel.run(watched())))


@pytest.mark.parametrize("what", ["header", "directory"])
def test_a_write_that_is_not_answered(what: str) -> None:
    """Keys of that set alone are refused; what may land late is remembered."""
    agent = filled((2, 3), 40)
    bad = holder_of(agent, 7)
    assert bad.directory is not None
    pseudonym = agent.volume.placement.pseudonym(key_of(7))
    slot = bad.directory.find(pseudonym)
    assert slot is not None
    at = bad.offset if what == "directory" else agent.volume.slot_offset(bad, slot)
    holders = [holder_of(agent, number) for number in range(40)]
    agent.channel.namespaces[bad.namespace].unwritable.add(at)
    became = together(agent, range(40))
    for number, one in enumerate(became):
        fails = holders[number] is bad if what == "directory" else number == 7
        assert one == ((NOT_DELETED, MissCause.CORRUPT) if fails else True)
    assert bad.cooldown_until.get(slot, 0) > agent.channel.now() + 50
    assert bad.asked_at == float("-inf")
    assert is_free(agent)


def test_a_directory_in_doubt_is_left_to_deletes_of_their_own(expects_log: Callable[..., None]) -> None:
    agent = filled((2, 3), 40)
    bad = holder_of(agent, 7)
    namespace = agent.channel.namespaces[bad.namespace]
    block = memoryview(bytearray(4096))
    agent.channel.read(bad.namespace, bad.offset, block)
    number_of_damaged = next(
        slot for slot in range(64) if bad.directory is not None and bad.directory.entry(slot) is not None
    )
    damaged = bytearray(block)
    damaged[(number_of_damaged + 1) * 48 : (number_of_damaged + 1) * 48 + 4] = b"\xff" * 4
    if Directory(memoryview(bytes(damaged))).corrupt_keys == Directory(block).corrupt_keys:
        damaged = bytearray(block)
        damaged[100] ^= 0xFF
    namespace.store(bad.offset, [bytes(damaged)])
    became = together(agent, range(40))
    for number, one in enumerate(became):
        assert one is (UNTRIED if any(each is bad for each in sets_of(agent, number)) else True)
    assert UNTRIED in became
    assert True in became
    assert is_free(agent)


def test_a_writer_that_is_busy_is_not_waited_for() -> None:
    agent = filled((2, 3), 40)
    busy = holder_of(agent, 7)
    assert busy.writer.acquire(blocking=False)
    try:
        became = together(agent, range(40))
    finally:
        busy.writer.release()
    for number, one in enumerate(became):
        assert one is (UNTRIED if any(each is busy for each in sets_of(agent, number)) else True)
    assert is_free(agent)


def test_more_sets_than_one_round_holds() -> None:
    agent = filled((400, 400), 200)
    touched = {id(each) for number in range(200) for each in sets_of(agent, number)}
    assert len(touched) > SETS_AT_ONCE
    assert together(agent, range(200)) == [True] * 200
    assert is_free(agent)


def test_enclosures_that_join_between_rounds() -> None:
    """Keys may have been moved since their sets were found: those of later rounds are left."""
    agent = filled((400, 400), 200)
    for medium in agent.channel.namespaces:
        medium.slow = 0.001

    def joined() -> Generator[Any, Any, list[Any]]:
        steps = delete_together(agent.volume, agent.channel, [key_of(n) for n in range(200)], SECONDS)
        answer = None
        try:
            while True:
                answer = yield steps.send(answer)
                volume = agent.volume
                volume.change(layout=Layout(volume.settings, volume.placement, volume.placement))
        except StopIteration as end:
            return list(end.value)

    became = agent.channel.run(joined())
    assert set(became) == {True, UNTRIED}
    gone = [agent.get(key_of(number)) != b"%d" % number for number in range(200)]
    assert gone == [one is True for one in became]
    assert is_free(agent)


def test_many_keys_of_one_set() -> None:
    """More than are under way at once; the directory is written with each volley."""
    agent = filled((1,), 64)
    writes = agent.channel.namespaces[0].writes
    assert together(agent, range(64)) == [True] * 64
    assert 64 < agent.channel.namespaces[0].writes - writes <= 64 + 4


def test_a_call_that_breaks_off_holds_nothing() -> None:
    for waits in range(8):
        agent = filled((2, 2), 30)
        for medium in agent.channel.namespaces:
            medium.slow = 0.01
        if waits % 2:
            agent.channel.namespaces[0].hung = True
        steps = delete_together(agent.volume, agent.channel, [key_of(n) for n in range(30)], SECONDS)
        try:
            next(steps)
            for _ in range(waits):
                steps.send(False)
        except StopIteration:
            pass
        steps.close()
        assert is_free(agent)


def test_two_callers_at_once() -> None:
    """Neither waits for the other, and each key was there for one of them."""
    agent = filled((2, 3), 60)
    served = agent.served
    channels = [agent.channel, type(agent.channel)(agent.channel.namespaces)]
    keys = [key_of(number) for number in range(60)]
    found: list[list[Any]] = [[], []]

    def run(at: int) -> None:
        found[at] = channels[at].run(served.delete_many(channels[at], keys, SECONDS))

    threads = [threading.Thread(target=run, args=(at,)) for at in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    for one, two in zip(*found, strict=True):
        assert {one, two} & {True} or isinstance(one, PutRefused) or isinstance(two, PutRefused)
    assert is_free(agent)


def test_the_victim_of_a_put_under_way_goes_from_flash() -> None:
    """It is left to a delete of its own, which writes the directory that does not name it."""
    pool = MemoryPool((1,))
    agent = pool.agent()
    for number in range(64):
        agent.put(key_of(number), b"%d" % number)
    writing = agent.served.unnamed_writer(key_of(100), length=3)
    assert not agent.channel.run(writing.write(agent.channel, 0, memoryview(b"100"), agent.deadline()))
    pseudonyms = [agent.volume.placement.pseudonym(key_of(number)) for number in range(64)]

    def on_flash() -> Directory:
        return pool.directories()[0][2]

    victim = next(n for n in range(64) if not agent.volume.find(sets_of(agent, n), pseudonyms[n]))
    assert on_flash().find(pseudonyms[victim]) is not None
    assert together(agent, [victim, 200]) == [UNTRIED, False]
    assert ended(agent, [victim, 200]) == [False, False]
    assert on_flash().find(pseudonyms[victim]) is None
    writing.drop()
    assert is_free(agent)


def test_no_time_is_left_to_write() -> None:
    agent = filled()
    assert together(agent, range(KEYS), seconds=0.0) == [UNTRIED] * KEYS
    assert is_free(agent)
    assert agent.get(key_of(1)) == b"1"
