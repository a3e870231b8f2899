"""System calls by path, twice: on the /fs face without a kernel, and on a real directory.

Both have the same methods, which return a value or raise OSError, so that a test can do the same to
both and compare. `FaceCalls` behaves as the kernel does towards a FUSE server: it walks paths by lookup,
forgets what it looked up, masks nothing and opens before it reads.
"""

from __future__ import annotations

import ctypes
import errno
import os
import stat
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from agent.fs.after_reply import WorkAfterReply
from agent.fs.files.face import FilesFace
from agent.fs.files.inodes import global_ino
from agent.fs.interface import Caller, DirectoryEntry, FsError, SetAttributes
from agent.pool.steps import Outcome, Runner, settle

T = TypeVar("T")

ROOT = global_ino(1)
CALLER = Caller(uid=0, gid=0, pid=1, umask=0o022)

_libc = ctypes.CDLL(None, use_errno=True)
_libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
AT_FDCWD = -100


@dataclass(frozen=True)
class Seen:
    """What both sides must agree on. The size of a directory is each file system's own affair."""

    kind: int
    mode: int
    size: int
    links: int


def _seen(mode: int, size: int, links: int) -> Seen:
    kind = stat.S_IFMT(mode)
    return Seen(kind, stat.S_IMODE(mode), 0 if kind == stat.S_IFDIR else size, links)


class FaceCalls:
    """The face, driven in the calling thread."""

    def __init__(self, face: FilesFace, runner: Runner, after: WorkAfterReply | None = None) -> None:
        """`after`: what this thread puts off, to be done once a call has its answer."""
        self.face = face
        self.runner = runner
        self._after = after

    def do(self, outcome: Callable[[], Outcome[T]]) -> T:
        try:
            return settle(outcome(), self.runner)
        except FsError as refusal:
            raise OSError(refusal.errno, os.strerror(refusal.errno)) from refusal
        finally:
            if self._after is not None:
                self._after.run(self.runner)

    def ino(self, path: str) -> int:
        """The inode of a path; its reference is given back, as the kernel may do at any time."""
        ino, dangling = ROOT, False
        for name in [part for part in path.split("/") if part]:
            if dangling:
                # The tests make symbolic links that lead nowhere.
                raise FileNotFoundError(errno.ENOENT, path)
            entry = self.do(lambda name=name, ino=ino: self.face.lookup(CALLER, ino, name.encode()))  # type: ignore[misc]
            ino = entry.attributes.ino
            dangling = stat.S_ISLNK(entry.attributes.mode)
            self.face.forget(ino, 1)
        return ino

    def _split(self, path: str) -> tuple[int, bytes]:
        above, _, name = path.rpartition("/")
        parent = self.ino(above)
        shown = self.do(lambda: self.face.getattr(CALLER, parent, None))
        if stat.S_ISLNK(shown.mode):
            raise FileNotFoundError(errno.ENOENT, path)
        return parent, name.encode()

    def open(self, path: str, flags: int, mode: int = 0o666) -> tuple[int, int]:
        try:
            ino = self.ino(path)
        except FileNotFoundError:
            if not flags & os.O_CREAT:
                raise
            parent, name = self._split(path)
            entry, opened = self.do(lambda: self.face.create(CALLER, parent, name, mode, flags))
            self.face.forget(entry.attributes.ino, 1)
            return entry.attributes.ino, opened.handle
        if flags & os.O_CREAT and flags & os.O_EXCL:
            raise FileExistsError(errno.EEXIST, path)
        opened = self.do(lambda: self.face.open(CALLER, ino, flags))
        return ino, opened.handle

    def close(self, file: tuple[int, int]) -> None:
        try:
            self.do(lambda: self.face.flush(*file))
        finally:
            self.do(lambda: self.face.release(*file))

    def pwrite(self, file: tuple[int, int], data: bytes, offset: int) -> int:
        buffer = bytearray(data)
        try:
            return self.do(lambda: self.face.write(*file, offset, memoryview(buffer)))
        finally:
            if self._after is not None:
                buffer[:] = b"\xdd" * len(data)  # the next request's

    def pread(self, file: tuple[int, int], count: int, offset: int) -> bytes:
        into = bytearray(b"\xee" * count)
        got = self.do(lambda: self.face.read(*file, offset, memoryview(into)))
        return bytes(into[:got])

    def ftruncate(self, file: tuple[int, int], size: int) -> None:
        self.do(lambda: self.face.setattr(CALLER, file[0], SetAttributes(size=size), file[1]))

    def truncate(self, path: str, size: int) -> None:
        ino = self.ino(path)
        self.do(lambda: self.face.setattr(CALLER, ino, SetAttributes(size=size), None))

    def fallocate(self, file: tuple[int, int], mode: int, offset: int, length: int) -> None:
        self.do(lambda: self.face.fallocate(*file, mode, offset, length))

    def fsync(self, file: tuple[int, int]) -> None:
        self.do(lambda: self.face.fsync(*file, False))

    def fstat(self, file: tuple[int, int]) -> Seen:
        shown = self.do(lambda: self.face.getattr(CALLER, *file))
        return _seen(shown.mode, shown.size, shown.nlink)

    def stat(self, path: str) -> Seen:
        ino = self.ino(path)
        shown = self.do(lambda: self.face.getattr(CALLER, ino, None))
        return _seen(shown.mode, shown.size, shown.nlink)

    def mkdir(self, path: str) -> None:
        parent, name = self._split(path)
        entry = self.do(lambda: self.face.mkdir(CALLER, parent, name, 0o777))
        self.face.forget(entry.attributes.ino, 1)

    def rmdir(self, path: str) -> None:
        parent, name = self._split(path)
        self.do(lambda: self.face.rmdir(CALLER, parent, name))

    def unlink(self, path: str) -> None:
        parent, name = self._split(path)
        self.do(lambda: self.face.unlink(CALLER, parent, name))

    def rename(self, old: str, new: str, flags: int = 0) -> None:
        source, target = self._split(old), self._split(new)
        self.do(lambda: self.face.rename(CALLER, *source, *target, flags))

    def link(self, old: str, new: str) -> None:
        ino = self.ino(old)
        parent, name = self._split(new)
        entry = self.do(lambda: self.face.link(CALLER, ino, parent, name))
        self.face.forget(entry.attributes.ino, 1)

    def symlink(self, target: str, path: str) -> None:
        parent, name = self._split(path)
        entry = self.do(lambda: self.face.symlink(CALLER, parent, name, target.encode()))
        self.face.forget(entry.attributes.ino, 1)

    def readlink(self, path: str) -> str:
        ino = self.ino(path)
        return self.do(lambda: self.face.readlink(CALLER, ino)).decode()

    def listdir(self, path: str) -> list[str]:
        ino = self.ino(path)
        opened = self.do(lambda: self.face.opendir(CALLER, ino, 0))
        names: list[str] = []
        cookie = 0
        while batch := self._list(ino, opened.handle, cookie)[:3]:
            names += [entry.name.decode() for entry in batch]
            cookie = batch[-1].cookie
        self.do(lambda: self.face.releasedir(ino, opened.handle))
        assert names[:2] == [".", ".."]
        return sorted(names[2:])

    def _list(self, ino: int, handle: int, cookie: int) -> list[DirectoryEntry]:
        return list(self.do(lambda: self.face.readdir(ino, handle, cookie)))

    def chmod(self, path: str, mode: int) -> None:
        ino = self.ino(path)
        self.do(lambda: self.face.setattr(CALLER, ino, SetAttributes(mode=mode), None))

    def setxattr(self, path: str, name: str, value: bytes, flags: int) -> None:
        ino = self.ino(path)
        self.do(lambda: self.face.setxattr(CALLER, ino, name.encode(), value, flags))

    def getxattr(self, path: str, name: str) -> bytes:
        ino = self.ino(path)
        return self.do(lambda: self.face.getxattr(CALLER, ino, name.encode(), memoryview(bytearray())))

    def listxattr(self, path: str) -> list[str]:
        ino = self.ino(path)
        return sorted(name.decode() for name in self.do(lambda: self.face.listxattr(CALLER, ino)))

    def removexattr(self, path: str, name: str) -> None:
        ino = self.ino(path)
        self.do(lambda: self.face.removexattr(CALLER, ino, name.encode()))

    # For tests that are not about open files.

    def put(self, path: str, data: bytes) -> None:
        file = self.open(path, os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
        try:
            written = 0
            while written < len(data):
                written += self.pwrite(file, data[written : written + (1 << 20)], written)
        finally:
            self.close(file)

    def get(self, path: str) -> bytes:
        file = self.open(path, os.O_RDONLY)
        try:
            return self.pread(file, self.fstat(file).size, 0)
        finally:
            self.close(file)

    def tree(self, path: str = "") -> dict[str, object]:
        """Everything below a path, with contents."""
        return _tree(self, path)


class RealCalls:
    """The same on a directory of this machine."""

    def __init__(self, top: Path) -> None:
        self.top = top

    def _at(self, path: str) -> str:
        return f"{self.top}/{path}"

    def open(self, path: str, flags: int, mode: int = 0o666) -> int:
        return os.open(self._at(path), flags | os.O_NOFOLLOW, mode)

    def close(self, file: int) -> None:
        os.close(file)

    def pwrite(self, file: int, data: bytes, offset: int) -> int:
        return os.pwrite(file, data, offset)

    def pread(self, file: int, count: int, offset: int) -> bytes:
        return os.pread(file, count, offset)

    def ftruncate(self, file: int, size: int) -> None:
        os.ftruncate(file, size)

    def truncate(self, path: str, size: int) -> None:
        if stat.S_ISLNK(os.lstat(self._at(path)).st_mode):
            raise OSError(errno.EINVAL, path)
        os.truncate(self._at(path), size)

    def fallocate(self, file: int, mode: int, offset: int, length: int) -> None:
        if _libc.fallocate(file, mode, offset, length):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))

    def fsync(self, file: int) -> None:
        os.fsync(file)

    def fstat(self, file: int) -> Seen:
        shown = os.fstat(file)
        return _seen(shown.st_mode, shown.st_size, shown.st_nlink)

    def stat(self, path: str) -> Seen:
        shown = os.lstat(self._at(path))
        return _seen(shown.st_mode, shown.st_size, shown.st_nlink)

    def mkdir(self, path: str) -> None:
        os.mkdir(self._at(path))

    def rmdir(self, path: str) -> None:
        os.rmdir(self._at(path))

    def unlink(self, path: str) -> None:
        os.unlink(self._at(path))

    def rename(self, old: str, new: str, flags: int = 0) -> None:
        result = _libc.renameat2(
            AT_FDCWD, os.fsencode(self._at(old)), AT_FDCWD, os.fsencode(self._at(new)), flags
        )
        if result:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))

    def link(self, old: str, new: str) -> None:
        os.link(self._at(old), self._at(new), follow_symlinks=False)

    def symlink(self, target: str, path: str) -> None:
        os.symlink(target, self._at(path))

    def readlink(self, path: str) -> str:
        return os.readlink(self._at(path))

    def listdir(self, path: str) -> list[str]:
        return sorted(os.listdir(self._at(path)))

    def chmod(self, path: str, mode: int) -> None:
        if stat.S_ISLNK(os.lstat(self._at(path)).st_mode):
            raise OSError(errno.EOPNOTSUPP, path)
        os.chmod(self._at(path), mode)

    def tree(self, path: str = "") -> dict[str, object]:
        return _tree(self, path)


def _tree(calls: FaceCalls | RealCalls, path: str) -> dict[str, object]:
    found: dict[str, object] = {}
    for name in calls.listdir(path):
        below = f"{path}/{name}" if path else name
        seen = calls.stat(below)
        found[below] = seen
        if seen.kind == stat.S_IFDIR:
            found |= _tree(calls, below)
        elif seen.kind == stat.S_IFLNK:
            found[f"{below} ->"] = calls.readlink(below)
        elif seen.kind == stat.S_IFREG:
            file = calls.open(below, os.O_RDONLY)
            found[f"{below} has"] = calls.pread(file, seen.size, 0)  # type: ignore[arg-type]
            calls.close(file)  # type: ignore[arg-type]
    return found
