"""Rounds that do not disturb each other by what they leave of the processors."""

from __future__ import annotations

import time
from collections.abc import Callable

from agent.host_os.cpu_idle import LOOK_SECONDS, wake_up_microseconds

SETTLE_SECONDS = 10 * LOOK_SECONDS
"""An agent whose requests have ended lets processors sleep again long before."""


class Processors:
    """What processors may do when nothing of ours works, and how to have that again.

    An agent keeps them awake while values come, and a moment longer. A floor, or another store, that is
    measured in that moment would be slower or quicker than it is (docs/benchmarks.md).
    """

    def __init__(
        self,
        told: Callable[[], int | None] = wake_up_microseconds,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._told, self._clock, self._sleep = told, clock, sleep
        self._at_first = told()

    def settle(self) -> None:
        """Wait until they may sleep as at first, for SETTLE_SECONDS at most: others may ask as well."""
        end = self._clock() + SETTLE_SECONDS
        while self._clock() < end:
            now = self._told()
            if now is None or self._at_first is None or now >= self._at_first:
                return
            self._sleep(LOOK_SECONDS / 10)
