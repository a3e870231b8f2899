"""What a token weighs by model, and how large a block of a trace then is."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.errors import UserError
from agent.figures.tables import stored_token_bytes
from agent.replay.replay_options import BYTES_PER_TOKEN, ReplayOptions
from agent.replay.run_replay import cut, run_replay
from host_shim.control_wire import Operation
from host_shim.pool import Pool
from tests.support.engines.scripted_agent import ScriptedAgent
from tests.support.verbs_here import status_of

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


def _with_slots(agent: ScriptedAgent, slots: int, value_bytes: int) -> ScriptedAgent:
    body = json.dumps({"volumes": [{"name": "kv", "slots": slots, "value_bytes": value_bytes}]}).encode()
    plain = agent._body
    agent._body = lambda file, request: (  # type: ignore[method-assign]
        body if request.operation is Operation.STATS else plain(file, request)
    )
    return agent


@pytest.mark.parametrize("model", ["llama-3.1-8b", "deepseek-v3-fp8"])
def test_a_block_that_is_larger_than_a_value_lies_in_several(tmp_path: Path, model: str) -> None:
    agent = _with_slots(ScriptedAgent(), 200, 1 << 20)
    options = ReplayOptions(_trace(tmp_path), tmp_path, model=model, concurrency=1)
    first, second = (run_replay(options, _opener(agent)) for _ in range(2))
    parts = -(-512 * options.token_bytes // (1 << 20))
    assert first.good
    assert second.good
    assert (first.parts, len(agent.values), first.sums.puts) == (parts, 2 * parts, 2 * parts)
    assert (first.sums.hits, second.sums.hits, second.sums.misses.total()) == (0, 2, 0)
    assert second.sums.get_latencies.total == 2 * parts
    assert max(map(len, agent.values.values())) <= 1 << 20
    assert 0 <= sum(map(len, agent.values.values())) - 2 * 512 * options.token_bytes < 2 * 8 * parts
    assert first.lru_blocks == 200 // parts, "slots, not bytes"
    assert first.record()["values_of_a_block"] == parts
    assert dict(first.rows())["  values of each"].startswith(f"{parts} of ")


def test_a_block_one_of_whose_values_is_gone_is_a_miss_and_stored_again(tmp_path: Path) -> None:
    agent = _with_slots(ScriptedAgent(), 200, 1 << 20)
    options = ReplayOptions(_trace(tmp_path), tmp_path, bytes_per_token=4096, json_output=True, concurrency=1)
    assert run_replay(options, _opener(agent)).good
    del agent.values[list(agent.values)[-1]]
    report = run_replay(options, _opener(agent))
    assert (report.sums.hits, report.sums.misses.total(), report.sums.puts) == (1, 1, 2)
    assert run_replay(options, _opener(agent)).sums.hits == 2


def test_a_wrong_byte_in_any_value_of_a_block_is_noticed(tmp_path: Path) -> None:
    agent = _with_slots(ScriptedAgent(), 200, 1 << 20)
    options = ReplayOptions(_trace(tmp_path), tmp_path, bytes_per_token=4096, json_output=True, concurrency=1)
    run_replay(options, _opener(agent))
    one, other = list(agent.values)[:2]
    agent.values[one], agent.values[other] = agent.values[other], agent.values[one]
    report = run_replay(options, _opener(agent))
    assert (report.sums.wrong_blocks, report.sums.hits) == (1, 0)
    assert not report.good


def test_a_block_of_too_many_values_is_refused_and_the_option_is_named(tmp_path: Path) -> None:
    options = ReplayOptions(_trace(tmp_path), tmp_path, model="llama-3.3-70b", json_output=True)
    with pytest.raises(UserError, match="40,960 values; 4,096 are the most") as refused:
        run_replay(options, _opener(_with_slots(ScriptedAgent(), 200, 4096)))
    assert "a block of this trace is 512 tokens" in refused.value.advice
    assert "g35 up --value-size" in refused.value.advice


@given(st.integers(1, 1 << 31), st.integers(8, 16 << 20))
def test_a_block_is_cut_into_values_that_the_volume_takes(block: int, longest: int) -> None:
    parts, size = cut(block, longest)
    assert size % 8 == 0
    assert 0 < size <= longest
    assert parts * size >= block > (parts - 1) * (longest // 8 * 8) - 8


def test_an_unknown_model_is_refused_with_the_known_ones(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        status_of("replay", str(_trace(tmp_path)), "--mount", str(tmp_path), "--model", "llama-3.3-7b") == 2
    )
    said = " ".join(capsys.readouterr().err.replace("│", " ").split())
    assert "did you mean llama-3.3-70b?" in said
    assert "deepseek-v3-fp8" in said
