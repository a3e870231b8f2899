"""When a requester gives up its peer: not for an absence of its own, and not before 0.54 s for each try."""

from __future__ import annotations

import pytest

from emulator.roce.nic.retry import (
    LATE_S,
    LEAST_TIMEOUT_S,
    Due,
    RetryClock,
    timeout_seconds,
)
from emulator.roce.nic.verbs import QpAttributes


def _clock(retry_count: int = 0, rnr_retry: int = 7, timeout: int = 14) -> RetryClock:
    clock = RetryClock(QpAttributes(timeout=timeout, retry_count=retry_count, rnr_retry=rnr_retry))
    clock.restart(0.0)
    return clock


def _next(clock: RetryClock, late: float = 0.0) -> tuple[Due, float]:
    """What is due at the next deadline, which is found so much late, in seconds; and when."""
    assert clock.deadline is not None
    now = clock.deadline + late
    return clock.advance(now), now


def _next_timeout(clock: RetryClock, late: float = 0.0) -> float:
    """When the next time-out counts, if every deadline is found so much late."""
    while True:
        due, now = _next(clock, late)
        if due is Due.TIMEOUT:
            return now


@pytest.mark.parametrize("code", [1, 8, 14, 17])
def test_no_time_out_is_shorter_than_the_least(code: int) -> None:
    assert timeout_seconds(code) == LEAST_TIMEOUT_S
    assert _next_timeout(_clock(timeout=code)) == pytest.approx(LEAST_TIMEOUT_S)


def test_a_longer_time_out_is_kept_and_none_is_none() -> None:
    assert timeout_seconds(19) == pytest.approx(2.147, abs=0.001)
    assert timeout_seconds(0) is None


def test_a_peer_is_given_up_after_every_try_had_its_time() -> None:
    clock, now = _clock(retry_count=7), 0.0
    while clock.take_retry():
        now = _next_timeout(clock)
    # The retries are used up by seven time-outs; the eighth is the end.
    assert _next_timeout(clock) == pytest.approx(4.29, abs=0.01)
    assert now < 4.29


def test_an_absence_of_our_own_is_no_silence_of_the_peer() -> None:
    clock = _clock()
    while clock.deadline is not None and clock.deadline < LEAST_TIMEOUT_S:
        assert _next(clock)[0] is Due.PROBE
    due, now = _next(clock, late=10.0)
    assert due is Due.PROBE, "it was found ten seconds late: the peer gets its whole time again"
    assert _next_timeout(clock) == pytest.approx(now + LEAST_TIMEOUT_S)


def test_a_device_that_is_always_late_gives_up_too() -> None:
    """It excuses itself once in a row."""
    clock, late = _clock(), 5 * LATE_S
    assert _next_timeout(clock, late) <= 2 * (LEAST_TIMEOUT_S + late) + 1e-9


def test_a_receiver_that_is_not_ready_is_there() -> None:
    """Its answer fills the counter of time-outs, and takes one of the other."""
    clock = _clock(retry_count=1, rnr_retry=2)
    assert clock.take_retry()
    assert clock.wait_for_receiver(1, 1.0)
    clock.restart(1.1)
    assert clock.take_retry()
    assert not clock.take_retry()
    assert clock.wait_for_receiver(1, 2.0)
    assert not clock.wait_for_receiver(1, 3.0)


def test_seven_waits_for_a_receiver_without_end() -> None:
    clock = _clock(rnr_retry=7)
    assert all(clock.wait_for_receiver(1, float(now)) for now in range(1000))
