"""Several workers read one block of a file: none waits until another has served its piece."""

from __future__ import annotations

from dataclasses import replace

from agent.fs.files.pool_store import PoolBlockStore
from agent.pool.counters import MissCause
from tests.support.pool.memory_pool import MemoryPool, PoolAgent

NAME = bytes(range(16))
CONTENT = bytes(range(256)) * 32


def with_a_block() -> tuple[PoolAgent, PoolBlockStore]:
    pool = MemoryPool()
    pool.settings = replace(pool.settings, kind="files")
    agent = pool.agent()
    store = PoolBlockStore([agent.volume], lambda: agent.channel)
    agent.channel.run(store.put(NAME, agent.volume.settings.value_bytes, memoryview(CONTENT)))
    return agent, store


def test_a_piece_does_not_wait_for_another_worker_that_begins_with_the_block() -> None:
    agent, store = with_a_block()
    channel, capacity = agent.channel, agent.volume.settings.value_bytes
    into = memoryview(bytearray(len(CONTENT) // 2))
    begun = store._reading(agent.volume, NAME)
    with begun._beginning:
        # It would be late: nobody lets go of the lock.
        assert channel.run(store.get(NAME, capacity, len(into), into))
        assert into == CONTENT[len(into) :]
    assert begun.length is None
    channel.run(begun.read(channel, 0, into, agent.deadline()))
    assert into == CONTENT[: len(into)]
    assert store._reading(agent.volume, NAME) is begun


def test_a_block_whose_read_came_late_for_another_worker_is_read() -> None:
    agent, store = with_a_block()
    channel, capacity = agent.channel, agent.volume.settings.value_bytes
    into = memoryview(bytearray(len(CONTENT)))
    assert channel.run(store.get(NAME, capacity, 0, into))
    shared = store._reading(agent.volume, NAME)
    shared.give_up(channel, MissCause.LATE)
    into[:] = bytes(len(into))
    assert channel.run(store.get(NAME, capacity, 0, into))
    assert into == CONTENT
    assert store._reading(agent.volume, NAME) is not shared
