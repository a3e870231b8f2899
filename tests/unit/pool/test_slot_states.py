"""The states of a slot: the code takes no step that the table does not name."""

from __future__ import annotations

import random
from collections.abc import Iterable

import pytest

from agent.pool.errors import PutRefused
from agent.pool.format.directory import SLOTS_PER_SET, quarantine_entry
from agent.pool.format.eviction_choice import Choice
from agent.pool.maintenance.rekey import ResealCounts, reseal_set
from agent.pool.volume.directory_cache import COOLDOWN_SECONDS, LEGAL, CachedSet, SlotState
from agent.pool.write.delete_and_pin import delete
from agent.pool.write.put import SlotWriter
from agent.pool.write.quota_eviction import evict_one
from agent.pool.write.slot_allocation import release, reserve
from tests.support.pool.memory_pool import MemoryPool, PoolAgent, key_of


def only_set(agent: PoolAgent) -> CachedSet:
    [cached] = agent.cache.snapshot()
    return cached


@pytest.fixture
def agent() -> PoolAgent:
    agent = MemoryPool((1,), value_bytes=131072, unit_bytes=65536).agent()
    agent.put(key_of(0), b"value")
    return agent


def bring(agent: PoolAgent, cached: CachedSet, slot: int, state: SlotState) -> None:
    assert cached.directory is not None
    cached.directory.clear(slot)
    match state:
        case SlotState.NAMED:
            named = next(iter(cached.directory))[1]
            cached.directory.install(slot, named._replace(generation=slot + 1))
        case SlotState.RESERVED:
            cached.reserved.add(slot)
        case SlotState.COOLING:
            cached.cool_down(slot, agent.channel.now())
        case SlotState.BAD:
            cached.directory.install(slot, quarantine_entry(agent.channel.wall()))


def test_a_slot_is_reserved_only_from_a_state_that_the_table_names(agent: PoolAgent) -> None:
    cached = only_set(agent)
    assert cached.directory is not None
    free = sorted(cached.directory.free_slots())
    for slot, state in zip(free, SlotState, strict=False):
        bring(agent, cached, slot, state)
        assert cached.slot_state(slot, agent.channel.now()) is state
        choice = Choice(slot, cached.directory.entry(slot), 1.0, 0)
        is_legal = (state, SlotState.RESERVED) in LEGAL
        assert reserve(agent.volume, agent.channel, cached, choice) is is_legal, state
        if is_legal:
            assert cached.slot_state(slot, agent.channel.now()) is SlotState.RESERVED
            release(agent.volume, cached, slot)


def test_whatever_is_done_takes_only_steps_of_the_table(agent: PoolAgent, seed: int) -> None:
    dice, seen = random.Random(seed), set[tuple[SlotState, SlotState]]()
    cached, channel, volume = only_set(agent), agent.channel, agent.volume
    drive = channel.namespaces[0]
    open_puts: list[SlotWriter] = []

    def states() -> list[SlotState]:
        return [cached.slot_state(slot, channel.now()) for slot in range(SLOTS_PER_SET)]

    def note(before: Iterable[SlotState]) -> None:
        seen.update((was, now) for was, now in zip(before, states(), strict=True) if was is not now)

    def put(number: int) -> None:
        writing = SlotWriter(volume, key_of(number), length=2 * 65536)
        channel.run(writing.write(channel, 0, memoryview(bytes(65536)), agent.deadline()))
        if not writing.already_there:
            open_puts.append(writing)

    for _ in range(1500):
        before, number = states(), dice.randrange(200)
        try:
            match dice.randrange(8):
                case 0 | 1 if len(open_puts) < 5:
                    put(number)
                case 2 if open_puts:
                    rest = memoryview(bytes(65536))
                    channel.run(open_puts.pop().write(channel, 65536, rest, agent.deadline()))
                case 3 if open_puts:
                    open_puts.pop().drop()
                case 4:
                    channel.run(delete(volume, channel, key_of(number), agent.deadline()))
                case 5:
                    if dice.random() < 0.1:
                        channel.run(evict_one(volume, channel, agent.deadline()))
                case 6:
                    drive.unwritable = {cached.offset} if dice.random() < 0.3 else set()
                    channel.clock += dice.choice([0.0, COOLDOWN_SECONDS / 3])
                case 7:
                    volume.codec.epoch = dice.randrange(2)
                    place = (cached.namespace, cached.offset)
                    channel.run(reseal_set(volume, channel, place, ResealCounts()))
        except PutRefused:
            open_puts = [each for each in open_puts if not each.finished]
        note(before)
    assert seen <= LEGAL
    own = {SlotState.FREE, SlotState.NAMED, SlotState.RESERVED, SlotState.COOLING}
    assert seen == {(was, now) for was, now in LEGAL if was in own and now in own}


def test_to_look_a_state_up_is_no_call_of_python() -> None:
    assert all(type(state).__hash__ is object.__hash__ for state in SlotState)
