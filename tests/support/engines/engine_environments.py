"""The environments that `make engines` makes, and running a script of the tests in one of them."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[3]
_HOME = REPOSITORY / ".cache" / "engines"

LIGHT = ("nixl", "dynamo", "llama-cpp")
"""Without torch; `.ci/setup` installs it."""


def engine_python(engine: str) -> Path:
    """The interpreter that has `engine`; skips the test where it is not installed.

    To import one that has torch takes up to a minute: CI does not, even where somebody has installed it,
    unless G35_ENGINES=1 says so. `make nightly` says so.
    """
    python = _HOME / engine / "bin" / "python"
    if not (_HOME / engine / ".g35-engine").exists() or not python.exists():
        size = "" if engine in LIGHT else ", which takes gigabytes"
        pytest.skip(f"{engine} is not installed: make engines ENGINES={engine}{size}")
    if engine not in LIGHT and os.environ.get("CI") and os.environ.get("G35_ENGINES") != "1":
        pytest.skip(f"no minute for {engine}, which is installed: CI imports it where G35_ENGINES=1 is set")
    return python


def run_in_engine(engine: str, script: Path, *arguments: str, seconds: float = 120.0) -> str:
    """What `script` printed, run by the engine's interpreter with host_shim on its path.

    Fails the test with all that was printed where it does not end well, or not within `seconds`.
    """
    python = engine_python(engine)
    environment = dict(os.environ, PYTHONPATH=str(REPOSITORY), PYTHONDONTWRITEBYTECODE="1")
    try:
        done = subprocess.run(
            [str(python), str(script), *arguments],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=seconds,
            check=False,
        )
    except subprocess.TimeoutExpired as late:
        pytest.fail(f"{script.name} of {engine} ran longer than {seconds} s:\n{late.stdout!r}")
    if done.returncode:
        pytest.fail(f"{script.name} of {engine} ended with {done.returncode}:\n{done.stdout}")
    return done.stdout
