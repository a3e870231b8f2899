"""The equations behind `g35 claims`, as pure functions. Units stand in the names; GB and TB are decimal.

Time is told in units of one whole prompt computed from nothing. `work_of` is the share of that work that is
left when the first part of the prompt is found. `supply` is how many times faster a prompt's cache arrives
than it is computed: bandwidth over break-even bandwidth.

What a prefill costs is in agent/figures/prefill.py. Loading against computing at a rate is the usual roofline
argument. The rest follows in the docstrings.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from agent.figures.prefill import PrefillCost

GIGA = 1e9
SECONDS_A_DAY = 86_400.0


def utilisation_of(cost: PrefillCost, peak_flops_s: float, tokens_s: float, context: int) -> float:
    """Share of the peak at which a published rate was reached."""
    return tokens_s * cost.flops(context) / context / peak_flops_s


def break_even_gb_s(bytes_per_token: float, tokens_s: float) -> float:
    """B*: the bandwidth of one GPU at which loading a prompt takes as long as computing it."""
    return bytes_per_token * tokens_s / GIGA


def slowest_lane(lanes_gb_s: Mapping[str, float]) -> tuple[str, float]:
    """Which lane gives a GPU the least when all GPUs load at once, and how much."""
    name = min(lanes_gb_s, key=lambda each: lanes_gb_s[each])
    return name, lanes_gb_s[name]


def work_of(hit_share: float, attention_share: float) -> float:
    """Work that is left when the first `hit_share` of a prompt is found: (1-a)(1-h) + a(1-h^2).

    The last tokens of a prompt attend to more than the first ones. So where attention is all of the work,
    half of a prompt found saves a quarter. With a = 0 it is the usual 1-h.
    """
    missing = 1 - hit_share
    return missing * (1 + attention_share * hit_share)


@dataclass(frozen=True, slots=True)
class Tier:
    """A tier as one GPU sees it: its supply, and the share of each prompt that nearer tiers have."""

    supply: float
    attention_share: float = 0.0
    local_share: float = 0.0

    def useful_share(self, hit_share: float) -> float:
        """The share that is loaded where loading overlaps with computing.

        More would take longer than computing the rest. So this is the time of an engine that computes the
        end of what is found while the beginning is loaded, and loses nothing by it.
        """
        a, slope = self.attention_share, 1 / self.supply
        return max(self.local_share, min(hit_share, _root(a, 1 - a + slope, 1 + self.local_share * slope)))

    def overlapped(self, hit_share: float) -> float:
        """Time of a prompt where what is found arrives while the rest is computed."""
        useful = self.useful_share(hit_share)
        return max(work_of(useful, self.attention_share), self._load(useful))

    def serial(self, hit_share: float) -> float:
        """Time of a prompt where loading comes first.

        Work saved grows faster than what is loaded, so the gate takes all that is found, or what is local.
        """
        hit_share = max(hit_share, self.local_share)
        loaded = work_of(hit_share, self.attention_share) + self._load(hit_share)
        return min(loaded, work_of(self.local_share, self.attention_share))

    def _load(self, hit_share: float) -> float:
        return (hit_share - self.local_share) / self.supply


def hit_share_for(time: float, attention_share: float) -> float:
    """The hit share from which on no more than `time` of the work is left."""
    return _root(attention_share, 1 - attention_share, 1 - time)


def supply_for(time: float, attention_share: float, local_share: float = 0.0) -> float:
    """The supply whose best overlapped time is `time`; 0 where computing alone is that fast."""
    return max(0.0, hit_share_for(time, attention_share) - local_share) / time


def _root(a: float, b: float, c: float) -> float:
    """The root from 0 on of a h^2 + b h = c, for a, b and c from 0 on; `work_of` is 1 - (1-a) h - a h^2."""
    return 2 * c / (b + math.sqrt(b * b + 4 * a * c)) if c > 0 else 0.0


def whole_gpu(speed_up: float, prefill_share: float) -> float:
    """Speed-up of a GPU that prefills for `prefill_share` of its time without a cache, and decodes else."""
    return 1 / ((1 - prefill_share) + prefill_share / speed_up)


def prefill_share_for(speed_up: float, target: float) -> float | None:
    """The share of prefill from which on a whole GPU gains `target`; None where no share does."""
    return (1 - 1 / target) / (1 - 1 / speed_up) if speed_up >= target else None


@dataclass(frozen=True, slots=True)
class Energy:
    """Joules of one prompt token, by part. A GPU that waits for its loads is taken to draw its full power."""

    computing: float
    waiting: float
    storage: float
    dpu: float

    @property
    def total(self) -> float:
        return self.computing + self.waiting + self.storage + self.dpu


def energy(
    time: float, work: float, tokens_s: float, gpu_watts: float, storage_watts: float, dpu_watts: float
) -> Energy:
    """Energy of a prompt token; `time` of a prompt, and `work`, its part in computing. Watts: of each GPU."""
    return Energy(
        computing=gpu_watts * work / tokens_s,
        waiting=gpu_watts * (time - work) / tokens_s,
        storage=storage_watts * time / tokens_s,
        dpu=dpu_watts * time / tokens_s,
    )


def written_gb_s(bytes_per_token: float, tokens_s: float, missing_share: float, time: float) -> float:
    """What a GPU writes that stores all it computes: what was missing, over the time of its prompts."""
    return bytes_per_token * tokens_s * missing_share / time / GIGA


def drive_writes_a_day(written_gb_s_of_all: float, capacity_tb: float) -> float:
    """How often a day the whole capacity is written."""
    return written_gb_s_of_all * SECONDS_A_DAY / (capacity_tb * 1000)


def retention_hours(capacity_tb: float, written_gb_s_of_all: float) -> float:
    """How long a value stays that nobody asks for, before newer values have taken all the room."""
    return capacity_tb * 1000 / written_gb_s_of_all / 3600
