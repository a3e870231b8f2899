"""What is evicted goes to G4 as it lies, and comes up again by the mark in its directory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from agent.pool.counters import MissCause
from agent.pool.read.get import SlotReader
from agent.spill.folder import FolderTarget
from agent.spill.target import TargetError
from tests.support.pool.memory_pool import SUITES, MemoryPool, key_of
from tests.support.pool.spill_pool import (
    SLOTS,
    MemoryTarget,
    SpillingAgent,
    causes_once_deleted,
    evict_all,
    full,
    value_of,
)

pytestmark = pytest.mark.usefixtures("mark_blocks")


@pytest.mark.parametrize("suite", SUITES)
def test_a_value_that_was_used_and_evicted_comes_up_again(suite: str) -> None:
    target = MemoryTarget()
    spilling = full(target, MemoryPool((1,), suite=suite))
    evict_all(spilling)
    got = [spilling.agent.get(key_of(number)) for number in range(8)]
    assert got == [value_of(number) for number in range(8)]
    assert spilling.agent.tally.gets_from_g4 == 8
    assert spilling.agent.tally.misses[MissCause.EVICTED] == 0


def test_a_value_that_was_never_read_is_not_worth_a_copy() -> None:
    target = MemoryTarget()
    spilling = full(target)
    evict_all(spilling, count=48)
    assert spilling.agent.get(key_of(20)) is MissCause.EVICTED
    evict_all(spilling, first=2000)
    assert spilling.spiller.counts.values == 8
    assert not target.fetched


def test_all_values_go_where_that_is_wanted() -> None:
    spilling = full(MemoryTarget(), all_values=True)
    evict_all(spilling, count=SLOTS)
    got = [spilling.agent.get(key_of(number)) for number in range(SLOTS)]
    assert sum(isinstance(each, bytes) for each in got) >= SLOTS * 3 // 4
    assert all(each == value_of(n) for n, each in enumerate(got) if isinstance(each, bytes))


def test_a_bundle_is_stored_before_its_values_are_evicted_where_sets_are_few() -> None:
    """It is far from full then, and not old: the eight that are copied ahead are all that one set fills it
    with."""
    spilling = full(MemoryTarget(), all_values=True)
    for number in range(1000, 1000 + SLOTS):
        spilling.agent.channel.clock += 1.0
        spilling.agent.put(key_of(number), value_of(number))
        spilling.spill(store=False)
    got = [spilling.agent.get(key_of(number)) for number in range(SLOTS)]
    assert sum(each == value_of(number) for number, each in enumerate(got)) >= SLOTS * 3 // 4
    counts = spilling.spiller.counts
    assert counts.bundles <= SLOTS // 4, "no bundle for each value"


def test_a_value_that_fits_into_no_bundle_stays_without_a_copy() -> None:
    target, pool = MemoryTarget(), MemoryPool((1,), value_bytes=8 << 20)
    spilling = SpillingAgent(pool.agent(), target, bundle_bytes=4 << 20)
    spilling.put(key_of(0), value_of(0) * 400)
    for number in range(1, SLOTS):
        spilling.put(key_of(number), value_of(number))
    for number in range(8):
        assert isinstance(spilling.agent.get(key_of(number)), bytes)
    evict_all(spilling)
    assert spilling.agent.get(key_of(0)) in (MissCause.EVICTED, MissCause.NEVER_STORED)
    assert [spilling.agent.get(key_of(number)) for number in range(1, 8)] == [
        value_of(number) for number in range(1, 8)
    ]


def test_what_leaves_is_what_lies_on_flash() -> None:
    target = MemoryTarget()
    spilling = full(target)
    sealed = {}
    for number in range(8):
        namespace, offset, _ = spilling.agent.where(key_of(number))
        block = bytearray(16384)
        spilling.agent.channel.namespaces[namespace].load(offset, memoryview(block))
        sealed[number] = bytes(block[: 4096 + 12288])
    evict_all(spilling)
    whole = b"".join(target.objects.values())
    assert all(block in whole for block in sealed.values())
    assert not any(value_of(number)[:64] in whole for number in range(8))


def test_an_agent_that_starts_anew_finds_what_the_directories_name(tmp_path: Path) -> None:
    pool, target = MemoryPool((1,)), FolderTarget(tmp_path)
    evict_all(full(target, pool))
    anew = SpillingAgent(pool.agent(), target, deadline=5.0)
    assert [anew.agent.get(key_of(number)) for number in range(8)] == [
        value_of(number) for number in range(8)
    ]
    target.close()


def test_an_agent_without_the_place_misses_by_eviction() -> None:
    pool = MemoryPool((1,))
    evict_all(full(MemoryTarget(), pool))
    assert pool.agent().get(key_of(0)) is MissCause.EVICTED


def test_ranges_are_served_by_one_request() -> None:
    target = MemoryTarget()
    spilling = full(target)
    evict_all(spilling)
    reading = SlotReader(spilling.agent.volume, key_of(3))
    parts = [spilling.agent.read(reading, 1000, at) for at in range(0, 10240, 1000)]
    reading.close()
    assert b"".join(part for part in parts if isinstance(part, bytes)) == value_of(3)
    assert len(target.fetched) == 1


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "a flipped bit in the value": lambda data: data[:5000] + bytes((data[5000] ^ 1,)) + data[5001:],
    "a flipped bit in the header": lambda data: data[:100] + bytes((data[100] ^ 1,)) + data[101:],
    "zeros": lambda data: bytes(len(data)),
    "nothing": lambda data: b"",
    "a header alone": lambda data: data[:4096],
    "cut in the value": lambda data: data[:9000],
    "noise": lambda data: bytes(each ^ 0x5A for each in data),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_wrong_byte_is_a_miss_with_its_cause(damage: Callable[[bytes], bytes]) -> None:
    target = MemoryTarget()
    spilling = full(target)
    evict_all(spilling)
    target.damage = damage
    assert spilling.agent.get(key_of(1)) is MissCause.G4_CORRUPT
    target.damage = lambda data: data
    assert spilling.agent.get(key_of(1)) == value_of(1)


def test_what_is_gone_is_lost_and_what_is_late_is_late() -> None:
    target = MemoryTarget()
    spilling = full(target)
    evict_all(spilling)
    target.silent = True
    assert spilling.agent.get(key_of(1)) is MissCause.G4_LATE
    target.silent = False
    assert spilling.agent.get(key_of(1)) == value_of(1)
    target.refusal = TargetError("503")
    assert spilling.agent.get(key_of(2)) is MissCause.G4_LATE
    target.refusal = None
    target.objects.clear()
    assert spilling.agent.get(key_of(1)) is MissCause.G4_LOST
    assert spilling.agent.tally.gets_missed == sum(spilling.agent.tally.misses.values()) == 3


def test_a_place_that_does_not_answer_is_left_alone() -> None:
    target = MemoryTarget()
    spilling = full(target)
    evict_all(spilling)
    target.silent = True
    for number in range(8):
        assert spilling.agent.get(key_of(number)) is MissCause.G4_LATE
    assert len(target.fetched) == 2, "the second late answer in a row is the last for a while"
    target.silent = False
    spilling.agent.channel.clock += 10.0
    assert spilling.agent.get(key_of(1)) == value_of(1)


def test_the_second_use_brings_a_value_back_to_flash() -> None:
    target = MemoryTarget()
    spilling = full(target)
    evict_all(spilling)
    assert spilling.agent.get(key_of(1)) == value_of(1)
    spilling.spill()
    assert spilling.agent.get(key_of(1)) == value_of(1)
    assert spilling.agent.tally.gets_from_g4 == 2
    spilling.spill()
    assert spilling.spiller.counts.returned == 1
    assert spilling.agent.get(key_of(1)) == value_of(1)
    assert spilling.agent.tally.gets_from_g4 == 2, "the third came from flash"


def test_a_deleted_key_does_not_come_up() -> None:
    target = MemoryTarget()
    pool = MemoryPool((1, 1))
    spilling = full(target, pool)
    for number in range(SLOTS, 2 * SLOTS):
        spilling.put(key_of(number), value_of(number))
    evict_all(spilling)
    assert spilling.agent.delete(key_of(1)), "it was there, in G4"
    assert spilling.agent.get(key_of(1)) in causes_once_deleted()
    assert not spilling.agent.delete(key_of(1))
    other = SpillingAgent(pool.agent(), target)
    assert other.agent.get(key_of(1)) in causes_once_deleted()
    assert other.agent.get(key_of(2)) == value_of(2)


@pytest.mark.parametrize("sets", [(1,), (1, 1), (1, 1, 1)])
def test_of_a_key_that_was_put_anew_the_older_value_does_not_come_up(sets: tuple[int, ...]) -> None:
    target = MemoryTarget()
    spilling = SpillingAgent(MemoryPool(sets).agent(), target)
    for number in range(SLOTS * len(sets)):
        spilling.put(key_of(number), value_of(number))
    for number in range(8):
        spilling.agent.get(key_of(number))
    evict_all(spilling, count=SLOTS * len(sets) * 3)
    older = [number for number in range(8) if spilling.agent.get(key_of(number)) == value_of(number)]
    assert older
    for number in older:
        spilling.put(key_of(number), value_of(number + 500))
    evict_all(spilling, first=5000, count=SLOTS * len(sets) * 3)
    for number in older:
        assert spilling.agent.get(key_of(number)) in (MissCause.EVICTED, MissCause.NEVER_STORED)


def test_a_slow_place_costs_copies_and_no_put() -> None:
    target = MemoryTarget()
    target.refusal = TargetError("SlowDown")
    spilling = full(target)
    evict_all(spilling)
    assert spilling.spiller.counts.values == 0
    assert spilling.spiller.counts.bundles_dropped > 0
    assert spilling.agent.get(key_of(1)) in (MissCause.EVICTED, MissCause.NEVER_STORED)
    assert spilling.agent.tally.puts_refused == 0


def test_an_erased_volume_asks_for_nothing() -> None:
    target = MemoryTarget()
    spilling = full(target)
    evict_all(spilling)
    spilling.agent.volume.change(erased=True)
    assert spilling.agent.get(key_of(1)) is MissCause.WRONG_KEY
    assert not target.fetched
    spilling.spill()
    assert spilling.spiller.memory == 0


def test_two_agents_spill_the_same_set() -> None:
    pool, target = MemoryPool((1,)), MemoryTarget()
    one, other = full(target, pool), SpillingAgent(pool.agent(), target)
    for number in range(2000, 2000 + 4 * SLOTS):
        (one if number % 2 else other).put(key_of(number), value_of(number))
    for number in range(8):
        for agent in (one.agent, other.agent):
            agent.age_directories()
            assert agent.get(key_of(number)) in (value_of(number), MissCause.EVICTED)
    assert one.agent.tally.gets_from_g4 + other.agent.tally.gets_from_g4 > 0


def test_keys_in_g4_count_as_there() -> None:
    spilling = full(MemoryTarget())
    evict_all(spilling)
    channel = spilling.agent.channel
    keys = [key_of(number) for number in (0, 1, 9999)]
    causes = channel.run(spilling.agent.volume.lookup(channel, keys, channel.now() + 1))
    assert causes == [None, None, MissCause.NEVER_STORED]


def test_a_key_that_is_deleted_while_its_value_waits_to_come_back_stays_deleted() -> None:
    spilling = full(MemoryTarget())
    evict_all(spilling)
    for _ in range(2):
        assert spilling.agent.get(key_of(1)) == value_of(1)
    assert spilling.agent.delete(key_of(1))
    spilling.spill()
    assert spilling.agent.get(key_of(1)) in causes_once_deleted()
    assert spilling.spiller.counts.returned == 0


def test_a_key_that_another_agent_deletes_while_its_value_waits_to_come_back_stays_deleted() -> None:
    pool = MemoryPool((1, 1))
    spilling = SpillingAgent(pool.agent(), MemoryTarget())
    for number in range(2 * SLOTS):
        spilling.put(key_of(number), value_of(number))
    for number in range(8):
        spilling.agent.get(key_of(number))
    evict_all(spilling, count=6 * SLOTS)
    for _ in range(2):
        assert spilling.agent.get(key_of(1)) == value_of(1)
    assert pool.agent().delete(key_of(1))
    spilling.spill()
    assert spilling.agent.get(key_of(1)) in causes_once_deleted()


def test_a_key_that_is_put_anew_while_its_value_waits_to_come_back_keeps_the_new_one() -> None:
    spilling = full(MemoryTarget())
    evict_all(spilling)
    for _ in range(2):
        assert spilling.agent.get(key_of(1)) == value_of(1)
    spilling.agent.put(key_of(1), value_of(501))
    spilling.spill()
    assert spilling.agent.get(key_of(1)) == value_of(501)
    assert spilling.agent.delete(key_of(1))
    assert spilling.agent.get(key_of(1)) in causes_once_deleted()


def test_what_came_back_left_no_mark() -> None:
    pool = MemoryPool((1,))
    spilling = full(MemoryTarget(), pool)
    evict_all(spilling)
    for _ in range(2):
        assert spilling.agent.get(key_of(1)) == value_of(1)
    spilling.spill()
    assert spilling.spiller.counts.returned == 1
    pseudonym = spilling.agent.volume.placement.pseudonym(key_of(1))
    assert [directory.marks(pseudonym) for _, _, directory in pool.directories()] == [[]]


def test_readers_that_stay_open_hold_no_memory_of_what_they_have_read() -> None:
    spilling = full(MemoryTarget())
    evict_all(spilling)
    before = spilling.health._memory
    readers = [SlotReader(spilling.agent.volume, key_of(number)) for number in range(8)]
    for number, reading in enumerate(readers):
        assert spilling.agent.read(reading) == value_of(number)
    assert spilling.health._memory == before
    for number, reading in enumerate(readers):
        first = spilling.agent.read(reading, 1000, 0)
        assert first == value_of(number)[:1000], "a later range asks again"
    assert spilling.health._memory < before
    for reading in readers:
        reading.close()
    assert spilling.health._memory == before
    assert spilling.agent.tally.gets_from_g4 == 8


def test_a_later_range_of_a_key_that_was_deleted_meanwhile_is_a_miss() -> None:
    spilling = full(MemoryTarget())
    evict_all(spilling)
    reading = SlotReader(spilling.agent.volume, key_of(1))
    assert spilling.agent.read(reading) == value_of(1)
    spilling.agent.delete(key_of(1))
    assert spilling.agent.read(reading, 1000, 0) is MissCause.EVICTED
    reading.close()


def test_a_later_range_is_of_the_write_that_the_first_was_of() -> None:
    spilling = full(MemoryTarget())
    evict_all(spilling)
    reading = SlotReader(spilling.agent.volume, key_of(1))
    assert spilling.agent.read(reading) == value_of(1)
    spilling.put(key_of(1), value_of(501))
    assert spilling.agent.get(key_of(1)) == value_of(501)
    evict_all(spilling, first=5000)
    assert spilling.agent.get(key_of(1)) == value_of(501)
    assert spilling.agent.tally.gets_from_g4 == 2
    assert spilling.agent.read(reading, 1000, 0) is MissCause.EVICTED
    reading.close()
