"""Values in the memory stay within their bound, whatever their length and however long they are open."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from agent.pool.access import serve
from agent.pool.format.sealed_slot import HEADER_BYTES
from agent.pool.read.prestage_cache import PrestageCache
from agent.pool.read.reader_base import MemoryReader, Reader
from agent.pool.write.write_back import VALUE_COST, WriteBack
from tests.support.pool.memory_pool import MemoryPool, PoolAgent, key_of, stage_now


@contextmanager
def grown() -> Iterator[list[int]]:
    """How many bytes the block has allocated and holds at its end."""
    found: list[int] = []
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    try:
        yield found
        found.append(tracemalloc.get_traced_memory()[0] - before)
    finally:
        tracemalloc.stop()


def put(agent: PoolAgent, number: int, value: bytes) -> None:
    writing = agent.served.writer(key_of(number), length=len(value))
    agent.channel.run(writing.write(agent.channel, 0, memoryview(value), agent.deadline()))


def read(agent: PoolAgent, reading: Reader) -> bytes:
    into = bytearray(16384)
    count = agent.channel.run(reading.read(agent.channel, 0, memoryview(into), agent.deadline()))
    return bytes(into[:count])


def test_values_of_a_byte_that_wait_for_flash_take_no_more_memory_than_they_may() -> None:
    agent = MemoryPool((64, 64)).agent()
    back = WriteBack(agent.volume, 1 << 20)
    agent.served = serve(agent.volume, back=back)
    most = back.bytes_max // (1 + VALUE_COST)
    with grown() as found:
        for number in range(most):
            put(agent, number, b"1")
    assert len(back) == most
    assert 0.3 * back.bytes_max < found[0] < back.bytes_max
    put(agent, most, b"1")
    assert len(back) == most, "one more goes through"


def test_a_waiting_value_that_is_open_counts_until_it_is_closed() -> None:
    agent = MemoryPool().agent()
    back = WriteBack(agent.volume, 22_000)
    agent.served = serve(agent.volume, back=back)
    put(agent, 1, b"1" * 9000)
    first, second = agent.served.reader(key_of(1)), agent.served.reader(key_of(1))
    waiting = back.oldest()
    assert waiting is not None
    assert agent.channel.run(back.store(agent.channel, waiting, agent.deadline()))
    assert (len(back), back.bytes_held) == (0, 9000)
    first.close()
    first.close()
    assert back.bytes_held == 9000
    put(agent, 2, b"2" * 9000)
    assert (len(back), back.bytes_held) == (1, 18_000)
    put(agent, 3, b"3" * 9000)
    assert len(back) == 1, "there is no room for a third: it went through"
    assert read(agent, second) == b"1" * 9000
    second.close()
    assert back.bytes_held == 9000


@pytest.fixture
def staged() -> PoolAgent:
    """Eight short values that wait opened."""
    agent = MemoryPool((64, 64)).agent()
    slot = HEADER_BYTES + agent.volume.codec.padded(5)
    agent.prestage = PrestageCache(8 * slot, waits_open=True)
    for number in range(12):
        agent.put(key_of(number), b"value")
    for number in range(8):
        assert agent.channel.run(stage_now(agent.volume, agent.prestage, agent.channel, key_of(number)))
    return agent


def test_short_values_that_wait_opened_count_as_their_slots(staged: PoolAgent) -> None:
    cache = staged.prestage
    assert cache is not None
    assert cache.bytes_held == cache.budget_bytes
    for _ in range(2):  # the second time, headers that were proven are remembered
        another = PrestageCache(cache.budget_bytes, waits_open=True)
        with grown() as found:
            for number in [*range(12), *range(12)]:
                assert staged.channel.run(stage_now(staged.volume, another, staged.channel, key_of(number)))
                assert another.bytes_held <= another.budget_bytes
    assert found[0] < another.budget_bytes


def test_opened_values_that_readers_keep_are_half_of_what_may_wait_at_the_most(staged: PoolAgent) -> None:
    cache = staged.prestage
    assert cache is not None
    readings = [staged.served.reader(key_of(number), cache) for number in range(8)]
    assert [isinstance(each, MemoryReader) for each in readings] == [True] * 4 + [False] * 4
    assert all(read(staged, each) == b"value" for each in readings), "from flash, where not from memory"
    for number in range(8):
        cache.discard(staged.volume.settings.volume_id, staged.volume.placement.pseudonym(key_of(number)))
    assert cache.bytes_held == cache.budget_bytes // 2, "of which readers have all"
    for number in range(8, 12):
        assert staged.channel.run(stage_now(staged.volume, cache, staged.channel, key_of(number)))
    assert cache.bytes_held == cache.budget_bytes
    for each in readings:
        each.close()
    assert cache.bytes_held == cache.budget_bytes // 2
    assert isinstance(staged.served.reader(key_of(8), cache), MemoryReader)
