"""Transfers on several threads: none outlives its call, whatever fails on the way."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from host_shim.block_key import key_of
from host_shim.connector_jobs import JobRunner, share, within
from host_shim.pool import Pool
from host_shim.tier_jobs import TierJobs
from host_shim.tier_lookups import TierLookups
from tests.support.engines.drained import drained
from tests.support.engines.scripted_agent import ScriptedAgent
from tests.support.waiting import wait_until

KEYS = [key_of(f"block {at}") for at in range(8)]


@pytest.fixture
def few_threads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many threads the system still gives: set its one element."""
    left, start = [0], threading.Thread.start

    def limited(thread: threading.Thread) -> None:
        if not left[0]:
            raise RuntimeError("can't start new thread")
        left[0] -= 1
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", limited)
    return left


@pytest.fixture
def runner() -> Iterator[JobRunner]:
    made = JobRunner("test-share", threads=3)
    yield made
    made.close(10)


class HeldAgent(ScriptedAgent):
    """An agent that takes its time over values which are read on other threads than the caller's."""

    def __init__(self) -> None:
        super().__init__()
        self.caller = threading.current_thread()
        self.held = threading.Event()
        self.go = threading.Event()

    def preadv(self, descriptor: int, into: memoryview, offset: int) -> int:
        if offset and threading.current_thread() is not self.caller:
            self.held.set()
            assert self.go.wait(20)
        elif offset:
            assert self.held.wait(20)
        return super().preadv(descriptor, into, offset)


def test_a_helper_that_cannot_start_leaves_the_others_work_whole(few_threads: list[int]) -> None:
    agent = ScriptedAgent()
    with Pool("/nowhere", files=agent, parallel=4) as pool:
        volume = pool.volume("kv")
        for few_threads[0] in (1, 0):
            values = [bytes([at]) * 3000 for at in range(8)]
            assert volume.put_many(KEYS, values) == [True] * 8
            buffers = [bytearray(3000) for _ in KEYS]
            assert volume.get_many(KEYS, buffers) == [3000] * 8
            assert buffers == values


@pytest.mark.parametrize("breaks", [None, ValueError, KeyboardInterrupt])
def test_a_call_returns_only_when_no_helper_is_at_work(
    runner: JobRunner, breaks: type[BaseException] | None
) -> None:
    caller, held, go = threading.current_thread(), threading.Event(), threading.Event()
    under_way: list[int] = []

    def work(number: int) -> None:
        if threading.current_thread() is not caller:
            under_way.append(number)
            held.set()
            assert go.wait(20)
            under_way.remove(number)
            return
        assert held.wait(20)
        threading.Timer(0.02, go.set).start()
        if breaks is not None:
            raise breaks

    if breaks is None:
        share(runner, 3, work, 4)
    else:
        with pytest.raises(breaks):
            share(runner, 3, work, 100)
    assert not under_way
    assert drained(runner, 10)


def test_a_helper_that_comes_too_late_touches_nothing() -> None:
    runner, held, go = JobRunner("test-share", threads=1), threading.Event(), threading.Event()

    def hold() -> None:
        held.set()
        assert go.wait(20)

    assert runner.submit(hold)
    assert held.wait(20)
    done: list[int] = []
    share(runner, 1, done.append, 5)
    assert done == [0, 1, 2, 3, 4]
    go.set()
    assert drained(runner, 10)
    assert len(done) == 5
    assert runner.close(10)


def test_closing_a_pool_waits_for_calls_that_move_somebodys_memory() -> None:
    agent = HeldAgent()
    pool = Pool("/nowhere", files=agent, parallel=2)
    volume = pool.volume("kv")
    assert volume.put_many(KEYS, [b"v" * 100] * 8) == [True] * 8
    buffers = [bytearray(100) for _ in KEYS]
    found: list[int | None] = []

    def load() -> None:
        agent.caller = threading.current_thread()
        found.extend(volume.get_many(KEYS, buffers))

    loading = threading.Thread(target=load)
    loading.start()
    assert agent.held.wait(20)
    assert not pool.close(0.01)
    assert loading.is_alive()
    agent.go.set()
    assert pool.close(20)
    assert agent.open_files == 0
    loading.join(20)
    assert found == [100] * 8
    assert buffers == [b"v" * 100] * 8


def test_a_process_ends_though_the_agent_holds_its_helpers(repository: Path) -> None:
    script = """if True:
        import threading
        from host_shim.pool import Pool
        from tests.unit.host_shim.test_sharing import KEYS, HeldAgent
        agent = HeldAgent()
        pool = Pool("/nowhere", files=agent, parallel=2)
        volume = pool.volume("kv")
        volume.put_many(KEYS, [b"v"] * 8)
        threading.Thread(
            target=lambda: volume.get_many(KEYS, [bytearray(1) for _ in KEYS]), daemon=True
        ).start()
        assert agent.held.wait(20)
    """
    subprocess.run([sys.executable, "-c", script], check=True, timeout=15, cwd=repository)


def test_a_runner_without_a_thread_refuses_and_one_with_a_thread_goes_on(few_threads: list[int]) -> None:
    runner = JobRunner("test-share", threads=3)
    assert not runner.submit(lambda: None)
    assert drained(runner, 0)
    few_threads[0] = 1
    done: list[int] = []
    for number in range(5):
        assert runner.submit(lambda number=number: done.append(number))  # type: ignore[misc]
    wait_until(lambda: done == [0, 1, 2, 3, 4], 10)
    assert runner.close(10)


class Nothing:
    """A pool that has nothing and takes everything."""

    def store(self, names: object, values: object) -> list[bool]:
        return [True]

    def load(self, names: object, rooms: object) -> list[int | None]:
        return [None]

    def exists(self, names: object) -> list[bool]:
        return [False]


def test_a_scheduler_sees_no_exception_where_no_thread_can_start(few_threads: list[int]) -> None:
    few_threads[0] = 0
    jobs = TierJobs(Nothing(), memoryview(bytearray(64)), 64, bytes)
    jobs.store(1, [b"a"], [0])
    assert [job.success for job in jobs.finished()] == [False]
    jobs.close()
    lookups = TierLookups("test-share", lambda keys: [True for _ in keys], 0.5)
    assert lookups.verdict(b"a", "r") is None
    lookups.flush()
    assert lookups.verdict(b"a", "r") is False
    lookups.close()


def test_what_never_runs_is_told_so() -> None:
    runner, held, go = JobRunner("test-share", threads=1), threading.Event(), threading.Event()

    def hold() -> None:
        held.set()
        assert go.wait(20)

    told: list[str] = []
    assert runner.submit(hold, dropped=lambda: told.append("runs"))
    assert held.wait(20)
    assert runner.submit(lambda: told.append("ran"), dropped=lambda: told.append("dropped"))
    assert not runner.close(0)
    assert told == ["dropped"]
    go.set()
    assert runner.close(10)


def test_a_call_that_is_held_is_answered_in_time(few_threads: list[int]) -> None:
    few_threads[0] = 5
    go = threading.Event()
    assert within(0.01, lambda: go.wait(20), "late") == "late"
    go.set()
    assert within(20, lambda: go.wait(20), False) is True
    for error in (TimeoutError, RuntimeError, LookupError):
        with pytest.raises(error, match="its own"):
            within(20, lambda error=error: (_ for _ in ()).throw(error("its own")), 0)  # type: ignore[misc]
    few_threads[0] = 0
    assert within(20, lambda: 1, 0) == 0
