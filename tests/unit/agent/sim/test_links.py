"""Links by themselves: against what queueing theory says, and with all bytes accounted for."""

from __future__ import annotations

import random

import pytest

from agent.sim.links import QueueLink, SharedLink

RATE, SIZE = 1e9, 1_000_000
SERVICE = SIZE / RATE
ARRIVALS = 60_000


def _arrivals(load: float, seed: int) -> list[float]:
    dice, now, times = random.Random(seed), 0.0, []
    for _ in range(ARRIVALS):
        now += dice.expovariate(load / SERVICE)
        times.append(now)
    return times


@pytest.mark.parametrize("load", [0.3, 0.6, 0.8])
def test_a_queue_waits_as_md1_does(load: float) -> None:
    link = QueueLink(RATE)
    took = [link.begin(at, SIZE) - at for at in _arrivals(load, 35)]
    expected = SERVICE * (1 + load / (2 * (1 - load)))
    assert sum(took) / len(took) == pytest.approx(expected, rel=0.05)
    assert link.began == ARRIVALS * SIZE


def _shared(arrivals: list[float]) -> tuple[SharedLink, list[float]]:
    link, took = SharedLink(RATE), [0.0] * len(arrivals)
    now = 0.0

    def ended(number: int) -> None:
        took[number] = now - arrivals[number]

    for number, at in enumerate(arrivals):
        while (end := link.next_end()) <= at:
            now = end
            link.end_due(now)
        link.begin(at, SIZE, lambda number=number: ended(number))  # type: ignore[misc]
    while len(link):
        now = link.next_end()
        link.end_due(now)
    return link, took


@pytest.mark.parametrize("load", [0.3, 0.6, 0.8])
def test_a_shared_link_takes_what_processor_sharing_does(load: float) -> None:
    link, took = _shared(_arrivals(load, 2))
    assert sum(took) / len(took) == pytest.approx(SERVICE / (1 - load), rel=0.05)
    assert link.carried == ARRIVALS * SIZE


def test_two_transfers_share_and_the_last_has_the_rest_to_itself() -> None:
    link, ends = SharedLink(100.0), list[str]()
    link.begin(0.0, 100, lambda: ends.append("first"))
    link.begin(0.5, 100, lambda: ends.append("second"))
    # 50 bytes alone, then 50 at half the rate.
    assert link.next_end() == pytest.approx(1.5)
    link.end_due(1.5)
    assert ends == ["first"]
    assert link.next_end() == pytest.approx(2.0)
    link.end_due(2.0)
    assert ends == ["first", "second"]
    assert link.next_end() == float("inf")


def test_a_queue_that_is_ill_takes_longer() -> None:
    link = QueueLink(100.0, latency=0.1)
    assert link.begin(0.0, 100) == pytest.approx(1.1)
    link.slower = 10.0
    assert link.begin(2.0, 100) == pytest.approx(2.0 + 10.0 + 1.0)


def test_an_end_that_is_looked_at_early_stays() -> None:
    link, ends = SharedLink(100.0), list[str]()
    link.begin(0.0, 100, lambda: ends.append("one"))
    link.end_due(0.5)
    assert not ends
    assert link.next_end() == pytest.approx(1.0)
