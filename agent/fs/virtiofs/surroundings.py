"""Descriptors of a front-end: looked at before they are trusted, mapped, and given out.

Guest memory is mapped once and used directly, so whoever can shrink the file behind it can end the agent
(a load beyond a file's end is SIGBUS). A memfd that is sealed against shrinking cannot be shrunk, which is
what QEMU's memory-backend-memfd is; anything else is refused unless the operator takes the risk.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import select
import threading
import time
from typing import Final

from agent.fs.virtiofs.back_end import PeerError

CALL_SECONDS: Final = 2.0
FREE_SECONDS: Final = 0.02
"""How often a thread that sleeps in a call is freed, and for how long that is tried."""
EVENTFD_LINK: Final = "anon_inode:[eventfd]"


def map_memory(fd: int, offset: int, size: int, *, must_be_sealed: bool) -> memoryview:
    """`size` bytes of a file from `offset` on, shared and writable. Raises PeerError where that cannot be."""
    end = offset + size
    try:
        if size < 1 or end > os.fstat(fd).st_size:
            raise PeerError(f"memory from {offset:#x} of {size} bytes in a file that ends before")
        if must_be_sealed and not _seals(fd) & fcntl.F_SEAL_SHRINK:
            raise PeerError(
                "guest memory that could be shrunk under us; give QEMU a memory-backend-memfd, whose seal=on "
                "is the default, or set virtiofs.sealed_memory = false"
            )
        # From the start of the file: an offset would have to be a multiple of its page, which may be huge.
        return memoryview(mmap.mmap(fd, end, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE))[offset:end]
    except (OSError, ValueError, OverflowError) as why:
        raise PeerError(f"memory that cannot be mapped: {why}") from None


def _seals(fd: int) -> int:
    try:
        return fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError:
        return 0


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
    if os.readlink(f"/proc/self/fd/{fd}") != EVENTFD_LINK:
        raise PeerError("a kick or a call that is no eventfd")
    os.set_blocking(fd, False)


def signal(event: int) -> None:
    """Wake whoever waits for an eventfd. One that is full wakes as well.

    Whoever shares it can make it block, and then fill it: see `Call`.
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
