"""Before a put is acknowledged the pool map is asked whether its key still holds; the answer may be slow.

An enclosure that takes its time has dropped no key: the put waits for the answer as long as it may, and what
write-back has acknowledged is tried again.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from agent.attach.map_watch import EVERY_SECONDS
from agent.inline.scatter import Buffer
from agent.pool.access import serve
from agent.pool.counters import MissCause
from agent.pool.errors import PutRefused
from agent.pool.map.tenant_changes import without_key
from agent.pool.steps import Acquire, Steps, Wait
from agent.pool.volume.key_transition import MAP_AGE_SECONDS, QUIET_SECONDS
from agent.pool.write.put import SlotWriter
from agent.pool.write.write_back import WriteBack
from tests.support.pool.memory_channel import MemoryChannel, MemoryPending, T
from tests.support.pool.memory_pool import key_of
from tests.unit.agent.tenants.test_key_rotation import STEP, Shelf, value_of
from tests.unit.agent.tenants.test_rotation_ends import Watching, publish


class SlowPending(MemoryPending):
    ready_at = 0.0


class SlowChannel(MemoryChannel):
    """Every answer takes `seconds`; those to reads of the pool map never come while `map_is_silent`."""

    seconds = 0.0
    map_is_silent = False

    def _slowly(self, found: MemoryPending) -> MemoryPending:
        pending = SlowPending(False, found.received, found.fault, found.unreachable)
        pending.ready_at = self.clock + self.seconds
        return pending

    def read(self, namespace: int, offset: int, into: memoryview, *, more: bool = False) -> MemoryPending:
        if self.map_is_silent and offset == 0:
            return MemoryPending()
        return self._slowly(super().read(namespace, offset, into))

    def write(
        self, namespace: int, offset: int, parts: Sequence[Buffer], *, more: bool = False
    ) -> MemoryPending:
        return self._slowly(super().write(namespace, offset, parts, more=more))

    def run(self, steps: Steps[T]) -> T:
        try:
            wanted = next(steps)
            while True:
                wanted = steps.send(self._answer(wanted))
        except StopIteration as finished:
            result: T = finished.value
            return result

    def _answer(self, wanted: Wait | Acquire) -> bool:
        if isinstance(wanted, Acquire):
            return wanted.lock.acquire(blocking=False)
        pending = wanted.pending
        if isinstance(pending, SlowPending) and pending.ready_at <= wanted.deadline:
            self.clock, pending.done = max(self.clock, pending.ready_at), True
        if not pending.done:
            self.clock = max(self.clock, wanted.deadline)
        return pending.done


class Slow(Watching):
    def __init__(self, shelf: Shelf) -> None:
        super().__init__(shelf)
        self.channel: SlowChannel = SlowChannel(shelf.namespaces)

    @property
    def refused(self) -> int:
        return self.channel.tally("v").puts_refused

    def put_back(self, number: int) -> None:
        """A put that write-back acknowledges."""
        value = value_of(number)
        writing = self.served.writer(key_of(number), length=len(value))
        assert self.channel.run(writing.write(self.channel, 0, memoryview(value), self.channel.now() + 5))
        assert not isinstance(writing, SlotWriter)

    def store_oldest(self) -> bool:
        back = self.served.back
        assert back is not None
        value = back.oldest()
        assert value is not None
        return self.channel.run(back.store(self.channel, value, self.channel.now() + 5))


@pytest.fixture
def shelf(tmp_path: Path) -> Shelf:
    shelf = Shelf(tmp_path, share=0.4)
    publish(shelf, shelf.pool_map)
    return shelf


@pytest.mark.expects_log("volume v was erased")
def test_an_enclosure_that_takes_nearly_a_second_takes_puts_and_tells_of_the_map(shelf: Shelf) -> None:
    # A put is five commands in turn then, for its directories are older than 20 ms once its slot is written.
    agent = Slow(shelf)
    agent.channel.seconds = 0.95
    agent.put(1)
    assert agent.refused == 0
    agent.pass_time(2)
    assert agent.volume.map_age.is_fresh(agent.channel.now())
    publish(shelf, without_key(shelf.pool_map, "blue"))
    agent.pass_time(3)
    assert agent.volume.erased


def test_a_map_that_is_not_read_in_time_makes_a_put_late_and_it_is_counted(shelf: Shelf) -> None:
    agent = Slow(shelf)
    agent.channel.map_is_silent = True
    began = agent.channel.now()
    with pytest.raises(PutRefused, match="could not be read") as refused:
        agent.put(1)
    assert refused.value.cause is MissCause.LATE
    assert agent.channel.now() - began == pytest.approx(5), "it was waited for until the put's deadline"
    assert agent.refused == 1
    agent.channel.map_is_silent = False
    agent.put(1)
    assert agent.has(1)


def test_a_put_under_a_dropped_key_is_counted(shelf: Shelf) -> None:
    agent = Slow(shelf)
    agent.pass_time(2)
    publish(shelf, shelf.rotate())
    agent.channel.clock += 10 * MAP_AGE_SECONDS
    with pytest.raises(PutRefused, match="its key was dropped") as refused:
        agent.put(1)
    assert refused.value.cause is MissCause.WRONG_KEY
    assert agent.refused == 1


@pytest.mark.parametrize("trouble", ["rotated", "silent"])
def test_what_write_back_has_acknowledged_is_tried_again(shelf: Shelf, trouble: str) -> None:
    agent = Slow(shelf)
    agent.served = serve(agent.volume, back=WriteBack(agent.volume, 1 << 20))
    agent.pass_time(2)
    agent.put_back(1)
    if trouble == "rotated":
        publish(shelf, shelf.rotate())
        publish(shelf, shelf.end())
    else:
        agent.channel.map_is_silent = True
    agent.channel.clock += QUIET_SECONDS  # The agent was stopped, or its upkeep held up.
    assert not agent.store_oldest(), "it waits on"
    agent.channel.map_is_silent = False
    agent.pass_time(EVERY_SECONDS + STEP)
    assert agent.store_oldest()
    assert (agent.served.back.lost, agent.refused, agent.channel.tally("v").puts_lost) == (0, 0, 0)
    assert agent.has(1)
    assert Watching(shelf).has(1)
