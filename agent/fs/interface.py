"""What a file system offers to a door, whichever door it is.

Three doors (/dev/fuse, pyfuse3, virtio-fs) call these operations; four faces (/kv, /fs, /shared, /.g35)
implement them, and `RootFileSystem` joins the faces into one tree. No operation knows the FUSE wire format,
no door a volume.

* Every operation returns its value, or the steps that lead to it (`agent.pool.steps.Outcome`), which a door
  settles on the worker that received the request.
* An operation refuses by `FsError(errno)`. Any other exception is a bug: the door answers EIO and logs it.
* `into` and `data` are the door's buffers, borrowed until the operation has ended.
* Inode numbers carry their face in the top byte (`FACE_SHIFT`); number 1 is the root of the mount.
"""

import errno
import os
import stat
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Protocol, TypeAlias

from agent.host_os.per_user_bounds import Holder
from agent.pool.steps import Outcome

Xattr: TypeAlias = bytes | memoryview
"""The value of an extended attribute."""

FACE_SHIFT: Final = 56
ROOT_INODE: Final = 1
EPOCH_BITS: Final = 20
"""Inodes of /kv and /shared begin at a random number of so many bits. So a program that has files open in the
mounts of two agents has no number twice: what tells how a file was closed looks for its name and number
(close_cause.py)."""
FIXED_SECONDS: Final = 60.0
"""The kernel may believe for so long in names that do not change while an agent serves."""
FOLDER_SECONDS: Final = 1.0
"""And in attributes of folders, also such as do not change: who asks for them hears soon that the agent has
ended."""
FACE_KV: Final = 1
FACE_FILES: Final = 2
FACE_CONTROL: Final = 3
FACE_SHARED: Final = 4

NAME_BYTES_MAX: Final = 255
"""NAME_MAX of Linux; a longer name is ENAMETOOLONG in every face."""


class FsError(Exception):
    """The operation is refused; `errno` is what the caller of the system call sees."""

    def __init__(self, errno: int, why: str = "") -> None:
        super().__init__(why or os.strerror(errno))
        self.errno = errno


class Caller:
    """Who asks: the credentials of the process as FUSE reports them, and the guest whose process it is."""

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
"""The lock owner where the kernel does not tell the door one."""
PAGES: Final = LockOwner()
"""The kernel, which writes pages that programs changed through a mapping. It closes nothing, so it is nobody
whose close has to be waited for; the kernel writes such pages before it tells of the close."""


@dataclass(frozen=True, slots=True)
class Attributes:
    """What stat(2) shows. Times are nanoseconds since the epoch; `blocks` counts 512 bytes each.

    `valid_seconds`: the kernel may believe an answer to GETATTR for so long. A walk along a path asks for the
    attributes of each folder on it that the kernel may not believe.
    """

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
    valid_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Entry:
    """A name that was found: its attributes, and for how many seconds the kernel may believe both."""

    attributes: Attributes
    entry_seconds: float = 0.0
    attribute_seconds: float = 0.0
    generation: int = 0


@dataclass(frozen=True, slots=True)
class Opened:
    """An open file or directory, and how the kernel may treat it.

    `direct_writes`: as `direct_io`, where the kernel drops from its page cache what such a write changes.
    """

    handle: int
    direct_io: bool = False
    keep_cache: bool = False
    parallel_direct_writes: bool = False
    no_flush: bool = False
    direct_writes: bool = False


@dataclass(frozen=True, slots=True)
class DirectoryEntry:
    """One name of a directory; `cookie` is the offset at which the next readdir goes on."""

    name: bytes
    ino: int
    mode: int
    cookie: int


def folders(rows: Sequence[tuple[bytes, int]], cookie: int) -> list[DirectoryEntry]:
    """A listing of folders, by name and number, after `cookie`."""
    entries = [DirectoryEntry(name, number, stat.S_IFDIR, at) for at, (name, number) in enumerate(rows, 1)]
    return entries[cookie:]


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


def check_same_face(one: int, other: int) -> None:
    """Raises EXDEV for nodes of two faces, which are two file systems to rename(2)."""
    if one >> FACE_SHIFT != other >> FACE_SHIFT:
        raise FsError(errno.EXDEV)


class FileSystem(Protocol):
    """One face, or the whole tree of them. A face overrides what it has: every operation here is refused.

    An operation that would change a tree is EPERM; one that a file type does not know is EOPNOTSUPP.
    """

    def forget(self, ino: int, lookups: int) -> None:
        """The kernel drops `lookups` references that lookup, create and their like have given it."""
        return None

    def lookup(self, caller: Caller, parent: int, name: bytes) -> Outcome[Entry]:
        raise FsError(errno.ENOENT)

    def getattr(self, caller: Caller, ino: int, handle: int | None) -> Outcome[Attributes]:
        raise FsError(errno.ENOENT)

    def setattr(
        self, caller: Caller, ino: int, changes: SetAttributes, handle: int | None
    ) -> Outcome[Attributes]:
        raise FsError(errno.EPERM)

    def readlink(self, caller: Caller, ino: int) -> Outcome[bytes]:
        raise FsError(errno.EINVAL)

    def symlink(self, caller: Caller, parent: int, name: bytes, target: bytes) -> Outcome[Entry]:
        raise FsError(errno.EPERM)

    def mknod(self, caller: Caller, parent: int, name: bytes, mode: int, rdev: int) -> Outcome[Entry]:
        raise FsError(errno.EPERM)

    def mkdir(self, caller: Caller, parent: int, name: bytes, mode: int) -> Outcome[Entry]:
        raise FsError(errno.EPERM)

    def unlink(self, caller: Caller, parent: int, name: bytes) -> Outcome[None]:
        raise FsError(errno.EPERM)

    def rmdir(self, caller: Caller, parent: int, name: bytes) -> Outcome[None]:
        raise FsError(errno.EPERM)

    def rename(
        self, caller: Caller, parent: int, name: bytes, new_parent: int, new_name: bytes, flags: int
    ) -> Outcome[None]:
        """`flags` are those of renameat2(2): RENAME_NOREPLACE, RENAME_EXCHANGE; others are EINVAL."""
        check_same_face(parent, new_parent)
        raise FsError(errno.EPERM)

    def link(self, caller: Caller, ino: int, new_parent: int, new_name: bytes) -> Outcome[Entry]:
        check_same_face(ino, new_parent)
        raise FsError(errno.EPERM)

    def open(self, caller: Caller, ino: int, flags: int) -> Outcome[Opened]:
        raise FsError(errno.EISDIR)

    def create(
        self, caller: Caller, parent: int, name: bytes, mode: int, flags: int
    ) -> Outcome[tuple[Entry, Opened]]:
        raise FsError(errno.EPERM)

    def read(self, ino: int, handle: int, offset: int, into: memoryview) -> Outcome[int]:
        """Fill `into` from its start; how many bytes were there. Fewer than asked for is the end."""
        raise FsError(errno.EISDIR)

    def write(
        self, ino: int, handle: int, offset: int, data: memoryview, by: LockOwner = NOBODY
    ) -> Outcome[int]:
        raise FsError(errno.EISDIR)

    def flush(self, ino: int, handle: int, by: LockOwner = NOBODY) -> Outcome[None]:
        return None

    def release(self, ino: int, handle: int) -> Outcome[None]:
        return None

    def fsync(self, ino: int, handle: int, data_only: bool) -> Outcome[None]:
        return None

    def fallocate(self, ino: int, handle: int, mode: int, offset: int, length: int) -> Outcome[None]:
        raise FsError(errno.EOPNOTSUPP)

    def opendir(self, caller: Caller, ino: int, flags: int) -> Outcome[Opened]:
        raise FsError(errno.ENOTDIR)

    def readdir(self, ino: int, handle: int, cookie: int) -> Outcome[Iterable[DirectoryEntry]]:
        """The entries after `cookie` (0 from the start), `.` and `..` included; the door takes what fits."""
        raise FsError(errno.ENOTDIR)

    def releasedir(self, ino: int, handle: int) -> Outcome[None]:
        return None

    def fsyncdir(self, ino: int, handle: int, data_only: bool) -> Outcome[None]:
        return None

    def statfs(self, ino: int) -> Outcome[StatFs]:
        raise FsError(errno.ENOENT)

    def setxattr(self, caller: Caller, ino: int, name: bytes, value: bytes, flags: int) -> Outcome[None]:
        raise FsError(errno.EOPNOTSUPP)

    def getxattr(self, caller: Caller, ino: int, name: bytes, room: memoryview) -> Outcome[Xattr]:
        """The value, which may lie in `room`. One that would be longer than that may be refused (ERANGE)."""
        raise FsError(errno.EOPNOTSUPP)

    def listxattr(self, caller: Caller, ino: int) -> Outcome[list[bytes]]:
        return []

    def removexattr(self, caller: Caller, ino: int, name: bytes) -> Outcome[None]:
        raise FsError(errno.EOPNOTSUPP)

    def ioctl(self, caller: Caller, ino: int, handle: int, command: int, data: memoryview) -> Outcome[bytes]:
        """ioctl(2) of an open file: what goes back to the caller. ENOTTY for a command of somebody else's."""
        raise FsError(errno.ENOTTY)


class _RootFolder(FileSystem):
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
        return Entry(attributes, FIXED_SECONDS, FOLDER_SECONDS)

    def getattr(self, caller: Caller, ino: int, handle: int | None) -> Outcome[Attributes]:
        uid, gid = self._owner
        nlink = 2 + len(self._faces)
        return Attributes(
            ROOT_INODE, stat.S_IFDIR | 0o755, nlink=nlink, uid=uid, gid=gid, valid_seconds=FOLDER_SECONDS
        )

    def opendir(self, caller: Caller, ino: int, flags: int) -> Outcome[Opened]:
        return Opened(0)

    def readdir(self, ino: int, handle: int, cookie: int) -> Outcome[Iterable[DirectoryEntry]]:
        rows = [(b".", ROOT_INODE), (b"..", ROOT_INODE)]
        return folders(rows + [(name, number) for name, (number, _) in self._faces.items()], cookie)

    def statfs(self, ino: int) -> Outcome[StatFs]:
        totals = [0, 0, 0]
        for number, face in self._faces.values():
            part = face.statfs(number)
            if isinstance(part, StatFs):
                totals[0] += part.blocks * part.block_size // 4096
                totals[1] += part.blocks_free * part.block_size // 4096
                totals[2] += part.blocks_available * part.block_size // 4096
        return StatFs(*totals)


class _NoFace(FileSystem):
    """Numbers that no face has."""


class RootFileSystem:
    """All faces in one tree. Not a `FileSystem` itself: `face_of` says which face an operation is for."""

    def __init__(
        self, faces: Mapping[bytes, tuple[int, FileSystem]], owner: tuple[int, int] = (0, 0)
    ) -> None:
        """`faces` maps a name to its root inode and its face."""
        self._faces: dict[int, FileSystem] = {0: _RootFolder(faces, owner)}
        for ino, face in faces.values():
            self._faces[ino >> FACE_SHIFT] = face
        self._none = _NoFace()

    def face(self, ino: int) -> FileSystem:
        """The face of a node, by the top byte of its number."""
        return self._faces.get(ino >> FACE_SHIFT, self._none)


Tree: TypeAlias = FileSystem | RootFileSystem
FaceOf: TypeAlias = Callable[[int], FileSystem]


def face_of(tree: Tree) -> FaceOf:
    """Which `FileSystem` has a node. Where a tree has faces, what moves from one to another is EXDEV."""
    return tree.face if isinstance(tree, RootFileSystem) else lambda _ino: tree
