"""How a speed is taken: many short rounds, all names in turn, and the median of each.

Threads start together, and the time runs from their common start to the end of the last of them.
"""

import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from statistics import median
from types import MappingProxyType
from typing import Protocol

ROUNDS = 5
WARM_UP_SECONDS = 0.3
LATENCIES_MIN = 400
"""Operations of one round of which the median time is taken."""
GIBIBYTE = 1 << 30
PERCENTILES = MappingProxyType({"p50_ms": 50, "p99_ms": 99, "p999_ms": 99.9})
"""Of the times of single operations: what they are called in a record."""

Turn = Callable[[], int | None]
"""One operation: the bytes that it moved, or None when there is nothing left to do."""
TogetherFor = Callable[[Sequence[Turn], float, int], "Timed"]
"""`together`, or another way to have turns taken: for how many seconds, and how many at the least."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One round. `value` is in the unit of the name."""

    value: float
    operations: int
    bytes: int
    seconds: float
    latencies: tuple[float, ...] = ()
    """Of each operation, in seconds, where they were taken (`together_clocked`)."""
    parts: Mapping[str, float] = field(default_factory=dict)
    """What the value was made of, by name; the record has the median of each."""


@dataclass(frozen=True, slots=True)
class Timed:
    """What `together` has seen."""

    operations: int
    bytes: int
    seconds: float
    latencies: tuple[float, ...] = ()


class Meter(Protocol):
    """Is told of each timed part: before its threads start, and when all have done and none has gone yet."""

    def begin(self) -> None: ...

    def end(self) -> None: ...


_meters: list[Meter] = []


@contextmanager
def metered(meter: Meter) -> Iterator[None]:
    """`together` tells the meter until this ends."""
    _meters.append(meter)
    try:
        yield
    finally:
        _meters.remove(meter)


class Probe(Protocol):
    """One name. `round` works for about `seconds` and says what it measured."""

    def prepare(self) -> None: ...

    def round(self, seconds: float) -> Sample: ...


def rate(timed: Timed) -> Sample:
    """A speed in GiB/s out of what was moved."""
    value = timed.bytes / GIBIBYTE / timed.seconds if timed.seconds else 0.0
    return Sample(value, timed.operations, timed.bytes, timed.seconds, timed.latencies)


def median_time(timed: Timed) -> Sample:
    """The median time of the operations, in milliseconds."""
    value = median(timed.latencies) * 1e3
    return Sample(value, timed.operations, timed.bytes, timed.seconds)


def together(turns: Sequence[Turn], seconds: float, least: int = 0) -> Timed:
    """Take turns in one thread each until `seconds` are over or there is nothing left to do.

    Each thread takes `least` turns at the least.

    Raises what a turn raises, once all threads have ended.
    """
    operations, moved = [0] * len(turns), [0] * len(turns)
    began, ends = [0.0], [0.0] * len(turns)
    failures: list[BaseException] = []
    stop, leave = threading.Event(), threading.Event()
    clock = time.perf_counter

    def begin() -> None:
        """By the last that comes, before any goes on: this thread may get no processor for a while then."""
        began[0] = clock()

    start, ended = threading.Barrier(len(turns) + 1, begin), threading.Semaphore(0)

    def work(number: int, turn: Turn) -> None:
        count = total = 0
        start.wait()
        end = clock() + seconds
        try:
            while (clock() < end or count < least) and not stop.is_set():
                got = turn()
                if got is None:
                    break
                count += 1
                total += got
        except BaseException as failure:
            failures.append(failure)
            stop.set()
        ends[number] = clock()
        operations[number], moved[number] = count, total
        ended.release()
        leave.wait()

    threads = [
        threading.Thread(target=work, args=(number, turn), name=f"bench {number}", daemon=True)
        for number, turn in enumerate(turns)
    ]
    for meter in _meters:
        meter.begin()
    for thread in threads:
        thread.start()
    try:
        start.wait()
        for _ in threads:
            ended.acquire()
        for meter in _meters:
            meter.end()
    finally:
        stop.set()
        leave.set()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    return Timed(sum(operations), sum(moved), max(ends) - began[0])


class Clocked:
    """A turn that writes down how long it took, in seconds. The clock is two calls of 50 ns each."""

    def __init__(self, turn: Turn) -> None:
        self._turn = turn
        self.taken: list[float] = []

    def __call__(self) -> int | None:
        before = time.perf_counter()
        moved = self._turn()
        if moved is not None:
            self.taken.append(time.perf_counter() - before)
        return moved


def together_clocked(turns: Sequence[Turn], seconds: float, least: int = 0) -> Timed:
    """`together`, with the time of each operation. It is for turns of one operation."""
    clocked = [Clocked(turn) for turn in turns]
    timed = together(clocked, seconds, least)
    return replace(timed, latencies=tuple(one for each in clocked for one in each.taken))


def in_bursts(burst: Callable[[float], Timed], seconds: float) -> Timed:
    """The sums of several bursts, of which each gets the time that is left of `seconds`."""
    bursts: list[Timed] = []
    while (took := sum(each.seconds for each in bursts)) < seconds:
        bursts.append(burst(seconds - took))
    operations, moved = sum(each.operations for each in bursts), sum(each.bytes for each in bursts)
    return Timed(operations, moved, took, tuple(one for each in bursts for one in each.latencies))


def run_rounds(
    probes: Mapping[str, Probe],
    seconds: float,
    said: Callable[[str, int], None],
    given_up: Callable[[str, Exception], bool] = lambda name, why: False,
    settle: Callable[[], None] = lambda: None,
) -> dict[str, list[Sample]]:
    """Warm each up, then ROUNDS rounds of each in turn. `seconds` is what a name gets in all.

    `settle()` and `said(name, round)` are called before each round, -1 being the warm-up. What a round
    raises is raised, unless `given_up(name, it)` is true: then this name goes without a figure, and the
    others go on.
    """
    samples: dict[str, list[Sample]] = {name: [] for name in probes}
    each = seconds / ROUNDS
    for number in range(-1, ROUNDS):
        for name, probe in probes.items():
            if name not in samples:
                continue
            settle()
            said(name, number)
            try:
                taken = probe.round(each if number >= 0 else min(each, WARM_UP_SECONDS))
            except Exception as why:
                if not given_up(name, why):
                    raise
                del samples[name]
                continue
            if number >= 0:
                samples[name].append(taken)
    return samples


def middle(samples: Sequence[Sample]) -> float:
    """The median of the rounds: one that was disturbed does not count."""
    return median(sample.value for sample in samples)


def details(samples: Sequence[Sample]) -> dict[str, object]:
    """Further keys of a record, with which its value can be checked."""
    found: dict[str, object] = {
        "rounds": [float(f"{sample.value:.6g}") for sample in samples],
        "operations": sum(sample.operations for sample in samples),
        "bytes": sum(sample.bytes for sample in samples),
        "seconds": round(sum(sample.seconds for sample in samples), 4),
    }
    taken = sorted(one for sample in samples for one in sample.latencies)
    found |= {name: round(median(sample.parts[name] for sample in samples), 4) for name in samples[0].parts}
    if taken:
        found |= {name: round(percentile(taken, percent), 4) for name, percent in PERCENTILES.items()}
    return found


def percentile(taken: Sequence[float], percent: float) -> float:
    """The smallest of the sorted times that `percent` of 100 of them don't exceed, in milliseconds."""
    return taken[max(0, math.ceil(round(len(taken) * percent / 100, 6)) - 1)] * 1e3
