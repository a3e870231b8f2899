"""Tasks that look several times a second wake in step."""

from __future__ import annotations

import pytest
import trio
import trio.testing

from agent.host_os.cpu_idle import LOOK_SECONDS, REST_SECONDS, Awake, AwakeWhileBusy, Work
from agent.host_os.ticks import next_tick


def test_tasks_that_look_wake_together_whenever_they_began() -> None:
    woke: list[float] = []

    async def look(late: float) -> None:
        await trio.sleep(late)
        for _ in range(3):
            await trio.sleep_until(next_tick(0.25))
            woke.append(trio.current_time())

    async def play() -> None:
        async with trio.open_nursery() as nursery:
            for late in (0.01, 0.02, 0.13):
                nursery.start_soon(look, late)

    trio.run(play, clock=trio.testing.MockClock(autojump_threshold=0.0))
    assert len(woke) == 9
    assert len(set(woke)) == 3


def test_a_tick_is_never_now() -> None:
    async def play() -> None:
        await trio.sleep_until(next_tick(0.25))
        assert next_tick(0.25) == trio.current_time() + 0.25

    trio.run(play, clock=trio.testing.MockClock(autojump_threshold=0.0))


@pytest.mark.parametrize("asked", [0, 1000])
def test_whether_processors_may_sleep_is_looked_at_less_often_while_nothing_is_asked(asked: int) -> None:
    looked: list[float] = []

    async def play() -> None:
        with trio.CancelScope() as scope:

            def work_done() -> Work:
                looked.append(trio.current_time())
                if len(looked) == 5:
                    scope.cancel()
                return Work(asked * len(looked), 0, 0)

            await AwakeWhileBusy(Awake(), "never").keep(work_done)

    trio.run(play, clock=trio.testing.MockClock(autojump_threshold=0.0))
    seconds = looked[4] - looked[1]
    assert seconds == pytest.approx(3 * (LOOK_SECONDS if asked else REST_SECONDS))
