"""The course of a replay over time, for `--plot`: at most `SAMPLES_MAX` samples. When they are that many,
every second one goes, and half as many are taken from then on.
"""

import itertools
from dataclasses import dataclass
from pathlib import Path

from agent.replay.latencies import Latencies
from agent.replay.tally import Tally

SAMPLES_MAX = 512
_GIB = float(1 << 30)


@dataclass(frozen=True, slots=True)
class Sample:
    """Sums at one moment, and latencies (seconds; None: no get) since the sample before."""

    seconds: float
    blocks: int
    hits: int
    bytes_read: int
    bytes_written: int
    get_p50: float | None
    get_p99: float | None


class Course:
    """Collects samples of the sum of all tallies."""

    def __init__(self, interval: float = 0.25) -> None:
        self.samples: list[Sample] = []
        self._interval = interval
        self._next = 0.0
        self._latencies_before = Latencies()

    def watch(self, seconds: float, sums: Tally, *, last: bool = False) -> None:
        """Look at the sums `seconds` after the start; becomes a sample if one is due."""
        if seconds < self._next and not last:
            return
        latencies = sums.get_latencies.since(self._latencies_before)
        self._latencies_before = sums.get_latencies
        self.samples.append(
            Sample(
                seconds,
                sums.blocks,
                sums.hits,
                sums.bytes_read,
                sums.bytes_written,
                latencies.quantile(0.5),
                latencies.quantile(0.99),
            )
        )
        if len(self.samples) >= SAMPLES_MAX:
            del self.samples[::2]
            self._interval *= 2
        self._next = seconds + self._interval


def draw(samples: list[Sample], file: Path, title: str) -> None:
    """Hit ratio, throughput and latency over time, as PNG, SVG or PDF by the file's ending."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (ratio, throughput, latency) = pyplot.subplots(3, 1, sharex=True, figsize=(9, 8))
    steps = list(itertools.pairwise(samples))
    middles = [(before.seconds + after.seconds) / 2 for before, after in steps]

    def rates(of_bytes: str) -> list[float]:
        return [
            (getattr(after, of_bytes) - getattr(before, of_bytes)) / _GIB
            / max(after.seconds - before.seconds, 1e-9)
            for before, after in steps
        ]  # fmt: skip

    asked = [one for one in samples if one.blocks]
    ratio.plot([one.seconds for one in asked], [100 * one.hits / one.blocks for one in asked])
    ratio.set(title=title, ylabel="hit ratio so far, %", ylim=(0, 100))
    throughput.plot(middles, rates("bytes_read"), label="read")
    throughput.plot(middles, rates("bytes_written"), label="written")
    throughput.set(ylabel="GiB/s", ylim=(0, None))
    throughput.legend()
    timed = [one for one in samples if one.get_p50 is not None and one.get_p99 is not None]
    latency.plot([one.seconds for one in timed], [1e3 * (one.get_p50 or 0) for one in timed], label="p50")
    latency.plot([one.seconds for one in timed], [1e3 * (one.get_p99 or 0) for one in timed], label="p99")
    latency.set(ylabel="get, ms", xlabel="seconds", ylim=(0, None))
    if timed:
        latency.legend()
    for axes in (ratio, throughput, latency):
        axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(file)
    pyplot.close(figure)
