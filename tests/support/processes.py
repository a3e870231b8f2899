"""Processes that a test starts, and how to be sure that none of them outlives it.

Three nets, one below the other: the fixture `processes` kills what it started, the kernel kills the
children of a test run that is itself killed (PR_SET_PDEATHSIG), and `strays` finds by a variable in
their environment even those that made themselves daemons.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path

from tests.support.waiting import wait_until

MARK = "G35_TEST_RUN"
"""Set in the environment of the test run, inherited by everything that it starts."""

_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True)


def mark_this_run() -> str:
    """Put a mark of this test run into the environment that its processes inherit."""
    return os.environ.setdefault(MARK, uuid.uuid4().hex)


def _die_with_the_parent() -> None:
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


@dataclass(slots=True)
class Started:
    """One process of a test; standard output and error go, together, to `log`."""

    process: subprocess.Popen[bytes]
    log: Path

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def output(self) -> str:
        return self.log.read_text(errors="replace")

    @property
    def running(self) -> bool:
        return self.process.poll() is None

    def wait_for_line(self, text: str, seconds: float = 60.0) -> str:
        """The first line of the output that contains `text`, as soon as it is there and complete."""

        def found() -> str | None:
            lines = self.output.splitlines(keepends=True)
            hit = next((line for line in lines if text in line and line.endswith("\n")), None)
            if hit is None and not self.running and text not in self.output:
                raise AssertionError(
                    f"{self.process.args!r} ended with {self.process.returncode} before it said {text!r}:\n"
                    + self.output
                )
            return hit

        try:
            line = wait_until(found, seconds, f"{text!r} in the output")
        except AssertionError as missing:
            raise AssertionError(f"{missing}\n--- its output ---\n{self.output}") from None
        assert line is not None
        return line.rstrip("\n")

    def stop(self, seconds: float = 60.0, how: signal.Signals = signal.SIGTERM) -> int:
        """Ask it to end, and wait. Returns the exit status; raises if it doesn't end in time."""
        if self.running:
            self.process.send_signal(how)
        return self.process.wait(seconds)

    def kill(self) -> None:
        """SIGKILL to the process and all of its group, as a crash would."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(60)


class Processes:
    """What the fixture `processes` gives to a test."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._started: list[Started] = []

    def start(
        self,
        arguments: Sequence[str | Path],
        *,
        environment: Mapping[str, str] | None = None,
        folder: Path | None = None,
    ) -> Started:
        """Start a program in a process group of its own."""
        log = self._folder / f"process-{len(self._started)}.log"
        with log.open("wb") as output:
            process = subprocess.Popen(
                [str(word) for word in arguments],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, **(environment or {})},
                cwd=folder,
                start_new_session=True,
                preexec_fn=_die_with_the_parent,
            )
        started = Started(process, log)
        self._started.append(started)
        return started

    def python(self, *arguments: str | Path, environment: Mapping[str, str] | None = None) -> Started:
        """Start this interpreter with `arguments`."""
        return self.start([sys.executable, *arguments], environment=environment)

    def g35(self, *arguments: str | Path, environment: Mapping[str, str] | None = None) -> Started:
        """Start the `g35` of this environment."""
        return self.python("-P", "-m", "agent.cli", *arguments, environment=environment)

    def end_all(self) -> None:
        """Kill what still runs; youngest first."""
        for started in reversed(self._started):
            started.kill()


def strays(mark: str) -> dict[int, str]:
    """Processes other than this one that carry the mark of this run: id and command line."""
    found: dict[int, str] = {}
    needle = f"{MARK}={mark}".encode()
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            if needle not in (entry / "environ").read_bytes().split(b"\0"):
                continue
            state = (entry / "stat").read_text().rpartition(") ")[2][:1]
            command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue  # it ended meanwhile, or is somebody else's
        if state not in "ZX":
            found[int(entry.name)] = command.strip()
    return found


def new_strays(mark: str, before: Set[int]) -> dict[int, str]:
    """Strays that were not there before, nor were started by one that was.

    The latter are the business of whoever holds that one: a fixture of a wider scope, as a rule.
    """
    found = strays(mark)
    return {
        process_id: command
        for process_id, command in found.items()
        if process_id not in before and not before & _ancestors(process_id)
    }


def _ancestors(process_id: int) -> set[int]:
    found: set[int] = set()
    while process_id > 1:
        try:
            stat = Path(f"/proc/{process_id}/stat").read_text()
        except OSError:
            break
        process_id = int(stat.rpartition(") ")[2].split()[1])
        found.add(process_id)
    return found


def end(process_ids: Iterable[int]) -> None:
    """SIGKILL to processes, those that are gone already excepted."""
    for process_id in process_ids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(process_id, signal.SIGKILL)
