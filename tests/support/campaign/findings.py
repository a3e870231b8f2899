"""What a campaign has found, by the fault that was on: the table that it prints."""

from __future__ import annotations

import threading
import time
from collections import Counter

WRONG, LOST, HUNG = "wrong", "lost", "hung"
KINDS = (WRONG, LOST, HUNG)
TEXTS_MAX = 60
QUIET = "(no fault)"


class Findings:
    """Shared by all threads. What is found belongs to the fault that is on, or was the last one."""

    def __init__(self) -> None:
        self.fault = QUIET
        self.injected: Counter[str] = Counter()
        self.aside: Counter[str] = Counter()
        """What is normal, and worth a look: misses, refusals, operations."""
        self.texts: list[str] = []
        self._began = time.monotonic()
        self._counts: Counter[tuple[str, str]] = Counter()
        self._lock = threading.Lock()

    def begin(self, fault: str, injected: int = 1) -> None:
        """A fault is on from now."""
        with self._lock:
            self.fault = fault
            self.injected[fault] += injected

    def found(self, kind: str, text: str) -> None:
        """Something is wrong, lost or hung."""
        assert kind in KINDS
        with self._lock:
            self._counts[self.fault, kind] += 1
            if len(self.texts) < TEXTS_MAX:
                self.texts.append(
                    f"{kind}: {text} (after {time.monotonic() - self._began:.0f} s, fault: {self.fault})"
                )

    def note(self, what: str, count: int = 1) -> None:
        """Something normal has happened."""
        with self._lock:
            self.aside[what] += count

    @property
    def bad(self) -> int:
        """How much was found that must not be."""
        with self._lock:
            return self._counts.total()

    def table(self) -> list[str]:
        """One line a fault, with a head and a sum."""
        with self._lock:
            faults = sorted({*self.injected, *(fault for fault, _ in self._counts)})
            rows = [
                (fault, self.injected[fault], *(self._counts[fault, kind] for kind in KINDS))
                for fault in faults
            ]
        sums = tuple(sum(row[at] for row in rows) for at in range(1, 5))  # type: ignore[misc]
        wide = max([len("fault"), *(len(row[0]) for row in rows)])
        line = "{:<%d} {:>9} {:>6} {:>6} {:>6}" % wide  # noqa: UP031
        shown = [line.format("fault", "injected", *KINDS)]
        shown += [line.format(*row) for row in rows]
        return [*shown, line.format("all", *sums)]
