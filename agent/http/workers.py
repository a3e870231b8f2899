"""Threads for the blocking calls of the door's event loop.

A job is a function that may block: on the fabric and on a cipher, in a thread with a channel (`run`), or on
an index alone (`ask`), in a thread that never waits for an enclosure. So a hung drive delays reads and
writes of objects, and no listing. A listing is many short questions, after which that thread rests. A
connection has one or two jobs at a time, so the number of connections bounds the queues. Tenants take turns
in a queue. The first job of a request waits for a limited time.
"""

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable
from typing import Any, Final, TypeVar

import trio

from agent.fs.doors.door import MakeRunner
from agent.http.gil_yield import Rests
from agent.http.shares import TooBusy
from agent.pool.steps import NoRunner, Runner

log = logging.getLogger(__name__)

T = TypeVar("T")

QUEUE_SECONDS: Final = 20.0
"""A request that no thread has begun by then is refused, which clients try again."""


class _Job:
    """One call, with its result."""

    def __init__(self, call: Callable[[Runner], object], whose: Hashable, rests: bool = False) -> None:
        self.whose = whose
        self.rests = rests
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
    """Jobs in order for each tenant; tenants take turns."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._waiting: dict[Hashable, deque[_Job]] = {}
        """The next tenant comes first."""
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
    """`count` threads with a channel each; `make_runner(i)` is called in thread i; and one for an index."""

    def __init__(
        self,
        count: int,
        make_runner: MakeRunner,
        queue_seconds: float = QUEUE_SECONDS,
        *,
        name: str = "s3",
        has_index: bool = True,
        refusal: Callable[[str], Exception] = TooBusy,
    ) -> None:
        """`name`: what those of its threads begin with. `refusal` makes the exception for a request that no
        thread began in time."""
        self._jobs, self._questions = _Queue(), _Queue()
        self._make_runner = make_runner
        self._queue_seconds = queue_seconds
        self.rests = Rests()
        self._refusal = refusal
        self._threads = [
            threading.Thread(target=self._work, args=(number,), name=f"{name}-{number}", daemon=True)
            for number in range(count)
        ]
        if has_index:
            self._threads.append(threading.Thread(target=self._look_up, name=f"{name}-index", daemon=True))

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """End them, after the jobs in the queues."""
        self._jobs.close()
        self._questions.close()
        for thread in self._threads:
            thread.join()

    async def run(
        self, whose: Hashable, job: Callable[[Runner], T], *, first: bool = False, rests: bool = False
    ) -> T:
        """The job's result or exception; `whose` is the tenant for the turns.

        A job that has begun is waited for also when the caller is cancelled, because it has the caller's
        buffers; its own waits have deadlines. The `first` of a request raises the refusal where no thread
        begins it in time; a later one is neither refused nor withdrawn, since it may have to close something.
        After one that `rests` the thread rests: a job of names, and not of bytes that a cipher works on.
        """
        found: T = await self._done(self._jobs, _Job(job, whose, rests), first)
        return found

    async def ask(self, whose: Hashable, question: Callable[[], T]) -> T:
        """The result or exception of a call on the index."""
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
                # A thread has it: the caller may have to close the result.
            if not job.done.is_set() and queue.withdraw(job):
                raise self._refusal("Others were first. Please try again.")
        if not job.done.is_set():
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
            log.exception("a thread of an HTTP door has no channel; what it is given fails")
            runner = NoRunner()
        while (job := self._jobs.take()) is not None:
            began = time.thread_time()
            job.work(runner)
            if job.rests:
                self.rests.after(began)

    def _look_up(self) -> None:
        runner = NoRunner()
        while (question := self._questions.take()) is not None:
            began = time.thread_time()
            question.work(runner)
            self.rests.after(began)
