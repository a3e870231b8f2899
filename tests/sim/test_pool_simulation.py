"""The whole pool in virtual time, many seeds: see tests/support/sim/pool_simulation.py for what must hold.

G35_SEED moves the seeds, G35_SEEDS says how many. A failure prints the seed; running it alone:
    .venv/bin/python -m tests.sim.test_pool_simulation SEED
"""

from __future__ import annotations

import os
import sys
from collections import Counter

import pytest

from tests.support.sim.pool_simulation import PoolSimulation, Wrong
from tests.support.sim.seed_counts import seed_count

SEEDS = seed_count(whole=200, part=50)
GROUPS = max(1, SEEDS // 25)


@pytest.mark.parametrize("group", range(GROUPS))
def test_many_seeds(group: int, seed: int) -> None:
    counts: Counter[str] = Counter()
    stored_with_peers = lost = 0
    for number in range(group, SEEDS, GROUPS):
        simulation = PoolSimulation((seed, number))
        try:
            simulation.run()
        except Exception as error:
            raise AssertionError(f"simulation {seed} {number}: {error!r}, {simulation.counts}") from error
        counts.update(simulation.counts)
        if simulation.agents_count > 1:
            stored_with_peers += simulation.counts["stored"]
            lost += simulation.lost_between_agents
    print(dict(counts), f"lost between agents {lost} of {stored_with_peers}")
    if group == 0 and SEEDS >= 25:
        # A run in which nothing went wrong, or nothing was checked, proves nothing.
        for what in ("hang", "down", "broken", "rot", "lose", "crash", "sabotage", "suspect"):
            assert counts[f"fault {what}"] > 5, what
        for cause in ("corrupt", "late", "enclosure_down", "evicted", "never_stored"):
            assert counts[f"miss {cause}"] > 0, cause
        assert counts["hits"] > 500
        assert counts["stored of many"] > 500
        assert counts["deleted of many"] > 100
        assert counts["checked at the end"] > 100


def test_the_same_seed_is_the_same_run(seed: int) -> None:
    for number in range(6):
        runs = {PoolSimulation((seed, number)).run() for _ in range(2)}
        assert len(runs) == 1, f"simulation {seed} {number} differs from itself"
    assert PoolSimulation((seed, 0)).run() != PoolSimulation((seed, 1)).run()


def test_the_oracle_sees_a_planted_wrong_byte(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the proofs switched off the simulation must fail, or it proves nothing."""
    from agent.inline import cipher_suites

    monkeypatch.setattr(cipher_suites.hmac, "compare_digest", lambda one, other: True)
    for number in range(40):
        try:
            PoolSimulation((seed, number)).run()
        except Wrong:
            return
        except Exception:
            continue
    raise AssertionError("no wrong byte in 40 seeds")


if __name__ == "__main__":
    simulation = PoolSimulation((int(os.environ.get("G35_SEED", "35")), int(sys.argv[1])))
    try:
        print(simulation.run())
    finally:
        print(dict(simulation.counts), simulation.faults, simulation.agents_count, simulation.settings)
