"""Rests of threads that work in Python for long, so that threads of other doors have the interpreter.

A thread that gives the interpreter up for a system call has it back before others have woken, and keeps it
for 5 ms from others that ask for it. A get of another door takes the interpreter several times. So long work
goes in steps of a millisecond or two, and who has done a step sleeps for as long as the step took. All
threads of the door share one account, so together they work for half of the time at the most. Short works add
up there: many in a row rest as one long work does.
"""

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Final, TypeVar

import trio

T = TypeVar("T")

STEP_ROWS: Final = 50
"""Rows of a document that are read, checked or written in one step."""
REST_FROM_SECONDS: Final = 0.0003
"""Shorter work needs no rest: it is over before another thread has woken."""


def with_rests(items: Iterable[T]) -> Iterator[T]:
    """The items, with a rest of the thread that takes them after every few.

    It may hold a lock, so it rests for its own work alone.
    """
    began = time.thread_time()
    for number, item in enumerate(items, 1):
        yield item
        if not number % STEP_ROWS and (worked := time.thread_time() - began) >= REST_FROM_SECONDS:
            time.sleep(worked)
            began = time.thread_time()


class Rests:
    """The account of one door. Safe from any thread, except `work`, which is for its event loop."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._turn = trio.Lock()
        self._lock = threading.Lock()
        self._clock = clock
        self._free_at = 0.0
        """When as much was rested as worked."""

    def owed(self, worked: float) -> float:
        """Seconds to rest after a step that took so many; 0 where they are too few and are added to the next
        one's."""
        now = self._clock()
        with self._lock:
            self._free_at = max(self._free_at, now - worked) + 2 * worked
            seconds = self._free_at - now
        return seconds if seconds >= REST_FROM_SECONDS else 0.0

    def has_rested(self) -> bool:
        """Whether as much was rested as worked, but for what is too little to rest."""
        return self._free_at - self._clock() < REST_FROM_SECONDS

    def after(self, began: float) -> None:
        """Sleep, in a thread that has worked since `began`, a `time.thread_time`."""
        if seconds := self.owed(time.thread_time() - began):
            time.sleep(seconds)

    async def after_turn(self, began: float) -> None:
        """Sleep, in a task whose turn has gone on since `began`, a `time.thread_time`."""
        if seconds := self.owed(time.thread_time() - began):
            await trio.sleep(seconds)

    async def work(self, steps: Iterator[object]) -> None:
        """Take all steps, one at a time of all tasks together. Raises what they raise."""
        over = False
        while not over:
            async with self._turn:
                began = time.thread_time()
                over = next(steps, self) is self
                if seconds := self.owed(time.thread_time() - began):
                    await trio.sleep(seconds)
