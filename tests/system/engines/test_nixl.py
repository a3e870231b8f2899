"""NIXL's POSIX plug-in on each face that has files, in each of its queue modes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.engines.engine_environments import engine_python, run_in_engine
from tests.support.pool_up import PoolUp
from tests.support.processes import Processes
from tests.system.engines.engine_pool import EnginePool

STEPS = Path(__file__).with_name("nixl_steps.py")
NO_URING = "use_uring: no io_uring"


def test_nixl_on_the_mount(processes: Processes, tmp_path: Path) -> None:
    engine_python("nixl")
    pool = PoolUp(processes, tmp_path / "state", "--drives", "1", "--drive-size", "256M")
    for folder in EnginePool(str(pool.state)).folders():
        printed = run_in_engine("nixl", STEPS, str(folder), seconds=240)
        assert "all steps done" in printed, folder
    pool.down()
    if NO_URING in printed:
        pytest.skip("no io_uring (sysctl kernel.io_uring_disabled=0 gives it); NIXL's other modes did well")
