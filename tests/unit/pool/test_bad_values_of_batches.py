"""A batch with one bad value serves the others; wrong use raises before anything has moved."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.fs.control.registered_memory import RegisteredMemory
from host_shim.many_values import aligned, groups_of, move_in_groups
from host_shim.named_values import NamedValues
from host_shim.pool import Pool, ValueTooLong
from host_shim.transfer_wire import (
    MANY_MAX,
    SHORT_BYTES,
    TOGETHER_BYTES,
    Ioctl,
    decode_done_many_untrusted,
    encode_many,
    ioctl_command,
)
from tests.support.engines.counted_door import BLOB, KIB, Counted, agent_with
from tests.support.pool.lending import nothing_is_held
from tests.support.pool.memory_pool import SUITES, PoolAgent, key_of

KEYS = [key_of(number) for number in range(6)]
VALUES: list[Any] = [BLOB[number : number + 1000 * (number + 1)] for number in range(6)]


def is_served(agent: PoolAgent, pool: Pool, bad: int) -> None:
    for number, key in enumerate(KEYS):
        found = pool.volume("v").get(key)
        assert found == (None if number == bad else VALUES[number])
    nothing_is_held(agent)


@pytest.mark.parametrize("suite", SUITES)
@pytest.mark.parametrize("size", [0, 8193, SHORT_BYTES + 1, (1 << 24) + 1])
@pytest.mark.parametrize("bad", [0, 3, 5])
@pytest.mark.parametrize("registered", [True, False])
def test_a_value_of_no_length_for_the_volume(
    suite: str,
    size: int,
    bad: int,
    registered: bool,
    memory: RegisteredMemory,
    expects_log: Callable[..., None],
) -> None:
    agent = agent_with(value_bytes=8192, suite=suite)
    with Pool("/nowhere", files=Counted(agent, memory)) as pool:
        volume = pool.volume("v")
        whole = pool.memory(1 << 16)
        views = list(VALUES)
        for number, value in enumerate(VALUES if registered else ()):
            views[number] = whole[number * 8192 :][: len(value)]
            views[number][:] = value
        views[bad] = bytes(size)
        expects_log(
            "a value of a batch is not stored: a value is longer than the slots"
            if 0 < size < 1 << 24
            else f"not stored: .* (this one {size or 6000}|this one 5000)"
        )
        assert volume.put_many(KEYS, views) == [number != bad for number in range(6)]
        is_served(agent, pool, bad)
        assert volume.put_many(KEYS[:1], [bytes(size)]) == [False] or bad
        with pytest.raises(ValueTooLong):
            volume.put(KEYS[bad], bytes(size))


@pytest.mark.parametrize("wrong", ["no bytes", 7, None])
def test_wrong_use_raises_before_anything_moves(wrong: Any, memory: RegisteredMemory) -> None:
    agent = agent_with()
    door = Counted(agent, memory)
    with Pool("/nowhere", files=door) as pool:
        volume, values = pool.volume("v"), NamedValues(pool, "v")
        rooms: list[Any] = [bytearray(9000) for _ in KEYS]
        calls: list[Callable[[], object]] = [
            lambda: volume.put_many(KEYS, [*VALUES[:5], wrong]),
            lambda: volume.put_many([*KEYS[:5], wrong], VALUES),
            lambda: volume.put_many([*KEYS[:5], b"short"], VALUES),
            lambda: volume.put_many(KEYS, VALUES[:5]),
            lambda: volume.put_many(KEYS, VALUES, ttl=0),
            lambda: volume.get_many(KEYS, [*rooms[:5], wrong]),
            lambda: volume.get_many(KEYS, [*rooms[:5], b"read-only"]),
            lambda: volume.get_many(KEYS, [*rooms[:5], bytearray()]),
            lambda: volume.get_many(KEYS[:5], rooms),
            lambda: volume.exists([*KEYS, wrong]),
            lambda: volume.prestage([*KEYS, wrong]),
            lambda: values.store(KEYS, [[value] for value in VALUES[:5]]),
            lambda: values.store(KEYS, [*[[value] for value in VALUES[:5]], [wrong]]),
            lambda: values.load(KEYS, [[room] for room in rooms[:5]]),
            lambda: values.load(KEYS, [*[[room] for room in rooms[:5]], [b"read-only"]]),
        ]
        for call in calls:
            with pytest.raises((TypeError, ValueError)):
                call()
        assert not door.asked
        assert not any(map(any, rooms))
        assert (agent.tally.puts, agent.tally.gets_missed) == (0, 0)
        nothing_is_held(agent)


@pytest.mark.parametrize("at", [0, 2, 4])
def test_the_short_ones_go_together_beside_a_long_one(at: int, memory: RegisteredMemory) -> None:
    agent = agent_with()
    door = Counted(agent, memory)
    values = [BLOB[number : number + 4 * KIB] for number in range(4)]
    values.insert(at, BLOB[: SHORT_BYTES + 1])
    with Pool("/nowhere", files=door) as pool:
        volume = pool.volume("v")
        assert volume.put_many(KEYS[:5], values) == [True] * 5
        buffers = [bytearray(len(value)) for value in values]
        assert volume.get_many(KEYS[:5], buffers) == [len(value) for value in values]
        assert buffers == values
        assert (door.asked["STORE_MANY"], door.asked["LOAD_MANY"]) == (1, 1)
        nothing_is_held(agent)


def test_of_a_key_that_stands_twice_the_first_value(memory: RegisteredMemory) -> None:
    """Also where the first is a long one, which moves by itself, or in another request."""
    agent = agent_with(sets=(16, 16), value_bytes=1 << 18)
    with Pool("/nowhere", files=Counted(agent, memory)) as pool:
        volume = pool.volume("v")
        first = BLOB[: SHORT_BYTES + 1]
        assert volume.put_many([KEYS[0], KEYS[1], KEYS[0]], [first, b"x", b"second"]) == [True] * 3
        assert volume.get(KEYS[0]) == first
        many = [key_of(100 + number % 50) for number in range(200)]
        assert volume.put_many(many, [str(number).encode() for number in range(200)]) == [True] * 200
        buffers = [bytearray(3) for _ in many]
        lengths = volume.get_many(many, buffers)
        assert [int(room[:size]) for room, size in zip(buffers, lengths, strict=True)] == [
            number % 50 for number in range(200)
        ]
        assert volume.put_many([], []) == volume.get_many([], []) == []
        nothing_is_held(agent)


def test_where_the_first_of_a_key_is_bad_the_second_is_stored(
    memory: RegisteredMemory, expects_log: Callable[..., None]
) -> None:
    expects_log("longer than the slots")
    agent = agent_with(value_bytes=8192)
    with Pool("/nowhere", files=Counted(agent, memory)) as pool:
        volume = pool.volume("v")
        keys = [KEYS[0], KEYS[1], KEYS[0]]
        assert volume.put_many(keys, [bytes(8193), b"x", b"second"]) == [False, True, True]
        assert volume.get(KEYS[0]) == b"second"


def test_a_long_value_that_breaks_off_behind_its_full_buffer(memory: RegisteredMemory) -> None:
    agent = agent_with(value_bytes=1 << 20, unit_bytes=1 << 18)
    agent.put(KEYS[0], BLOB[: 1 << 19])
    namespace, slot_at, _ = agent.where(KEYS[0])
    agent.channel.namespaces[namespace].flip(slot_at + 4096 + (1 << 18) + 100)
    with Pool("/nowhere", files=Counted(agent, memory)) as pool:
        volume = pool.volume("v")
        assert volume.get_into(KEYS[0], bytearray(1 << 18)) is None
        assert volume.get_many([KEYS[0]], [bytearray(1 << 18)]) == [None]
        assert volume.get_many(KEYS[:1], [pool.memory(1 << 18)]) == [None]


@given(st.lists(st.sampled_from([1, 100, 4096, 4097, 65_535, SHORT_BYTES, SHORT_BYTES + 1]), max_size=150))
def test_every_value_moves_once_and_in_few_requests(sizes: list[int]) -> None:
    blob = memoryview(bytes(SHORT_BYTES + 1))
    views = [blob[:size] for size in sizes]
    keys = [key_of(number) for number in range(len(views))]
    moved: list[int] = []

    def move(some: Any, those: Any) -> Any:
        assert len(some) == len(those) <= MANY_MAX
        assert sum(aligned(len(view)) for view in those) <= TOGETHER_BYTES
        return [(None, keys.index(key)) for key in some]

    def take(numbers: Any, became: Any) -> None:
        assert list(numbers) == [number for _, number in became]
        moved.extend(numbers)

    def share(work: Any, count: int) -> None:
        for number in range(count):
            work(number)

    left = list(move_in_groups(keys, views, move, take, share))
    assert sorted(moved + left) == list(range(len(views)))
    short = [view for view in views if len(view) <= SHORT_BYTES]
    assert len(moved) == (len(short) if groups_of(short) else 0)


def test_each_value_of_a_store_has_an_outcome_of_its_own(memory: RegisteredMemory) -> None:
    agent = agent_with(value_bytes=8192)
    door = Counted(agent, memory)
    with Pool("/nowhere", files=door) as pool:
        whole = pool.memory(1 << 16)
        pool.volume("v").get_many(KEYS[:2], [whole[:10], whole[10:20]])
        session = pool._lender.take()
        assert session is not None
        for sizes in ([100, 8193, 8192], [8193, 8193], [9000, 1]):
            parts = [(1, 0, size) for size in sizes]
            data = encode_many("v", KEYS[: len(parts)], parts)
            door.ioctl(session._descriptor, ioctl_command(Ioctl.STORE_MANY, len(data)), data)
            done = decode_done_many_untrusted(data, len(parts))
            assert done == [(0, 0) if size <= 8192 else (17, 8192) for size in sizes]
        pool._lender.free.append(session)
        nothing_is_held(agent)
