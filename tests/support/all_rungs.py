"""What `make test` runs: every rung, the lab beside the ones that touch nothing.

Emulated guests and tests that only compute each keep about one core busy, so they share a machine well. The
system tests, which start many processes and look at clocks, come last and have it to themselves. What the lab
says is kept and printed when it has ended. The exit code is the first that is not 0.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

TESTS = Path(__file__).parents[1]
BESIDE = ("lab",)
FIRST = ("unit", "pair", "sim", "rules")
LAST = ("system",)
END_SECONDS = 60
NO_TESTS = 5
"""pytest's exit code where its options leave no test of a rung."""


def pytest_of(rungs: Sequence[str], words: Sequence[str]) -> list[str]:
    """The command that runs some rungs."""
    return [sys.executable, "-m", "pytest", *(str(TESTS / rung) for rung in rungs), *words]


def run_all(words: Sequence[str]) -> int:
    """Run every rung, `words` being options of pytest's for each; the exit code."""
    with tempfile.TemporaryFile() as said:
        lab = subprocess.Popen(pytest_of(BESIDE, words), stdout=said, stderr=subprocess.STDOUT)
        try:
            codes = [subprocess.call(pytest_of(FIRST, words))]
            print("the lab, which began beside these:", flush=True)
            codes.append(lab.wait())
            said.seek(0)
            sys.stdout.buffer.write(said.read())
            sys.stdout.flush()
            codes.append(subprocess.call(pytest_of(LAST, words)))
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
