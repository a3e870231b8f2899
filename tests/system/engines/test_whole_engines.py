"""Whole engines over a pool: what was computed once is loaded later, and whatever dies, they say the same."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

from tests.support.engines.engine_environments import engine_python
from tests.support.engines.whole_engine import Answer
from tests.support.engines.whole_engine_setups import SETUPS
from tests.support.pool_up import PoolUp
from tests.support.processes import Processes
from tests.support.waiting import wait_until
from tests.system.engines.engine_pool import EnginePool

BEHIND_THE_MAP = 1 << 20
FLIPPED = 32 << 10
"""Bytes of a drive to one flipped bit: of the blocks of a prompt none stays whole but by chance."""


def said(answers: list[Answer]) -> list[Any]:
    return [each.said for each in answers]


def all_loaded(answers: list[Answer]) -> bool:
    return all(each.cached == each.prompt for each in answers)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", SETUPS)
def test_an_engine_loads_what_another_computed_and_computes_what_is_lost(
    name: str, processes: Processes, tmp_path: Path
) -> None:
    setup = SETUPS[name]
    engine_python(setup.engine)
    pool = PoolUp(
        processes, tmp_path / "state", "--drives", "1", "--no-restart", "--read-deadline-ms", "2000",
        *setup.pool,
    )  # fmt: skip
    with setup.start(processes, tmp_path, pool.mount) as first:
        computed = first.ask(*range(6))
        first.end()
    assert [each.cached for each in computed] == [0] * 6
    assert {each.groups for each in computed} == {setup.groups}
    with setup.start(processes, tmp_path, pool.mount) as again:
        loaded = again.ask(0, 1)
        assert all_loaded(loaded)
        assert said(loaded) == said(computed[:2])

        pool.kill("jbof-1")
        without_enclosure = again.ask(2)
        assert without_enclosure[0].cached < without_enclosure[0].prompt
        assert said(without_enclosure) == said(computed[2:3])

        pool.process.stop(20, signal.SIGKILL)
        without_pool = again.ask(3)
        assert without_pool[0].cached == 0
        assert said(without_pool) == said(computed[3:4])

        pool.start_again()
        wait_until(EnginePool(str(pool.state)).is_connected, 60, "the enclosures to be connected")
        back = again.ask(4)
        assert all_loaded(back)
        assert said(back) == said(computed[4:5])

        for enclosure in (0, 1):
            size = max(each.stat().st_size for each in pool.state.glob(f"drives-{enclosure}/*"))
            pool.fault(enclosure, "flip", drive=0, offset=BEHIND_THE_MAP, bits=size // FLIPPED)
        damaged = again.ask(5)
        assert damaged[0].cached < damaged[0].prompt
        assert said(damaged) == said(computed[5:6])
        again.end()
    pool.down()
