"""`g35 doctor --engine`: whether an inference engine's interpreter can use the pool.

The engine has an interpreter of its own, so it is asked there, by host_shim/engine_check.py: its version, our
connector by the engine's own loader, and a small block through the mount and back.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path

from agent.cli.doctor_findings import Finding, Verdict

_SOURCE = Path(__file__).resolve().parents[2]
CHECK_SECONDS = 180.0
"""Importing an engine takes most of it: tens of seconds from a cold disk."""


class Engine(StrEnum):
    """What host_shim/engine_check.py knows."""

    LMCACHE = "lmcache"
    NIXL = "nixl"
    SGLANG = "sglang"
    VLLM = "vllm"


def engine_findings(engine: Engine, python: Path | None, mount: Path, volume: str) -> Iterator[Finding]:
    """What the engine's interpreter says; without `python`, the one that `make engines` made."""
    name = engine.value
    interpreter = python or _SOURCE / ".cache" / "engines" / name / "bin" / "python"
    if not interpreter.exists():
        yield Finding(
            name,
            Verdict.MISSING,
            f"no {interpreter}",
            f"--python names the engine's interpreter; `make engines ENGINES={name}` makes one",
        )
        return
    arguments = ("-m", "host_shim.engine_check", name, "--mount", str(mount), "--volume", volume)
    path = os.pathsep.join(filter(None, (str(_SOURCE), os.environ.get("PYTHONPATH"))))
    try:
        done = subprocess.run(
            [str(interpreter), *arguments],
            env=dict(os.environ, PYTHONPATH=path),
            capture_output=True,
            text=True,
            errors="replace",
            timeout=CHECK_SECONDS,
            check=False,
        )
        lines = done.stdout.splitlines()
        found = json.loads(lines[-1]) if lines else None
    except (OSError, ValueError, subprocess.TimeoutExpired) as error:
        yield Finding(name, Verdict.MISSING, str(error), f"is {interpreter} a Python of 3.11 or newer?")
        return
    if not isinstance(found, list):
        said = [line for line in done.stderr.splitlines() if line.strip()]
        yield Finding(name, Verdict.MISSING, said[-1] if said else f"ended with {done.returncode}")
        return
    for each in found:
        yield Finding(
            each["name"], Verdict.OK if each["good"] else Verdict.MISSING, each["detail"], each["advice"]
        )
