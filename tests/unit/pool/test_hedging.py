"""Hedged reads: when the other copy is asked, who wins, and what the loser may not do."""

from __future__ import annotations

import pytest

from agent.pool.counters import MissCause
from agent.pool.format.sealed_slot import HEADER_BYTES
from agent.pool.maintenance.replication import work_off
from agent.pool.volume.hedging import DELAY_LEAST, FIRST_DELAY, SAMPLES_LEAST, SAVED_MAX, Hedge
from tests.support.pool.memory_channel import MemoryPending
from tests.support.pool.memory_pool import MemoryPool, PoolAgent, key_of

VALUE = bytes(range(256)) * 512


def stored() -> tuple[MemoryPool, PoolAgent, int]:
    """A value in two copies, and the namespace that is asked first."""
    pool = MemoryPool((1, 1), value_bytes=len(VALUE), copies=2)
    agent = pool.agent()
    agent.put(key_of(0), VALUE)
    agent.channel.run(work_off([agent.volume], agent.channel))
    assert agent.get(key_of(0)) == VALUE
    assert agent.tally.hedged_reads == 0, "what comes at once is not asked for twice"
    pseudonym = agent.volume.placement.pseudonym(key_of(0))
    sets = agent.volume.borrow_sets(pseudonym)
    agent.volume.give_back_sets(sets)
    return pool, agent, agent.volume.find(sets, pseudonym)[0].cached.namespace


def test_the_other_is_asked_when_the_first_does_not_come() -> None:
    pool, agent, first = stored()
    pool.namespaces[first].hung = True
    began = agent.channel.clock
    assert agent.get(key_of(0)) == VALUE
    assert agent.channel.clock - began == pytest.approx(FIRST_DELAY)
    tally = agent.tally
    assert (tally.hedged_reads, tally.hedge_wins) == (1, 1)
    assert tally.hedge_bytes == HEADER_BYTES + len(VALUE)
    assert tally.gets_hit == 2


def test_the_loser_writes_into_nothing_that_is_used() -> None:
    """The first answers after all, with rubbish, once it was given up: nobody's bytes change."""
    pool, agent, first = stored()
    target = pool.namespaces[first]
    target.hung = True
    late: list[tuple[memoryview, MemoryPending]] = []
    plain_read = agent.channel.read

    def read(namespace: int, offset: int, into: memoryview, *, more: bool = False) -> MemoryPending:
        pending = plain_read(namespace, offset, into)
        if namespace == first:
            late.append((into, pending))
        return pending

    agent.channel.read = read  # type: ignore[method-assign]
    into = bytearray(len(VALUE))
    from agent.pool.read.get import SlotReader

    reading = SlotReader(agent.volume, key_of(0))
    deadline = agent.channel.now() + 0.05
    assert agent.channel.run(reading.read(agent.channel, 0, memoryview(into), deadline)) == len(VALUE)
    [(buffer, pending)] = late
    assert pending.fault == "abandoned", "from here on the channel keep its bytes out of the buffer"
    buffer[:] = b"\xee" * len(buffer)  # What a medium that did not keep to that would do.
    assert bytes(into) == VALUE


def test_a_bad_winner_leaves_the_first_its_time() -> None:
    """The other copy comes first and does not prove itself; the first is asked again, and serves."""
    pool, agent, first = stored()
    target, other = pool.namespaces[first], pool.namespaces[1 - first]
    for at in sorted(other.blocks)[1:]:
        other.flip(at + 100)
    target.hung = True

    def wake() -> None:
        target.hung = False

    plain_read = agent.channel.read

    def read(namespace: int, offset: int, into: memoryview, *, more: bool = False) -> MemoryPending:
        if namespace != first:
            wake()
        return plain_read(namespace, offset, into)

    agent.channel.read = read  # type: ignore[method-assign]
    assert agent.get(key_of(0)) == VALUE
    assert (agent.tally.hedged_reads, agent.tally.gets_hit) == (1, 2)


def test_both_hung_is_one_miss_in_time() -> None:
    pool, agent, _ = stored()
    for namespace in pool.namespaces:
        namespace.hung = True
    began = agent.channel.clock
    assert agent.get(key_of(0)) is MissCause.LATE
    assert agent.channel.clock - began <= agent.volume.timing.read_deadline + 1e-9
    assert agent.tally.misses[MissCause.LATE] == 1


def test_what_is_trusted_is_asked_first() -> None:
    pool, agent, first = stored()
    pool.namespaces[first].suspect = True
    reads = pool.namespaces[first].reads
    assert agent.get(key_of(0)) == VALUE
    assert pool.namespaces[first].reads == reads


def test_hedges_are_a_share_of_the_gets() -> None:
    pool, agent, first = stored()
    pool.namespaces[first].hung = True
    served = 0
    for _ in range(60):
        served += agent.get(key_of(0)) == VALUE
    assert served == agent.tally.hedge_wins <= SAVED_MAX + 60 * 0.05
    assert agent.tally.misses[MissCause.LATE] == 60 - served


def test_the_delay_follows_the_quantile() -> None:
    hedge = Hedge()
    for _ in range(SAMPLES_LEAST - 1):
        hedge.took(0.0001)
    assert hedge.delay() == FIRST_DELAY
    for _ in range(100):
        hedge.took(0.0001)
    assert hedge.delay() == DELAY_LEAST
    for _ in range(60):
        hedge.took(0.003)
    assert hedge.delay() == 0.004096
    for _ in range(5000):
        hedge.took(0.0001)
    assert hedge.delay() == DELAY_LEAST, "what was long ago is forgotten"


def test_a_cold_get_with_one_enclosure_hung_comes_from_the_other() -> None:
    pool, _, first = stored()
    for hung in (first, 1 - first):
        pool.namespaces[hung].hung = True
        assert pool.agent().get(key_of(0)) == VALUE
        pool.namespaces[hung].hung = False
