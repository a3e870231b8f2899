"""A program runs the machine code of the hot modules, where it was made of these sources.

A system test: `make test` starts these when it has compiled, and `make test RUNG=system` compiles first.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from nvmeof import compiled

ASKED = (
    "import importlib, sys; from nvmeof import compiled; assert compiled.state == 'compiled';"
    "files = [importlib.import_module(name).__file__ for name in sys.argv[1:]];"
    "assert all(file.endswith('.so') for file in files), files"
)


def test_a_program_runs_what_was_compiled() -> None:
    check = [sys.executable, compiled.CHECKOUT / ".ci" / "compile", "--check"]
    if subprocess.run(check, stderr=subprocess.PIPE, check=False).returncode:
        pytest.skip("no machine code of these sources: make compiled (it needs gcc and python3-dev)")
    environment = {name: value for name, value in os.environ.items() if name != compiled.SWITCH}
    names = compiled.wanted_modules()
    subprocess.run(
        [sys.executable, "-c", ASKED, *names], check=True, cwd=compiled.CHECKOUT, env=environment, timeout=120
    )
