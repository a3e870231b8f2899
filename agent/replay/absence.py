"""Waiting for an agent that has died: one wait for all players, with a bound.

The first player that finds no agent looks for one at growing intervals; the others wait for its result. An
agent that is away for longer than allowed ends the replay.
"""

import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

FIRST_LOOK_SECONDS = 0.05
LAST_LOOK_SECONDS = 1.0
"""Looks are this far apart at the most; each is one open(2) that fails while there is no agent."""
ANSWERED_MAX = 3
"""Times that one call is tried again while an agent answers: what it does not get then, it does not get."""


def say_on_stderr(what: str) -> None:
    print(what, file=sys.stderr, flush=True)


@dataclass(slots=True, eq=False)
class Absence:
    """Whether the agent is there, and for how long the replay has waited for it."""

    _alive: Callable[[], bool]
    _stopping: threading.Event
    seconds_max: float
    say: Callable[[str], None] = say_on_stderr
    waits: int = 0
    seconds: float = 0.0
    gave_up: bool = False
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def is_back(self) -> bool:
        """Whether an agent answers, waiting for one up to the bound. No: the replay is over."""
        with self._lock:
            if self.gave_up:
                return False
            if self._alive():
                return True
            return self._wait()

    def answers(self) -> bool:
        """Whether an agent answers now; no waiting."""
        return not self.gave_up and self._alive()

    def _wait(self) -> bool:
        began = time.monotonic()
        end = began + self.seconds_max
        self.waits += 1
        if self.seconds_max:
            self.say(f"no agent answers; waiting up to {self.seconds_max:g} s for it")
        pause = FIRST_LOOK_SECONDS
        found = False
        while not found and time.monotonic() < end:
            if self._stopping.wait(min(pause, max(0.0, end - time.monotonic()))):
                break
            pause = min(2 * pause, LAST_LOOK_SECONDS)
            found = self._alive()
        took = time.monotonic() - began
        self.seconds += took
        if found:
            self.say(f"the agent answers again, after {took:.1f} s")
            return True
        if not self._stopping.is_set():
            self.say(f"the agent has not come back within {self.seconds_max:g} s; the replay ends")
        self.gave_up = True
        self._stopping.set()
        return False
