"""The loop of measured runs: what wakes a task, what a deadline does, what a kill leaves."""

from __future__ import annotations

import threading
from collections.abc import Generator
from typing import Any

from agent.pool.steps import Acquire, Wait
from agent.sim.drive_times import FlashPending
from agent.sim.virtual_time import Signal, Sleep, VirtualLoop

Steps = Generator[Any, bool, Any]


def test_a_wait_ends_when_the_pending_does() -> None:
    loop, pending, seen = VirtualLoop(), FlashPending(4), list[tuple[float, bool]]()

    def waits() -> Steps:
        came = yield Wait(pending, loop.now + 5.0)
        seen.append((loop.now, came))

    def done() -> None:
        pending.done = True
        loop.came(pending)

    loop.spawn(waits())
    loop.call_at(loop.now + 1.0, done)
    loop.run()
    assert seen == [(1001.0, True)]


def test_a_wait_ends_at_its_deadline_and_once() -> None:
    loop, pending, seen = VirtualLoop(), FlashPending(4), list[tuple[float, bool]]()

    def waits() -> Steps:
        came = yield Wait(pending, loop.now + 1.0)
        seen.append((loop.now, came))
        yield Sleep(loop.now + 10.0)
        seen.append((loop.now, True))

    loop.spawn(waits())
    loop.call_at(1002.0, lambda: loop.came(pending))
    loop.run()
    assert seen == [(1001.0, False), (1011.0, True)]


def test_a_lock_goes_to_the_one_that_waited_longest() -> None:
    loop, lock, order = VirtualLoop(), threading.Lock(), list[str]()

    def holds(name: str, seconds: float) -> Steps:
        assert (yield Acquire(lock, loop.now + 100.0))
        order.append(name)
        yield Sleep(loop.now + seconds)
        lock.release()

    for name in ("first", "second", "third"):
        loop.spawn(holds(name, 1.0))
    loop.run()
    assert order == ["first", "second", "third"]
    assert not lock.locked()


def test_a_lock_that_is_not_had_by_the_deadline() -> None:
    loop, lock, seen = VirtualLoop(), threading.Lock(), list[bool]()
    lock.acquire()

    def wants() -> Steps:
        seen.append((yield Acquire(lock, loop.now + 1.0)))

    loop.spawn(wants())
    loop.run()
    assert seen == [False]


def test_a_kill_ends_tasks_and_lets_go_of_what_they_hold() -> None:
    loop, lock, seen = VirtualLoop(), threading.Lock(), list[str]()

    def holds() -> Steps:
        with lock:
            yield Sleep(loop.now + 10.0)
        seen.append("lived on")

    def waits() -> Steps:
        assert (yield Acquire(lock, loop.now + 100.0))
        seen.append("had the lock")

    loop.spawn(holds(), "owner")
    loop.spawn(waits())
    loop.call_at(1001.0, loop.kill, "owner")
    loop.run()
    assert seen == ["had the lock"]


def test_a_signal_wakes_all_and_is_over() -> None:
    loop, signal, seen = VirtualLoop(), Signal(), list[str]()

    def waits(name: str) -> Steps:
        yield signal
        seen.append(name)

    loop.spawn(waits("first"))
    loop.spawn(waits("second"))
    loop.call_at(1001.0, loop.fire, signal)
    loop.run()
    loop.spawn(waits("late"))
    loop.run()
    assert seen == ["first", "second", "late"]
