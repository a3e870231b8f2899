"""A volume that keeps two copies: where they lie, who is asked, and that nothing deleted comes back."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from agent.pool.counters import MissCause
from agent.pool.format.directory import SLOTS_PER_SET
from agent.pool.format.sealed_slot import HEADER_BYTES
from agent.pool.maintenance.replication import DOUBT_SECONDS, Kept, keep_two, work_off
from agent.pool.maintenance.scrub import PAUSE_SECONDS, Scrubber, ScrubCounters, look_into_reports
from agent.pool.read.get import SlotReader
from agent.pool.volume.replication_backlog import OWED_MAX, ReplicationBacklog
from agent.pool.volume.settings import Timing
from agent.pool.write.delete_and_pin import delete
from tests.support.pool.memory_channel import MemoryPending
from tests.support.pool.memory_pool import MemoryPool, PoolAgent, key_of

LENGTH = 150_000
YOUNG_SECONDS = 2 * Timing().write_deadline


def value_of(number: int) -> bytes:
    return bytes([number % 251]) * LENGTH


def two_copies(
    keys: int = 0, sets: tuple[int, ...] = (1, 1), **settings: Any
) -> tuple[MemoryPool, PoolAgent]:
    settings.setdefault("value_bytes", LENGTH // 4096 * 4096 + 4096)
    pool = MemoryPool(sets, copies=2, **settings)
    agent = pool.agent()
    for number in range(keys):
        agent.put(key_of(number), value_of(number)[: pool.settings.value_bytes])
    copy_all(agent)
    return pool, agent


def copy_all(agent: PoolAgent) -> None:
    while agent.channel.run(work_off([agent.volume], agent.channel)):
        pass


def places(agent: PoolAgent, number: int) -> list[tuple[int, int]]:
    """Namespace and byte offset of each slot that is named for a key, as remembered by the agent."""
    pseudonym = agent.volume.placement.pseudonym(key_of(number))
    sets = agent.volume.borrow_sets(pseudonym)
    try:
        return [
            (each.cached.namespace, agent.volume.slot_offset(each.cached, each.slot))
            for each in agent.volume.find(sets, pseudonym)
        ]
    finally:
        agent.volume.give_back_sets(sets)


@pytest.mark.parametrize("suite", ["aes-256-gcm", "aes-256-xts+crc64", "plain+crc64"])
def test_each_value_lies_in_two_namespaces_and_either_serves_it(suite: str) -> None:
    pool, agent = two_copies(12, suite=suite)
    assert (agent.tally.copies_made, agent.tally.copy_bytes) == (12, 12 * LENGTH)
    for away in range(2):
        pool.namespaces[away].down = True
        for reader in (agent, pool.agent()):
            for number in range(12):
                assert reader.get(key_of(number)) == value_of(number)
        pool.namespaces[away].down = False
    assert all(len({place for place, _ in places(agent, number)}) == 2 for number in range(12))


def test_values_of_many_units_are_copied_in_pieces() -> None:
    value = bytes(range(256)) * 10_000
    pool, agent = two_copies(value_bytes=4 << 20, unit_bytes=1 << 18)
    from agent.pool.write.put import SlotWriter

    writing = SlotWriter(agent.volume, key_of(0), length=len(value))
    for at in range(0, len(value), 1 << 20):
        piece = memoryview(value)[at : at + (1 << 20)]
        agent.channel.run(writing.write(agent.channel, at, piece, agent.deadline()))
    copy_all(agent)
    [(first, _), (second, _)] = places(agent, 0)
    for away in (first, second):
        pool.namespaces[away].down = True
        assert pool.agent().get(key_of(0)) == value
        pool.namespaces[away].down = False


@pytest.mark.parametrize("at", [100, HEADER_BYTES + 70_000])
def test_a_bad_copy_is_not_served_and_is_mended(at: int) -> None:
    pool, agent = two_copies(4)
    agent.channel.clock += YOUNG_SECONDS + 1
    good = {number: sorted(places(agent, number)) for number in range(4)}
    namespace, slot = places(agent, 2)[0]
    pool.namespaces[namespace].flip(slot + at)
    assert agent.get(key_of(2)) == value_of(2)
    assert agent.tally.other_copy_reads == 1
    counters = Scrubber([agent.volume]).counters
    agent.channel.run(look_into_reports([agent.volume], agent.channel, counters))
    agent.channel.clock += PAUSE_SECONDS
    agent.channel.run(look_into_reports([agent.volume], agent.channel, counters))
    assert counters.slots_bad == 1
    assert agent.tally.copies_made == 5
    assert sorted(places(pool_reader(pool, 2), 2)) == good[2], "in its first place again, which was free"
    for away in range(2):
        pool.namespaces[away].down = True
        assert pool.agent().get(key_of(2)) == value_of(2)
        pool.namespaces[away].down = False


def pool_reader(pool: MemoryPool, number: int) -> PoolAgent:
    reader = pool.agent()
    reader.get(key_of(number))
    return reader


def test_a_later_range_comes_from_the_other_copy() -> None:
    pool, agent = two_copies(1)
    reading = SlotReader(agent.volume, key_of(0))
    assert agent.read(reading, 65_536, 0) == value_of(0)[:65_536]
    first = reading.namespace
    pool.namespaces[first].down = True
    assert agent.read(reading, 65_536, 65_536) == value_of(0)[65_536:131_072]
    assert reading.namespace != first


@pytest.mark.parametrize(("how", "cause"), [("down", "ENCLOSURE_DOWN"), ("hung", "LATE")])
def test_a_later_range_that_no_other_copy_has_is_no_eviction(how: str, cause: str) -> None:
    pool = MemoryPool((1, 1), value_bytes=LENGTH // 4096 * 4096 + 4096, copies=2)
    agent = pool.agent()
    agent.put(key_of(0), value_of(0))
    reading = SlotReader(agent.volume, key_of(0))
    assert agent.read(reading, 65_536, 0) == value_of(0)[:65_536]
    setattr(pool.namespaces[reading.namespace], how, True)
    assert agent.read(reading, 65_536, 65_536) is MissCause[cause]


def test_a_scrub_makes_the_copies_that_are_missing() -> None:
    pool, agent = two_copies()
    pool.namespaces[1].down = True
    for number in range(6):
        agent.put(key_of(number), value_of(number))
    copy_all(agent)
    assert agent.tally.copies_made == 0
    pool.namespaces[1].down = False
    agent.channel.clock += YOUNG_SECONDS + 1
    scrubber = Scrubber([agent.volume])
    while not scrubber.counters.passes:
        agent.channel.run(scrubber.advance(agent.channel))
    assert agent.tally.copies_made == 6
    pool.namespaces[0].down = True
    for number in range(6):
        assert pool.agent().get(key_of(number)) == value_of(number)


def test_a_delete_takes_both_and_neither_comes_back() -> None:
    pool, agent = two_copies(4)
    assert agent.delete(key_of(1))
    for away in (None, 0, 1):
        if away is not None:
            pool.namespaces[away].down = True
        for reader in (agent, pool.agent()):
            assert isinstance(reader.get(key_of(1)), MissCause)
        for namespace in pool.namespaces:
            namespace.down = False
    assert agent.put(key_of(1), b"anew").stored


def test_a_delete_between_a_put_and_its_copy_stands() -> None:
    pool, agent = two_copies()
    agent.put(key_of(0), value_of(0))
    assert agent.delete(key_of(0))
    copy_all(agent)
    assert agent.tally.copies_made == 0
    assert isinstance(pool.agent().get(key_of(0)), MissCause)


@pytest.mark.parametrize("step", range(12))
@pytest.mark.parametrize("whose", ["this agent's", "another agent's"])
def test_a_delete_in_the_midst_of_a_copy_stands(whose: str, step: int) -> None:
    """The copy is driven up to one of its waits; then the key is deleted; then the copy goes on."""
    pool, agent = two_copies()
    agent.put(key_of(0), value_of(0))
    agent.age_directories()
    pseudonym = agent.volume.placement.pseudonym(key_of(0))
    steps = keep_two(agent.volume, agent.channel, pseudonym)
    finished = False
    try:
        wanted = next(steps)
        for _ in range(step):
            wanted = steps.send(_answer(wanted))
    except StopIteration:
        finished = True
    deleter = agent if whose == "this agent's" else pool.agent()
    deleting = delete(deleter.volume, deleter.channel, key_of(0), deleter.channel.now() + 5)
    waits_for_us = False
    if not finished:
        deleted, waits_for_us = _drive_unless_locked(deleting)
        _finish(steps, _answer(wanted))
        if waits_for_us:
            assert _finish(deleting, deleted.lock.acquire(blocking=False))
    else:
        assert deleter.channel.run(deleting)
    for reader in (agent, pool.agent()):
        assert isinstance(reader.get(key_of(0)), MissCause)
    for _, _, directory in pool.directories():
        assert directory.find(pseudonym) is None


def _answer(wanted: Any) -> bool:
    return bool(wanted.lock.acquire(blocking=False) if hasattr(wanted, "lock") else wanted.pending.done)


def _finish(steps: Any, answer: bool) -> Any:
    """Drive steps on from where they wait; their value."""
    while True:
        try:
            answer = _answer(steps.send(answer))
        except StopIteration as end:
            return end.value


def _drive_unless_locked(steps: Any) -> tuple[Any, bool]:
    """Drive to the end, or to a lock that somebody else holds: what it waits for then, and True."""
    try:
        wanted = next(steps)
        while True:
            answer = _answer(wanted)
            if not answer and hasattr(wanted, "lock"):
                return wanted, True
            wanted = steps.send(answer)
    except StopIteration:
        return None, False


def test_copies_make_room_only_where_both_sets_are_full() -> None:
    _, agent = two_copies(SLOTS_PER_SET, value_bytes=65_536)
    assert agent.tally.copies_made == SLOTS_PER_SET
    assert agent.tally.evictions == 0
    for number in range(SLOTS_PER_SET, SLOTS_PER_SET + 10):
        agent.channel.clock += 1
        assert agent.put(key_of(number), value_of(number)[:65_536]).stored
    copy_all(agent)
    for number in range(SLOTS_PER_SET, SLOTS_PER_SET + 10):
        assert len(places(agent, number)) == 2
    pseudonym = agent.volume.placement.pseudonym(key_of(SLOTS_PER_SET))
    assert agent.channel.run(keep_two(agent.volume, agent.channel, pseudonym)) is Kept.TWO


def test_one_namespace_is_no_place_for_two_copies() -> None:
    _, agent = two_copies(5, sets=(4,))
    assert agent.tally.copies_made == 0
    assert agent.volume.replication_backlog.not_made == 5, "it is said"
    agent.channel.clock += YOUNG_SECONDS + 1
    assert scrubbed(agent).copies_missing == 5
    assert agent.get(key_of(3)) == value_of(3)


def scrubbed(agent: PoolAgent) -> ScrubCounters:
    """A whole pass of a scrub."""
    scrubber = Scrubber([agent.volume])
    while not scrubber.counters.passes:
        agent.channel.run(scrubber.advance(agent.channel))
    return scrubber.counters


def test_a_namespace_that_is_larger_than_all_others_takes_no_key_for_itself() -> None:
    pool, agent = two_copies(60, sets=(12, 2), value_bytes=65_536)
    assert (agent.tally.copies_made, agent.volume.replication_backlog.not_made) == (60, 0)
    assert all(len({place for place, _ in places(agent, number)}) == 2 for number in range(60))
    pool.namespaces[0].down = True
    assert pool.agent().get(key_of(0)) == value_of(0)[:65_536]


def test_copies_that_wait_for_a_join_to_be_settled_are_counted() -> None:
    pool = MemoryPool((2, 2, 2), value_bytes=65_536, copies=2)
    pool.settings = replace(pool.settings, settled_extents=2)
    agent = pool.agent()
    for number in range(20):
        agent.put(key_of(number), value_of(number)[:65_536])
    copy_all(agent)
    assert (agent.tally.copies_made, agent.volume.replication_backlog.not_made) == (0, 20)
    agent.volume.change(layout=agent.volume.layout(replace(pool.settings, settled_extents=0)))
    agent.channel.clock += YOUNG_SECONDS + 1
    scrubbed(agent)
    assert agent.tally.copies_made > 10, "of those that lie where they belong"


@pytest.mark.parametrize("whole_shelf", [False, True])
def test_what_was_deleted_does_not_come_back_where_its_original_cannot_be_seen(
    monkeypatch: pytest.MonkeyPatch, *, whole_shelf: bool
) -> None:
    """Another agent's delete falls right before the copy is named; then the original's enclosure goes away,
    or, in the other case, both do, so that the copy cannot be taken back at once."""
    pool, agent = two_copies()
    deleter = pool.agent()
    agent.put(key_of(0), value_of(0))
    namespace, _, directory = agent.where(key_of(0))
    other, write = pool.namespaces[1 - namespace], agent.channel.write
    deleted: list[bool] = []

    def deletes_before(target: int, offset: int, parts: Any, *, more: bool = False) -> MemoryPending:
        if pool.namespaces[target] is other and not deleted:
            deleted.append(deleter.delete(key_of(0)))
        pending = write(target, offset, parts, more=more)
        if pool.namespaces[target] is other and offset == directory:
            pool.namespaces[namespace].down, other.down = True, whole_shelf
        return pending

    monkeypatch.setattr(agent.channel, "write", deletes_before)
    copy_all(agent)
    monkeypatch.setattr(agent.channel, "write", write)
    assert deleted == [True]
    assert agent.volume.replication_backlog.doubtful == whole_shelf
    other.down = False
    agent.channel.clock += DOUBT_SECONDS
    copy_all(agent)
    assert agent.volume.replication_backlog.doubtful == 0
    pool.namespaces[namespace].down = False
    for reader in (agent, pool.agent()):
        reader.age_directories()
        assert isinstance(reader.get(key_of(0)), MissCause)


def test_a_volume_of_one_copy_owes_nothing() -> None:
    pool = MemoryPool((1, 1))
    agent = pool.agent()
    agent.put(key_of(0), b"value")
    assert len(agent.volume.replication_backlog) == 0
    pseudonym = agent.volume.placement.pseudonym(key_of(0))
    assert agent.channel.run(keep_two(agent.volume, agent.channel, pseudonym)) is Kept.NONE


def test_what_is_owed_is_bounded() -> None:
    owed = ReplicationBacklog()
    for number in range(OWED_MAX + 3):
        owed.note(key_of(number))
    assert (len(owed), owed.dropped) == (OWED_MAX, 3)
    assert owed.next() == key_of(0)
