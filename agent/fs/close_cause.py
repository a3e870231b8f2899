"""How a file was closed: by a process that goes on, or by Linux because its process died.

In FUSE a FLUSH at the end of a process looks like that of a close(2). Linux sends it from the very thread
that ends, which waits for our answer: PF_EXITING and the exit code are set before it closes its files
(`do_exit` in kernel/exit.c), and `/proc/<thread>/stat` shows both (proc_pid_stat(5), fields 9 and 52).

A thread amid execve(2) closes files too (those with O_CLOEXEC), and holds the lock `exec_update_lock` of its
process until we have answered. Newer kernels (6.18) take that lock for `stat` and for the links in `fd`. To
read these would be to wait for ourselves. `statm` is shown without it, and tells the three apart: a thread
that ends has given up its memory before it closes its files, and one amid execve(2) has no code yet.

Nobody tells of a process of a guest, of one outside of our PID name space (FUSE then says 0), and of any
where /proc hides them (hidepid=) or is another name space's.
"""

import enum
import functools
import os
from typing import Final

from agent.fs.interface import LockOwner

PF_EXITING: Final = 0x4
PF_SIGNALED: Final = 0x400
"""The thread ends because of a signal. So do those that another thread's exit(2) ends amid their work."""
_FLAGS_FIELD: Final = 9 - 3
_EXIT_CODE_FIELD: Final = 52 - 3
"""The fields are counted from 1, and we count from 0 behind the second one, the name in brackets."""
STAT_BYTES_MAX: Final = 4096
DESCRIPTORS_MAX: Final = 1024
"""Linux' usual limit. A process with more is not looked at: 1,024 take 1.3 ms of each close."""


PROCESSES_MAX: Final = 1024
"""Threads whose processes are remembered."""
_processes: Final[dict[int, int]] = {}


class Closing(enum.Enum):
    MEANT = "a process that has it open no more, or one that has ended by exit(0)"
    KEPT = "a process that has it open by another descriptor"
    ONE = "a process that goes on, and may have it open by another descriptor: it may not be looked at"
    MANY = (
        "a process that goes on, and is not looked at: for its many descriptors, or because it is amid exec"
    )
    DYING = "a process that a signal has ended, or that says it has failed"
    UNTOLD = "nobody says"


def how_closed(holder: LockOwner, last_writer: int, name: bytes, ino: int) -> Closing:
    """How the thread that asks for a FLUSH comes to close file `name`, of inode `ino`.

    Call it before the FLUSH is answered. `last_writer`: the thread that wrote last by the same table of
    files; 0 where none did. A thread that another one's exit(2) ended may have been amid a write(2), so an
    exit counts only where that thread itself has called it.
    """
    if holder.pid <= 0 or not _sees_processes(os.getpid()):
        return Closing.UNTOLD
    try:
        pages, code_pages = _memory(holder.pid)
        if pages:
            return _goes_on(holder.pid, name, ino) if code_pages else Closing.MANY
        fields = _stat(holder.pid)
        flags, exit_code = int(fields[_FLAGS_FIELD]), int(fields[_EXIT_CODE_FIELD])
    except (OSError, ValueError, IndexError):
        return Closing.UNTOLD
    if not flags & PF_EXITING:
        return _goes_on(holder.pid, name, ino)
    if flags & PF_SIGNALED or exit_code or last_writer not in (0, holder.pid):
        return Closing.DYING
    try:
        # To those who may not trace the process, stat shows 0 for the exit code of any.
        os.readlink(f"/proc/{holder.pid}/ns/user")
    except OSError:
        return Closing.DYING
    return Closing.MEANT


def same_process(thread: int, other: int) -> bool:
    """Whether two threads are known to be of one process; `thread` is there, `other` may have ended."""
    return thread == other or (thread > 0 < other and os.path.exists(f"/proc/{thread}/task/{other}"))


def process_of(thread: int) -> int:
    """The number of the process of a thread that is there, which stays when the thread ends; the thread's own
    where nobody tells. It is remembered, for to read it takes longer than to see that it is still so."""
    known = _processes.get(thread)
    if known is not None and same_process(known, thread):
        return known
    found = _process_read(thread)
    if len(_processes) >= PROCESSES_MAX:
        _processes.clear()
    _processes[thread] = found
    return found


def _process_read(thread: int) -> int:
    try:
        with open(f"/proc/{thread}/status", "rb", buffering=0) as status:
            for line in status.read(STAT_BYTES_MAX).splitlines():
                if line.startswith(b"Tgid:"):
                    return int(line[5:])
    except (OSError, ValueError):
        pass
    return thread


@functools.cache
def _sees_processes(own: int) -> bool:
    """Whether the /proc that is mounted here numbers processes as we do. `own`: our number."""
    try:
        return os.readlink("/proc/self") == str(own)
    except OSError:
        return False


def _goes_on(thread: int, name: bytes, ino: int) -> Closing:
    """Whether a thread that goes on has the file open still.

    It asks the file itself nothing, whose answer would be ours to give.
    """
    folder = b"/proc/%d/fd/" % thread
    try:
        if os.stat(folder).st_size > DESCRIPTORS_MAX:  # since Linux 6.2; 0 before
            return Closing.MANY
        numbers = os.listdir(folder)
        if len(numbers) > DESCRIPTORS_MAX:
            return Closing.MANY
        for number in numbers:
            try:
                if name in os.readlink(folder + number) and _ino_of(thread, number) == ino:
                    return Closing.KEPT
            except FileNotFoundError:
                continue  # closed meanwhile by another thread
    except OSError:
        return Closing.ONE
    return Closing.MEANT


def _ino_of(thread: int, number: bytes) -> int:
    """The inode of a descriptor (proc_pid_fdinfo(5)); -1 from a kernel that does not say (before 5.14)."""
    with open(b"/proc/%d/fdinfo/%s" % (thread, number), "rb", buffering=0) as info:
        lines = info.read(STAT_BYTES_MAX).splitlines()
    return next((int(line[4:]) for line in lines if line.startswith(b"ino:")), -1)


def _memory(thread: int) -> tuple[int, int]:
    """The pages of a thread's address space, and those with code (proc_pid_statm(5), fields 1 and 4)."""
    with open(f"/proc/{thread}/statm", "rb", buffering=0) as statm:
        fields = statm.read(STAT_BYTES_MAX).split()
    return int(fields[0]), int(fields[3])


def _stat(thread: int) -> list[bytes]:
    """The fields of /proc/<thread>/stat behind the name, which may have spaces and brackets in it."""
    with open(f"/proc/{thread}/stat", "rb", buffering=0) as stat:
        return stat.read(STAT_BYTES_MAX).rpartition(b")")[2].split()
