"""Many short values by one request: the same values, misses, causes and counters as one by one."""

from __future__ import annotations

import errno
import random
import threading
from collections.abc import Iterator

import pytest

from agent.fs.control.registered_memory import RegisteredMemory
from agent.pool.read.batch import PART_BYTES, PART_VALUES, read_together
from agent.pool.volume.bandwidth import Bandwidth
from agent.pool.volume.volume import TenantShare
from host_shim.control_wire import Outcome
from host_shim.many_values import SHORT_BYTES, TOGETHER_BYTES, groups_of
from host_shim.pool import BufferTooSmall, Pool, UnknownVolume, ValueTooLong, Volume
from host_shim.transfer_wire import (
    MANY_MAX,
    Ioctl,
    encode_many,
    ioctl_command,
)
from tests.support.engines.session_door import SessionDoor
from tests.support.pool.memory_pool import SUITES, MemoryPool, PoolAgent, key_of

KIB = 1 << 10
BLOB = random.Random(35).randbytes(1 << 20)
LENGTHS = [1, 100, 4095, 4096, 4097, 16 * KIB, 65_535, 64 * KIB, 64 * KIB + 1, 128 * KIB]


class Counted(SessionDoor):
    """Counts the requests by their kind; `old`: an agent that knows no LOAD_MANY."""

    old = False

    def __init__(self, agent: PoolAgent, memory: RegisteredMemory | None = None) -> None:
        super().__init__(agent, memory=memory)
        self.asked: dict[str, int] = {}

    def ioctl(self, descriptor: int, command: int, data: bytearray) -> None:
        name = Ioctl(command & 0xFF).name
        if self.old and command & 0xFF >= Ioctl.LOAD_MANY:
            raise OSError(errno.ENOTTY, "what is that?")
        self.asked[name] = self.asked.get(name, 0) + 1
        super().ioctl(descriptor, command, data)

    def preadv(self, descriptor: int, into: memoryview, offset: int) -> int:
        self.asked["read"] = self.asked.get("read", 0) + 1
        return super().preadv(descriptor, into, offset)


@pytest.fixture
def memory() -> Iterator[RegisteredMemory]:
    memory = RegisteredMemory(1 << 30)
    yield memory
    memory.close()


def agent_with(sets: tuple[int, ...] = (4, 4), **settings: object) -> PoolAgent:
    options = {"value_bytes": 1 << 20, "unit_bytes": 1 << 20} | settings
    return MemoryPool(sets, **options).agent()


def value_of(number: int) -> bytes:
    length = LENGTHS[number % len(LENGTHS)]
    return BLOB[number : number + length]


def filled(pool: Pool, count: int) -> Volume:
    volume = pool.volume("v")
    stored = volume.put_many([key_of(number) for number in range(count)], [value_of(n) for n in range(count)])
    assert all(stored)
    return volume


@pytest.mark.parametrize("suite", SUITES)
@pytest.mark.parametrize("registered", [True, False])
@pytest.mark.parametrize("sets", [(1,), (4, 4), (1, 9, 2)])
def test_values_of_all_lengths(
    suite: str, registered: bool, sets: tuple[int, ...], memory: RegisteredMemory
) -> None:
    agent = agent_with(sets, suite=suite)
    door = Counted(agent, memory)
    count = 40
    with Pool("/nowhere", files=door, parallel=1) as pool:
        volume = filled(pool, count)
        whole = pool.memory(count * SHORT_BYTES) if registered else memoryview(bytearray(count * SHORT_BYTES))
        views = [whole[n * SHORT_BYTES :][: -(-len(value_of(n)) // 4096) * 4096] for n in range(count)]
        hits_before, read_before = agent.tally.gets_hit, agent.tally.bytes_read
        lengths = volume.get_many([key_of(n) for n in range(count)], views)
        assert lengths == [len(value_of(n)) for n in range(count)]
        for n in range(count):
            assert views[n][: lengths[n]] == value_of(n)
        assert door.asked.get("LOAD", 0) == 0
        assert door.asked["LOAD_MANY"] == len(groups_of(views))
        assert agent.tally.gets_hit - hits_before == count
        assert agent.tally.bytes_read - read_before == sum(map(len, map(value_of, range(count))))


def test_targets_as_long_as_their_values(memory: RegisteredMemory) -> None:
    agent = agent_with()
    with Pool("/nowhere", files=Counted(agent, memory)) as pool:
        volume = filled(pool, 20)
        whole = pool.memory(4 << 20)
        guard = b"\xee" * (4 << 20)
        whole[:] = guard
        views, at = [], 3
        for number in range(20):
            views.append(whole[at : at + len(value_of(number))])
            at += len(value_of(number)) + 5
        assert volume.get_many([key_of(n) for n in range(20)], views) == [len(view) for view in views]
        at = 3
        assert whole[:3] == guard[:3]
        for number in range(20):
            end = at + len(value_of(number))
            assert whole[at:end] == value_of(number)
            assert whole[end : end + 5] == guard[:5], "bytes behind a target"
            at = end + 5


def test_holes_and_their_causes(memory: RegisteredMemory) -> None:
    agent = agent_with()
    door = Counted(agent, memory)
    with Pool("/nowhere", files=door) as pool:
        volume = filled(pool, 10)
        namespace, slot_at, _ = agent.where(key_of(4))
        block = memoryview(bytearray(4096))
        agent.channel.read(namespace, slot_at + 4096, block)
        block[0] ^= 1
        agent.channel.write(namespace, slot_at + 4096, [block])
        keys = [key_of(n) for n in (0, 1, 99, 3, 4, 5)]
        buffers = [bytearray(SHORT_BYTES) for _ in keys]
        found = volume.fetch(keys, buffers)
        assert [one.outcome for one in found] == [
            Outcome.HIT, Outcome.HIT, Outcome.NEVER_STORED, Outcome.HIT, Outcome.CORRUPT, Outcome.HIT,
        ]  # fmt: skip
        assert [one.length for one in found] == [1, 100, None, 4096, None, 16 * KIB]
        for key_number, buffer, one in zip((0, 1, 99, 3, 4, 5), buffers, found, strict=True):
            assert bytes(buffer[: one.length or 0]) == (value_of(key_number) if one.length else b"")
        assert not any(buffers[4]), "unproven bytes"


def test_a_value_longer_than_its_buffer(memory: RegisteredMemory) -> None:
    agent = agent_with()
    with Pool("/nowhere", files=Counted(agent, memory)) as pool:
        volume = filled(pool, 10)
        short = bytearray(4095)
        with pytest.raises(BufferTooSmall, match="longer than the buffer of 4095"):
            volume.get_many([key_of(0), key_of(3)], [bytearray(10), short])


def test_an_agent_that_does_not_know_it(memory: RegisteredMemory) -> None:
    agent = agent_with()
    door = Counted(agent, memory)
    door.old = True
    with Pool("/nowhere", files=door) as pool:
        volume = filled(pool, 10)
        buffers = [bytearray(SHORT_BYTES) for _ in range(10)]
        for _ in range(2):
            lengths = volume.get_many([key_of(n) for n in range(10)], buffers)
            assert lengths == [len(value_of(n)) for n in range(10)]
        assert "LOAD_MANY" not in door.asked


def test_an_agent_that_maps_no_memory() -> None:
    agent = agent_with()
    with Pool("/nowhere", files=Counted(agent)) as pool:
        volume = filled(pool, 10)
        buffers = [bytearray(SHORT_BYTES) for _ in range(10)]
        assert volume.get_many([key_of(n) for n in range(10)], buffers) == [
            len(value_of(n)) for n in range(10)
        ]


def test_an_unknown_volume(memory: RegisteredMemory) -> None:
    with Pool("/nowhere", files=Counted(agent_with(), memory)) as pool, pytest.raises(UnknownVolume):
        pool.volume("w").get_many([key_of(0), key_of(1)], [bytearray(10), bytearray(10)])


def test_of_two_entries_for_a_key_the_newest(memory: RegisteredMemory) -> None:
    """And an entry whose slot was given away leads on to what flash has."""
    flash = MemoryPool((2, 2), value_bytes=64 * KIB)
    ours, theirs = flash.agent(), flash.agent()
    with Pool("/nowhere", files=Counted(ours, memory)) as pool:
        volume = pool.volume("v")
        theirs.put(key_of(1), b"first")
        assert volume.get_many([key_of(1), key_of(2)], [bytearray(9), bytearray(9)]) == [5, None]
        theirs.delete(key_of(1))
        theirs.put(key_of(1), b"second")
        buffers = [bytearray(9), bytearray(9)]
        assert volume.get_many([key_of(1), key_of(2)], buffers) == [6, None]
        assert buffers[0][:6] == b"second"


def test_more_than_the_parts_of_one_request_and_a_rate(memory: RegisteredMemory) -> None:
    agent = agent_with((16, 16), value_bytes=64 * KIB, unit_bytes=64 * KIB)
    with Pool("/nowhere", files=Counted(agent, memory)) as pool:
        volume = pool.volume("v")
        count = 3 * PART_BYTES // (64 * KIB)
        keys = [key_of(n) for n in range(count)]
        assert all(volume.put_many(keys, [BLOB[n : n + 64 * KIB] for n in range(count)]))
        bandwidth = Bandwidth(threading.BoundedSemaphore(4), 1 << 30)
        agent.volume.change(tenant=TenantShare(None, bandwidth))
        buffers = [bytearray(64 * KIB) for _ in keys]
        assert volume.get_many(keys, buffers) == [64 * KIB] * count
        assert all(buffers[n] == BLOB[n : n + 64 * KIB] for n in range(count))


def test_no_more_reads_are_under_way_than_a_queue_takes() -> None:
    """The reads of one part are sent while those of the part before are opened, and no more."""
    agent = agent_with()
    values = [bytes([n]) * 100 for n in range(200)]
    for number, value in enumerate(values):
        agent.put(key_of(number), value)
    sent: list[int] = []
    read = agent.channel.read

    def counted(namespace: int, offset: int, into: memoryview) -> object:
        sent.append(len(opened))
        return read(namespace, offset, into)

    opened: list[object] = []
    hit = agent.volume.codec.open

    def open_counted(*arguments: object) -> object:
        opened.append(arguments)
        return hit(*arguments)

    agent.channel.read = counted  # type: ignore[method-assign, assignment]
    agent.volume.codec.open = open_counted  # type: ignore[method-assign, assignment]
    targets = [memoryview(bytearray(4096)) for _ in values]
    keys = [key_of(number) for number in range(len(values))]
    lengths = agent.channel.run(read_together(agent.volume, agent.channel, keys, targets, 1.0))
    assert lengths == [100] * len(values)
    assert all(number - done < 2 * PART_VALUES for number, done in enumerate(sent))
    assert [bytes(target[:100]) for target in targets] == values


@pytest.mark.parametrize(
    ("sizes", "groups"),
    [
        ([], 0),
        ([100], 0),
        ([100, 0], 0),
        ([100, SHORT_BYTES + 1], 0),
        ([100, SHORT_BYTES], 1),
        ([SHORT_BYTES] * (TOGETHER_BYTES // SHORT_BYTES), 1),
        ([SHORT_BYTES] * (TOGETHER_BYTES // SHORT_BYTES + 1), 2),
        ([1] * MANY_MAX, 1),
        ([1] * (MANY_MAX + 1), 2),
    ],
)
def test_groups(sizes: list[int], groups: int) -> None:
    views = [memoryview(bytearray(size)) for size in sizes]
    found = groups_of(views)
    assert len(found) == groups
    if found:
        assert [n for group in found for n in range(len(sizes))[group]] == list(range(len(sizes)))


@pytest.mark.parametrize("which", [Ioctl.LOAD_MANY, Ioctl.STORE_MANY])
@pytest.mark.parametrize(
    "part", [(1, 0, TOGETHER_BYTES + 1), (9, 0, 1), (1, TOGETHER_BYTES, 1), (1, (1 << 64) - 1, 1)]
)
def test_a_part_in_no_region_is_refused(
    which: Ioctl, part: tuple[int, int, int], memory: RegisteredMemory
) -> None:
    agent = agent_with()
    door = Counted(agent, memory)
    with Pool("/nowhere", files=door) as pool:
        volume = filled(pool, 2)
        whole = pool.memory(4096)
        volume.get_many([key_of(0), key_of(1)], [whole[:10], whole[100:200]])
        session = pool._lender.take()
        assert session is not None
        data = encode_many("v", [key_of(0), key_of(1)], [(1, 0, 100), part])
        with pytest.raises(OSError, match="no region"):
            door.ioctl(session._descriptor, ioctl_command(which, len(data)), data)
        pool._lender.give_back(session)


@pytest.mark.parametrize("suite", SUITES)
@pytest.mark.parametrize("registered", [True, False])
def test_puts_of_all_lengths_into_few_sets(suite: str, registered: bool, memory: RegisteredMemory) -> None:
    """Many of them want one set's writer."""
    agent = agent_with((1, 1), suite=suite)
    door = Counted(agent, memory)
    count = 60
    with Pool("/nowhere", files=door, parallel=1) as pool:
        volume = pool.volume("v")
        sizes = [len(value_of(n)) for n in range(count)]
        whole = pool.memory(sum(sizes)) if registered else memoryview(bytearray(sum(sizes)))
        views, at = [], 0
        for number, size in enumerate(sizes):
            views.append(whole[at : at + size])
            views[-1][:] = value_of(number)
            at += size
        keys = [key_of(n) for n in range(count)]
        assert volume.put_many(keys, views) == [True] * count
        assert door.asked["STORE_MANY"] == len(groups_of(views))
        assert agent.tally.puts == count
        assert agent.tally.bytes_written == sum(sizes)
        for number in range(count):
            assert volume.get(key_of(number)) == value_of(number)
        assert volume.put_many(keys, views) == [True] * count, "they are there already"
        assert agent.tally.puts == count
        assert agent.tally.puts_already_there == count
        _nothing_is_held(agent)


def _nothing_is_held(agent: PoolAgent) -> None:
    assert not len(agent.volume.key_locks)
    for cached in agent.cache.snapshot():
        assert not cached.users
        assert not cached.reserved
        assert not cached.writer.locked()


def test_one_key_twice_in_a_batch_keeps_its_first_value(memory: RegisteredMemory) -> None:
    agent = agent_with((1,))
    with Pool("/nowhere", files=Counted(agent, memory)) as pool:
        volume = pool.volume("v")
        assert (
            volume.put_many([key_of(1), key_of(2), key_of(1)], [b"first", b"other", b"second"]) == [True] * 3
        )
        assert volume.get(key_of(1)) == b"first"
        assert (agent.tally.puts, agent.tally.puts_already_there) == (2, 1)
        _nothing_is_held(agent)


def test_values_too_long_for_the_volume(memory: RegisteredMemory) -> None:
    agent = agent_with(value_bytes=8192)
    with Pool("/nowhere", files=Counted(agent, memory)) as pool, pytest.raises(ValueTooLong):
        pool.volume("v").put_many([key_of(1), key_of(2)], [b"short", bytes(8193)])


def test_where_one_enclosure_is_away_the_others_take_what_they_can(memory: RegisteredMemory) -> None:
    agent = agent_with((1, 1))
    with Pool("/nowhere", files=Counted(agent, memory)) as pool:
        volume = pool.volume("v")
        keys = [key_of(n) for n in range(20)]
        agent.channel.namespaces[0].down = True
        stored = volume.put_many(keys, [bytes([n]) * 500 for n in range(20)])
        assert all(stored), "each has a set in the other one"
        agent.channel.namespaces[1].down = True
        assert volume.put_many([key_of(n) for n in range(50, 60)], [b"x"] * 10) == [False] * 10
        agent.channel.namespaces[0].down = agent.channel.namespaces[1].down = False
        assert volume.get_many(keys, [bytearray(500) for _ in keys]) == [500] * 20
        _nothing_is_held(agent)


def test_a_time_to_live(memory: RegisteredMemory) -> None:
    agent = agent_with()
    with Pool("/nowhere", files=Counted(agent, memory)) as pool:
        volume = pool.volume("v")
        assert volume.put_many([key_of(1), key_of(2)], [b"a", b"b"], ttl=5) == [True, True]
        assert volume.exists([key_of(1), key_of(2)]) == [True, True]
        agent.channel.clock += 6
        assert volume.exists([key_of(1), key_of(2)]) == [False, False]


def test_a_full_volume_evicts_for_a_batch(
    memory: RegisteredMemory,
) -> None:
    agent = agent_with((1, 1), value_bytes=4096)
    with Pool("/nowhere", files=Counted(agent, memory)) as pool:
        volume = pool.volume("v")
        for start in range(0, 640, 64):
            keys = [key_of(start + n) for n in range(64)]
            agent.channel.clock += 1
            stored = volume.put_many(keys, [bytes([start // 64]) * 4096] * 64)
            assert any(stored)
        buffers = [bytearray(4096) for _ in range(64)]
        found = volume.get_many(keys, buffers)
        assert any(found)
        assert all(
            buffer == bytes([9]) * 4096 for buffer, length in zip(buffers, found, strict=True) if length
        )
        _nothing_is_held(agent)
