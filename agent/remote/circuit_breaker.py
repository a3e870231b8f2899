"""How one namespace has been answering: the counts of every worker, and the circuit breaker.

After a few late answers in a row the namespace is left alone for a while, so that a hung drive costs a
bounded part of the workers' time. Then one request is let through as a probe, and its answer decides. A
refused request is a miss at once, with the enclosure's absence as its cause.

What is late for a get is not for the reader of a file, who has nothing else. So a patient request
(`IoChannel.has_patience`) waits to its deadline whatever its peers take, and is refused only after two
patient ones in a row were late. A change of a file that needs this namespace (`IoChannel.waits_for_slow`) is
patient, too, while the namespace answers somebody once in HANGS_SECONDS. After two that were late it goes by
the rules of gets, so that a drive that hangs holds no workers, and locks of sets, for long. No reader of a
file is refused for their sake: a change waits for silence of a second, and such a drive may come back.
agent/remote/outlier_detection.py compares all namespaces by the counts that are kept here, and sets `trusted`
and `patience`.

All workers write the numbers without a lock: a lost update delays or repeats a probe, or is one of many that
a judgement is made of. The worker's channel and the simulator's (agent/sim/faulty_flash.py) both go by
`Outstanding`, so that the results of the simulation on gray failure hold for the agent. Without I/O.
"""

import math
from typing import Final

LATE_BEFORE_PAUSE: Final = 5
PATIENT_LATE_BEFORE_PAUSE: Final = 2
"""Each has waited as long as a write may, and so has a worker, which served no get meanwhile."""
PAUSE_FIRST: Final = 0.1
PAUSE_MAX: Final = 2.0
"""Seconds. Two seconds is how long a namespace that came back may go unnoticed."""
PATIENT_PROBE_SECONDS: Final = 5.0
"""For the probe of patient requests, which waits as long as a write may (5 s by default). With less, probes
of a drive that hangs would pile up until all workers wait for it."""

HANGS_SECONDS: Final = 1.0
"""A namespace that answers nobody for so long hangs, and is not merely slow, for who changes a file."""

LATENCY_BUCKETS: Final = 24
"""Bucket n counts reads that took 2^n to 2^(n+1) microseconds; the last one also all that took longer."""

NOT_ANSWERING: Final = "the namespace has not been answering"
"""Why a request was not sent: `Health.may_ask` said no."""
CLOCK_SLACK: Final = 0.001
"""A wait may end this much before its deadline, by the rounding of a poll."""

_LONGEST: Final = (1 << LATENCY_BUCKETS) - 1


class CircuitBreaker:
    """Refuses for a while after `late_before` late answers in a row, then lets one request through as a
    probe, whose answer decides. A probe has `probe_seconds` before there is another."""

    def __init__(self, late_before: int, probe_seconds: float) -> None:
        self.late_in_a_row = 0
        self.paused_until = 0.0
        self._late_before = late_before
        self._probe_seconds = probe_seconds

    @property
    def is_open(self) -> bool:
        """Whether `may_ask` is to be asked before a request goes out."""
        return self.late_in_a_row >= self._late_before

    def may_ask(self, now: float) -> bool:
        """Whether a request may go out. The first one after a pause is the probe."""
        if self.late_in_a_row < self._late_before:
            return True
        if now < self.paused_until:
            return False
        # Everybody else stays away until the probe has had its time.
        self.paused_until = now + self._probe_seconds
        return True

    def refuses(self, now: float) -> bool:
        """Whether a request would be refused; asking is no probe."""
        return self.late_in_a_row >= self._late_before and now < self.paused_until

    def late(self, now: float) -> None:
        self.late_in_a_row += 1
        if (beyond := self.late_in_a_row - self._late_before) >= 0:
            self.paused_until = now + min(PAUSE_MAX, PAUSE_FIRST * 2.0 ** min(beyond, 8))

    def answered(self) -> None:
        self.late_in_a_row = 0
        self.paused_until = 0.0


class Health:
    """How one namespace has answered lately. `now` is in the seconds of the channel's clock."""

    def __init__(self) -> None:
        self.breaker: Final = CircuitBreaker(LATE_BEFORE_PAUSE, PAUSE_FIRST)
        self.patient_breaker: Final = CircuitBreaker(PATIENT_LATE_BEFORE_PAUSE, PATIENT_PROBE_SECONDS)
        self.answers = 0
        """Reads and writes that were answered in time, the errors among them."""
        self.errors = 0
        """Answers that were an error of the namespace's own."""
        self.late_answers = 0
        self.changes_late = 0
        """Changes of files that waited in vain since it answered last."""
        self.answered_at = -math.inf
        """When it answered last."""
        self.reads_took = [0] * LATENCY_BUCKETS
        self.trusted = True
        """Whether new values may go there."""
        self.patience = math.inf
        """Seconds that a read of it is waited for at most, whatever the reader's deadline is."""

    def may_ask(self, now: float, *, patient: bool = False) -> bool:
        """Whether a request may go out. The first one after a pause is the probe."""
        return (self.patient_breaker if patient else self.breaker).may_ask(now)

    @property
    def may_wait(self) -> bool:
        """Whether a change of a file is patient here: nobody knows that it hangs."""
        return self.changes_late < PATIENT_LATE_BEFORE_PAUSE and not self.patient_breaker.is_open

    def refuses(self, now: float, *, patient: bool = False) -> bool:
        """Whether a request would be refused; asking is no probe."""
        return (self.patient_breaker if patient else self.breaker).refuses(now)

    def answered(self, seconds: float | None, *, read: bool, failed: bool = False) -> None:
        """It answered after so many seconds, None where that is not known; `failed`: with an error."""
        if self.breaker.late_in_a_row:
            self.breaker.answered()
            self.patient_breaker.answered()
            self.changes_late = 0
        self.answers += 1
        if failed:
            self.errors += 1
        elif read and seconds is not None:
            self.reads_took[min(int(seconds * 1e6) | 1, _LONGEST).bit_length() - 1] += 1

    def late(self, now: float, *, patient: bool = False, change: bool = False) -> None:
        """`change`: the patience was that of a change."""
        self.late_answers += 1
        self.breaker.late(now)
        if patient and change:
            self.changes_late += 1
        elif patient:
            self.patient_breaker.late(now)

    def unjudged(self, now: float) -> None:
        """A patient request was lost with its path, which says nothing of the namespace. It may have been the
        probe."""
        probing = self.patient_breaker
        probing.paused_until = min(probing.paused_until, now + PAUSE_FIRST)

    @property
    def is_paused(self) -> bool:
        return self.breaker.is_open

    @property
    def may_refuse(self) -> bool:
        """Whether `may_ask` is to be asked before a request goes out."""
        return self.breaker.is_open or self.patient_breaker.is_open


class Outstanding:
    """A request under way, and the `Health` that hears of its answer: once, or not at all.

    It says how long the request is waited for. Times are in seconds of the channel's clock.
    """

    __slots__ = ("_is_change", "_is_patient", "_is_read", "_judged", "_until", "health", "since")

    def __init__(
        self,
        health: Health,
        now: float,
        *,
        is_read: bool,
        is_patient: bool = False,
        is_change: bool = False,
    ) -> None:
        """`is_change`: of steps that wait for what is slow (`IoChannel.waits_for_slow`)."""
        self.health = health
        self.since = now
        self._is_read = is_read
        self._is_patient = is_patient
        self._is_change = is_change
        self._judged = False
        self._until = math.inf

    def wait_until(self, deadline: float) -> float:
        """When to stop waiting: the deadline, or earlier where the namespace gets less patience."""
        if self._is_read and not self._is_patient:
            deadline = min(deadline, self.since + self.health.patience)
        if self._is_read and self._is_change:
            deadline = min(deadline, max(self.since, self.health.answered_at) + HANGS_SECONDS)
        self._until = deadline
        return deadline

    def gives_way(self, now: float) -> None:
        """The wait ends before its time, for its worker is needed. The namespace is late, but no reader of a
        file has waited in vain."""
        self._until = now
        self._is_patient = False

    def answered(self, now: float, *, failed: bool, lost: bool = False, waited: float | None = None) -> None:
        """The answer came, or as much of it as was wanted. `failed`: an error of the namespace's own; `lost`:
        the path died under it, which says nothing of the namespace.

        `waited`: seconds that the worker waited for this one. Where that is less than half of its time, the
        answer may have been there for long, and how long it took is not known.
        """
        if lost and self._is_patient and not self._is_change:
            self.health.unjudged(now)
        if not self._judged and not lost:
            self._judged = True
            self.health.answered_at = now
            took = now - self.since
            is_known = waited is None or 2 * waited >= took
            self.health.answered(took if is_known else None, read=self._is_read, failed=failed)

    def given_up(self, now: float) -> None:
        """Nobody waits for it any more. The namespace is late only where the waiter waited to the end: the
        rest of a value whose header proved wrong is given up as well."""
        if now + CLOCK_SLACK >= self._until:
            self.health.late(now, patient=self._is_patient, change=self._is_change)
