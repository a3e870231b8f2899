"""A put through one agent brings back no mark that another agent's delete took out."""

from __future__ import annotations

import pytest

from agent.pool.format.directory import ENTRY_BYTES
from agent.pool.volume.directory_cache import DAMAGE_LOOK_SECONDS
from agent.pool.write.put import SlotWriter
from tests.support.pool.memory_pool import MemoryPool, PoolAgent, key_of
from tests.support.pool.spill_pool import (
    MemoryTarget,
    SpillingAgent,
    causes_once_deleted,
    evict_all,
    full,
    value_of,
)

pytestmark = pytest.mark.usefixtures("mark_blocks")

NEW = 7777
SLOW = 10.0
"""Seconds between the pieces of a put."""


def begin_put(agent: PoolAgent) -> SlotWriter:
    writing = SlotWriter(agent.volume, key_of(NEW))
    agent.channel.run(writing.write(agent.channel, 0, memoryview(value_of(NEW))[:4096], agent.deadline()))
    return writing


def end_put(agent: PoolAgent, writing: SlotWriter, seconds: float = 5.0) -> None:
    deadline = agent.deadline(seconds)
    agent.channel.run(writing.write(agent.channel, 4096, memoryview(value_of(NEW))[4096:], deadline))
    agent.channel.run(writing.finish(agent.channel, deadline))


def let_pass(*agents: PoolAgent) -> None:
    latest = max(agent.channel.clock for agent in agents) + SLOW
    for agent in agents:
        agent.channel.clock = latest


def test_a_put_in_pieces_brings_back_no_mark_of_a_deleted_key() -> None:
    target, pool = MemoryTarget(), MemoryPool((1,))
    spilling = full(target, pool)
    evict_all(spilling)
    other = SpillingAgent(pool.agent(), target).agent
    let_pass(spilling.agent, other)
    writing = begin_put(other)
    let_pass(spilling.agent, other)
    assert spilling.agent.delete(key_of(1))
    end_put(other, writing)
    let_pass(spilling.agent, other)
    for agent in (spilling.agent, other):
        assert agent.get(key_of(1)) in causes_once_deleted()
        assert agent.get(key_of(2)) == value_of(2), "the other marks stay"
        assert agent.get(key_of(NEW)) == value_of(NEW)


def test_a_put_in_pieces_leaves_no_mark_of_a_victim_that_was_deleted_meanwhile() -> None:
    target, pool = MemoryTarget(), MemoryPool((1,))
    spilling = full(target, pool, all_values=True)
    other = pool.agent()
    evict_all(spilling, count=2)
    let_pass(spilling.agent, other)
    writing = begin_put(spilling.agent)
    let_pass(spilling.agent, other)
    gone = [key for key in map(key_of, range(64)) if other.delete(key)]
    assert gone
    end_put(spilling.agent, writing)
    let_pass(spilling.agent, other)
    assert not any(isinstance(spilling.agent.get(key), bytes) for key in gone)
    assert spilling.agent.get(key_of(NEW)) == value_of(NEW)


def test_a_put_in_pieces_leaves_the_mark_of_its_victim() -> None:
    target, pool = MemoryTarget(), MemoryPool((1,))
    spilling = full(target, pool, all_values=True)
    evict_all(spilling, count=2)
    let_pass(spilling.agent)
    writing = begin_put(spilling.agent)
    let_pass(spilling.agent)
    end_put(spilling.agent, writing)
    kept = [spilling.agent.get(key_of(number)) for number in range(64)]
    assert sum(isinstance(each, bytes) for each in kept) >= 63
    assert spilling.agent.tally.gets_from_g4 >= 1


def test_a_slot_that_a_put_has_reserved_loses_the_mark_that_another_agent_took_out() -> None:
    target, pool = MemoryTarget(), MemoryPool((1,), mark_blocks=0)
    spilling = full(target, pool)
    evict_all(spilling)
    other = SpillingAgent(pool.agent(), target).agent
    for number in range(8):
        let_pass(spilling.agent, other)
        # The only free slot is the one with the mark.
        volume = other.volume
        pseudonym = volume.placement.pseudonym(key_of(number))
        _, _, directory = pool.directories()[0]
        (slot,) = directory.marks(pseudonym)
        (above,) = [entry for at, entry in directory if at == slot]
        assert spilling.agent.delete(volume.placement.key_of(above.pseudonym))
        let_pass(spilling.agent, other)
        writing = begin_put(other)
        assert writing._reservation is not None
        assert writing._reservation.slot == slot
        let_pass(spilling.agent, other)
        assert spilling.agent.delete(key_of(number))
        end_put(other, writing)
        let_pass(spilling.agent, other)
        assert spilling.agent.get(key_of(number)) in causes_once_deleted()
        assert other.delete(key_of(NEW))
        spilling.put(key_of(9000 + number), value_of(number))


def test_a_put_in_pieces_takes_a_slot_of_a_rotted_directory() -> None:
    """Its own reservation of a damaged slot is no new damage, by which the proof would begin anew."""
    target, pool = MemoryTarget(), MemoryPool((1,))
    spilling = full(target, pool)
    namespace, offset, directory = pool.directories()[0]
    block = bytearray(directory.image())
    for slot in (3, 9):
        block[slot * ENTRY_BYTES + 20] ^= 1
    pool.namespaces[namespace].store(offset, [bytes(block)])
    agent = SpillingAgent(pool.agent(), target).agent
    agent.channel.clock = spilling.agent.channel.clock + SLOW
    writing = begin_put(agent)
    assert writing._reservation is not None
    assert writing._reservation.slot in (3, 9)
    let_pass(agent)
    end_put(agent, writing, seconds=DAMAGE_LOOK_SECONDS / 2)
    assert agent.get(key_of(NEW)) == value_of(NEW)
