"""Processes that `g35 up` starts, watches, starts again when they die, and ends.

A child is killed by the kernel when its parent dies (agent/host_os/parent_death.py), so that even `kill -9`
of `g35 up` leaves nothing behind but a dead mount, which the next start clears away.
"""

import signal
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TypeAlias

from agent.errors import G35Error
from agent.host_os.forked_process import ForkedProcess, fork, may_fork
from agent.host_os.parent_death import die_with_parent
from agent.host_os.whole_file import write_whole

START_SECONDS = 30.0
STOP_SECONDS = 15.0
RESTARTS_MAX = 1000
"""Starts of one child in a life of `g35 up`; a child that keeps dying is not kept alive for ever."""
RESTART_SECONDS = 0.5
READY_LOOK_SECONDS = 0.005

Process: TypeAlias = subprocess.Popen[bytes] | subprocess.Popen[str] | ForkedProcess


class Child:
    """One process and how to start it. `ready` says whether it is serving."""

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        log: Path,
        ready: Callable[[], bool],
        pid_file: Path,
        run: Callable[[], int] | None = None,
    ) -> None:
        """`run`: what the command does, for a child that is forked and has nothing to load. The command is
        executed where that cannot be."""
        self.name = name
        self._run = run
        self._command = list(command)
        self._log = log
        self._ready = ready
        self._pid_file = pid_file
        self._process: Process | None = None
        self._next_start = 0.0
        self.starts = 0

    @property
    def pid(self) -> int:
        return self._process.pid if self._process is not None else 0

    def start(self) -> None:
        with open(self._log, "ab") as log:
            if self._run is not None and may_fork():
                self._process = fork(self._run, log.fileno(), log.fileno())
            else:
                self._process = subprocess.Popen(
                    self._command,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    preexec_fn=die_with_parent,
                    # A Ctrl-C at the terminal is for `g35 up`, which ends its children in their order.
                    start_new_session=True,
                )
        self.starts += 1
        self._next_start = time.monotonic() + RESTART_SECONDS
        write_whole(self._pid_file, f"{self._process.pid}\n")

    def wait_ready(self, stop: threading.Event | None = None, seconds: float = START_SECONDS) -> None:
        """Until it serves, or `stop` is set. Raises G35Error with its last words otherwise."""
        end = time.monotonic() + seconds
        while not self._ready():
            if stop is not None and stop.is_set():
                return
            if self._process is None or self._process.poll() is not None:
                raise G35Error(f"{self.name} did not start: {self.last_words()}", f"its log is {self._log}")
            if time.monotonic() > end:
                raise G35Error(f"{self.name} was not ready within {seconds:g} s", f"its log is {self._log}")
            time.sleep(READY_LOOK_SECONDS)

    def last_words(self) -> str:
        """What it said last of an error, for a message of ours."""
        try:
            words = self._log.read_text(errors="replace")
        except OSError:
            return "it left no log"
        return told_by(words, None if self._process is None else self._process.poll())

    @property
    def ended_well(self) -> bool:
        """It has ended by itself, with status 0: somebody wanted that."""
        return self._process is not None and self._process.poll() == 0

    def tend(self) -> str | None:
        """Start it again if it has died; what happened, for the log."""
        status = None if self._process is None else self._process.poll()
        if status is None or time.monotonic() < self._next_start or self.starts >= RESTARTS_MAX:
            return None
        self.start()
        return f"{self.name} ended with {_told(status)}; started again"

    def stop(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        end_process(process, STOP_SECONDS)
        self._pid_file.unlink(missing_ok=True)


def run_child(
    stack: ExitStack,
    name: str,
    command: Sequence[str],
    files: Path,
    ready: Callable[[], bool],
    seconds: float = START_SECONDS,
) -> None:
    """Start a process that ends with the stack, and wait until it is ready; its log is `files`.log."""
    child = Child(name, command, files.with_suffix(".log"), ready, files.with_suffix(".pid"))
    stack.callback(child.stop)
    child.start()
    child.wait_ready(seconds=seconds)


def _told(status: int) -> str:
    return f"signal {signal.Signals(-status).name}" if status < 0 else f"status {status}"


def told_by(words: str, status: int | None) -> str:
    """What a program of ours said last of an error and what to do, in a line; else how it ended."""
    lines = words.strip().splitlines()
    errors = [at for at, line in enumerate(lines) if line.startswith("error: ")]
    if errors:
        last = lines[errors[-1]].removeprefix("error: ")
        hints = [line.removeprefix("hint: ") for line in lines[errors[-1] :] if line.startswith("hint: ")]
        return "; ".join([last[:500], *hints[:1]])
    said = lines[-1][:500] if lines else "it said nothing"
    return f"it ended with {_told(status)}: {said}" if status and (status < 0 or not lines) else said


def end_process(process: Process, seconds: float) -> None:
    """SIGTERM, and SIGKILL for one that has not ended in `seconds`."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def detach(command: Sequence[str], log: Path, keep: Sequence[int] = ()) -> subprocess.Popen[bytes]:
    """Start a process that outlives this one, its words going to `log`; it gets the descriptors in `keep`."""
    with open(log, "wb") as file:
        return subprocess.Popen(
            list(command),
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            start_new_session=True,
            cwd="/",
            pass_fds=keep,
        )
