"""Threads for whatever blocks, for whoever waits in the door's event loop.

A job is a function that may block: on the fabric and on a cipher, in a thread with lanes (`run`), or on the
index alone (`ask`), in a thread that never waits for an enclosure. So a drive that hangs holds up reads and
writes of objects, and no listing. The loop hands a job over and waits; a connection has one or two jobs at a
time, so the number of connections bounds the queues. In the queue tenants take turns, and the first job of a
request does not wait for ever: who cannot be begun with is told, and asks again.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import deque
from collections.abc import Callable, Hashable
from typing import Any, Final, TypeVar

import trio

from agent.errors import G35Error
from agent.fs.doors.door import MakeRunner
from agent.pool.steps import Runner, Steps
from agent.s3.errors import S3Error

log = logging.getLogger(__name__)

T = TypeVar("T")

QUEUE_SECONDS: Final = 20.0
"""A request that no thread could begin with by then is SlowDown, which SDKs try again."""


class _Job:
    """One call, and who waits for it."""

    def __init__(self, call: Callable[[Runner], object], whose: Hashable) -> None:
        self.whose = whose
        self.done = trio.Event()
        self.value: Any = None
        self.error: BaseException | None = None
        self._call = call
        self._token = trio.lowlevel.current_trio_token()

    def work(self, runner: Runner) -> None:
        try:
            self.value = self._call(runner)
        except BaseException as error:
            self.error = error
        with contextlib.suppress(trio.RunFinishedError):
            self._token.run_sync_soon(self.done.set)


class _Queue:
    """Jobs in the order of their coming for each of those whose they are, who take turns."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._waiting: dict[Hashable, deque[_Job]] = {}
        """Who is next comes first."""
        self._closed = False

    def put(self, job: _Job) -> None:
        with self._changed:
            self._waiting.setdefault(job.whose, deque()).append(job)
            self._changed.notify()

    def take(self) -> _Job | None:
        """Waits for one; None when it is closed and empty."""
        with self._changed:
            while not self._waiting:
                if self._closed:
                    return None
                self._changed.wait()
            whose = next(iter(self._waiting))
            jobs = self._waiting.pop(whose)
            job = jobs.popleft()
            if jobs:
                self._waiting[whose] = jobs
            return job

    def withdraw(self, job: _Job) -> bool:
        """False where a thread has it already."""
        with self._changed:
            jobs = self._waiting.get(job.whose, deque())
            if job not in jobs:
                return False
            jobs.remove(job)
            if not jobs:
                del self._waiting[job.whose]
            return True

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()


class Workers:
    """`count` threads with lanes, `make_runner(i)` being called in the thread i; and one for the index."""

    def __init__(self, count: int, make_runner: MakeRunner, queue_seconds: float = QUEUE_SECONDS) -> None:
        self._jobs, self._questions = _Queue(), _Queue()
        self._make_runner = make_runner
        self._queue_seconds = queue_seconds
        self._threads = [
            threading.Thread(target=self._work, args=(number,), name=f"s3-{number}", daemon=True)
            for number in range(count)
        ]
        self._threads.append(threading.Thread(target=self._look_up, name="s3-index", daemon=True))

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """End them, after the jobs that were given before."""
        self._jobs.close()
        self._questions.close()
        for thread in self._threads:
            thread.join()

    async def run(self, whose: Hashable, job: Callable[[Runner], T], *, first: bool = False) -> T:
        """What the job returns or raises; `whose` are those between whom turns are taken.

        Once begun with, it is not left alone when the caller is cancelled, because it has the caller's
        buffers; its waits have deadlines. The `first` of a request raises S3Error where it is not begun with
        in time; a later one is neither refused nor taken back, since it has something to end well.
        """
        found: T = await self._done(self._jobs, _Job(job, whose), first)
        return found

    async def ask(self, whose: Hashable, question: Callable[[], T]) -> T:
        """What a look into the index, or a change of it, returns or raises."""
        found: T = await self._done(self._questions, _Job(lambda runner: question(), whose), True)
        return found

    async def _done(self, queue: _Queue, job: _Job, may_be_refused: bool) -> Any:
        queue.put(job)
        if may_be_refused:
            try:
                with trio.move_on_after(self._queue_seconds):
                    await job.done.wait()
            except trio.Cancelled:
                if queue.withdraw(job):
                    raise
                # A thread has it: what it returns may have to be closed, which is the caller's to do.
            if not job.done.is_set() and queue.withdraw(job):
                raise S3Error("SlowDown", "Others were first. Please try again.")
        with trio.CancelScope(shield=True):
            await job.done.wait()
        if job.error is not None:
            raise job.error
        return job.value

    def _work(self, number: int) -> None:
        runner: Runner
        try:
            runner = self._make_runner(number)
        except Exception:
            log.exception("a thread of the S3 door has no lanes; what it is given fails")
            runner = _NoRunner()
        while (job := self._jobs.take()) is not None:
            job.work(runner)

    def _look_up(self) -> None:
        runner = _NoRunner()
        while (question := self._questions.take()) is not None:
            question.work(runner)


class _NoRunner:
    """In the place of lanes that could not be had, or are not to be: whoever waits must hear of it."""

    def run(self, steps: Steps[T]) -> T:
        steps.close()
        raise G35Error("this thread has no lanes", "see the log, and start the agent again")
