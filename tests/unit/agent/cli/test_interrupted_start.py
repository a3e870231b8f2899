"""Ctrl-C while Python is still loading: no traceback, exit status 130."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

CONSOLE_SCRIPT = "import sys; from agent.cli.main import main; sys.exit(main())"
"""What pip writes for `agent.cli.main:main`."""


@pytest.mark.parametrize(
    ("program", "while_loading"),
    [
        (("-c", CONSOLE_SCRIPT), "typer"),
        (("-m", "agent.cli"), "typer"),
        (("-m", "agent.cli", "status"), "agent.cli.status_verb"),
        (("-m", "emulator.lab"), "typer"),
        (("-m", "emulator.lab.host_main"), "typer"),
        (("-m", "emulator.jbof"), "typer"),
    ],
)
def test_ctrl_c_while_loading(tmp_path: Path, program: tuple[str, ...], while_loading: str) -> None:
    # The interrupt comes as this module begins to load.
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\n"
        "class Interrupts:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        f"        if name == {while_loading!r}:\n"
        "            raise KeyboardInterrupt\n"
        "sys.meta_path.insert(0, Interrupts())\n"
    )
    done = subprocess.run(
        [sys.executable, *program],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")
