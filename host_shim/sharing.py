"""The transfers of one call on several threads, none of which outlives the call.

A call moves values between the pool and memory of its caller, through one session. When it returns, the
caller may give that memory to others and the next call may bind the session's tickets anew. So a helper that
still reads or writes then would be a wrong block under a right key. What this file promises: `share` returns,
or raises whatever it raises, only once no thread touches the work any more; and a helper that had not begun
by then never does. It needs no helper to end: where no thread can be started, the calling thread does it all.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import TypeAlias

from host_shim.connector_jobs import JobRunner

OneOf: TypeAlias = Callable[[int], None]


def share(helpers: JobRunner, helping: int, work: OneOf, count: int) -> None:
    """Run `work(0)` … `work(count - 1)` on this thread and up to `helping` others.

    Raises the first exception of `work`; after one, no further number is begun.
    """
    shared = _Shared(work, count)
    try:
        for _ in range(helping):
            if not helpers.submit(shared.help, urgent=True):
                break
        shared.work_on()
    finally:
        shared.end()
    if shared.error is not None:
        raise shared.error


class _Shared:
    """The work of one call. `_changed` guards all that follows it."""

    __slots__ = ("_changed", "_closed", "_helping", "_numbers", "_work", "error")

    def __init__(self, work: OneOf, count: int) -> None:
        self._work: OneOf | None = work
        self._numbers: Iterator[int] = iter(range(count))  # next() is atomic under the interpreter's lock
        self._changed = threading.Condition()
        self._closed = False
        self._helping = 0
        self.error: BaseException | None = None

    def help(self) -> None:
        """Take part until nothing is left; nothing at all once the call is at its end."""
        with self._changed:
            if self._closed:
                return
            self._helping += 1
        try:
            self.work_on()
        finally:
            with self._changed:
                self._helping -= 1
                self._changed.notify_all()

    def work_on(self) -> None:
        """Do what nobody else has begun. Never raises an Exception: see `error`."""
        work = self._work
        if work is None:
            return
        try:
            for number in self._numbers:
                if self.error is not None:
                    return
                work(number)
        except Exception as error:
            self.error = self.error or error
        except (
            BaseException
        ) as error:  # an interrupt: the other threads are to stop, this one to go on with it
            self.error = self.error or error
            raise

    def end(self) -> None:
        """Wait for the helpers that have begun, even if an interrupt comes meanwhile; it is raised after."""
        interrupt: BaseException | None = None
        while True:
            try:
                with self._changed:
                    self._closed = True
                    while self._helping:
                        self._changed.wait()
                break
            except BaseException as error:
                interrupt = error
        self._work = None  # a helper that is still queued must not hold on to the caller's buffers
        if interrupt is not None:
            raise interrupt
