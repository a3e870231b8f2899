"""The tree of the mount: `/kv`, `/fs` and `/.g35`, each a face of its own, joined under one root.

Inode numbers carry their face in the top byte, so an operation finds its face by a shift and a table.
What would move something from one face to another is EXDEV, as between two file systems.
"""

from __future__ import annotations

import errno
import stat
from collections.abc import Iterable, Mapping

from agent.fs.interface import (
    FACE_SHIFT,
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
    RefusesAll,
    SetAttributes,
    StatFs,
    Xattr,
)
from agent.pool.steps import Outcome


class _RootFolder(RefusesAll):
    """Inode 1: three names and nothing else."""

    def __init__(self, faces: Mapping[bytes, tuple[int, FileSystem]], owner: tuple[int, int]) -> None:
        self._faces = faces
        self._owner = owner

    def lookup(self, caller: Caller, parent: int, name: bytes) -> Outcome[Entry]:
        if name not in self._faces:
            raise FsError(errno.ENOENT)
        ino, face = self._faces[name]
        attributes = face.getattr(caller, ino, None)
        assert isinstance(attributes, Attributes), "the root of a face is always at hand"
        return Entry(attributes, 60.0, 1.0)

    def getattr(self, caller: Caller, ino: int, handle: int | None) -> Outcome[Attributes]:
        uid, gid = self._owner
        return Attributes(ROOT_INODE, stat.S_IFDIR | 0o755, nlink=2 + len(self._faces), uid=uid, gid=gid)

    def opendir(self, caller: Caller, ino: int, flags: int) -> Outcome[Opened]:
        return Opened(0)

    def readdir(self, ino: int, handle: int, cookie: int) -> Outcome[Iterable[DirectoryEntry]]:
        rows = [(b".", ROOT_INODE), (b"..", ROOT_INODE)]
        rows += [(name, number) for name, (number, _) in self._faces.items()]
        entries = [
            DirectoryEntry(name, number, stat.S_IFDIR, at) for at, (name, number) in enumerate(rows, 1)
        ]
        return entries[cookie:]

    def statfs(self, ino: int) -> Outcome[StatFs]:
        totals = [0, 0, 0]
        for number, face in self._faces.values():
            part = face.statfs(number)
            if isinstance(part, StatFs):
                totals[0] += part.blocks * part.block_size // 4096
                totals[1] += part.blocks_free * part.block_size // 4096
                totals[2] += part.blocks_available * part.block_size // 4096
        return StatFs(*totals)


class RootFileSystem:
    """All faces as one `FileSystem`. `faces` maps a name to its root inode and its face."""

    def __init__(
        self, faces: Mapping[bytes, tuple[int, FileSystem]], owner: tuple[int, int] = (0, 0)
    ) -> None:
        root: FileSystem = _RootFolder(faces, owner)
        self._face_of: dict[int, FileSystem] = {0: root}
        for ino, face in faces.values():
            self._face_of[ino >> FACE_SHIFT] = face

    def _face(self, ino: int) -> FileSystem:
        try:
            return self._face_of[ino >> FACE_SHIFT]
        except KeyError:
            raise FsError(errno.ENOENT) from None

    def lookup(self, caller: Caller, parent: int, name: bytes) -> Outcome[Entry]:
        return self._face(parent).lookup(caller, parent, name)

    def forget(self, ino: int, lookups: int) -> None:
        face = self._face_of.get(ino >> FACE_SHIFT)
        if face is not None:
            face.forget(ino, lookups)

    def getattr(self, caller: Caller, ino: int, handle: int | None) -> Outcome[Attributes]:
        return self._face(ino).getattr(caller, ino, handle)

    def setattr(
        self, caller: Caller, ino: int, changes: SetAttributes, handle: int | None
    ) -> Outcome[Attributes]:
        return self._face(ino).setattr(caller, ino, changes, handle)

    def readlink(self, caller: Caller, ino: int) -> Outcome[bytes]:
        return self._face(ino).readlink(caller, ino)

    def symlink(self, caller: Caller, parent: int, name: bytes, target: bytes) -> Outcome[Entry]:
        return self._face(parent).symlink(caller, parent, name, target)

    def mknod(self, caller: Caller, parent: int, name: bytes, mode: int, rdev: int) -> Outcome[Entry]:
        return self._face(parent).mknod(caller, parent, name, mode, rdev)

    def mkdir(self, caller: Caller, parent: int, name: bytes, mode: int) -> Outcome[Entry]:
        return self._face(parent).mkdir(caller, parent, name, mode)

    def unlink(self, caller: Caller, parent: int, name: bytes) -> Outcome[None]:
        return self._face(parent).unlink(caller, parent, name)

    def rmdir(self, caller: Caller, parent: int, name: bytes) -> Outcome[None]:
        return self._face(parent).rmdir(caller, parent, name)

    def rename(
        self, caller: Caller, parent: int, name: bytes, new_parent: int, new_name: bytes, flags: int
    ) -> Outcome[None]:
        if parent >> FACE_SHIFT != new_parent >> FACE_SHIFT:
            raise FsError(errno.EXDEV)
        return self._face(parent).rename(caller, parent, name, new_parent, new_name, flags)

    def link(self, caller: Caller, ino: int, new_parent: int, new_name: bytes) -> Outcome[Entry]:
        if ino >> FACE_SHIFT != new_parent >> FACE_SHIFT:
            raise FsError(errno.EXDEV)
        return self._face(ino).link(caller, ino, new_parent, new_name)

    def open(self, caller: Caller, ino: int, flags: int) -> Outcome[Opened]:
        return self._face(ino).open(caller, ino, flags)

    def create(
        self, caller: Caller, parent: int, name: bytes, mode: int, flags: int
    ) -> Outcome[tuple[Entry, Opened]]:
        return self._face(parent).create(caller, parent, name, mode, flags)

    def read(self, ino: int, handle: int, offset: int, into: memoryview) -> Outcome[int]:
        return self._face(ino).read(ino, handle, offset, into)

    def write(
        self, ino: int, handle: int, offset: int, data: memoryview, by: LockOwner = NOBODY
    ) -> Outcome[int]:
        return self._face(ino).write(ino, handle, offset, data, by)

    def flush(self, ino: int, handle: int, by: LockOwner = NOBODY) -> Outcome[None]:
        return self._face(ino).flush(ino, handle, by)

    def release(self, ino: int, handle: int) -> Outcome[None]:
        return self._face(ino).release(ino, handle)

    def fsync(self, ino: int, handle: int, data_only: bool) -> Outcome[None]:
        return self._face(ino).fsync(ino, handle, data_only)

    def fallocate(self, ino: int, handle: int, mode: int, offset: int, length: int) -> Outcome[None]:
        return self._face(ino).fallocate(ino, handle, mode, offset, length)

    def opendir(self, caller: Caller, ino: int, flags: int) -> Outcome[Opened]:
        return self._face(ino).opendir(caller, ino, flags)

    def readdir(self, ino: int, handle: int, cookie: int) -> Outcome[Iterable[DirectoryEntry]]:
        return self._face(ino).readdir(ino, handle, cookie)

    def releasedir(self, ino: int, handle: int) -> Outcome[None]:
        return self._face(ino).releasedir(ino, handle)

    def fsyncdir(self, ino: int, handle: int, data_only: bool) -> Outcome[None]:
        return self._face(ino).fsyncdir(ino, handle, data_only)

    def statfs(self, ino: int) -> Outcome[StatFs]:
        return self._face(ino).statfs(ino)

    def setxattr(self, caller: Caller, ino: int, name: bytes, value: bytes, flags: int) -> Outcome[None]:
        return self._face(ino).setxattr(caller, ino, name, value, flags)

    def getxattr(self, caller: Caller, ino: int, name: bytes, room: memoryview) -> Outcome[Xattr]:
        return self._face(ino).getxattr(caller, ino, name, room)

    def listxattr(self, caller: Caller, ino: int) -> Outcome[list[bytes]]:
        return self._face(ino).listxattr(caller, ino)

    def removexattr(self, caller: Caller, ino: int, name: bytes) -> Outcome[None]:
        return self._face(ino).removexattr(caller, ino, name)

    def ioctl(self, caller: Caller, ino: int, handle: int, command: int, data: memoryview) -> Outcome[bytes]:
        return self._face(ino).ioctl(caller, ino, handle, command, data)
