"""Which enclosures count for a key whose value is replaced; and how one that is away is left out.

The values of such a key lie in either of its sets, and the newest must win. While one enclosure is away,
nobody knows what it has of a key. So before a value is stored without it, the others bear a *mark* against
it (agent/pool/format/sync_record.py). All that an enclosure has, of values that are replaced, does not count
while a mark is against it, and what it had before never counts again (agent/pool/maintenance/resync.py).

Every operation goes by records that were read at most `fresh` seconds before. Who marks waits longer than
that before he stores anything. So an operation that began without knowing the mark was begun before.

A namespace *counts* for a key where

* its record was read just now, and the records of the key's other namespaces bear no mark against it that is
  not over; and
* each of the others was read just now as well; or is left out by a mark of this one; or was read at a time
  from which on this one never was away. Without that, the other one might bear a mark against this one that
  nobody here has seen: this one was away, the other one stored something alone, and then went away.

What is remembered of records only grows, as they do (`SyncRecord.joined`), so a late or a lost write of one
takes no mark back from an agent that has seen it.
"""

import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from agent.pool.counters import MissCause
from agent.pool.format.sync_record import (
    BLANK,
    MARKS_MAX,
    RECORD_BYTES,
    RECORD_OFFSET,
    DamagedRecord,
    SyncRecord,
    decode_sync_record_untrusted,
)
from agent.pool.late_answers import wait_for
from agent.pool.steps import Acquire, IoChannel, Pending, Steps
from agent.pool.volume.directory_cache import CachedSet

WRITE_SECONDS: Final = 1.0
"""For the write of a record, and for its flush."""


@dataclass(frozen=True, slots=True)
class SyncTiming:
    """Seconds. `unbroken` has to be less than `away`: see the module's docstring."""

    fresh: float = 0.75
    """How long a record is believed; upkeep reads them more often than that."""
    unbroken: float = 4.0
    """Between two reads of one record, for the time between them to count as one in which it was there."""
    away: float = 5.0
    """How long an enclosure does not answer before it is left out."""
    retry: float = 0.5
    """Between two reads of the record of one that does not answer."""
    settle: float = 15.0
    """From the even mark until it is in sync: longer than an operation takes, or a late write."""
    again: float = 60.0
    """Before it is tried again to bring one back that another agent has left out meanwhile."""

    @property
    def known(self) -> float:
        """From a write of a record on, until every operation that begins goes by it."""
        return self.fresh * 1.25


TIMING: Final = SyncTiming()


def namespaces_of(sets: Iterable[CachedSet]) -> tuple[int, ...]:
    """Those that some sets lie in, each once."""
    return tuple(dict.fromkeys(cached.namespace for cached in sets))


class _Seen:
    """What this agent knows of one namespace."""

    __slots__ = (
        "is_damaged",
        "is_hung",
        "missing_since",
        "on_flash",
        "read_at",
        "record",
        "since",
        "tried_at",
    )

    def __init__(self) -> None:
        self.record = BLANK
        self.on_flash = BLANK
        """As it was read last: an agent that wrote it from an older one may have taken a mark away."""
        self.is_damaged = False
        self.is_hung = False
        """Its last read had no answer, and to ask again costs time."""
        self.read_at = float("-inf")
        """When the last read that brought it went out."""
        self.since = float("inf")
        """From when on it has been there without a break."""
        self.missing_since: float | None = None
        self.tried_at = float("-inf")


class InSync:
    """What an agent knows of the sync records of a volume's namespaces. Safe from any thread."""

    def __init__(self, nguid_of: Callable[[int], bytes], timing: SyncTiming = TIMING) -> None:
        self._nguid_of = nguid_of
        self.timing = timing
        self._seen: dict[int, _Seen] = {}
        self._last_marks: dict[bytes, int] = {}
        """Of all records, the greatest against each namespace."""
        self._guard = threading.Lock()
        self._writer = threading.Lock()
        """Held while a record is read and written."""

    def _of(self, namespace: int) -> _Seen:
        seen = self._seen.get(namespace)
        if seen is None:
            with self._guard:
                seen = self._seen.setdefault(namespace, _Seen())
        return seen

    # -- what is known ----------------------------------------------------------------------------

    def record(self, namespace: int) -> SyncRecord:
        return self._of(namespace).record

    def floor(self, namespace: int) -> int:
        """What a namespace has of this generation, or of a lesser one, does not count."""
        return self._of(namespace).record.floor

    def is_fresh(self, namespace: int, now: float) -> bool:
        return now - self._of(namespace).read_at < self.timing.fresh

    def is_out(self, namespace: int, among: Iterable[int]) -> bool:
        """Whether a record of `among` bears a mark against it that is not over, as far as is known."""
        nguid, incarnation = self._nguid_of(namespace), self.record(namespace).incarnation
        return any(self.record(each).marks.get(nguid, 0) > incarnation for each in among)

    def counted(self, namespaces: Sequence[int], now: float) -> list[int]:
        """Those of a key's namespaces that count."""
        return [
            each
            for each in namespaces
            if self.is_fresh(each, now)
            and not self.is_out(each, namespaces)
            and all(self._vouched(each, other, now) for other in namespaces if other != each)
        ]

    def _vouched(self, namespace: int, other: int, now: float) -> bool:
        """Whether the record of `other` would say of `namespace` what this agent knows."""
        if self.is_fresh(other, now) or self._leaves_out(namespace, other):
            return True
        return self._of(other).read_at >= self._of(namespace).since

    def _leaves_out(self, namespace: int, other: int) -> bool:
        return self.record(namespace).marks.get(self._nguid_of(other), 0) % 2 == 1

    def left_out(self, namespaces: Sequence[int]) -> list[int]:
        """Those that a mark is against, as far as is known."""
        return [each for each in namespaces if self.is_out(each, namespaces)]

    def last_mark(self, namespace: int) -> int:
        """The greatest mark against a namespace that this agent knows of."""
        return self._last_marks.get(self._nguid_of(namespace), 0)

    def mark_on_flash(self, namespace: int, other: int) -> int:
        """The mark against `other` in the record of a namespace, as it was read last."""
        return self._of(namespace).on_flash.marks.get(self._nguid_of(other), 0)

    def waiting(self) -> list[int]:
        """The namespaces that do not count, and could: they can be read, and a mark is against them, or their
        record is damaged."""
        return [
            each
            for each, seen in self._known()
            if seen.is_damaged or (seen.missing_since is None and self._has_mark(each, seen))
        ]

    def marked(self) -> int:
        """How many namespaces are left out, as far as this agent knows."""
        return sum(self._has_mark(each, seen) for each, seen in self._known())

    def _known(self) -> list[tuple[int, _Seen]]:
        with self._guard:
            return list(self._seen.items())

    def _has_mark(self, namespace: int, seen: _Seen) -> bool:
        return self._last_marks.get(self._nguid_of(namespace), 0) > seen.record.incarnation

    # -- reading ----------------------------------------------------------------------------------

    def refresh(self, channel: IoChannel, namespaces: Iterable[int], deadline: float) -> Steps[float]:
        """Read the records that are not fresh, side by side. Those that do not come in time are away. When
        this began: what was fresh then is fresh for the whole operation."""
        began = channel.now()
        wanted = [each for each in namespaces if self._wants(each, began)]
        if wanted:
            yield from self._read(channel, wanted, deadline)
        return began

    def _wants(self, namespace: int, now: float) -> bool:
        seen = self._of(namespace)
        if seen.is_hung and now - seen.tried_at < self.timing.retry:
            return False
        return now - seen.read_at >= self.timing.fresh

    def _read(self, channel: IoChannel, namespaces: Sequence[int], deadline: float) -> Steps[None]:
        began = channel.now()
        half = (began + deadline) / 2
        reads: list[tuple[int, memoryview, Pending]] = []
        for namespace in namespaces:
            self._of(namespace).tried_at = began
            block = memoryview(bytearray(RECORD_BYTES))
            reads.append((namespace, block, channel.read(namespace, RECORD_OFFSET, block)))
        for namespace, block, pending in reads:
            missing = self._of(namespace).missing_since is not None
            until = min(half, began + self.timing.retry) if missing else half
            cause = yield from wait_for(channel, pending, until)
            self._of(namespace).is_hung = cause is MissCause.LATE
            record = None
            if cause is None:
                try:
                    record = decode_sync_record_untrusted(block, self._nguid_of(namespace))
                except DamagedRecord:
                    # As one that cannot be read; what brings it back writes it anew.
                    self._of(namespace).is_damaged = True
            self._note(namespace, record, began, channel.now())

    def _note(self, namespace: int, record: SyncRecord | None, began: float, now: float) -> None:
        seen = self._of(namespace)
        with self._guard:
            if record is None:
                if seen.missing_since is None:
                    seen.missing_since = began
                return
            seen.missing_since, seen.is_damaged = None, False
            seen.on_flash = record
            seen.record = seen.record.joined(record)
            for nguid, mark in record.marks.items():
                self._last_marks[nguid] = max(mark, self._last_marks.get(nguid, 0))
            if now - seen.read_at > self.timing.unbroken:
                seen.since = began
            seen.read_at = max(seen.read_at, began)

    # -- storing without one that is away ---------------------------------------------------------

    def settle(
        self, channel: IoChannel, namespaces: Sequence[int], deadline: float
    ) -> Steps[list[int] | MissCause]:
        """The namespaces of a key that count, with all the others left out: what is written there is the
        newest. Otherwise why nothing may be written yet."""
        for is_last in (False, True):
            now = yield from self.refresh(channel, namespaces, deadline)
            counted = self.counted(namespaces, now)
            lacking = [
                (each, other)
                for other in namespaces
                if other not in counted
                for each in counted
                if not self._misses(each, other, now)
            ]
            if not counted:
                return MissCause.ENCLOSURE_DOWN
            if any(self.is_fresh(each, now) and self._comes_back(each) for each in namespaces):
                return MissCause.LATE
            if not lacking:
                return counted
            if is_last or not all(self._is_away(other, now) for _, other in lacking):
                return MissCause.ENCLOSURE_DOWN
            if not (yield from self._leave_out(channel, lacking, deadline)):
                return MissCause.LATE
        return MissCause.LATE

    def _misses(self, namespace: int, other: int, now: float) -> bool:
        """Whether the record of a namespace says, on flash, that `other` does not count."""
        mark = self._of(namespace).on_flash.marks.get(self._nguid_of(other), 0)
        if self.is_fresh(other, now):
            return mark > self.record(other).incarnation
        return mark % 2 == 1

    def _comes_back(self, namespace: int) -> bool:
        """Whether it is about to count: some agents may know of it before others."""
        incarnation = self.record(namespace).incarnation
        return incarnation % 2 == 1 and self.last_mark(namespace) == incarnation + 1

    def _is_away(self, namespace: int, now: float) -> bool:
        missing = self._of(namespace).missing_since
        return missing is not None and now - missing >= self.timing.away

    def _leave_out(
        self, channel: IoChannel, lacking: Sequence[tuple[int, int]], deadline: float
    ) -> Steps[bool]:
        """Mark, for each pair, the second in the record of the first; and wait until all agents know."""
        wait = self.timing.known
        for namespace in dict.fromkeys(each for each, _ in lacking):
            others = [other for each, other in lacking if each == namespace]
            if channel.now() + wait >= deadline:
                return False
            if not (yield from self.mark(channel, namespace, others, deadline, odd=True)):
                return False
        until = channel.now() + wait
        if until >= deadline:
            return False
        closed = threading.Lock()
        closed.acquire()
        yield Acquire(closed, until)  # Nobody gives it away.
        return True

    def mark(
        self, channel: IoChannel, namespace: int, others: Sequence[int], deadline: float, *, odd: bool
    ) -> Steps[bool]:
        """Write marks against `others` into the record of a namespace: the next odd or even numbers, from
        those that are known. True: they are on flash."""
        if not (yield Acquire(self._writer, deadline)):
            return False
        try:
            began = channel.now()
            yield from self._read(channel, [namespace], deadline)
            if not self.is_fresh(namespace, began):
                return False
            record = self.record(namespace)
            marks: dict[bytes, int] = {}
            for other in others:
                nguid = self._nguid_of(other)
                known = self.last_mark(other)
                known = max(known, self.record(other).incarnation)
                marks[nguid] = max(known if known % 2 == odd else known + 1, 1 if odd else 2)
            return (yield from self._write(channel, namespace, record.joined(SyncRecord(marks=marks))))
        finally:
            self._writer.release()

    def bring_back(
        self, channel: IoChannel, namespace: int, incarnation: int, floor: int, deadline: float
    ) -> Steps[bool]:
        """Write into its own record that marks against a namespace are over up to this number. An odd one
        says that the even one follows: nothing is stored meanwhile without it, nor in it."""
        if not (yield Acquire(self._writer, deadline)):
            return False
        try:
            record = self.record(namespace).joined(SyncRecord(floor, incarnation))
            return (yield from self._write(channel, namespace, record))
        finally:
            self._writer.release()

    def _write(self, channel: IoChannel, namespace: int, record: SyncRecord) -> Steps[bool]:
        if len(record.marks) > MARKS_MAX:
            return False
        began = channel.now()
        pending = channel.write(namespace, RECORD_OFFSET, [record.encode(self._nguid_of(namespace))])
        if (yield from wait_for(channel, pending, began + WRITE_SECONDS)) is not None:
            return False
        unflushed = channel.unflushed(namespace)
        if unflushed is not None:
            # What is stored next relies on the record, whatever power is lost.
            flush = channel.flush(namespace)
            if (yield from wait_for(channel, flush, channel.now() + WRITE_SECONDS)) is not None:
                return False
            channel.flushed(namespace, unflushed, flush)
        self._note(namespace, record, began, channel.now())
        return True
