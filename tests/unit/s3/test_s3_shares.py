"""Places and threads that tenants share: none has all, who waits is told, what hangs holds up its like."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import trio
import trio.testing

from agent.http.shares import Place, Shares
from agent.http.workers import Workers
from agent.s3.errors import S3Error, slow_down
from tests.support.pool.inline_runner import inline_runner


def test_half_of_the_places_are_owed_in_equal_shares() -> None:
    shares = Shares(8, ["a", "b"])
    held = [shares.take_now("a") for _ in range(8)]
    assert [place is not None for place in held] == [True] * 6 + [False] * 2
    assert [shares.take_now("b") is not None for _ in range(3)] == [True, True, False]
    assert shares.held == 8


def test_there_is_a_place_for_each_tenant_and_one_alone_has_all() -> None:
    names = [str(number) for number in range(5)]
    few = Shares(2, names)
    assert few.total == 5
    assert all(few.take_now(name) for name in names)
    alone = Shares(3, ["a"])
    assert [alone.take_now("a") is not None for _ in range(4)] == [True, True, True, False]


def test_a_place_is_given_back_once() -> None:
    shares = Shares(2, ["a"])
    place = shares.take_now("a")
    assert place is not None
    with place:
        place.give_back()
    assert shares.held == 0


def test_who_waits_has_the_next_place_or_is_told_to_slow_down() -> None:
    async def main() -> None:
        shares = Shares(2, ["a", "b"], wait_seconds=10.0, refusal=slow_down)
        first = await shares.take("a")
        with pytest.raises(S3Error) as refused:
            await shares.take("a")
        assert (refused.value.code, trio.current_time() - began) == ("SlowDown", 10.0)
        second = await shares.take("b")
        assert trio.current_time() - began == 10.0
        order: list[int] = []

        async def wait(number: int) -> None:
            with await shares.take("a"):
                order.append(number)

        async with trio.open_nursery() as nursery:
            for number in range(3):
                nursery.start_soon(wait, number)
                await trio.testing.wait_all_tasks_blocked()
            await trio.sleep(5)
            first.give_back()
        second.give_back()
        assert (order, shares.held) == ([0, 1, 2], 0)

    clock = trio.testing.MockClock(autojump_threshold=0)
    began = clock.current_time()
    trio.run(main, clock=clock)


@pytest.mark.parametrize("seed", range(20))
def test_whatever_comes_and_goes_no_place_is_lost_or_there_twice(seed: int) -> None:
    dice = random.Random(seed)
    names, total = ["a", "b", "c"][: dice.randrange(1, 4)], dice.randrange(1, 12)
    shares = Shares(total, names, wait_seconds=3.0, refusal=slow_down)

    async def hold(name: str) -> None:
        place: Place | None = None
        with trio.move_on_after(dice.uniform(0.1, 8)):  # some go while they wait, some while they hold
            try:
                place = await shares.take(name)
            except S3Error:
                return
            assert shares.held <= shares.total
            await trio.sleep(dice.uniform(0, 5))
        if place is not None:
            place.give_back()

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            for _ in range(100):
                nursery.start_soon(hold, dice.choice(names))
                await trio.sleep(dice.uniform(0, 0.3))
        assert shares.held == 0
        assert all(shares.take_now(name) for name in names)

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))


@contextmanager
def working(count: int, queue_seconds: float) -> Iterator[Workers]:
    made = Workers(count, inline_runner, queue_seconds, refusal=slow_down)
    made.start()
    try:
        yield made
    finally:
        made.stop()


class Hung:
    """A job that lasts until `heal`."""

    def __init__(self) -> None:
        self._healed = threading.Event()
        self.heal = self._healed.set
        self.begun = threading.Event()

    def __call__(self, runner: object) -> None:
        self.begun.set()
        self._healed.wait(20)


def test_a_question_does_not_wait_for_jobs_that_hang() -> None:
    async def main(workers: Workers) -> None:
        hung = Hung()
        async with trio.open_nursery() as nursery:
            for _ in range(9):
                nursery.start_soon(workers.run, "a", hung)
            with trio.fail_after(10):
                assert await workers.ask("a", lambda: 7) == 7
            hung.heal()

    with working(2, 20.0) as workers:
        trio.run(main, workers)


def test_the_first_job_of_a_request_is_refused_in_time_and_a_later_one_waits() -> None:
    async def main(workers: Workers) -> None:
        hung, done = Hung(), []
        async with trio.open_nursery() as nursery:
            nursery.start_soon(workers.run, "a", hung)
            await trio.testing.wait_all_tasks_blocked(0.01)
            nursery.start_soon(workers.run, "a", lambda runner: done.append("later"))
            with pytest.raises(S3Error) as refused:
                await workers.run("a", lambda runner: done.append("first"), first=True)
            assert refused.value.code == "SlowDown"
            hung.heal()
        assert done == ["later"]

    with working(1, 0.05) as workers:
        trio.run(main, workers)


def test_tenants_take_turns_in_the_queue() -> None:
    async def main(workers: Workers) -> None:
        hung, done = Hung(), []

        async def run(whose: str, number: int) -> None:
            await workers.run(whose, lambda runner: done.append((whose, number)))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(workers.run, "a", hung)
            assert await trio.to_thread.run_sync(hung.begun.wait, 10)
            for number in range(3):
                await trio.testing.wait_all_tasks_blocked(0.01)
                nursery.start_soon(run, "a", number)
            await trio.testing.wait_all_tasks_blocked(0.01)
            nursery.start_soon(run, "b", 0)
            await trio.testing.wait_all_tasks_blocked(0.01)
            hung.heal()
        assert done == [("a", 0), ("b", 0), ("a", 1), ("a", 2)]

    with working(1, 20.0) as workers:
        trio.run(main, workers)


def test_who_is_cancelled_takes_back_what_no_thread_has_begun_with() -> None:
    async def main(workers: Workers) -> None:
        hung, done = Hung(), []
        async with trio.open_nursery() as nursery:
            nursery.start_soon(workers.run, "a", hung)
            await trio.testing.wait_all_tasks_blocked(0.01)
            with trio.move_on_after(0.01) as scope:
                await workers.run("a", lambda runner: done.append("first"), first=True)
            assert scope.cancelled_caught
            hung.heal()
        await workers.run("a", lambda runner: done.append("later"))
        assert done == ["later"]

    with working(1, 20.0) as workers:
        trio.run(main, workers)


def test_what_a_thread_has_begun_with_is_not_lost_to_who_is_cancelled() -> None:
    async def main(workers: Workers) -> None:
        hung, begun, scope, found = Hung(), threading.Event(), trio.CancelScope(), []

        def job(runner: object) -> int:
            begun.set()
            hung(runner)
            return 7

        async def ask() -> None:
            with scope:
                found.append(await workers.run("a", job, first=True))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask)
            await trio.to_thread.run_sync(begun.wait, 10)
            scope.cancel()
            await trio.testing.wait_all_tasks_blocked(0.01)
            hung.heal()
        assert found == [7]

    with working(1, 20.0) as workers:
        trio.run(main, workers)
