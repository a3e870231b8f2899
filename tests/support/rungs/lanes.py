"""Jobs that two lanes take from one list: while one job lasts long, the other lane takes what is left.

A job is a command with an environment. The caller's lane shows what its jobs say as they say it. The lane
beside it is a thread; what its jobs say is kept and shown at the end.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from typing import BinaryIO, NamedTuple

END_SECONDS = 60


class Job(NamedTuple):
    """A command, what its environment has beside ours, and whether we go on as well where it fails."""

    words: Sequence[str]
    environment: Mapping[str, str] = {}
    may_fail: bool = False

    def start(self, said: BinaryIO | None = None) -> subprocess.Popen[bytes]:
        """Start it; what it says goes to `said`, or is shown."""
        environment = {**os.environ, **self.environment}
        return subprocess.Popen(self.words, env=environment, stdout=said, stderr=said)

    def run(self) -> int:
        """Run it, shown; the exit code."""
        running = self.start()
        try:
            return self.judged(running.wait())
        finally:
            end(running)

    def judged(self, code: int) -> int:
        """The exit code that counts."""
        return 0 if self.may_fail else code


def end(running: subprocess.Popen[bytes]) -> None:
    """As Ctrl-C does, so that it tidies up: what it started is gone when it is."""
    if running.poll() is None:
        running.send_signal(signal.SIGINT)
        try:
            running.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            running.kill()
            running.wait()


def run_next(waiting: deque[Job]) -> int | None:
    """Run the first job that waits, shown; the exit code, or None where none waits."""
    try:
        job = waiting.popleft()
    except IndexError:
        return None
    return job.run()


class LaneBeside:
    """A thread that runs some jobs of its own, one after another, and then what waits.

    `with` starts it. Leaving before `join` ends its job as Ctrl-C does, so that the job tidies up.
    `said`: a file for what its jobs say.
    """

    def __init__(self, own: Sequence[Job], waiting: deque[Job], said: BinaryIO) -> None:
        self._own, self._waiting = deque(own), waiting
        self._said = said
        self._thread = threading.Thread(target=self._run, name="lane beside")
        self._lock = threading.Lock()
        self._running: subprocess.Popen[bytes] | None = None
        self._stopped = False
        self._first_ended = threading.Event()
        self._codes: list[int] = []

    def __enter__(self) -> LaneBeside:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._stopped = True
            running = self._running
        if running is not None:
            end(running)
        self._thread.join()

    def wait_for_first(self) -> None:
        """Until its first job has ended."""
        self._first_ended.wait()

    def join(self) -> list[int]:
        """Wait until nothing waits and its last job has ended; show what all said; the exit codes."""
        self._thread.join()
        self._said.seek(0)
        sys.stdout.buffer.write(self._said.read())
        sys.stdout.flush()
        return self._codes

    def _run(self) -> None:
        try:
            self._run_jobs()
        finally:
            self._first_ended.set()

    def _run_jobs(self) -> None:
        while (job := self._next()) is not None:
            with self._lock:
                if self._stopped:
                    return
                self._running = job.start(self._said)
            self._codes.append(job.judged(self._running.wait()))
            self._first_ended.set()

    def _next(self) -> Job | None:
        for jobs in (self._own, self._waiting):
            try:
                return jobs.popleft()
            except IndexError:
                continue
        return None
