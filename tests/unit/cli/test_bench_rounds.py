"""How rounds are taken and counted, with work that costs nothing."""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from typing import Any, cast

import pytest

from agent.bench import loop_client
from agent.bench.contents import STEPS, Contents, pages
from agent.bench.loop_probe import TakenTime
from agent.bench.pool_probes import shape_for
from agent.bench.rounds import (
    LATENCIES_MIN,
    ROUNDS,
    Sample,
    details,
    median_time,
    middle,
    rate,
    run_rounds,
    together,
    together_clocked,
)


def test_all_turns_are_counted_until_there_is_nothing_left() -> None:
    plans = [iter([10] * count) for count in (1, 2, 3, 4)]
    timed = together([lambda plan=plan: next(plan, None) for plan in plans], 60.0)  # type: ignore[misc]
    assert (timed.operations, timed.bytes) == (10, 100)
    assert timed.seconds > 0
    sample = rate(timed)
    assert sample.value == pytest.approx(100 / (1 << 30) / timed.seconds)


def test_turns_end_when_the_time_is_over() -> None:
    timed = together([lambda: 1], 0.01, least=1)
    assert timed.seconds >= 0.01
    assert timed.operations == timed.bytes > 0


def test_what_one_turn_raises_ends_all_and_arrives() -> None:
    def fails() -> int:
        raise ValueError("no more")

    with pytest.raises(ValueError, match="no more"):
        together([lambda: 1, fails], 600.0)


class Recorder:
    """A probe that writes down when it is asked."""

    def __init__(self, name: str, log: list[str]) -> None:
        self._name, self._log = name, log
        self._values = itertools.count()

    def prepare(self) -> None:
        raise AssertionError("who runs rounds has prepared")

    def round(self, seconds: float) -> Sample:
        self._log.append(self._name)
        return Sample(float(next(self._values)), 2, 3, seconds)


def test_names_take_turns_and_the_warm_up_does_not_count() -> None:
    log: list[str] = []
    said: list[tuple[str, int]] = []
    samples = run_rounds(
        {name: Recorder(name, log) for name in "ab"}, 1.0, lambda name, number: said.append((name, number))
    )
    assert log == ["a", "b"] * (ROUNDS + 1)
    assert said[:3] == [("a", -1), ("b", -1), ("a", 0)]
    assert [sample.value for sample in samples["a"]] == [float(number + 1) for number in range(ROUNDS)]
    assert middle(samples["a"]) == 3.0
    found = details(samples["a"])
    assert found["operations"] == 2 * ROUNDS
    assert found["bytes"] == 3 * ROUNDS
    assert found["seconds"] == pytest.approx(1.0)


class Failing(Recorder):
    """A probe that works once."""

    def round(self, seconds: float) -> Sample:
        if self._log.count(self._name) == 1:
            raise ValueError("it is full")
        return super().round(seconds)


def test_a_name_that_fails_is_given_up_and_the_others_go_on() -> None:
    log: list[str] = []
    given_up: list[tuple[str, str]] = []

    def note(name: str, why: Exception) -> bool:
        given_up.append((name, str(why)))
        return True

    probes = {"a": Failing("a", log), "b": Recorder("b", log)}
    samples = run_rounds(probes, 1.0, lambda name, number: None, given_up=note)
    assert given_up == [("a", "it is full")]
    assert set(samples) == {"b"}
    assert len(samples["b"]) == ROUNDS
    log.clear()
    with pytest.raises(ValueError, match="it is full"):
        run_rounds(probes, 1.0, lambda name, number: None)


def test_latencies_are_enough_of_them_however_short_the_round() -> None:
    sample = median_time(together_clocked([lambda: 5], 0.0, LATENCIES_MIN))
    assert sample.operations == LATENCIES_MIN
    assert sample.bytes == 5 * sample.operations


def test_values_differ_and_begin_at_pages() -> None:
    contents = Contents(1 << 16)
    values = [contents.value(number) for number in range(STEPS)]
    assert {len(value) for value in values} == {1 << 16}
    assert len({bytes(value) for value in values}) == STEPS
    assert contents.value(STEPS) == contents.value(0)
    assert pages(5000).nbytes == 5000


@pytest.mark.parametrize("value_bytes", [1 << 16, 1 << 20, 1 << 22])
def test_a_pool_has_three_times_the_room_that_the_probes_need(value_bytes: int) -> None:
    from agent.bench.pool_probes import puts_at_a_time, values_got
    from agent.pool.map.document import DATA_START, set_size

    shape = shape_for(value_bytes)
    slots = (shape.drive_bytes - DATA_START) // set_size(value_bytes) * 64
    assert slots >= 3 * (values_got(value_bytes) + puts_at_a_time(value_bytes))


def test_a_hold_up_is_not_counted_while_the_machine_was_held_up_as_well() -> None:
    assert TakenTime([]).own_part((10.0, 5.0)) == 5.0
    assert TakenTime([(9.0, 3.0), (10.2, 1.0)]).own_part((10.0, 5.0)) == 5.0, "before and after it"
    assert TakenTime([(9.999, 2.0)]).own_part((10.0, 5.0)) == pytest.approx(4.0)
    assert TakenTime([(10.001, 2.0), (10.002, 2.0)]).own_part((10.0, 5.0)) == pytest.approx(2.0), (
        "each moment once"
    )
    assert TakenTime([(9.0, 2000.0)]).own_part((10.0, 5.0)) == 0.0


class BrokenOff:
    """A volume, and its clock: the last of the gets is a miss that has filled half of the buffer."""

    def __init__(self, hits: int) -> None:
        self._hits = hits
        self._is_over = False

    def get_into(self, _key: bytes, buffer: memoryview) -> int | None:
        if self._hits:
            self._hits -= 1
            return len(buffer)
        buffer[: len(buffer) // 2] = bytes(len(buffer) // 2)
        self._is_over = True
        return None

    def monotonic(self) -> float:
        return float(self._is_over)


def test_the_time_begins_with_the_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the one that waits for them gets no processor until they have ended."""
    done = threading.Event()

    class Barrier(threading.Barrier):
        def wait(self, timeout: float | None = None) -> int:
            number = super().wait(timeout)
            if threading.current_thread() is threading.main_thread():
                assert done.wait(60)
            return number

    def turn() -> int | None:
        if done.is_set():
            return None
        end = time.perf_counter() + 0.005
        while time.perf_counter() < end:
            pass
        done.set()
        return 1

    monkeypatch.setattr(threading, "Barrier", Barrier)
    assert together([turn], 60.0).seconds >= 0.005


@pytest.mark.parametrize("hits", [0, 2])
def test_what_a_get_has_left_that_broke_off_is_compared_with_no_value(
    hits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    volume, ticks = BrokenOff(hits), loop_client.Ticks()
    monkeypatch.setattr(loop_client, "time", volume)
    asyncio.run(loop_client.calling(cast(Any, volume), 0, pages(4096), 0.5, ticks))
    assert (ticks.calls, ticks.compare) == (1 + hits, [])
