"""What a token weighs by model, and how large a block of a trace then is."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from agent.cli.main import main
from agent.errors import UserError
from agent.figures.tables import stored_token_bytes
from agent.replay.replay_options import BYTES_PER_TOKEN, ReplayOptions
from agent.replay.run_replay import run_replay
from host_shim.pool import Pool
from tests.support.engines.scripted_agent import ScriptedAgent

LINE = '{"timestamp": 0, "input_length": 100, "output_length": 1, "hash_ids": [1, 2]%s}\n'


def _opener(agent: ScriptedAgent) -> Callable[[ReplayOptions], Pool]:
    return lambda options: Pool(options.mount, sessions=options.concurrency + 1, files=agent)


def _trace(tmp_path: Path, more: str = "") -> Path:
    path = tmp_path / "trace.jsonl"
    path.write_text(LINE % more)
    return path


@pytest.mark.parametrize(
    ("model", "kib"),
    [
        ("llama-3.1-8b", 128),
        ("llama-3.3-70b", 320),
        ("deepseek-v3", 68.625),
        ("deepseek-v3-fp8", 34.3125),
        ("deepseek-v4-pro-fp8", 4.35546875),
    ],
)
def test_bytes_of_a_token(model: str, kib: float) -> None:
    assert stored_token_bytes()[model] == kib * 1024


def test_a_model_gives_a_tokens_bytes_unless_they_are_given() -> None:
    options = ReplayOptions(Path("trace"), Path("mount"), model="deepseek-v3")
    assert options.token_bytes == 70_272
    assert ReplayOptions(Path("trace"), Path("mount"), 0, 100, "deepseek-v3").token_bytes == 100
    assert ReplayOptions(Path("trace"), Path("mount")).token_bytes == BYTES_PER_TOKEN


def test_the_blocks_of_a_trace_are_as_large_as_it_says(tmp_path: Path) -> None:
    agent = ScriptedAgent()
    options = ReplayOptions(
        _trace(tmp_path, ', "block_size": 16'), tmp_path, model="deepseek-v4-pro-fp8", json_output=True
    )
    report = run_replay(options, _opener(agent))
    assert report.good
    assert {len(value) for value in agent.values.values()} == {16 * 4460}


def test_a_block_that_is_larger_than_any_value_is_refused_with_its_tokens(tmp_path: Path) -> None:
    options = ReplayOptions(_trace(tmp_path), tmp_path, model="llama-3.3-70b", json_output=True)
    with pytest.raises(UserError, match="a block would have 160 MiB") as refused:
        run_replay(options, _opener(ScriptedAgent()))
    assert "a block of this trace is 512 tokens" in refused.value.advice


def test_an_unknown_model_is_refused_with_the_known_ones(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["replay", str(_trace(tmp_path)), "--mount", str(tmp_path), "--model", "llama-3.3-7b"])
    assert ended.value.code == 2
    said = " ".join(capsys.readouterr().err.replace("│", " ").split())
    assert "did you mean llama-3.3-70b?" in said
    assert "deepseek-v3-fp8" in said
