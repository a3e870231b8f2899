"""A result that could not be written is refused before the work, and not after it."""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path

import pytest
import typer

from agent.host_os.result_file import why_not_writable
from agent.replay.replay_options import _plot_file
from agent.sim import pod_report


def test_why_a_file_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert why_not_writable(tmp_path / "new.json") == ""
    assert why_not_writable(tmp_path / "no" / "new.json") == f"there is no folder {tmp_path / 'no'}"
    assert why_not_writable(tmp_path) == f"{tmp_path} is a folder"
    monkeypatch.chdir(tmp_path)
    assert why_not_writable(Path("new.json")) == ""
    assert why_not_writable(Path("/dev/null")) == ""
    monkeypatch.setattr(os, "access", lambda path, mode: path != tmp_path)
    assert why_not_writable(tmp_path / "new.json") == f"{tmp_path / 'new.json'} may not be written"
    (tmp_path / "old.json").touch()
    assert why_not_writable(tmp_path / "old.json") == "", "it is written in its place"


def test_no_pod_is_played_for_a_record_that_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(pod_report, "PodSimulation", lambda *_: pytest.fail("it plays"))
    with pytest.raises(SystemExit) as ended:
        pod_report.main(["--small", "1", "--full", "0", "--json", str(tmp_path / "no" / "pod.json")])
    assert ended.value.code == 2
    assert f"argument --json: there is no folder {tmp_path / 'no'}" in capsys.readouterr().err


def test_no_curve_is_measured_for_a_file_that_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["process_curve", "--processes", "x", "--json", str(tmp_path)])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module("agent.bench.process_curve", run_name="__main__")
    assert ended.value.code == 2
    assert f"argument --json: {tmp_path} is a folder" in capsys.readouterr().err


def test_no_trace_is_played_for_a_plot_that_cannot_be_drawn(tmp_path: Path) -> None:
    (tmp_path / "plot.svg").mkdir()
    with pytest.raises(typer.BadParameter, match="is a folder"):
        _plot_file(tmp_path / "plot.svg")
