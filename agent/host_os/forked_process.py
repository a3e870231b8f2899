"""A child that is forked and executes no program: it begins with every module that its parent has loaded.

To load the agent takes most of a second of processor time. A parent that has loaded it once starts it, and
starts it again, in milliseconds. The child gets nothing else of its parent: its descriptors are closed, its
handlers of signals are gone, and what it would do at its own end is left out. Keys and random bytes that a
parent has used would be known to the child: so fork from a process that serves nobody.
"""

import ctypes
import os
import select
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import NoReturn

from agent.host_os.parent_death import die_with_parent

_DESCRIPTORS_MAX = 1 << 20
_FAILED = 1
_SOFT_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD)
_ARG_START, _ARG_END = 48, 49
"""Fields of /proc/PID/stat, from 1 (proc_pid_stat(5)): where the kernel finds the words of a process."""


class ForkedProcess:
    """A child, with the part of `subprocess.Popen` that its parent needs."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        """As `Popen` has it: the status, or the signal as a negative number; None while it runs."""

    def poll(self) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Raises subprocess.TimeoutExpired."""
        end = None if timeout is None else time.monotonic() + timeout
        while self.poll() is None:
            # The number is the child's until it is waited for, here.
            ended = os.pidfd_open(self.pid)
            try:
                left = None if end is None else max(0.0, end - time.monotonic())
                ready, _, _ = select.select([ended], [], [], left)
            finally:
                os.close(ended)
            if not ready and timeout is not None:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout)
        assert self.returncode is not None
        return self.returncode

    def terminate(self) -> None:
        self._send(signal.SIGTERM)

    def kill(self) -> None:
        self._send(signal.SIGKILL)

    def _send(self, number: signal.Signals) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)


def may_fork() -> bool:
    """Whether this process has one thread: a lock that another one holds would be held in the child for
    ever."""
    return threading.active_count() == 1


def fork(run: Callable[[], int], output: int, errors: int) -> ForkedProcess:
    """Run a function in a child, which has a session of its own and dies with this process.

    What the child says goes to the two descriptors. The result is its status, as is a SystemExit.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    parent = os.getpid()
    pid = os.fork()
    if pid:
        return ForkedProcess(pid)
    _be_child(run, output, errors, parent)


def _be_child(run: Callable[[], int], output: int, errors: int, parent: int) -> NoReturn:
    status = _FAILED
    try:
        die_with_parent()
        if os.getppid() == parent:
            os.setsid()
            for number in _SOFT_SIGNALS:
                signal.signal(number, signal.SIG_DFL)
            _take_descriptors(output, errors)
            status = run()
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else _FAILED if end.code else 0
    except BaseException:
        traceback.print_exc()
    finally:
        # Not by the way that this process came: the blocks it is in are its parent's.
        try:
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            os._exit(status)


def _take_descriptors(output: int, errors: int) -> None:
    """Standard input is empty, output and errors are those; every other descriptor is closed."""
    empty = os.open(os.devnull, os.O_RDONLY)
    for number, descriptor in enumerate((empty, output, errors)):
        os.dup2(descriptor, number)
    # What had been put in their place here may write to a descriptor that is closed now.
    sys.stdout, sys.stderr = sys.__stdout__ or sys.stdout, sys.__stderr__ or sys.stderr
    os.closerange(3, min(_DESCRIPTORS_MAX, os.sysconf("SC_OPEN_MAX")))


def show_words(words: list[str]) -> None:
    """Have ps(1) show these words for this process, as far as there is room where those of its start are."""
    try:
        with open("/proc/self/stat", "rb") as file:
            # The name, in brackets, may have spaces in it; the third field is the first behind it.
            fields = file.read().rpartition(b")")[2].split()
        start, end = int(fields[_ARG_START - 3]), int(fields[_ARG_END - 3])
    except (OSError, ValueError, IndexError):
        return
    room = end - start
    if start and room > 0:
        told = b"\0".join(os.fsencode(word) for word in words)[: room - 1]
        ctypes.memmove(start, told.ljust(room, b"\0"), room)
