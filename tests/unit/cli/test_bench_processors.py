"""A round of the bench begins once processors may sleep as they might at first."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from agent.bench.run_bench import SETTLE_SECONDS, Processors

SLEEPY = 2_000_000_000


class _Clock:
    def __init__(self, told: Sequence[int | None]) -> None:
        self.now = 0.0
        self._told = list(told)

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def tell(self) -> int | None:
        """The next answer, the last one for ever."""
        return self._told.pop(0) if len(self._told) > 1 else self._told[0]


def _settled_after(*told: int | None) -> float:
    clock = _Clock(told)
    Processors(clock.tell, lambda: clock.now, clock.sleep).wait_to_sleep()
    return clock.now


@pytest.mark.parametrize(
    "told",
    [(SLEEPY, SLEEPY), (0, 0), (None,), (SLEEPY, None), (100, SLEEPY)],
    ids=["as at first", "kept awake by others", "not told", "no longer told", "more than at first"],
)
def test_nobody_waits_for_nothing(told: Sequence[int | None]) -> None:
    assert _settled_after(*told) == 0


def test_it_is_waited_for() -> None:
    assert 0 < _settled_after(SLEEPY, 0, 0, 0, SLEEPY) < SETTLE_SECONDS


def test_it_is_not_waited_for_for_ever() -> None:
    assert _settled_after(SLEEPY, 0) == pytest.approx(SETTLE_SECONDS, abs=0.1)
