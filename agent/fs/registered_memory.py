"""Memory that clients on this machine have registered: mapped here as well, so that values need no copy.

host_shim/transfer_wire.py has the protocol. A client hands us a descriptor of its own process; we take it
from there (pidfd_getfd(2), which asks for the right to trace it: the same user, or CAP_SYS_PTRACE).

What could go wrong with somebody else's memory, and why it cannot:

* It shrinks, and touching what is no more would be SIGBUS: only a memfd with F_SEAL_SHRINK is taken, of
  ordinary pages (huge ones of hugetlbfs can run out after a hole was punched).
* It is huge and empty, and touching it would take our memory: it must be there in full when registered.
* It is no memory: a file of a mount that somebody else serves, or we do, would answer fstat(2) when it likes.
  So nothing is asked of what is not a memfd by its name and by its having seals.
* It is a file that the client may only read: we take the client's own descriptor, open for both.
* The client takes an answer for given that was none, and reuses memory into which we still write: while a
  region is mapped we hold a lock on a byte of it, for which the client waits then. The lock is on an open
  file description of our own, so it ends with us at the latest.
* The client changes bytes while they are sealed or opened: it harms its own value. Of what decides about
  others nothing is read from there.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import secrets
import stat
import threading
from pathlib import Path
from typing import Final

from agent.fs.interface import FsError
from agent.process_limits import has_room_for
from host_shim.transfer_wire import SET_LOCK, encode_lock

REGIONS_MAX: Final = 64
"""Of one session."""
MAPPED_MAX: Final = 512
"""Memfds of all sessions; each takes two of our descriptors."""
PAGE_BYTES: Final = mmap.PAGESIZE
_SYS_PIDFD_GETFD: Final = 438  # the same on every architecture since Linux 5.6
_F_GET_SEALS: Final = 1034
_F_SEAL_SHRINK: Final = 0x0002
_F_SEALS_AGAINST_WRITING: Final = 0x0008 | 0x0010
_TMPFS_MAGIC: Final = 0x0102_1994
_STATFS_BYTES: Final = 256
"""More than any struct statfs; its first word is the type."""

_MEMFD_NAME: Final = "/memfd:"
_SUSPECTS: Final = threading.BoundedSemaphore(8)
"""How many descriptors may be under way from another process, or wait to be closed, at one time."""

_libc: Final = ctypes.CDLL(None, use_errno=True)


class Region:
    """One registration. `view` may be used until `give_back`, and by steps under way until they end."""

    def __init__(self, memory: RegisteredMemory, mapped: _Mapped, size: int) -> None:
        self._memory = memory
        self._mapped: _Mapped | None = mapped
        self.view = mapped.view[:size]
        self.locked_byte = mapped.locked_byte

    def give_back(self) -> None:
        """The client has no use for it any more."""
        mapped, self._mapped = self._mapped, None
        if mapped is not None:
            self.view = memoryview(b"")
            self._memory.give_back(mapped)


class _Mapped:
    """A memfd that is mapped here, for all sessions that registered it."""

    def __init__(self, descriptor: int, identity: tuple[int, int], size: int) -> None:
        self.descriptor = descriptor
        self.identity = identity
        self.size = size
        self.users = 0
        # Behind the end, where no other lock of this memfd can be by chance.
        self.locked_byte = (1 << 62) + secrets.randbits(61)
        fcntl.fcntl(descriptor, SET_LOCK, encode_lock(fcntl.F_RDLCK, self.locked_byte))
        self.view = memoryview(mmap.mmap(descriptor, size))

    def close(self) -> None:
        """Unlock it; the mapping goes with the last view of it."""
        self.view = memoryview(b"")
        with contextlib.suppress(OSError):
            fcntl.fcntl(self.descriptor, SET_LOCK, encode_lock(fcntl.F_UNLCK, self.locked_byte))
        os.close(self.descriptor)


class RegisteredMemory:
    """All that is mapped, `limit` bytes at most. Safe from any thread."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._lock = threading.Lock()
        self._mapped: dict[tuple[int, int], _Mapped] = {}
        self._closed = False
        self.under_way: list[None] = []
        """One for each transfer that may touch the memory now; to append and to pop takes no lock."""

    def mapped_bytes(self) -> int:
        """Bytes that are mapped now."""
        return sum(each.size for each in list(self._mapped.values()))

    def register(self, process: int, descriptor: int, size: int) -> Region:
        """Map `size` bytes of the memfd that thread or process `process` knows by `descriptor`.

        Raises FsError: EOPNOTSUPP where that cannot be here, EINVAL for what is no such memory, ENOSPC where
        it would be more than the bound.
        """
        if not self._limit:
            raise FsError(errno.EOPNOTSUPP, "no memory may be registered with this agent")
        if size <= 0 or size % PAGE_BYTES:
            raise FsError(errno.EINVAL, "a region is whole pages")
        ours = taken_from(process, descriptor)
        try:
            identity = checked(ours, size)
            with self._lock:
                if self._closed:
                    raise FsError(errno.EOPNOTSUPP, "the agent ends")
                mapped = self._mapped.get(identity)
                if mapped is None:
                    if len(self._mapped) >= MAPPED_MAX:
                        raise FsError(errno.ENOSPC, f"{MAPPED_MAX} pieces of memory are registered already")
                    if self.mapped_bytes() + size > self._limit or not has_room_for(size):
                        raise FsError(errno.ENOSPC, "more memory than may be registered")
                    mapped = self._mapped[identity] = _map(ours, identity, size)
                elif mapped.size < size:
                    raise FsError(errno.EINVAL, "the same memory is registered with a smaller size")
                mapped.users += 1
        finally:
            os.close(ours)
        return Region(self, mapped, size)

    def give_back(self, mapped: _Mapped) -> None:
        """See `Region.give_back`."""
        with self._lock:
            mapped.users -= 1
            if mapped.users or self._closed:
                return
            del self._mapped[mapped.identity]
            mapped.close()

    def close(self) -> None:
        """When nothing serves any more: what clients wait for, to use their memory again.

        Where a worker hangs in the middle of a transfer, they wait for the end of the process.
        """
        with self._lock:
            self._closed = True
            if self.under_way:
                return
            for mapped in self._mapped.values():
                mapped.close()
            self._mapped.clear()


def taken_from(process: int, descriptor: int) -> int:
    """A descriptor of ours for a memfd that another process has open. Raises FsError.

    It may be any file instead, one of the very mount that we serve too, and no call may be made on such a
    file that its file system would answer: not even close(2), which flushes.
    """
    if process <= 0:
        raise FsError(errno.EOPNOTSUPP, "the caller is no process that is known here")
    try:
        leader = _leader(process)
        pidfd = os.pidfd_open(leader)
    except (OSError, AttributeError, ValueError) as failure:
        raise FsError(errno.EOPNOTSUPP, f"process {process} cannot be opened: {failure}") from None
    try:
        if not _named(leader, descriptor).startswith(_MEMFD_NAME):
            raise FsError(errno.EINVAL, "the descriptor is none of a memfd")
        return _duplicate(pidfd, process, descriptor)
    finally:
        os.close(pidfd)


def _duplicate(pidfd: int, process: int, descriptor: int) -> int:
    if not _SUSPECTS.acquire(blocking=False):
        raise FsError(errno.EAGAIN, "too many descriptors were swapped for others")
    taken: int = _libc.syscall(_SYS_PIDFD_GETFD, pidfd, descriptor, 0)
    code = ctypes.get_errno()
    if taken >= 0:
        try:
            fcntl.fcntl(taken, _F_GET_SEALS)  # which asks no file system
        except OSError:
            # It was swapped since we looked at its name, and to close it may take for ever.
            threading.Thread(target=_close_suspect, args=(taken,), name="close-aside", daemon=True).start()
            raise FsError(errno.EINVAL, "the descriptor is none of a memfd") from None
    _SUSPECTS.release()
    if taken < 0:
        if code == errno.EBADF:
            raise FsError(errno.EINVAL, "the caller has no such descriptor")
        raise FsError(errno.EOPNOTSUPP, f"not from process {process}: {os.strerror(code)}")
    os.set_inheritable(taken, False)
    return taken


def _close_suspect(descriptor: int) -> None:
    with contextlib.suppress(OSError):
        os.close(descriptor)
    _SUSPECTS.release()


def _named(process: int, descriptor: int) -> str:
    """What a descriptor is of, in words of the kernel's own. Raises FsError."""
    try:
        return os.readlink(f"/proc/{process}/fd/{descriptor}")
    except FileNotFoundError:
        raise FsError(errno.EINVAL, "the caller has no such descriptor") from None
    except OSError as failure:
        raise FsError(errno.EOPNOTSUPP, f"not from process {process}: {failure}") from None


def _leader(thread: int) -> int:
    """The process of a thread: FUSE names the thread that asks, and a pidfd is a process's.

    A thread with descriptors of its own (CLONE_FILES unshared) has its numbers looked up among the process's.
    """
    for line in Path(f"/proc/{thread}/status").read_text("ascii", "replace").splitlines():
        if line.startswith("Tgid:"):
            return int(line[5:])
    raise ValueError("no process")


def checked(descriptor: int, size: int) -> tuple[int, int]:
    """What identifies the memory. Raises FsError where it is not of the kind that may be mapped."""
    seals = fcntl.fcntl(descriptor, _F_GET_SEALS)
    found = os.fstat(descriptor)
    statfs = ctypes.create_string_buffer(_STATFS_BYTES)
    in_memory = not _libc.fstatfs(descriptor, statfs) and _word(statfs.raw) == _TMPFS_MAGIC
    if not stat.S_ISREG(found.st_mode) or not seals & _F_SEAL_SHRINK or not in_memory:
        raise FsError(errno.EINVAL, "not a memfd of ordinary pages that is sealed against shrinking")
    both = fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDWR
    if not both or seals & _F_SEALS_AGAINST_WRITING:
        raise FsError(errno.EINVAL, "the memory is not the caller's to write")
    if found.st_size < size or found.st_blocks * 512 < size:
        raise FsError(errno.EINVAL, "the memory is shorter than the region, or not there in full")
    return found.st_dev, found.st_ino


def _word(statfs: bytes) -> int:
    return int.from_bytes(statfs[: ctypes.sizeof(ctypes.c_long)], "little")


def _map(taken: int, identity: tuple[int, int], size: int) -> _Mapped:
    # Opened anew, because the lock has to be of an open file description that is ours alone.
    try:
        own = os.open(f"/proc/self/fd/{taken}", os.O_RDWR | os.O_CLOEXEC)
    except OSError as failure:
        raise FsError(errno.EOPNOTSUPP, f"the memory cannot be opened: {failure}") from None
    try:
        return _Mapped(own, identity, size)
    except (OSError, ValueError) as failure:
        os.close(own)
        raise FsError(errno.EOPNOTSUPP, f"the memory cannot be mapped: {failure}") from None
