"""Descriptors of a front-end: looked at before they are trusted, mapped, and given out.

Guest memory is mapped once and used directly, so nobody may be able to take it away:
agent/host_os/foreign_memory.py. QEMU's memory-backend-memfd is such; anything else is refused unless the
operator takes the risk. agent/host_os/foreign_descriptors.py says which descriptors get this far.
"""

import contextlib
import fcntl
import os
import select
import threading
import time
from typing import Final

from agent.fs.virtiofs.back_end import PeerError
from agent.host_os.descriptor_receiver import is_event
from agent.host_os.foreign_memory import ForeignMemoryRefused, map_foreign_memory

CALL_SECONDS: Final = 2.0
FREE_SECONDS: Final = 0.02
"""How often a thread that sleeps in a call is freed, and for how long that is tried."""
UNSAFE_ADVICE: Final = (
    "; give QEMU a memory-backend-memfd without hugetlb=on, whose seal=on is the default, or set "
    "virtiofs.sealed_memory = false, and the front-end can end the agent"
)


def map_memory(
    fd: int, offset: int, size: int, *, must_be_sealed: bool, is_shared: bool = False
) -> memoryview:
    """`size` bytes of a file from `offset` on, shared and writable. Raises PeerError where that cannot be.
    `is_shared`: other processes of the agent are to map it, too."""
    try:
        return map_foreign_memory(fd, offset, size, at_own_risk=not must_be_sealed, is_shared=is_shared)
    except ForeignMemoryRefused as refused:
        advice = UNSAFE_ADVICE if refused.is_unsafe else ""
        raise PeerError(f"memory that is not taken: {refused}{advice}") from None


def make_memory(size: int) -> int:
    """A sealed memfd of zeros."""
    fd = os.memfd_create("g35-inflight", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, size)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    except BaseException:
        os.close(fd)
        raise
    return fd


def check_event(fd: int) -> None:
    """Raises PeerError unless it is an eventfd.

    It is made one that does not block; the front-end can undo that at any time, so nothing rests on it.
    """
    if not is_event(fd):
        raise PeerError("a kick or a call that is no eventfd")
    os.set_blocking(fd, False)


def signal(event: int) -> None:
    """Wake the waiters of an eventfd. One that is full wakes as well.

    The front-end that shares it can make it block, and then fill it: see `Call`.
    """
    try:
        os.eventfd_write(event, 1)
    except BlockingIOError:
        return  # not suppress(): this is for every request


class Call:
    """A queue's own descriptor to call its driver through, for as long as the device lives.

    A new eventfd of the front-end's takes its place by dup2. The front-end keeps the eventfd too: it can
    make it one that blocks, and fill it, so that the thread that writes to it sleeps. `free` wakes that
    thread, by emptying an eventfd that is full; one that is not full is left as it is, because the call
    in it may be one that the driver waits for.
    """

    def __init__(self) -> None:
        self._fd = _event_of_nobody()
        self._lock = threading.Lock()
        self._room = bytearray(8)

    def signal(self) -> None:
        with self._lock:
            signal(self._fd)

    def use(self, fd: int | None) -> None:
        """Call through this descriptor from now on, or nobody. Raises PeerError where the one before keeps
        a thread of ours, however often it is emptied."""
        end = time.monotonic() + CALL_SECONDS
        while not self._lock.acquire(timeout=FREE_SECONDS):
            self.free()
            if time.monotonic() > end:
                raise PeerError("a call eventfd that is full whenever it is written to")
        try:
            new = _event_of_nobody() if fd is None else fd
            os.dup2(new, self._fd, inheritable=False)
            if fd is None:
                os.close(new)
        finally:
            self._lock.release()

    def fileno(self) -> int:
        """The eventfd that is called through now, for a process that calls in this one's place."""
        return self._fd

    def free(self) -> None:
        poller = select.poll()
        poller.register(self._fd, select.POLLOUT)
        if poller.poll(0):
            return
        # Not eventfd_read: that one would sleep where somebody else was quicker to empty it.
        with contextlib.suppress(OSError):
            os.preadv(self._fd, [self._room], -1, os.RWF_NOWAIT)

    def close(self) -> None:
        os.close(self._fd)


def _event_of_nobody() -> int:
    return os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
