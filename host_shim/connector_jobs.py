"""Threads of the client: those of a connector, so that no engine waits for the pool, and helpers of batches.

An engine calls its connector from its scheduler or its event loop. The connector hands long work to a
`JobRunner` and answers later. The runner promises:

* `submit` never waits and never raises: it says False where the queue is full, and where the system gives no
  thread at all;
* accepted work that is never called, because the runner is closed, hears of it (`dropped`);
* urgent work (loads) goes before the rest (stores); each thread takes one piece of the rest after
  `URGENT_IN_A_ROW` urgent ones;
* threads are daemons: a thread that a hanging mount holds does not keep the engine from exiting;
* a piece of work that raises is logged, and the thread goes on.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from typing import TypeAlias, TypeVar

_log = logging.getLogger(__name__)

WAITING_MAX = 4096
"""Pieces of work that may wait; each is a closure of some hundred bytes."""
URGENT_IN_A_ROW = 8
LOOK_AGAIN_SECONDS = 0.2
"""A wait for helpers looks this often, though the last of them tells."""

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
        self._lock = threading.RLock()
        """What is guarded is entered by this, and not by the condition on it: an interrupt that comes as a
        condition is entered would leave the lock behind."""
        self._changed = threading.Condition(self._lock)
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
        with self._lock:
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

    def ask(
        self, work: Callable[[], T], end: Callable[[T], None], failed: T, *, urgent: bool = False
    ) -> None:
        """Have `end` called with what `work` gives, or with `failed` where it raises or never runs."""

        def run() -> None:
            result = failed
            try:
                result = work()
            finally:
                end(result)

        if not self.submit(run, urgent=urgent, dropped=lambda: end(failed)):
            end(failed)

    def close(self, seconds: float = 5.0) -> bool:
        """Forget what waits, let end what runs, for `seconds` at most; False where a thread still runs."""
        with self._lock:
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
        try:
            name = f"{self._name}-{len(self._threads)}"
            thread = threading.Thread(target=self._serve, name=name, daemon=True)
            thread.start()
        except (RuntimeError, MemoryError):  # no more threads for this process: those that there are go on
            _log.debug("the system gives %s no further thread", self._name)
            return
        self._threads.append(thread)

    def _serve(self) -> None:
        while True:
            with self._lock:
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
                with self._lock:
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


OneOf: TypeAlias = Callable[[int], None]


def share(helpers: JobRunner, helping: int, work: OneOf, count: int) -> None:
    """Run `work(0)` … `work(count - 1)` on this thread and up to `helping` others.

    Raises an exception of `work`, this thread's own before a helper's; after one, no further number is begun.
    When it returns or raises, no thread touches the work any more. The caller may then give its buffers to
    others, and bind the session's tickets anew: a late read would be a wrong block under a right key. Where
    no thread can be started, the calling thread does it all.
    """
    shared = _Shared(work, count)
    try:
        try:
            for _ in range(helping):
                if not helpers.submit(shared.help, urgent=True):
                    break
            shared.work_on()
        finally:
            shared.end()
    except BaseException:
        shared.end()  # anew, where an interrupt came just before the other one had begun
        raise
    if shared.error is not None:
        raise shared.error


class _Shared:
    """The work of one call. `_lock` guards all that follows it. See `share`."""

    __slots__ = ("_closed", "_helping", "_last", "_lock", "_numbers", "_work", "error")

    def __init__(self, work: OneOf, count: int) -> None:
        self._work: OneOf | None = work
        self._numbers: Iterator[int] = iter(range(count))  # next() is atomic under the interpreter's lock
        self._lock = threading.Lock()
        self._last = threading.Lock()
        """Released by the last of the helpers, once `end` has begun."""
        self._last.acquire()
        self._closed = False
        self._helping = 0
        self.error: BaseException | None = None

    def help(self) -> None:
        """Take part until nothing is left; nothing at all once the call is at its end."""
        with self._lock:
            if self._closed:
                return
            self._helping += 1
        try:
            self.work_on(is_helper=True)
        finally:
            with self._lock:
                self._helping -= 1
                if not self._helping and self._closed:
                    self._last.release()  # type: ignore[unreachable]

    def work_on(self, *, is_helper: bool = False) -> None:
        """Do what nobody else has begun. A helper's Exception is in `error`."""
        work = self._work
        if work is None:
            return
        try:
            for number in self._numbers:
                if self.error is not None:
                    return
                work(number)
        except BaseException as error:  # the others stop
            self.error = self.error or error
            if not is_helper or not isinstance(error, Exception):
                raise  # the caller's own goes before a helper's: it may be of a handler of a signal

    def end(self) -> None:
        """Wait for the helpers that have begun, even if an interrupt comes meanwhile; it is raised after."""
        interrupt: BaseException | None = None
        while True:
            try:
                with self._lock:
                    self._closed = True
                while self._helping:
                    self._last.acquire(timeout=LOOK_AGAIN_SECONDS)
                break
            except BaseException as error:
                interrupt = error
        self._work = None  # a helper that is still queued must not hold on to the caller's buffers
        if interrupt is not None:
            raise interrupt


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
    except RuntimeError:
        return otherwise  # no thread to be had
    if not wait([result], seconds).done:
        return otherwise
    return result.result()
