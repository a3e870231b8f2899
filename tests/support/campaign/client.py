"""A thread that works with the pool until it is stopped, and how long each of its operations may take."""

from __future__ import annotations

import abc
import random
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.support.campaign.findings import HUNG, WRONG, Findings

SLACK_SECONDS = 10.0
"""For a machine that has other things to do."""
AWAY_SECONDS = 0.1
PAUSE_SECONDS = 0.004


class Away(Exception):
    """The agent is not there: killed, stopped, or just being started."""


class Client(threading.Thread, abc.ABC):
    """`turn` does one operation or a few; what it raises but `Away` is a finding."""

    away_seconds = 0.0
    """How much longer its operations may take, for they wait for an agent that is started again."""

    def __init__(self, name: str, seed: int, findings: Findings, stop: threading.Event) -> None:
        super().__init__(name=name, daemon=True)
        self.dice = random.Random(f"{seed} {name}")
        self.findings = findings
        self.over = stop
        self._under_way: tuple[str, float] | None = None
        """The operation, and when it is hung."""

    @abc.abstractmethod
    def turn(self) -> None:
        """One step of work."""

    def finish(self) -> None:
        """Let go of what is held."""

    def run(self) -> None:
        try:
            while not self.over.is_set():
                try:
                    self.turn()
                    self.over.wait(PAUSE_SECONDS)
                except Away:
                    self.findings.note("operations without an agent")
                    self.over.wait(AWAY_SECONDS)
                except Exception as error:
                    where = " < ".join(
                        f"{Path(frame.filename).name}:{frame.lineno}"
                        for frame in reversed(traceback.extract_tb(error.__traceback__)[-4:])
                    )
                    self.findings.found(
                        WRONG, f"{self.name} raised {type(error).__name__} at {where}: {error}"
                    )
                    self.over.wait(AWAY_SECONDS)
        finally:
            self.finish()

    @contextmanager
    def timed(self, what: str, seconds: float) -> Iterator[None]:
        """An operation that is documented to end within `seconds`."""
        began = time.monotonic()
        self._under_way = (what, began + seconds + self.away_seconds + SLACK_SECONDS)
        self.findings.note(what)
        try:
            yield
        finally:
            self._under_way = None

    def look(self, now: float) -> None:
        """Count an operation that should have ended; once."""
        under_way = self._under_way
        if under_way is not None and now > under_way[1]:
            self._under_way = None
            self.findings.found(HUNG, f"{under_way[0]} by {self.name}")
