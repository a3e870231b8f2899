"""Policies of a volume: write-back, write on second use, and the gate that says late at once."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.pool.access import serve
from agent.pool.counters import MissCause
from agent.pool.errors import BadPut, PutRefused, TooLong
from agent.pool.read.recompute_gate import PROBE_SECONDS, TRUSTED_BYTES, RecomputeGate
from agent.pool.volume.bandwidth import Bandwidth
from agent.pool.volume.volume import TenantShare
from agent.pool.write import write_back
from agent.pool.write.admission import SecondUse
from agent.pool.write.write_back import VALUE_COST, BackWriter, Storing, WriteBack
from host_shim.control_wire import Operation, Outcome, Request, data_offset
from host_shim.pool import Pool
from tests.support.engines.session_door import SessionDoor
from tests.support.pool.memory_pool import MemoryPool, PoolAgent, key_of, stage_now

MIB = 1 << 20


def value_of(number: int, size: int = 9000) -> bytes:
    return random.Random(number).randbytes(size)


def put(agent: PoolAgent, number: int, size: int = 9000) -> object:
    value = value_of(number, size)
    writing = agent.served.writer(key_of(number), length=size)
    assert agent.channel.run(writing.write(agent.channel, 0, memoryview(value), agent.deadline()))
    return writing


def get(agent: PoolAgent, number: int) -> bytes | MissCause:
    reading, into = agent.served.reader(key_of(number), agent.prestage), bytearray(16384)
    count = agent.channel.run(reading.read(agent.channel, 0, memoryview(into), agent.deadline(0.05)))
    reading.close()
    return reading.cause if reading.cause is not None else bytes(into[:count])


def writes(agent: PoolAgent) -> int:
    return sum(each.writes for each in agent.channel.namespaces)


# -- write-back -------------------------------------------------------------------------------------


@pytest.fixture
def back() -> PoolAgent:
    agent = MemoryPool().agent()
    agent.served = serve(agent.volume, back=WriteBack(agent.volume, 3 * (9000 + VALUE_COST)))
    return agent


def store_all(agent: PoolAgent) -> None:
    assert agent.served.back is not None
    storing = Storing([agent.served.back], threading.Event())
    storing.stop()
    storing.work(agent.channel, agent.channel)


def test_a_put_is_acknowledged_from_memory_and_stored_after_it(back: PoolAgent) -> None:
    put(back, 1)
    assert writes(back) == 0
    assert get(back, 1) == value_of(1)
    store_all(back)
    assert writes(back) > 0
    assert back.served.back is not None
    assert (len(back.served.back), back.served.back.bytes_held) == (0, 0)
    assert get(back, 1) == value_of(1)
    tally = back.tally
    assert (tally.puts_written_back, tally.puts, tally.puts_lost, tally.gets_hit) == (1, 1, 0, 2)


def test_without_room_a_put_goes_through(back: PoolAgent) -> None:
    for number in range(4):
        put(back, number)
    assert (back.tally.puts_written_back, back.tally.puts) == (3, 1)
    assert [get(back, number) for number in range(4)] == [value_of(number) for number in range(4)]


def test_an_agent_that_dies_loses_what_it_had_yet_to_store(back: PoolAgent) -> None:
    put(back, 1)
    another = PoolAgent(back.channel.namespaces, back.volume.settings)
    assert another.get(key_of(1)) is MissCause.NEVER_STORED


def test_the_first_put_of_a_key_stays(back: PoolAgent) -> None:
    put(back, 1)
    again = back.served.writer(key_of(1), length=4)
    assert back.channel.run(again.write(back.channel, 0, memoryview(b"else"), back.deadline()))
    assert again.already_there
    assert get(back, 1) == value_of(1)
    assert back.served.back is not None
    assert back.served.back.bytes_held == 9000


def test_a_client_sees_what_waits_as_it_sees_what_is_stored(back: PoolAgent) -> None:
    with Pool("", sessions=1, parallel=1, files=SessionDoor(back)) as pool:
        kv = pool.volume("v")
        keys = [key_of(number) for number in range(3)]
        assert kv.put_many(keys, [value_of(number) for number in range(3)]) == [True] * 3
        assert writes(back) == 0
        assert kv.exists([*keys, key_of(9)]) == [True] * 3 + [False]
        assert kv.get(keys[0]) == value_of(0)
        assert kv.delete(keys[:2]) == [True, True]
        assert kv.delete(keys[:2]) == [False, False]
        assert kv.get(keys[0]) is None
        assert kv.pin(keys, ttl=60) == [False, False, True]
        store_all(back)
        pseudonym = back.volume.placement.pseudonym(keys[2])
        (found,) = back.volume.find(back.volume.borrow_sets(pseudonym), pseudonym)
        assert found.entry.pinned_until, "it is pinned where it is now"
        assert kv.exists(keys) == [False, False, True]
        assert kv.fetch(keys[:1], [bytearray(9000)])[0].outcome is Outcome.NEVER_STORED


def test_values_longer_than_a_workers_buffer_are_stored_in_pieces() -> None:
    agent = MemoryPool(value_bytes=3 * MIB, unit_bytes=MIB).agent()
    agent.served = serve(agent.volume, back=WriteBack(agent.volume, 4 * MIB))
    size = 2 * MIB + 5000
    value = value_of(7, size)
    writing = agent.served.writer(key_of(7), length=size)
    for at in range(0, size, 300_000):
        agent.channel.run(
            writing.write(agent.channel, at, memoryview(value)[at : at + 300_000], agent.deadline())
        )
    assert writing.finished
    store_all(agent)
    assert agent.tally.puts == 1
    assert agent.get(key_of(7)) == value


@pytest.mark.expects_log("1 acknowledged values could not be stored")
def test_what_flash_does_not_take_is_tried_again_and_given_up_in_the_end(
    back: PoolAgent, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(write_back, "RETRY_SECONDS", 0.0)
    put(back, 1)
    for namespace in back.channel.namespaces:
        namespace.down = True
    waiting = back.served.back
    assert waiting is not None
    value = waiting.oldest()
    assert value is not None
    assert not back.channel.run(waiting.store(back.channel, value, back.deadline()))
    assert get(back, 1) == value_of(1), "it still waits"
    back.channel.clock += waiting.keep_seconds
    store_all(back)
    assert (back.tally.puts_lost, waiting.bytes_held) == (1, 0)
    assert get(back, 1) is MissCause.ENCLOSURE_DOWN
    assert "1 acknowledged values could not be stored" in caplog.text
    assert back.tally.puts_refused == 0, "the put was acknowledged: it is lost, not refused"


@pytest.mark.expects_log("1 acknowledged values could not be stored")
def test_an_erased_volume_serves_nothing_that_waits(back: PoolAgent) -> None:
    put(back, 1)
    reading = back.served.reader(key_of(1))
    half = back.served.writer(key_of(2), length=9000)
    back.volume.change(erased=True)
    into = memoryview(bytearray(9000))
    assert back.channel.run(reading.read(back.channel, 0, into, back.deadline())) == 0
    assert reading.cause is MissCause.WRONG_KEY
    assert bytes(into) == bytes(9000)
    assert isinstance(get(back, 1), MissCause)
    with pytest.raises(PutRefused):
        back.channel.run(half.write(back.channel, 0, memoryview(bytes(9000)), back.deadline()))
    store_all(back)
    assert back.tally.puts_lost == 1


def test_half_a_value_is_not_kept(back: PoolAgent) -> None:
    waiting = back.served.back
    assert waiting is not None
    for spoil in ("drop", "finish", "hole", "long"):
        writing = back.served.writer(key_of(1), length=9000)
        assert isinstance(writing, BackWriter)
        back.channel.run(writing.write(back.channel, 0, memoryview(bytes(4096)), back.deadline()))
        assert waiting.bytes_held == 9000
        if spoil == "drop":
            writing.drop()
        elif spoil == "finish":
            with pytest.raises(BadPut):
                back.channel.run(writing.finish(back.channel, back.deadline()))
        elif spoil == "hole":
            with pytest.raises(BadPut):
                back.channel.run(writing.write(back.channel, 8192, memoryview(bytes(8)), back.deadline()))
        else:
            with pytest.raises(TooLong):
                back.channel.run(writing.write(back.channel, 4096, memoryview(bytes(9000)), back.deadline()))
            writing.drop()
        assert (len(waiting), waiting.bytes_held) == (0, 0)


@pytest.mark.expects_log("could not be stored", "1 acknowledged values could not be stored")
@pytest.mark.interpreted
def test_a_bug_while_storing_costs_that_value_and_no_other(
    back: PoolAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(2):
        put(back, number)
    first = [True]
    right = WriteBack._write

    def wrong(self: WriteBack, *arguments: object) -> Iterator[object]:
        if first.pop() if first else False:
            raise RuntimeError("a bug")
        return right(self, *arguments)  # type: ignore[arg-type, return-value]

    monkeypatch.setattr(WriteBack, "_write", wrong)
    store_all(back)
    assert (back.tally.puts_lost, back.tally.puts) == (1, 1)
    assert get(back, 1) == value_of(1)


def test_a_time_to_live_counts_from_the_put(back: PoolAgent) -> None:
    for number, seconds in ((1, 10), (2, 100)):
        writing = back.served.writer(key_of(number), length=9000, ttl_seconds=seconds)
        back.channel.run(writing.write(back.channel, 0, memoryview(value_of(number)), back.deadline()))
    back.channel.clock += 9
    assert get(back, 1) == value_of(1)
    back.channel.clock += 2
    assert get(back, 1) is MissCause.EXPIRED
    keys = [key_of(1), key_of(2)]
    causes = back.channel.run(back.served.lookup(back.channel, keys, back.deadline()))
    assert causes == [MissCause.EXPIRED, None]
    put(back, 1)
    assert back.tally.puts_already_there == 0, "what has expired is in nobody's way"
    store_all(back)
    assert get(back, 2) == value_of(2)
    back.channel.clock += 90
    assert get(back, 2) is MissCause.EXPIRED, "it was not born again on flash"
    assert get(back, 1) == value_of(1)


def test_what_has_expired_is_not_stored(back: PoolAgent) -> None:
    writing = back.served.writer(key_of(1), length=9000, ttl_seconds=10)
    back.channel.run(writing.write(back.channel, 0, memoryview(value_of(1)), back.deadline()))
    back.channel.clock += 10
    store_all(back)
    assert (writes(back), back.tally.puts_lost, back.tally.puts) == (0, 0, 0)


@pytest.mark.parametrize("length", [9000, None])
def test_a_second_put_that_goes_through_does_not_replace_one_that_waits(
    back: PoolAgent, length: int | None
) -> None:
    for number in range(3):
        put(back, number)
    other = back.served.writer(key_of(1), length=length)
    back.channel.run(other.write(back.channel, 0, memoryview(bytes(9000)), back.deadline()))
    back.channel.run(other.finish(back.channel, back.deadline()))
    assert (other.finished, other.already_there, other.stored, other.received) == (True, True, False, 9000)
    assert back.tally.puts_already_there == 1
    store_all(back)
    assert get(back, 1) == value_of(1)
    with pytest.raises(TooLong):
        put(back, 1, 1 << 20)


def test_a_put_that_is_refused_leaves_no_room_taken(back: PoolAgent) -> None:
    door = SessionDoor(back)
    session = door.open("")
    held = back.served.back
    assert held is not None
    first = Request(Operation.PUT, 1, "v", (key_of(1),), first_ticket=0, flags=1, lengths=(9000,))
    door.pwrite(session, first.encode(), 0)
    assert held.bytes_held == 0, "it takes room with its first bytes"
    door.pwrite(session, bytes(4000), data_offset(0))
    assert held.bytes_held == 9000
    keys = (key_of(2), key_of(3))
    bad = Request(Operation.PUT, 2, "v", keys, first_ticket=0, flags=1, lengths=(9000, 1 << 24))
    with pytest.raises(OSError, match="16777216 bytes"):
        door.pwrite(session, bad.encode(), 0)
    assert held.bytes_held == 9000, "the first is bound still"
    door.close(session)
    assert held.bytes_held == 0


def test_a_delete_or_pin_with_the_enclosure_away_leaves_what_waits(back: PoolAgent) -> None:
    put(back, 1)
    for namespace in back.channel.namespaces:
        namespace.down = True
    with pytest.raises(PutRefused):
        back.channel.run(back.served.delete(back.channel, key_of(1), back.deadline()))
    assert get(back, 1) == value_of(1)
    until = int(back.channel.wall()) + 100
    assert back.channel.run(back.served.pin(back.channel, key_of(1), until, back.deadline()))


class OneSeat(threading.BoundedSemaphore):
    """Nobody may wait here."""

    def acquire(self, *_: object, **__: object) -> bool:
        raise AssertionError("the thread of all tenants waits for one of them")


@pytest.mark.expects_log("1 acknowledged values could not be stored")
@pytest.mark.interpreted
def test_one_tenants_limit_holds_nobody_else_up(back: PoolAgent, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(write_back, "RETRY_SECONDS", 0.0)
    other = MemoryPool().agent()
    other.served = serve(other.volume, back=WriteBack(other.volume, 3 * 9000))
    bandwidth = Bandwidth(OneSeat(1), 1000)
    back.volume.change(tenant=TenantShare(None, bandwidth))
    bandwidth.charge(back.channel, 1 << 20)
    put(back, 1)
    put(other, 2)
    assert back.served.back is not None
    storing = Storing([back.served.back, other.served.back], threading.Event())
    assert not storing._oldest(0, back.channel, back.channel)
    assert storing._oldest(1, other.channel, other.channel)
    assert get(other, 2) == value_of(2)
    assert len(back.served.back) == 1
    back.channel.clock += back.served.back.keep_seconds
    storing.stop()
    storing.work(back.channel, back.channel)
    assert back.tally.puts_lost == 1


# -- second use -------------------------------------------------------------------------------------


def test_a_full_volume_makes_room_for_the_second_use_alone() -> None:
    agent = MemoryPool(sets=(1, 1)).agent()
    agent.served = serve(agent.volume, admission=SecondUse())
    stored = 0
    for number in range(400):
        if number > 300 and agent.tally.puts_declined:
            break
        put(agent, number)
        stored += 1
    assert agent.tally.evictions == 0, "nothing that lives goes for a first use"
    assert agent.tally.puts == 128
    assert agent.tally.puts_declined == stored - 128
    declined = stored - 1
    before = writes(agent)
    assert get(agent, declined) is MissCause.NEVER_STORED
    put(agent, declined)
    assert (agent.tally.puts, agent.tally.evictions) == (129, 1)
    assert writes(agent) > before
    assert get(agent, declined) == value_of(declined)


def test_a_declined_put_is_taken_whole_however_it_comes() -> None:
    agent = MemoryPool(sets=(1, 1)).agent()
    agent.served = serve(agent.volume, admission=SecondUse())
    for number in range(130):
        put(agent, number)
    declined = agent.tally.puts_declined
    before = writes(agent)
    in_pieces = agent.served.writer(key_of(1000), length=9000)
    for at in range(0, 9000, 4096):
        part = memoryview(value_of(1000))[at : at + 4096]
        done = agent.channel.run(in_pieces.write(agent.channel, at, part, agent.deadline()))
        assert done == (at + len(part) == 9000)
    file = agent.served.writer(key_of(1001))
    agent.channel.run(file.write(agent.channel, 0, memoryview(value_of(1001)), agent.deadline()))
    agent.channel.run(file.finish(agent.channel, agent.deadline()))
    for writing in (in_pieces, file):
        assert (writing.finished, writing.stored, writing.already_there, writing.received) == (
            True, False, False, 9000,
        )  # fmt: skip
    assert writes(agent) == before
    assert agent.tally.puts_declined == declined + 2


@given(st.lists(st.integers(0, 40), max_size=200), st.integers(2, 30))
def test_what_is_remembered_is_bounded_and_true(keys: list[int], most: int) -> None:
    memory, asked = SecondUse(most), set()
    for number in keys:
        key = bytes([number]) * 16
        seen = memory.was_seen(key)
        assert not seen or key in asked, "never taken for one that was seen"
        asked.add(key)
        assert len(memory._young) + len(memory._old) <= most
        assert memory.was_seen(key) or most < 4


# -- the gate ---------------------------------------------------------------------------------------


def measured(
    bytes_per_s: float, prefill_tokens_per_s: float = 1000, bytes_per_token: int = 2048
) -> RecomputeGate:
    """A gate that has seen 8 MiB come at this rate, up to second 100."""
    gate = RecomputeGate(prefill_tokens_per_s, bytes_per_token)
    took = 8 * MIB / bytes_per_s
    assert gate.begin(8 * MIB, 100.0 - took)
    gate.end(8 * MIB, 8 * MIB, 100.0)
    assert gate.begin(1, 100.0), "the one that is let through"
    gate.end(1, 1, 100.0)
    return gate


def test_what_computing_outruns_is_refused() -> None:
    assert measured(3e6).begin(MIB, 100.0), "2 MB/s are computed"
    assert not measured(1e6).begin(MIB, 100.0)


def test_those_under_way_count() -> None:
    gate = measured(5e6)
    assert [gate.begin(MIB, 100.0) for _ in range(3)] == [True, True, False]
    gate.end(MIB, MIB, 100.1)
    assert gate.begin(MIB, 100.1)


def test_without_a_measurement_nothing_is_refused() -> None:
    gate = RecomputeGate(1e9, 1 << 20)
    assert gate.bandwidth is None
    assert all(gate.begin(TRUSTED_BYTES // 4, 1.0) for _ in range(9))


def test_one_is_let_through_now_and_then_so_that_the_gate_opens_again() -> None:
    gate = measured(1e6)
    now, refused, probes = 100.0, 0, 0
    while not (gate.bandwidth or 0) > 3e6:
        now += 0.01
        if gate.begin(MIB, now):
            probes += 1
            gate.end(MIB, MIB, now + MIB / 1e9)
        else:
            refused += 1
        assert now < 200.0
    assert refused > probes * PROBE_SECONDS / 0.01 * 0.5
    assert gate.begin(MIB, now)


def test_what_did_not_come_is_time_without_bytes() -> None:
    gate = measured(1e9)
    assert gate.begin(MIB, 100.0)
    gate.end(MIB, 0, 110.0)
    assert (gate.bandwidth or 0) < 1e6


def test_after_an_outage_the_gate_opens_within_seconds() -> None:
    gate, now = measured(1e9), 100.0
    while now < 3700.0:
        now += 0.25
        if gate.begin(65536, now):
            gate.end(65536, 0, now + 0.05)
    assert (gate.bandwidth or 0.0) < 1e-9, "an hour without a byte"
    healed, let_through = now, 0
    while let_through < 8:
        now += 0.01
        if gate.begin(65536, now):
            let_through = let_through + 1 if now - healed < 60 else 0
            gate.end(65536, 65536, now + 0.0005)
        else:
            let_through = 0
        assert now < healed + 15.0


def test_a_value_that_is_read_in_pieces_counts_what_came() -> None:
    agent = MemoryPool(value_bytes=1 << 20).agent()
    agent.put(key_of(1), value_of(1, MIB))
    gate = measured(1e9)
    agent.served = serve(agent.volume, gate=gate)
    reading = agent.served.reader(key_of(1))
    for at in range(0, MIB, MIB // 8):
        into = memoryview(bytearray(MIB // 8))
        assert agent.channel.run(reading.read(agent.channel, at, into, agent.deadline())) == MIB // 8
        assert gate._under_way == 0
        assert gate._fetched_ever == 8 * MIB + 1 + at + MIB // 8


@pytest.mark.parametrize(("tokens", "size"), [(0.0, 1), (1.0, 0), (-1.0, 5)])
def test_a_gate_knows_both_of_its_figures(tokens: float, size: int) -> None:
    with pytest.raises(ValueError, match="tokens"):
        RecomputeGate(tokens, size)


def test_a_gated_get_is_late_without_a_read_and_memory_is_served_all_the_same() -> None:
    agent = MemoryPool().agent(prestage_bytes=1 << 20)
    for number in range(3):
        agent.put(key_of(number), value_of(number))
    assert agent.prestage is not None
    assert agent.channel.run(stage_now(agent.volume, agent.prestage, agent.channel, key_of(2)))
    agent.channel.clock = 100.0
    agent.served = serve(agent.volume, gate=measured(1e6))
    reads = sum(each.reads for each in agent.channel.namespaces)
    assert get(agent, 0) is MissCause.LATE
    assert sum(each.reads for each in agent.channel.namespaces) == reads
    assert get(agent, 2) == value_of(2), "it waits in memory"
    assert get(agent, 99) is MissCause.NEVER_STORED, "what is not there has no length to judge by"
    assert (agent.tally.gets_gated, agent.tally.misses[MissCause.LATE]) == (1, 1)
    agent.channel.clock += PROBE_SECONDS
    assert get(agent, 0) == value_of(0), "the one that is let through"
    assert agent.tally.gets_hit + agent.tally.gets_missed == 4
