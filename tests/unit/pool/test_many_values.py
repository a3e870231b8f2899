"""Many short values by one request: the same values, misses, causes and counters as one by one."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from agent.fs.control.registered_memory import RegisteredMemory
from agent.pool.read.batch import PART_BYTES, PART_VALUES, read_together
from agent.pool.steps import in_volleys
from agent.pool.volume.bandwidth import Bandwidth
from agent.pool.volume.directory_cache import DirectoryCache
from agent.pool.volume.volume import TenantShare
from host_shim.control_wire import Outcome
from host_shim.many_values import groups_of
from host_shim.pool import Pool, UnknownVolume, Volume
from host_shim.registered_memory import Aside
from host_shim.transfer_wire import (
    MANY_MAX,
    SHORT_BYTES,
    TOGETHER_BYTES,
    Ioctl,
    encode_many,
    ioctl_command,
)
from tests.support.engines.counted_door import BLOB, KIB, Counted, agent_with, filled, value_of
from tests.support.pool.memory_pool import SUITES, MemoryPool, key_of


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
        # A proof that is a CRC is not made of memory that its client can change: these are read one by one.
        assert door.asked["LOAD_MANY"] == (len(groups_of(views)) if suite == "aes-256-gcm" else 1)
        assert (door.asked.get("LOAD", 0) == 0) == (suite == "aes-256-gcm" or not registered)
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


def test_a_value_longer_than_its_buffer(memory: RegisteredMemory, expects_log: Callable[..., None]) -> None:
    agent = agent_with()
    with Pool("/nowhere", files=Counted(agent, memory)) as pool:
        volume = filled(pool, 10)
        expects_log("longer than the buffer of 4095")
        found = volume.fetch([key_of(0), key_of(3)], [bytearray(10), bytearray(4095)])
        assert [(one.length, one.outcome) for one in found] == [(1, Outcome.HIT), (None, Outcome.REFUSED)]


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


def interrupt(door: Counted, volume: Volume, keys: list[bytes]) -> None:
    """A call that an exception ends."""
    door.is_interrupted = True
    with pytest.raises(KeyboardInterrupt):
        volume.get_many(keys, [bytearray(SHORT_BYTES) for _ in keys])
    door.is_interrupted = False


def test_memory_of_a_call_that_was_interrupted_is_used_again(memory: RegisteredMemory) -> None:
    """A system call has ended by then. Each Ctrl-C in a notebook would else hold 2 MiB more, for good."""
    agent = agent_with()
    door = Counted(agent, memory)
    with Pool("/nowhere", files=door) as pool:
        volume = filled(pool, 10)
        keys = [key_of(n) for n in range(10)]
        for _ in range(70):
            interrupt(door, volume, keys)
            lengths = volume.get_many(keys, [bytearray(SHORT_BYTES) for _ in keys])
            assert lengths == [len(value_of(n)) for n in range(10)]
        assert len(pool._memory._by_address[1]) == 1
        assert pool._memory.find(pool.memory(4096)) is not None


def test_a_call_that_may_go_on_leaves_its_memory_alone(
    memory: RegisteredMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While an agent may still write there, no other call gets that memory."""
    agent = agent_with()
    door = Counted(agent, memory)
    monkeypatch.setattr(door, "ENDS_BEFORE_IT_RAISES", False)
    with Pool("/nowhere", files=door) as pool:
        volume = filled(pool, 10)
        keys = [key_of(n) for n in range(10)]
        given: list[Aside] = []
        borrow = pool._memory.borrow_aside

        def borrowed() -> Aside | None:
            aside = borrow()
            if aside is not None:
                given.append(aside)
            return aside

        monkeypatch.setattr(pool._memory, "borrow_aside", borrowed)

        interrupt(door, volume, keys)
        lengths = volume.get_many(keys, [bytearray(SHORT_BYTES) for _ in keys])
        assert lengths == [len(value_of(n)) for n in range(10)]
        assert len(given) == 2
        assert given[0].memory is not given[1].memory
        volume.get_many(keys, [bytearray(SHORT_BYTES) for _ in keys])
        assert given[2].memory is given[1].memory, "and one that was given back is used again"
        for _ in range(5):
            interrupt(door, volume, keys)
            volume.get_many(keys, [bytearray(SHORT_BYTES) for _ in keys])
        assert len(pool._memory._by_address[1]) <= 1, "what was let go is not kept"


def test_where_there_is_no_more_memory_for_them_they_are_read_one_by_one(memory: RegisteredMemory) -> None:
    agent = agent_with()
    door = Counted(agent, memory)
    with Pool("/nowhere", files=door) as pool:
        volume = filled(pool, 10)
        while pool._memory.borrow_aside() is not None:
            pass
        hits = agent.tally.gets_hit
        buffers = [bytearray(SHORT_BYTES) for _ in range(10)]
        assert volume.get_many([key_of(n) for n in range(10)], buffers) == [
            len(value_of(n)) for n in range(10)
        ]
        assert "LOAD_MANY" not in door.asked
        assert agent.tally.gets_hit - hits == 10


def test_a_tenant_over_its_rate_reads_nothing(memory: RegisteredMemory) -> None:
    agent = agent_with()
    with Pool("/nowhere", files=Counted(agent, memory)) as pool:
        volume = filled(pool, 10)
        bandwidth = Bandwidth(threading.BoundedSemaphore(4), 1000)
        agent.volume.change(tenant=TenantShare(None, bandwidth))
        keys, buffers = [key_of(n) for n in range(10)], [bytearray(SHORT_BYTES) for _ in range(10)]
        volume.get_many(keys, buffers)
        bandwidth.charge(agent.channel, 1 << 20)
        before = agent.channel.tally("").flash_bytes_read
        assert volume.get_many(keys, buffers) == [None] * 10
        assert agent.channel.tally("").flash_bytes_read == before


def test_of_a_hung_enclosure_one_late_answer_counts() -> None:
    """And the values of the other one are served."""
    agent = agent_with((4, 4))
    for number in range(24):
        agent.put(key_of(number), b"v" * 100)
    agent.channel.namespaces[0].hung = True
    targets = [memoryview(bytearray(4096)) for _ in range(24)]
    steps = read_together(agent.volume, agent.channel, [key_of(n) for n in range(24)], targets, 0.05)
    began = agent.channel.now()
    became = agent.channel.run(steps)
    assert agent.channel.now() - began <= 0.05 * (24 / PART_VALUES + 1)
    assert None in became
    assert 100 in became


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


@pytest.mark.interpreted
def test_no_more_reads_are_under_way_than_a_queue_takes() -> None:
    """The reads of one part are sent while those of the part before are opened, and no more."""
    agent = agent_with()
    values = [bytes([n]) * 100 for n in range(200)]
    for number, value in enumerate(values):
        agent.put(key_of(number), value)
    sent: list[int] = []
    read = agent.channel.read

    def counted(namespace: int, offset: int, into: memoryview, *, more: bool = False) -> object:
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


@pytest.mark.interpreted
def test_what_goes_to_one_namespace_leaves_by_one_send() -> None:
    """Also the directories that are not remembered."""
    agent = agent_with()
    count = 2 * PART_VALUES
    for number in range(count):
        agent.put(key_of(number), bytes([number]) * 100)
    agent.volume.cache = DirectoryCache(1 << 20)
    sends: list[tuple[int, int]] = []
    read, open_slot = agent.channel.read, agent.volume.codec.open
    opened = 0

    def recorded(namespace: int, offset: int, into: memoryview, *, more: bool = False) -> object:
        if not more:
            sends.append((opened, namespace))
        return read(namespace, offset, into)

    def counted(*arguments: object) -> object:
        nonlocal opened
        opened += 1
        return open_slot(*arguments)

    agent.channel.read = recorded  # type: ignore[method-assign, assignment]
    agent.volume.codec.open = counted  # type: ignore[method-assign, assignment]
    targets = [memoryview(bytearray(4096)) for _ in range(count)]
    keys = [key_of(number) for number in range(count)]
    assert agent.channel.run(read_together(agent.volume, agent.channel, keys, targets, 1.0)) == [100] * count
    assert len(sends) == 3 * len(agent.channel.namespaces), "directories, and two parts"
    assert [bytes(target[:100]) for target in targets] == [bytes([number]) * 100 for number in range(count)]


@pytest.mark.parametrize(
    ("places", "order"),
    [
        ([], []),
        ([(3, 8)], [(0, False)]),
        ([(1, 9), (0, 5), (1, 2), (0, 7)], [(1, True), (3, False), (2, True), (0, False)]),
    ],
)
def test_volleys(places: list[tuple[int, int]], order: list[tuple[int, bool]]) -> None:
    assert in_volleys(places) == order


@pytest.mark.parametrize(
    ("sizes", "groups"),
    [
        ([], 0),
        ([100], 0),
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


@pytest.mark.parametrize(
    "part", [(1, 0, TOGETHER_BYTES + 1), (9, 0, 1), (1, TOGETHER_BYTES, 1), (1, (1 << 64) - 1, 1)]
)
def test_a_part_in_no_region_is_refused(part: tuple[int, int, int], memory: RegisteredMemory) -> None:
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
            door.ioctl(session._descriptor, ioctl_command(Ioctl.LOAD_MANY, len(data)), data)
        pool._lender.free.append(session)
