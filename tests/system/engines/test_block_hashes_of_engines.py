"""Block hashes against the engines' own code; the values in tests/unit stand for it where no engine is."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.engines.engine_environments import run_in_engine

STEPS = Path(__file__).with_name("hash_steps.py")


@pytest.mark.parametrize("engine", ["lmcache", "sglang", "vllm"])
def test_hashes_are_those_of(engine: str) -> None:
    assert "all steps done" in run_in_engine(engine, STEPS, engine, seconds=240)
