"""Processor time of processes and of their threads, as the kernel counts it, seen from outside.

A process' whole time is its processor clock (clock_getcpuclockid(3)), in nanoseconds, ended threads included.
A thread's is in /proc/PID/task/TID/schedstat: nanoseconds on a processor, nanoseconds in the queue for one
(Documentation/scheduler/sched-stats.rst). How much of it was the kernel's is known by the scheduler's ticks
alone (/proc/PID/task/TID/stat, fields 14 and 15): over some seconds that is good to a few percent.
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

PROC = Path("/proc")
_SCHEDULER_CLOCK = 2
"""CPUCLOCK_SCHED; the clock of a process is the complement of its number, and this in the low bits
(include/linux/posix-timers.h)."""
_UTIME, _STIME = 11, 12
"""Among the fields behind the name in brackets."""


def process_seconds(pid: int) -> float:
    """Of all its threads, those that have ended too. Raises OSError where there is no such process."""
    return time.clock_gettime((~pid << 3) | _SCHEDULER_CLOCK)


@dataclass(frozen=True, slots=True)
class ThreadTime:
    """Of one thread, in seconds since it began, `user` and `kernel` in ticks."""

    name: str
    ran: float
    queued: float
    user: int
    kernel: int


def thread_times(pid: int, proc: Path = PROC) -> dict[int, ThreadTime]:
    """By thread number; the first thread is called `main`. One that ends meanwhile is left out."""
    found: dict[int, ThreadTime] = {}
    for task in sorted((proc / str(pid) / "task").iterdir()):
        try:
            name, _, rest = (task / "stat").read_bytes().partition(b"(")[2].rpartition(b") ")
            ran, queued, _ = map(int, (task / "schedstat").read_bytes().split())
        except (OSError, ValueError):
            continue
        number, fields = int(task.name), rest.split()
        found[number] = ThreadTime(
            "main" if number == pid else name.decode(errors="replace"),
            ran / 1e9, queued / 1e9, int(fields[_UTIME]), int(fields[_STIME]),
        )  # fmt: skip
    return found


@dataclass(slots=True)
class Usage:
    """What threads of one kind have used, in seconds; what of `processor` was the kernel's is `kernel`."""

    threads: int = 0
    processor: float = 0.0
    kernel: float = 0.0
    queued: float = 0.0

    @property
    def user(self) -> float:
        return self.processor - self.kernel

    def plus(self, other: "Usage") -> "Usage":
        """The sum of two times; of as many threads as the greater of them."""
        return Usage(
            max(self.threads, other.threads),
            self.processor + other.processor,
            self.kernel + other.kernel,
            self.queued + other.queued,
        )


def used(before: Mapping[int, ThreadTime], after: Mapping[int, ThreadTime]) -> dict[str, Usage]:
    """Between two looks, by kind of thread: a name without its number (`fuse-3` is `fuse`)."""
    kinds: dict[str, Usage] = {}
    ticks: dict[str, list[int]] = {}
    for number, now in after.items():
        began = before.get(number, ThreadTime(now.name, 0.0, 0.0, 0, 0))
        kind = kind_of(now.name)
        usage = kinds.setdefault(kind, Usage())
        usage.threads += 1
        usage.processor += now.ran - began.ran
        usage.queued += now.queued - began.queued
        seen = ticks.setdefault(kind, [0, 0])
        seen[0] += now.user - began.user
        seen[1] += now.kernel - began.kernel
    for kind, (user, kernel) in ticks.items():
        # Ticks of one thread may be few; those of all threads of its kind are enough.
        kinds[kind].kernel = kinds[kind].processor * kernel / (user + kernel) if user + kernel else 0.0
    return kinds


def kind_of(name: str) -> str:
    """The name of a thread without the number, or the peer's address, that tells it from its like."""
    return name.rstrip("0123456789 -_:.[]") or name
