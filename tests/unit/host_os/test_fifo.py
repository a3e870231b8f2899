"""A trace or a table of figures that is a FIFO: read where somebody writes, and refused where nobody does."""

from __future__ import annotations

import os
import subprocess
import threading
from pathlib import Path

import pytest

from agent.cli.main import main
from agent.config.document_problems import toml_in
from agent.errors import ConfigError
from agent.host_os import fifo
from agent.replay.trace_lines import TraceFile

LINE = b'{"timestamp": 0, "input_length": 600, "output_length": 1, "hash_ids": [1, 2]}\n'


@pytest.fixture
def pipe(tmp_path: Path) -> Path:
    os.mkfifo(tmp_path / "pipe")
    return tmp_path / "pipe"


@pytest.mark.parametrize("option", ["--trace", "--data"])
def test_a_fifo_without_a_writer_is_refused(
    pipe: Path, option: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It was waited for without an end. No thread and no descriptor is left of the wait."""
    monkeypatch.setattr(fifo, "WRITER_SECONDS", 0.02)
    before = set(os.listdir("/proc/self/fd"))
    assert main(["claims", option, str(pipe)]) == 1
    said = capsys.readouterr().err
    assert f"{pipe}: it is a FIFO, and nobody has written to it for 0.02 s" in said
    assert not [each for each in threading.enumerate() if each.name == "fifo-open"]
    assert set(os.listdir("/proc/self/fd")) <= before


def test_a_fifo_with_a_writer_is_read(pipe: Path) -> None:
    """One that is slow as well: the wait is for its open alone."""
    with subprocess.Popen(["/bin/sh", "-c", 'cat >"$1"', "sh", pipe], stdin=subprocess.PIPE) as writer:
        assert writer.stdin is not None
        requests = iter(TraceFile(pipe))
        writer.stdin.write(LINE * 2)
        writer.stdin.close()
        assert len(list(requests)) == 2


def test_a_pipe_without_a_name_is_read() -> None:
    """As the shell's `<(xz -dc trace.xz)` is one; with an end at once, too."""
    for text in (LINE * 3, b""):
        reads, writes = os.pipe()
        os.write(writes, text)
        os.close(writes)
        assert len(list(TraceFile(Path(f"/proc/self/fd/{reads}")))) == text.count(b"\n")
        os.close(reads)


def test_what_cannot_be_opened_is_told_as_ever(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read .*none: No such file or directory"):
        toml_in(tmp_path / "none")
