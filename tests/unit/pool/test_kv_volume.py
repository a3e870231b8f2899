"""A volume on KV namespaces, over a channel in memory: round trips, immutability, damage, room."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from agent.pool.access import serve
from agent.pool.counters import MissCause
from agent.pool.errors import BadPut, PutRefused, TooLong
from agent.pool.format.sealed_slot import HEADER_BYTES
from agent.pool.kv.commands import RESERVED_KEY
from agent.pool.kv.get import KvReader
from agent.pool.kv.put import RANGES_MAX, KvWriter, delete_key
from agent.pool.kv.volume import KvVolume, room_of
from agent.pool.volume.directory_cache import COOLDOWN_SECONDS
from agent.pool.volume.puts_in_pieces import BEGUN_BYTES
from agent.sim.seeded_scheduler import StepScheduler
from tests.support.pool.memory_pool import SUITES, key_of
from tests.support.sim.kv_flash import SimKvChannel, SimKvNamespace, kv_volume

MIB = 1 << 20
UNIT = 1 << 16


class World:
    """Namespaces, one agent and one worker; every call drives its steps to the end."""

    def __init__(self, capacities: Sequence[int] = (16 * MIB, 16 * MIB), **options: object) -> None:
        self.scheduler = StepScheduler(35)
        self.namespaces = [SimKvNamespace(size) for size in capacities]
        self.volume: KvVolume = kv_volume(capacities, **options)  # type: ignore[arg-type]
        self.channel = SimKvChannel(self.scheduler, self.namespaces, "one")

    def deadline(self, seconds: float = 1.0) -> float:
        return self.scheduler.now + seconds

    def put(self, key: bytes, value: bytes, **options: object) -> KvWriter:
        writing = KvWriter(self.volume, key, length=len(value), **options)  # type: ignore[arg-type]
        assert self.scheduler.finish(writing.write(self.channel, 0, memoryview(value), self.deadline()))
        return writing

    def get(self, key: bytes, size: int | None = None, offset: int = 0) -> bytes | MissCause:
        return self.read(KvReader(self.volume, key), size, offset)

    def read(self, reading: KvReader, size: int | None = None, offset: int = 0) -> bytes | MissCause:
        into = memoryview(bytearray(self.volume.settings.value_bytes if size is None else size))
        count = self.scheduler.finish(reading.read(self.channel, offset, into, self.deadline()))
        return bytes(into[:count]) if reading.cause is None else reading.cause

    def delete(self, key: bytes) -> bool:
        found: bool = self.scheduler.finish(delete_key(self.volume, self.channel, key, self.deadline()))
        return found

    def where(self, key: bytes) -> tuple[SimKvNamespace, bytes]:
        pseudonym = self.volume.placement.pseudonym(key)
        return self.namespaces[self.volume.namespace_of(pseudonym)], pseudonym

    @property
    def commands(self) -> int:
        return sum(each.commands for each in self.namespaces)

    @property
    def tally(self):  # type: ignore[no-untyped-def]
        return self.channel.tally("v")


def value_of(number: int, size: int) -> bytes:
    return random.Random(f"value {number}").randbytes(size)


@pytest.mark.parametrize("suite", SUITES)
@pytest.mark.parametrize("size", [1, 4096, UNIT, UNIT + 1, 2 * UNIT - 5, 2 * UNIT])
def test_a_put_and_a_get_are_one_command_each(suite: str, size: int) -> None:
    world = World(suite=suite)
    value = value_of(1, size)
    assert world.put(key_of(1), value).stored
    assert world.commands == 1
    assert world.get(key_of(1)) == value
    assert world.commands == 2
    assert world.get(key_of(2)) is MissCause.NEVER_STORED
    assert world.commands == 3, "a miss is one Retrieve"
    namespace, pseudonym = world.where(key_of(1))
    assert value[:64] not in namespace.values[pseudonym] or suite.startswith("plain") or size < 64
    assert (world.tally.gets_hit, world.tally.gets_missed, world.tally.bytes_read) == (1, 1, size)


def test_ranges_of_one_reading() -> None:
    world = World()
    value = value_of(1, 2 * UNIT - 100)
    world.put(key_of(1), value)
    reading = KvReader(world.volume, key_of(1))
    got = b""
    while True:
        part = world.read(reading, 10_007, len(got))
        assert isinstance(part, bytes)
        if not part:
            break
        got += part
    assert got == value
    assert reading.length == len(value)
    assert world.tally.gets_hit == 1
    # The small pieces inside a unit came from the one that was kept.
    assert world.commands - 1 <= 6
    assert world.read(reading, 100, UNIT + 5) == value[UNIT + 5 : UNIT + 105]
    reading.close()
    assert world.scheduler.finish(serve(world.volume).find_length(world.channel, key_of(1))) == len(value)
    assert world.scheduler.finish(serve(world.volume).find_length(world.channel, key_of(9))) is None


def test_a_value_that_is_replaced_while_it_is_read_is_lost_in_the_middle() -> None:
    world = World()
    world.put(key_of(1), value_of(1, 2 * UNIT))
    reading = KvReader(world.volume, key_of(1))
    assert world.read(reading, UNIT) == value_of(1, 2 * UNIT)[:UNIT]
    world.delete(key_of(1))
    world.put(key_of(1), value_of(2, 2 * UNIT))
    assert world.read(reading, UNIT, UNIT) is MissCause.EVICTED
    assert (world.tally.gets_hit, world.tally.gets_missed) == (0, 1)


def test_a_value_in_pieces_and_what_is_wrong_with_some() -> None:
    world = World()
    value = value_of(1, 100_000)
    writing = KvWriter(world.volume, key_of(1))
    for start, end in ((50_000, 70_000), (0, 50_000), (70_000, 100_000)):
        part = memoryview(value)[start:end]
        assert not world.scheduler.finish(writing.write(world.channel, start, part, world.deadline()))
    assert world.commands == 0
    world.scheduler.finish(writing.finish(world.channel, world.deadline()))
    assert writing.stored
    assert world.get(key_of(1)) == value
    many = KvWriter(world.volume, key_of(2), length=100_000)
    for number in range(RANGES_MAX):
        world.scheduler.finish(many.write(world.channel, 2 * number, memoryview(b"1"), world.deadline()))
    with pytest.raises(BadPut, match="parts with holes"):
        world.scheduler.finish(many.write(world.channel, 99_999, memoryview(b"1"), world.deadline()))
    assert world.volume.puts_in_pieces.bytes_held == 0
    hole = KvWriter(world.volume, key_of(2), length=100)
    world.scheduler.finish(hole.write(world.channel, 50, memoryview(bytes(50)), world.deadline()))
    with pytest.raises(BadPut, match="hole"):
        world.scheduler.finish(hole.finish(world.channel, world.deadline()))
    with pytest.raises(BadPut, match="hole"):
        world.scheduler.finish(hole.finish(world.channel, world.deadline()))
    twice = KvWriter(world.volume, key_of(2))
    world.scheduler.finish(twice.write(world.channel, 0, memoryview(bytes(50)), world.deadline()))
    with pytest.raises(BadPut, match="once"):
        world.scheduler.finish(twice.write(world.channel, 49, memoryview(bytes(50)), world.deadline()))
    with pytest.raises(TooLong):
        serve(world.volume).writer(key_of(2), length=2 * UNIT + 1)
    assert world.volume.puts_in_pieces.bytes_held == 0
    many = [KvWriter(world.volume, key_of(number)) for number in range(BEGUN_BYTES // (2 * UNIT) + 1)]
    for each in many[:-1]:
        world.scheduler.finish(each.write(world.channel, 0, memoryview(b"piece"), world.deadline()))
    with pytest.raises(PutRefused, match="in pieces"):
        world.scheduler.finish(many[-1].write(world.channel, 0, memoryview(b"piece"), world.deadline()))
    for each in many:
        each.drop()
    assert world.volume.puts_in_pieces.bytes_held == 0
    empty = KvWriter(world.volume, key_of(2))
    world.scheduler.finish(empty.finish(world.channel, world.deadline()))
    assert not empty.stored
    assert world.get(key_of(2)) is MissCause.NEVER_STORED


def test_the_first_write_wins_until_it_proves_nothing() -> None:
    world = World()
    world.put(key_of(1), b"first")
    again = world.put(key_of(1), b"second")
    assert again.already_there
    assert not again.stored
    assert world.get(key_of(1)) == b"first"
    namespace, pseudonym = world.where(key_of(1))
    # A header that is damaged is found by the put itself, a unit that is damaged by a get before it.
    for at in (100, HEADER_BYTES + 1):
        damaged = bytearray(namespace.values[pseudonym])
        damaged[at] ^= 1
        namespace.values[pseudonym] = bytes(damaged)
        if at > HEADER_BYTES:
            assert world.get(key_of(1)) is MissCause.CORRUPT
        assert world.put(key_of(1), b"anew %d" % at).stored
        assert world.get(key_of(1)) == b"anew %d" % at


def test_expiry() -> None:
    world = World()
    world.put(key_of(1), b"short-lived", ttl_seconds=10)
    assert world.get(key_of(1)) == b"short-lived"
    world.scheduler.now += 11
    assert world.get(key_of(1)) is MissCause.EXPIRED
    assert world.put(key_of(1), b"again").stored
    assert world.get(key_of(1)) == b"again"


@pytest.mark.parametrize("lie", ["another's", "empty", "header only", "truncated", "foreign"])
def test_what_is_not_exactly_what_was_asked_for_is_a_miss(lie: str) -> None:
    world = World((16 * MIB,))
    world.put(key_of(1), value_of(1, 2 * UNIT))
    world.put(key_of(2), value_of(2, 2 * UNIT))
    assert world.get(key_of(1)) == value_of(1, 2 * UNIT), "now the worker's buffer holds the right bytes"
    namespace, pseudonym = world.where(key_of(1))
    slot = namespace.values[pseudonym]
    namespace.values[pseudonym] = {
        "another's": namespace.values[world.where(key_of(2))[1]],
        "empty": b"",
        "header only": slot[:HEADER_BYTES],
        "truncated": slot[: HEADER_BYTES + UNIT],
        "foreign": b"x" * 10_000,
    }[lie]
    world.channel._receive.take = lambda size: memoryview(world.channel._receive._bytes)[:size]  # type: ignore[method-assign]
    assert world.get(key_of(1)) is MissCause.CORRUPT
    assert world.get(key_of(2)) == value_of(2, 2 * UNIT)


def test_another_volumes_key_and_faults_have_their_causes() -> None:
    world = World((16 * MIB,))
    world.put(key_of(1), b"value")
    (namespace,) = world.namespaces
    namespace.broken = True
    assert world.get(key_of(1)) is MissCause.CORRUPT
    namespace.broken, namespace.down = False, True
    assert world.get(key_of(1)) is MissCause.ENCLOSURE_DOWN
    with pytest.raises(PutRefused):
        world.put(key_of(2), b"value")
    with pytest.raises(PutRefused):
        world.delete(key_of(1))
    namespace.down, namespace.hung = False, True
    before = world.scheduler.now
    assert world.get(key_of(1)) is MissCause.LATE
    assert world.scheduler.now - before <= 1.0 + 1e-9
    namespace.wake(world.scheduler)
    assert world.get(key_of(1)) == b"value"
    assert world.tally.gets_missed == 3


def test_a_key_whose_put_was_not_answered_is_not_deleted_for_a_while() -> None:
    world = World()
    namespace, _ = world.where(key_of(1))
    namespace.hung = True
    with pytest.raises(PutRefused):
        world.put(key_of(1), b"late")
    namespace.hung = False
    with pytest.raises(PutRefused, match="may still land"):
        world.delete(key_of(1))
    world.scheduler.now += COOLDOWN_SECONDS
    assert not world.delete(key_of(1))


def test_exists_asks_and_deletes_delete() -> None:
    world = World()
    for number in range(20):
        world.put(key_of(number), b"v")
    keys = [key_of(number) for number in range(22)]
    found = world.scheduler.finish(world.volume.lookup(world.channel, keys, world.deadline()))
    assert found == [None] * 20 + [MissCause.NEVER_STORED] * 2
    assert (world.tally.lookups, world.tally.lookups_absent) == (22, 2)
    assert world.delete(key_of(3))
    assert not world.delete(key_of(3))
    assert world.get(key_of(3)) is MissCause.NEVER_STORED
    pinned = world.scheduler.finish(serve(world.volume).pin(world.channel, key_of(1), 10, world.deadline()))
    assert pinned is False


SLOT = room_of(HEADER_BYTES + UNIT)


def test_nothing_alive_goes_from_a_volume_that_is_under_nine_tenths_full() -> None:
    world = World((10 * SLOT, 10 * SLOT), value_bytes=UNIT)
    numbers = iter(range(10_000))
    first: list[int] = []
    while len(first) < 10:  # fill namespace 0 and leave the other empty
        number = next(numbers)
        if world.where(key_of(number))[0] is world.namespaces[0]:
            world.put(key_of(number), value_of(number, UNIT))
            first.append(number)
    while world.where(key_of(number := next(numbers)))[0] is not world.namespaces[0]:
        pass
    with pytest.raises(PutRefused, match="no room"):
        world.put(key_of(number), value_of(number, UNIT))
    assert all(world.get(key_of(each)) == value_of(each, UNIT) for each in first)
    assert world.tally.evictions == 0
    # What proves nothing, or has expired, goes at any fullness.
    for each in first[:5]:
        namespace, pseudonym = world.where(key_of(each))
        namespace.values[pseudonym] = bytes(SLOT)
    assert world.put(key_of(number), value_of(number, UNIT)).stored
    assert (world.tally.evictions, world.tally.evictions_expired) == (0, 1)
    assert all(world.get(key_of(each)) == value_of(each, UNIT) for each in first[5:])


def test_a_full_volume_lets_the_oldest_of_a_few_go() -> None:
    world = World((24 * SLOT,), value_bytes=UNIT)
    world.namespaces[0].values[RESERVED_KEY] = b"superblock"
    for number in range(200):
        assert world.put(key_of(number), value_of(number, UNIT)).stored
        world.scheduler.now += 1
        if number >= 8:
            assert world.get(key_of(7)) == value_of(7, UNIT), "what is used stays"
    assert world.namespaces[0].used <= 24 * SLOT
    assert world.namespaces[0].values[RESERVED_KEY] == b"superblock"
    there = [number for number in range(200) if isinstance(world.get(key_of(number)), bytes)]
    assert len(there) >= 22
    assert sum(number >= 150 for number in there) >= 18, there
    assert world.tally.evictions == 200 - len(there)
    gone = next(number for number in range(200) if number not in there)
    assert world.get(key_of(gone)) is MissCause.EVICTED


def test_usage_counts_what_is_stored() -> None:
    world = World((24 * SLOT, 8 * SLOT), value_bytes=UNIT)
    assert world.volume.usage() == (32, 0)
    for number in range(5):
        world.put(key_of(number), value_of(number, UNIT))
    assert world.volume.usage() == (32, 5)
