"""A batch of puts and the queues of its worker, which may be connected amid it."""

from __future__ import annotations

from typing import Any

from agent.pool.write.batch import AT_ONCE
from host_shim.transfer_wire import MANY_MAX
from tests.support.pool.lending import nothing_is_held
from tests.unit.pool.test_many_puts import stuck_agent, together


def test_a_queue_may_say_only_with_the_first_values_how_many_it_takes() -> None:
    agent, channel = stuck_agent((1,))
    reserved: list[int] = []
    write = channel.write

    def noted(*args: Any, **more: Any) -> Any:
        reserved.append(sum(len(cached.reserved) for cached in agent.cache.snapshot()))
        return write(*args, **more)

    channel.write = noted  # type: ignore[method-assign]
    channel.queue_depth = lambda: 8 if reserved else 64  # type: ignore[method-assign]
    assert agent.channel.run(together(agent, range(MANY_MAX))) == [True] * MANY_MAX
    assert reserved[0] == AT_ONCE
    assert max(reserved[AT_ONCE + 1 :]) == 2
    nothing_is_held(agent)
