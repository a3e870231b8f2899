"""Gray failure: a namespace that is there, and slower or less true than the others. Without I/O.

An enclosure that is gone says so by itself. One that is stopped, slow, or fails one command in a hundred
keeps its connection and drags everybody down who asks it. So somebody looks at all namespaces beside each
other, a few times a second (`Suspicion.look`), and gives each a verdict:

    TRUSTED ──bad twice, or paused──► SUSPECT ──good for `hold`──► PROBATION ──good for a while──► TRUSTED
                                         ▲                            │
                                         └────────── bad twice ───────┘   (`hold` doubles each time)

What makes a look bad:

* late: one answer in five, and three at least, did not come within its deadline, or the circuit breaker is
  open;
* errors: half a per cent of the answers, and three at least, were errors of the namespace's own;
* slow: half of its reads took longer than four times what half of its peers' take, and 4 ms at least.
  Placement is by hash, so all namespaces are asked for the same mix of sizes, and nothing else about them has
  to be known. Where all are slow, none is: that is the network, or this machine.

A suspect gets no new values as long as the key's other set has room (agent/pool/writing.py), and reads of it
are waited for only as long as its peers' slowest take (`Health.patience`); they go on, so that its recovery
is seen. Nothing that it holds is moved or given up. On probation it is used like any other.

Why quantiles against peers, and not an absolute limit: what is slow depends on the drives, the network, the
size of values and the load, and an operator would have to know all four. Counts decay with every look, so
that a look weighs what happened lately; errors, which are rare, are remembered for longer.
"""

from __future__ import annotations

import enum
import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field

from agent.remote.health import LATENCY_BUCKETS, Health

LOOK_SECONDS = 0.25
READS_DECAY, ERRORS_DECAY = 0.7, 0.97
"""What a look keeps of the counts before it: half of the reads for half a second, of the errors for six."""
READS_LEAST = 10
"""A quantile of fewer reads than this says nothing."""
LATE_LEAST, LATE_SHARE = 3, 0.2
ERRORS_LEAST, ERRORS_SHARE = 3, 0.005
SLOWER_THAN_PEERS, SLOW_LEAST_SECONDS = 4.0, 0.004
BAD_LOOKS = 2
PATIENCE_LEAST_SECONDS = 0.002
HOLD_FIRST_SECONDS, HOLD_MAX_SECONDS = 5.0, 300.0
PROBATION_SECONDS = 30.0


class Verdict(enum.Enum):
    """What becomes of a namespace."""

    TRUSTED = "trusted"
    SUSPECT = "suspect"
    PROBATION = "on probation"


@dataclass(frozen=True, slots=True)
class Change:
    """A verdict that changed. `member` is the namespace's number in the pool map; `why` is for the log."""

    member: int
    verdict: Verdict
    why: str


@dataclass(slots=True)
class _Record:
    """What is remembered of one namespace from look to look."""

    took_before: list[int] = field(default_factory=lambda: [0] * LATENCY_BUCKETS)
    answers_before: int = 0
    errors_before: int = 0
    late_before: int = 0
    took: list[float] = field(default_factory=lambda: [0.0] * LATENCY_BUCKETS)
    answers: float = 0.0
    late: float = 0.0
    errors: float = 0.0
    answers_long: float = 0.0
    verdict: Verdict = Verdict.TRUSTED
    bad_looks: int = 0
    good_since: float = 0.0
    hold: float = HOLD_FIRST_SECONDS

    def take_in(self, health: Health) -> None:
        took, answers, errors, late = (
            list(health.reads_took),
            health.answers,
            health.errors,
            health.late_answers,
        )
        self.took = [
            old * READS_DECAY + new - before
            for old, new, before in zip(self.took, took, self.took_before, strict=True)
        ]
        fresh = answers - self.answers_before
        self.answers = self.answers * READS_DECAY + fresh
        self.late = self.late * READS_DECAY + late - self.late_before
        self.answers_long = self.answers_long * ERRORS_DECAY + fresh
        self.errors = self.errors * ERRORS_DECAY + errors - self.errors_before
        self.took_before, self.answers_before = took, answers
        self.errors_before, self.late_before = errors, late

    def quantile(self, share: float) -> float | None:
        """Seconds within which this share of the reads was answered, rounded up to a power of two of
        microseconds; None where there were too few."""
        reads = sum(self.took)
        if reads < READS_LEAST:
            return None
        left = reads * share
        for bucket, count in enumerate(self.took):
            left -= count
            if left <= 0:
                return float(1 << bucket + 1) / 1e6
        return float(1 << LATENCY_BUCKETS) / 1e6


class Suspicion:
    """Looks at the `Health` of every namespace of a pool map, in its order. One thread looks."""

    def __init__(self, health: Sequence[Health]) -> None:
        self._health = health
        self._records = [_Record() for _ in health]

    def verdict(self, member: int) -> Verdict:
        return self._records[member].verdict

    def look(self, now: float) -> list[Change]:
        """Judge all; the verdicts that changed. Call it every `LOOK_SECONDS`; `now` in seconds."""
        for record, health in zip(self._records, self._health, strict=True):
            record.take_in(health)
        medians = _Peers([record.quantile(0.5) for record in self._records])
        slowest = _Peers([record.quantile(0.95) for record in self._records])
        changes = []
        for member, (record, health) in enumerate(zip(self._records, self._health, strict=True)):
            why = _what_is_wrong(record, health, medians.values[member], medians.of(member))
            if _judge(record, why, health.is_paused, now):
                changes.append(Change(member, record.verdict, why or "it has done well since"))
            health.trusted = record.verdict is not Verdict.SUSPECT
            health.patience = math.inf if health.trusted else _patience(slowest.of(member))
        return changes


def _what_is_wrong(record: _Record, health: Health, median: float | None, usual: float | None) -> str:
    """Why this look is bad, for the log; nothing if it is good. Times in seconds."""
    asked = record.answers + record.late
    if health.is_paused:
        return "it does not answer"
    if record.late >= LATE_LEAST and record.late >= LATE_SHARE * asked:
        return f"{record.late / asked:.0%} of its answers are late"
    if record.errors >= ERRORS_LEAST and record.errors >= ERRORS_SHARE * record.answers_long:
        return f"{record.errors / record.answers_long:.1%} of its answers are errors"
    if median is None or usual is None or median <= max(SLOWER_THAN_PEERS * usual, SLOW_LEAST_SECONDS):
        return ""
    return f"half of its reads take over {median / 2 * 1e3:.3g} ms, its peers' under {usual * 1e3:.3g} ms"


def _judge(record: _Record, why: str, paused: bool, now: float) -> bool:
    """Move along the picture above; whether the verdict changed."""
    before = record.verdict
    if why:
        record.bad_looks += 1
        record.good_since = now
        if before is not Verdict.SUSPECT and (paused or record.bad_looks >= BAD_LOOKS):
            if before is Verdict.PROBATION:
                record.hold = min(2 * record.hold, HOLD_MAX_SECONDS)
            record.verdict = Verdict.SUSPECT
    else:
        record.bad_looks = 0
        good = now - record.good_since
        if before is Verdict.SUSPECT and good >= record.hold:
            record.verdict, record.good_since = Verdict.PROBATION, now
        elif before is Verdict.PROBATION and good >= PROBATION_SECONDS:
            record.verdict, record.hold = Verdict.TRUSTED, HOLD_FIRST_SECONDS
    return record.verdict is not before


class _Peers:
    """One figure of every namespace, and what is usual among the others of each."""

    def __init__(self, values: Sequence[float | None]) -> None:
        self.values = values
        self._sorted = sorted(value for value in values if value is not None)

    def of(self, member: int) -> float | None:
        """The lower median of the others' figures; None where there are none."""
        own, known = self.values[member], self._sorted
        if own is None:
            return known[(len(known) - 1) // 2] if known else None
        if len(known) < 2:
            return None
        middle = (len(known) - 2) // 2
        # The sorted list without the member's own figure, which need not be built.
        return known[middle if middle < bisect_left(known, own) else middle + 1]


def _patience(slowest: float | None) -> float:
    """What reads of a suspect are waited for: as long as one in twenty of its peers' take, and twice that."""
    return math.inf if slowest is None else max(2 * slowest, PATIENCE_LEAST_SECONDS)
