"""Deletes of many keys by one call, and what others do between the reads and the writes of a round."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import Any

import pytest

from agent.pool.format.eviction_choice import Choice
from agent.pool.write.batch import UNTRIED
from agent.pool.write.delete_together import KEYS_AT_ONCE, delete_together
from agent.pool.write.slot_allocation import release, reserve
from tests.support.pool.memory_channel import MemoryChannel
from tests.support.pool.memory_pool import MemoryPool, PoolAgent, key_of
from tests.unit.pool.test_two_copies import copy_all

SECONDS = 5.0


def places_of(agent: PoolAgent, number: int) -> set[int]:
    """The namespaces that a key may lie in."""
    pseudonym = agent.volume.placement.pseudonym(key_of(number))
    return {place.namespace for place in agent.volume.places(pseudonym)}


def first(agent: PoolAgent, count: int, *, hangs: bool) -> list[int]:
    """Keys that may not lie in the third namespace, which is to hang, or may."""
    found = (number for number in range(10_000) if (2 in places_of(agent, number)) is hangs)
    return [next(found) for _ in range(count)]


def deleted(agent: PoolAgent, numbers: Sequence[int], meanwhile: Callable[[], object]) -> list[Any]:
    """What becomes of the keys where `meanwhile` happens between the reads and the writes, 30 ms after the
    call began."""
    keys = [key_of(number) for number in numbers]
    began = agent.channel.now()

    def watched() -> Generator[Any, Any, list[Any]]:
        steps = delete_together(agent.volume, agent.channel, keys, SECONDS)
        answer, is_over = None, False
        try:
            while True:
                answer = yield steps.send(answer)
                if not is_over and agent.channel.now() > began + 0.02:
                    is_over = True
                    meanwhile()
        except StopIteration as end:
            assert is_over
            return list(end.value)

    return agent.channel.run(watched())


def test_a_value_that_another_agent_puts_meanwhile_stays() -> None:
    """The directories of a round may be old where one of its namespaces hangs."""
    pool = MemoryPool((1, 1, 1))
    agent, other = pool.agent(), pool.agent()
    *there, new = first(agent, 5, hangs=False)
    slow = first(agent, 1, hangs=True)
    for number in there + slow:
        agent.put(key_of(number), b"%d" % number)
    pool.namespaces[2].hung = True
    became = deleted(agent, there + slow, lambda: [other.put(key_of(new), b"new")])
    assert became[: len(there)] == [True] * len(there)
    assert pool.agent().get(key_of(new)) == b"new"


def test_more_keys_than_one_round_takes() -> None:
    """The sets are free between the rounds: others have waited for them."""
    agent = MemoryPool((5,)).agent()
    keys = [key_of(number) for number in range(KEYS_AT_ONCE + 100)]
    became = agent.channel.run(delete_together(agent.volume, agent.channel, keys, SECONDS))
    assert became == [False] * len(keys)
    assert agent.channel.namespaces[0].reads == 2 * 5


def test_a_namespace_that_goes_meanwhile() -> None:
    """Its directories are too old to be written, and cannot be read again: nothing is written there."""
    pool = MemoryPool((1, 1, 1))
    agent = pool.agent()
    there, slow = first(agent, 8, hangs=False), first(agent, 1, hangs=True)
    for number in there + slow:
        agent.put(key_of(number), b"%d" % number)
    pool.namespaces[2].hung = True
    named_by = [agent.where(key_of(number))[0] for number in there]
    assert set(named_by) == {0, 1}
    writes = pool.namespaces[0].writes

    def go() -> None:
        pool.namespaces[0].down = True

    became = deleted(agent, there + slow, go)
    assert became[: len(there)] == [UNTRIED if namespace == 0 else True for namespace in named_by]
    assert pool.namespaces[0].writes == writes
    assert not any(each.users or each.writer.locked() for each in agent.cache.snapshot())


def test_a_key_that_is_left_in_one_of_its_sets_is_left_in_the_other() -> None:
    pool = MemoryPool((1, 1, 1), copies=2)
    agent = pool.agent()
    there, slow = first(agent, 1, hangs=False), first(agent, 1, hangs=True)
    for number in there + slow:
        agent.put(key_of(number), b"%d" % number)
    copy_all(agent)
    pool.namespaces[2].hung = True
    counts: list[int] = []

    def go() -> None:
        pool.namespaces[0].down = True
        counts.append(pool.namespaces[1].reads + pool.namespaces[1].writes)

    assert deleted(agent, there + slow, go)[0] is UNTRIED
    assert pool.namespaces[1].reads + pool.namespaces[1].writes == counts[0]
    assert agent.get(key_of(there[0])) == b"%d" % there[0]


def test_a_key_that_another_agent_deletes_meanwhile() -> None:
    """Its directory need not be written."""
    pool = MemoryPool((3, 3, 1))
    agent, other = pool.agent(), pool.agent()
    there, slow = first(agent, 20, hangs=False), first(agent, 1, hangs=True)
    for number in there + slow:
        agent.put(key_of(number), b"%d" % number)
    place = {number: agent.where(key_of(number)) for number in there}
    gone = min(there, key=lambda number: place[number][::2])
    is_beside = [place[n][0] == place[gone][0] and place[n][2] != place[gone][2] for n in there]
    asked = [gone, there[is_beside.index(True)]]
    pool.namespaces[2].hung = True
    counts: list[int] = []

    def delete() -> None:
        assert other.delete(key_of(gone))
        counts.append(sum(each.writes for each in pool.namespaces))

    assert deleted(agent, asked + slow, delete)[:2] == [UNTRIED, True]
    assert sum(each.writes for each in pool.namespaces) == counts[0] + 2
    assert agent.tally.deletes == 1


@pytest.mark.parametrize("comes_to_nothing", [False, True])
def test_a_slot_that_a_put_takes_between_two_volleys(comes_to_nothing: bool) -> None:
    """Where the put comes to nothing, the header has to go: another agent may go by an old directory."""
    pool = MemoryPool((1,))
    agent = pool.agent()
    for number in range(64):
        agent.put(key_of(number), b"%d" % number)
    keys = [key_of(number) for number in range(64)]
    old = pool.agent()
    assert old.get(keys[63]) == b"63"
    volume, write_many = agent.volume, agent.channel.write_many
    taken: list[int] = []

    def take_and_leave(writes: Sequence[Any]) -> Any:
        pendings = write_many(writes)
        cached = agent.cache.snapshot()[0]
        assert cached.directory is not None
        slot = cached.directory.find(volume.placement.pseudonym(keys[63]))
        if slot is not None:
            taken.append(slot)
            choice = Choice(slot, cached.directory.entry(slot), 0, 1.0)
            assert reserve(volume, agent.channel, cached, choice)
            if comes_to_nothing:
                release(volume, cached, slot)
        return pendings

    agent.channel.write_many = take_and_leave  # type: ignore[method-assign]
    became = agent.channel.run(agent.served.delete_many(agent.channel, keys, SECONDS))
    assert taken
    assert became == [True] * 63 + [comes_to_nothing]
    if comes_to_nothing:
        assert old.get(keys[63]) != b"63"


def test_the_victim_of_a_put_that_fails_meanwhile_is_gone() -> None:
    """Flash names it all the time, and this agent does not from its eviction to the next read."""
    _, _, victim = deleted_amid_a_put(-1)
    agent, became, again = deleted_amid_a_put(victim)
    assert again == victim
    if became not in (True, False):
        assert agent.delete(key_of(victim)) in (True, False)
    on_flash = PoolAgent(agent.channel.namespaces, agent.volume.settings)
    assert on_flash.get(key_of(victim)) != b"%d" % victim


def deleted_amid_a_put(number: int) -> tuple[PoolAgent, Any, int]:
    """What becomes of a key of a full volume, by a call amid which a worker chooses a slot for a put and
    writes nothing; and the victim of that."""
    pool = MemoryPool((1, 1, 1))
    agent = pool.agent()
    *there, new = first(agent, 129, hangs=False)
    slow = first(agent, 1, hangs=True)
    for each in there + slow:
        agent.put(key_of(each), b"%d" % each)
    pool.namespaces[2].hung = True
    victims: list[bytes] = []

    def put_and_drop() -> None:
        channel = MemoryChannel(pool.namespaces)
        channel.clock = agent.channel.clock
        writing = agent.served.unnamed_writer(key_of(new), length=3)
        assert not channel.run(writing.write(channel, 0, memoryview(b"n"), channel.now() + SECONDS))
        reservation = writing.reservation
        victims.append((reservation.cached.covered or {})[reservation.slot])
        writing.drop()

    known = number if number >= 0 else new
    became = deleted(agent, [known, *slow], put_and_drop)
    pseudonym = agent.volume.placement.pseudonym
    return agent, became[0], next(each for each in there if pseudonym(key_of(each)) == victims[0])


def test_a_delete_of_its_own_amid_such_a_put() -> None:
    """One of its two directories is there, and the other one is slow."""
    pool = MemoryPool((1, 1))
    agent = pool.agent()
    for number in range(128):
        agent.put(key_of(number), b"%d" % number)
    cached = next(each for each in agent.cache.snapshot() if each.namespace == 0)
    victim = next(n for n in range(128) if agent.where(key_of(n))[0] == 0)
    pseudonym = agent.volume.placement.pseudonym(key_of(victim))
    pool.namespaces[1].slow = 0.005

    def take_and_leave() -> None:
        assert cached.directory is not None
        slot = cached.directory.find(pseudonym)
        if slot is not None:
            choice = Choice(slot, cached.directory.entry(slot), 0, 1.0)
            assert reserve(agent.volume, agent.channel, cached, choice)
            release(agent.volume, cached, slot)

    def watched() -> Generator[Any, Any, bool]:
        steps = agent.served.delete(agent.channel, key_of(victim), agent.deadline())
        answer = None
        try:
            while True:
                wanted = steps.send(answer)
                take_and_leave()
                answer = yield wanted
        except StopIteration as end:
            return bool(end.value)

    agent.channel.run(watched())
    assert pool.agent().get(key_of(victim)) != b"%d" % victim
