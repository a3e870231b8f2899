"""A block of marks behind a directory: its bytes, its bound, and what a volume with one looks like."""

from __future__ import annotations

import random

import pytest
from pydantic import ValidationError

from agent.config.configuration import VolumeSection
from agent.errors import ConfigError
from agent.inline.secrets import RootKey, SecretKey
from agent.pool.format.directory import DIRECTORY_BYTES, SLOTS_PER_SET, Directory, Entry
from agent.pool.format.mark_block import (
    MARK_BLOCK_BYTES,
    MARKS_MAX,
    MarkBlock,
    located,
    may_be_of,
    wide_mark,
)
from agent.pool.format.spill_mark import BUNDLE_NUMBERS, STEPS_MAX, SpillMark
from agent.pool.map.document import PoolMap, plan_pool, set_size
from tests.support.pool.memory_pool import MemoryPool, key_of
from tests.support.pool.spill_pool import MemoryTarget, SpillingAgent, evict_all, full, value_of

ROOT = RootKey(SecretKey(bytes(32)), "a test")


def name_of(number: int) -> bytes:
    return random.Random(number).randbytes(16)


def test_a_mark_keeps_what_it_is_given() -> None:
    rng = random.Random(35)
    for _ in range(200):
        item = SpillMark(rng.randrange(BUNDLE_NUMBERS), rng.randrange(STEPS_MAX), rng.randint(1, 16))
        slot, name = rng.randrange(SLOTS_PER_SET), rng.randbytes(16)
        wide = wide_mark(item, slot, name)
        assert located(wide, 70) == (item, slot)
        assert may_be_of(wide, name)
        assert not may_be_of(wide, name_of(1))
    assert not may_be_of(bytes(len(wide)), bytes(16)), "zeros are no mark"


def test_the_oldest_mark_goes_and_a_key_has_one() -> None:
    block = MarkBlock()
    for number in range(MARKS_MAX + 10):
        block.add(wide_mark(SpillMark(number, 1, 1), number % SLOTS_PER_SET, name_of(number)))
    assert len(block) == MARKS_MAX
    assert not any(block.find(name_of(number)) for number in range(10))
    assert all(block.find(name_of(number)) for number in range(10, MARKS_MAX + 10))
    block.add(wide_mark(SpillMark(7, 7, 7), 7, name_of(100)))
    (place,) = block.find(name_of(100))
    assert located(block.at(place), 0) == (SpillMark(7, 7, 7), 7)
    block.take_out(place)
    assert not block.find(name_of(100))


def test_a_block_that_does_not_prove_itself_has_no_marks() -> None:
    block = MarkBlock()
    assert block.image() == bytes(MARK_BLOCK_BYTES), "as a format leaves it"
    block.add(wide_mark(SpillMark(1, 2, 3), 4, name_of(1)))
    image = block.image()
    assert len(MarkBlock(image)) == 1
    for at in (0, 1, 12, 16, 20, MARK_BLOCK_BYTES - 1):
        damaged = bytearray(image)
        damaged[at] ^= 4
        assert len(MarkBlock(damaged)) == 0
    assert len(MarkBlock(bytes(16) + image[16:])) == 0


def test_a_directory_carries_its_block() -> None:
    directory = Directory(bytes(DIRECTORY_BYTES + MARK_BLOCK_BYTES))
    directory.install(5, Entry(name_of(1), 9, 9, 9))
    directory.clear(5, ghost=SpillMark(1, 2, 3).encode(name_of(1)))
    (place,) = directory.marks(name_of(1))
    assert place >= SLOTS_PER_SET
    assert located(directory.mark(place), place) == (SpillMark(1, 2, 3), 5)
    assert directory.has_ghost(name_of(1))
    image = directory.image()
    assert len(image) == DIRECTORY_BYTES + MARK_BLOCK_BYTES
    copy, again = directory.copy(), Directory(memoryview(image))
    assert copy.image() == again.image() == image
    assert directory.unlike(memoryview(image)) == []
    assert directory.unmark(name_of(1)) == [copy.mark(place)]
    assert not directory.marks(name_of(1))
    assert copy.marks(name_of(1)), "the copy is another one"
    assert directory.has_ghost(name_of(1)), "the plain ghost stays"


def test_damage_of_the_block_costs_marks_and_no_entry() -> None:
    target, pool = MemoryTarget(), MemoryPool((1,), mark_blocks=1)
    spilling = full(target, pool)
    evict_all(spilling)
    assert spilling.agent.get(key_of(1)) == value_of(1)
    namespace, offset, directory = pool.directories()[0]
    block = bytearray(directory.image())
    block[DIRECTORY_BYTES + 100] ^= 1
    pool.namespaces[namespace].store(offset, [bytes(block)])
    other = SpillingAgent(pool.agent(), target)
    assert not isinstance(other.agent.get(key_of(1)), bytes)
    held = [number for number in range(1000, 1256) if isinstance(other.agent.get(key_of(number)), bytes)]
    assert len(held) == SLOTS_PER_SET
    assert other.agent.tally.corrupt_entries == 0


def test_a_set_with_a_block_finds_more_than_its_slots() -> None:
    target, pool = MemoryTarget(), MemoryPool((1,), mark_blocks=1)
    spilling = SpillingAgent(pool.agent(), target, all_values=True)
    for number in range(200):
        spilling.put(key_of(number), value_of(number))
    found = sum(spilling.agent.get(key_of(number)) == value_of(number) for number in range(200))
    assert found > 150, "64 of them are on flash"


def planned(**changes: object) -> PoolMap:
    section = VolumeSection.model_validate({"name": "v", "value_size": "64K", "share": 0.5} | changes)
    return plan_pool([(bytes(16), 1 << 30), (bytes(range(16)), 1 << 30)], [section.wish()], ROOT)


def test_a_map_says_which_volumes_have_blocks_and_their_sets_lie_apart() -> None:
    plain, blocks = planned().volumes[0], planned(marks=340).volumes[0]
    assert (plain.mark_blocks, blocks.mark_blocks) == (0, 1)
    assert blocks.set_bytes == plain.set_bytes + MARK_BLOCK_BYTES == set_size(1 << 16, 1)
    pool_map = planned(marks=340)
    settings = pool_map.settings(pool_map.volumes[0])
    assert settings.set_bytes == blocks.set_bytes
    assert settings.directory_bytes == DIRECTORY_BYTES + MARK_BLOCK_BYTES
    assert b"mark_blocks" not in planned().encode(), "an older agent reads a map without blocks"
    assert b"mark_blocks" in pool_map.encode()


@pytest.mark.parametrize("changes", [{"kind": "files"}, {"copies": 2}, {"layout": "kv"}, {"marks": 128}])
def test_blocks_are_for_volumes_whose_values_may_go_to_g4(changes: dict[str, object]) -> None:
    with pytest.raises((ValidationError, ConfigError), match=r"marks"):
        planned(**({"marks": 340} | changes))
