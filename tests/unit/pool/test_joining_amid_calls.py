"""Namespaces join, and the pool is settled, in the middle of puts, deletes and moves."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from agent.pool.counters import MissCause
from agent.pool.maintenance.migrate import Migration, Outcome
from agent.pool.maintenance.rebalance import VALUE_SECONDS
from agent.pool.volume.settings import VolumeSettings
from agent.pool.volume.volume import Found
from agent.pool.write.batch import write_together
from agent.pool.write.delete_and_pin import delete
from tests.support.pool.memory_channel import MemoryNamespace
from tests.support.pool.memory_pool import MemoryPool, PoolAgent, key_of, volume_settings
from tests.support.pool.stuck_writes import Driven, StuckWrites

BEFORE, AFTER = (3, 3), (3, 3, 3)
KEYS = 60


class Joining:
    """A pool in memory, and its settings before, amid and after a join."""

    def __init__(self, **made: Any) -> None:
        self.pool = MemoryPool(BEFORE, **made)
        self.pool.namespaces += [MemoryNamespace(1 << 40)]
        self.settled = volume_settings(AFTER, **made)
        self.unsettled = replace(self.settled, settled_extents=len(BEFORE))
        self.agent = self.pool.agent()

    def goes_by(self, settings: VolumeSettings) -> None:
        self.agent.volume.change(layout=self.agent.volume.layout(settings))

    def other(self, settings: VolumeSettings) -> PoolAgent:
        return PoolAgent(self.pool.namespaces, settings)

    def at_next_read(self, do: Callable[[], None]) -> None:
        """Once, while the agent's next read is under way."""
        channel = self.agent.channel
        read = channel.read

        def once(*args: Any, **options: Any) -> Any:
            channel.read = read  # type: ignore[method-assign]
            do()
            return read(*args, **options)

        channel.read = once  # type: ignore[method-assign]


def put_by(agent: PoolAgent, how: str, key: bytes, value: bytes) -> None:
    if how == "one":
        agent.put(key, value)
        return
    values = [memoryview(value)]
    ended = agent.channel.run(write_together(agent.volume, agent.channel, [key], values, 5.0))
    assert ended == [True]


@pytest.mark.parametrize("how", ["one", "many"])
def test_a_put_amid_the_settling_goes_to_no_earlier_place(how: str) -> None:
    """Nobody looks there any more: it would be acknowledged and lost, and in /fs it is a block of a file."""
    joining = Joining()
    for number in range(KEYS):
        joining.goes_by(joining.unsettled)
        joining.agent.age_directories()
        joining.at_next_read(lambda: joining.goes_by(joining.settled))
        put_by(joining.agent, how, key_of(number), b"%d" % number)
        assert joining.agent.volume.old_placement is None
    other = joining.other(joining.settled)
    assert [other.get(key_of(number)) for number in range(KEYS)] == [b"%d" % number for number in range(KEYS)]


def misplaced(joining: Joining) -> tuple[bytes, Found]:
    """A key that lies in the last set of those that it belonged to, and belongs to the first still."""
    agent = joining.agent
    for number in range(10_000):
        key = key_of(number)
        agent.put(key, b"%d" % number)
        pseudonym = agent.volume.placement.pseudonym(key)
        new = agent.volume.placement.over(joining.settled.extents).candidates(pseudonym)
        namespace = agent.where(key)[0]
        if namespace == 1 and {each.namespace for each in new} == {0, 2}:
            cached = agent.cache.borrow(1, agent.where(key)[2])
            slot = cached.directory.find(pseudonym) if cached.directory is not None else None
            entry = (
                cached.directory.entry(slot) if cached.directory is not None and slot is not None else None
            )
            assert slot is not None
            assert entry is not None
            return key, Found(cached, slot, entry)
    raise AssertionError


def test_a_move_and_a_delete_of_its_key_do_not_wait_for_each_other() -> None:
    """The delete takes the sets in their order; the move holds one, and goes to one before it."""
    joining = Joining()
    key, old = misplaced(joining)
    agent = joining.agent
    joining.goes_by(joining.unsettled)
    joining.pool.namespaces[2].suspect = True
    channel, volume = StuckWrites(joining.pool.namespaces), agent.volume
    channel.clock = agent.channel.clock
    move = Driven(channel, Migration(volume, channel, old, channel.now() + VALUE_SECONDS).copy())
    writes = joining.pool.namespaces[0].writes
    while joining.pool.namespaces[0].writes == writes:
        assert move.run(0.0001) is None
    assert old.cached.writer.locked()
    deleting = Driven(agent.channel, delete(volume, agent.channel, key, agent.deadline()))
    assert deleting.run(0.001) is None
    assert move.run(0.25) is Outcome.TROUBLE
    assert deleting.run(0.25) is True
    assert isinstance(joining.other(joining.unsettled).get(key), MissCause)
    assert not any(each.reserved or each.writer.locked() for each in agent.cache.snapshot())
