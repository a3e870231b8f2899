"""Many short values stored by one request: as one by one, and no value waits for what it does not need."""

from __future__ import annotations

import errno
import threading
from collections.abc import Sequence
from typing import Any

import pytest

from agent.fs.control.registered_memory import RegisteredMemory
from agent.pool.access import serve
from agent.pool.errors import MissCause
from agent.pool.steps import Acquire
from agent.pool.volume.bandwidth import Bandwidth
from agent.pool.volume.quota import Limits, Measured, Quota
from agent.pool.volume.volume import TenantShare
from agent.pool.write.batch import AT_ONCE, UNTRIED, write_together
from agent.pool.write.name_together import NOT_IN_TIME
from agent.pool.write.write_back import WriteBack
from agent.sim.faulty_flash import SimChannel, SimNamespace
from agent.sim.seeded_scheduler import StepScheduler
from host_shim.many_values import groups_of
from host_shim.pool import Pool
from host_shim.transfer_wire import MANY_MAX
from tests.support.engines.counted_door import Counted, agent_with, value_of
from tests.support.pool.lending import nothing_is_held
from tests.support.pool.memory_pool import SUITES, MemoryPool, PoolAgent, key_of
from tests.support.pool.stuck_writes import Driven, StuckWrites


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
        # A proof that is a CRC is not made of memory that its client can change: these are put one by one.
        assert door.asked["STORE_MANY"] == (len(groups_of(views)) if suite == "aes-256-gcm" else 1)
        assert agent.tally.puts == count
        assert agent.tally.bytes_written == sum(sizes)
        for number in range(count):
            assert volume.get(key_of(number)) == value_of(number)
        assert volume.put_many(keys, views) == [True] * count, "they are there already"
        assert agent.tally.puts == count
        assert agent.tally.puts_already_there == count
        nothing_is_held(agent)


def test_one_key_twice_in_a_batch_keeps_its_first_value(memory: RegisteredMemory) -> None:
    agent = agent_with((1,))
    with Pool("/nowhere", files=Counted(agent, memory)) as pool:
        volume = pool.volume("v")
        assert (
            volume.put_many([key_of(1), key_of(2), key_of(1)], [b"first", b"other", b"second"]) == [True] * 3
        )
        assert volume.get(key_of(1)) == b"first"
        assert (agent.tally.puts, agent.tally.puts_already_there) == (2, 0)
        nothing_is_held(agent)


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
        nothing_is_held(agent)


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
        nothing_is_held(agent)


# -- what a call holds, and for how long ----------------------------------------------------------------


def stuck_agent(sets: tuple[int, ...]) -> tuple[PoolAgent, StuckWrites]:
    agent = agent_with(sets)
    channel = StuckWrites(agent.channel.namespaces)
    agent.channel = channel
    return agent, channel


def together(agent: PoolAgent, keys: Sequence[int], wait: float = 5.0) -> Any:
    values = [memoryview(bytes([key % 256]) * 500) for key in keys]
    return write_together(agent.volume, agent.channel, [key_of(key) for key in keys], values, wait)


def test_the_values_of_one_set_have_one_write_of_their_directory() -> None:
    agent = agent_with((1,))
    assert agent.channel.run(together(agent, range(AT_ONCE))) == [True] * AT_ONCE
    assert agent.channel.namespaces[0].writes == AT_ONCE + 1
    assert agent.channel.namespaces[0].reads == 1
    for number in range(AT_ONCE):
        assert agent.get(key_of(number)) == bytes([number]) * 500
    nothing_is_held(agent)


def test_what_was_answered_holds_nothing_while_an_enclosure_hangs() -> None:
    """Its keys may be put again, and its sets take values of others."""
    agent, channel = stuck_agent((2, 2))
    channel.is_stuck = lambda namespace, offset: namespace == 0
    driven = Driven(agent.channel, together(agent, range(AT_ONCE)))
    assert driven.run(1.0) is None
    hung = [cached for cached in agent.cache.snapshot() if cached.writer.locked()]
    assert hung
    assert {cached.namespace for cached in hung} == {0}
    slots = sum(len(cached.reserved) for cached in hung)
    assert 0 < slots < AT_ONCE
    assert len(agent.volume.key_locks) == slots, "only those of values that hang"
    assert all(not c.reserved for c in agent.cache.snapshot() if c.namespace == 1)
    became = driven.run(10.0)
    assert became is not None
    assert [one for one in became if one is True] == [True] * (AT_ONCE - slots)
    nothing_is_held(agent)


def test_a_slot_that_hangs_keeps_others_of_its_set_from_nothing() -> None:
    agent, channel = stuck_agent((1,))
    seen: list[int] = []

    def is_first(_namespace: int, offset: int) -> bool:
        seen.append(offset)
        return len(seen) == 1

    channel.is_stuck = is_first
    driven = Driven(agent.channel, together(agent, range(6)))
    assert driven.run(1.0) is None
    assert len(agent.volume.key_locks) == 1
    assert sum(agent.get(key_of(number)) == bytes([number]) * 500 for number in range(6)) == 5
    became = driven.run(10.0)
    assert became is not None
    assert sum(one is True for one in became) == 5
    nothing_is_held(agent)


def test_others_go_on_and_nobody_waits_longer_than_one_put() -> None:
    """More values hang than may be under way."""
    agent, channel = stuck_agent((3, 3, 3))
    channel.is_stuck = lambda namespace, offset: namespace == 0
    driven = Driven(agent.channel, together(agent, range(MANY_MAX)))
    began = channel.clock
    assert driven.run(1.0) is None
    there = [number for number in range(MANY_MAX) if isinstance(agent.get(key_of(number)), bytes)]
    assert len(there) > AT_ONCE
    became = driven.run(100.0)
    assert became is not None
    assert channel.clock <= began + 5.0
    stored = [number for number, one in enumerate(became) if one is True]
    assert stored == there
    assert sum(not isinstance(one, bool) and one is not UNTRIED for one in became) <= AT_ONCE
    nothing_is_held(agent)


@pytest.mark.parametrize(("depth", "under_way"), [(64, 32), (128, 32), (32, 16), (3, 1)])
def test_fewer_are_under_way_where_a_queue_takes_fewer(depth: int, under_way: int) -> None:
    agent, channel = stuck_agent((1,))
    channel.queue_depth = lambda: depth  # type: ignore[method-assign]
    channel.is_stuck = lambda namespace, offset: True
    driven = Driven(agent.channel, together(agent, range(MANY_MAX)))
    assert driven.run(0.04) is None
    (cached,) = agent.cache.snapshot()
    assert len(cached.reserved) == under_way
    driven.run(100.0)
    nothing_is_held(agent)


def test_an_enclosure_whose_directories_do_not_come() -> None:
    """The other takes the values, in time; the lookups hold no lock."""
    agent, channel = stuck_agent((1, 1))
    channel.namespaces[0].hung = True
    driven = Driven(agent.channel, together(agent, range(AT_ONCE)))
    began = channel.clock
    assert driven.run(1.0) is None
    assert not len(agent.volume.key_locks)
    became = driven.run(100.0)
    assert became == [True] * AT_ONCE
    assert channel.clock <= began + 5.0
    nothing_is_held(agent)


def test_a_put_of_unknown_fate_is_not_repeated(memory: RegisteredMemory) -> None:
    agent, channel = stuck_agent((1, 1))
    channel.is_stuck = lambda namespace, offset: True
    door = Counted(agent, memory)
    with Pool("/nowhere", files=door) as pool:
        volume = pool.volume("v")
        assert volume.put_many([key_of(n) for n in range(6)], [b"x" * 100] * 6) == [False] * 6
    assert door.asked["STORE_MANY"] == 1
    assert "STORE" not in door.asked
    assert sum(each.writes for each in channel.namespaces) <= 6 + 2
    assert len(agent.volume.in_doubt_writes) == 6
    nothing_is_held(agent)


def test_nor_where_the_agent_says_nothing(memory: RegisteredMemory) -> None:
    agent = agent_with()
    door = Counted(agent, memory)
    door.fails = errno.EIO
    with Pool("/nowhere", files=door) as pool:
        volume = pool.volume("v")
        assert volume.put_many([key_of(n) for n in range(6)], [b"x" * 100] * 6) == [False] * 6
        assert sum(each.writes for each in agent.channel.namespaces) == 0
        door.fails = 0
        assert volume.put_many([key_of(n) for n in range(6)], [b"x" * 100] * 6) == [True] * 6


def test_a_call_takes_no_seat_of_those_who_wait_for_bandwidth(memory: RegisteredMemory) -> None:
    agent = agent_with()
    seats = threading.BoundedSemaphore(1)
    bandwidth = Bandwidth(seats, 100_000)
    agent.volume.change(tenant=TenantShare(None, bandwidth))
    assert agent.channel.run(together(agent, range(4))) == [True] * 4
    bandwidth.charge(agent.channel, 1 << 20)
    began = agent.channel.clock
    assert agent.channel.run(together(agent, range(4, 8))) == [UNTRIED] * 4
    assert agent.channel.clock == began
    assert bandwidth.waits == bandwidth.late == 0
    with Pool("/nowhere", files=Counted(agent, memory)) as pool:
        stored = pool.volume("v").put_many([key_of(n) for n in range(4, 8)], [b"x"] * 4)
    assert stored == [False] * 4, "each is late by itself, as before"
    assert bandwidth.late == 4
    nothing_is_held(agent)


def test_a_key_that_another_put_has_is_left_to_a_put_of_its_own() -> None:
    agent = agent_with((1,))
    pseudonym = agent.volume.placement.pseudonym(key_of(2))
    assert agent.volume.key_locks.take_at_once(pseudonym)
    began = agent.channel.clock
    assert agent.channel.run(together(agent, range(4))) == [True, True, UNTRIED, True]
    assert agent.channel.clock == began
    agent.volume.key_locks.end(pseudonym)
    assert agent.channel.run(together(agent, range(4))) == [False, False, True, False]
    nothing_is_held(agent)


def test_the_second_of_a_key_does_not_come_before_the_first() -> None:
    """The first cannot have its key's lock at once, the second, twelve values later, could."""
    agent, channel = stuck_agent((1,))
    locks, pseudonym = agent.volume.key_locks, agent.volume.placement.pseudonym(key_of(0))
    assert locks.take_at_once(pseudonym)
    held, write = [pseudonym], channel.write

    def writes(*args: Any, **more: Any) -> Any:
        while held:
            locks.end(held.pop())
        return write(*args, **more)

    channel.write = writes  # type: ignore[method-assign]
    numbers = [0, *range(1, AT_ONCE + 1), 0]
    became = channel.run(together(agent, numbers))
    assert not held
    assert (became[0], became[-1]) == (UNTRIED, UNTRIED)
    assert became[1:-1] == [True] * AT_ONCE


def test_values_that_end_without_a_wait_keep_no_others_from_the_call() -> None:
    agent = agent_with((4, 4))
    keys = list(range(MANY_MAX))
    assert agent.channel.run(together(agent, keys)) == [True] * MANY_MAX
    assert agent.channel.run(together(agent, keys)) == [False] * MANY_MAX, (
        "directories are remembered: nothing is waited for"
    )
    for namespace in agent.channel.namespaces:
        namespace.down = True
    agent.channel.clock += 60
    assert UNTRIED not in agent.channel.run(together(agent, [key + MANY_MAX for key in keys]))


def test_a_set_that_another_writes_keeps_only_its_own_values() -> None:
    agent = agent_with((1, 1))
    agent.channel.run(together(agent, range(100, 102)))
    cached = next(each for each in agent.cache.snapshot() if each.namespace == 0)
    assert cached.writer.acquire(blocking=False)
    driven = Driven(agent.channel, together(agent, range(10)))
    assert driven.run(1.0) is None
    assert len(agent.volume.key_locks) == len(cached.reserved)
    cached.writer.release()
    assert driven.run(10.0) == [True] * 10
    nothing_is_held(agent)


def test_a_set_whose_writer_comes_free_only_as_the_time_ends_is_not_written() -> None:
    """What a write that is sent then became would never be heard: its slots would be in doubt for nothing."""
    agent, channel = stuck_agent((1,))
    assert Driven(channel, together(agent, [100])).run(1.0) == [True]  # its directory is remembered
    (cached,) = agent.cache.snapshot()
    assert cached.writer.acquire(blocking=False)
    driven = Driven(channel, together(agent, range(3), wait=0.01))
    assert driven.run(0.005) is None
    writes = channel.namespaces[0].writes
    cached.writer.release()
    channel.clock = driven.wanted.deadline
    assert agent.volume.may_write(cached, channel)
    became = driven.run(1.0)
    assert became is not None
    assert [(one.cause, str(one)) for one in became] == [(MissCause.LATE, NOT_IN_TIME)] * 3
    assert channel.namespaces[0].writes == writes
    assert not len(agent.volume.in_doubt_writes)
    nothing_is_held(agent)


def test_calls_of_several_workers_that_want_the_same_keys_and_sets(seed: int) -> None:
    """In any order: all of them end, at once, and each key has its first value."""
    for number in range(20):
        _calls_that_cross((seed, number))


def _calls_that_cross(seed: object) -> None:
    scheduler = StepScheduler(seed)
    began = scheduler.now
    namespaces = [SimNamespace(1 << 40), SimNamespace(1 << 40)]
    pool = MemoryPool((1, 1))
    agent = PoolAgent([], pool.settings)
    channels = [SimChannel(scheduler, namespaces, f"w{worker}") for worker in range(3)]
    came: list[list[Any]] = []

    def call(worker: int) -> Any:
        keys = list(range(20)) if worker % 2 else list(range(19, -1, -1))
        values = [memoryview(bytes([worker, key]) * 100) for key in keys]
        names = [key_of(key) for key in keys]
        became = yield from write_together(agent.volume, channels[worker], names, values, 5.0)
        came.append([key for key, one in zip(keys, became, strict=True) if one is True])

    for worker in range(3):
        scheduler.spawn(f"w{worker}", call(worker))
    scheduler.run()
    assert scheduler.now < began + 1.0
    assert sorted(key for stored in came for key in stored) == list(range(20)), "each was stored once"
    nothing_is_held(agent)


def test_values_that_wait_in_memory_are_put_one_by_one(memory: RegisteredMemory) -> None:
    agent = agent_with()
    back = WriteBack(agent.volume, 1 << 20)
    agent.served = serve(agent.volume, back=back)
    door = Counted(agent, memory)
    with Pool("/nowhere", files=door, parallel=1) as pool:
        volume = pool.volume("v")
        keys = [key_of(1), key_of(2), key_of(1)]
        assert volume.put_many(keys, [b"first", b"other", b"second"]) == [True] * 3
        assert volume.put_many(keys, [b"third", b"other", b"fourth"]) == [True] * 3
        assert door.asked["STORE_MANY"] == 1, "it is not asked again for a second"
        assert len(back) == 2
        assert volume.get(key_of(1)) == b"first"


def test_a_tenant_that_has_to_evict_does_so_by_puts_of_their_own(memory: RegisteredMemory) -> None:
    agent = agent_with((1,), value_bytes=4096)
    measured = Measured(agent.volume.occupancy, agent.volume.settings.slot_bytes)
    agent.volume.change(tenant=TenantShare(Quota([measured], Limits(slots=6)), None))
    assert [one is True for one in agent.channel.run(together(agent, range(8)))] == [True] * 6 + [False] * 2
    assert agent.channel.run(together(agent, range(20, 22))) == [UNTRIED] * 2
    with Pool("/nowhere", files=Counted(agent, memory)) as pool:
        assert pool.volume("v").put_many([key_of(n) for n in range(20, 22)], [b"x"] * 2) == [True] * 2
    assert agent.volume.quota is not None
    assert agent.volume.quota.in_use()[0] == 6
    nothing_is_held(agent)


@pytest.mark.parametrize("stuck", [False, True])
def test_a_call_that_breaks_off_holds_nothing(stuck: bool) -> None:
    """At any of its steps. What was sent may land, so no other value takes its slot for a while."""
    for steps_taken in range(200):
        agent, channel = stuck_agent((1, 1))
        if stuck:
            channel.is_stuck = lambda namespace, offset: namespace == 0
        steps = together(agent, range(20))
        answer: bool | None = None
        ended = False
        for _ in range(steps_taken):
            try:
                wanted = steps.send(answer)
            except StopIteration:
                ended = True
                break
            answer = not isinstance(wanted, Acquire) and wanted.pending.done
            if not answer:
                channel.clock = max(channel.clock, wanted.deadline)
        steps.close()
        nothing_is_held(agent)
        if ended:
            return
    raise AssertionError("it does not end")


def test_an_answer_that_is_an_error_refuses_its_value_alone() -> None:
    agent = agent_with((1,))
    agent.put(key_of(50), b"x")
    _, slot_at, _ = agent.where(key_of(50))
    size = agent.volume.settings.slot_bytes
    agent.channel.namespaces[0].unwritable = {slot_at + n * size for n in range(-63, 64) if n % 3 == 0 and n}
    became = agent.channel.run(together(agent, range(12)))
    refused = [number for number, one in enumerate(became) if one is not True]
    assert 0 < len(refused) < 12
    for number in range(12):
        got = agent.get(key_of(number))
        assert (got == bytes([number]) * 500) == (number not in refused)
    nothing_is_held(agent)


def test_values_with_a_second_copy_are_noted_for_it() -> None:
    agent = agent_with((2, 2), copies=2)
    assert agent.channel.run(together(agent, range(6))) == [True] * 6
    assert len(agent.volume.replication_backlog) == 6
    nothing_is_held(agent)
