"""Waiting for a condition, never for a time: the only place in the tests that sleeps."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

POLL_SECONDS = 0.005
LATE_SESSION = r"not connected, and tried again: .*(was not answered|did not answer|was not up within)"
"""For `expects_log`: an agent's session waits 2.5 s for an answer, and then tries again. A machine that stops
the test for so long is not the product's fault; any other reason is."""


def wait_until(condition: Callable[[], T], seconds: float = 30.0, what: str = "") -> T:
    """The first true value of `condition`, asked every few milliseconds.

    Raises AssertionError after `seconds`; `what` says in it what has been waited for.
    """
    deadline = time.monotonic() + seconds
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {seconds:g} s: {what or condition}")
        time.sleep(POLL_SECONDS)
