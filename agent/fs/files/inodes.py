"""Inodes of /fs: one record, how it is read and made, and what stat(2) shows of it."""

import errno
import sqlite3
import stat
from dataclasses import dataclass
from typing import Any

from agent.fs.files.metadata_database import ROOT_LOCAL, Database, in_int64
from agent.fs.interface import FACE_FILES, FACE_SHIFT, Attributes, FsError

IO_BYTES_PREFERRED = 1 << 20
"""st_blksize: cp and its like size their buffers by it, and 1 MiB is the largest FUSE request."""

_LOCAL_MASK = (1 << FACE_SHIFT) - 1

COLUMNS = (
    "inodes.ino, inodes.mode, inodes.nlink, inodes.uid, inodes.gid, inodes.rdev, inodes.size, inodes.stored, "
    "inodes.block_bytes, inodes.atime_ns, inodes.mtime_ns, inodes.ctime_ns, inodes.parent"
)


@dataclass(frozen=True, slots=True)
class Inode:
    """One row of `inodes` as it was read; times in nanoseconds since the epoch, sizes in bytes."""

    ino: int
    mode: int
    nlink: int
    uid: int
    gid: int
    rdev: int
    size: int
    stored: int
    block_bytes: int
    atime_ns: int
    mtime_ns: int
    ctime_ns: int
    parent: int | None

    @property
    def is_directory(self) -> bool:
        return stat.S_ISDIR(self.mode)

    @property
    def is_regular(self) -> bool:
        return stat.S_ISREG(self.mode)

    def attributes(self) -> Attributes:
        return Attributes(
            ino=global_ino(self.ino),
            mode=self.mode,
            size=self.size,
            nlink=self.nlink,
            uid=self.uid,
            gid=self.gid,
            rdev=self.rdev,
            blocks=-(-self.stored // 512),
            block_size=IO_BYTES_PREFERRED,
            atime_ns=self.atime_ns,
            mtime_ns=self.mtime_ns,
            ctime_ns=self.ctime_ns,
        )


def global_ino(local: int) -> int:
    """The inode number as the mount shows it: the face is in the top byte."""
    return FACE_FILES << FACE_SHIFT | local


def local_ino(ino: int) -> int:
    """The row number of an inode number of this face; ESTALE for any other number."""
    if ino >> FACE_SHIFT != FACE_FILES or not ino & _LOCAL_MASK:
        raise FsError(errno.ESTALE, f"inode {ino:#x} is none of /fs")
    return ino & _LOCAL_MASK


def find(database: Database, ino: int) -> Inode:
    """The inode as of the last commit.

    ESTALE when there is none: upon it the kernel forgets what it believed of the name and looks it up
    again, so that a program sees the ENOENT that is due for a file that was evicted or lost.
    """
    rows = database.query(f"SELECT {COLUMNS} FROM inodes WHERE ino = ?", ino)
    if not rows:
        raise FsError(errno.ESTALE)
    return Inode(*rows[0])


def find_within(tx: sqlite3.Connection, ino: int) -> Inode:
    """The same inside a transaction."""
    row: Any = tx.execute(f"SELECT {COLUMNS} FROM inodes WHERE ino = ?", (ino,)).fetchone()
    if row is None:
        raise FsError(errno.ESTALE)
    return Inode(*row)


def directory_within(tx: sqlite3.Connection, ino: int) -> Inode:
    """The directory `ino`, into which names may be put: ENOTDIR for a file, ENOENT when it was removed."""
    directory = find_within(tx, ino)
    if not directory.is_directory:
        raise FsError(errno.ENOTDIR)
    if directory.nlink == 0:
        raise FsError(errno.ENOENT)
    return directory


def insert(
    tx: sqlite3.Connection,
    *,
    mode: int,
    uid: int,
    gid: int,
    now_ns: int,
    block_bytes: int = 0,
    rdev: int = 0,
    parent: int | None = None,
    target: bytes | None = None,
    ino: int | None = None,
) -> Inode:
    """A new inode with one link, two for a directory (its name and its own `.`)."""
    nlink = 2 if stat.S_ISDIR(mode) else 1
    size = len(target) if target is not None else 0
    values = (ino, mode, nlink, uid, gid, rdev, size, 0, block_bytes, *[now_ns] * 4, parent, target)
    cursor = tx.execute("INSERT INTO inodes VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)", values)
    number = cursor.lastrowid
    assert number is not None
    return Inode(number, mode, nlink, uid, gid, rdev, size, 0, block_bytes, now_ns, now_ns, now_ns, parent)


def ensure_root(database: Database, mode: int, uid: int, gid: int, now_ns: int) -> None:
    """Make the root directory, if this is a new file system."""
    with database.transaction() as tx:
        if tx.execute("SELECT 1 FROM inodes WHERE ino = ?", (ROOT_LOCAL,)).fetchone() is None:
            insert(
                tx,
                mode=stat.S_IFDIR | mode,
                uid=uid,
                gid=gid,
                now_ns=now_ns,
                parent=ROOT_LOCAL,
                ino=ROOT_LOCAL,
            )


def set_columns(tx: sqlite3.Connection, ino: int, **columns: int) -> None:
    """Change columns of one inode; ESTALE when it is gone."""
    assignments = ", ".join(f"{name} = ?" for name in columns)
    values = [in_int64(value) for value in columns.values()]
    if not tx.execute(f"UPDATE inodes SET {assignments} WHERE ino = ?", (*values, ino)).rowcount:
        raise FsError(errno.ESTALE)
