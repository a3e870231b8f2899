"""Values through a volume: any range of any length, written in any pieces, comes back as it was."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent.pool.counters import MissCause
from agent.pool.errors import BadPut, PutRefused, TooLong
from agent.pool.format.directory import SLOTS_PER_SET, TIME_MAX
from agent.pool.read.get import SlotReader
from agent.pool.write.put import SlotWriter
from host_shim.pool import Pool
from tests.support.engines.session_door import SessionDoor
from tests.support.pool.memory_pool import SUITES, MemoryPool, PoolAgent, key_of

CAPACITY = 5 * 65536 + 4096
UNITS = [1 << 16, 1 << 17, 1 << 18, 1 << 20]
BLOB = random.Random(35).randbytes(CAPACITY)


def agent_with(suite: str = "plain+crc64", unit_bytes: int = 1 << 16) -> PoolAgent:
    return MemoryPool((1, 1), value_bytes=CAPACITY, unit_bytes=unit_bytes, suite=suite).agent()


@pytest.mark.parametrize("suite", SUITES)
@pytest.mark.parametrize("unit_bytes", UNITS)
def test_lengths_round_trip(suite: str, unit_bytes: int) -> None:
    agent = agent_with(suite, unit_bytes)
    edges = {1, 2, 15, 16, 17, 4095, 4096, 4097, CAPACITY - 1, CAPACITY}
    edges |= {at + step for at in range(unit_bytes, CAPACITY, unit_bytes) for step in (-1, 0, 1)}
    for length in sorted(length for length in edges if length <= CAPACITY):
        key = key_of(length)
        assert agent.put(key, BLOB[:length]).stored
        assert agent.get(key) == BLOB[:length], length


def test_one_mebibyte_units_of_a_large_value() -> None:
    pool = MemoryPool((1,), value_bytes=4 << 20, unit_bytes=1 << 20)
    agent = pool.agent()
    value = random.Random(1).randbytes((4 << 20) - 5)
    agent.put(key_of(1), value)
    assert agent.get(key_of(1)) == value
    assert agent.get(key_of(1), 10, (1 << 20) - 5) == value[(1 << 20) - 5 :][:10]


@pytest.mark.parametrize("suite", SUITES)
@pytest.mark.parametrize("unit_bytes", [1 << 16, 1 << 18])
def test_any_range_is_a_slice(suite: str, unit_bytes: int, seed: int) -> None:
    """First ranges (which find the slot) and later ones (which do not), at edges and anywhere."""
    agent = agent_with(suite, unit_bytes)
    rng = random.Random(f"{seed} {suite} {unit_bytes}")
    lengths = [1, 5000, unit_bytes, unit_bytes + 1, CAPACITY]
    for length in lengths:
        agent.put(key_of(length), BLOB[:length])
    for round_ in range(150):
        length = rng.choice(lengths)
        reading = SlotReader(agent.volume, key_of(length))
        for _ in range(rng.randint(1, 4)):
            edge = rng.choice([0, unit_bytes, length, rng.randrange(length)])
            offset = max(0, edge + rng.choice([0, 0, -1, 1, -rng.randrange(9000)]))
            size = rng.choice([1, 4096, rng.randrange(1, CAPACITY), unit_bytes, CAPACITY * 2])
            assert agent.read(reading, size, offset) == BLOB[:length][offset : offset + size], round_
        assert reading.length == length
    assert agent.tally.gets_missed == 0


@given(st.integers(1, CAPACITY), st.integers(0, CAPACITY + 5), st.integers(1, CAPACITY + 5))
@settings(max_examples=40)
def test_hypothesis_ranges(length: int, offset: int, size: int) -> None:
    agent = agent_with()
    agent.put(key_of(1), BLOB[:length])
    assert agent.get(key_of(1), size, offset) == BLOB[:length][offset : offset + size]


def write_in_pieces(
    agent: PoolAgent, key: bytes, value: bytes, cuts: list[int], *, announced: bool
) -> SlotWriter:
    writing = SlotWriter(agent.volume, key, length=len(value) if announced else None)
    done = False
    for start, end in zip([0, *cuts], [*cuts, len(value)], strict=True):
        assert not done
        steps = writing.write(agent.channel, start, memoryview(value)[start:end], agent.deadline())
        done = agent.channel.run(steps)
    assert done == announced
    agent.channel.run(writing.finish(agent.channel, agent.deadline()))
    return writing


@given(
    st.integers(1, CAPACITY),
    st.lists(st.integers(1, CAPACITY - 1), max_size=12),
    st.booleans(),
    st.sampled_from(SUITES),
)
@settings(max_examples=60)
def test_any_chunking_equals_a_whole_put(length: int, cuts: list[int], announced: bool, suite: str) -> None:
    agent = agent_with(suite)
    places = sorted({cut for cut in cuts if cut < length})
    assert write_in_pieces(agent, key_of(2), BLOB[:length], places, announced=announced).stored
    assert agent.get(key_of(2)) == BLOB[:length]
    assert agent.tally.puts == 1
    assert agent.tally.bytes_written == length


@pytest.mark.parametrize("chunk", [1000, 4096, 65535, 65536, 65537, 131072, 200_000])
def test_equal_chunks(chunk: int) -> None:
    agent = agent_with("aes-256-gcm")
    cuts = list(range(chunk, CAPACITY, chunk))
    write_in_pieces(agent, key_of(3), BLOB, cuts, announced=False)
    assert agent.get(key_of(3)) == BLOB


def test_whole_units_may_come_in_any_order(seed: int) -> None:
    agent = agent_with("aes-256-gcm")
    rng = random.Random(seed)
    for number in range(10):
        order = [*range(0, CAPACITY, 65536)]
        rng.shuffle(order)
        writing = SlotWriter(agent.volume, key_of(number), length=CAPACITY)
        done = [
            agent.channel.run(
                writing.write(agent.channel, at, memoryview(BLOB)[at : at + 65536], agent.deadline())
            )
            for at in order
        ]
        assert done == [False] * (len(order) - 1) + [True], order
        assert agent.get(key_of(number)) == BLOB


def test_bytes_out_of_shape_are_refused_and_store_nothing() -> None:
    agent = agent_with()
    view = memoryview(BLOB)

    def run(*pieces: tuple[int, int], length: int | None = None) -> None:
        writing = SlotWriter(agent.volume, key_of(9), length=length)

        def put() -> None:
            for start, end in pieces:
                agent.channel.run(writing.write(agent.channel, start, view[start:end], agent.deadline()))
            agent.channel.run(writing.finish(agent.channel, agent.deadline()))

        with pytest.raises(BadPut):
            put()
        writing.drop()
        assert not writing.stored
        with pytest.raises(BadPut):
            agent.channel.run(writing.finish(agent.channel, agent.deadline()))

    run((100, 200))
    run((0, 65536), (65536 * 2, 65536 * 3))
    run((0, 65536), (0, 65536))
    run((0, 65536), (0, 131072), length=131072)
    run((0, 100), (200, 300))
    run((0, 100), (65536, 131072))
    with pytest.raises(TooLong):
        agent.put(key_of(9), BLOB + b"x")
    with pytest.raises(TooLong):
        SlotWriter(agent.volume, key_of(9), length=0)
    writing = SlotWriter(agent.volume, key_of(9), length=10)
    with pytest.raises(TooLong):
        agent.channel.run(writing.write(agent.channel, 5, view[:6], agent.deadline()))
    assert agent.get(key_of(9)) is MissCause.NEVER_STORED
    assert agent.put(key_of(9), BLOB).stored, "what was given up took no slot for good"
    for cached in agent.cache.snapshot():
        assert not cached.reserved
        assert not cached.users


def test_what_failed_does_not_finish_well() -> None:
    """After a refused piece nothing more is taken, and the close says so again."""
    pool = MemoryPool((1,), value_bytes=CAPACITY)
    agent = pool.agent()
    writing = SlotWriter(agent.volume, key_of(1))
    view = memoryview(BLOB)
    agent.channel.run(writing.write(agent.channel, 0, view[:65536], agent.deadline()))
    pool.namespaces[0].broken = True
    with pytest.raises(PutRefused):
        agent.channel.run(writing.write(agent.channel, 65536, view[65536:131072], agent.deadline()))
    pool.namespaces[0].broken = False
    for steps in (
        writing.write(agent.channel, 131072, view[131072:196608], agent.deadline()),
        writing.finish(agent.channel, agent.deadline()),
    ):
        with pytest.raises(PutRefused):
            agent.channel.run(steps)
    assert not writing.stored
    assert agent.get(key_of(1)) is MissCause.NEVER_STORED


def test_the_first_write_wins() -> None:
    agent = agent_with()
    agent.put(key_of(1), b"first")
    second = agent.put(key_of(1), b"second")
    assert second.already_there
    assert not second.stored
    assert agent.get(key_of(1)) == b"first"
    assert (agent.tally.puts, agent.tally.puts_already_there) == (1, 1)


def test_an_empty_value_stores_nothing() -> None:
    agent = agent_with()
    writing = SlotWriter(agent.volume, key_of(1))
    agent.channel.run(writing.finish(agent.channel, agent.deadline()))
    assert agent.get(key_of(1)) is MissCause.NEVER_STORED


@pytest.mark.parametrize(("volume_ttl", "ttl", "seconds"), [(0, None, None), (900, None, 900), (900, 60, 60)])
def test_a_pin_without_a_time_lasts_as_long_as_the_volume_keeps_values(
    volume_ttl: int, ttl: float | None, seconds: int | None
) -> None:
    """Full twice over, the volume gives up values, and not the pinned one."""
    agent = MemoryPool((1, 1), suite="plain+crc64", ttl_seconds=volume_ttl).agent()
    with Pool("", sessions=1, parallel=1, files=SessionDoor(agent)) as pool:
        kv = pool.volume("v")
        assert kv.put(key_of(0), b"wanted")
        began = int(agent.channel.wall())
        assert kv.pin([key_of(0), key_of(1)], ttl) == [True, False]
        pseudonym = agent.volume.placement.pseudonym(key_of(0))
        (found,) = agent.volume.find(agent.volume.borrow_sets(pseudonym), pseudonym)
        until = found.entry.pinned_until
        assert until == TIME_MAX if seconds is None else began + seconds <= until <= began + seconds + 60
        for number in range(1, 4 * SLOTS_PER_SET):
            assert kv.put(key_of(number), b"another")
        assert agent.tally.evictions
        assert kv.get(key_of(0)) == b"wanted"
