"""An agent that does not answer: stopped (SIGSTOP), or hung.

A call on the mount waits in the kernel until an answer, or the end of the calling process. So a call that may
hang is made on a thread of its own, which is left behind; the verb says so and ends.
"""

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from agent.errors import G35Error

T = TypeVar("T")

HUNG_SECONDS = 30.0
"""A call that has not returned by then will not. Far above every deadline of an agent's own."""
LOOK_SECONDS = 5.0
"""The same for a look at how the agent is."""


class AgentHangs(G35Error):
    """The mount is there, and nobody answers."""

    def __init__(self, mount: Path, seconds: float) -> None:
        super().__init__(
            f"the agent behind {mount} has not answered for {seconds:g} s: it is stopped or it hangs",
            "`kill -CONT` its process (`pgrep -af 'agent --config'` names it), or kill it; `g35 up` starts "
            "another by itself",
        )


def asked(mount: Path, call: Callable[[], T], seconds: float = HUNG_SECONDS) -> T:
    """What `call` returns or raises; `AgentHangs` where it does neither within `seconds`."""
    results: list[T] = []
    failures: list[Exception] = []

    def run() -> None:
        try:
            results.append(call())
        except Exception as failure:
            failures.append(failure)

    thread = threading.Thread(target=run, name="asks the agent", daemon=True)
    thread.start()
    thread.join(seconds)
    if failures:
        raise failures[0]
    if not results:
        raise AgentHangs(mount, seconds)
    return results[0]


def answers(mount: Path, alive: Callable[[], bool], seconds: float = HUNG_SECONDS) -> bool:
    """What `alive` says; no, where it hangs."""
    try:
        return asked(mount, alive, seconds)
    except AgentHangs:
        return False


class CallClock:
    """When the call that a thread is in began. One writer; anybody may look."""

    __slots__ = ("_began", "_seconds")

    def __init__(self, seconds: float = HUNG_SECONDS) -> None:
        self._began: float | None = None
        self._seconds = seconds

    def begin(self) -> float:
        """A call begins now; the time, on the clock of `perf_counter`."""
        self._began = now = time.perf_counter()
        return now

    def end(self) -> float:
        self._began = None
        return time.perf_counter()

    @property
    def hangs(self) -> bool:
        began = self._began
        return began is not None and time.perf_counter() - began > self._seconds
