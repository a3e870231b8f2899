"""A file system whose bytes lie in memory: what fuse_memory_* measures (memory_mount.py).

It has the content twice: as a file that is read directly, and as a long one that holds it over and over and
is read by way of the page cache. A third file costs what the mount costs, and no more (`READY_NAME`).
"""

import errno
import os
import stat
from collections.abc import Iterable
from typing import Final

import numpy as np

from agent.fs.interface import (
    NOBODY,
    ROOT_INODE,
    Attributes,
    Caller,
    DirectoryEntry,
    Entry,
    FileSystem,
    FsError,
    LockOwner,
    Opened,
    StatFs,
)
from agent.pool.steps import Outcome

FILE_NAME: Final = b"block"
FILE_INODE: Final = 2
LONG_NAME: Final = b"long"
LONG_INODE: Final = 3
READY_NAME: Final = b"ready"
"""A read of it is answered at once with what lies in the door's memory; what is written to it is dropped."""
READY_INODE: Final = 4


class OneFile(FileSystem):
    """A root with a file, read-only and direct: every read reaches us. And a long one that is cached."""

    def __init__(self, content: memoryview, long_bytes: int = 0) -> None:
        """`long_bytes`: of the long file, which holds `content` so many times; 0: there is none."""
        self._content = np.frombuffer(content, np.uint8)
        self._long_bytes = long_bytes

    def lookup(self, caller: Caller, parent: int, name: bytes) -> Outcome[Entry]:
        if parent == ROOT_INODE and name == FILE_NAME:
            return Entry(self._attributes(FILE_INODE))
        if parent == ROOT_INODE and name == LONG_NAME and self._long_bytes:
            return Entry(self._attributes(LONG_INODE))
        if parent == ROOT_INODE and name == READY_NAME:
            return Entry(self._attributes(READY_INODE))
        raise FsError(errno.ENOENT)

    def getattr(self, caller: Caller, ino: int, handle: int | None) -> Outcome[Attributes]:
        return self._attributes(ino)

    def _attributes(self, ino: int) -> Attributes:
        if ino == ROOT_INODE:
            return Attributes(ino, stat.S_IFDIR | 0o755, nlink=2)
        size = self._long_bytes if ino == LONG_INODE else len(self._content)
        mode = 0o644 if ino == READY_INODE else 0o444
        return Attributes(ino, stat.S_IFREG | mode, size=size)

    def open(self, caller: Caller, ino: int, flags: int) -> Outcome[Opened]:
        if flags & os.O_ACCMODE != os.O_RDONLY and ino != READY_INODE:
            raise FsError(errno.EROFS)
        return Opened(1, direct_io=ino != LONG_INODE, no_flush=True)

    def read(self, ino: int, handle: int, offset: int, into: memoryview) -> Outcome[int]:
        if ino == READY_INODE:
            return max(0, min(len(into), len(self._content) - offset))
        if ino == LONG_INODE:
            offset %= len(self._content)  # a request is aligned, and no longer than the content
        found = self._content[offset : offset + len(into)]
        # numpy copies without the interpreter's lock; assigning to a slice of a memoryview keeps it.
        np.copyto(np.frombuffer(into, np.uint8)[: len(found)], found)
        return len(found)

    def write(
        self, ino: int, handle: int, offset: int, data: memoryview, by: LockOwner = NOBODY
    ) -> Outcome[int]:
        return len(data)

    def opendir(self, caller: Caller, ino: int, flags: int) -> Outcome[Opened]:
        return Opened(1)

    def readdir(self, ino: int, handle: int, cookie: int) -> Outcome[Iterable[DirectoryEntry]]:
        return [DirectoryEntry(FILE_NAME, FILE_INODE, stat.S_IFREG, 1)][cookie:]

    def statfs(self, ino: int) -> Outcome[StatFs]:
        return StatFs(0, 0, 0)
