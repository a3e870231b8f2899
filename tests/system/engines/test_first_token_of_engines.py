"""The command that measures whole engines' time to the first token, on a small model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.engines import first_token_of_engines
from tests.support.engines.engine_environments import engine_python


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", ["lmcache", "vllm's fs tier", "llama.cpp"])
def test_a_row_for_an_engine(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    engine_python(first_token_of_engines.SETUPS[name].engine)
    target = tmp_path / "rows.json"
    words = ["--engine", name, "--model", "small", "--prefix", "256", "--prompts", "2", "--json", str(target)]
    assert first_token_of_engines.main(words) == 0
    assert f"| {name} | 256 tokens |" in capsys.readouterr().out
    (row,) = json.loads(target.read_text())
    for what in ("first_s", "processor_s"):
        assert len(row[what]) == 3
        assert min(row[what]) > 0
