"""The guest's end of tests/lab: a pytest plugin that writes every report to the shared folder.

The host machine's end is guest_tests.py. A report is one line of JSON, written when it is complete.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

REPORTS = "reports.jsonl"


class GuestReporter:
    def __init__(self, config: pytest.Config, folder: Path) -> None:
        self._config = config
        self._file = (folder / REPORTS).open("a", encoding="utf-8")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        data = self._config.hook.pytest_report_to_serializable(config=self._config, report=report)
        self._file.write(json.dumps(data) + "\n")
        self._file.flush()

    def pytest_unconfigure(self) -> None:
        self._file.close()


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(GuestReporter(config, Path("/run/g35")), "guest-reporter")
