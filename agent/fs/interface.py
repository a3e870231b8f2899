"""What a file system offers to a door, whichever door it is.

Three doors (our /dev/fuse door, pyfuse3 as the reference, later virtio-fs) call these operations;
three faces (/kv, /fs, /.g35) implement them, and `agent.fs.root` joins the faces into one tree. No
operation knows the FUSE wire format and no door knows what a volume is.

* Every operation returns its value, or the steps that lead to it (`agent.pool.steps.Outcome`). A door
  settles the outcome on the worker that received the request.
* An operation refuses by raising `FsError(errno)`. Anything else that escapes is a bug; the door
  answers EIO, logs it and goes on serving.
* `into` and `data` are borrowed: they are the door's buffers and are reused once the operation ended.
* Inode numbers carry their face in the top byte (`FACE_SHIFT`); number 1 is the root of the mount.
"""

from __future__ import annotations

import errno as errno_codes
import os
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, Protocol, TypeAlias

from agent.host_os.bounds import Holder
from agent.pool.steps import Outcome

Xattr: TypeAlias = bytes | memoryview
"""The value of an extended attribute."""

FACE_SHIFT: Final = 56
ROOT_INODE: Final = 1
FACE_KV: Final = 1
FACE_FILES: Final = 2
FACE_CONTROL: Final = 3

NAME_BYTES_MAX: Final = 255
"""NAME_MAX of Linux; a longer name is ENAMETOOLONG in every face."""


class FsError(Exception):
    """The operation is refused; `errno` is what the caller of the system call sees."""

    def __init__(self, errno: int, why: str = "") -> None:
        super().__init__(why or os.strerror(errno))
        self.errno = errno


class Caller:
    """Who asks: the credentials of the process as FUSE reports them, and the guest whose process it is.

    What a guest says of its users is its own affair: in what all share it is one holder.
    """

    __slots__ = ("gid", "guest", "pid", "uid", "umask")

    def __init__(self, uid: int = 0, gid: int = 0, pid: int = 0, umask: int = 0o022, guest: str = "") -> None:
        self.uid: Final = uid
        self.gid: Final = gid
        self.pid: Final = pid
        self.umask: Final = umask
        self.guest: Final = guest

    @property
    def holder(self) -> Holder:
        """Who holds what it is given, among those that share a bound."""
        return self.guest or self.uid


class LockOwner:
    """Who has a file open: a table of open files, as FUSE's lock owner names it, and the thread that asks."""

    __slots__ = ("owner", "pid")

    def __init__(self, owner: int = 0, pid: int = 0) -> None:
        self.owner: Final = owner
        self.pid: Final = pid


NOBODY: Final = LockOwner()
"""Where a door is not told."""


@dataclass(frozen=True, slots=True)
class Attributes:
    """What stat(2) shows. Times are nanoseconds since the epoch; `blocks` counts 512 bytes each."""

    ino: int
    mode: int
    size: int = 0
    nlink: int = 1
    uid: int = 0
    gid: int = 0
    rdev: int = 0
    blocks: int = 0
    block_size: int = 4096
    atime_ns: int = 0
    mtime_ns: int = 0
    ctime_ns: int = 0


@dataclass(frozen=True, slots=True)
class Entry:
    """A name that was found: its attributes, and for how many seconds the kernel may believe both."""

    attributes: Attributes
    entry_seconds: float = 0.0
    attribute_seconds: float = 0.0
    generation: int = 0


@dataclass(frozen=True, slots=True)
class Opened:
    """An open file or directory, and how the kernel may treat it."""

    handle: int
    direct_io: bool = False
    keep_cache: bool = False
    parallel_direct_writes: bool = False
    no_flush: bool = False
    non_seekable: bool = False


@dataclass(frozen=True, slots=True)
class DirectoryEntry:
    """One name of a directory; `cookie` is the offset at which the next readdir goes on."""

    name: bytes
    ino: int
    mode: int
    cookie: int


@dataclass(frozen=True, slots=True)
class StatFs:
    """What statvfs(3) shows; `block_size` bytes a block."""

    blocks: int
    blocks_free: int
    blocks_available: int
    files: int = 0
    files_free: int = 0
    block_size: int = 4096
    name_bytes_max: int = NAME_BYTES_MAX


@dataclass(frozen=True, slots=True)
class SetAttributes:
    """What a setattr changes; None leaves it. `touch_*` asks for the present time."""

    mode: int | None = None
    uid: int | None = None
    gid: int | None = None
    size: int | None = None
    atime_ns: int | None = None
    mtime_ns: int | None = None
    touch_atime: bool = False
    touch_mtime: bool = False


class FileSystem(Protocol):
    """One face, or the whole tree of them."""

    def lookup(self, caller: Caller, parent: int, name: bytes) -> Outcome[Entry]: ...

    def forget(self, ino: int, lookups: int) -> None:
        """The kernel drops `lookups` references that lookup, create and their like have given it."""

    def getattr(self, caller: Caller, ino: int, handle: int | None) -> Outcome[Attributes]: ...

    def setattr(
        self, caller: Caller, ino: int, changes: SetAttributes, handle: int | None
    ) -> Outcome[Attributes]: ...

    def readlink(self, caller: Caller, ino: int) -> Outcome[bytes]: ...

    def symlink(self, caller: Caller, parent: int, name: bytes, target: bytes) -> Outcome[Entry]: ...

    def mknod(self, caller: Caller, parent: int, name: bytes, mode: int, rdev: int) -> Outcome[Entry]: ...

    def mkdir(self, caller: Caller, parent: int, name: bytes, mode: int) -> Outcome[Entry]: ...

    def unlink(self, caller: Caller, parent: int, name: bytes) -> Outcome[None]: ...

    def rmdir(self, caller: Caller, parent: int, name: bytes) -> Outcome[None]: ...

    def rename(
        self, caller: Caller, parent: int, name: bytes, new_parent: int, new_name: bytes, flags: int
    ) -> Outcome[None]:
        """`flags` are those of renameat2(2): RENAME_NOREPLACE, RENAME_EXCHANGE; others are EINVAL."""

    def link(self, caller: Caller, ino: int, new_parent: int, new_name: bytes) -> Outcome[Entry]: ...

    def open(self, caller: Caller, ino: int, flags: int) -> Outcome[Opened]: ...

    def create(
        self, caller: Caller, parent: int, name: bytes, mode: int, flags: int
    ) -> Outcome[tuple[Entry, Opened]]: ...

    def read(self, ino: int, handle: int, offset: int, into: memoryview) -> Outcome[int]:
        """Fill `into` from its start; how many bytes were there. Fewer than asked for is the end."""

    def write(
        self, ino: int, handle: int, offset: int, data: memoryview, by: LockOwner = NOBODY
    ) -> Outcome[int]: ...

    def flush(self, ino: int, handle: int, by: LockOwner = NOBODY) -> Outcome[None]: ...

    def release(self, ino: int, handle: int) -> Outcome[None]: ...

    def fsync(self, ino: int, handle: int, data_only: bool) -> Outcome[None]: ...

    def fallocate(self, ino: int, handle: int, mode: int, offset: int, length: int) -> Outcome[None]: ...

    def opendir(self, caller: Caller, ino: int, flags: int) -> Outcome[Opened]: ...

    def readdir(self, ino: int, handle: int, cookie: int) -> Outcome[Iterable[DirectoryEntry]]:
        """The entries after `cookie` (0 from the start), `.` and `..` included; the door takes what fits."""

    def releasedir(self, ino: int, handle: int) -> Outcome[None]: ...

    def fsyncdir(self, ino: int, handle: int, data_only: bool) -> Outcome[None]: ...

    def statfs(self, ino: int) -> Outcome[StatFs]: ...

    def setxattr(self, caller: Caller, ino: int, name: bytes, value: bytes, flags: int) -> Outcome[None]: ...

    def getxattr(self, caller: Caller, ino: int, name: bytes, room: memoryview) -> Outcome[Xattr]:
        """The value, which may lie in `room`. One that would be longer than that may be refused (ERANGE)."""

    def listxattr(self, caller: Caller, ino: int) -> Outcome[list[bytes]]: ...

    def removexattr(self, caller: Caller, ino: int, name: bytes) -> Outcome[None]: ...

    def ioctl(self, caller: Caller, ino: int, handle: int, command: int, data: memoryview) -> Outcome[bytes]:
        """ioctl(2) of an open file: what goes back to the caller. ENOTTY for a command of somebody else's."""


class RefusesAll:
    """Every operation of `FileSystem`, refused: a face overrides what it has.

    Which errno argues for itself: what would change a tree that cannot be changed is EPERM, what a
    file type does not know is ENOSYS's polite form for one file, EOPNOTSUPP.
    """

    def forget(self, ino: int, lookups: int) -> None:
        return None

    def lookup(self, caller: Caller, parent: int, name: bytes) -> Outcome[Entry]:
        raise FsError(errno_codes.ENOENT)

    def getattr(self, caller: Caller, ino: int, handle: int | None) -> Outcome[Attributes]:
        raise FsError(errno_codes.ENOENT)

    def setattr(
        self, caller: Caller, ino: int, changes: SetAttributes, handle: int | None
    ) -> Outcome[Attributes]:
        raise FsError(errno_codes.EPERM)

    def readlink(self, caller: Caller, ino: int) -> Outcome[bytes]:
        raise FsError(errno_codes.EINVAL)

    def symlink(self, caller: Caller, parent: int, name: bytes, target: bytes) -> Outcome[Entry]:
        raise FsError(errno_codes.EPERM)

    def mknod(self, caller: Caller, parent: int, name: bytes, mode: int, rdev: int) -> Outcome[Entry]:
        raise FsError(errno_codes.EPERM)

    def mkdir(self, caller: Caller, parent: int, name: bytes, mode: int) -> Outcome[Entry]:
        raise FsError(errno_codes.EPERM)

    def unlink(self, caller: Caller, parent: int, name: bytes) -> Outcome[None]:
        raise FsError(errno_codes.EPERM)

    def rmdir(self, caller: Caller, parent: int, name: bytes) -> Outcome[None]:
        raise FsError(errno_codes.EPERM)

    def rename(
        self, caller: Caller, parent: int, name: bytes, new_parent: int, new_name: bytes, flags: int
    ) -> Outcome[None]:
        raise FsError(errno_codes.EPERM)

    def link(self, caller: Caller, ino: int, new_parent: int, new_name: bytes) -> Outcome[Entry]:
        raise FsError(errno_codes.EPERM)

    def open(self, caller: Caller, ino: int, flags: int) -> Outcome[Opened]:
        raise FsError(errno_codes.EISDIR)

    def create(
        self, caller: Caller, parent: int, name: bytes, mode: int, flags: int
    ) -> Outcome[tuple[Entry, Opened]]:
        raise FsError(errno_codes.EPERM)

    def read(self, ino: int, handle: int, offset: int, into: memoryview) -> Outcome[int]:
        raise FsError(errno_codes.EISDIR)

    def write(
        self, ino: int, handle: int, offset: int, data: memoryview, by: LockOwner = NOBODY
    ) -> Outcome[int]:
        raise FsError(errno_codes.EISDIR)

    def flush(self, ino: int, handle: int, by: LockOwner = NOBODY) -> Outcome[None]:
        return None

    def release(self, ino: int, handle: int) -> Outcome[None]:
        return None

    def fsync(self, ino: int, handle: int, data_only: bool) -> Outcome[None]:
        return None

    def fallocate(self, ino: int, handle: int, mode: int, offset: int, length: int) -> Outcome[None]:
        raise FsError(errno_codes.EOPNOTSUPP)

    def opendir(self, caller: Caller, ino: int, flags: int) -> Outcome[Opened]:
        raise FsError(errno_codes.ENOTDIR)

    def readdir(self, ino: int, handle: int, cookie: int) -> Outcome[Iterable[DirectoryEntry]]:
        raise FsError(errno_codes.ENOTDIR)

    def releasedir(self, ino: int, handle: int) -> Outcome[None]:
        return None

    def fsyncdir(self, ino: int, handle: int, data_only: bool) -> Outcome[None]:
        return None

    def statfs(self, ino: int) -> Outcome[StatFs]:
        raise FsError(errno_codes.ENOENT)

    def setxattr(self, caller: Caller, ino: int, name: bytes, value: bytes, flags: int) -> Outcome[None]:
        raise FsError(errno_codes.EOPNOTSUPP)

    def getxattr(self, caller: Caller, ino: int, name: bytes, room: memoryview) -> Outcome[Xattr]:
        raise FsError(errno_codes.EOPNOTSUPP)

    def listxattr(self, caller: Caller, ino: int) -> Outcome[list[bytes]]:
        return []

    def removexattr(self, caller: Caller, ino: int, name: bytes) -> Outcome[None]:
        raise FsError(errno_codes.EOPNOTSUPP)

    def ioctl(self, caller: Caller, ino: int, handle: int, command: int, data: memoryview) -> Outcome[bytes]:
        raise FsError(errno_codes.ENOTTY)
