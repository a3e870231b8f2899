"""A directory that came damaged is the base of no write; what flash has stays there, whoever writes."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

import agent as agent_package
from agent.errors import G35Error
from agent.pool.counters import MissCause
from agent.pool.errors import PutRefused
from agent.pool.format.directory import DIRECTORY_BYTES, ENTRY_BYTES, SLOTS_PER_SET, Directory, InDoubt
from agent.pool.maintenance.bad_slots import release
from agent.pool.maintenance.orphans import clear_leftovers
from agent.pool.maintenance.rekey import Unopened
from agent.pool.maintenance.replication import work_off
from agent.pool.maintenance.scrub import ScrubCounters, take_out_bad
from agent.pool.map.document import MapExtent, MapVolume
from agent.pool.map.key_epochs import slots_taken
from agent.pool.volume.directory_cache import (
    COOLDOWN_SECONDS,
    DAMAGE_LOOK_SECONDS,
    DAMAGE_LOOKS,
    FILES_DAMAGE_LOOK_SECONDS,
)
from agent.pool.volume.settings import Timing
from agent.pool.write.delete_and_pin import delete_block
from agent.pool.write.quota_eviction import evict_one
from tests.support.pool.memory_pool import EXTENT_AT, MemoryPool, PoolAgent, key_of, nguid_of
from tests.support.pool.read_flips import ReadFlips

YOUNG_SECONDS = 2 * Timing().write_deadline


def value_of(number: int) -> bytes:
    return random.Random(f"value {number}").randbytes(5000)


def names(pool: MemoryPool) -> set[tuple[int, bytes]]:
    """What flash names: generations with their pseudonyms."""
    return {(entry.generation, entry.pseudonym) for _, _, found in pool.directories() for _, entry in found}


def filled(
    keys: int, sets: tuple[int, ...] = (1,), kind: str = "kv", copies: int = 1
) -> tuple[MemoryPool, PoolAgent]:
    pool = MemoryPool(sets, value_bytes=8192, copies=copies)
    pool.settings = replace(pool.settings, kind=kind)
    agent = pool.agent()
    for number in range(keys):
        agent.put(key_of(number), value_of(number))
    agent.channel.clock += YOUNG_SECONDS + 1
    return pool, agent


@pytest.mark.parametrize("kind", ["kv", "files"])
@pytest.mark.parametrize("share", [0.5, 1.0])
def test_a_put_and_a_delete_under_read_flips_lose_no_other_entry(kind: str, share: float, seed: int) -> None:
    """Before and after: what flash names is the same, but for what was put or deleted."""
    pool, agent = filled(40, kind=kind)
    flips = ReadFlips(agent.channel, seed)
    flips.share = share
    before, stored, refused = names(pool), 0, 0
    for number in range(40, 52):
        agent.age_directories()
        try:
            agent.put(key_of(number), value_of(number))
            stored += 1
        except PutRefused:
            refused += 1
        try:
            agent.channel.run(delete_block(agent.volume, agent.channel, key_of(number), agent.deadline()))
        except PutRefused:
            refused += 1
    assert flips.flipped
    assert before <= names(pool), "an entry that only came damaged was written away"
    assert bool(stored) == (share < 1.0)
    assert refused or share < 1.0
    flips.share = 0.0
    agent.channel.clock += COOLDOWN_SECONDS + 1
    for number in range(40):
        assert pool.agent().get(key_of(number)) == value_of(number)
        assert agent.get(key_of(number)) == value_of(number)
    assert agent.put(key_of(99), value_of(99)).stored
    assert agent.delete(key_of(3))


def test_what_looks_free_in_a_damaged_directory_is_no_slot_for_a_new_value(seed: int) -> None:
    """The slot is written before the directory is: no image need ever go out for a value to be lost."""
    pool, agent = filled(SLOTS_PER_SET - 1)
    before = dict(pool.namespaces[0].blocks)
    other = pool.agent()
    ReadFlips(other.channel, seed).share = 1.0
    for number in range(100, 110):
        with pytest.raises(PutRefused):
            other.put(key_of(number), value_of(number), may_evict=False)
    assert pool.namespaces[0].blocks == before
    assert agent.get(key_of(0)) == value_of(0)


def test_a_put_takes_the_other_set_where_one_comes_damaged(seed: int) -> None:
    pool, agent = filled(10, sets=(1, 1))
    flips = ReadFlips(agent.channel, seed)
    flips.share, flips.namespaces = 1.0, {0}
    clock = agent.channel.clock
    for number in range(50, 60):
        agent.age_directories()
        assert agent.put(key_of(number), value_of(number)).stored
        assert agent.where(key_of(number))[0] == 1
    assert agent.channel.clock - clock < 1.0, "nobody waits for the one that is in doubt"
    flips.share = 0.0
    for number in [*range(10), *range(50, 60)]:
        assert pool.agent().get(key_of(number)) == value_of(number)


@pytest.mark.parametrize("kind", ["kv", "files"])
def test_a_directory_that_is_damaged_at_rest_is_written_again_once_that_is_certain(kind: str) -> None:
    pool, agent = filled(20, kind=kind)
    _, _, directory = agent.where(key_of(7))
    number = next(
        slot
        for slot, entry in Directory(pool.namespaces[0].blocks[directory])
        if entry.pseudonym == agent.volume.placement.pseudonym(key_of(7))
    )
    pool.namespaces[0].flip(directory + number * ENTRY_BYTES + 25)
    stranger = pool.agent()
    tries = 0
    while True:
        try:
            stranger.put(key_of(100 + tries), value_of(0))
            break
        except PutRefused:
            assert kind == "files", "for a cache two more reads are enough, within one put"
            tries += 1
            assert tries < 2 * DAMAGE_LOOKS
            stranger.channel.clock += FILES_DAMAGE_LOOK_SECONDS
    if kind == "files":
        assert tries >= DAMAGE_LOOKS - 1
    assert not Directory(pool.namespaces[0].blocks[directory]).in_doubt
    assert stranger.get(key_of(7)) is MissCause.NEVER_STORED
    for each in range(20):
        if each != 7:
            assert pool.agent().get(key_of(each)) == value_of(each)


def test_who_has_known_the_entry_writes_it_again() -> None:
    """An entry rotted on flash; the agent that remembers it keeps it as a hint, and flash has it again."""
    pool, agent = filled(20)
    _, slot, directory = agent.where(key_of(7))
    number = (slot - directory - DIRECTORY_BYTES) // pool.settings.slot_bytes
    pool.namespaces[0].flip(directory + number * ENTRY_BYTES + 25)
    agent.age_directories()
    assert agent.get(key_of(7)) == value_of(7)
    assert agent.put(key_of(50), value_of(50)).stored
    assert pool.agent().get(key_of(7)) == value_of(7)


def test_damage_that_is_another_each_time_never_becomes_flash_s_own() -> None:
    """In one set, of one directory: the same entries are hit each time, other bits of them."""
    pool, agent = filled(20)
    offset = EXTENT_AT
    volume = agent.volume
    cached = volume.cache.borrow(0, offset, volume.occupancy)
    whole = pool.namespaces[0].blocks[offset]
    for look in range(5 * DAMAGE_LOOKS):
        damaged = bytearray(whole)
        damaged[64 * 3 + 20 + look] ^= 1
        cached.accept(memoryview(damaged), 2000.0 + look * DAMAGE_LOOK_SECONDS, cached.writes)
        assert cached.in_doubt
        assert cached.directory is not None
        with pytest.raises(InDoubt):
            cached.directory.image()
    cached.accept(memoryview(whole), 3000.0, cached.writes)
    assert not cached.in_doubt
    assert cached.directory is not None
    assert cached.directory.image() == whole


def _evict(agent: PoolAgent) -> None:
    agent.channel.run(evict_one(agent.volume, agent.channel, agent.deadline()))


def _settle(agent: PoolAgent) -> None:
    steps = take_out_bad(
        agent.volume, agent.channel, 0, EXTENT_AT, [0, 1, 2], ScrubCounters(), is_given_up=True
    )
    agent.channel.run(steps)


def _clear(agent: PoolAgent) -> None:
    found = []
    cached = agent.volume.cache.borrow(0, EXTENT_AT, agent.volume.occupancy)
    if cached.directory is not None:
        found = [Unopened((0, EXTENT_AT), slot, entry) for slot, entry in cached.directory]
    agent.volume.cache.give_back(cached)
    agent.channel.run(clear_leftovers(agent.volume, agent.channel, found, lambda blocks: blocks))


def _release(agent: PoolAgent) -> None:
    nguid = nguid_of(0).hex()
    places = {(nguid, EXTENT_AT): frozenset(range(SLOTS_PER_SET))}
    agent.channel.run(release(agent.channel, places, {nguid: 0}))


@pytest.mark.parametrize("writer", [_evict, _settle, _clear, _release])
@pytest.mark.expects_log("nothing was removed there")
def test_no_other_writer_takes_entries_away_by_a_damaged_read(
    writer: Callable[[PoolAgent], None], seed: int
) -> None:
    pool, agent = filled(40, kind="kv")
    before = names(pool)
    for number in range(20):
        flips = ReadFlips(agent.channel, (seed, number))
        flips.share = 1.0
        writer(agent)
        assert flips.flipped or number
        flips.share = 0.0
        agent.get(key_of(number))
    assert names(pool) == before


def test_nobody_takes_a_directory_to_write_but_by_the_one_way() -> None:
    """A put, puts of one call or named together, and the set transaction take a set's writer. They read the
    set by agent/pool/volume/writable_directory.py; loss_check.py writes none. Deletes of many keys only try a
    writer, read each set once by that file, and leave what is in doubt."""
    root = Path(agent_package.__file__).parent
    texts = {
        str(path.relative_to(root / "pool")): path.read_text("utf-8") for path in root.glob("pool/**/*.py")
    }
    writers = {"write/put.py", "write/batch.py", "write/name_together.py", "write/set_transaction.py"}
    assert {name for name, text in texts.items() if re.search(r"Acquire\([\w.]*\.writer,", text)} == writers
    readers = {name for name, text in texts.items() if "holds_writers=True" in text}
    assert readers - {"maintenance/loss_check.py", "volume/writable_directory.py"} == writers
    for name in writers:
        text = texts[name]
        assert text.count("holds_writers=True") == len(re.findall(r"\bprove\([^)]*holds_writers=True", text))


def test_a_second_copy_is_not_named_in_a_directory_that_comes_damaged(seed: int) -> None:
    pool, agent = filled(30, sets=(1, 1), copies=2)
    before = names(pool)
    flips = ReadFlips(agent.channel, seed)
    flips.share = 1.0
    agent.age_directories()
    for _ in range(10):
        agent.channel.run(work_off([agent.volume], agent.channel))
    flips.share = 0.0
    assert before <= names(pool)
    for number in range(30):
        assert pool.agent().get(key_of(number)) == value_of(number)


@pytest.mark.parametrize("kind", ["kv", "files"])
@pytest.mark.parametrize("round_", range(6))
@pytest.mark.expects_log("nothing was removed there")
def test_whatever_was_done_under_read_flips_flash_has_all_that_was_acknowledged(
    kind: str, round_: int, seed: int
) -> None:
    """Seeded: puts, gets, deletes, evictions at the operator's wish, scrubs and restarts, and a path that
    damages a share of all reads, or all, for a while. What was put and not deleted is there afterwards."""
    dice = random.Random(f"{seed} {kind} {round_}")
    pool, agent = filled(0, sets=(2, 2), kind=kind)
    pool_keys: dict[int, bytes] = {}
    uncertain: set[int] = set()
    flipped = 0
    flips = ReadFlips(agent.channel, (seed, kind, round_))
    for step in range(400):
        if dice.random() < 0.05:
            flips.share, flips.bits = dice.choice([0.0, 0.1, 0.5, 1.0]), dice.choice([1, 3, 64])
            flips.namespaces = dice.choice([None, {0}, {1}])
        if dice.random() < 0.02:
            flipped += flips.flipped
            share, bits, where, clock = flips.share, flips.bits, flips.namespaces, agent.channel.clock
            agent = pool.agent()
            agent.channel.clock = clock + COOLDOWN_SECONDS + 1
            flips = ReadFlips(agent.channel, (seed, kind, round_, step))
            flips.share, flips.bits, flips.namespaces = share, bits, where
        agent.channel.clock += dice.choice([0.0, 0.1, 1.0, 20.0])
        number, act = dice.randrange(60), dice.random()
        if act < 0.4:
            if number not in pool_keys and number not in uncertain:
                try:
                    agent.put(key_of(number), value_of(number), may_evict=False)
                    pool_keys[number] = value_of(number)
                except PutRefused:
                    uncertain.add(number)
        elif act < 0.7:
            got = agent.get(key_of(number))
            assert isinstance(got, MissCause) or got == value_of(number)
        elif act < 0.85:
            try:
                agent.delete(key_of(number))
                pool_keys.pop(number, None)
                uncertain.discard(number)
            except PutRefused:
                pool_keys.pop(number, None)
                uncertain.add(number)
        else:
            extent = dice.choice(pool.settings.extents)
            offset = extent.offset + dice.randrange(extent.sets) * pool.settings.set_bytes
            slots = dice.sample(range(SLOTS_PER_SET), 4)
            steps = take_out_bad(
                agent.volume, agent.channel, extent.namespace, offset, slots, ScrubCounters(),
                is_given_up=dice.random() < 0.5,
            )  # fmt: skip
            agent.channel.run(steps)
    assert flipped + flips.flipped > 20
    flips.share = 0.0
    agent.channel.clock += COOLDOWN_SECONDS + 1
    for reader in (agent, pool.agent()):
        for number, value in pool_keys.items():
            assert reader.get(key_of(number)) == value, f"seed {seed}: key {number} is lost"
    for number in range(200, 210):
        assert agent.put(key_of(number), value_of(number)).stored


def _map_volume(pool: MemoryPool) -> MapVolume:
    extents = (MapExtent(nguid=nguid_of(0).hex(), offset=EXTENT_AT, sets=1),)
    return MapVolume.model_construct(name="v", value_bytes=pool.settings.value_bytes, extents=extents)


def test_who_counts_what_is_left_counts_nothing_by_a_damaged_read(seed: int) -> None:
    """A rotation that ends because a damaged entry was not counted would drop the key of a value."""
    pool, agent = filled(40)
    count = partial(slots_taken, agent.channel, _map_volume(pool), {nguid_of(0).hex(): 0})
    assert agent.channel.run(count()) == 40
    flips = ReadFlips(agent.channel, seed)
    flips.share = 1.0
    with pytest.raises(G35Error, match="comes damaged"):
        agent.channel.run(count())
    flips.share = 0.5
    counts = set()
    for _ in range(20):
        with suppress(G35Error):  # each of its few looks may come damaged
            counts.add(agent.channel.run(count()))
    assert counts == {40}
