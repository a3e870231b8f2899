"""LMCache's own checks, benchmark and loaders on the pool, and the pool dying under it."""

from __future__ import annotations

from pathlib import Path

from tests.support.engines.engine_environments import engine_python, run_in_engine
from tests.support.pool_up import PoolUp
from tests.support.processes import Processes

STEPS = Path(__file__).with_name("lmcache_steps.py")
OPTIONS = ("--drives", "1", "--drive-size", "256M", "--read-deadline-ms", "2000")


def test_lmcache_on_the_pool(processes: Processes, tmp_path: Path) -> None:
    engine_python("lmcache")
    pool = PoolUp(processes, tmp_path / "state", *OPTIONS)
    printed = run_in_engine("lmcache", STEPS, str(pool.state), seconds=240)
    assert "all steps done" in printed
    pool.down()
