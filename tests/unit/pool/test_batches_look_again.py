"""A batch of puts goes by nothing that is old or in doubt: directories, and the keys that it seals by."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from agent.inline.key_use import KeyUseBook
from agent.pool.errors import IN_DOUBT, PutRefused
from agent.pool.volume.key_transition import MAP_AGE_SECONDS, QUIET_SECONDS
from agent.pool.write.batch import UNTRIED, write_together
from tests.support.pool.lending import nothing_is_held
from tests.support.pool.memory_channel import MemoryPending
from tests.support.pool.memory_pool import MemoryPool, PoolAgent, key_of
from tests.support.pool.stuck_writes import Driven, StuckWrites
from tests.unit.agent.tenants.test_key_rotation import Shelf
from tests.unit.agent.tenants.test_rotation_ends import Watching, publish
from tests.unit.agent.tenants.test_vouching_in_time import Slow


def together(agent: Any, keys: range, wait: float = 5.0) -> Any:
    values = [memoryview(bytes([key % 256]) * 500) for key in keys]
    return write_together(agent.volume, agent.channel, [key_of(key) for key in keys], values, wait)


def two_agents(sets: tuple[int, ...], keys: range = range(0)) -> tuple[MemoryPool, PoolAgent, PoolAgent]:
    """The first has stored some keys."""
    pool = MemoryPool(sets)
    ours, others = pool.agent(), pool.agent()
    for key in keys:
        ours.put(key_of(key), bytes([key]) * 500)
    ours.channel = StuckWrites(pool.namespaces)
    return pool, ours, others


def is_there(pool: MemoryPool, *keys: int) -> list[bool]:
    fresh = pool.agent()
    return [fresh.get(key_of(key)) == bytes([key % 256]) * 500 for key in keys]


def are_kept(pool: MemoryPool, ours: PoolAgent, theirs: PoolAgent, keys: range) -> bool:
    """Values of another agent, those aside whose slots ours has chosen meanwhile: two agents may do that."""
    chosen = {ours.where(key_of(key)) for key in range(4)}
    others = [key for key in keys if theirs.where(key_of(key)) not in chosen]
    return len(others) > len(keys) // 2 and all(is_there(pool, *range(4), *others))


def damage(agent: PoolAgent, key: int) -> tuple[int, int]:
    """Flip a bit in the entry of a key, on flash: namespace and offset of its directory."""
    namespace, slot_at, directory_at = agent.where(key_of(key))
    settings = agent.volume.settings
    slot = (slot_at - directory_at - settings.directory_bytes) // settings.slot_bytes
    agent.channel.namespaces[namespace].flip(directory_at + 64 * slot + 20)
    return namespace, directory_at


# -- directories ----------------------------------------------------------------------------------------


def test_a_directory_that_was_read_long_ago_is_read_again_before_it_is_written() -> None:
    """Another agent has stored a value there while the batch waited for its second directory."""
    pool, ours, others = two_agents((1, 1))
    pool.namespaces[1].hung = True
    driven = Driven(ours.channel, together(ours, range(4)))
    assert driven.run(1.0) is None
    pool.namespaces[1].hung = False
    for key in range(10, 30):
        others.put(key_of(key), bytes([key]) * 500)
    assert driven.run(10.0) == [True] * 4
    assert are_kept(pool, ours, others, range(10, 30))
    nothing_is_held(ours)


def test_so_is_one_whose_writer_was_waited_for() -> None:
    pool, ours, others = two_agents((1,), range(50, 51))
    (cached,) = ours.cache.snapshot()
    assert cached.writer.acquire(blocking=False)
    driven = Driven(ours.channel, together(ours, range(4)))
    assert driven.run(1.0) is None
    for key in range(10, 30):
        others.put(key_of(key), bytes([key]) * 500)
    cached.writer.release()
    assert driven.run(10.0) == [True] * 4
    assert are_kept(pool, ours, others, range(10, 30))
    nothing_is_held(ours)


def test_a_directory_that_came_with_damage_is_left_to_puts_of_their_own() -> None:
    pool = MemoryPool((1,))
    first = pool.agent()
    first.put(key_of(50), b"x" * 500)
    damage(first, 50)
    agent = pool.agent()
    writes = pool.namespaces[0].writes
    assert agent.channel.run(together(agent, range(4))) == [UNTRIED] * 4
    assert pool.namespaces[0].writes == writes
    nothing_is_held(agent)


@pytest.mark.parametrize("is_healed", [False, True])
def test_one_that_came_so_meanwhile_is_not_written_before_it_came_whole(is_healed: bool) -> None:
    """The damage was on the way, or is flash's own, which takes looks for longer than the call has time."""
    pool, agent, _ = two_agents((1,), range(50, 54))
    (cached,) = agent.cache.snapshot()
    assert cached.writer.acquire(blocking=False)
    driven = Driven(agent.channel, together(agent, range(4), wait=0.6))
    assert driven.run(0.3) is None
    place = damage(agent, 50)
    block = bytearray(agent.volume.settings.directory_bytes)
    pool.namespaces[0].load(place[1], memoryview(block))
    cached.accept(memoryview(block), agent.channel.now(), cached.writes, holds_writer=True)
    assert cached.in_doubt
    writes = pool.namespaces[0].writes
    if is_healed:
        damage(agent, 50)
    cached.writer.release()
    became = driven.run(10.0)
    assert became is not None
    if is_healed:
        assert became == [True] * 4
        assert all(is_there(pool, *range(4), *range(50, 54)))
    else:
        assert [str(one) for one in became] == [IN_DOUBT] * 4
        assert pool.namespaces[0].writes == writes
    nothing_is_held(agent)


# -- keys -----------------------------------------------------------------------------------------------


@pytest.fixture
def shelf(tmp_path: Path) -> Shelf:
    shelf = Shelf(tmp_path, share=0.4)
    publish(shelf, shelf.pool_map)
    return shelf


def refusals(became: list[Any]) -> set[str]:
    assert all(isinstance(one, PutRefused) for one in became)
    return {str(one) for one in became}


def test_a_batch_of_an_agent_that_was_stopped_asks_whether_its_key_was_dropped(shelf: Shelf) -> None:
    agent = Watching(shelf)
    agent.pass_time(2)
    publish(shelf, shelf.rotate())
    publish(shelf, shelf.end())
    agent.channel.clock += QUIET_SECONDS
    writes = sum(each.writes for each in shelf.namespaces)
    assert refusals(agent.channel.run(together(agent, range(6)))) == {"its key was dropped"}
    assert sum(each.writes for each in shelf.namespaces) == writes
    agent.pass_time(2)
    assert agent.channel.run(together(agent, range(6))) == [True] * 6
    assert Watching(shelf).left() == 0


def test_a_map_that_is_not_read_in_time_makes_a_batch_late(shelf: Shelf) -> None:
    agent = Slow(shelf)
    agent.channel.map_is_silent = True
    began = agent.channel.now()
    (why,) = refusals(agent.channel.run(together(agent, range(6))))
    assert "could not be read" in why
    assert agent.channel.now() - began <= 5.0
    agent.channel.map_is_silent = False
    assert agent.channel.run(together(agent, range(6))) == [True] * 6


@pytest.mark.parametrize("is_dropped", [True, False])
def test_what_takes_long_to_be_answered_asks_again_before_it_is_acknowledged(
    is_dropped: bool, shelf: Shelf
) -> None:
    agent = Slow(shelf)
    agent.pass_time(2)
    assert agent.channel.run(together(agent, range(100, 106))) == [True] * 6
    write, sent = agent.channel.write, []

    def writes(*args: Any, **more: Any) -> MemoryPending:
        if not sent and is_dropped:
            publish(shelf, shelf.rotate())
            publish(shelf, shelf.end())
        sent.append(args)
        agent.channel.seconds = MAP_AGE_SECONDS + 0.5
        pending = write(*args, **more)
        agent.channel.seconds = 0.0
        return pending

    agent.channel.write = writes  # type: ignore[method-assign]
    became = agent.channel.run(together(agent, range(6)))
    assert sent
    if is_dropped:
        assert refusals(became) == {"its key was dropped"}
    else:
        assert became == [True] * 6


@pytest.mark.expects_log("has sealed half of what it may")
def test_a_key_that_is_used_up_seals_nothing_of_a_batch(tmp_path: Path) -> None:
    """More than one key may seal would be no secret any more."""
    pool = MemoryPool((1, 1))
    agent = pool.agent()
    use = KeyUseBook(tmp_path, 10).use_of(agent.volume.codec.fingerprint, 12)
    agent.volume.codec.count_in(use)
    became = agent.channel.run(together(agent, range(12)))
    assert became == [True] * 12
    assert refusals(agent.channel.run(together(agent, range(20, 26)))) == {agent.volume.used_up}
    assert use.writes == 12
    nothing_is_held(agent)


# -- a call that breaks off -----------------------------------------------------------------------------


def test_a_call_that_breaks_off_before_its_values_were_sent_keeps_no_slot() -> None:
    """Another thread has their set's writer."""
    _, agent, _ = two_agents((1,), range(50, 51))
    (cached,) = agent.cache.snapshot()
    assert cached.writer.acquire(blocking=False)
    driven = Driven(agent.channel, together(agent, range(6)))
    assert driven.run(0.5) is None
    assert len(cached.reserved) == len(agent.volume.key_locks) == 6
    driven.steps.close()
    assert cached.writer.locked(), "it is not the call's"
    cached.writer.release()
    nothing_is_held(agent)
    assert not len(agent.volume.in_doubt_writes), "nothing of it was sent"
    assert not cached.cooldown_until
