"""One enclosure lies about the pool map to each who looks, many seeds: tests/support/sim/forged_pool.py.

G35_SEED moves the seeds, G35_SEEDS says how many. A failure prints the seed.
"""

from __future__ import annotations

import os
import random
from collections import Counter
from pathlib import Path

import pytest

from agent.pool.map import commit
from tests.support.sim.forged_pool import ForgedPool
from tests.support.sim.seed_counts import seed_count

SEEDS = seed_count(whole=20, part=5)
STEPS = 40

pytestmark = pytest.mark.expects_log(".*")


def test_many_seeds(seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commit, "PAUSE_SECONDS", 0.0)
    monkeypatch.setattr(os, "fsync", lambda _: None)  # of the agents' notes, some hundred times
    counts: Counter[str] = Counter()
    for number in range(SEEDS):
        folder = tmp_path / str(number)
        folder.mkdir()
        pool = ForgedPool(random.Random(f"forged {seed} {number}"), folder)
        try:
            pool.run(STEPS)
        except Exception as error:
            raise AssertionError(f"forged {seed} {number}: {error!r}, {dict(pool.counts)}") from error
        finally:
            pool.close()
        counts.update(pool.counts)
    print(dict(counts))
    if SEEDS >= 5:
        # A run in which none of it happened proves nothing.
        for what in (
            "edited",
            "replayed",
            "another seal",
            "a stranger's seal",
            "erase",
            "join",
            "end",
            "puts",
        ):
            assert counts[what] > SEEDS // 4, what
