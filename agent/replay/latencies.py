"""Latencies in a histogram of fixed size: 2 % apart, from a microsecond to a quarter of an hour."""

import math
from collections.abc import Iterable, Sequence

STEPS_PER_OCTAVE = 32
_OCTAVES = 30
BUCKETS = STEPS_PER_OCTAVE * _OCTAVES


class Latencies:
    """Counts by logarithm of the time. One thread writes; readers may look at any time."""

    __slots__ = ("counts",)

    def __init__(self, counts: Sequence[int] | None = None) -> None:
        self.counts = list(counts) if counts is not None else [0] * BUCKETS

    def add(self, seconds: float) -> None:
        microseconds = seconds * 1e6
        bucket = int(math.log2(microseconds) * STEPS_PER_OCTAVE) if microseconds > 1 else 0
        self.counts[min(bucket, BUCKETS - 1)] += 1

    @property
    def total(self) -> int:
        return sum(self.counts)

    def quantile(self, share: float) -> float | None:
        """Seconds that `share` of the times stay below, to 2 %; None where there are none."""
        total = self.total
        if not total:
            return None
        wanted = max(1, math.ceil(share * total))
        seen = 0
        for bucket, count in enumerate(self.counts):
            seen += count
            if seen >= wanted:
                return float(2 ** ((bucket + 0.5) / STEPS_PER_OCTAVE) / 1e6)
        raise AssertionError("the counts changed under the sum")

    def since(self, earlier: "Latencies") -> "Latencies":
        return Latencies([now - then for now, then in zip(self.counts, earlier.counts, strict=True)])


def merged(parts: Iterable[Latencies]) -> Latencies:
    """The sum of several, as a copy."""
    result = Latencies()
    for part in parts:
        result.counts = [one + other for one, other in zip(result.counts, part.counts, strict=True)]
    return result
