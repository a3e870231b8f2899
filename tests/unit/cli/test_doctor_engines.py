"""`g35 doctor --engine`: what it makes of the answers of the engine's interpreter."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from agent.cli.doctor_engines import Engine, engine_findings
from agent.cli.doctor_findings import Finding, Verdict
from host_shim import engine_check

PYTHON = Path(sys.executable)


def _findings(monkeypatch: pytest.MonkeyPatch, stdout: str, stderr: str = "") -> list[Finding]:
    def answer(command: list[str], **_options: object) -> subprocess.CompletedProcess[str]:
        assert command[1:] == [
            "-m",
            "host_shim.engine_check",
            "vllm",
            "--mount",
            "/mnt/pool",
            "--volume",
            "kv",
        ]
        return subprocess.CompletedProcess(command, 1, stdout, stderr)

    monkeypatch.setattr(subprocess, "run", answer)
    return list(engine_findings(Engine.VLLM, PYTHON, Path("/mnt/pool"), "kv"))


def test_findings_of_the_interpreter_are_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    told = [
        {"name": "vllm", "good": True, "detail": "0.33.0", "advice": ""},
        {"name": "/fs", "good": False, "detail": "no such file", "advice": "do this"},
    ]
    found = _findings(monkeypatch, "noise of an engine\n" + json.dumps(told) + "\n")
    assert found == [
        Finding("vllm", Verdict.OK, "0.33.0"),
        Finding("/fs", Verdict.MISSING, "no such file", "do this"),
    ]


def test_an_interpreter_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    (found,) = _findings(monkeypatch, "", "Traceback\nNo module named host_shim\n")
    assert found.verdict is Verdict.MISSING
    assert "No module named host_shim" in found.detail
    (found,) = _findings(monkeypatch, "Segmentation fault")
    assert found.verdict is Verdict.MISSING


def test_no_interpreter(tmp_path: Path) -> None:
    (found,) = engine_findings(Engine.NIXL, tmp_path / "python", Path("/mnt/pool"), "kv")
    assert found.verdict is Verdict.MISSING
    assert "make engines ENGINES=nixl" in found.advice


def test_every_engine_of_the_verb_has_a_check() -> None:
    assert {engine.value for engine in Engine} == set(engine_check.ENGINES)


def test_an_interpreter_without_the_engine(capsys: pytest.CaptureFixture[str]) -> None:
    assert engine_check.main(["nixl", "--mount", "/nowhere"]) == 1
    (found,) = json.loads(capsys.readouterr().out)
    assert (found["name"], found["good"]) == ("nixl", False)


def test_a_mount_that_is_not_there_is_a_finding() -> None:
    place = engine_check.Place("/nowhere", "kv")
    assert not engine_check.blocks_by_key(place).good
    assert not engine_check.files_by_path(place).good
