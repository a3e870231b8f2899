"""Where no place in G4 is configured a mark is a ghost as any other; and whom a mark's victim may be."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from agent.pool.counters import MissCause
from agent.pool.format.eviction_choice import Choice
from agent.pool.volume.directory_cache import CachedSet
from agent.pool.volume.volume import Volume
from agent.pool.write import quota_eviction, slot_allocation
from tests.support.pool.memory_pool import MemoryPool, key_of
from tests.support.pool.spill_pool import SLOTS, MemoryTarget, evict_all, full, value_of

OLD_GHOST = bytes((1, 2, 3, 4, 5, 6, 7, 0x80))
"""Of a pool of an older g35, whose ghosts may look like marks."""


def test_ghosts_that_look_like_marks_go_where_there_is_no_g4() -> None:
    pool = MemoryPool((1,))
    agent = pool.agent()
    for number in range(SLOTS):
        agent.channel.clock += 1
        agent.put(key_of(number), value_of(number))
    namespace, offset, directory = pool.directories()[0]
    for slot, entry in list(directory):
        directory.install(slot, entry._replace(ghost=OLD_GHOST))
    pool.namespaces[namespace].store(offset, [directory.image()])
    anew = pool.agent()
    anew.channel.clock = agent.channel.clock + 100
    for number in range(1000, 1000 + 2 * SLOTS):
        anew.channel.clock += 1
        anew.put(key_of(number), value_of(number))
    _, _, directory = pool.directories()[0]
    assert not any(directory.ghost(slot) == OLD_GHOST for slot in range(SLOTS))
    assert anew.get(key_of(1000)) is MissCause.EVICTED


def test_a_put_follows_no_mark_where_there_is_no_g4(monkeypatch: pytest.MonkeyPatch) -> None:
    agent = MemoryPool((1, 1)).agent()
    looked: list[bytes] = []

    def marks(volume: Volume, sets: Sequence[CachedSet], pseudonym: bytes) -> list[tuple[CachedSet, int]]:
        looked.append(pseudonym)
        return []

    monkeypatch.setattr(Volume, "marks", marks)
    agent.put(key_of(1), value_of(1))
    assert not looked


def test_a_value_that_is_held_by_now_stays_though_its_slot_keeps_an_older_mark(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    spilling = full(MemoryTarget())
    evict_all(spilling)
    agent, real = spilling.agent, slot_allocation.left_by
    held: list[bytes] = []

    def left_by(volume: Volume, cached: CachedSet, choice: Choice) -> bytes | None:
        assert choice.victim is not None
        left = real(volume, cached, choice)
        if left is None:
            agent.volume.holds.take([choice.victim.pseudonym], 1)
            held.append(choice.victim.pseudonym)
        return left

    monkeypatch.setattr(quota_eviction, "left_by", left_by)
    for _ in range(SLOTS):
        agent.channel.run(quota_eviction.evict_one(agent.volume, agent.channel, agent.deadline()))
        if held:
            break
    assert held, "a victim that has no copy, in a slot with a mark"
    with agent.volume.borrowed(held[0]) as sets:
        assert agent.volume.find(sets, held[0])
