"""A volume on KV namespaces in virtual time, many seeds: see tests/support/sim/kv_simulation.py.

G35_SEED moves the seeds, G35_SEEDS says how many. A failure prints the seed; running it alone:
    .venv/bin/python -m tests.sim.test_kv_simulation SEED
"""

from __future__ import annotations

import os
import sys
from collections import Counter

import pytest

from tests.support.sim.kv_simulation import FAULTS, KvSimulation
from tests.support.sim.pool_simulation import Wrong
from tests.support.sim.seed_counts import seed_count

SEEDS = seed_count(whole=40)


def test_many_seeds(seed: int) -> None:
    counts: Counter[str] = Counter()
    evictions = 0
    for number in range(SEEDS):
        simulation = KvSimulation((seed, number))
        try:
            simulation.run()
        except Exception as error:
            raise AssertionError(f"simulation {seed} {number}: {error!r}, {simulation.counts}") from error
        counts.update(simulation.counts)
        evictions += simulation.tally().evictions
    print(dict(counts), evictions)
    if SEEDS >= 40:
        # A run in which nothing went wrong, or nothing was checked, proves nothing.
        for what in FAULTS:
            assert counts[f"fault {what}"] > 5, what
        for cause in ("corrupt", "late", "enclosure_down", "evicted", "never_stored"):
            assert counts[f"miss {cause}"] > 0, cause
        assert counts["hits"] > 500
        assert counts["checked at the end"] > 100
        assert counts["no room"] > 0
        assert evictions > 10


def test_the_same_seed_is_the_same_run(seed: int) -> None:
    for number in range(2):
        runs = {KvSimulation((seed, number)).run() for _ in range(2)}
        assert len(runs) == 1, f"simulation {seed} {number} differs from itself"
    assert KvSimulation((seed, 0)).run() != KvSimulation((seed, 1)).run()


def test_the_oracle_sees_a_planted_wrong_byte(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the proofs switched off the simulation must fail, or it proves nothing."""
    from agent.inline import cipher_suites

    monkeypatch.setattr(cipher_suites.hmac, "compare_digest", lambda one, other: True)
    for number in range(60):
        try:
            KvSimulation((seed, number)).run()
        except Wrong:
            return
        except Exception:
            continue
    raise AssertionError("no wrong byte in 60 seeds")


if __name__ == "__main__":
    simulation = KvSimulation((int(os.environ.get("G35_SEED", "35")), int(sys.argv[1])))
    try:
        print(simulation.run())
    finally:
        print(dict(simulation.counts), simulation.faults, len(simulation.agents), simulation.capacities)
