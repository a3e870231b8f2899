"""Two copies, scrub and quarantine under faults, many seeds: see tests/support/sim/copies_simulation.py.

G35_SEED moves the seeds, G35_SEEDS says how many. A failure prints the seed; running it alone:
    .venv/bin/python -m tests.sim.test_copies_simulation SEED
"""

from __future__ import annotations

import os
import sys
from collections import Counter

import pytest

from agent.pool.maintenance import replication, scrub
from tests.support.sim import pool_simulation
from tests.support.sim.copies_simulation import CopiesSimulation
from tests.support.sim.pool_simulation import Wrong
from tests.support.sim.seed_counts import seed_count

SEEDS = seed_count(whole=32)
YOUNG_SECONDS = 0.3
PAUSE_SECONDS = 0.005
SECONDS = 1.5
"""How long a simulation lives, in virtual time."""

pytestmark = pytest.mark.expects_log(
    r"is set aside: its medium is bad", r"nothing was removed there", r"a directory could not be written"
)


@pytest.fixture(autouse=True)
def _short_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scrub, "youth", lambda volume: YOUNG_SECONDS)
    monkeypatch.setattr(scrub, "PAUSE_SECONDS", PAUSE_SECONDS)
    monkeypatch.setattr(pool_simulation, "SECONDS", SECONDS)


def test_many_seeds(seed: int) -> None:
    counts: Counter[str] = Counter()
    for number in range(SEEDS):
        simulation = CopiesSimulation((seed, number))
        try:
            simulation.run()
        except Exception as error:
            raise AssertionError(f"simulation {seed} {number}: {error!r}, {simulation.counts}") from error
        counts.update(simulation.counts)
        tally, scrubbed = simulation.tally(), simulation.scrubbed
        counts["copies"] += tally.copies_made
        counts["hedged"] += tally.hedged_reads
        counts["hedges won"] += tally.hedge_wins
        counts["served by the other copy"] += tally.other_copy_reads
        counts["bad slots"] += scrubbed.slots_bad
        counts["set aside"] += scrubbed.slots_quarantined
        counts["passes"] += scrubbed.passes
    print(dict(counts))
    if SEEDS >= 32:
        # A run in which none of it happened proves nothing.
        for what in ("copies", "hedged", "hedges won", "served by the other copy", "passes"):
            assert counts[what] > 10, what
        assert counts["bad slots"] > 2, "three looks in a life this short: most rot is stored over before"
        assert counts["gets of what is gone"] > 100


def test_the_same_seed_is_the_same_run(seed: int) -> None:
    for number in range(3):
        assert len({CopiesSimulation((seed, number)).run() for _ in range(2)}) == 1


def test_the_oracle_sees_a_copy_that_comes_after_a_delete(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the look at the original the simulation must fail, or it proves nothing."""
    monkeypatch.setattr(replication._Copy, "original_stands", lambda self: True)
    for number in range(150):
        try:
            CopiesSimulation((seed, number), agents=1).run()
        except Wrong as wrong:
            if "deleted" in str(wrong):
                return
    raise AssertionError("no deleted key came back in 150 seeds")


if __name__ == "__main__":
    scrub.youth = lambda volume: YOUNG_SECONDS
    scrub.PAUSE_SECONDS = PAUSE_SECONDS
    pool_simulation.SECONDS = SECONDS
    simulation = CopiesSimulation((int(os.environ.get("G35_SEED", "35")), int(sys.argv[1])))
    try:
        print(simulation.run())
    finally:
        print(dict(simulation.counts), simulation.faults, simulation.agents_count, simulation.scrubbed)
