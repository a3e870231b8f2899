"""The keeper: it sleeps until something is owed, and then makes the copy at once."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any, cast

import pytest

from agent.config.configuration import ScrubSection
from agent.pool.volume.replication_backlog import NamedCopy, ReplicationBacklog
from agent.remote.channel import WorkerChannel
from agent.service.repair import Repair
from tests.support.pool.memory_channel import MemoryChannel
from tests.support.pool.memory_pool import MemoryPool, PoolAgent, key_of
from tests.support.waiting import wait_until


class Sleep(threading.Event):
    """What the keeper waits for. It tells when the keeper has gone to sleep, and for how long."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[float | None] = []
        self._began = threading.Semaphore(0)

    def wait(self, timeout: float | None = None) -> bool:
        self.asked.append(timeout)
        self._began.release()
        return super().wait(timeout)

    def began(self) -> None:
        """Wait until the keeper has gone to sleep once more."""
        assert self._began.acquire(timeout=60), "the keeper finds no rest"


class Keeper:
    """One that runs, over a pool in memory, with a channel of its own."""

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        agent: PoolAgent,
        channel: MemoryChannel,
        bandwidth: int = 0,
    ) -> None:
        self.agent, self.channel, self.looks = agent, channel, 0
        run = channel.run

        def counted(steps: Any) -> Any:
            self.looks += 1
            return run(steps)

        monkeypatch.setattr(channel, "run", counted)
        self.repair = Repair(
            ScrubSection.model_validate({"bandwidth": bandwidth}),
            [agent.volume],
            lambda: cast(WorkerChannel, channel),
            lambda: [],
            lambda _: False,
        )
        self.sleep = Sleep()
        monkeypatch.setattr(self.repair, "_wakes", self.sleep)

    @property
    def backlog(self) -> ReplicationBacklog:
        return self.agent.volume.replication_backlog


@pytest.fixture
def keeper(monkeypatch: pytest.MonkeyPatch) -> Iterator[Keeper]:
    pool = MemoryPool((2, 2), copies=2)
    made = Keeper(monkeypatch, pool.agent(), MemoryChannel(pool.namespaces))
    made.repair.start()
    made.sleep.began()
    yield made
    made.repair.stop()
    assert not any(thread.name == "keeper" for thread in threading.enumerate())


def test_with_nothing_owed_it_sleeps_until_it_is_woken(keeper: Keeper) -> None:
    assert (keeper.sleep.asked, keeper.looks) == ([None], 1)


def test_a_put_wakes_it_and_has_its_second_copy(keeper: Keeper) -> None:
    for number in range(3):
        keeper.agent.put(key_of(number), b"value")
        keeper.sleep.began()
    assert keeper.sleep.asked == [None] * 4
    assert keeper.channel.tally("v").copies_made == 3
    assert len(keeper.backlog) == 0


def test_it_is_woken_once_for_the_puts_that_wait_together() -> None:
    backlog, wakes = ReplicationBacklog(), threading.Event()
    backlog.wake_by(wakes)
    backlog.note(key_of(0))
    assert wakes.is_set()
    wakes.clear()
    backlog.note(key_of(1))
    assert not wakes.is_set(), "the first has woken it, and it goes on until there is none"
    while backlog.next() is not None:
        pass
    backlog.note(key_of(2))
    assert wakes.is_set()


def test_it_wakes_by_itself_when_a_doubted_copy_is_due(keeper: Keeper) -> None:
    keeper.agent.put(key_of(0), b"value")
    keeper.sleep.began()
    namespace, _, directory = keeper.agent.where(key_of(0))
    pseudonym, soon = keeper.agent.volume.placement.pseudonym(key_of(0)), 1 / 128
    of_an_older_write = NamedCopy(namespace, directory, 0, pseudonym, 0)
    keeper.backlog.doubt(of_an_older_write, keeper.channel.clock + soon)
    keeper.sleep.began()
    assert keeper.sleep.asked[:3] == [None, None, soon]
    keeper.channel.clock += soon
    wait_until(lambda: keeper.backlog.doubtful == 0)
    wait_until(lambda: keeper.sleep.asked[-1] is None)


def test_the_scrub_keeps_its_own_pace(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = MemoryPool((2, 2), copies=2)
    keeper = Keeper(monkeypatch, pool.agent(), MemoryChannel(pool.namespaces), bandwidth=1 << 20)
    keeper.repair.start()
    keeper.sleep.began()
    [pause] = keeper.sleep.asked[:1]
    assert pause is not None
    assert pause > 0, "it has read a directory"
    keeper.repair.stop()


@pytest.mark.expects_log("keeping what is stored good failed; it is tried again")
def test_an_error_does_not_end_it(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = MemoryPool((2, 2), copies=2)
    keeper = Keeper(monkeypatch, pool.agent(), MemoryChannel(pool.namespaces))
    run, faults = keeper.channel.run, [OSError("once")]

    def fails_once(steps: Any) -> Any:
        if faults:
            steps.close()
            raise faults.pop()
        return run(steps)

    monkeypatch.setattr(keeper.channel, "run", fails_once)
    keeper.repair.start()
    keeper.sleep.began()
    assert not faults
    keeper.repair.stop()
