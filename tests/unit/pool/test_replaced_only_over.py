"""`replace` with `only_over`: a value that may take the place of some values alone."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from agent.pool.errors import PutRefused, ReplacedMeanwhile
from agent.pool.write.put import PUT_FRESH_SECONDS
from tests.support.pool.memory_pool import MemoryPool, PoolAgent
from tests.unit.pool.test_replaced_values import KEY, named, newest, replace, slot_at


def replace_over(agent: PoolAgent, value: bytes, only_over: Callable[[bytes | None], bool]) -> None:
    steps = agent.served.replace(agent.channel, KEY, value, agent.deadline(), only_over=only_over)
    agent.channel.run(steps)


def over(*values: bytes) -> Callable[[bytes | None], bool]:
    return lambda value: value is None or value in values


@pytest.fixture
def pool() -> MemoryPool:
    return MemoryPool((2, 2))


def test_it_is_stored_where_nothing_is_and_over_what_it_may_replace(pool: MemoryPool) -> None:
    one, other = pool.agent(), pool.agent()
    replace_over(one, b"first", over())
    replace_over(other, b"second", over(b"first"))
    assert newest(one) == newest(other) == b"second"
    assert len(named(pool, one)) == 1


def test_over_any_other_value_it_is_refused_and_leaves_nothing(pool: MemoryPool) -> None:
    one, other = pool.agent(), pool.agent()
    replace(one, b"first")
    replace(other, b"second")
    with pytest.raises(ReplacedMeanwhile):
        replace_over(one, b"third", over(b"first"))
    assert newest(one) == newest(other) == b"second"
    assert len(named(pool, one)) == 1
    assert not any(cached.reserved for cached in one.volume.cache.snapshot())
    replace_over(one, b"third", over(b"second"))
    assert newest(other) == b"third"


def test_what_has_expired_is_nobodys(pool: MemoryPool) -> None:
    agent = pool.agent()
    agent.put(KEY, b"short-lived", ttl_seconds=5)
    agent.channel.clock += 10
    replace_over(agent, b"next", over())
    assert newest(agent) == b"next"


def test_a_value_that_does_not_come_whole_is_not_replaced(pool: MemoryPool) -> None:
    agent = pool.agent()
    replace(agent, b"first")
    ((namespace, offset, slot, _),) = named(pool, agent)
    pool.namespaces[namespace].flip(slot_at(pool, offset, slot) + 20)
    with pytest.raises(PutRefused) as refused:
        replace_over(agent, b"second", over(b"first"))
    assert refused.value.cause is not None, "an enclosure's fault"
    replace(agent, b"second")
    assert newest(agent) == b"second"


@pytest.mark.parametrize("is_other_stored", [False, True])
def test_what_was_judged_long_ago_is_looked_at_once_more(pool: MemoryPool, is_other_stored: bool) -> None:
    """The read of the older value took long, so another agent may have stored one meanwhile."""
    one, other = pool.agent(), pool.agent()
    replace(one, b"first")

    def slow(value: bytes | None) -> bool:
        one.channel.clock += PUT_FRESH_SECONDS + 0.001
        if is_other_stored:
            replace(other, b"of another")
        return value == b"first"

    if is_other_stored:
        with pytest.raises(ReplacedMeanwhile):
            replace_over(one, b"second", slow)
    else:
        replace_over(one, b"second", slow)
    assert newest(one) == newest(other) == (b"of another" if is_other_stored else b"second")
