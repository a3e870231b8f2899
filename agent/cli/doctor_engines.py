"""`g35 doctor --engine`: whether an inference engine's interpreter can use the pool.

host_shim/engine_check.py runs there, with the packages of that interpreter: the engine's version, our
connector by the engine's own loader, a small block through the mount and back.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from host_shim.engine_check import FILES_ALONE, stores_files_alone, why_no_pool

_SOURCE = Path(__file__).resolve().parents[2]
CHECK_SECONDS = 180.0
"""Importing an engine takes most of it: tens of seconds from a cold disk."""


class Verdict(StrEnum):
    """How a finding counts: only `missing` makes the exit code 1."""

    OK = "ok"
    WITHOUT = "without"
    """Something optional is absent; what is lost is said."""
    MISSING = "missing"


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing looked at; `advice` is empty where nothing is to be done."""

    name: str
    verdict: Verdict
    detail: str
    advice: str = ""


class Engine(StrEnum):
    """What host_shim/engine_check.py knows. llama.cpp's server has no interpreter; ours does its check."""

    LLAMA_CPP = "llama-cpp"
    LMCACHE = "lmcache"
    NIXL = "nixl"
    SGLANG = "sglang"
    VLLM = "vllm"


def engine_findings(
    engine: Engine, python: Path | None, mount: str, volume: str, options: str | None = None
) -> Iterator[Finding]:
    """What the engine's interpreter says; without `python`, the one that `make engines` made."""
    name = engine.value
    mount = os.path.abspath(mount)
    interpreter = python or _SOURCE / ".cache" / "engines" / name / "bin" / "python"
    if engine is Engine.LLAMA_CPP:
        interpreter = Path(sys.executable)
    if not interpreter.exists():
        yield from _of_the_mount(mount)
        yield Finding(
            name,
            Verdict.MISSING,
            f"no {interpreter}",
            f"--python names the engine's interpreter; `make engines ENGINES={name}` makes one",
        )
        return
    arguments = [name, "--mount", mount, "--volume", volume]
    if options is not None:
        # The check is run in another folder, so a file is named by its whole path.
        arguments += ["--options", os.path.abspath(options) if os.path.isfile(options) else options]
    try:
        done = _asked(interpreter, arguments, os.environ.get("PYTHONPATH", ""))
        if "No module named 'host_shim" in done.stderr and not done.stdout:
            done = _asked(interpreter, arguments, str(_SOURCE))
            if name not in FILES_ALONE:
                is_needed = python is not None and not stores_files_alone(name, options)
                yield Finding(
                    "host_shim",
                    Verdict.MISSING if is_needed else Verdict.WITHOUT,
                    f"not installed for {interpreter}; what follows is with {_SOURCE}",
                    f"for our connector: {interpreter} -m pip install {_SOURCE / 'host_shim'}",
                )
        lines = done.stdout.splitlines()
        found = json.loads(lines[-1]) if lines else None
    except subprocess.TimeoutExpired:
        yield Finding(
            name,
            Verdict.MISSING,
            f"{interpreter} did not answer within {CHECK_SECONDS:g} s",
            "the engine hangs as it is imported, or the agent behind the mount hangs: g35 status",
        )
        return
    except OSError as error:
        yield from _of_the_mount(mount)
        yield Finding(name, Verdict.MISSING, str(error), f"is {interpreter} a Python of 3.11 or newer?")
        return
    except ValueError as error:
        yield Finding(name, Verdict.MISSING, str(error), f"is {interpreter} a Python of 3.11 or newer?")
        return
    if not isinstance(found, list):
        said = [line for line in done.stderr.splitlines() if line.strip()]
        why = said[-1] if said else f"{interpreter} said nothing and ended with {done.returncode}"
        yield Finding(name, Verdict.MISSING, why, f"is {interpreter} a Python of 3.11 or newer?")
        return
    for each in found:
        bad = Verdict.WITHOUT if each.get("minor") else Verdict.MISSING
        yield Finding(each["name"], Verdict.OK if each["good"] else bad, each["detail"], each["advice"])


def _of_the_mount(mount: str) -> Iterator[Finding]:
    """What is wrong with the mount, where the engine's interpreter does not say it."""
    if wrong := why_no_pool(mount):
        yield Finding(wrong.name, Verdict.MISSING, wrong.detail, wrong.advice)


def _asked(interpreter: Path, arguments: list[str], search_path: str) -> subprocess.CompletedProcess[str]:
    """The check's answer; `search_path` is where its interpreter looks before its own packages."""
    environment = {key: each for key, each in os.environ.items() if key != "PYTHONPATH"}
    if search_path:
        environment["PYTHONPATH"] = search_path
    return subprocess.run(
        [str(interpreter.absolute()), "-m", "host_shim.engine_check", *arguments],
        env=environment,
        cwd="/",  # `-m` looks there first, and this checkout may be where doctor was called
        capture_output=True,
        text=True,
        errors="replace",
        timeout=CHECK_SECONDS,
        check=False,
    )
