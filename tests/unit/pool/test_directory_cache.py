"""What an agent remembers of a set while it writes it: no update lost to itself, no late write believed."""

from __future__ import annotations

import functools
import itertools
import random
import zlib
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import pytest

from agent.inline.scatter import Buffer
from agent.pool.access import LOOKED_UP_AT_ONCE
from agent.pool.counters import MissCause
from agent.pool.errors import PutRefused
from agent.pool.format.directory import Directory, Entry
from agent.pool.volume.directory_cache import COOLDOWN_SECONDS, LOOKS, CachedSet, DirectoryCache
from agent.pool.write.put import SlotWriter
from tests.support.pool.memory_channel import MemoryPending
from tests.support.pool.memory_pool import MemoryPool, key_of


def entry(number: int, generation: int = 1) -> Entry:
    return Entry(random.Random(f"entry {number}").randbytes(16), generation, 1, 4096)


def block_of(*entries: tuple[int, Entry]) -> memoryview:
    directory = Directory()
    for slot, each in entries:
        directory.install(slot, each)
    return memoryview(directory.image())


def remembered(*entries: tuple[int, Entry]) -> CachedSet:
    cached = CachedSet(0, 0)
    cached.accept(block_of(*entries), 1.0, cached.writes)
    return cached


def slots(cached: CachedSet) -> dict[int, bytes]:
    assert cached.directory is not None
    return {slot: each.pseudonym for slot, each in cached.directory}


def test_what_was_read_replaces_what_was_remembered() -> None:
    cached = remembered((1, entry(1)))
    cached.accept(block_of((2, entry(2))), 5.0, cached.writes)
    assert slots(cached) == {2: entry(2).pseudonym}
    assert cached.loaded_at == 5.0


def test_a_block_that_crossed_our_write_is_not_believed() -> None:
    """Read before the write, accepted after it: the entry that was just acknowledged stays."""
    cached = remembered((1, entry(1)))
    before = cached.writes
    assert cached.writer.acquire(blocking=False)
    cached.accept(block_of((1, entry(1))), 6.0, before)
    assert cached.loaded_at == 1.0
    assert cached.directory is not None
    cached.directory.install(3, entry(3))
    cached.end_write()
    cached.accept(block_of((1, entry(1))), 7.0, before)
    assert slots(cached) == {1: entry(1).pseudonym, 3: entry(3).pseudonym}
    cached.accept(block_of((1, entry(1))), 8.0, cached.writes)
    assert slots(cached) == {1: entry(1).pseudonym}, "read after the write: flash is right"


def test_the_holder_of_the_writer_believes_what_it_reads() -> None:
    cached = remembered((1, entry(1)))
    cached.writer.acquire()
    cached.accept(block_of((2, entry(2))), 6.0, cached.writes, holds_writer=True)
    assert slots(cached) == {2: entry(2).pseudonym}


def test_reserved_slots_stay_as_they_are() -> None:
    """On flash is the victim still, or the entry that is not acknowledged yet; neither counts."""
    cached = remembered((1, entry(1)), (5, entry(5)))
    assert cached.directory is not None
    cached.directory.clear(5, ghost=entry(5).pseudonym)
    cached.reserved.add(5)
    for on_flash in (entry(5), entry(6)):
        cached.accept(block_of((1, entry(1)), (5, on_flash), (9, entry(9))), 6.0, cached.writes)
        assert slots(cached) == {1: entry(1).pseudonym, 9: entry(9).pseudonym}
        assert cached.directory.has_ghost(entry(5).pseudonym)
        assert not Directory(cached.directory.image()).corrupt_keys


def test_another_agents_entry_in_a_slot_that_waits_to_be_named_is_taken_over() -> None:
    cached = remembered((1, entry(1)), (5, entry(5)))
    assert cached.directory is not None
    cached.directory.clear(5)
    cached.dropped[5] = entry(5).generation
    cached.reserved.add(5)
    cached.unnamed[5] = False
    cached.accept(block_of((1, entry(1)), (5, entry(5))), 6.0, cached.writes)
    assert (slots(cached), cached.unnamed) == ({1: entry(1).pseudonym}, {5: False}), "the victim"
    theirs = entry(6, generation=2)
    cached.accept(block_of((1, entry(1)), (5, theirs)), 6.0, cached.writes)
    assert (slots(cached), cached.unnamed) == ({1: entry(1).pseudonym, 5: theirs.pseudonym}, {5: True})
    cached.accept(block_of((1, entry(1))), 6.0, cached.writes)
    assert (slots(cached), cached.unnamed) == ({1: entry(1).pseudonym}, {5: True}), "it was deleted"
    cached.end_reservation(5)
    cached.accept(block_of((1, entry(1))), 6.0, cached.writes)
    assert not any((cached.reserved, cached.unnamed, cached.dropped))


def test_disproven_entries_are_remembered_as_long_as_they_stand() -> None:
    cached = remembered((1, entry(1)), (2, entry(2)), (3, entry(3)))
    for slot in (1, 2, 3):
        cached.disprove(slot, 1)
    cached.bear_out(3)
    cached.accept(block_of((1, entry(1)), (2, entry(2, generation=2))), 2.0, cached.writes)
    assert cached.disproven == {1: 1}


def test_sets_in_use_are_kept_and_the_bound_is_kept_to() -> None:
    cache = DirectoryCache(0)
    assert cache.capacity == 16
    used = [cache.borrow(0, at) for at in range(40)]
    assert len(cache) == 40
    assert cache.borrow(0, 0) is used[0]
    for cached in [*used, used[0]]:
        cache.give_back(cached)
    assert len(cache) == 16
    for at in range(100, 120):
        cache.give_back(cache.borrow(0, at))
    assert [cached.offset for cached in cache.snapshot()] == [*range(104, 120)], "the last used are kept"


def test_a_set_that_is_borrowed_costs_a_few_looks_where_all_others_are_in_use() -> None:
    """A batch of 4096 keys took seconds, and the interpreter with it: each set looked at all before it."""
    cache = DirectoryCache(0)
    looks = 0

    class Counted(OrderedDict[tuple[int, int], CachedSet]):
        def move_to_end(self, key: tuple[int, int], last: bool = True) -> None:
            nonlocal looks
            looks += 1
            super().move_to_end(key, last)

    cache._sets = Counted()
    used = [cache.borrow(0, at) for at in range(1000)]
    assert looks <= LOOKS * len(used)
    for cached in used:
        cache.give_back(cached)
    assert len(cache) == 16


@pytest.mark.interpreted
def test_a_batch_has_few_directories_in_use_at_a_time() -> None:
    agent = MemoryPool((4000, 4000)).agent(cache_bytes=0)
    keys = [key_of(number) for number in range(4096)]
    most = 0
    borrow = agent.cache.borrow

    def counted(*place: Any) -> CachedSet:
        nonlocal most
        most = max(most, len(agent.cache))
        return borrow(*place)

    agent.cache.borrow = counted  # type: ignore[method-assign]
    causes = agent.channel.run(agent.served.lookup(agent.channel, keys, agent.deadline(99)))
    assert causes == [MissCause.NEVER_STORED] * len(keys)
    assert most <= 16 + 2 * LOOKED_UP_AT_ONCE
    assert len(agent.cache) == 16


def test_a_batch_reads_a_directory_once(monkeypatch: pytest.MonkeyPatch) -> None:
    agent = MemoryPool((2, 2)).agent()
    monkeypatch.setattr(agent.channel, "now", functools.partial(next, itertools.count(1000)))
    keys = [key_of(number) for number in range(4 * LOOKED_UP_AT_ONCE)]
    agent.channel.run(agent.served.lookup(agent.channel, keys, 1e9))
    assert sum(each.reads for each in agent.channel.namespaces) == 4


def test_entries_that_are_known_are_not_checked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A directory is read for every miss; only what differs from our copy costs a CRC."""
    whole = [(slot, entry(slot)) for slot in range(64)]
    cached = remembered(*whole)
    assert cached.directory is not None
    checked: list[int] = []
    real = zlib.crc32

    def crc32(data: memoryview) -> int:
        checked.append(len(data))
        return real(data)

    monkeypatch.setattr("agent.pool.format.directory.zlib.crc32", crc32)
    block = bytearray(block_of(*whole))
    checked.clear()
    assert cached.accept(memoryview(block), 2.0, cached.writes) == 0
    assert not checked
    cached.directory.touch(5, 99)
    block[64 * 9 + 20] ^= 1
    assert cached.accept(memoryview(block), 3.0, cached.writes) == 1
    assert len(checked) == 2, "the one that we used, and the one that differs"
    assert cached.directory.corrupt_keys == {entry(9).pseudonym}
    assert cached.directory.entry(5).hits == 1  # type: ignore[union-attr]
    assert set(slots(cached)) == set(range(64)), "what was known of it is a hint still"
    # Damage stays damage for as long as it is on flash, and our copy is none of it.
    for now in (4.0, 5.0):
        assert cached.in_doubt
        assert cached.accept(memoryview(block), now, cached.writes) == 1
    assert not cached.in_doubt
    assert not Directory(cached.directory.image()).corrupt_keys


def test_what_is_known_never_vouches_for_a_crc_that_was_not_made() -> None:
    """Our copy of an entry in use has an old CRC. The same bytes on flash are damage all the same."""
    cached = remembered((3, entry(3)))
    assert cached.directory is not None
    cached.directory.touch(3, 99)
    block = memoryview(bytes(cached.directory.raw))
    assert cached.accept(block, 2.0, cached.writes) == 1
    assert cached.in_doubt


def test_a_volume_s_taken_slots_are_counted_as_they_come_and_go(seed: int) -> None:
    """The running sum against a walk through everything, over puts, evictions, deletes and forgotten sets."""
    dice = random.Random(seed)
    pool = MemoryPool((40,), value_bytes=4096)
    agent = pool.agent(cache_bytes=0)

    def walked() -> int:
        return sum(
            1 for cached in agent.cache.snapshot() if cached.directory is not None for _ in cached.directory
        )

    assert agent.volume.usage() == (40 * 64, 0)
    for step in range(600):
        number = dice.randrange(200)
        if dice.random() < 0.6:
            agent.put(key_of(number), b"v")
        elif dice.random() < 0.5:
            agent.delete(key_of(number))
        else:
            agent.get(key_of(number))
        if dice.random() < 0.05 and pool.namespaces[0].blocks:
            pool.namespaces[0].flip(dice.choice(sorted(pool.namespaces[0].blocks)) + dice.randrange(4096))
        assert agent.volume.usage()[1] == walked(), f"seed {seed} step {step}"
    assert len(agent.cache) == agent.cache.capacity
    for cached in agent.cache.snapshot():
        # The second set of a key that the first one names is not read.
        assert cached.directory is None or cached.directory.taken == len(list(cached.directory))
    other = pool.agent()
    assert other.get(key_of(0)) is not None
    assert other.volume.usage()[1] == sum(
        1 for cached in other.cache.snapshot() for _ in cached.directory or ()
    )


def test_a_write_that_lands_late_hits_nothing_new(monkeypatch: pytest.MonkeyPatch) -> None:
    """A put runs out of time and is refused; its slot write lands after the key was stored again."""
    pool = MemoryPool((1,), value_bytes=4096)
    agent = pool.agent()
    late: list[tuple[int, bytes]] = []
    real = agent.channel.write

    def hold_back(
        namespace: int, offset: int, parts: Sequence[Buffer], *, more: bool = False
    ) -> MemoryPending:
        if not late:
            late.append((offset, b"".join(bytes(part) for part in parts)))
            return MemoryPending()
        return real(namespace, offset, parts)

    monkeypatch.setattr(agent.channel, "write", hold_back)
    with pytest.raises(PutRefused) as caught:
        agent.put(key_of(1), b"first")
    assert caught.value.cause is MissCause.LATE
    assert agent.put(key_of(1), b"second").stored
    pool.namespaces[0].store(late[0][0], [late[0][1]])
    assert agent.get(key_of(1)) == b"second"
    assert pool.agent().get(key_of(1)) == b"second"
    # After a while the slot is as good as any other.
    [cached] = agent.cache.snapshot()
    assert len(cached.unavailable(agent.channel.now())) == 1
    assert not cached.unavailable(agent.channel.now() + COOLDOWN_SECONDS + 1)


def test_a_slot_that_cannot_be_written_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """One bad slot must not refuse its set's puts for ever."""
    pool = MemoryPool((1,), value_bytes=4096)
    agent = pool.agent()
    agent.get(key_of(1))
    real = agent.channel.write
    bad: set[int] = set()

    def write(namespace: int, offset: int, parts: Sequence[Buffer], *, more: bool = False) -> MemoryPending:
        if not bad:
            bad.add(offset)
        if offset in bad:
            return MemoryPending(done=True, fault="Write Fault")
        return real(namespace, offset, parts)

    monkeypatch.setattr(agent.channel, "write", write)
    with pytest.raises(PutRefused):
        agent.put(key_of(1), b"v")
    for number in range(1, 64):
        assert agent.put(key_of(number), b"v").stored
    assert all(agent.get(key_of(number)) == b"v" for number in range(1, 64))


def test_two_puts_of_one_key_leave_one_entry() -> None:
    pool = MemoryPool((1,), value_bytes=4096)
    agent = pool.agent()
    writings = [SlotWriter(agent.volume, key_of(1), length=1) for _ in range(2)]
    begun = [SlotWriter(agent.volume, key_of(1)) for _ in range(2)]
    for writing in begun:
        agent.channel.run(writing.write(agent.channel, 0, memoryview(b"vv"), agent.deadline()))
    for writing in begun:
        agent.channel.run(writing.finish(agent.channel, agent.deadline()))
    assert [writing.stored for writing in begun] == [True, False], "the first to end stays"
    assert [writing.already_there for writing in begun] == [False, True]
    assert all(writing.finished for writing in begun)
    assert (agent.tally.puts, agent.tally.puts_already_there) == (1, 1)
    for writing in writings:
        agent.channel.run(writing.write(agent.channel, 0, memoryview(b"w"), agent.deadline()))
        assert writing.already_there
    [(_, _, directory)] = pool.directories()
    assert len(list(directory)) == 1
    assert agent.get(key_of(1)) == b"vv"
