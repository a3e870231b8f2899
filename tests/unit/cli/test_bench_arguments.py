"""What `g35 bench` refuses before it starts anything: exit code 2."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.verbs_here import status_of


def exit_code(*words: str) -> int:
    return status_of("bench", *words)


@pytest.mark.parametrize(
    "words",
    [
        ["kv_get_3m"],
        ["aes_1m", "nonsense"],
        ["aes_1m", "--seconds", "0"],
        ["aes_1m", "--trace", "/no/such/file"],
        ["aes_1m", "--json", "/no/such/folder/bench.json"],
        ["--no-such-option"],
        ["--beside", "65"],
        ["--beside", "1", "--profile"],
        ["--beside", "1", "--tiers"],
        ["--tiers", "aes_1m"],
        ["--tiers", "--list"],
        ["--tiers", "--seconds", "0"],
        ["--tiers", "--requests", "0"],
        ["--tiers", "--trace", "/no/such/file"],
        ["--tiers", "--json", "/no/such/folder/bench.json"],
        ["--tiers", "--value-size", "32K"],
        ["--tiers", "--value-size", "2M"],
        ["--tiers", "--value-size", "65537"],
        ["--tiers", "--value-size", "much"],
        ["--value-size", "64K"],
        ["--value-size", "64K", "aes_1m"],
    ],
)
def test_wrong_arguments_are_exit_code_2(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code(*words) == 2
    assert "Error" in capsys.readouterr().err


def test_the_refusal_names_the_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code("kv_get_3m") == 2
    assert "kv_get_3m" in capsys.readouterr().err


def test_list_lists_and_measures_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "140")
    target = tmp_path / "bench.json"
    assert exit_code("--list", "--json", str(target)) == 0
    assert "kv_get_64k_p50_ms" in capsys.readouterr().out
    assert not target.exists()
