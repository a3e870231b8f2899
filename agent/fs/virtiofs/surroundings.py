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

from agent.fs.virtiofs.back_end import PeerError

EVENTFD_LINK = "anon_inode:[eventfd]"


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
    """Raises PeerError unless it is an eventfd; makes it one that never blocks us."""
    if os.readlink(f"/proc/self/fd/{fd}") != EVENTFD_LINK:
        raise PeerError("a kick or a call that is no eventfd")
    os.set_blocking(fd, False)


def drain(event: int) -> None:
    """Take what an eventfd has counted; whether it had or not."""
    with contextlib.suppress(BlockingIOError):
        os.eventfd_read(event)


def signal(event: int) -> None:
    """Wake whoever waits for an eventfd. One that is full wakes as well."""
    with contextlib.suppress(BlockingIOError):
        os.eventfd_write(event, 1)
