"""How a value that waits ends, and which puts must not begin to wait."""

from __future__ import annotations

import pytest

from agent.pool.access import serve
from agent.pool.counters import MissCause
from agent.pool.errors import PutRefused
from agent.pool.write.write_back import Waiting, WriteBack
from tests.support.pool.memory_pool import MemoryPool, PoolAgent, key_of

ROOM = 1 << 16


@pytest.fixture
def agent() -> PoolAgent:
    agent = MemoryPool().agent()
    agent.served = serve(agent.volume, back=WriteBack(agent.volume, ROOM))
    return agent


def waiting(agent: PoolAgent) -> WriteBack:
    assert agent.served.back is not None
    return agent.served.back


def put(agent: PoolAgent, value: bytes) -> Waiting:
    writing = agent.served.writer(key_of(7), length=len(value))
    assert agent.channel.run(writing.write(agent.channel, 0, memoryview(value), agent.deadline()))
    found = waiting(agent).find(writing.pseudonym)
    assert found is not None
    return found


def get(agent: PoolAgent) -> bytes | MissCause:
    reading, into = agent.served.reader(key_of(7)), bytearray(16384)
    count = agent.channel.run(reading.read(agent.channel, 0, memoryview(into), agent.deadline(0.05)))
    reading.close()
    return reading.cause if reading.cause is not None else bytes(into[:count])


@pytest.mark.parametrize("end", ["given up", "given up while idle", "stored"])
def test_the_end_of_a_value_leaves_a_later_one_of_its_key(agent: PoolAgent, end: str) -> None:
    back = waiting(agent)
    first = put(agent, b"1" * 100)
    assert back.oldest() is first, "the thread that stores has picked it up"
    assert agent.channel.run(agent.served.delete(agent.channel, key_of(7), agent.deadline()))
    second = put(agent, b"2" * 9000)
    if end == "given up":
        back.give_up(first, agent.channel)
    elif end == "given up while idle":
        assert back.give_up_idle(first, agent.channel)
    else:
        assert agent.channel.run(back.store(agent.channel, first, agent.deadline()))
    assert get(agent) == b"2" * 9000
    assert (back.bytes_held, back.lost, agent.tally.puts_lost) == (9000, 0, 0), "the first was deleted"
    assert agent.channel.run(back.store(agent.channel, second, agent.deadline()))
    assert (back.bytes_held, len(back)) == (0, 0)
    assert get(agent) == b"2" * 9000


def test_a_value_that_is_being_removed_is_not_given_up(agent: PoolAgent) -> None:
    back, value = waiting(agent), put(agent, b"1" * 100)
    with value.lock:
        assert not back.give_up_idle(value, agent.channel)
    assert back.lost == 0
    assert back.give_up_idle(value, agent.channel)
    assert (back.lost, back.bytes_held) == (1, 0)


class UsedUp:
    """The count of a key that has sealed what it may."""

    is_used_up = True
    part = 1.0

    def count(self) -> None:
        raise AssertionError("nothing is sealed")


@pytest.mark.interpreted
def test_a_key_that_is_used_up_acknowledges_nothing(agent: PoolAgent) -> None:
    agent.volume.codec.count_in(UsedUp())
    with pytest.raises(PutRefused, match="rotate it"):
        put(agent, b"1" * 100)
    assert (waiting(agent).bytes_held, len(waiting(agent))) == (0, 0)
    assert (agent.tally.puts_refused, agent.tally.puts_written_back) == (1, 0)


def full_beside_one_that_is_away() -> tuple[MemoryPool, PoolAgent, WriteBack, Waiting]:
    """A volume without a free slot, of whose two enclosures one is away; and a value that waits for it."""
    pool = MemoryPool((1, 1), value_bytes=16384)
    agent = pool.agent()
    for number in range(1000, 1000 + 128):
        agent.put(key_of(number), b"old")
    agent.served = serve(agent.volume, back=WriteBack(agent.volume, ROOM))
    back, value = waiting(agent), put(agent, b"new")
    pool.namespaces[1].down = True
    agent.age_directories()
    return pool, agent, back, value


def test_a_full_set_beside_an_enclosure_that_is_away_is_waited_for() -> None:
    """Nothing is evicted meanwhile; that there is no slot is no reason to lose what was acknowledged."""
    pool, agent, back, value = full_beside_one_that_is_away()
    assert not agent.channel.run(back.store(agent.channel, value, agent.deadline()))
    assert get(agent) == b"new", "it is served from memory"
    pool.namespaces[1].down = False
    agent.age_directories()
    assert agent.channel.run(back.store(agent.channel, value, agent.deadline()))
    assert (back.lost, len(back), agent.tally.puts_lost) == (0, 0, 0)
    assert get(agent) == b"new"


def test_one_that_outlives_its_time_is_given_up_and_why_is_known() -> None:
    _, agent, back, value = full_beside_one_that_is_away()
    back.keep_seconds = 0.0
    assert agent.channel.run(back.store(agent.channel, value, agent.deadline()))
    assert (back.lost, len(back)) == (1, 0)
    assert "no slot for this key that may be used while an enclosure is away" in back.last_refusal
