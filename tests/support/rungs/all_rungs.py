"""What `make test` runs: the compiler, ruff, mypy, the import rules and every rung, in lanes.

One lane shows what it does: the checks, then the tests that only compute. The lane beside it makes machine
code of the hot modules and then runs the lab, whose emulated guest keeps about one core busy for ten minutes.
Each lane then takes from one list what is left: unit tests with compiled modules, and the system tests.
A third lane takes from the list too, since system tests wait a third of their time. So two cores have work,
whichever lane is done first. What looks closely at clocks comes last and has the machine to itself. What the
lanes beside say is kept and printed when all have ended. Where a check fails there are no tests. The exit
code is the first that is not 0.

Tests that are marked `nightly` are not among them: see tests/support/rungs/nightly.py.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections import deque
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from nvmeof import compiled
from tests.support.rungs.compiling import compile_all
from tests.support.rungs.lanes import Job, LaneBeside, run_next

TESTS = Path(__file__).parents[2]
CHECKS = ("make", "--no-print-directory", "lint", "types", "rooms")
COMPILE = Job((sys.executable, ".ci/compile"), may_fail=True)
"""Where it fails g35 is run interpreted, and what failed has been said."""
LAB = ("lab",)
COMPUTE = ("unit", "pair", "sim", "rules")
ALONE = (
    "system/path/test_auto_membership.py", "system/path/test_gray_failure.py",
    "system/path/test_slow_listed_path.py",
)  # fmt: skip
"""Folders and files of system tests that another lane would disturb: they look closely at clocks."""
LONG = ("cli", "path", "replay")
"""Folders of system tests that come first: no lane is to begin with much when the other is about to end."""
JOB_FILES = 10
"""Test files of a job: so few that the list has something left for the lane that is done first."""
COMPILED = ("unit/pool", "unit/files", "unit/fs")
"""Run compiled: what the translator makes of the agent's own work with threads and generators. Interpreted
they are part of `make nightly`. Where nothing could be compiled they run interpreted here too."""
POLITE = ("nice", "-n", "5")
"""For what runs while the lab does. The guest is the longest job, and its time-outs go by the clock."""
NO_TESTS = 5
"""pytest's exit code where its options leave no test of a rung."""


def shared_jobs() -> list[list[str]]:
    """The files of system tests that share the machine, from tests/ on, by job; a new one is among them."""
    files = sorted(
        (TESTS / "system").glob("*/test_*.py"), key=lambda file: (file.parent.name not in LONG, file)
    )
    places = [place for file in files if not is_alone(place := file.relative_to(TESTS).as_posix())]
    return [places[at : at + JOB_FILES] for at in range(0, len(places), JOB_FILES)]


def is_alone(place: str) -> bool:
    """Whether a test file, from tests/ on, has the machine to itself."""
    return any(place == alone or place.startswith(f"{alone}/") for alone in ALONE)


def pytest_of(places: Sequence[str], words: Sequence[str]) -> list[str]:
    """The command that runs some folders or files of tests."""
    return [sys.executable, "-m", "pytest", *(str(TESTS / place) for place in places), *words]


def interpreted_jobs(words: Sequence[str]) -> list[Job]:
    """The tests that only compute, without those of `compiled_job`."""
    elsewhere = [f"--ignore={TESTS / place}" for place in COMPILED]
    marks = ["-m", "interpreted and not nightly"]
    return [
        Job([*POLITE, *pytest_of(COMPUTE, [*elsewhere, *words])]),
        Job([*POLITE, *pytest_of(COMPILED, [*marks, *words])]),
    ]


def compiled_job(words: Sequence[str]) -> Job:
    """Some folders of tests with compiled modules in the tests' own process.

    Those that need interpreted ones ran with the others. They are left out rather than skipped: what is
    skipped is what this machine lacks.
    """
    marks = ["-m", "not interpreted and not nightly"]
    return Job([*POLITE, *pytest_of(COMPILED, [*marks, *words])], {compiled.SWITCH: ""})


def run_all(words: Sequence[str]) -> int:
    """Run every rung, `words` being options of pytest's for each; the exit code."""
    compile_all()
    shared = (Job([*POLITE, *pytest_of(places, words)]) for places in shared_jobs())
    waiting = deque([compiled_job(words), *shared])
    with ExitStack() as lanes:

        def lane_beside(*own: Job) -> LaneBeside:
            said = lanes.enter_context(tempfile.TemporaryFile())
            return lanes.enter_context(LaneBeside(own, waiting, said))

        long = lane_beside(COMPILE, Job(pytest_of(LAB, words)))
        if failed := subprocess.call(CHECKS):
            return failed
        codes = [job.run() for job in interpreted_jobs(words)]
        long.wait_for_first()  # what the system tests start is compiled
        third = lane_beside()
        while (code := run_next(waiting)) is not None:
            codes.append(code)
        print("the lab and what else was run beside these:", flush=True)
        codes += [*third.join(), *long.join()]
    codes.append(Job(pytest_of(ALONE, words)).run())
    return first_failure(codes)


def first_failure(codes: Sequence[int]) -> int:
    """The first exit code of pytest's that is not 0, where one run of several has the tests asked for."""
    ran = [code for code in codes if code != NO_TESTS] or [NO_TESTS]
    return next((code for code in ran if code), 0)


if __name__ == "__main__":
    try:
        sys.exit(run_all(sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit(130)
