"""SIGSTOP that has taken effect.

`kill` returns once the signal is pending. The kernel then stops one thread after the other, each as it is
scheduled. For six threads that took 1 to 4 ms on an idle machine of two cores, and 8 to 21 ms beside six busy
loops. Until then a process goes on and answers.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path

from tests.support.waiting import wait_until

_STANDS = {"T", "t", "Z", "X"}
"""States of a thread that does nothing more (proc(5))."""


def halt(process_id: int) -> None:
    """Stop a process, and wait until all of its threads stand still."""
    os.kill(process_id, signal.SIGSTOP)
    wait_until(lambda: stands_still(process_id), 30.0, f"process {process_id} to stand still")


@contextlib.contextmanager
def halted(process_id: int) -> Iterator[None]:
    """A process that stands still within the block and goes on after it."""
    try:
        halt(process_id)
        yield
    finally:
        os.kill(process_id, signal.SIGCONT)


def stands_still(process_id: int) -> bool:
    """All of its threads are stopped, or dead (proc(5): the third field of stat, after the name)."""
    try:
        stats = [stat.read_text() for stat in Path(f"/proc/{process_id}/task").glob("*/stat")]
    except (FileNotFoundError, ProcessLookupError):
        return False  # A thread ended between the two looks: not yet still.
    return {stat.rpartition(")")[2].split()[0] for stat in stats} <= _STANDS
