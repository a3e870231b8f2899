"""A volume's data key is replaced while it is used: nothing is lost, nothing stays under the earlier key."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from agent.errors import ConfigError
from agent.inline.key_use import FILE, GCM_WRITES_MAX, RETRY_WRITES, KeyUseBook, writes_max
from agent.inline.secrets import RootKey, SecretKey
from agent.pool.counters import MissCause
from agent.pool.errors import PutRefused
from agent.pool.format.directory import SLOTS_PER_SET
from agent.pool.format.sealed_slot import MAGIC
from agent.pool.map.document import PoolMap, VolumeWish, plan_pool
from agent.pool.map.key_epochs import (
    left_under_earlier,
    rotating,
    with_new_data_keys,
    without_earlier_keys,
)
from agent.pool.map.tenant_changes import with_tenant, without_key
from agent.pool.read.get import SlotReader
from agent.pool.volume.directory_cache import DirectoryCache
from agent.pool.volume.key_transition import SETTLE_SECONDS
from agent.pool.volume.settings import Timing
from agent.pool.volume.volume import Volume
from agent.pool.write.delete_and_pin import delete
from agent.pool.write.put import SlotWriter
from agent.tenancy.key_rotation import KeyRotation
from tests.support.pool.memory_channel import MemoryChannel, MemoryNamespace
from tests.support.pool.memory_pool import key_of, nguid_of

ROOT = RootKey(SecretKey(b"\x22" * 32), "a test")
SIZE = 48 << 20
NUMBERS = {nguid_of(number).hex(): number for number in range(2)}
STEP = 0.5


def value_of(number: int) -> bytes:
    dice = random.Random(f"value {number}")
    return dice.randbytes(dice.choice((1, 5_000, 9_000, 65_536, 70_000)))


class Shelf:
    """Flash of two namespaces with one volume, of tenant blue."""

    def __init__(self, state: Path, kind: str = "kv", suite: str = "aes-256-gcm", share: float = 1.0) -> None:
        wish = VolumeWish(
            name="v",
            value_bytes=1 << 18,
            unit_bytes=1 << 16,
            share=share,
            tenant="blue",
            kind=kind,
            suite=suite,
        )
        self.state = state
        self.pool_map = plan_pool([(nguid_of(number), SIZE) for number in range(2)], [wish], ROOT)
        self.namespaces = [MemoryNamespace(SIZE) for _ in range(2)]

    def rotate(self) -> PoolMap:
        self.pool_map = with_new_data_keys(self.pool_map, "blue", ROOT)
        return self.pool_map

    def end(self) -> PoolMap:
        ended = {volume.volume_id for volume in rotating(self.pool_map, "blue")}
        self.pool_map = without_earlier_keys(self.pool_map, ended)
        return self.pool_map

    def fingerprints(self) -> set[bytes]:
        """Of the keys that the named slots are sealed under, by their headers on flash."""
        found = set()
        agent = Agent(self)
        for number in range(200):
            pseudonym = agent.volume.placement.pseudonym(key_of(number))
            sets = agent.volume.borrow_sets(pseudonym)
            agent.channel.run(agent.volume.load(agent.channel, sets, agent.channel.now() + 1))
            for hit in agent.volume.find(sets, pseudonym):
                offset = agent.volume.slot_offset(hit.cached, hit.slot)
                header = self.namespaces[hit.cached.namespace].blocks[offset]
                assert header[:8] == MAGIC
                found.add(header[16:24])
            agent.volume.give_back_sets(sets)
        return found


class Agent:
    def __init__(self, shelf: Shelf, chunk: int = 100) -> None:
        self.shelf = shelf
        self.channel = MemoryChannel(shelf.namespaces)
        entry = shelf.pool_map.volumes[0]
        self.volume = Volume(
            shelf.pool_map.settings(entry),
            shelf.pool_map.secret(entry, ROOT),
            DirectoryCache(1 << 20),
            Timing(),
        )
        self.keys = KeyRotation(
            shelf.pool_map, [self.volume], ROOT, KeyUseBook(shelf.state, chunk), self.channel.now
        )

    def put(self, number: int, *, may_evict: bool = True) -> None:
        value = value_of(number)
        writing = SlotWriter(self.volume, key_of(number), length=len(value), may_evict=may_evict)
        assert self.channel.run(writing.write(self.channel, 0, memoryview(value), self.channel.now() + 5))

    def get(self, number: int) -> bytes | MissCause:
        reading, into = SlotReader(self.volume, key_of(number)), bytearray(1 << 18)
        count = self.channel.run(reading.read(self.channel, 0, memoryview(into), self.channel.now() + 1))
        return bytes(into[:count]) if reading.cause is None else reading.cause

    def set_of(self, number: int) -> tuple[int, int]:
        """Where the set is that has it: namespace and offset."""
        pseudonym = self.volume.placement.pseudonym(key_of(number))
        sets = self.volume.borrow_sets(pseudonym)
        self.volume.give_back_sets(sets)
        [found] = self.volume.find(sets, pseudonym)
        return found.cached.namespace, found.cached.offset

    def has(self, *numbers: int) -> bool:
        return all(self.get(number) == value_of(number) for number in numbers)

    def pass_time(self, seconds: float) -> None:
        """As upkeep does: a look every half of a second."""
        for _ in range(int(seconds / STEP)):
            self.channel.clock += STEP
            self.channel.run(self.keys.look(self.channel))

    @property
    def row(self) -> dict[str, object]:
        return self.keys.snapshot()["v"]

    def left(self) -> int:
        volume = self.shelf.pool_map.volumes[0]
        return self.channel.run(left_under_earlier(self.channel, volume, NUMBERS))


@pytest.mark.parametrize("suite", ["aes-256-gcm", "aes-256-xts+crc64"])
def test_a_rotation_under_two_agents_loses_nothing_and_leaves_nothing(tmp_path: Path, suite: str) -> None:
    shelf = Shelf(tmp_path, suite=suite)
    one, other = Agent(shelf), Agent(shelf)
    for number in range(60):
        one.put(number)
    before = shelf.fingerprints()
    assert len(before) == 1
    shelf.rotate()
    one.keys.follow(shelf.pool_map)
    one.put(60)
    assert shelf.fingerprints() == before, "the other could not open it yet"
    assert other.has(60)
    other.keys.follow(shelf.pool_map)
    assert one.left() == 61

    one.pass_time(SETTLE_SECONDS)
    one.put(61)
    assert len(shelf.fingerprints()) == 2
    assert other.has(*range(62)), "who still seals with the earlier key opens either"
    while one.left():
        one.pass_time(STEP)
        assert one.has(*random.Random(1).sample(range(62), 9)), "readers notice nothing"
    after = shelf.fingerprints()
    assert len(after) == 1
    assert after != before
    assert one.row["rotating"]
    other.pass_time(SETTLE_SECONDS + 10)
    assert other.row["resealed"] == 0, "there was nothing left to do"

    shelf.end()
    for agent in (one, other):
        agent.keys.follow(shelf.pool_map)
        assert agent.has(*range(62))
        assert not agent.row["rotating"]
        assert agent.row["key_epoch"] == 1
    later = Agent(shelf)
    assert later.has(*range(62))
    assert later.volume.occupancy.taken == 62
    # And once more.
    shelf.rotate()
    later.keys.follow(shelf.pool_map)
    later.pass_time(60)
    assert later.left() == 0
    assert len({*before, *after, *shelf.fingerprints()}) == 3
    assert later.has(*range(62))


def test_a_rotation_goes_on_with_the_next_agent(tmp_path: Path) -> None:
    shelf = Shelf(tmp_path)
    first = Agent(shelf)
    for number in range(90):
        first.put(number)
    shelf.rotate()
    first.keys.follow(shelf.pool_map)
    first.pass_time(SETTLE_SECONDS + STEP)
    done = first.row["resealed"]
    assert isinstance(done, int)
    assert 0 < done < 90
    assert first.left() == 90 - done
    second = Agent(shelf)
    assert second.has(*range(90))
    second.pass_time(60)
    assert second.left() == 0
    assert second.row["resealed"] == 90 - done
    assert second.has(*range(90))


def test_full_sets_of_a_cache_are_sealed_over_themselves(tmp_path: Path) -> None:
    shelf = Shelf(tmp_path, share=0.4)
    agent = Agent(shelf)
    slots = agent.volume.settings.slots
    for number in range(2 * slots):
        agent.channel.clock += 0.1
        agent.put(number)
    assert agent.volume.occupancy.taken == slots
    stored = [number for number in range(2 * slots) if agent.has(number)]
    shelf.rotate()
    agent.keys.follow(shelf.pool_map)
    agent.pass_time(60)
    assert agent.left() == 0
    assert agent.row["resealed"] == len(stored)
    assert agent.has(*stored)


def test_blocks_of_files_wait_for_a_free_slot(tmp_path: Path) -> None:
    shelf = Shelf(tmp_path, kind="files", share=0.4)
    agent = Agent(shelf)
    agent.volume.change(files_elsewhere=False)
    stored = []
    for number in range(4 * agent.volume.settings.slots):
        agent.channel.clock += 0.1
        try:
            agent.put(number, may_evict=False)
        except PutRefused:
            continue
        stored.append(number)
    assert agent.volume.occupancy.taken == agent.volume.settings.slots
    shelf.rotate()
    agent.keys.follow(shelf.pool_map)
    agent.pass_time(30)
    assert agent.left() == len(stored)
    # Blocks are sealed anew within their set, so each set has to get room; places differ from run to run.
    gone = list({agent.set_of(number): number for number in stored}.values())
    assert len(gone) == agent.volume.settings.slots // SLOTS_PER_SET
    for number in gone:
        assert agent.channel.run(delete(agent.volume, agent.channel, key_of(number), agent.channel.now() + 5))
    kept = [number for number in stored if number not in gone]
    agent.pass_time(60)
    assert agent.left() == 0
    assert agent.has(*kept)


def test_what_does_not_open_is_dropped_from_a_cache(tmp_path: Path) -> None:
    shelf = Shelf(tmp_path)
    agent = Agent(shelf)
    for number in range(5):
        agent.put(number)
    pseudonym = agent.volume.placement.pseudonym(key_of(3))
    sets = agent.volume.borrow_sets(pseudonym)
    hit = agent.volume.find(sets, pseudonym)[0]
    shelf.namespaces[hit.cached.namespace].flip(agent.volume.slot_offset(hit.cached, hit.slot) + 5000)
    agent.volume.give_back_sets(sets)
    shelf.rotate()
    agent.keys.follow(shelf.pool_map)
    agent.pass_time(20)
    assert agent.left() == 0
    assert (agent.row["resealed"], agent.row["reseals_dropped"]) == (4, 1)
    assert agent.has(0, 1, 2, 4)
    assert agent.get(3) is MissCause.EVICTED


def test_what_was_begun_under_a_key_that_is_gone_is_refused(tmp_path: Path) -> None:
    shelf = Shelf(tmp_path)
    agent = Agent(shelf)
    writing = SlotWriter(agent.volume, key_of(1))
    agent.channel.run(writing.write(agent.channel, 0, memoryview(b"half"), agent.channel.now() + 5))
    shelf.rotate()
    agent.keys.follow(shelf.pool_map)
    agent.pass_time(10)
    agent.keys.follow(shelf.end())
    with pytest.raises(PutRefused, match="its key was dropped"):
        agent.channel.run(writing.finish(agent.channel, agent.channel.now() + 5))
    assert agent.get(1) is MissCause.NEVER_STORED


def test_an_erased_tenant_has_no_earlier_key_either(tmp_path: Path) -> None:
    shelf = Shelf(tmp_path)
    Agent(shelf).put(1)
    shelf.rotate()
    with pytest.raises(ConfigError, match="being rotated"):
        with_new_data_keys(shelf.pool_map, "blue", ROOT)
    erased = without_key(shelf.pool_map, "blue")
    volume = erased.volumes[0]
    assert not volume.earlier_secret
    with pytest.raises(ConfigError):
        erased.secret(volume, ROOT)
    # One that was erased so by an earlier release comes back whole, too.
    stale = shelf.pool_map.volumes[0].earlier_secret
    old = erased.model_copy(update={"volumes": (volume.model_copy(update={"earlier_secret": stale}),)})
    for before in (erased, old):
        again, _ = with_tenant(before, "blue", [], ROOT)
        assert (again.volumes[0].earlier_secret, again.volumes[0].key_epoch) == ("", 0)
        shelf.pool_map = again
        agent = Agent(shelf)
        agent.put(2)
        assert agent.has(2)
    with pytest.raises(ConfigError, match="was erased"):
        with_new_data_keys(erased, "blue", ROOT)


def test_the_placement_key_stays_and_maps_without_a_rotation_are_as_before(tmp_path: Path) -> None:
    shelf = Shelf(tmp_path)
    before = shelf.pool_map
    assert b"key_epoch" not in before.encode()
    assert b"earlier_secret" not in before.encode()
    after = shelf.rotate()
    old, new = (each.secret(each.volumes[0], ROOT).reveal() for each in (before, after))
    assert old[:32] == new[:32]
    assert old[32:64] != new[32:64]
    earlier = after.earlier_secret(after.volumes[0], ROOT)
    assert earlier is not None
    assert earlier.reveal() == old
    ended = shelf.end()
    assert b"earlier_secret" not in ended.encode()
    assert (ended.version, ended.volumes[0].key_epoch) == (before.version + 2, 1)
    on_kv = VolumeWish(name="kv", value_bytes=1 << 16, share=1.0, tenant="blue")
    with pytest.raises(ConfigError, match="no volume whose key can be rotated"):
        with_new_data_keys(plan_pool([], [on_kv], ROOT, [(nguid_of(0), SIZE)]), "blue", ROOT)
    without, _ = with_tenant(before, "green", [], ROOT)
    with pytest.raises(ConfigError, match="tenant green has no volumes, and so no keys to rotate") as none:
        with_new_data_keys(without, "green", ROOT)
    assert "KV" not in none.value.advice


# -- how much one key seals -----------------------------------------------------------------------------


@pytest.mark.expects_log("sealed half of what it may")
def test_a_key_that_is_used_up_seals_no_more_until_it_is_rotated(tmp_path: Path) -> None:
    shelf = Shelf(tmp_path)
    agent = Agent(shelf)
    book = KeyUseBook(tmp_path, chunk=4)
    agent.volume.codec.count_in(book.use_of(agent.volume.codec.fingerprint, 20))
    for number in range(20):
        agent.put(number)
    assert agent.row["key_used_part"] == 1.0
    with pytest.raises(PutRefused, match="rotate it") as refused:
        agent.put(20)
    assert refused.value.cause is MissCause.WRONG_KEY
    assert agent.has(*range(20)), "what there is is read"
    # Another start knows of it, and may think that it was more: never that it was less.
    noted = json.loads((tmp_path / FILE).read_text())[agent.volume.codec.fingerprint.hex()]
    assert noted in (20, 21)
    assert KeyUseBook(tmp_path).use_of(agent.volume.codec.fingerprint, 20).is_used_up
    shelf.rotate()
    agent.keys.follow(shelf.pool_map)
    agent.volume.codec.count_in(book.use_of(agent.volume.codec.fingerprint, 20))
    agent.pass_time(30)
    agent.put(20)
    assert agent.left() == 0
    assert agent.has(*range(21))


def test_the_limits_of_the_suites() -> None:
    assert writes_max("aes-256-gcm", 1 << 20) == GCM_WRITES_MAX
    # 256 TiB by one agent, under one key.
    assert writes_max("aes-256-xts+crc64", 1 << 20) * (1 << 20) == 1 << 48
    assert writes_max("aes-256-xts+crc64", 1 << 16) * (1 << 16) == 1 << 48


@pytest.mark.expects_log("cannot be read")
def test_a_damaged_count_is_begun_anew_and_said(tmp_path: Path) -> None:
    for damaged in ("[1, 2", "[1, 2]", '{"01": Infinity}', '{"01": -1}', '{"01": 1.5}', '{"01": true}'):
        (tmp_path / FILE).write_text(damaged)
        use = KeyUseBook(tmp_path, chunk=10).use_of(b"\1" * 8, 1 << 20)
        use.count()
        assert use.writes == 1
        assert json.loads((tmp_path / FILE).read_text()) == {"01" * 8: 11}


def test_starts_do_not_use_up_a_key(tmp_path: Path) -> None:
    most = writes_max("aes-256-xts+crc64", 1 << 24)
    for start in range(20):
        book = KeyUseBook(tmp_path)
        use = book.use_of(b"\1" * 8, most)
        assert use.writes == start
        use.count()
        assert book.use_of(b"\1" * 8, most) is use, "not counted ahead twice"
        book.close()
    for _ in range(20):
        KeyUseBook(tmp_path).use_of(b"\1" * 8, most).count()  # A crash: no end.
    assert most / 100 < KeyUseBook(tmp_path).use_of(b"\1" * 8, most).writes < most / 40
    # After an end somebody still seals: that is noted ahead as before.
    book = KeyUseBook(tmp_path)
    use = book.use_of(b"\2" * 8, most)
    use.count()
    book.close()
    use.count()
    assert KeyUseBook(tmp_path).noted("02" * 8) > 2
    book.forget(b"\2" * 8)
    assert json.loads((tmp_path / FILE).read_text()).keys() == {"01" * 8}


@pytest.mark.expects_log("cannot be written")
def test_a_full_disk_stops_no_put_and_is_tried_again(tmp_path: Path) -> None:
    state = tmp_path / "state"
    use = KeyUseBook(state, chunk=5).use_of(b"\1" * 8, 1 << 30)
    for _ in range(10):
        use.count()
    state.mkdir()
    for _ in range(RETRY_WRITES):
        use.count()
    assert 10 + RETRY_WRITES - 10 < KeyUseBook(state).noted("01" * 8) <= 15 + RETRY_WRITES
