"""A file system of one file whose bytes lie in memory: what fuse_memory_* measures (memory_mount.py)."""

import errno
import os
import stat
from collections.abc import Iterable
from typing import Final

import numpy as np

from agent.fs.interface import (
    ROOT_INODE,
    Attributes,
    Caller,
    DirectoryEntry,
    Entry,
    FileSystem,
    FsError,
    Opened,
    StatFs,
)
from agent.pool.steps import Outcome

FILE_NAME: Final = b"block"
FILE_INODE: Final = 2


class OneFile(FileSystem):
    """A root with a single file, read-only and direct: every read reaches us."""

    def __init__(self, content: memoryview) -> None:
        self._content = np.frombuffer(content, np.uint8)

    def lookup(self, caller: Caller, parent: int, name: bytes) -> Outcome[Entry]:
        if parent != ROOT_INODE or name != FILE_NAME:
            raise FsError(errno.ENOENT)
        return Entry(self._attributes(FILE_INODE))

    def getattr(self, caller: Caller, ino: int, handle: int | None) -> Outcome[Attributes]:
        return self._attributes(ino)

    def _attributes(self, ino: int) -> Attributes:
        if ino == ROOT_INODE:
            return Attributes(ino, stat.S_IFDIR | 0o755, nlink=2)
        return Attributes(ino, stat.S_IFREG | 0o444, size=len(self._content))

    def open(self, caller: Caller, ino: int, flags: int) -> Outcome[Opened]:
        if flags & os.O_ACCMODE != os.O_RDONLY:
            raise FsError(errno.EROFS)
        return Opened(1, direct_io=True, no_flush=True)

    def read(self, ino: int, handle: int, offset: int, into: memoryview) -> Outcome[int]:
        found = self._content[offset : offset + len(into)]
        # numpy copies without the interpreter's lock; assigning to a slice of a memoryview keeps it.
        np.copyto(np.frombuffer(into, np.uint8)[: len(found)], found)
        return len(found)

    def opendir(self, caller: Caller, ino: int, flags: int) -> Outcome[Opened]:
        return Opened(1)

    def readdir(self, ino: int, handle: int, cookie: int) -> Outcome[Iterable[DirectoryEntry]]:
        return [DirectoryEntry(FILE_NAME, FILE_INODE, stat.S_IFREG, 1)][cookie:]

    def statfs(self, ino: int) -> Outcome[StatFs]:
        return StatFs(0, 0, 0)
