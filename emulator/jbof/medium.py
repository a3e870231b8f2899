"""The medium of a drive: memory, or a sparse file that outlives the process.

Payload is received into memory and sent from it directly. A file has no such window: mapped into memory it
would be as fast, but a full disk would be a SIGBUS in the middle of a copy. So a file is read and written by
pread and pwrite, and ENOSPC becomes an NVMe status (`emulator.jbof.drive`).

Each medium has the methods of `MemoryMedium`. Ranges are inside it: the caller has checked. All but `window`
may raise OSError.
"""

import contextlib
import ctypes
import errno
import mmap
import os
from pathlib import Path
from typing import Final, TypeAlias

from nvmeof.transport.drive_memory import DriveMemory

_FALLOC_FL_KEEP_SIZE: Final = 1
_FALLOC_FL_PUNCH_HOLE: Final = 2
_MADV_POPULATE_WRITE: Final = 23  # Linux 5.14; the mmap module does not name it
_ZEROS: Final = bytes(1 << 20)


class MemoryMedium:
    """Anonymous memory. The kernel gives a page at its first write; with `prefault` all at once."""

    def __init__(self, size: int, *, prefault: bool = False) -> None:
        self._map = DriveMemory(size)
        with contextlib.suppress(OSError):  # No such kernel feature: slower at first touch, else the same.
            self._map.madvise(mmap.MADV_HUGEPAGE)
        if prefault:
            with contextlib.suppress(OSError):
                self._map.madvise(_MADV_POPULATE_WRITE)
        self._view = memoryview(self._map)
        self.size = size

    def window(self, offset: int, length: int) -> memoryview:
        """The bytes themselves, writable; None from a medium that is no memory."""
        return self._view[offset : offset + length]

    def read_into(self, offset: int, into: memoryview) -> None:
        into[:] = self._view[offset : offset + len(into)]

    def write(self, offset: int, data: memoryview | bytes) -> None:
        self._view[offset : offset + len(data)] = data

    def punch(self, offset: int, length: int) -> None:
        """Make the range read as zeros, and give its room back where the system can."""
        end = offset + length
        first = -(-offset // mmap.PAGESIZE) * mmap.PAGESIZE
        last = end // mmap.PAGESIZE * mmap.PAGESIZE
        if first >= last:
            self._zero(offset, end)
            return
        self._zero(offset, first)
        self._zero(last, end)
        self._map.madvise(mmap.MADV_DONTNEED, first, last - first)

    def _zero(self, start: int, end: int) -> None:
        while start < end:
            step = min(end - start, len(_ZEROS))
            self._view[start : start + step] = _ZEROS[:step]
            start += step

    def flush(self) -> None:
        """Push written bytes to stable storage, where there is any."""

    def used_bytes(self) -> int:
        """Room taken up at present; the whole size where that cannot be told."""
        return self.size

    def close(self) -> None:
        """Nobody may hold a window any more, except a reply that is being sent."""
        self._view.release()
        with contextlib.suppress(BufferError):  # The memory goes with that window.
            self._map.close()


class NullMedium:
    """No bytes at all, as SPDK's null bdev: reads are zeros, writes are forgotten."""

    def __init__(self, size: int) -> None:
        self.size = size

    def window(self, offset: int, length: int) -> memoryview | None:
        return None

    def read_into(self, offset: int, into: memoryview) -> None:
        for start in range(0, len(into), len(_ZEROS)):
            into[start : start + len(_ZEROS)] = _ZEROS[: len(into) - start]

    def write(self, offset: int, data: memoryview | bytes) -> None:
        """Forgotten."""

    def punch(self, offset: int, length: int) -> None:
        """Nothing to zero."""

    def flush(self) -> None:
        """Nothing to push."""

    def used_bytes(self) -> int:
        return 0

    def close(self) -> None:
        """Nothing to close."""


class FileMedium:
    """A sparse file, created at its full length. ValueError where there is a file of another size."""

    def __init__(self, path: Path, size: int) -> None:
        self.path = path
        self.size = size
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            there = os.fstat(self._fd).st_size
            if there == 0:
                os.ftruncate(self._fd, size)
            elif there != size:
                raise ValueError(f"{path} has {there} bytes, the drive is to have {size}")
        except BaseException:
            os.close(self._fd)
            raise

    def window(self, offset: int, length: int) -> memoryview | None:
        return None

    def read_into(self, offset: int, into: memoryview) -> None:
        while into:
            got = os.preadv(self._fd, [into], offset)
            if got == 0:
                raise OSError(errno.EIO, f"{self.path} has become shorter than its drive")
            into, offset = into[got:], offset + got

    def write(self, offset: int, data: memoryview | bytes) -> None:
        rest = memoryview(data)
        while rest:
            put = os.pwrite(self._fd, rest, offset)
            rest, offset = rest[put:], offset + put

    def punch(self, offset: int, length: int) -> None:
        try:
            _punch_hole(self._fd, offset, length)
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.ENOSYS):
                raise
            for start in range(offset, offset + length, len(_ZEROS)):
                self.write(start, _ZEROS[: min(len(_ZEROS), offset + length - start)])

    def flush(self) -> None:
        os.fdatasync(self._fd)

    def used_bytes(self) -> int:
        return min(self.size, os.fstat(self._fd).st_blocks * 512)

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


Medium: TypeAlias = MemoryMedium | NullMedium | FileMedium

_libc: Final = ctypes.CDLL(None, use_errno=True)
_libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
_libc.fallocate.restype = ctypes.c_int


def _punch_hole(fd: int, offset: int, length: int) -> None:
    """fallocate(2) with PUNCH_HOLE, which the os module does not offer."""
    if _libc.fallocate(fd, _FALLOC_FL_PUNCH_HOLE | _FALLOC_FL_KEEP_SIZE, offset, length) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
