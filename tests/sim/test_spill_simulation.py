"""Pools with a place in G4 in virtual time, many seeds: see tests/support/sim/spill_simulation.py.

G35_SEED moves the seeds, G35_SEEDS says how many. A failure prints the seed; running it alone:
    .venv/bin/python -m tests.sim.test_spill_simulation SEED
"""

from __future__ import annotations

import os
import sys
from collections import Counter

import pytest

from tests.support.sim.seed_counts import seed_count
from tests.support.sim.spill_simulation import SpillSimulation

SEEDS = seed_count(whole=120, part=24)
GROUPS = max(1, SEEDS // 12)


@pytest.mark.parametrize("group", range(GROUPS))
def test_many_seeds(group: int, seed: int) -> None:
    counts: Counter[str] = Counter()
    for number in range(group, SEEDS, GROUPS):
        simulation = SpillSimulation((seed, number))
        try:
            simulation.run()
        except Exception as error:
            raise AssertionError(f"simulation {seed} {number}: {error!r}, {simulation.counts}") from error
        counts.update(simulation.counts)
        counts["from g4"] += simulation.tally().gets_from_g4
    print(dict(counts))
    if SEEDS >= 24:
        # A run in which nothing went down or came up proves nothing.
        for what in ("spilled", "from g4", "miss g4_corrupt", "miss g4_late"):
            assert counts[what] > 0, (what, counts)


def test_what_was_deleted_or_replaced_does_not_come_up(seed: int) -> None:
    """With one agent, its crashes included, and flash that keeps what it is given."""
    came_up = 0
    for number in range(max(4, SEEDS // 10)):
        simulation = SpillSimulation((seed, "strict", number), strict=True)
        assert simulation.keeps
        simulation.run()
        came_up += simulation.tally().gets_from_g4
    assert came_up > 0


def test_several_agents_serve_nothing_that_was_deleted(seed: int) -> None:
    """Each writes what it read before, over the others'. See the oracle for what is bounded by time alone."""
    counts: Counter[str] = Counter()
    for number in range(SEEDS // 3):
        simulation = SpillSimulation((seed, "several", number), several=True)
        assert simulation.agents_count > 1
        assert simulation.keeps
        try:
            simulation.run()
        except Exception as error:
            raise AssertionError(f"{seed} several {number}: {error!r}, {simulation.counts}") from error
        counts.update(simulation.counts)
        counts["from g4"] += simulation.tally().gets_from_g4
        counts["found again"] += sum(
            each.volume.removed_marks.found_again for each in simulation.agents if each.alive
        )
    print(dict(counts))
    if SEEDS >= 24:
        assert counts["from g4"] > 0
        assert counts["found again"] > 0, "else nothing was brought back"


def test_the_same_seed_is_the_same_run(seed: int) -> None:
    for number in range(2):
        assert len({SpillSimulation((seed, number)).run() for _ in range(2)}) == 1


if __name__ == "__main__":
    simulation = SpillSimulation((int(os.environ.get("G35_SEED", "35")), int(sys.argv[1])))
    try:
        print(simulation.run())
    finally:
        print(dict(simulation.counts), simulation.faults, simulation.agents_count, simulation.settings)
