"""Puts that wait for their next piece: what they hold is bounded, and idle ones make way for others."""

from __future__ import annotations

import contextlib
import errno
import sys
import threading

import pytest

from agent.pool.counters import MissCause
from agent.pool.errors import PutRefused
from agent.pool.format.directory import SLOTS_PER_SET
from agent.pool.kv.put import KvWriter
from agent.pool.steps import IoChannel, Steps
from agent.pool.volume.puts_in_pieces import (
    BEGUN_BYTES,
    IDLE_SECONDS,
    STALLED_SECONDS,
    PutInPieces,
    PutsInPieces,
)
from agent.pool.volume.quota import Limits, Measured, Quota
from agent.pool.volume.settings import Timing
from agent.pool.volume.volume import TenantShare
from agent.pool.write.put import SlotWriter
from agent.pool.write.writer_base import PutState, Writer
from agent.sim.seeded_scheduler import StepScheduler
from host_shim.control_wire import FLAG_NO_ANSWER, Operation, Outcome, Request, data_offset
from tests.support.engines.session_door import SessionDoor
from tests.support.pool.memory_pool import MemoryPool, PoolAgent, key_of
from tests.support.sim.kv_flash import SimKvChannel, SimKvNamespace, kv_volume

UNIT = 1 << 16
VALUE = bytes(range(256)) * (2 * UNIT // 256)
ONE_SET = (1,)


def agent_with(sets: tuple[int, ...] = (4, 4), places: int = 2) -> PoolAgent:
    """One in which `places` units may wait."""
    agent = MemoryPool(sets, value_bytes=len(VALUE), unit_bytes=UNIT, suite="plain+crc64").agent()
    agent.volume.puts_in_pieces = PutsInPieces(places * UNIT)
    return agent


def go_on(agent: PoolAgent, writing: SlotWriter, start: int, end: int) -> bool:
    steps = writing.write(agent.channel, start, memoryview(VALUE)[start:end], agent.deadline())
    return agent.channel.run(steps)


def begin(agent: PoolAgent, number: int, size: int = 1) -> SlotWriter:
    writing = SlotWriter(agent.volume, key_of(number), length=len(VALUE))
    assert not go_on(agent, writing, 0, size)
    return writing


def drop(agent: PoolAgent, *writings: SlotWriter) -> None:
    for writing in writings:
        writing.drop()


def reserved(agent: PoolAgent) -> int:
    return sum(len(cached.reserved) for cached in agent.cache.snapshot())


def assert_nothing_held(agent: PoolAgent) -> None:
    assert (agent.volume.puts_in_pieces.bytes_held, len(agent.volume.puts_in_pieces), reserved(agent)) == (
        0,
        0,
        0,
    )
    assert all(cached.users == 0 for cached in agent.cache.snapshot())


def test_a_value_that_makes_way_is_deleted_on_flash_though_the_put_is_given_up() -> None:
    pool = MemoryPool(ONE_SET, value_bytes=len(VALUE), unit_bytes=UNIT, suite="plain+crc64")
    agent = pool.agent()
    keys = [key_of(number) for number in range(SLOTS_PER_SET)]
    for key in keys:
        assert agent.put(key, VALUE).stored
    waiting = begin(agent, SLOTS_PER_SET)
    [victim] = [key for key in keys if isinstance(agent.get(key), MissCause)]
    agent.delete(victim)
    assert isinstance(pool.agent().get(victim), MissCause)
    drop(agent, waiting)
    agent.age_directories()
    assert isinstance(agent.get(victim), MissCause)
    assert all(agent.get(key) == VALUE for key in keys if key != victim)
    assert_nothing_held(agent)


def test_what_waits_in_memory_is_bounded_and_whole_values_go_on() -> None:
    agent = agent_with()
    first, second = begin(agent, 1), begin(agent, 2, 1000)
    with pytest.raises(PutRefused, match="in pieces") as refused:
        begin(agent, 3)
    assert refused.value.cause is MissCause.LATE
    assert agent.tally.puts_refused == 1
    assert agent.volume.puts_in_pieces.bytes_held == 2 * UNIT
    assert agent.put(key_of(4), VALUE).stored
    # Whole units hold nothing, and what is begun keeps its room from one piece to the next.
    in_units = begin(agent, 5, UNIT)
    assert not go_on(agent, second, 1000, UNIT + 1000)
    assert agent.volume.puts_in_pieces.bytes_held == 2 * UNIT
    assert go_on(agent, second, UNIT + 1000, len(VALUE))
    assert agent.volume.puts_in_pieces.bytes_held == UNIT
    assert go_on(agent, in_units, UNIT, len(VALUE))
    assert [agent.get(key_of(number)) for number in (2, 4, 5)] == [VALUE] * 3
    third = begin(agent, 3)
    drop(agent, first, third)
    assert_nothing_held(agent)


def test_the_last_piece_of_a_value_needs_no_room() -> None:
    agent = agent_with(places=0)
    length = UNIT + 5000
    writing = SlotWriter(agent.volume, key_of(1), length=length)
    assert not go_on(agent, writing, 0, UNIT)
    assert go_on(agent, writing, UNIT, length)
    assert agent.get(key_of(1)) == VALUE[:length]
    assert agent.tally.bytes_copied == 0
    assert_nothing_held(agent)


def test_a_stalled_put_makes_way_for_anothers_bytes_and_does_not_go_on() -> None:
    agent = agent_with()
    idle, at_its_close = begin(agent, 1), SlotWriter(agent.volume, key_of(2))
    assert not go_on(agent, at_its_close, 0, 10)
    agent.channel.clock += STALLED_SECONDS / 2
    with pytest.raises(PutRefused):
        begin(agent, 3)
    agent.channel.clock += STALLED_SECONDS
    others = [begin(agent, 3), begin(agent, 4)]
    with pytest.raises(PutRefused):
        begin(agent, 5)
    assert reserved(agent) == 2
    assert agent.volume.puts_in_pieces.bytes_held == 2 * UNIT
    for _ in range(2):
        with pytest.raises(PutRefused, match="no byte of it came") as refused:
            go_on(agent, idle, 1, len(VALUE))
        assert refused.value.cause is MissCause.LATE
        with pytest.raises(PutRefused, match="no byte of it came"):
            agent.channel.run(at_its_close.finish(agent.channel, agent.deadline()))
    drop(agent, idle, at_its_close)
    assert agent.volume.puts_in_pieces.bytes_held == 2 * UNIT
    assert not idle.stored
    drop(agent, *others)
    assert_nothing_held(agent)
    assert agent.put(key_of(1), VALUE).stored


def test_while_nobody_wants_its_room_a_put_may_take_its_time() -> None:
    agent = agent_with()
    slow = begin(agent, 1)
    agent.channel.clock += 100 * IDLE_SECONDS
    assert agent.put(key_of(2), VALUE).stored
    assert go_on(agent, slow, 1, len(VALUE))
    assert agent.get(key_of(1)) == VALUE


def test_idle_puts_make_way_for_those_who_find_no_slot() -> None:
    agent = agent_with(ONE_SET, SLOTS_PER_SET)
    begun = [begin(agent, number) for number in range(SLOTS_PER_SET)]
    with pytest.raises(PutRefused, match="no slot"):
        agent.put(key_of(100), VALUE)
    agent.channel.clock += IDLE_SECONDS / 2
    assert not go_on(agent, begun[0], 1, 2)
    agent.channel.clock += IDLE_SECONDS / 2 + 1
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
    agent.channel.clock += IDLE_SECONDS + 1
    assert agent.put(key_of(101), VALUE).stored
    assert agent.tally.evictions == 0
    drop(agent, idle)
    assert_nothing_held(agent)


def test_an_idle_put_makes_way_in_the_tenants_quota() -> None:
    agent = agent_with()
    measured = Measured(agent.volume.occupancy, agent.volume.settings.slot_bytes)
    agent.volume.change(tenant=TenantShare(Quota([measured], Limits(slots=2)), None))
    agent.put(key_of(1), VALUE)
    idle = begin(agent, 2)
    agent.channel.clock += IDLE_SECONDS + 1
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
    agent.channel.clock += STALLED_SECONDS + 1
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
    volume.puts_in_pieces = PutsInPieces(2 * volume.settings.value_bytes)
    channel = SimKvChannel(scheduler, [SimKvNamespace(16 << 20)], "one")

    def piece(writing: KvWriter, at: int, data: bytes) -> bool:
        done: bool = scheduler.finish(writing.write(channel, at, memoryview(data), scheduler.now + 1))
        return done

    begun = [KvWriter(volume, key_of(number), length=100) for number in range(2)]
    begun += [KvWriter(volume, key_of(number)) for number in range(2, 4)]
    assert not piece(begun[0], 0, b"x")
    assert not piece(begun[2], 0, b"x")
    with pytest.raises(PutRefused, match="in pieces"):
        piece(begun[3], 0, b"x")
    scheduler.now += STALLED_SECONDS / 2
    assert not piece(begun[0], 1, b"x")
    scheduler.now += STALLED_SECONDS
    assert not piece(begun[1], 0, b"x")
    again = KvWriter(volume, key_of(3))
    assert not piece(again, 0, b"x")
    with pytest.raises(PutRefused, match="no byte of it came"):
        piece(begun[2], 1, b"x")
    assert piece(begun[0], 2, bytes(98))
    for writing in (*begun, again):
        writing.drop()
    assert volume.puts_in_pieces.bytes_held == 0
    assert len(volume.puts_in_pieces) == 0


class CountedPut(Writer):
    """Its bytes go once, whichever thread lets go of them."""

    let_go = 0

    def _take(self, channel: IoChannel, offset: int, data: memoryview, deadline: float) -> Steps[None]:
        yield from ()
        if self.state is PutState.NEW:
            self._enter(PutState.TAKING)
        self._wait_for_more(channel, 10)

    def _release(self) -> None:
        self.let_go += 1
        super()._release()


@pytest.mark.interpreted
def test_a_put_is_let_go_of_once_whoever_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """One thread brings pieces, another gives up all that wait: none is idle for so short a time else."""
    monkeypatch.setattr("agent.pool.volume.puts_in_pieces.IDLE_SECONDS", -1.0)
    agent = MemoryPool((1,)).agent()
    volume, channel, piece = agent.volume, agent.channel, memoryview(b"x")
    begun = volume.puts_in_pieces
    puts = [CountedPut(volume, key_of(number), length=100) for number in range(200)]
    over = threading.Event()

    def want_room() -> None:
        while not over.is_set():
            begun.make_way(volume.settings.volume_id, channel)

    wanting = threading.Thread(target=want_room)
    wanting.start()
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        for number, put in enumerate(puts):
            with contextlib.suppress(PutRefused):
                for _ in range(10_000 if number % 2 else 3):
                    channel.run(put.write(channel, 0, piece, agent.deadline()))
            put.drop()
    finally:
        sys.setswitchinterval(interval)
        over.set()
        wanting.join()
    assert {put.let_go for put in puts} == {1}
    assert {put.state for put in puts} == {PutState.REFUSED, PutState.DROPPED}
    assert begun.bytes_held == 0
    assert len(begun) == 0


def test_volumes_of_an_agent_share_one_bound() -> None:
    assert BEGUN_BYTES == 256 << 20
    shared = PutsInPieces(UNIT)
    pool = MemoryPool((1,), value_bytes=len(VALUE), unit_bytes=UNIT, suite="plain+crc64")
    one, other = pool.agent(), pool.agent(timing=Timing())
    one.volume.puts_in_pieces = other.volume.puts_in_pieces = shared
    held = begin(one, 1)
    with pytest.raises(PutRefused, match="in pieces"):
        begin(other, 2)
    one.channel.clock = other.channel.clock = 2000.0
    last = begin(other, 2)
    drop(one, held)
    drop(other, last)
    assert shared.bytes_held == 0


class Waiting(PutInPieces):
    """A put that holds some bytes, and knows whether it was given up."""

    def __init__(self, table: PutsInPieces, held: int) -> None:
        self.table, self.held, self.given_up = table, held, False

    def abandon(self, channel: IoChannel) -> None:
        self.given_up = True
        self.table.give_back(self.held)


@pytest.mark.interpreted
def test_a_volume_that_is_busy_with_all_the_room_leaves_another_as_much() -> None:
    """All are young: none of them has stalled."""
    channel, table = agent_with().channel, PutsInPieces(8 * UNIT)

    def begun(volume: bytes) -> Waiting | None:
        put = Waiting(table, UNIT)
        return put if table.add(put, volume, UNIT, channel) else None

    greedy = [begun(b"greedy") for _ in range(8)]
    assert all(greedy)
    assert begun(b"greedy") is None, "its own are not given up for it"
    others = [begun(b"other") for _ in range(8)]
    assert [put is not None for put in others] == [True] * 4 + [False] * 4
    assert [put is not None and put.given_up for put in greedy] == [True] * 4 + [False] * 4
    assert table.bytes_held == 8 * UNIT
    third = begun(b"third")
    assert third is not None
    for volume, puts in ((b"greedy", greedy), (b"other", others), (b"third", [third])):
        for put in puts:
            if put is not None and table.take_out(put, volume):
                table.give_back(put.held)
    assert (table.bytes_held, len(table), sum(table._held.values())) == (0, 0, 0)
