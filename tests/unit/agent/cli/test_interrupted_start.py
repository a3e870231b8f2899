"""Ctrl-C while Python is still loading: no traceback, and a shell sees exit status 130."""

from __future__ import annotations

import os
import signal
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


SWALLOWED = """
import os, signal, sys
class Interrupts:
    def find_spec(self, name, path=None, target=None):
        if name == {name!r}:
            try:
                os.kill(os.getpid(), signal.SIGINT)
            except KeyboardInterrupt:
                pass
sys.meta_path.insert(0, Interrupts())
"""
"""As sitecustomize.py: Ctrl-C as a module begins to load, in code that swallows a KeyboardInterrupt."""


@pytest.mark.parametrize("as_script", [True, False])
@pytest.mark.parametrize("while_loading", ["nvmeof", "typer", "agent.cli.status_verb"])
def test_ctrl_c_that_a_library_would_swallow(tmp_path: Path, while_loading: str, as_script: bool) -> None:
    (tmp_path / "sitecustomize.py").write_text(SWALLOWED.format(name=while_loading))
    script = tmp_path / "g35"
    script.write_text(CONSOLE_SCRIPT)
    program = [str(script)] if as_script else ["-m", "agent.cli"]
    done = subprocess.run(
        [sys.executable, *program, "status", "--state", str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": f"{tmp_path}:{Path.cwd()}"},
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGINT, "", "")


def test_a_start_that_ignores_ctrl_c_goes_on_ignoring_it(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(SWALLOWED.format(name="typer"))
    done = subprocess.run(
        [sys.executable, "-m", "agent.cli", "status", "--state", str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN),
    )
    assert done.returncode == 1
    assert "no pool is up" in done.stderr


def test_a_program_that_imports_the_agent_keeps_its_own_way() -> None:
    looks = (
        "import signal, agent.cli.main; assert signal.getsignal(signal.SIGINT) is signal.default_int_handler"
    )
    subprocess.run([sys.executable, "-c", looks], check=True)
