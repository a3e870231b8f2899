"""A log line of level WARNING or above that a test did not announce fails it.

A test announces with the mark `expects_log("regular expression", …)` or, where the text is known only
later, with the fixture `expects_log`. An announced line need not come: assert on `caplog` for that.
"""

from __future__ import annotations

import logging
import re


class LogWatch(logging.Handler):
    """Collects the lines of one test that nobody announced."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._announced: list[re.Pattern[str]] = []
        self._lines: list[str] = []

    def announce(self, *patterns: str) -> None:
        self._announced += [re.compile(pattern) for pattern in patterns]

    def emit(self, record: logging.LogRecord) -> None:
        line = f"{record.levelname} {record.name}: {record.getMessage()}"
        if record.exc_info and record.exc_info[0] is not None:
            line += f" ({record.exc_info[0].__name__}: {record.exc_info[1]})"
        self._lines.append(line)

    def unexpected(self) -> list[str]:
        """The lines that no announcement covers, each reported once."""
        lines, self._lines = self._lines, []
        return [line for line in lines if not any(known.search(line) for known in self._announced)]
