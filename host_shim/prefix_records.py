"""Why a prefix was not used: a record for each request of an engine.

A connector says what a request asked for, what the pool said, and when the request is over. Engines that give
their storage no name of the request ask questions instead: a question's record ends once all that it can
bring has been moved, or when later questions need its room.

A record is finished on a thread of its own. There the agent is asked how fast flash is and how fast the
engine computes (the recompute gate's figures), the record is counted, logged at debug, and sent to the
agent, whose status and metrics show the sums. Everything is bounded; beyond it the oldest record ends early.
"""

import itertools
import logging
import threading
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from host_shim.connector_jobs import JobRunner, within
from host_shim.control_wire import Outcome, PrefixReport

_log = logging.getLogger(__name__)

OPEN_MAX = 4096
"""Requests that are not over."""
KEYS_MAX = 65_536
"""Blocks that are known to belong to a question."""
ENDED_MAX = 4096
"""Records that wait for the thread; beyond it the oldest is counted without being reported."""
QUESTION_SECONDS = 30.0
"""How long blocks that are stored behind a hole belong to the question that found it."""
SPEEDS_SECONDS = 10.0
"""How long the agent's figures are believed."""
CLOSE_SECONDS = 1.0
"""For records that wait at the end, and once more for the thread."""


class Speeds(NamedTuple):
    """Bytes a second: what flash brings, and what the engine would compute. None: not known."""

    load: float | None = None
    compute: float | None = None


@dataclass(slots=True)
class PrefixRecord:
    """One request. Blocks are counted; seconds are those that the engine waited, or would have."""

    asked: int = 0
    found: int = 0
    usable: int = 0
    """The leading run: blocks from the first on, up to the first hole."""
    hole: int | None = None
    """The first block that is not there; None where all are."""
    cause: Outcome | None = None
    """Of the hole; None where no agent said."""
    stored: int = 0
    loaded: int = 0
    loaded_bytes: int = 0
    load_seconds: float = 0.0
    load_estimate: float | None = None
    """What it was to take, by what flash brought lately."""
    compute_seconds: float | None = None
    """What computing the loaded blocks would have taken."""
    left: set[Any] = field(default_factory=set)
    """Of a question: blocks of the leading run that were not loaded yet."""
    began: float = 0.0

    @property
    def saved_seconds(self) -> float | None:
        """Seconds that loading saved; negative where computing would have been quicker."""
        return None if self.compute_seconds is None else self.compute_seconds - self.load_seconds

    def note_answers(self, outcomes: Sequence[Outcome | None]) -> None:
        """What the pool said of the request's blocks, in their order."""
        self.asked = len(outcomes)
        self.found = sum(each is Outcome.HIT for each in outcomes)
        self.usable = leading_hits(outcomes)
        if self.usable < self.asked:
            self.hole, self.cause = self.usable, outcomes[self.usable]

    def report(self) -> PrefixReport:
        saved = self.saved_seconds
        return PrefixReport(
            self.asked, self.found, self.usable, self.stored, self.loaded,
            _reported(self),
            None if saved is None else round(saved * 1e3),
            round(self.load_seconds * 1e3),
        )  # fmt: skip


class PrefixRecords:
    """The records of one connector. Any thread; no call waits for the pool, but on the thread of records."""

    def __init__(
        self,
        speeds: Callable[[], Speeds],
        send: Callable[[Sequence[PrefixReport]], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`speeds` asks the agent, `send` tells it; both may wait for the pool, and run on a thread."""
        self._ask_speeds, self._send = speeds, send
        self._clock = clock
        self._runner = JobRunner("g35-records", threads=1, waiting_max=1)
        self._open: OrderedDict[Hashable, PrefixRecord] = OrderedDict()
        self._question_of: OrderedDict[Hashable, Hashable] = OrderedDict()
        self._ended: deque[PrefixRecord] = deque()
        self._numbers = itertools.count()
        self._speeds, self._asked_speeds_at = Speeds(), float("-inf")
        self._lock = threading.Lock()
        self.last: PrefixRecord | None = None
        self._counts: Counter[str] = Counter()
        self._holes: Counter[str] = Counter()

    def note_answers(self, request: Hashable, outcomes: Sequence[Outcome | None]) -> None:
        with self._lock:
            self._record(request).note_answers(outcomes)

    def note_moved(
        self, request: Hashable, *, loaded: int = 0, stored: int = 0, size: int = 0, seconds: float = 0.0
    ) -> None:
        """Blocks of a request were loaded, `size` bytes of them in so many seconds, or stored."""
        with self._lock:
            self._add(self._record(request), loaded, stored, size, seconds)

    def finish(self, request: Hashable) -> None:
        with self._lock:
            record = self._open.pop(request, None)
            if record is not None:
                self._end(record)

    def note_question(self, keys: Sequence[Hashable], outcomes: Sequence[Outcome | None]) -> None:
        """What the pool said of some blocks, in their order: a record of its own."""
        number = ("question", next(self._numbers))
        with self._lock:
            self._end_old_questions()
            record = self._record(number)
            record.note_answers(outcomes)
            record.left = set(keys[: record.usable])
            for key in keys:
                self._question_of[key] = number
                self._question_of.move_to_end(key)
            while len(self._question_of) > KEYS_MAX:
                self._question_of.popitem(last=False)
            self._end_if_done(number, record)

    def note_keys_moved(
        self, keys: Sequence[Hashable], done: Sequence[bool], *, is_load: bool, size: int, seconds: float
    ) -> None:
        """Blocks were loaded or stored, by the questions that they belong to. `size`: of one block."""
        with self._lock:
            of_question: dict[Hashable, list[tuple[Hashable, bool]]] = {}
            for key, well in zip(keys, done, strict=True):
                number = self._question_of.get(key)
                if number in self._open:
                    of_question.setdefault(number, []).append((key, well))
                elif not is_load and well:
                    self._counts["stored"] += 1
            for number, moved in of_question.items():
                record, count = self._open[number], sum(well for _, well in moved)
                part = seconds * len(moved) / len(keys)
                if is_load:
                    self._add(record, count, 0, count * size, part)
                    record.left.difference_update(key for key, _ in moved)
                    self._end_if_done(number, record)
                else:
                    self._add(record, 0, count, 0, 0.0)

    def _end_old_questions(self) -> None:
        before = self._clock() - QUESTION_SECONDS
        while self._open:
            number, record = next(iter(self._open.items()))
            if record.began > before:
                return
            del self._open[number]
            self._end(record)

    def _end_if_done(self, number: Hashable, record: PrefixRecord) -> None:
        """A question whose leading run was loaded is over, once nothing is left to be stored behind it."""
        if not record.left and record.usable == record.asked:
            del self._open[number]
            self._end(record)

    def totals(self) -> dict[str, Any]:
        """Sums over all records that were finished: blocks, milliseconds, and holes by their cause."""
        with self._lock:
            return {**self._counts, "holes": dict(self._holes)}

    def close(self) -> None:
        """End all records, and the thread; what it did not get to is not reported."""
        with self._lock:
            for record in self._open.values():
                self._end(record)
            self._open.clear()
        within(CLOSE_SECONDS, self._finish_all, None)
        self._runner.close(CLOSE_SECONDS)

    def _record(self, request: Hashable) -> PrefixRecord:
        record = self._open.get(request)
        if record is None:
            record = self._open[request] = PrefixRecord(began=self._clock())
            if len(self._open) > OPEN_MAX:
                self._end(self._open.popitem(last=False)[1])
        return record

    def _add(self, record: PrefixRecord, loaded: int, stored: int, size: int, seconds: float) -> None:
        record.loaded += loaded
        record.stored += stored
        record.loaded_bytes += size
        record.load_seconds += seconds

    def _end(self, record: PrefixRecord) -> None:
        if len(self._ended) >= ENDED_MAX:
            self._count(self._ended.popleft())
        self._ended.append(record)
        self._runner.submit(self._finish_all)  # where it is refused, one that waits will see this, too

    def _finish_all(self) -> None:
        now = self._clock()
        if now - self._asked_speeds_at >= SPEEDS_SECONDS:
            self._asked_speeds_at = now
            self._speeds = self._ask_speeds()
        reports = []
        while True:
            with self._lock:
                if not self._ended:
                    break
                record = self._ended.popleft()
                if self._speeds.load:
                    record.load_estimate = record.loaded_bytes / self._speeds.load
                if self._speeds.compute:
                    record.compute_seconds = record.loaded_bytes / self._speeds.compute
                self._count(record)
            reports.append(record.report())
            if _log.isEnabledFor(logging.DEBUG):
                _log.debug("%s", _line(record))
        if reports:
            self._send(reports)

    def _count(self, record: PrefixRecord) -> None:
        self.last = record
        counts = self._counts
        counts["requests"] += 1
        for name in ("asked", "found", "usable", "stored", "loaded"):
            counts[name] += getattr(record, name)
        counts["load_ms"] += round(record.load_seconds * 1e3)
        saved = record.saved_seconds
        if saved is not None:
            counts["saved_ms" if saved >= 0 else "cost_ms"] += round(abs(saved) * 1e3)
        if record.hole is not None:
            self._holes[_cause_text(record)] += 1


def _reported(record: PrefixRecord) -> Outcome:
    if record.hole is None:
        return Outcome.HIT
    return Outcome.UNKNOWN if record.cause is None else record.cause


def leading_hits(outcomes: Sequence[Outcome | None]) -> int:
    """How many from the first on are there."""
    for at, each in enumerate(outcomes):
        if each is not Outcome.HIT:
            return at
    return len(outcomes)


def _cause_text(record: PrefixRecord) -> str:
    return "no answer" if record.cause is None else record.cause.name.lower().replace("_", " ")


def _line(record: PrefixRecord) -> str:
    hole = "no hole" if record.hole is None else f"hole at {record.hole}: {_cause_text(record)}"
    took = f"loaded {record.loaded} in {record.load_seconds * 1e3:.1f} ms"
    if record.load_estimate is not None:
        took += f" (estimated {record.load_estimate * 1e3:.1f})"
    saved = record.saved_seconds
    worth = "" if saved is None else f", {'saved' if saved >= 0 else 'cost'} {abs(saved) * 1e3:.1f} ms"
    return (
        f"prefix: {record.asked} blocks asked for, {record.found} found, {record.usable} usable, {hole}; "
        f"{took}{worth}; stored {record.stored}"
    )
