"""Values that are replaced while enclosures go and come back, by many seeds (away_simulation.py).

G35_SEED moves the seeds, G35_SIM_SEEDS says how many. A failure prints the seed; running it alone:
    .venv/bin/python -m tests.sim.test_away_simulation SEED
"""

from __future__ import annotations

import os
import sys
from collections import Counter

import pytest

from agent.pool.volume.in_sync import InSync
from tests.support.sim.away_simulation import AwaySimulation
from tests.support.sim.pool_simulation import Wrong

SEEDS = int(os.environ.get("G35_SIM_SEEDS", "48"))
GROUPS = 4
STALE_MAX = 1
"""Older values that came back between agents: none but in a case of decision 52."""


@pytest.mark.parametrize("group", range(GROUPS))
def test_many_seeds(group: int, seed: int) -> None:
    counts: Counter[str] = Counter()
    stale = 0
    for number in range(group, SEEDS, GROUPS):
        simulation = AwaySimulation((seed, number))
        try:
            simulation.run()
        except Exception as error:
            raise AssertionError(f"simulation {seed} {number}: {error!r}, {simulation.counts}") from error
        counts.update(simulation.counts)
        stale += simulation.stale_between_agents
    print(dict(counts), f"stale between agents {stale}")
    assert stale <= STALE_MAX
    if group == 0 and SEEDS >= 48:
        # A run in which nothing was away, or nothing was stored meanwhile, proves nothing.
        for what in ("fault hang", "fault down", "fault cut", "fault crash", "brought back"):
            assert counts[what] > 5, what
        assert counts["stored while away"] > 100
        assert counts["hits"] > 1000


@pytest.mark.interpreted
def test_the_oracle_sees_what_comes_back_with_an_enclosure(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where no mark and no floor counts, an older value comes back, or the simulation proves nothing."""
    monkeypatch.setattr(InSync, "is_out", lambda *_: False)
    monkeypatch.setattr(InSync, "floor", lambda *_: 0)
    monkeypatch.setattr(InSync, "waiting", lambda _: [])
    monkeypatch.setattr(InSync, "_misses", lambda *_: True)
    found = 0
    for number in range(8):
        simulation = AwaySimulation((seed, number))
        try:
            simulation.run()
        except Wrong:
            found += 1
        found += simulation.stale_between_agents
    assert found >= 1


def test_the_same_seed_is_the_same_run(seed: int) -> None:
    runs = {AwaySimulation((seed, 1)).run() for _ in range(2)}
    assert len(runs) == 1


if __name__ == "__main__":
    simulation = AwaySimulation((int(os.environ.get("G35_SEED", "35")), int(sys.argv[1])))
    try:
        print(simulation.run())
    finally:
        print(dict(simulation.counts), simulation.agents_count, simulation.settings)
