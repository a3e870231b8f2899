"""How one namespace has been answering: what every worker writes down, and what follows from it at once.

Two things keep a sick namespace from hurting its readers. The first is here, and quick: a circuit breaker. A
late answer or two are bad luck, or a busy machine, and cost their readers the deadline. After a few in a row
the namespace is left alone for a while, so that a hung drive costs a bounded part of the workers' time and
not all of it; then one request is let through as a probe, and its answer decides. What is refused meanwhile
is a miss at once, with the enclosure's absence as its cause. The second is slower and looks at all namespaces
beside each other (agent/remote/outlier_detection.py); it reads the counts that are kept here, and sets
`trusted` and `patience`.

The state is a few numbers, written by all workers without a lock: a lost update delays or repeats a probe, or
is one of many that a judgement is made of.
"""

from __future__ import annotations

import math
from typing import Final

LATE_BEFORE_PAUSE: Final = 5
PAUSE_FIRST: Final = 0.1
PAUSE_MAX: Final = 2.0
"""Seconds. Two seconds is how long a namespace that came back may go unnoticed."""

LATENCY_BUCKETS: Final = 24
"""Bucket n counts reads that took 2^n to 2^(n+1) microseconds; the last one also all that took longer."""

_LONGEST: Final = (1 << LATENCY_BUCKETS) - 1


class Health:
    """How one namespace has answered lately. `now` is in the seconds of the lanes' clock."""

    __slots__ = (
        "answers",
        "errors",
        "late_answers",
        "late_in_a_row",
        "patience",
        "paused_until",
        "pauses",
        "reads_took",
        "trusted",
    )

    def __init__(self) -> None:
        self.late_in_a_row = 0
        self.paused_until = 0.0
        self.pauses = 0
        self.answers = 0
        """Reads and writes that were answered in time, the errors among them."""
        self.errors = 0
        """Answers that were an error of the namespace's own."""
        self.late_answers = 0
        self.reads_took = [0] * LATENCY_BUCKETS
        self.trusted = True
        """Whether new values may go there."""
        self.patience = math.inf
        """Seconds that a read of it is waited for at most, whatever the reader's deadline is."""

    def may_ask(self, now: float) -> bool:
        """Whether a request may go out. The first one after a pause is the probe."""
        if self.late_in_a_row < LATE_BEFORE_PAUSE:
            return True
        if now < self.paused_until:
            return False
        # Everybody else stays away until the probe has had its time.
        self.paused_until = now + PAUSE_FIRST
        return True

    def answered(self, seconds: float, *, read: bool, failed: bool = False) -> None:
        """It answered after so many seconds; `failed`: with an error."""
        if self.late_in_a_row:
            self.late_in_a_row = 0
            self.paused_until = 0.0
        self.answers += 1
        if failed:
            self.errors += 1
        elif read:
            self.reads_took[min(int(seconds * 1e6) | 1, _LONGEST).bit_length() - 1] += 1

    def late(self, now: float) -> None:
        self.late_answers += 1
        self.late_in_a_row += 1
        if self.late_in_a_row >= LATE_BEFORE_PAUSE:
            pause = min(PAUSE_MAX, PAUSE_FIRST * 2 ** min(self.late_in_a_row - LATE_BEFORE_PAUSE, 8))
            self.paused_until = now + pause
            self.pauses += 1

    @property
    def is_paused(self) -> bool:
        return self.late_in_a_row >= LATE_BEFORE_PAUSE
