"""Gray failure: a namespace that is there, and slower or less true than the others. Without I/O.

An enclosure that is gone says so by itself. One that is stopped, slow, or fails one command in a hundred
keeps its connection and slows all workers that ask it. `OutlierDetection.look` compares all namespaces a few
times a second and gives each a verdict:

    TRUSTED ──bad twice, or paused──► SUSPECT ──good for `hold`──► PROBATION ──good for a while──► TRUSTED
                                         ▲                            │
                                         └────────── bad twice ───────┘   (`hold` doubles each time)

A look is bad where the namespace is

* late: one answer in five, and three at least, missed its deadline, or the circuit breaker is open;
* wrong: half a per cent of the answers, and three at least, were errors of its own;
* slow: half of its reads took longer than four times its peers' median, and 4 ms at least. Placement is by
  hash, so all namespaces get the same mix of sizes. Where all are slow it is the network, or this machine.
  A namespace of this machine is no peer of those over the fabric: they are slower because of the way.

A suspect gets no new values as long as the key's other set has room (agent/pool/write/put.py). Reads of it
are waited for only as long as its peers' slowest take (`Health.patience`); they go on, so that its recovery
is seen. Nothing that it holds is moved or given up. On probation it is used like any other.

A drive gets its enclosure's verdict where that is the worse one: an agent reads one drive of a thousand too
rarely for a quantile, but all drives of one enclosure often enough. The worst drive does not count there.

Quantiles against peers need no knowledge of drives, network, sizes and load, as a limit in seconds would.
Counts decay with every look; errors, which are rare, decay more slowly.
"""

import enum
import math
from bisect import bisect_left
from collections.abc import Hashable, Sequence, Set
from dataclasses import dataclass, field
from typing import Final

from agent.remote.circuit_breaker import LATENCY_BUCKETS, Health

LOOK_SECONDS: Final = 0.25
READS_DECAY: Final = 0.7
ERRORS_DECAY: Final = 0.97
"""What a look keeps of the counts before it: half of the reads for half a second, of the errors for six."""
READS_LEAST: Final = 10
"""A quantile of fewer reads than this says nothing."""
LATE_LEAST: Final = 3
LATE_SHARE: Final = 0.2
ERRORS_LEAST: Final = 3
ERRORS_SHARE: Final = 0.005
SLOWER_THAN_PEERS: Final = 4.0
SLOW_LEAST_SECONDS: Final = 0.004
BAD_LOOKS: Final = 2
PATIENCE_LEAST_SECONDS: Final = 0.002
HOLD_FIRST_SECONDS: Final = 5.0
HOLD_MAX_SECONDS: Final = 300.0
PROBATION_SECONDS: Final = 30.0
_SCALE_LEAST: Final = 1e-6
_FORGOTTEN: Final = 0.05


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
    """The counts of one namespace, or of one enclosure, from look to look.

    `took` is kept in units of `scale`, so that a look at which nothing was read costs one multiplication.
    """

    took: list[float] = field(default_factory=lambda: [0.0] * LATENCY_BUCKETS)
    scale: float = 1.0
    answers: float = 0.0
    late: float = 0.0
    errors: float = 0.0
    answers_long: float = 0.0

    def decay(self) -> None:
        self.scale *= READS_DECAY
        if self.scale < _SCALE_LEAST:
            self.took = [count * self.scale for count in self.took]
            self.scale = 1.0
        self.answers *= READS_DECAY
        self.late *= READS_DECAY
        self.answers_long *= ERRORS_DECAY
        self.errors *= ERRORS_DECAY

    def add(self, answers: int, late: int, errors: int, took: Sequence[int]) -> None:
        """Add the counts since the last look; `took` is empty where nothing was read."""
        self.answers += answers
        self.answers_long += answers
        self.late += late
        self.errors += errors
        if took:
            scale = self.scale
            self.took = [old + new / scale for old, new in zip(self.took, took, strict=True)]

    def quantile(self, share: float) -> float | None:
        """Seconds within which this share of the reads was answered, rounded up to a power of two of
        microseconds; None where there were too few."""
        if self.answers < READS_LEAST:
            return None
        reads = sum(self.took)
        if reads * self.scale < READS_LEAST:
            return None
        left = reads * share
        for bucket, count in enumerate(self.took):
            left -= count
            if left <= 0:
                return float(1 << bucket + 1) / 1e6
        return float(1 << LATENCY_BUCKETS) / 1e6


@dataclass(slots=True)
class _Member(_Record):
    """A namespace: the counts of its `Health` at the last look, and the verdict."""

    took_before: list[int] = field(default_factory=lambda: [0] * LATENCY_BUCKETS)
    answers_before: int = 0
    errors_before: int = 0
    late_before: int = 0
    verdict: Verdict = Verdict.TRUSTED
    bad_looks: int = 0
    good_since: float = 0.0
    hold: float = HOLD_FIRST_SECONDS

    def take_in(self, health: Health, shelf: "_Shelf | None") -> None:
        """Add the counts since the last look, for the enclosure too."""
        answers, errors, late = health.answers, health.errors, health.late_answers
        if answers == self.answers_before and late == self.late_before and self._is_forgotten():
            return
        self.decay()
        fresh, fresh_errors, fresh_late = (
            answers - self.answers_before,
            errors - self.errors_before,
            late - self.late_before,
        )
        if fresh or fresh_late:
            took_before, self.took_before = self.took_before, list(health.reads_took)
            took = [now - before for now, before in zip(self.took_before, took_before, strict=True)]
            self.answers_before, self.errors_before, self.late_before = answers, errors, late
            self.add(fresh, fresh_late, fresh_errors, took)
            if shelf is not None:
                shelf.add(fresh, fresh_late, fresh_errors, took)
        if shelf is not None:
            if self.late > shelf.worst_late:
                shelf.worst_late, shelf.worst_late_of = self.late, self.answers
            if self.errors > shelf.worst_errors:
                shelf.worst_errors, shelf.worst_errors_of = self.errors, self.answers_long

    def _is_forgotten(self) -> bool:
        """Whether nothing is left of it that counts: most of a thousand drives, for an agent that is idle."""
        return self.answers < _FORGOTTEN and self.late < _FORGOTTEN and self.errors < _FORGOTTEN

    def is_unremarkable(self) -> bool:
        """Whether a look at it alone could find nothing, and has not lately."""
        return (
            self.answers < READS_LEAST
            and self.late < LATE_LEAST
            and self.errors < ERRORS_LEAST
            and not self.bad_looks
            and self.verdict is Verdict.TRUSTED
        )


@dataclass(slots=True)
class _Shelf(_Record):
    """An enclosure: all its namespaces together, and the counts of the worst of them."""

    worst_late: float = 0.0
    worst_late_of: float = 0.0
    """The answers of the namespace with the most late ones."""
    worst_errors: float = 0.0
    worst_errors_of: float = 0.0

    def begin(self) -> None:
        self.decay()
        self.worst_late = self.worst_late_of = self.worst_errors = self.worst_errors_of = 0.0


class OutlierDetection:
    """Looks at the `Health` of every namespace of a pool map, in its order. One thread looks."""

    def __init__(self, health: Sequence[Health]) -> None:
        self._health = health
        self._records = [_Member() for _ in health]
        self._shelves: dict[Hashable, _Shelf] = {}
        """By enclosure, of which there are as many as in the configuration."""

    def grow(self, health: Sequence[Health]) -> None:
        """More namespaces follow; the records of the others stay. Not during a look."""
        self._records += [_Member() for _ in health[len(self._records) :]]
        self._health = health

    def verdict(self, member: int) -> Verdict:
        return self._records[member].verdict

    def look(
        self, now: float, enclosures: Sequence[Hashable] = (), in_place: Set[int] = frozenset()
    ) -> list[Change]:
        """Judge all; the verdicts that changed. Call it every `LOOK_SECONDS`; `now` in seconds.

        `enclosures` says where each namespace is: anything that stands for the enclosure, None where that is
        not known. Without it every namespace is judged by itself alone. `in_place`: the namespaces that are
        read without a wire.
        """
        shelves = self._gather(enclosures)
        medians = _Peers([record.quantile(0.5) for record in self._records], in_place)
        slowest = _Peers([record.quantile(0.95) for record in self._records], in_place)
        here = {enclosures[member] for member in in_place if member < len(enclosures)}
        shelves_here = {number for number, name in enumerate(self._shelves) if name in here}
        shelf_most = _Peers([shelf.quantile(1 / 3) for shelf in self._shelves.values()], shelves_here)
        shelf_slowest = _Peers([shelf.quantile(0.95) for shelf in self._shelves.values()], shelves_here)
        why_shelf = {
            name: _what_is_wrong_with_all(self._shelves[name], shelf_most, number)
            for number, name in enumerate(self._shelves)
        }
        patience_shelf = {
            name: _patience(shelf_slowest.of(number)) for number, name in enumerate(self._shelves)
        }
        changes = []
        for member, (record, health) in enumerate(zip(self._records, self._health, strict=True)):
            name = enclosures[member] if shelves[member] is not None else None
            bad_shelf = name is not None and why_shelf[name] != ""
            if not bad_shelf and not health.is_paused and record.is_unremarkable():
                continue
            why = _what_is_wrong(record, health, medians, member)
            if not why and name is not None:
                why = why_shelf[name]
            if _judge(record, why, health.is_paused, now):
                changes.append(Change(member, record.verdict, why or "it has done well since"))
            health.trusted = record.verdict is not Verdict.SUSPECT
            if health.trusted:
                health.patience = math.inf
            else:
                health.patience = _patience(slowest.of(member))
                if math.isinf(health.patience) and name is not None:
                    health.patience = patience_shelf[name]
        return changes

    def _gather(self, enclosures: Sequence[Hashable]) -> Sequence[_Shelf | None]:
        """Add the counts since the last look; the shelf of every namespace."""
        for shelf in self._shelves.values():
            shelf.begin()
        shelves: list[_Shelf | None] = [None] * len(self._records)
        for member, name in enumerate(enclosures):
            if name is not None:
                shelves[member] = self._shelves.setdefault(name, _Shelf())
        for record, health, of in zip(self._records, self._health, shelves, strict=True):
            record.take_in(health, of)
        return shelves


def _what_is_wrong(record: _Member, health: Health, medians: "_Peers", member: int) -> str:
    """Why this look is bad, for the log; nothing if it is good. Times in seconds."""
    if health.is_paused:
        return "it does not answer"
    why = _late(record.late, record.answers) or _errors(record.errors, record.answers_long)
    median = medians.values[member]
    if why or median is None:
        return why
    usual = medians.of(member)
    if usual is None or median <= max(SLOWER_THAN_PEERS * usual, SLOW_LEAST_SECONDS):
        return ""
    return f"half of its reads take over {median / 2 * 1e3:.3g} ms, its peers' under {usual * 1e3:.3g} ms"


def _what_is_wrong_with_all(shelf: _Shelf, most_reads: "_Peers", number: int) -> str:
    """The same for an enclosure: all of it but its worst namespace, beside the other enclosures."""
    why = _late(shelf.late - shelf.worst_late, shelf.answers - shelf.worst_late_of) or _errors(
        shelf.errors - shelf.worst_errors, shelf.answers_long - shelf.worst_errors_of
    )
    if why:
        return f"of its enclosure, {why}"
    # Two reads in three, not half of them: so that one slow drive of two does not speak for both.
    most, usual = most_reads.values[number], most_reads.of(number)
    if most is None or usual is None or most <= max(SLOWER_THAN_PEERS * usual, SLOW_LEAST_SECONDS):
        return ""
    return f"its enclosure's reads take over {most / 2 * 1e3:.3g} ms, its peers' under {usual * 1e3:.3g} ms"


def _late(late: float, answers: float) -> str:
    if late >= LATE_LEAST and late >= LATE_SHARE * (answers + late):
        return f"{late / (answers + late):.0%} of its answers are late"
    return ""


def _errors(errors: float, answers: float) -> str:
    if errors >= ERRORS_LEAST and errors >= ERRORS_SHARE * answers:
        return f"{errors / answers:.1%} of its answers are errors"
    return ""


def _judge(record: _Member, why: str, paused: bool, now: float) -> bool:
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
    """One figure of every namespace, and the median of the others of each. For one over the fabric those are
    the others over the fabric; one of this machine is to be as quick as any."""

    def __init__(self, values: Sequence[float | None], in_place: Set[int]) -> None:
        self.values = values
        self._in_place = in_place
        self._sorted = sorted(value for value in values if value is not None)
        self._over_fabric = self._sorted
        if in_place:
            self._over_fabric = sorted(
                value for at, value in enumerate(values) if value is not None and at not in in_place
            )

    def of(self, member: int) -> float | None:
        """The lower median of the others' figures; None where there are none."""
        own, known = self.values[member], self._over_fabric
        if member in self._in_place:
            known = self._sorted
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
