"""Gets under a fixed load: when requests arrive, what their time counts from, and how it is shown."""

from __future__ import annotations

import itertools
import random
import statistics
import threading

import pytest

from agent.bench.fixed_load import ARRIVALS_MIN, Arrivals, Arriving, poisson, together_as_they_arrive
from agent.bench.names_and_units import CATALOG, chosen
from agent.bench.records import Figure, under_load
from agent.bench.rounds import Sample, details, percentile


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def read(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def test_requests_arrive_as_those_of_many_clients() -> None:
    moments = poisson(1000.0, 20.0, random.Random(1))
    assert moments[0] == 0.0
    assert moments[-1] < 20.0
    assert len(moments) == pytest.approx(20_000, rel=0.03)
    gaps = [after - before for before, after in itertools.pairwise(moments)]
    assert min(gaps) >= 0
    assert statistics.stdev(gaps) == pytest.approx(0.001, rel=0.05), "as long as their mean: exponential"
    assert len(poisson(1.0, 0.1, random.Random(1))) == ARRIVALS_MIN


def test_a_time_counts_from_the_arrival_and_so_does_what_it_waited_for() -> None:
    """A store that stalls for a second, once: all that arrive meanwhile were late, though each took no time
    from when it was asked."""
    clock = Clock()
    asked: list[float] = []

    def turn() -> int:
        asked.append(clock.now)
        clock.now += 1.0 if len(asked) == 3 else 0.001
        return 7

    arriving = Arriving(turn, Arrivals([0.1 * number for number in range(8)], clock.read, clock.sleep))
    while arriving() is not None:
        pass
    assert [round(at - 100, 3) for at in asked[:3]] == [0.0, 0.1, 0.2]
    assert [round(one, 3) for one in arriving.taken] == [0.001, 0.001, 1.0, 0.901, 0.802, 0.703, 0.604, 0.505]


def test_threads_share_the_arrivals_and_serve_all_of_them() -> None:
    lock, served = threading.Lock(), list[int]()

    def turn() -> int:
        with lock:
            served.append(1)
        return 10

    timed = together_as_they_arrive([turn] * 3, Arrivals([0.0] * 50))
    assert (timed.operations, timed.bytes, len(timed.latencies), len(served)) == (50, 500, 50, 50)
    assert all(one >= 0 for one in timed.latencies)


def test_percentiles_go_to_the_thousandth() -> None:
    taken = [number / 1000 for number in range(1, 2001)]
    assert percentile(taken, 50) == 1000.0
    assert percentile(taken, 99) == 1980.0
    assert percentile(taken, 99.9) == 1998.0
    assert percentile([0.002], 99.9) == 2.0
    found = details([Sample(1.0, 2000, 0, 1.0, tuple(taken))])
    assert (found["p50_ms"], found["p99_ms"], found["p999_ms"]) == (1000.0, 1980.0, 1998.0)


def test_each_size_load_and_store_has_a_name() -> None:
    names = [entry.name for entry in chosen(["*_load_*"])]
    assert len(names) == len(set(names)) == 12
    assert {(entry.load, entry.kind) for entry in chosen(["*_load_*"])} == {
        (load, "get_load") for load in (30, 60, 90)
    }
    assert all(entry.in_rounds for entry in chosen(["*_load_*"]))


def test_the_table_has_times_at_their_rates_and_who_is_ahead() -> None:
    times = {"offered_per_s": 900.0, "p50_ms": 1.0, "p99_ms": 2.0, "p999_ms": 3.0}
    figures = {
        name: Figure(CATALOG[name], value, times)
        for name, value in (("kv_get_1m_load_90_p99_ms", 2.0), ("redis_get_1m_load_90_p99_ms", 3.0))
    }
    made = under_load(figures)
    assert made is not None
    cells = [list(column.cells) for column in made.columns]
    assert [one[0] for one in cells] == [
        "get 1m at 90 %", "900", "1.000", "2.000", "3.000", "900", "1.000", "2.000", "3.000", "1.50",
    ]  # fmt: skip
    assert under_load({}) is None
    alone = under_load({name: figures[name] for name in list(figures)[:1]})
    assert alone is not None
    assert [next(iter(column.cells)) for column in alone.columns][5:] == ["-", "-", "-", "-", ""]
