"""Memory that clients on this machine have registered: mapped here as well, so that values need no copy.

host_shim/transfer_wire.py has the protocol. A client hands us a descriptor of its own process; it is taken
from there (pidfd_getfd(2), which asks for the right to trace it: the same user, or CAP_SYS_PTRACE).

What could go wrong with somebody else's memory, and why it cannot:

* It is no memory, or goes away while we use it: agent/host_os/foreign_descriptors.py and foreign_memory.py.
* It is huge and empty, and touching it would take our memory: it must be there in full when registered.
* It is a file that the client may only read: we take the client's own descriptor, open for both.
* The client's call ends without an answer, and it reuses memory into which we still write: while a region is
  mapped we lock a byte of it, by an open file description of our own. The client waits for that lock.
* The client changes bytes while they are sealed or opened: it harms its own value alone.
"""

import contextlib
import errno
import fcntl
import mmap
import os
import secrets
import threading
from typing import Final

from agent.fs.interface import FsError
from agent.host_os.foreign_descriptors import ForeignRefused, MemoryFetcher, close_descriptor
from agent.host_os.foreign_memory import ForeignMemoryRefused, checked_memory, map_foreign_memory
from host_shim.transfer_wire import SET_LOCK, encode_lock
from nvmeof.linux_limits import has_room_for

REGIONS_MAX: Final = 64
"""The most regions that one session may register."""
MAPPED_MAX: Final = 512
"""Memfds of all sessions; each takes two of our descriptors."""
PAGE_BYTES: Final = mmap.PAGESIZE


class Region:
    """One registration. `view` may be used until `give_back`, and by steps under way until they end."""

    def __init__(self, memory: "RegisteredMemory", mapped: "_Mapped", size: int) -> None:
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
        self.view = map_foreign_memory(descriptor, 0, size)

    def close(self) -> None:
        """Unlock it; the mapping goes with the last view of it."""
        self.view = memoryview(b"")
        with contextlib.suppress(OSError):
            fcntl.fcntl(self.descriptor, SET_LOCK, encode_lock(fcntl.F_UNLCK, self.locked_byte))
        close_descriptor(self.descriptor)


class RegisteredMemory:
    """All that is mapped, `limit` bytes at most. Safe from any thread."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._lock = threading.Lock()
        self._fetcher = MemoryFetcher()
        self._mapped: dict[tuple[int, int], _Mapped] = {}
        self._closed = False
        self.under_way: list[None] = []
        """One for each transfer that may touch the memory now; to append and to pop takes no lock."""

    def mapped_bytes(self) -> int:
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
        if process <= 0:
            raise FsError(errno.EOPNOTSUPP, "the caller is no process that is known here")
        try:
            ours = self._fetcher.fetch(process, descriptor)
        except ForeignRefused as refused:
            raise FsError(refused.code, str(refused)) from None
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
            close_descriptor(ours)
        return Region(self, mapped, size)

    def give_back(self, mapped: _Mapped) -> None:
        with self._lock:
            mapped.users -= 1
            if mapped.users or self._closed:
                return
            del self._mapped[mapped.identity]
            mapped.close()

    def close(self) -> None:
        """Give back all memory. Called when nothing serves any more; clients wait for it before they use
        their memory again.

        Where a worker hangs in the middle of a transfer, they wait for the end of the process.
        """
        self._fetcher.close()
        with self._lock:
            self._closed = True
            if self.under_way:
                return
            for mapped in self._mapped.values():
                mapped.close()
            self._mapped.clear()


def checked(descriptor: int, size: int) -> tuple[int, int]:
    """What identifies the memory. Raises FsError where it is not of the kind that may be mapped."""
    try:
        found = checked_memory(descriptor, size)
    except (ForeignMemoryRefused, OSError) as refused:
        raise FsError(errno.EINVAL, f"no memory to register: {refused}") from None
    if found.st_blocks * 512 < size:
        raise FsError(errno.EINVAL, "the memory is not there in full")
    return found.st_dev, found.st_ino


def _map(taken: int, identity: tuple[int, int], size: int) -> _Mapped:
    # Opened anew, because the lock has to be of an open file description that is ours alone.
    try:
        own = os.open(f"/proc/self/fd/{taken}", os.O_RDWR | os.O_CLOEXEC)
    except OSError as failure:
        raise FsError(errno.EOPNOTSUPP, f"the memory cannot be opened: {failure}") from None
    try:
        return _Mapped(own, identity, size)
    except (ForeignMemoryRefused, OSError) as failure:
        close_descriptor(own)
        raise FsError(errno.EOPNOTSUPP, f"the memory cannot be mapped: {failure}") from None
