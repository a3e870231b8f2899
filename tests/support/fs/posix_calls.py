"""Sequences of file system calls, made alike in several directories: what comes back must be the same.

`Calls` plays one drawn sequence in one directory and notes for each call its errno or what it returned.
Left out of the comparison are inode numbers, times that nobody set, and the sizes of directories.
"""

from __future__ import annotations

import contextlib
import os
import stat
from typing import Any, TypeAlias

from hypothesis import strategies as st

Call: TypeAlias = tuple[Any, ...]

NAMES = (b"a", b"b", b"c", b"d", b"d/a", b"d/b", b"d/e", b"d/../a", b"d/e/..", b"a/x", b"\xff\xfe", b"...")
LONG = (b"n" * 255, b"n" * 256, b"d/" + b"n" * 256, b"")
OFFSETS = (0, 1, 4095, 4096, 70_000, 1 << 20, 1 << 40, (1 << 62) - 1, (1 << 63) - 2, (1 << 63) - 1)
SIZES = (0, 1, 100, 4096, 65_536, 300_000, 1_200_000)

names = st.one_of(st.sampled_from(NAMES[:8]), st.sampled_from(NAMES + LONG))
handles = st.integers(0, 2)
offsets = st.one_of(st.sampled_from(OFFSETS[:5]), st.sampled_from(OFFSETS))
sizes = st.sampled_from(SIZES)
modes = st.sampled_from((0o644, 0o600, 0o777, 0o000, 0o1755))
flags = st.sampled_from(
    (
        os.O_RDONLY,
        os.O_RDWR,
        os.O_RDWR | os.O_CREAT,
        os.O_RDWR | os.O_CREAT | os.O_EXCL,
        os.O_RDWR | os.O_CREAT | os.O_TRUNC,
        os.O_WRONLY | os.O_APPEND | os.O_CREAT,
        os.O_RDONLY | os.O_DIRECTORY,
        os.O_RDONLY | os.O_NOFOLLOW,
    )
)

calls = st.one_of(
    st.tuples(st.just("open_file"), handles, names, flags, modes),
    st.tuples(
        st.just("open_file"), handles, st.sampled_from(NAMES[:3]), st.just(os.O_RDWR | os.O_CREAT), modes
    ),
    st.tuples(st.just("close"), handles),
    st.tuples(st.just("pwrite"), handles, offsets, sizes),
    st.tuples(st.just("write"), handles, sizes),
    st.tuples(st.just("pread"), handles, offsets, sizes),
    st.tuples(st.just("ftruncate"), handles, st.one_of(offsets, sizes)),
    st.tuples(st.just("fstat"), handles),
    st.tuples(st.just("fsync"), handles),
    st.tuples(st.just("stat"), names),
    st.tuples(st.just("truncate"), names, st.one_of(offsets, sizes)),
    st.tuples(st.just("mkdir"), names, modes),
    st.tuples(st.just("mkdir"), st.sampled_from((b"d", b"d/e")), st.just(0o755)),
    st.tuples(st.just("rmdir"), names),
    st.tuples(st.just("unlink"), names),
    st.tuples(st.just("rename"), names, names),
    st.tuples(st.just("link"), names, names),
    st.tuples(st.just("symlink"), names, names),
    st.tuples(st.just("readlink"), names),
    st.tuples(st.just("listdir"), names),
    st.tuples(st.just("chmod"), names, modes),
    st.tuples(st.just("chown"), names, st.sampled_from((-1, 0, 5)), st.sampled_from((-1, 0, 6))),
    st.tuples(st.just("utime"), names, st.integers(-(1 << 40), 1 << 60), st.integers(0, 1 << 60)),
    st.tuples(st.just("mkfifo"), names, modes),
    st.tuples(st.just("access"), names),
)


def _shape(found: os.stat_result) -> tuple[int, ...]:
    size = -1 if stat.S_ISDIR(found.st_mode) else found.st_size
    return (found.st_mode, found.st_nlink, found.st_uid, found.st_gid, size)


class Calls:
    """One directory and up to three open files in it."""

    def __init__(self, folder: bytes) -> None:
        self._folder = folder
        self._open: dict[int, int] = {}

    def play(self, sequence: list[Call]) -> list[Any]:
        try:
            return [self._noted(call) for call in [*sequence, ("tree",)]]
        finally:
            for file in self._open.values():
                with contextlib.suppress(OSError):
                    os.close(file)

    def _noted(self, call: Call) -> Any:
        try:
            return getattr(self, "_" + call[0])(*call[1:])
        except OSError as error:
            return (call[0], os.strerror(error.errno or 0))

    def _path(self, name: bytes) -> bytes:
        return self._folder + b"/" + name

    def _file(self, handle: int) -> int:
        if handle not in self._open:
            raise OSError(9, "not open")
        return self._open[handle]

    def _open_file(self, handle: int, name: bytes, how: int, mode: int) -> None:
        file = os.open(self._path(name), how | os.O_NONBLOCK, mode)
        if handle in self._open:
            os.close(self._open.pop(handle))
        self._open[handle] = file

    def _close(self, handle: int) -> None:
        os.close(self._open.pop(handle) if handle in self._open else self._file(handle))

    def _pwrite(self, handle: int, offset: int, size: int) -> int:
        return os.pwrite(self._file(handle), (b"%07d." % (offset % 9_999_991)) * (size // 8 + 1), offset)

    def _write(self, handle: int, size: int) -> int:
        return os.write(self._file(handle), b"w" * size)

    def _pread(self, handle: int, offset: int, size: int) -> bytes:
        return os.pread(self._file(handle), size, offset)

    def _ftruncate(self, handle: int, size: int) -> None:
        os.ftruncate(self._file(handle), size)

    def _fstat(self, handle: int) -> tuple[int, ...]:
        return _shape(os.fstat(self._file(handle)))

    def _fsync(self, handle: int) -> None:
        os.fsync(self._file(handle))

    def _stat(self, name: bytes) -> tuple[int, ...]:
        return _shape(os.lstat(self._path(name)))

    def _truncate(self, name: bytes, size: int) -> None:
        os.truncate(self._path(name), size)

    def _mkdir(self, name: bytes, mode: int) -> None:
        os.mkdir(self._path(name), mode)

    def _rmdir(self, name: bytes) -> None:
        os.rmdir(self._path(name))

    def _unlink(self, name: bytes) -> None:
        os.unlink(self._path(name))

    def _rename(self, name: bytes, new: bytes) -> None:
        os.rename(self._path(name), self._path(new))

    def _link(self, name: bytes, new: bytes) -> None:
        os.link(self._path(name), self._path(new), follow_symlinks=False)

    def _symlink(self, target: bytes, name: bytes) -> None:
        os.symlink(target, self._path(name))

    def _readlink(self, name: bytes) -> bytes:
        return os.readlink(self._path(name))

    def _listdir(self, name: bytes) -> list[bytes]:
        return sorted(os.listdir(self._path(name)))

    def _chmod(self, name: bytes, mode: int) -> None:
        os.chmod(self._path(name), mode)

    def _chown(self, name: bytes, uid: int, gid: int) -> None:
        os.lchown(self._path(name), uid, gid)

    def _utime(self, name: bytes, atime_ns: int, mtime_ns: int) -> tuple[int, int]:
        os.utime(self._path(name), ns=(atime_ns, mtime_ns))
        found = os.stat(self._path(name))
        return (found.st_atime_ns, found.st_mtime_ns)

    def _mkfifo(self, name: bytes, mode: int) -> None:
        os.mkfifo(self._path(name), mode)

    def _access(self, name: bytes) -> bool:
        return os.access(self._path(name), os.R_OK | os.W_OK)

    def _tree(self) -> dict[bytes, Any]:
        """All that is there in the end."""
        found: dict[bytes, Any] = {}
        for folder, folders, files in os.walk(self._folder):
            for name in [*folders, *files]:
                path = os.path.join(folder, name)
                shape = os.lstat(path)
                content: Any = None
                if stat.S_ISLNK(shape.st_mode):
                    content = os.readlink(path)
                elif stat.S_ISREG(shape.st_mode) and shape.st_size < 1 << 24:
                    with open(path, "rb") as file:
                        content = file.read()
                found[path[len(self._folder) :]] = (_shape(shape), content)
        return found
