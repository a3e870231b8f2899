"""Extended attributes of /fs: small named values beside a file, bounded in size and number."""

import errno

from agent.fs.files import inodes
from agent.fs.files.metadata_database import Database
from agent.fs.interface import NAME_BYTES_MAX, FsError

VALUE_BYTES_MAX = 65_536
"""XATTR_SIZE_MAX of Linux."""

NAMES_BYTES_MAX = 65_536
"""XATTR_LIST_MAX: all names of one file together, each with its NUL."""

TOTAL_BYTES_MAX = 1 << 20
"""All values of one file together."""

XATTR_CREATE, XATTR_REPLACE = 1, 2

_NAMESPACES = (b"user.", b"trusted.", b"security.")
"""`system.` is missing: it holds POSIX ACLs, which this file system does not enforce and must not seem to."""


def _check_name(name: bytes) -> None:
    if len(name) > NAME_BYTES_MAX:
        raise FsError(errno.ERANGE)
    prefix = next((prefix for prefix in _NAMESPACES if name.startswith(prefix)), None)
    if prefix is None:
        raise FsError(errno.EOPNOTSUPP)
    if name == prefix or b"\0" in name:
        raise FsError(errno.EINVAL)


def set_value(database: Database, ino: int, name: bytes, value: bytes, flags: int, now_ns: int) -> None:
    """setxattr(2): EEXIST and ENODATA by `flags`, E2BIG for a value, ENOSPC for too many of them."""
    _check_name(name)
    if flags not in (0, XATTR_CREATE, XATTR_REPLACE):
        raise FsError(errno.EINVAL)
    if len(value) > VALUE_BYTES_MAX:
        raise FsError(errno.E2BIG)
    with database.transaction() as tx:
        inodes.find_within(tx, ino)
        rows = tx.execute("SELECT name, length(value) FROM xattrs WHERE ino = ?", (ino,)).fetchall()
        others = [(known, length) for known, length in rows if known != name]
        exists = len(others) < len(rows)
        if exists and flags == XATTR_CREATE:
            raise FsError(errno.EEXIST)
        if not exists and flags == XATTR_REPLACE:
            raise FsError(errno.ENODATA)
        if sum(length for _, length in others) + len(value) > TOTAL_BYTES_MAX:
            raise FsError(errno.ENOSPC)
        if sum(len(known) + 1 for known, _ in others) + len(name) + 1 > NAMES_BYTES_MAX:
            raise FsError(errno.ENOSPC)
        tx.execute("INSERT OR REPLACE INTO xattrs VALUES (?, ?, ?)", (ino, name, value))
        inodes.set_columns(tx, ino, ctime_ns=now_ns)


def get_value(database: Database, ino: int, name: bytes) -> bytes:
    """getxattr(2): ENODATA when there is none, EOPNOTSUPP for a name outside the known namespaces."""
    _check_name(name)
    rows = database.query("SELECT value FROM xattrs WHERE ino = ? AND name = ?", ino, name)
    if not rows:
        inodes.find(database, ino)
        raise FsError(errno.ENODATA)
    return bytes(rows[0][0])


def names(database: Database, ino: int) -> list[bytes]:
    """listxattr(2), in the order of the names."""
    inodes.find(database, ino)
    return [
        bytes(row[0]) for row in database.query("SELECT name FROM xattrs WHERE ino = ? ORDER BY name", ino)
    ]


def remove(database: Database, ino: int, name: bytes, now_ns: int) -> None:
    """removexattr(2): ENODATA when there is none."""
    _check_name(name)
    with database.transaction() as tx:
        inodes.find_within(tx, ino)
        if not tx.execute("DELETE FROM xattrs WHERE ino = ? AND name = ?", (ino, name)).rowcount:
            raise FsError(errno.ENODATA)
        inodes.set_columns(tx, ino, ctime_ns=now_ns)
