"""Rests of threads that work in Python for long, so that threads of other doors have the interpreter.

A thread that gives the interpreter up for a system call has it back before others have woken, and keeps it
for 5 ms from others that ask for it. A get of another door takes the interpreter several times. So long work
goes in steps of a millisecond or two, and its thread sleeps after a step for as long as the step took.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Final

import trio

STEP_ROWS: Final = 50
"""Rows of a document that are read or written in one step."""
REST_FROM_SECONDS: Final = 0.0003
"""Shorter work needs no rest: it is over before another thread has woken."""


class Rests:
    """Long work of an event loop: one step at a time, of all tasks together, with a rest after it."""

    def __init__(self) -> None:
        self._turn = trio.Lock()
        self._owed_seconds = 0.0

    async def work(self, steps: Iterator[object]) -> None:
        """Take all steps. Raises what they raise."""
        over = False
        while not over:
            async with self._turn:
                began = time.thread_time()
                over = next(steps, self) is self
                self._owed_seconds += time.thread_time() - began
                if self._owed_seconds >= REST_FROM_SECONDS:
                    seconds, self._owed_seconds = self._owed_seconds, 0.0
                    await trio.sleep(seconds)


def rest_after(began: float) -> None:
    """Sleep for as long as this thread has worked since `began`, a `time.thread_time`."""
    seconds = time.thread_time() - began
    if seconds >= REST_FROM_SECONDS:
        time.sleep(seconds)
