"""SGLang's loader, fault hooks and file back-end on the pool, and the pool dying under it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.engines.engine_environments import engine_python, run_in_engine
from tests.support.pool_up import PoolUp
from tests.support.processes import Processes

STEPS = Path(__file__).with_name("sglang_steps.py")
CONTROLLER_STEPS = Path(__file__).with_name("sglang_controller_steps.py")
OPTIONS = ("--drives", "1", "--drive-size", "256M", "--read-deadline-ms", "2000")
WITH_SHARED = ("--drives", "1", "--drive-size", "1G", "--read-deadline-ms", "2000")


def test_sglang_on_the_pool(processes: Processes, tmp_path: Path) -> None:
    engine_python("sglang")
    pool = PoolUp(processes, tmp_path / "state", *OPTIONS)
    printed = run_in_engine("sglang", STEPS, str(pool.state), seconds=240)
    assert "all steps done" in printed
    pool.down()


@pytest.mark.timeout(600)
def test_sglangs_controller_and_host_pool_on_the_pool(processes: Processes, tmp_path: Path) -> None:
    engine_python("sglang")
    pool = PoolUp(processes, tmp_path / "state", *WITH_SHARED)
    printed = run_in_engine("sglang", CONTROLLER_STEPS, str(pool.state), seconds=480)
    assert printed.count("loaded by another") == 4
    assert "all steps done" in printed
    pool.down()
