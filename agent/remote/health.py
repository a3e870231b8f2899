"""When to stop asking a namespace that does not answer: a circuit breaker, shared by all workers.

A late answer or two are bad luck, or a busy machine, and cost their readers the deadline. After a few in a
row the namespace is left alone for a while, so that a hung drive costs a bounded part of the workers' time
and not all of it; then one request is let through as a probe, and its answer decides. What is refused
meanwhile is a miss at once, with the enclosure's absence as its cause.

The state is three numbers, written without a lock: a lost update delays or repeats a probe.
"""

from __future__ import annotations

LATE_BEFORE_PAUSE = 5
PAUSE_FIRST, PAUSE_MAX = 0.1, 2.0
"""Seconds. Two seconds is how long a namespace that came back may go unnoticed."""


class Health:
    """How one namespace has answered lately. `now` is in the seconds of the lanes' clock."""

    __slots__ = ("late_in_a_row", "paused_until", "pauses")

    def __init__(self) -> None:
        self.late_in_a_row = 0
        self.paused_until = 0.0
        self.pauses = 0

    def may_ask(self, now: float) -> bool:
        """Whether a request may go out. The first one after a pause is the probe."""
        if self.late_in_a_row < LATE_BEFORE_PAUSE:
            return True
        if now < self.paused_until:
            return False
        # Everybody else stays away until the probe has had its time.
        self.paused_until = now + PAUSE_FIRST
        return True

    def answered(self) -> None:
        if self.late_in_a_row:
            self.late_in_a_row = 0
            self.paused_until = 0.0

    def late(self, now: float) -> None:
        self.late_in_a_row += 1
        if self.late_in_a_row >= LATE_BEFORE_PAUSE:
            pause = min(PAUSE_MAX, PAUSE_FIRST * 2 ** min(self.late_in_a_row - LATE_BEFORE_PAUSE, 8))
            self.paused_until = now + pause
            self.pauses += 1

    @property
    def is_paused(self) -> bool:
        return self.late_in_a_row >= LATE_BEFORE_PAUSE
