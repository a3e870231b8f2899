"""The scheduler of the simulations: who may go on, when, and in an order that the seed alone decides."""

from __future__ import annotations

import threading
from collections.abc import Generator
from typing import Any

from agent.pool.steps import Acquire, Wait
from agent.remote.circuit_breaker import Health, Outstanding
from agent.sim.faulty_flash import SimPending
from agent.sim.seeded_scheduler import Sleep, StepScheduler

Steps = Generator[Any, bool, Any]


def wait(pending: SimPending, deadline: float, at_least: int | None = None) -> Steps:
    return (yield Wait(pending, deadline, at_least))


def hold(scheduler: StepScheduler, lock: threading.Lock, seconds: float, order: list[float]) -> Steps:
    came = yield Acquire(lock, scheduler.now + 10)
    assert came
    order.append(scheduler.now)
    yield Sleep(scheduler.now + seconds)
    lock.release()


def test_a_wait_ends_with_what_it_is_for_or_at_its_deadline() -> None:
    scheduler = StepScheduler(1)
    came, late, part = SimPending(), SimPending(), SimPending(8192)
    scheduler.call_at(scheduler.now + 1, lambda: setattr(came, "done", True), came)
    scheduler.call_at(scheduler.now + 2, lambda: setattr(part, "received", 4096))  # about anything
    tasks = [
        scheduler.spawn("came", wait(came, scheduler.now + 5)),
        scheduler.spawn("late", wait(late, scheduler.now + 3)),
        scheduler.spawn("part", wait(part, scheduler.now + 5, 4096)),
    ]
    scheduler.run()
    assert [task.result for task in tasks] == [True, False, True]
    assert [task.finished_at - task.started_at for task in tasks] == [1.0, 3.0, 2.0]


def test_a_lock_goes_from_one_to_the_next_and_patience_ends() -> None:
    for seed in range(20):
        scheduler, lock, order = StepScheduler(seed), threading.Lock(), list[float]()
        for number in range(4):
            scheduler.spawn(f"t{number}", hold(scheduler, lock, 1.0, order))
        hasty = scheduler.spawn("hasty", (_acquire(lock, scheduler.now + 0.5)))
        scheduler.run()
        began = order[0]
        assert sorted(order) == order
        assert order[-1] - began <= 3.0
        if hasty.result:
            continue  # It was drawn first, and gave the lock back at once.
        assert hasty.finished_at - hasty.started_at == 0.5


def _acquire(lock: threading.Lock, deadline: float) -> Steps:
    came = yield Acquire(lock, deadline)
    if came:
        lock.release()
    return came


def test_the_dead_leave_their_locks() -> None:
    def holder() -> Steps:
        came = yield Acquire(lock, scheduler.now + 10)
        assert came
        try:
            yield Sleep(scheduler.now + 100)
        finally:
            lock.release()

    scheduler, lock, order = StepScheduler(3), threading.Lock(), list[float]()
    scheduler.spawn("holder", holder(), owner="one")
    scheduler.run(until=scheduler.now + 1)
    scheduler.spawn("next", hold(scheduler, lock, 0.0, order), owner="other")
    scheduler.call_at(scheduler.now + 1, lambda: scheduler.kill("one"))
    scheduler.run()
    assert order == [1002.0]
    assert not scheduler.tasks


def test_a_read_of_a_suspect_is_waited_for_as_long_as_it_is_worth() -> None:
    scheduler, health, pending = StepScheduler(1), Health(), SimPending(4096)
    health.patience = 0.004
    pending.asked = Outstanding(health, scheduler.now, is_read=True)
    task = scheduler.spawn("read", wait(pending, scheduler.now + 0.05))
    scheduler.run()
    assert task.result is False
    assert round(task.finished_at - task.started_at, 6) == 0.004


def test_the_seed_decides_the_order_and_nothing_else_does() -> None:
    def digest(seed: int) -> str:
        scheduler, lock, order = StepScheduler(seed), threading.Lock(), list[float]()
        for number in range(5):
            scheduler.spawn(f"t{number}", hold(scheduler, lock, 0.1 * number, order))
        scheduler.run()
        return scheduler.digest()

    assert digest(1) == digest(1)
    assert len({digest(seed) for seed in range(10)}) > 5


def test_one_task_is_finished_beside_the_others() -> None:
    def clock() -> Steps:
        while True:
            yield Sleep(scheduler.now + 1)
            ticks.append(scheduler.now)

    scheduler, ticks = StepScheduler(1), list[float]()
    scheduler.spawn("clock", clock())
    pending = SimPending()
    assert scheduler.finish(wait(pending, scheduler.now + 3.5)) is False
    assert ticks == [1001.0, 1002.0, 1003.0]
