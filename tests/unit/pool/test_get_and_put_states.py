"""The states of a get and of a put: every step that the tables name is reached, and no other one is taken."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest

from agent.pool.access import serve
from agent.pool.counters import MissCause
from agent.pool.errors import BadPut, PutRefused
from agent.pool.kv.put import KvWriter
from agent.pool.read import reader_base
from agent.pool.read.get import SlotReader
from agent.pool.read.reader_base import GetState
from agent.pool.steps import IoChannel
from agent.pool.volume.puts_in_pieces import IDLE_SECONDS, PutsInPieces
from agent.pool.write import writer_base
from agent.pool.write.admission import SecondUse
from agent.pool.write.put import SlotWriter
from agent.pool.write.write_back import WriteBack
from agent.pool.write.writer_base import FORGETFUL, UNDER_WAY, PutState, Writer
from agent.sim.seeded_scheduler import StepScheduler
from tests.support.pool.memory_pool import MemoryPool, PoolAgent, key_of
from tests.support.sim.kv_flash import SimKvChannel, SimKvNamespace, kv_volume

UNIT = 65536
VALUE = memoryview(bytes(range(256)) * (2 * UNIT // 256))


@pytest.fixture
def agent() -> PoolAgent:
    return MemoryPool((1,), value_bytes=len(VALUE), unit_bytes=UNIT).agent()


def ends(states: type, legal: set[tuple[GetState, GetState]] | set[tuple[PutState, PutState]]) -> set[object]:
    return set(states) - {state for state, _ in legal}  # type: ignore[call-overload]


def test_what_is_under_way_can_end_and_an_end_is_final() -> None:
    assert ends(PutState, writer_base.LEGAL) == set(PutState) - set(UNDER_WAY)
    assert ends(GetState, reader_base.LEGAL) == {GetState.MISS}
    reached = {PutState.NEW}
    while new := {to for state, to in writer_base.LEGAL if state in reached} - reached:
        reached |= new
    assert reached == set(PutState)


@pytest.mark.interpreted
def test_no_step_is_taken_that_the_tables_do_not_name(agent: PoolAgent) -> None:
    for state in PutState:
        for to in PutState:
            put = SlotWriter(agent.volume, key_of(1), length=10)
            put._state = state
            if (state, to) in writer_base.LEGAL:
                put._enter(to)
                assert put.state is to
                assert put.finished is (to not in UNDER_WAY and to not in FORGETFUL)
            else:
                with pytest.raises(AssertionError):
                    put._enter(to)
    for seen in GetState:
        for then in GetState:
            get = SlotReader(agent.volume, key_of(1))
            get._state = seen
            if (seen, then) in reader_base.LEGAL:
                get._enter(then)
            else:
                with pytest.raises(AssertionError):
                    get._enter(then)


def write(agent: PoolAgent, put: Writer, start: int, end: int) -> bool:
    return agent.channel.run(put.write(agent.channel, start, VALUE[start:end], agent.deadline()))


def refused_at_once(agent: PoolAgent) -> Writer:
    put = SlotWriter(agent.volume, key_of(1), length=10)
    agent.volume.change(erased=True)
    with pytest.raises(PutRefused):
        write(agent, put, 0, 1)
    return put


def refused_amid(agent: PoolAgent) -> Writer:
    put = SlotWriter(agent.volume, key_of(1), length=len(VALUE))
    write(agent, put, 0, UNIT)
    with pytest.raises(BadPut, match="written once"):
        write(agent, put, 0, UNIT)
    return put


def given_up_while_it_waits(agent: PoolAgent) -> Writer:
    put = SlotWriter(agent.volume, key_of(1), length=len(VALUE))
    write(agent, put, 0, 1)
    agent.channel.clock += IDLE_SECONDS + 1
    assert agent.volume.puts_in_pieces.make_way(agent.volume.settings.volume_id, agent.channel)
    with pytest.raises(PutRefused, match="no byte of it came"):
        write(agent, put, 1, 2)
    return put


def dropped_before_it_began(agent: PoolAgent) -> Writer:
    put = SlotWriter(agent.volume, key_of(1), length=10)
    put.drop()
    return put


def dropped_amid(agent: PoolAgent) -> Writer:
    put = SlotWriter(agent.volume, key_of(1), length=len(VALUE))
    write(agent, put, 0, UNIT)
    put.drop()
    return put


def stored_in_pieces(agent: PoolAgent) -> Writer:
    put = SlotWriter(agent.volume, key_of(1), length=len(VALUE))
    assert not write(agent, put, 0, UNIT)
    assert write(agent, put, UNIT, len(VALUE))
    return put


def there_before(agent: PoolAgent) -> Writer:
    stored_in_pieces(agent)
    put = SlotWriter(agent.volume, key_of(1), length=10)
    assert not write(agent, put, 0, 5)
    assert write(agent, put, 5, 10)
    return put


def there_at_its_end(agent: PoolAgent) -> Writer:
    put = SlotWriter(agent.volume, key_of(1))
    write(agent, put, 0, 1)
    stored_in_pieces(agent)
    agent.channel.run(put.finish(agent.channel, agent.deadline()))
    return put


def declined(agent: PoolAgent) -> Writer:
    served = serve(agent.volume, admission=SecondUse())
    for number in range(1000):
        put = served.writer(key_of(number), length=10)
        assert write(agent, put, 0, 10)
        if put.state is PutState.DECLINED:
            break
    return put


def written_back(agent: PoolAgent) -> Writer:
    put = serve(agent.volume, back=WriteBack(agent.volume, 1 << 20)).writer(key_of(1), length=10)
    assert not write(agent, put, 0, 5)
    assert write(agent, put, 5, 10)
    return put


def half_written_back(agent: PoolAgent) -> Writer:
    back = WriteBack(agent.volume, 1 << 20)
    put = serve(agent.volume, back=back).writer(key_of(1), length=10)
    write(agent, put, 0, 5)
    with pytest.raises(BadPut, match="5 bytes of a value of 10"):
        agent.channel.run(put.finish(agent.channel, agent.deadline()))
    assert back.bytes_held == 0
    return put


LIVES: dict[Callable[[PoolAgent], Writer], list[PutState]] = {
    refused_at_once: [PutState.NEW, PutState.REFUSED],
    refused_amid: [PutState.NEW, PutState.TAKING, PutState.WAITING, PutState.TAKING, PutState.REFUSED],
    given_up_while_it_waits: [PutState.NEW, PutState.TAKING, PutState.WAITING, PutState.REFUSED],
    dropped_before_it_began: [PutState.NEW, PutState.DROPPED],
    dropped_amid: [PutState.NEW, PutState.TAKING, PutState.WAITING, PutState.TAKING, PutState.DROPPED],
    stored_in_pieces: [PutState.NEW, PutState.TAKING, PutState.WAITING, PutState.TAKING, PutState.STORED],
    there_before: [PutState.NEW, PutState.ALREADY_THERE],
    there_at_its_end: [
        PutState.NEW, PutState.TAKING, PutState.WAITING, PutState.TAKING, PutState.ALREADY_THERE,
    ],
    declined: [PutState.NEW, PutState.DECLINED],
    written_back: [PutState.NEW, PutState.TAKING, PutState.STORED],
    half_written_back: [PutState.NEW, PutState.TAKING, PutState.REFUSED],
}  # fmt: skip


@pytest.mark.interpreted
@pytest.mark.parametrize("live", LIVES, ids=lambda live: live.__name__)
def test_a_put_lives_as_the_table_says_and_holds_nothing_at_its_end(
    live: Callable[[PoolAgent], Writer], agent: PoolAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    lived: dict[Writer, list[PutState]] = {}
    enter = Writer._enter

    def noting(put: Writer, state: PutState) -> None:
        lived.setdefault(put, [put.state]).append(state)
        enter(put, state)

    monkeypatch.setattr(Writer, "_enter", noting)
    put = live(agent)
    assert lived[put] == LIVES[live]
    assert put.finished
    assert len(agent.volume.puts_in_pieces) == agent.volume.puts_in_pieces.bytes_held == 0
    assert not any(each.reserved for each in agent.volume.cache.snapshot())
    if put.state in (PutState.REFUSED, PutState.DROPPED) and put.received:
        with pytest.raises((PutRefused, BadPut)):
            agent.channel.run(put.finish(agent.channel, agent.deadline()))
    else:
        agent.channel.run(put.finish(agent.channel, agent.deadline()))
    put.drop()
    assert lived[put] == LIVES[live], "an end is final"


def test_every_step_of_a_put_is_walked() -> None:
    walked = {step for states in LIVES.values() for step in itertools.pairwise(states)}
    assert walked == writer_base.LEGAL


def test_a_put_that_was_turned_away_may_be_tried_again(agent: PoolAgent) -> None:
    put = SlotWriter(agent.volume, key_of(1), length=10)
    for namespace in agent.channel.namespaces:
        namespace.hung = True
    with pytest.raises(PutRefused):
        write(agent, put, 0, 10)
    assert (put.state, put.finished) == (PutState.NEW, False)
    for namespace in agent.channel.namespaces:
        namespace.hung = False
    assert write(agent, put, 0, 10)
    assert put.stored


def test_a_put_to_a_kv_namespace_holds_nothing_at_its_end() -> None:
    scheduler, volume = StepScheduler(1), kv_volume((16 << 20,))
    volume.puts_in_pieces = PutsInPieces()
    channel: IoChannel = SimKvChannel(scheduler, [SimKvNamespace(16 << 20)], "one")
    put = KvWriter(volume, key_of(1), length=10)
    assert not scheduler.finish(put.write(channel, 0, memoryview(b"hello"), scheduler.now + 1))
    assert put.state is PutState.WAITING
    assert scheduler.finish(put.write(channel, 5, memoryview(b"world"), scheduler.now + 1))
    assert put.stored
    again = KvWriter(volume, key_of(1), length=10)
    assert scheduler.finish(again.write(channel, 0, memoryview(b"otherworld"), scheduler.now + 1))
    assert again.already_there
    assert volume.puts_in_pieces.bytes_held == 0


def test_a_get_is_counted_once_whatever_becomes_of_it(agent: PoolAgent) -> None:
    stored_in_pieces(agent)
    get, into = SlotReader(agent.volume, key_of(1)), memoryview(bytearray(UNIT))
    for at in (0, UNIT):
        assert agent.channel.run(get.read(agent.channel, at, into, agent.deadline())) == UNIT
        assert (agent.tally.gets_hit, agent.tally.gets_missed) == (1, 0)
    for cause in (MissCause.LATE, MissCause.CORRUPT):
        get.give_up(agent.channel, cause)
        assert (agent.tally.gets_hit, agent.tally.gets_missed) == (0, 1)
        assert get.cause is MissCause.LATE
