"""Threads with lanes, for whoever waits in the door's event loop.

A job is a function that is called with the thread's runner and may block: on the fabric, on a cipher, on the
index. The loop hands it over and waits; a connection has one or two jobs at a time, so the number of
connections bounds the queue.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
from collections.abc import Callable
from typing import Any, TypeVar

import trio

from agent.errors import G35Error
from agent.fs.door import MakeRunner
from agent.pool.steps import Runner, Steps

log = logging.getLogger(__name__)

T = TypeVar("T")


class Workers:
    """`count` threads; `make_runner(i)` is called in the thread i."""

    def __init__(self, count: int, make_runner: MakeRunner) -> None:
        self._jobs: queue.SimpleQueue[Callable[[Runner], None] | None] = queue.SimpleQueue()
        self._make_runner = make_runner
        self._threads = [
            threading.Thread(target=self._work, args=(number,), name=f"s3-{number}", daemon=True)
            for number in range(count)
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """End them, after the jobs that were given before."""
        for _ in self._threads:
            self._jobs.put(None)
        for thread in self._threads:
            thread.join()

    async def run(self, job: Callable[[Runner], T]) -> T:
        """What the job returns or raises. It is not left alone when the caller is cancelled, because it has
        the caller's buffers; its waits have deadlines."""
        token, done = trio.lowlevel.current_trio_token(), trio.Event()
        result: list[Any] = []

        def work(runner: Runner) -> None:
            try:
                result.append((job(runner), None))
            except BaseException as error:
                result.append((None, error))
            with contextlib.suppress(trio.RunFinishedError):
                token.run_sync_soon(done.set)

        self._jobs.put(work)
        with trio.CancelScope(shield=True):
            await done.wait()
        value, error = result[0]
        if error is not None:
            raise error
        return value  # type: ignore[no-any-return]

    def _work(self, number: int) -> None:
        runner: Runner
        try:
            runner = self._make_runner(number)
        except Exception:
            log.exception("a thread of the S3 door has no lanes; what it is given fails")
            runner = _NoRunner()
        while (job := self._jobs.get()) is not None:
            job(runner)


class _NoRunner:
    """In the place of lanes that could not be had: whoever waits for a job must hear of it."""

    def run(self, steps: Steps[T]) -> T:
        steps.close()
        raise G35Error("this thread has no lanes", "see the log, and start the agent again")
