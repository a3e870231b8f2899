"""A batch of puts and the queues of its worker, which may be connected amid it."""

from __future__ import annotations

from typing import Any

import pytest

from agent.pool.steps import Steps
from agent.pool.write.batch import AT_ONCE, SLOW_SECONDS, TogetherWriter, _Batch
from host_shim.transfer_wire import MANY_MAX
from tests.support.pool.lending import nothing_is_held
from tests.support.pool.memory_pool import key_of
from tests.unit.pool.test_many_puts import Driven, stuck_agent, together


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
    assert max(reserved[AT_ONCE + 1 :]) == 4
    nothing_is_held(agent)


def test_reads_that_hang_keep_their_places_in_the_queue() -> None:
    """A queue that is full would fail the writes of values that another drive takes."""
    agent, channel = stuck_agent((40, 40))
    channel.namespaces[0].hung = True
    channel.is_stuck = lambda namespace, offset: True
    sent: list[int] = []

    def counted(send: Any) -> Any:
        def sends(namespace: int, *args: Any, **more: Any) -> Any:
            pending = send(namespace, *args, **more)
            if not pending.done:
                sent.append(namespace)
            return pending

        return sends

    channel.read = counted(channel.read)  # type: ignore[method-assign]
    channel.write = counted(channel.write)  # type: ignore[method-assign]
    seconds = 5.0
    driven = Driven(agent.channel, together(agent, range(AT_ONCE), seconds))
    assert driven.run(seconds / 2 - SLOW_SECONDS) is None
    reads = len(sent)
    assert reads
    assert set(sent) == {0}
    assert driven.run(SLOW_SECONDS * 1.5) is None
    assert len(sent) > reads, "the other drive is asked to take values"
    assert len(sent) <= channel.queue_depth()
    driven.run(100.0)
    nothing_is_held(agent)


@pytest.mark.parametrize("stuck", [False, True])
def test_a_batch_of_puts_counts_off_every_command_that_was_answered(stuck: bool) -> None:
    """Else its later values would find less and less room."""
    agent, channel = stuck_agent((3, 3))
    sent: list[tuple[int, int]] = []

    def is_stuck(namespace: int, offset: int) -> bool:
        if stuck and namespace == 0:
            sent.append((namespace, offset))
            return True
        return False

    channel.is_stuck = is_stuck
    keys = [key_of(number) for number in range(MANY_MAX)]
    pseudonyms = agent.volume.pseudonyms(keys)
    writers = [
        TogetherWriter(agent.volume, key, length=500, pseudonym=pseudonym)
        for key, pseudonym in zip(keys, pseudonyms, strict=True)
    ]
    batch = _Batch(agent.volume, channel, writers, [memoryview(bytes(500))] * MANY_MAX, channel.now() + 5.0)
    Driven(channel, _with_a_result(batch.run())).run(100.0)
    batch.close()
    assert batch._in_flight == len(sent)
    assert bool(sent) is stuck
    assert any(one is True for one in batch.became)
    nothing_is_held(agent)


def _with_a_result(steps: Steps[None]) -> Steps[list[bool]]:
    yield from steps
    return []
