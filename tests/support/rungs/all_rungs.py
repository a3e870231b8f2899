"""What `make test` runs: ruff, mypy, the import rules and every rung, in two streams while the lab runs.

An emulated guest keeps about one core busy for ten minutes. So do, one after the other, the checks, the tests
that only compute, those system tests that look at no clock, and some tests again with compiled modules: they
share a machine well. The other system tests, which start many processes and look at clocks, come last and
have it to themselves. What the lab says is kept and printed when it has ended. Where a check fails there are
no tests. The exit code is the first that is not 0.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from nvmeof import compiled
from tests.support.rungs.compiling import compile_all

TESTS = Path(__file__).parents[2]
CHECKS = ("make", "--no-print-directory", "lint", "types", "rooms")
LAB = ("lab",)
COMPUTE = ("unit", "pair", "sim", "rules")
CALM = (
    "deploy", "enclosure_control", "engines", "files", "fs", "jbof", "lab", "nvmeof", "remote", "s3",
    "virtiofs",
)  # fmt: skip
"""Folders of system tests that another stream does not disturb."""
TWICE = ("unit/pool", "unit/files", "unit/fs")
"""Run compiled as well: what the translator makes of the agent's own work with threads and generators."""
END_SECONDS = 60
NO_TESTS = 5
"""pytest's exit code where its options leave no test of a rung."""


def beside_the_lab() -> list[str]:
    """Folders of tests, from tests/ on."""
    return [*COMPUTE, *(f"system/{name}" for name in CALM)]


def after_the_lab() -> list[str]:
    """The other folders of system tests; one that is new is among them."""
    folders = sorted(path.name for path in (TESTS / "system").iterdir() if any(path.glob("test_*.py")))
    return [f"system/{name}" for name in folders if name not in CALM]


def pytest_of(folders: Sequence[str], words: Sequence[str]) -> list[str]:
    """The command that runs some folders of tests."""
    return [sys.executable, "-m", "pytest", *(str(TESTS / folder) for folder in folders), *words]


def run_compiled(words: Sequence[str]) -> int:
    """Some folders of tests with compiled modules in the tests' own process; the exit code.

    Those that need interpreted ones ran in the stream before. They are left out rather than skipped: what is
    skipped is what this machine lacks.
    """
    environment = {**os.environ, compiled.SWITCH: ""}
    return subprocess.call(pytest_of(TWICE, ["-m", "not interpreted", *words]), env=environment)


def run_all(words: Sequence[str]) -> int:
    """Run every rung, `words` being options of pytest's for each; the exit code."""
    compile_all()
    with tempfile.TemporaryFile() as said:
        lab = subprocess.Popen(pytest_of(LAB, words), stdout=said, stderr=subprocess.STDOUT)
        try:
            if failed := subprocess.call(CHECKS):
                return failed
            codes = [subprocess.call(pytest_of(beside_the_lab(), words)), run_compiled(words)]
            print("the lab, which began beside these:", flush=True)
            codes.append(lab.wait())
            said.seek(0)
            sys.stdout.buffer.write(said.read())
            sys.stdout.flush()
            codes.append(subprocess.call(pytest_of(after_the_lab(), words)))
        finally:
            _end(lab)
    ran = [code for code in codes if code != NO_TESTS] or [NO_TESTS]
    return next((code for code in ran if code), 0)


def _end(tests: subprocess.Popen[bytes]) -> None:
    """As Ctrl-C does, so that they tidy up: what they started is gone when they are."""
    if tests.poll() is None:
        tests.send_signal(signal.SIGINT)
        try:
            tests.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            tests.kill()
            tests.wait()


if __name__ == "__main__":
    try:
        sys.exit(run_all(sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit(130)
