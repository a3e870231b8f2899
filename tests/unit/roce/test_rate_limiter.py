"""The reaction point of a connection: numbers computed by hand after Zhu et al., SIGCOMM 2015, section 3."""

from __future__ import annotations

from typing import Any

import pytest

from emulator.roce.nic.congestion import CongestionSettings, RateLimiter

LINE = 1e9
SETTINGS = CongestionSettings(
    LINE, gain=0.25, alpha_timer_s=1e-3, increase_timer_s=1e-3, round_bytes=1 << 40, fast_rounds=2,
    additive_part=0.01, hyper_part=0.1, least_part=0.1,
)  # fmt: skip


def changed(**changes: Any) -> CongestionSettings:
    fields = {name: getattr(SETTINGS, name) for name in SETTINGS.__slots__}
    return CongestionSettings(**(fields | changes))


def test_a_notification_cuts_the_rate_by_half_of_alpha() -> None:
    limiter = RateLimiter(SETTINGS)
    assert (limiter.rate, limiter.limited) == (LINE, False)
    limiter.notified(1.0)
    assert (limiter.rate, limiter.target, limiter.alpha) == (0.5 * LINE, LINE, 1.0)
    limiter.notified(1.0)
    assert (limiter.rate, limiter.target) == (0.25 * LINE, 0.5 * LINE)
    for _ in range(9):
        limiter.notified(1.0)
    assert limiter.rate == 0.1 * LINE


def test_alpha_falls_while_nothing_is_heard() -> None:
    limiter = RateLimiter(SETTINGS)
    limiter.notified(1.0)
    limiter.notified(1.0 + 2.5e-3)
    # Two whole periods, and then the notification itself.
    assert limiter.alpha == pytest.approx(0.75 * 0.75**2 + 0.25)


def test_a_rate_recovers_in_rounds() -> None:
    limiter = RateLimiter(SETTINGS)
    limiter.notified(0.0)
    limiter.notified(0.0)
    assert (limiter.rate, limiter.target) == (0.25e9, 0.5e9)
    limiter.pass_time(0.9e-3)
    assert limiter.rate == 0.25e9
    limiter.pass_time(1e-3)  # fast recovery
    assert limiter.rate == 0.375e9
    limiter.pass_time(2e-3)  # additive increase: the second round of two
    assert (limiter.target, limiter.rate) == (0.51e9, 0.4425e9)


def test_bytes_make_rounds_too_and_both_make_it_quick() -> None:
    limiter = RateLimiter(changed(round_bytes=1024))
    limiter.notified(0.0)
    limiter.notified(0.0)
    limiter.pass_time(3e-3)
    before = limiter.target
    limiter.sent(3 * 1024 - 1, 3e-3)
    assert limiter.target == pytest.approx(before + 2 * 0.01e9)
    limiter.sent(1, 3e-3)  # the third of either kind: hyper increase
    assert limiter.target == pytest.approx(before + 2 * 0.01e9 + 0.1e9)


def test_a_rate_that_has_recovered_limits_nothing() -> None:
    limiter = RateLimiter(SETTINGS)
    limiter.notified(0.0)
    limiter.pass_time(3600.0)
    assert (limiter.rate, limiter.limited) == (LINE, False)
    limiter.sent(1 << 20, 3600.0)
    assert limiter.next_at == 0.0


def test_what_was_sent_puts_the_next_off() -> None:
    limiter = RateLimiter(SETTINGS)
    limiter.notified(0.0)
    limiter.sent(500_000, 0.0)
    assert limiter.next_at == pytest.approx(1e-3)
    limiter.sent(500_000, 5e-3)
    assert limiter.next_at == pytest.approx(6e-3)


@pytest.mark.parametrize(
    "changes",
    [
        {"line_rate": 0.0}, {"line_rate": float("inf")}, {"cnp_interval_s": 0.0}, {"increase_timer_s": -1.0},
        {"gain": 0.0}, {"gain": 1.0}, {"additive_part": 0.0}, {"least_part": 2.0}, {"round_bytes": 0},
        {"fast_rounds": 0}, {"burst_s": float("nan")},
    ],
)  # fmt: skip
def test_settings_with_which_a_rate_would_stand_still_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(changes))):
        changed(**changes)
