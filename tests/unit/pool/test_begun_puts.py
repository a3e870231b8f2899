"""Puts that wait for their next piece: what they hold is bounded, and idle ones make way for others."""

from __future__ import annotations

import errno
import sys
import threading

import pytest

from agent.pool.counters import MissCause
from agent.pool.errors import PutRefused
from agent.pool.format.directory import SLOTS_PER_SET
from agent.pool.kv.put import KvWriting
from agent.pool.steps import Lanes
from agent.pool.volume.partial_puts import BEGUN_BYTES, IDLE_SECONDS, STALLED_SECONDS, PartialPut, PartialPuts
from agent.pool.volume.quota import Limits, Measured, Quota
from agent.pool.volume.settings import Timing
from agent.pool.write.put import Writing
from host_shim.control_wire import FLAG_NO_ANSWER, Operation, Outcome, Request, data_offset
from tests.support.kv_flash import SimKvLanes, SimKvNamespace, kv_volume
from tests.support.memory_lanes import MemoryLanes
from tests.support.memory_pool import MemoryPool, PoolAgent, key_of
from tests.support.session_door import SessionDoor
from tests.support.step_scheduler import StepScheduler

UNIT = 1 << 16
VALUE = bytes(range(256)) * (2 * UNIT // 256)
ONE_SET = (1,)


def agent_with(sets: tuple[int, ...] = (4, 4), places: int = 2) -> PoolAgent:
    """One in which `places` units may wait."""
    agent = MemoryPool(sets, value_bytes=len(VALUE), unit_bytes=UNIT, suite="plain+crc64").agent()
    agent.volume.begun = PartialPuts(places * UNIT)
    return agent


def go_on(agent: PoolAgent, writing: Writing, start: int, end: int) -> bool:
    steps = writing.write(agent.lanes, start, memoryview(VALUE)[start:end], agent.deadline())
    return agent.lanes.run(steps)


def begin(agent: PoolAgent, number: int, size: int = 1) -> Writing:
    writing = Writing(agent.volume, key_of(number), length=len(VALUE))
    assert not go_on(agent, writing, 0, size)
    return writing


def drop(agent: PoolAgent, *writings: Writing) -> None:
    for writing in writings:
        agent.lanes.run(writing.drop(agent.lanes))


def reserved(agent: PoolAgent) -> int:
    return sum(len(cached.reserved) for cached in agent.cache.snapshot())


def assert_nothing_held(agent: PoolAgent) -> None:
    assert (agent.volume.begun.bytes_held, len(agent.volume.begun), reserved(agent)) == (0, 0, 0)
    assert all(cached.users == 0 for cached in agent.cache.snapshot())


def test_what_waits_in_memory_is_bounded_and_whole_values_go_on() -> None:
    agent = agent_with()
    first, second = begin(agent, 1), begin(agent, 2, 1000)
    with pytest.raises(PutRefused, match="in pieces") as refused:
        begin(agent, 3)
    assert refused.value.cause is MissCause.LATE
    assert agent.tally.puts_refused == 1
    assert agent.volume.begun.bytes_held == 2 * UNIT
    assert agent.put(key_of(4), VALUE).stored
    # Whole units hold nothing, and what is begun keeps its room from one piece to the next.
    in_units = begin(agent, 5, UNIT)
    assert not go_on(agent, second, 1000, UNIT + 1000)
    assert agent.volume.begun.bytes_held == 2 * UNIT
    assert go_on(agent, second, UNIT + 1000, len(VALUE))
    assert agent.volume.begun.bytes_held == UNIT
    assert go_on(agent, in_units, UNIT, len(VALUE))
    assert [agent.get(key_of(number)) for number in (2, 4, 5)] == [VALUE] * 3
    third = begin(agent, 3)
    drop(agent, first, third)
    assert_nothing_held(agent)


def test_the_last_piece_of_a_value_needs_no_room() -> None:
    agent = agent_with(places=0)
    length = UNIT + 5000
    writing = Writing(agent.volume, key_of(1), length=length)
    assert not go_on(agent, writing, 0, UNIT)
    assert go_on(agent, writing, UNIT, length)
    assert agent.get(key_of(1)) == VALUE[:length]
    assert agent.tally.bytes_copied == 0
    assert_nothing_held(agent)


def test_a_stalled_put_makes_way_for_anothers_bytes_and_does_not_go_on() -> None:
    agent = agent_with()
    idle, at_its_close = begin(agent, 1), Writing(agent.volume, key_of(2))
    assert not go_on(agent, at_its_close, 0, 10)
    agent.lanes.clock += STALLED_SECONDS / 2
    with pytest.raises(PutRefused):
        begin(agent, 3)
    agent.lanes.clock += STALLED_SECONDS
    others = [begin(agent, 3), begin(agent, 4)]
    with pytest.raises(PutRefused):
        begin(agent, 5)
    assert reserved(agent) == 2
    assert agent.volume.begun.bytes_held == 2 * UNIT
    for _ in range(2):
        with pytest.raises(PutRefused, match="no byte of it came") as refused:
            go_on(agent, idle, 1, len(VALUE))
        assert refused.value.cause is MissCause.LATE
        with pytest.raises(PutRefused, match="no byte of it came"):
            agent.lanes.run(at_its_close.finish(agent.lanes, agent.deadline()))
    drop(agent, idle, at_its_close)
    assert agent.volume.begun.bytes_held == 2 * UNIT
    assert not idle.stored
    drop(agent, *others)
    assert_nothing_held(agent)
    assert agent.put(key_of(1), VALUE).stored


def test_while_nobody_wants_its_room_a_put_may_take_its_time() -> None:
    agent = agent_with()
    slow = begin(agent, 1)
    agent.lanes.clock += 100 * IDLE_SECONDS
    assert agent.put(key_of(2), VALUE).stored
    assert go_on(agent, slow, 1, len(VALUE))
    assert agent.get(key_of(1)) == VALUE


def test_idle_puts_make_way_for_those_who_find_no_slot() -> None:
    agent = agent_with(ONE_SET, SLOTS_PER_SET)
    begun = [begin(agent, number) for number in range(SLOTS_PER_SET)]
    with pytest.raises(PutRefused, match="no slot"):
        agent.put(key_of(100), VALUE)
    agent.lanes.clock += IDLE_SECONDS / 2
    assert not go_on(agent, begun[0], 1, 2)
    agent.lanes.clock += IDLE_SECONDS / 2 + 1
    assert agent.put(key_of(100), VALUE).stored
    assert reserved(agent) == 1
    assert go_on(agent, begun[0], 2, len(VALUE))
    assert agent.get(key_of(0)) == VALUE
    drop(agent, *begun)
    assert_nothing_held(agent)


def test_an_idle_put_goes_before_a_value_is_evicted() -> None:
    agent = agent_with(ONE_SET)
    for number in range(SLOTS_PER_SET - 1):
        agent.put(key_of(number), VALUE)
    idle = begin(agent, 100)
    agent.lanes.clock += IDLE_SECONDS + 1
    assert agent.put(key_of(101), VALUE).stored
    assert agent.tally.evictions == 0
    drop(agent, idle)
    assert_nothing_held(agent)


def test_an_idle_put_makes_way_in_the_tenants_quota() -> None:
    agent = agent_with()
    agent.volume.quota = Quota([Measured(agent.volume.occupancy, agent.volume.settings.slot_bytes)])
    agent.volume.quota.limit(Limits(slots=2))
    agent.put(key_of(1), VALUE)
    idle = begin(agent, 2)
    agent.lanes.clock += IDLE_SECONDS + 1
    assert agent.put(key_of(3), VALUE).stored
    assert agent.volume.quota.counts.evictions == 0
    assert agent.get(key_of(1)) == VALUE
    drop(agent, idle)
    assert agent.volume.quota.in_use()[0] == 2
    assert_nothing_held(agent)


def test_a_session_is_told_eio() -> None:
    agent = agent_with(places=1)
    door = SessionDoor(agent)
    session = door.open("")
    keys = tuple(key_of(number) for number in range(3))
    request = Request(Operation.PUT, 1, "v", keys, flags=FLAG_NO_ANSWER, lengths=(len(VALUE),) * 3)
    door.pwrite(session, request.encode(), 0)
    assert door.pwrite(session, b"x", data_offset(0)) == 1
    with pytest.raises(OSError, match="in pieces") as refused:
        door.pwrite(session, b"x", data_offset(1))
    assert refused.value.errno == errno.EIO
    assert door.pwrite(session, VALUE, data_offset(2)) == len(VALUE)
    agent.lanes.clock += STALLED_SECONDS + 1
    other = begin(agent, 5)
    with pytest.raises(OSError, match="no byte of it came") as refused:
        door.pwrite(session, VALUE[1:], data_offset(0) + 1)
    assert refused.value.errno == errno.EIO
    outcomes = Request(Operation.OUTCOME, 2, "", (b"",) * 3)
    door.pwrite(session, outcomes.encode(), 0)
    answer = memoryview(bytearray(4096))
    length = door.preadv(session, answer, 0)
    assert bytes(answer[:length])[-3:] == bytes([Outcome.LATE, Outcome.LATE, Outcome.HIT])
    door.close(session)
    drop(agent, other)
    assert_nothing_held(agent)


def test_on_kv_namespaces_a_stalled_put_makes_way_too() -> None:
    scheduler = StepScheduler(35)
    volume = kv_volume((16 << 20,))
    volume.begun = PartialPuts(2 * volume.settings.value_bytes)
    lanes = SimKvLanes(scheduler, [SimKvNamespace(16 << 20)], "one")

    def piece(writing: KvWriting, at: int, data: bytes) -> bool:
        done: bool = scheduler.finish(writing.write(lanes, at, memoryview(data), scheduler.now + 1))
        return done

    begun = [KvWriting(volume, key_of(number), length=100) for number in range(2)]
    begun += [KvWriting(volume, key_of(number)) for number in range(2, 4)]
    assert not piece(begun[0], 0, b"x")
    assert not piece(begun[2], 0, b"x")
    with pytest.raises(PutRefused, match="in pieces"):
        piece(begun[3], 0, b"x")
    scheduler.now += STALLED_SECONDS / 2
    assert not piece(begun[0], 1, b"x")
    scheduler.now += STALLED_SECONDS
    assert not piece(begun[1], 0, b"x")
    again = KvWriting(volume, key_of(3))
    assert not piece(again, 0, b"x")
    with pytest.raises(PutRefused, match="no byte of it came"):
        piece(begun[2], 1, b"x")
    assert piece(begun[0], 2, bytes(98))
    for writing in (*begun, again):
        scheduler.finish(writing.drop(lanes))
    assert volume.begun.bytes_held == 0
    assert len(volume.begun) == 0


class CountedPut(PartialPut):
    """Its bytes go once, whoever lets go of them."""

    def __init__(self, begun: PartialPuts) -> None:
        self.begun = begun
        self.let_go = 0

    def abandon(self, lanes: Lanes) -> None:
        self.let_go += 1
        self.begun.give_back(self.held)

    def piece(self, lanes: Lanes) -> bool:
        return not self._was_given_up(self.begun, b"v") and self._wait_for_more(self.begun, b"v", 10, lanes)

    def end(self, lanes: Lanes) -> None:
        if not self._was_given_up(self.begun, b"v"):
            self.abandon(lanes)


@pytest.mark.interpreted
def test_a_put_is_let_go_of_once_whoever_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """One thread brings pieces, another gives up all that wait: none is idle for so short a time else."""
    monkeypatch.setattr("agent.pool.volume.partial_puts.IDLE_SECONDS", -1.0)
    begun, lanes = PartialPuts(), MemoryLanes([])
    puts = [CountedPut(begun) for _ in range(100)]
    over = threading.Event()

    def want_room() -> None:
        while not over.is_set():
            begun.make_way(b"v", lanes)

    wanting = threading.Thread(target=want_room)
    wanting.start()
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        for put in puts:
            while put.piece(lanes) and put.held and len(begun) and not put.let_go:
                pass
            put.end(lanes)
    finally:
        sys.setswitchinterval(interval)
        over.set()
        wanting.join()
    assert {put.let_go for put in puts} == {1}
    assert begun.bytes_held == 0
    assert len(begun) == 0


def test_volumes_of_an_agent_share_one_bound() -> None:
    assert BEGUN_BYTES == 256 << 20
    shared = PartialPuts(UNIT)
    pool = MemoryPool((1,), value_bytes=len(VALUE), unit_bytes=UNIT, suite="plain+crc64")
    one, other = pool.agent(), pool.agent(timing=Timing())
    one.volume.begun = other.volume.begun = shared
    held = begin(one, 1)
    with pytest.raises(PutRefused, match="in pieces"):
        begin(other, 2)
    one.lanes.clock = other.lanes.clock = 2000.0
    last = begin(other, 2)
    drop(one, held)
    drop(other, last)
    assert shared.bytes_held == 0
