"""`g35 agent` with a wall clock that jumps: the seconds in a file are added to it, from each SIGUSR1 on.

    python -m tests.support.campaign.shifted_agent SECONDS_FILE agent --config FILE

Only `time.time` is moved, as an administrator or NTP would do it. CLOCK_MONOTONIC, by which deadlines go,
does not jump while a process lives.
"""

from __future__ import annotations

import signal
import sys
import time
from pathlib import Path
from typing import Any

from agent.cli.main import main


class WallClock:
    """Stands in the place of `time.time`."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._real = time.time
        self._ahead = 0.0

    def __call__(self) -> float:
        return self._real() + self._ahead

    def read(self, *_: Any) -> None:
        """Take the file's seconds."""
        self._ahead = float(self._path.read_text())


if __name__ == "__main__":
    clock = WallClock(Path(sys.argv[1]))
    clock.read()
    time.time = clock
    signal.signal(signal.SIGUSR1, clock.read)
    sys.argv[1:] = sys.argv[2:]
    sys.exit(main())
