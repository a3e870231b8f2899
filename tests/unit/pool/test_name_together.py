"""Values whose slots are written one by one and whose directories are written together."""

from __future__ import annotations

import pytest

from agent.pool.counters import MissCause
from agent.pool.errors import PutRefused
from agent.pool.volume.puts_in_pieces import IDLE_SECONDS
from agent.pool.write.name_together import UnnamedWriter, name_all
from tests.support.pool.memory_pool import MemoryPool, PoolAgent, key_of

VALUES = 12
LENGTH = 5000


def value_of(number: int) -> bytes:
    return bytes([number + 1]) * LENGTH


def write(agent: PoolAgent, number: int) -> UnnamedWriter:
    """A value on flash that no directory names."""
    writing = UnnamedWriter(agent.volume, key_of(number), length=LENGTH)
    data = memoryview(value_of(number))
    assert not agent.channel.run(writing.write(agent.channel, 0, data, agent.deadline()))
    assert writing.is_unnamed
    assert not writing.stored
    return writing


def name(agent: PoolAgent, writers: list[UnnamedWriter], seconds: float = 5.0) -> None:
    agent.channel.run(name_all(agent.volume, agent.channel, writers, agent.deadline(seconds)))


def writes(pool: MemoryPool) -> int:
    return sum(namespace.writes for namespace in pool.namespaces)


def there(agent: PoolAgent, numbers: range) -> list[int]:
    return [number for number in numbers if agent.get(key_of(number)) == value_of(number)]


def set_of(writing: UnnamedWriter) -> tuple[int, int]:
    reservation = writing._reservation
    assert reservation is not None
    return reservation.cached.namespace, reservation.cached.offset


def slot_of(writing: UnnamedWriter) -> int:
    reservation = writing._reservation
    assert reservation is not None
    return reservation.offset


def test_many_are_named_by_one_write_of_each_directory() -> None:
    pool = MemoryPool((2, 2))
    agent = pool.agent()
    writers = [write(agent, number) for number in range(VALUES)]
    assert writes(pool) == VALUES, "the slots alone"
    assert there(pool.agent(), range(VALUES)) == there(agent, range(VALUES)) == []
    sets = {set_of(writing) for writing in writers}
    name(agent, writers)
    assert writes(pool) == VALUES + len(sets)
    assert all(writing.stored for writing in writers)
    assert there(pool.agent(), range(VALUES)) == there(agent, range(VALUES)) == list(range(VALUES))
    assert agent.tally.puts == VALUES


def test_the_next_agent_finds_the_slots_of_one_that_died_free() -> None:
    pool = MemoryPool((1,))
    writers = [write(pool.agent(), number) for number in range(VALUES)]
    assert all(writing.is_unnamed for writing in writers)
    other = pool.agent()
    for number in range(64):
        other.put(key_of(100 + number), value_of(number))
    assert other.tally.evictions == 0


def test_one_that_is_dropped_lets_go_of_its_slot() -> None:
    pool = MemoryPool((1,))
    agent = pool.agent()
    writers = [write(agent, number) for number in range(64)]
    for writing in writers:
        writing.drop()
    for number in range(64):
        agent.put(key_of(100 + number), value_of(number))
    assert agent.tally.evictions == 0
    assert not len(agent.volume.puts_in_pieces)


def test_what_another_agent_stored_meanwhile_stays() -> None:
    pool = MemoryPool((1,))
    agent, other = pool.agent(), pool.agent()
    writers = [write(agent, number) for number in range(VALUES)]
    ours = {number: slot_of(writing) for number, writing in enumerate(writers)}
    for number in range(20, 30):
        other.put(key_of(number), value_of(number))
    theirs = {number: other.where(key_of(number))[1] for number in range(20, 30)}
    agent.age_directories()
    # Where both chose one slot, the value of the other agent lies there, and stays.
    named = [number for number, slot in ours.items() if slot not in theirs.values()]
    assert 5 < len(named) < VALUES
    with pytest.raises(PutRefused) as refused:
        name(agent, writers)
    assert refused.value.cause is MissCause.EVICTED
    assert [number for number, writing in enumerate(writers) if writing.stored] == named
    assert there(pool.agent(), range(30)) == [*named, *theirs]
    assert not any(each.reserved or each.unnamed for each in agent.cache.snapshot())


def test_two_agents_that_evict_one_value_do_not_both_have_its_slot() -> None:
    pool = MemoryPool((1,))
    agent, other = pool.agent(), pool.agent()
    for number in range(64):
        agent.put(key_of(number), value_of(number))
    other.get(key_of(0))
    other.age_directories()
    writers = [write(agent, number) for number in (100, 101)]
    other.put(key_of(102), value_of(102))
    other.put(key_of(103), value_of(103))
    agent.age_directories()
    # A put of the first agent that writes the same directory meanwhile takes nothing from it, either.
    agent.put(key_of(104), value_of(104))
    assert len(there(pool.agent(), range(102, 105))) == 3
    with pytest.raises(PutRefused):
        name(agent, writers)
    assert there(pool.agent(), range(100, 105)) == there(agent, range(100, 105)) == [102, 103, 104]


@pytest.mark.parametrize("is_read_again", [True, False])
def test_a_slot_whose_victim_flash_still_names_is_nobody_elses(is_read_again: bool) -> None:
    """An earlier reservation of it took the victim out here, and ended before flash heard of it."""
    pool = MemoryPool((1,))
    agent = pool.agent()
    for number in range(64):
        agent.put(key_of(number), value_of(number))
    earlier = write(agent, 100)
    slot = slot_of(earlier)
    earlier.drop()
    if is_read_again:
        agent.age_directories()
    writing = write(agent, 101)
    assert is_read_again or slot_of(writing) == slot
    agent.age_directories()
    name(agent, [writing])
    assert there(agent, range(102)) == there(pool.agent(), range(102))
    assert len(there(agent, range(101))) == 63
    assert there(agent, range(100, 102)) == [101]


@pytest.mark.parametrize("fault", ["down", "broken", "hung"])
def test_those_of_the_other_enclosure_are_named(fault: str) -> None:
    pool = MemoryPool((2, 2))
    agent = pool.agent()
    writers = [write(agent, number) for number in range(VALUES)]
    here = {number for number, writing in enumerate(writers) if set_of(writing)[0] == 0}
    assert 0 < len(here) < VALUES
    setattr(pool.namespaces[0], fault, True)
    with pytest.raises(PutRefused):
        name(agent, writers)
    setattr(pool.namespaces[0], fault, False)
    assert set(there(pool.agent(), range(VALUES))) == set(range(VALUES)) - here
    assert {number for number, writing in enumerate(writers) if not writing.stored} == here
    assert agent.tally.puts_refused == len(here)
    assert not any(each.reserved for each in agent.cache.snapshot())


def test_no_entry_of_a_volume_that_was_erased_is_written() -> None:
    pool = MemoryPool((1,))
    agent = pool.agent()
    writers = [write(agent, number) for number in range(3)]
    before = writes(pool)
    agent.volume.change(erased=True)
    with pytest.raises(PutRefused) as refused:
        name(agent, writers)
    assert refused.value.cause is MissCause.WRONG_KEY
    assert writes(pool) == before
    assert not any(len(list(directory)) for _, _, directory in pool.directories())
    assert not any(each.reserved or each.writer.locked() for each in agent.cache.snapshot())


@pytest.mark.parametrize(("is_answered", "doubts"), [(True, 0), (False, 3)])
def test_a_directory_write_that_was_answered_is_in_doubt_no_longer(is_answered: bool, doubts: int) -> None:
    pool = MemoryPool((1,))
    agent = pool.agent()
    writers = [write(agent, number) for number in range(3)]
    if is_answered:
        pool.namespaces[0].unwritable.add(pool.settings.extents[0].offset)
    else:
        pool.namespaces[0].hung = True
    with pytest.raises(PutRefused) as refused:
        name(agent, writers)
    assert refused.value.cause is (MissCause.CORRUPT if is_answered else MissCause.LATE)
    assert len(agent.volume.in_doubt_writes) == doubts
    pool.namespaces[0].unwritable.clear()
    pool.namespaces[0].hung = False
    assert there(pool.agent(), range(3)) == there(agent, range(3)) == []
    if is_answered:
        for number in range(3):
            agent.put(key_of(number), value_of(number))
        assert there(pool.agent(), range(3)) == [0, 1, 2]


def test_one_that_waited_long_gives_its_slot_to_another_put() -> None:
    pool = MemoryPool((1,))
    agent = pool.agent()
    first = write(agent, 0)
    for number in range(1, 64):
        agent.put(key_of(number), value_of(number))
    agent.channel.clock += IDLE_SECONDS + 1
    later = write(agent, 100)
    assert agent.tally.evictions == 0
    with pytest.raises(PutRefused) as refused:
        name(agent, [first, later])
    assert refused.value.cause is MissCause.LATE
    assert there(pool.agent(), range(101)) == [*range(1, 64), 100]


def test_a_directory_that_somebody_writes_is_waited_for_and_the_others_go_first() -> None:
    pool = MemoryPool((2, 2))
    agent = pool.agent()
    writers = [write(agent, number) for number in range(VALUES)]
    reservation = writers[0]._reservation
    assert reservation is not None
    busy = reservation.cached
    late = {number for number, writing in enumerate(writers) if set_of(writing) == set_of(writers[0])}
    assert busy.writer.acquire(blocking=False)
    with pytest.raises(PutRefused) as refused:
        name(agent, writers)
    busy.end_write()
    assert refused.value.cause is MissCause.LATE
    assert set(there(pool.agent(), range(VALUES))) == set(range(VALUES)) - late
    assert not any(each.writer.locked() for each in agent.cache.snapshot())


def test_a_damaged_directory_is_read_again_before_it_is_written() -> None:
    pool = MemoryPool((1,))
    agent = pool.agent()
    for number in range(20, 30):
        agent.put(key_of(number), value_of(number))
    writers = [write(agent, number) for number in range(VALUES)]
    reservation = writers[0]._reservation
    assert reservation is not None
    place, namespace = reservation.cached.offset, pool.namespaces[0]
    whole = namespace.blocks[place]
    spoiled = bytearray(whole)
    for slot in range(64):
        spoiled[slot * 64 + 20] ^= 1
    namespace.blocks[place] = bytes(spoiled)
    agent.channel.run(agent.volume.load(agent.channel, [reservation.cached], agent.deadline()))
    namespace.blocks[place] = whole
    assert reservation.cached.in_doubt
    name(agent, writers)
    assert there(pool.agent(), range(VALUES)) == list(range(VALUES))
    assert there(pool.agent(), range(20, 30)) == list(range(20, 30))


def test_a_value_in_pieces_is_unnamed_with_its_last() -> None:
    pool = MemoryPool((1,))
    agent = pool.agent()
    writing = UnnamedWriter(agent.volume, key_of(0), length=LENGTH)
    for at, end in ((0, 4096), (4096, LENGTH)):
        assert not writing.is_unnamed
        piece = memoryview(value_of(0))[at:end]
        agent.channel.run(writing.write(agent.channel, at, piece, agent.deadline()))
    assert writing.is_unnamed
    name(agent, [writing])
    assert there(pool.agent(), range(1)) == [0]
