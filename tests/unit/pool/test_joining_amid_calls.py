"""Namespaces join, and the pool is settled, in the middle of puts, deletes and moves."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from agent.pool.volume.settings import VolumeSettings
from agent.pool.write.batch import write_together
from tests.support.pool.memory_channel import MemoryNamespace
from tests.support.pool.memory_pool import MemoryPool, PoolAgent, key_of, volume_settings

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
