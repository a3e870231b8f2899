"""Values that are replaced, many seeds: see tests/support/sim/mutable_simulation.py for what must hold.

G35_SEED moves the seeds, G35_SEEDS says how many. A failure prints the seed; running it alone:
    .venv/bin/python -m tests.sim.test_mutable_simulation SEED
"""

from __future__ import annotations

import os
import sys
from collections import Counter

import pytest

from agent.pool.mutable import replace as replacing
from tests.support.sim.mutable_simulation import MutableSimulation, Wrong
from tests.support.sim.seed_counts import seed_count

SEEDS = seed_count(whole=120, part=30)
GROUPS = max(1, SEEDS // 30)
STALE_MAX = 1
"""Older values that came back between agents, of some thousand reads: none but in a case of decision 52."""


@pytest.mark.parametrize("group", range(GROUPS))
def test_many_seeds(group: int, seed: int) -> None:
    counts: Counter[str] = Counter()
    read_with_peers = stale = 0
    for number in range(group, SEEDS, GROUPS):
        simulation = MutableSimulation((seed, number))
        try:
            simulation.run()
        except Exception as error:
            raise AssertionError(f"simulation {seed} {number}: {error!r}, {simulation.counts}") from error
        counts.update(simulation.counts)
        if simulation.agents_count > 1:
            read_with_peers += simulation.counts["hits"]
            stale += simulation.stale_between_agents
    print(dict(counts), f"stale between agents {stale} of {read_with_peers}")
    assert stale <= STALE_MAX
    if group == 0 and SEEDS >= 30:
        # A run in which nothing went wrong, or nothing was checked, proves nothing.
        for what in ("hang", "down", "broken", "rot", "lose", "crash", "sabotage"):
            assert counts[f"fault {what}"] > 2, what
        for cause in ("late", "enclosure_down", "evicted", "never_stored"):
            assert counts[f"miss {cause}"] > 0, cause
        assert counts["hits"] > 500
        assert counts["held"] > 50
        assert counts["checked at the end"] > 100


def test_the_same_seed_is_the_same_run(seed: int) -> None:
    for number in range(4):
        runs = {MutableSimulation((seed, number)).run() for _ in range(2)}
        assert len(runs) == 1, f"simulation {seed} {number} differs from itself"


@pytest.mark.interpreted
def test_the_oracle_sees_an_older_value_that_comes_back(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A replace that forgets the older entries must fail, or the simulation proves nothing."""
    monkeypatch.setattr(replacing.ReplacingWriter, "_older_in", lambda _self, _cached: None)
    monkeypatch.setattr(replacing.ReplacingWriter, "_forget_others", lambda _self, _directory: None)
    for number in range(40):
        try:
            MutableSimulation((seed, number)).run()
        except Wrong:
            return
    raise AssertionError("no older value came back in 40 seeds")


if __name__ == "__main__":
    simulation = MutableSimulation((int(os.environ.get("G35_SEED", "35")), int(sys.argv[1])))
    try:
        print(simulation.run())
    finally:
        print(dict(simulation.counts), simulation.faults, simulation.agents_count, simulation.settings)
