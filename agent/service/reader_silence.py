"""Whether a reader that says nothing hangs, or merely has no processor.

A reader tells its counts four times a second, by a thread that waits for nothing else. One that has no
processor is silent as well, and a kill would take from it the work that it has begun. /proc tells the two
apart: a thread that waits for a processor is runnable, one that has had one has used time of it. Where no
thread of a process has been either for seconds, the process is stopped, or all its threads wait for what does
not come, the one that tells of gets as well.
"""

import os
from pathlib import Path
from typing import Final, NamedTuple

LATE_SECONDS: Final = 1.0
"""Without a word: `g35 status` says so."""
ASLEEP_SECONDS: Final = 3.0
"""In which no thread of a late one has run or wanted to: it hangs."""
SILENT_SECONDS: Final = 10.0
"""Without a word: it hangs, whatever its threads do."""
TURN_SECONDS: Final = 0.5
"""What one turn of the thread that listens counts at the most: it may have had no processor itself, or been
stopped."""
_PROC: Final = Path("/proc")
_ASLEEP: Final = frozenset({b"S", b"T"})
"""Sleeping, and stopped by a signal (proc_pid_stat(5), field 3). One that a debugger holds is neither, and in
uninterruptible sleep a thread waits for a disk, perhaps for its own memory."""


class Activity(NamedTuple):
    """Of all threads of a process."""

    is_asleep: bool
    ticks: int
    """Of processor time, ever."""


def activity_of(pid: int, proc: Path = _PROC) -> Activity | None:
    """None where that cannot be told, as of a kernel that counts no time."""
    ticks, is_asleep = 0, True
    try:
        threads = os.listdir(proc / f"{pid}/task")
        for thread in threads:
            # Behind the name, which may have spaces and brackets in it.
            fields = (proc / f"{pid}/task/{thread}/stat").read_bytes().rpartition(b")")[2].split()
            is_asleep = is_asleep and fields[0] in _ASLEEP
            ticks += int(fields[11]) + int(fields[12])
    except (OSError, ValueError, IndexError):
        return None
    return Activity(is_asleep, ticks) if ticks else None


class Silence:
    """That of one process, as long as it lives. For one thread."""

    def __init__(self, pid: int, now: float, proc: Path = _PROC) -> None:
        self._pid, self._at, self._proc = pid, now, proc
        self.seconds = 0.0
        """Since its last word."""
        self._asleep = 0.0
        self._ticks = -1

    def end(self, now: float) -> None:
        """It has said something."""
        self._at, self.seconds, self._asleep, self._ticks = now, 0.0, 0.0, -1

    def look(self, now: float, *, is_starting: bool = False) -> None:
        """Take note of the time, and of what the threads of one do that is late and was not so from its
        start."""
        passed = min(max(0.0, now - self._at), TURN_SECONDS)
        self._at = now
        self.seconds += passed
        if is_starting or not self.is_late:
            return
        activity = activity_of(self._pid, self._proc)
        if activity is None or not activity.is_asleep:
            self._asleep, self._ticks = 0.0, -1
        elif activity.ticks != self._ticks:
            self._asleep, self._ticks = 0.0, activity.ticks
        else:
            self._asleep += passed

    @property
    def is_late(self) -> bool:
        return self.seconds >= LATE_SECONDS

    @property
    def hangs(self) -> bool:
        return self._asleep >= ASLEEP_SECONDS or self.seconds >= SILENT_SECONDS
