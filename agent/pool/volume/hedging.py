"""Hedged reads, for a volume that keeps two copies: when to ask the other copy, and how often.

A get asks one copy. Where that takes longer than 95 % of the latest reads, it asks the other as well and
opens the copy whose bytes come first. Each copy is read into memory of its own, and the loser is abandoned
(`IoChannel.abandon`: nothing is written into its memory from then on). The caller's buffer gets opened bytes
of the winner alone.

Hedges are at most a share of all gets, so a pool that is slow as a whole is not asked twice. All workers
write the counts without a lock: a lost count is one of many.
"""

from typing import Final

HEDGE_SHARE: Final = 0.05
"""The share of the gets that may be hedged, in the long run."""
SAVED_MAX: Final = 8.0
"""Hedges that may come one after the other, when there have been none for long."""
QUANTILE: Final = 0.95
FIRST_DELAY: Final = 0.01
"""Seconds, until `SAMPLES_LEAST` reads say more."""
DELAY_LEAST: Final = 0.001
SAMPLES_LEAST: Final = 32
SAMPLES_MAX: Final = 1024
"""Then all counts are halved, so that what was long ago is forgotten."""
SLICE: Final = 0.001
"""Two answers are waited for in turns, for so long each: steps wait for one thing at a time."""
_BUCKETS: Final = 24


class Hedge:
    """How long reads of a volume lately took to bring their first bytes, and how many hedges are left."""

    def __init__(self) -> None:
        self._took = [0.0] * _BUCKETS
        self._samples = 0.0
        self._saved = SAVED_MAX

    def took(self, seconds: float) -> None:
        """A get had its first bytes after so long; it earns a part of a hedge."""
        bucket = max(1, int(seconds * 1e6)).bit_length() - 1
        self._took[min(bucket, _BUCKETS - 1)] += 1
        self._samples += 1
        self._saved = min(SAVED_MAX, self._saved + HEDGE_SHARE)
        if self._samples > SAMPLES_MAX:
            self._took = [count / 2 for count in self._took]
            self._samples = sum(self._took)

    def delay(self) -> float:
        """Seconds after which the other copy is asked: rounded up to a power of two of microseconds."""
        if self._samples < SAMPLES_LEAST:
            return FIRST_DELAY
        left = self._samples * QUANTILE
        for bucket, count in enumerate(self._took):
            left -= count
            if left <= 0:
                return max(DELAY_LEAST, float(1 << bucket + 1) / 1e6)
        return float(1 << _BUCKETS) / 1e6

    def may_ask(self) -> bool:
        """Whether one more hedge is within the share; it is taken then."""
        if self._saved < 1:
            return False
        self._saved -= 1
        return True
