"""This machine's end of tests/lab: one guest runs all guest tests, and each shows as a test of its own here.

Tests in tests/lab/guest_*.py run inside the guest, by a pytest there that is given exactly the tests that
were selected here. Its reports come back one by one, through the folder that the guest shares, and are
handed to the pytest here as if the test had run here. (pytest-xdist moves reports between processes in the
same way.) So `-k`, `-x`, durations and tracebacks work as everywhere.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence

import pytest

from emulator.lab.accelerator import choose_accelerator
from emulator.lab.errors import last_lines
from emulator.lab.image import prepare
from emulator.lab.machine import EXCHANGE_IN_GUEST, Follower, Guest, Hardware
from tests.support.lab.guest_reporter import REPORTS
from tests.support.rungs.compiling import compile_all

# A test in the guest is ended there after so many seconds; the whole guest, some time after its last word.
# faulthandler, which pytest has print the stacks of a test that takes long, is off there: it walks them while
# the test goes on, and has crashed the guest's Python so. This bound prints them in the test's own thread.
TEST_TIMEOUT_S = 600
SILENCE_TIMEOUT_S = TEST_TIMEOUT_S + 60
# Before its first word it boots, and pytest there imports what is tested: half a minute on two idle cores,
# and twenty times that beside others. None of these bounds is a judgement: they end what would never end.
BOOT_TIMEOUT_S = 900
POLL_S = 0.05
# Between two cores each wake-up waits until this machine runs the other core's thread. Beside three busy
# loops of lower priority two files of tests took 504 s so, and 275 s on one core. `make nightly` sets 2.
CORES = int(os.environ.get("G35_LAB_CORES", "1"))


class GuestTests:
    """The guest and the reports that have come out of it. Made with its machine already booting.

    Raises LabUnavailableError where the lab cannot run.
    """

    def __init__(self, config: pytest.Config, items: Sequence[pytest.Item]) -> None:
        self._config = config
        compile_all()
        image = prepare(self._tell)
        self._guest = Guest(
            [
                *(
                    sys.executable,
                    "-m",
                    "pytest",
                    "-p",
                    "tests.support.lab.guest_reporter",
                    "-rN",
                    "--tb=short",
                    "-m",
                    "",  # the selection was made here, nightly tests or none
                ),
                *("--timeout", str(TEST_TIMEOUT_S), "-o", "faulthandler_timeout=0"),
                f"@{EXCHANGE_IN_GUEST}/selection",
            ],
            image=image,
            accelerator=choose_accelerator(image),
            folder=config.rootpath,
            files={"selection": "".join(f"{item.nodeid}\n" for item in items)},
            hardware=Hardware(cores=CORES),
        )
        self._follower = Follower(self._guest.exchange / REPORTS)
        self._half_line = ""
        self._silent_until = time.monotonic() + BOOT_TIMEOUT_S + SILENCE_TIMEOUT_S
        self._reports: dict[str, list[pytest.TestReport]] = defaultdict(list)

    def reports_of(self, item: pytest.Item) -> Iterator[pytest.TestReport]:
        """The reports of one test as they come: setup, call, teardown. A failed one if none come."""
        given = 0
        while True:
            running = self._guest.running()  # asked before reading, so that the last words are not missed
            self._follower.pass_on(self._receive)
            for report in self._reports[item.nodeid][given:]:
                given += 1
                yield report
                if report.when == "teardown":
                    return
            if not running:
                yield self._failure(item, "the guest ended before this test did")
                return
            if time.monotonic() > self._silent_until:
                self._guest.close()
                yield self._failure(item, f"no word from the guest for {SILENCE_TIMEOUT_S} s and more")
                return
            time.sleep(POLL_S)

    def close(self) -> None:
        self._guest.close()

    def _receive(self, text: str) -> None:
        self._silent_until = time.monotonic() + SILENCE_TIMEOUT_S
        lines = (self._half_line + text).split("\n")
        self._half_line = lines.pop()
        for line in lines:
            report = self._config.hook.pytest_report_from_serializable(
                config=self._config, data=json.loads(line)
            )
            if isinstance(report, pytest.TestReport):
                if isinstance(report.longrepr, list):  # a skip's (file, line, reason), before it was JSON
                    report.longrepr = tuple(report.longrepr)
                if report.failed and (changed := self._guest.root.what_changed()):
                    report.sections.append(("the lab", changed))
                self._reports[report.nodeid].append(report)

    def _failure(self, item: pytest.Item, reason: str) -> pytest.TestReport:
        return pytest.TestReport(
            nodeid=item.nodeid,
            location=item.location,
            keywords={},
            outcome="failed",
            longrepr=f"{reason}\n{self._guest.root.what_changed()}\n"
            f"--- what the guest printed ---\n{last_lines(self._guest.output(), 60)}\n"
            f"--- its console ---\n{last_lines(self._guest.console(), 40)}",
            when="call",
        )

    def _tell(self, step: str) -> None:
        terminal = self._config.pluginmanager.get_plugin("terminalreporter")
        if terminal is not None and (not step.startswith("downloading") or ": 0 of" in step):
            terminal.ensure_newline()
            terminal.write_line(f"lab: {step}")
