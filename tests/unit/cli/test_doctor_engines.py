"""`g35 doctor --engine`: what it makes of the answers of the engine's interpreter."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from agent.cli import doctor_engines, doctor_verb
from agent.cli.doctor_engines import Engine, Finding, Verdict, engine_findings
from agent.cli.main import _application
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
    return list(engine_findings(Engine.VLLM, PYTHON, "/mnt/pool", "kv"))


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


def test_an_interpreter_that_cannot_be_run(tmp_path: Path) -> None:
    mount, found = engine_findings(Engine.VLLM, tmp_path, str(tmp_path), "kv")
    assert mount.detail == f"{tmp_path} is not a g35 mount"
    assert "a Python of 3.11" in found.advice
    *_, found = engine_findings(Engine.VLLM, Path("/bin/true"), str(tmp_path), "kv")
    assert found.detail == "/bin/true said nothing and ended with 0"
    assert "a Python of 3.11" in found.advice


def test_what_works_all_the_same_is_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    told = [{"name": "tiers", "good": False, "detail": "twice", "advice": "one", "minor": True}]
    assert _findings(monkeypatch, json.dumps(told)) == [Finding("tiers", Verdict.WITHOUT, "twice", "one")]


def test_no_interpreter(tmp_path: Path) -> None:
    mount, found = engine_findings(Engine.NIXL, tmp_path / "python", str(tmp_path), "kv")
    assert mount.detail == f"{tmp_path} is not a g35 mount"
    assert mount.verdict is found.verdict is Verdict.MISSING
    assert "make engines ENGINES=nixl" in found.advice


def test_every_engine_of_the_verb_has_a_check() -> None:
    assert {engine.value for engine in Engine} == set(engine_check.ENGINES)


def test_an_interpreter_without_the_engine(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / ".g35").mkdir()
    assert engine_check.main(["nixl", "--mount", str(tmp_path)]) == 1
    (found,) = json.loads(capsys.readouterr().out)
    assert (found["name"], found["good"]) == ("nixl", False)
    assert found["detail"] == f"nixl is not installed for {sys.executable}"
    assert "make engines ENGINES=nixl" in found["advice"]


@pytest.mark.parametrize("folder", ["", "not-there"])
def test_a_folder_that_is_no_mount_of_a_pool_is_said_before_anything_else(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, folder: str
) -> None:
    mount = tmp_path / folder
    assert engine_check.main(["lmcache", "--mount", str(mount)]) == 1
    (found,) = json.loads(capsys.readouterr().out)
    assert (found["name"], found["detail"]) == ("mount", f"{mount} is not a g35 mount")


def test_a_mount_whose_agent_died_is_said_with_the_cure(monkeypatch: pytest.MonkeyPatch) -> None:
    def stat(_path: str) -> None:
        raise OSError(errno.ENOTCONN, "Transport endpoint is not connected")

    monkeypatch.setattr(engine_check.os, "stat", stat)
    found = engine_check.why_no_pool("/mnt/pool")
    assert found is not None
    assert "dead" in found.detail
    assert "umount -l /mnt/pool" in found.advice


def test_nixl_has_no_volume_that_could_be_wrong() -> None:
    words = ["doctor", "--engine", "nixl", "--volume", "WRONG"]
    done = CliRunner().invoke(_application("doctor"), words, env={"COLUMNS": "300"})
    assert done.exit_code == 2
    assert "Invalid value for --volume: NIXL goes by files of /fs" in done.output


@pytest.mark.parametrize("word", ["--volume", "--python"])
def test_llama_cpp_has_no_volume_and_no_interpreter(word: str) -> None:
    words = ["doctor", "--engine", "llama-cpp", word, "WRONG"]
    done = CliRunner().invoke(_application("doctor"), words, env={"COLUMNS": "300"})
    assert done.exit_code == 2
    assert f"Invalid value for {word}: llama.cpp's server goes by files of /shared" in done.output


@pytest.mark.parametrize("shared", [True, False])
def test_llama_cpp_is_looked_at_by_our_own_interpreter(tmp_path: Path, shared: bool) -> None:
    (tmp_path / ".g35").mkdir()
    if shared:
        (tmp_path / "shared/all").mkdir(parents=True)
    (found,) = engine_findings(Engine.LLAMA_CPP, None, str(tmp_path), "kv")
    assert (found.name, found.verdict) == ("/shared", Verdict.OK if shared else Verdict.MISSING)
    assert found.detail == (
        f"a page written and read in {tmp_path}/shared/all" if shared else "no shared volume"
    )


@pytest.mark.expects_log("no g35 pool at /nowhere")
def test_a_mount_that_is_not_there_is_a_finding() -> None:
    place = engine_check.Place("/nowhere", "kv")
    assert not engine_check.blocks_by_key(place).good
    assert not engine_check.files_by_path(place).good


FS_TIER = '{"secondary_tiers": [{"type": "fs", "root_dir": "/mnt/pool/shared/all/vllm"}]}'
BOTH_TIERS = '[{"type": "fs", "root_dir": "/mnt/pool/shared/all"}, {"type": "G35Tier", "mount": "/mnt/pool"}]'


@pytest.mark.parametrize(
    ("named", "options", "needed"),
    [
        (True, None, True),
        (False, None, False),
        (True, FS_TIER, False),
        (True, BOTH_TIERS, True),
        (True, "{", True),
    ],
)
def test_an_engine_without_host_shim_is_said_and_looked_at_with_this_checkout(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, named: bool, options: str | None, needed: bool
) -> None:
    checkout = tmp_path / "checkout"
    python = checkout / ".cache" / "engines" / "vllm" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.touch()
    monkeypatch.setattr(doctor_engines, "_SOURCE", checkout)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    paths: list[str | None] = []

    def answer(command: list[str], env: dict[str, str], **options: object) -> object:
        assert options["cwd"] == "/"
        paths.append(env.get("PYTHONPATH"))
        told = json.dumps([{"name": "vllm", "good": True, "detail": "0.33.0", "advice": ""}])
        if len(paths) == 1:
            return subprocess.CompletedProcess(
                command, 1, "", "(ModuleNotFoundError: No module named 'host_shim')"
            )
        return subprocess.CompletedProcess(command, 0, told, "")

    monkeypatch.setattr(subprocess, "run", answer)
    first, second = engine_findings(Engine.VLLM, python if named else None, "/mnt/pool", "kv", options)
    assert paths == [None, str(checkout)]
    assert first.name == "host_shim"
    assert first.verdict is (Verdict.MISSING if needed else Verdict.WITHOUT)
    assert "not installed" in first.detail
    assert second == Finding("vllm", Verdict.OK, "0.33.0")


def test_what_is_installed_beside_the_engine_is_what_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """A real interpreter, from the checkout's folder: neither it nor the folder lends its host_shim."""
    monkeypatch.delenv("PYTHONPATH", raising=False)
    real = subprocess.run

    def run(command: list[str], **options: Any) -> object:
        return real([command[0], "-S", "-c", "import host_shim"], **options)

    monkeypatch.setattr(subprocess, "run", run)
    found = list(engine_findings(Engine.VLLM, PYTHON, "/mnt/pool", "kv"))
    assert found[0].name == "host_shim"


def test_an_answer_that_takes_too_long_is_not_taken_for_an_old_python(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def run(command: list[str], **_options: object) -> object:
        raise subprocess.TimeoutExpired(command, 180.0)

    monkeypatch.setattr(subprocess, "run", run)
    (found,) = engine_findings(Engine.VLLM, PYTHON, "/mnt/pool", "kv")
    assert "did not answer within 180 s" in found.detail
    assert "agent" in found.advice
    assert "3.11" not in found.advice


def test_a_mount_that_hangs_is_one_finding_and_no_engine_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    go = threading.Event()
    monkeypatch.setattr(engine_check, "MOUNT_SECONDS", 0.01)
    monkeypatch.setattr(engine_check, "_wrong_with", lambda mount: go.wait(20))
    (found,) = engine_check.examine("nixl", engine_check.Place("/mnt/pool", "kv"))
    go.set()
    assert (found.name, found.good) == ("mount", False)
    assert "/mnt/pool has not answered for 0.01 s: it is stopped or it hangs" in found.detail


@pytest.mark.parametrize(
    "words",
    [
        ["doctor", "--engine", "nixl", "--mount", "/mnt/hangs"],
        ["status", "--mount", "/mnt/hangs"],
        ["top", "--mount", "/mnt/hangs"],
        ["unmount", "/mnt/hangs"],
        ["replay", "/dev/null", "--mount", "/mnt/hangs"],
    ],
)
def test_a_mount_is_not_looked_at_by_who_reads_the_arguments(
    monkeypatch: pytest.MonkeyPatch, words: list[str]
) -> None:
    """Click would stat a Path, and wait for ever for an agent that hangs."""
    looked: list[str] = []
    real = os.stat

    def stat(path: Any, *more: Any, **options: Any) -> os.stat_result:
        looked.append(str(path))
        return real(path, *more, **options)

    monkeypatch.setattr(os, "stat", stat)
    monkeypatch.setattr(doctor_verb, "engine_findings", lambda *given: [])
    done = CliRunner().invoke(_application(words[0]), words)
    assert done.exit_code in (0, 1), done.output
    assert "/mnt/hangs" not in looked


@pytest.mark.parametrize(
    ("option", "value"), [("--python", sys.executable), ("--mount", "/mnt/g35"), ("--volume", "kv")]
)
def test_what_is_of_an_engine_is_wrong_use_without_one(option: str, value: str) -> None:
    done = CliRunner().invoke(_application("doctor"), ["doctor", option, value])
    assert done.exit_code == 2
    assert option in done.output
