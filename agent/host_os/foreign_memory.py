"""Memory that somebody else has made and still holds: which kind may be mapped, so that no access ends us.

An access to a mapping fails by SIGBUS, which ends the whole process, in three ways:

* The file ends before it. So the memory lies within the file, and the file is sealed against shrinking, which
  only a memfd can be.
* No page can be had for a hole, and holes can be punched at any time. Huge pages of hugetlbfs run out, and a
  mounted tmpfs has a size. So it is a memfd of ordinary pages: those have no limit of their own.
* The same on a machine that never overcommits (vm.overcommit_memory = 2), where no page of a memfd is
  promised before it is touched. So nothing is mapped on such a machine.

Where memory runs out otherwise the kernel makes room or kills (OOM), as for memory of our own. A page that we
touch first is charged to our memory control group. The kernel alone answers all questions here, after
F_GET_SEALS has said that it is memory.
"""

import ctypes
import fcntl
import mmap
import os
import stat
import weakref
from pathlib import Path
from typing import Final

from agent.host_os.descriptor_receiver import is_memory

OVERCOMMIT: Final = Path("/proc/sys/vm/overcommit_memory")
_NEVER: Final = "2"
_SEALS_AGAINST_WRITING: Final = fcntl.F_SEAL_WRITE | 0x0010  # F_SEAL_FUTURE_WRITE
_TMPFS_MAGIC: Final = 0x0102_1994
_STATFS_BYTES: Final = 256
"""More than any struct statfs; its first word is the type."""

_libc: Final = ctypes.CDLL(None, use_errno=True)
_kept: Final[weakref.WeakKeyDictionary[mmap.mmap, int]] = weakref.WeakKeyDictionary()
"""The descriptors of memory that is passed on, by its mapping."""


class ForeignMemoryRefused(Exception):
    """The fault of the memory's giver; `is_unsafe` where only the risk forbids it."""

    def __init__(self, words: str, *, is_unsafe: bool = False) -> None:
        super().__init__(words)
        self.is_unsafe = is_unsafe


def checked_memory(descriptor: int, end: int, *, at_own_risk: bool = False) -> os.stat_result:
    """What fstat(2) says of memory that may be mapped up to `end`. Raises ForeignMemoryRefused, OSError.

    `at_own_risk` takes any file of tmpfs or hugetlbfs, which its owner can shrink or make short of pages.
    """
    if not is_memory(descriptor):
        raise ForeignMemoryRefused("neither a memfd nor a file of tmpfs or hugetlbfs")
    found = os.fstat(descriptor)
    if not stat.S_ISREG(found.st_mode):
        raise ForeignMemoryRefused("no file")
    seals = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
    if not at_own_risk:
        if not seals & fcntl.F_SEAL_SHRINK:
            raise ForeignMemoryRefused("it is not sealed against shrinking", is_unsafe=True)
        if not _has_ordinary_pages(descriptor):
            raise ForeignMemoryRefused("it is of huge pages, which can run out", is_unsafe=True)
        if _never_overcommits():
            raise ForeignMemoryRefused(
                "this machine never overcommits (vm.overcommit_memory = 2), so its pages can run out",
                is_unsafe=True,
            )
    both = fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDWR
    if not both or seals & _SEALS_AGAINST_WRITING:
        raise ForeignMemoryRefused("it is not for writing")
    if found.st_size < end:
        raise ForeignMemoryRefused(f"it ends at {found.st_size:#x}, before {end:#x}")
    return found


def map_foreign_memory(
    descriptor: int, offset: int, size: int, *, at_own_risk: bool = False, is_shared: bool = False
) -> memoryview:
    """`size` bytes of a file from `offset` on, shared and writable; the descriptor may be closed after it.

    Raises ForeignMemoryRefused where it is not of the kind that may be mapped, or cannot be. `is_shared`: it
    is to be passed on to other processes of ours, by `place_in_memory`.
    """
    if size < 1 or offset < 0:
        raise ForeignMemoryRefused("memory of no bytes")
    end = offset + size
    try:
        checked_memory(descriptor, end, at_own_risk=at_own_risk)
        # From the start of the file: an offset would have to be a multiple of its page, which may be huge.
        mapped = mmap.mmap(descriptor, end, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
        if is_shared:
            kept = _kept[mapped] = os.dup(descriptor)
            weakref.finalize(mapped, os.close, kept).atexit = False
    except (OSError, ValueError, OverflowError) as why:
        raise ForeignMemoryRefused(f"it cannot be mapped: {why}") from None
    return memoryview(mapped)[offset:end]


def place_in_memory(view: memoryview) -> tuple[int, int]:
    """The descriptor of mapped memory that `is_shared`, open as long as the mapping is there, and the byte of
    its file at which `view` begins. Raises KeyError for any other memory."""
    mapped = view.obj
    if not isinstance(mapped, mmap.mmap):
        raise KeyError("no memory that was mapped here")
    start, at = (ctypes.addressof(ctypes.c_char.from_buffer(each)) for each in (mapped, view))
    return _kept[mapped], at - start


def file_of(descriptor: int) -> tuple[int, int]:
    """Which memory it is, among all that is open or mapped."""
    found = os.fstat(descriptor)
    return found.st_dev, found.st_ino


def _has_ordinary_pages(descriptor: int) -> bool:
    statfs = ctypes.create_string_buffer(_STATFS_BYTES)
    word = ctypes.sizeof(ctypes.c_long)
    return (
        not _libc.fstatfs(descriptor, statfs) and int.from_bytes(statfs.raw[:word], "little") == _TMPFS_MAGIC
    )


def _never_overcommits() -> bool:
    try:
        return OVERCOMMIT.read_text("ascii").strip() == _NEVER
    except OSError:
        return False  # a process that sees no /proc/sys: the machine's owner has hidden it
