"""Work of a connector on threads of its own, so that no call of an engine waits for the pool.

An engine calls its connector from its scheduler or its event loop. The connector hands what takes time to a
`JobRunner` and answers later. What this file promises for that:

* `submit` never waits, neither for a thread nor for room, and never raises: it says False where the queue is
  full, and where the system gives not a single thread;
* what was accepted and is never called, because the runner is closed, is told so (`dropped`);
* urgent work (somebody waits for a load) goes before the rest (stores), which still moves on: each thread
  takes one piece of the rest after `URGENT_IN_A_ROW` urgent ones;
* threads are daemons: one that the mount holds (an agent that hangs) does not keep the engine from exiting;
* a piece of work that raises is logged, and the thread goes on.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeAlias, TypeVar

_log = logging.getLogger(__name__)

WAITING_MAX = 4096
"""Pieces of work that may wait; each is a closure of some hundred bytes."""
URGENT_IN_A_ROW = 8

Work: TypeAlias = Callable[[], None]
_Queued: TypeAlias = tuple[Work, Work | None]
T = TypeVar("T")


class JobRunner:
    """`threads` daemon threads and a bounded queue of two urgencies. Every method is for any thread."""

    def __init__(self, name: str, threads: int = 4, waiting_max: int = WAITING_MAX) -> None:
        if threads < 1 or waiting_max < 1:
            raise ValueError("a job runner needs at least one thread, and room for one piece of work")
        self._name = name
        self._thread_count = threads
        self._waiting_max = waiting_max
        self._changed = threading.Condition()
        self._urgent: deque[_Queued] = deque()
        self._rest: deque[_Queued] = deque()
        self._in_a_row = 0
        self._running = 0
        self._threads: list[threading.Thread] = []
        self._closed = False

    def submit(self, work: Work, *, urgent: bool = False, dropped: Work | None = None) -> bool:
        """Have `work` called by one of the threads; False, and it never is, where there is no room.

        `dropped` is called in its place, by the thread that closes the runner, if it still waits then.
        """
        with self._changed:
            waiting = len(self._urgent) + len(self._rest)
            if self._closed or waiting >= self._waiting_max:
                return False
            idle = len(self._threads) - self._running
            if waiting >= idle and len(self._threads) < self._thread_count:
                self._start_thread()
            if not self._threads:
                return False
            (self._urgent if urgent else self._rest).append((work, dropped))
            self._changed.notify()
        return True

    def idle(self) -> bool:
        """Whether nothing waits and nothing runs."""
        with self._changed:
            return not (self._urgent or self._rest or self._running)

    def drain(self, seconds: float | None = None) -> bool:
        """Wait until nothing waits and nothing runs; False where `seconds` were not enough."""
        with self._changed:
            return self._changed.wait_for(
                lambda: not (self._urgent or self._rest or self._running), timeout=seconds
            )

    def close(self, seconds: float = 5.0) -> bool:
        """Forget what waits, let end what runs, for `seconds` at most; False where a thread still runs."""
        with self._changed:
            self._closed = True
            never = [*self._urgent, *self._rest]
            self._urgent.clear()
            self._rest.clear()
            self._changed.notify_all()
        for _work, dropped in never:
            if dropped is not None:
                self._call(dropped)
        until = time.monotonic() + seconds
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _start_thread(self) -> None:
        thread = threading.Thread(target=self._serve, name=f"{self._name}-{len(self._threads)}", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # no more threads for this process: those that there are go on
            _log.debug("the system gives %s no further thread", self._name)
            return
        self._threads.append(thread)

    def _serve(self) -> None:
        while True:
            with self._changed:
                while not (self._urgent or self._rest):
                    if self._closed:
                        return
                    self._changed.wait()
                work = self._next()
                self._running += 1
            try:
                self._call(work)
            finally:
                del work  # whatever it holds (buffers of the engine) is free while this thread waits
                with self._changed:
                    self._running -= 1
                    self._changed.notify_all()

    def _call(self, work: Work) -> None:
        try:
            work()
        except Exception:
            _log.exception("work of %s failed", self._name)

    def _next(self) -> Work:
        if self._urgent and (self._in_a_row < URGENT_IN_A_ROW or not self._rest):
            self._in_a_row += 1
            return self._urgent.popleft()[0]
        self._in_a_row = 0
        return self._rest.popleft()[0]


def within(seconds: float, ask: Callable[[], T], otherwise: T) -> T:
    """What `ask` returns or raises, or `otherwise` where that takes longer: for calls that a mount may hold.

    It is called on a daemon thread of its own, which is left to its fate after `seconds`.
    """
    result: Future[T] = Future()

    def run() -> None:
        try:
            result.set_result(ask())
        except BaseException as error:
            result.set_exception(error)

    try:
        threading.Thread(target=run, name="g35-ask", daemon=True).start()
        return result.result(seconds)
    except (TimeoutError, RuntimeError):
        if result.done():
            raise  # what `ask` raised
        return otherwise  # not in time, or no thread to be had
