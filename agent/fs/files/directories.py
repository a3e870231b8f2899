"""Names of /fs: how a directory gains, loses and moves them. Every function runs inside a transaction.

Permissions, the sticky bit included, are the kernel's to judge (the mount has `default_permissions`);
what is kept here is structure: which names exist, link counts, no cycles. Errors are those of the system
call's manual page.
"""

import errno
import sqlite3
import stat
from collections.abc import Sequence

from agent.fs.files import inodes
from agent.fs.files.inodes import COLUMNS, Inode
from agent.fs.files.metadata_database import ROOT_LOCAL, Database
from agent.fs.interface import NAME_BYTES_MAX, ROOT_INODE, Caller, DirectoryEntry, FsError

LINKS_MAX = 65_000
SYMLINK_BYTES_MAX = 4095
"""PATH_MAX of Linux, less the final NUL."""

LISTING_ROWS = 1024
"""Names that one readdir answers with; more than fit into the largest buffer that the kernel offers."""

COOKIE_DOT, COOKIE_DOTDOT = 1, 2

RENAME_NOREPLACE, RENAME_EXCHANGE = 1, 2


def check_name(name: bytes) -> None:
    """Refuse what cannot be a new name: too long, empty, `.`, `..`, or with `/` or NUL in it."""
    if len(name) > NAME_BYTES_MAX:
        raise FsError(errno.ENAMETOOLONG)
    if name in (b"", b".", b"..") or b"/" in name or b"\0" in name:
        raise FsError(errno.EINVAL)


_CHILD = (
    f"SELECT {COLUMNS} FROM entries JOIN inodes ON inodes.ino = entries.child "
    "WHERE entries.parent = ? AND entries.name = ?"
)


def look_up(database: Database, parent: int, name: bytes) -> Inode:
    """The inode that `name` stands for; ENOENT, ENOTDIR, ENAMETOOLONG."""
    if len(name) > NAME_BYTES_MAX:
        raise FsError(errno.ENAMETOOLONG)
    rows = database.query(_CHILD, parent, name)
    if rows:
        return Inode(*rows[0])
    directory = inodes.find(database, parent)
    if not directory.is_directory:
        raise FsError(errno.ENOTDIR)
    if name == b".":
        return directory
    if name == b".." and directory.parent is not None:
        return inodes.find(database, directory.parent)
    raise FsError(errno.ENOENT)


def child_within(tx: sqlite3.Connection, parent: int, name: bytes) -> Inode | None:
    row = tx.execute(_CHILD, (parent, name)).fetchone()
    return None if row is None else Inode(*row)


def make(
    tx: sqlite3.Connection,
    caller: Caller,
    parent: int,
    name: bytes,
    mode: int,
    now_ns: int,
    *,
    block_bytes: int = 0,
    rdev: int = 0,
    target: bytes | None = None,
) -> Inode:
    """A new inode of whatever type under a new name; EEXIST when the name is taken.

    In a directory with the set-group-id bit the group is the directory's, and directories inherit the bit.
    """
    check_name(name)
    directory = inodes.directory_within(tx, parent)
    if child_within(tx, parent, name) is not None:
        raise FsError(errno.EEXIST)
    is_directory = stat.S_ISDIR(mode)
    if is_directory and directory.nlink >= LINKS_MAX:
        raise FsError(errno.EMLINK)
    gid = caller.gid
    if directory.mode & stat.S_ISGID:
        gid = directory.gid
        if is_directory:
            mode |= stat.S_ISGID
    node = inodes.insert(
        tx,
        mode=mode,
        uid=caller.uid,
        gid=gid,
        now_ns=now_ns,
        block_bytes=block_bytes,
        rdev=rdev,
        parent=parent if is_directory else None,
        target=target,
    )
    _insert_entry(tx, parent, name, node.ino)
    _directory_changed(tx, parent, now_ns, links=1 if is_directory else 0)
    return node


def add_link(tx: sqlite3.Connection, ino: int, parent: int, name: bytes, now_ns: int) -> Inode:
    """One more name for a file: EPERM for a directory, ENOENT for a file without any name left."""
    check_name(name)
    inodes.directory_within(tx, parent)
    node = inodes.find_within(tx, ino)
    if node.is_directory:
        raise FsError(errno.EPERM)
    if node.nlink == 0:
        raise FsError(errno.ENOENT)
    if child_within(tx, parent, name) is not None:
        raise FsError(errno.EEXIST)
    if node.nlink >= LINKS_MAX:
        raise FsError(errno.EMLINK)
    _insert_entry(tx, parent, name, ino)
    inodes.set_columns(tx, ino, nlink=node.nlink + 1, ctime_ns=now_ns)
    _directory_changed(tx, parent, now_ns)
    return inodes.find_within(tx, ino)


def remove_file(tx: sqlite3.Connection, parent: int, name: bytes, now_ns: int) -> int:
    """Take a name from what is no directory (EISDIR); its inode number."""
    node = _existing(tx, parent, name)
    if node.is_directory:
        raise FsError(errno.EISDIR)
    _delete_entry(tx, parent, name)
    _lost_a_name(tx, node, now_ns)
    _directory_changed(tx, parent, now_ns)
    return node.ino


def remove_directory(tx: sqlite3.Connection, parent: int, name: bytes, now_ns: int) -> int:
    """Remove an empty directory; its inode number. EINVAL for `.`, ENOTEMPTY for `..`, as rmdir(2) has it."""
    if name == b".":
        raise FsError(errno.EINVAL)
    if name == b"..":
        raise FsError(errno.ENOTEMPTY)
    node = _existing(tx, parent, name)
    if not node.is_directory:
        raise FsError(errno.ENOTDIR)
    _check_empty(tx, node.ino)
    _delete_entry(tx, parent, name)
    _lost_a_name(tx, node, now_ns)
    _directory_changed(tx, parent, now_ns, links=-1)
    return node.ino


def rename(
    tx: sqlite3.Connection,
    parent: int,
    name: bytes,
    new_parent: int,
    new_name: bytes,
    flags: int,
    now_ns: int,
) -> int | None:
    """renameat2(2); the inode number of what was replaced, if something was.

    The row of the name that stays keeps its cookie: the replaced name is never absent from a listing.
    """
    if flags not in (0, RENAME_NOREPLACE, RENAME_EXCHANGE):
        raise FsError(errno.EINVAL)
    check_name(name)
    check_name(new_name)
    moved = _existing(tx, parent, name)
    inodes.directory_within(tx, new_parent)
    there = child_within(tx, new_parent, new_name)
    if there is not None and flags & RENAME_NOREPLACE:
        raise FsError(errno.EEXIST)
    if moved.is_directory:
        _check_no_cycle(tx, moved.ino, new_parent)
    if flags & RENAME_EXCHANGE:
        if there is None:
            raise FsError(errno.ENOENT)
        if there.is_directory:
            _check_no_cycle(tx, there.ino, parent)
        _exchange(tx, parent, name, moved, new_parent, new_name, there, now_ns)
        return None
    if there is not None and there.ino == moved.ino:
        return None
    if there is not None:
        if there.is_directory and not moved.is_directory:
            raise FsError(errno.EISDIR)
        if moved.is_directory and not there.is_directory:
            raise FsError(errno.ENOTDIR)
        if there.is_directory:
            _check_empty(tx, there.ino)
        _delete_entry(tx, parent, name)
        _point_entry(tx, new_parent, new_name, moved.ino)
        _lost_a_name(tx, there, now_ns)
    else:
        tx.execute(
            "UPDATE entries SET parent = ?, name = ? WHERE parent = ? AND name = ?",
            (new_parent, new_name, parent, name),
        )
    gained = int(moved.is_directory) - int(there is not None and there.is_directory)
    _has_moved(tx, moved, new_parent, now_ns)
    _directory_changed(tx, parent, now_ns, links=-int(moved.is_directory))
    _directory_changed(tx, new_parent, now_ns, links=gained)
    return None if there is None else there.ino


def _has_moved(tx: sqlite3.Connection, node: Inode, home: int, now_ns: int) -> None:
    columns = {"parent": home} if node.is_directory else {}
    inodes.set_columns(tx, node.ino, ctime_ns=now_ns, **columns)


def _exchange(
    tx: sqlite3.Connection,
    parent: int,
    name: bytes,
    moved: Inode,
    new_parent: int,
    new_name: bytes,
    there: Inode,
    now_ns: int,
) -> None:
    if moved.ino == there.ino:
        return
    _point_entry(tx, parent, name, there.ino)
    _point_entry(tx, new_parent, new_name, moved.ino)
    _has_moved(tx, moved, new_parent, now_ns)
    _has_moved(tx, there, parent, now_ns)
    gained = int(moved.is_directory) - int(there.is_directory)
    _directory_changed(tx, parent, now_ns, links=-gained)
    _directory_changed(tx, new_parent, now_ns, links=gained)


def unlink_everywhere(tx: sqlite3.Connection, ino: int, now_ns: int) -> None:
    """Take all its names from a file that was evicted or that lost a block."""
    parents = [row[0] for row in tx.execute("SELECT DISTINCT parent FROM entries WHERE child = ?", (ino,))]
    tx.execute("DELETE FROM entries WHERE child = ?", (ino,))
    tx.execute("UPDATE inodes SET nlink = 0, ctime_ns = ? WHERE ino = ?", (now_ns, ino))
    for parent in parents:
        _directory_changed(tx, parent, now_ns)


def listing(database: Database, directory: Inode, cookie: int) -> Sequence[DirectoryEntry]:
    """The next names after `cookie`, at most `LISTING_ROWS` of them; none is the end."""
    listed: list[DirectoryEntry] = []
    if cookie < COOKIE_DOT:
        own = inodes.global_ino(directory.ino)
        listed.append(DirectoryEntry(b".", own, directory.mode, COOKIE_DOT))
    if cookie < COOKIE_DOTDOT:
        above = ROOT_INODE
        if directory.ino != ROOT_LOCAL and directory.parent is not None:
            above = inodes.global_ino(directory.parent)
        listed.append(DirectoryEntry(b"..", above, stat.S_IFDIR, COOKIE_DOTDOT))
    if directory.nlink:
        rows = database.query(
            "SELECT entries.name, entries.child, inodes.mode, entries.cookie FROM entries "
            "JOIN inodes ON inodes.ino = entries.child "
            "WHERE entries.parent = ? AND entries.cookie > ? ORDER BY entries.cookie LIMIT ?",
            directory.ino,
            cookie,
            LISTING_ROWS,
        )
        listed += [DirectoryEntry(name, inodes.global_ino(ino), mode, at) for name, ino, mode, at in rows]
    return listed


def _existing(tx: sqlite3.Connection, parent: int, name: bytes) -> Inode:
    node = child_within(tx, parent, name)
    if node is None:
        inodes.directory_within(tx, parent)
        raise FsError(errno.ENAMETOOLONG if len(name) > NAME_BYTES_MAX else errno.ENOENT)
    return node


def _check_empty(tx: sqlite3.Connection, ino: int) -> None:
    if tx.execute("SELECT 1 FROM entries WHERE parent = ? LIMIT 1", (ino,)).fetchone() is not None:
        raise FsError(errno.ENOTEMPTY)


def _check_no_cycle(tx: sqlite3.Connection, moved: int, new_parent: int) -> None:
    """A directory must not move below itself (EINVAL)."""
    above: int | None = new_parent
    while above is not None and above != ROOT_LOCAL:
        if above == moved:
            raise FsError(errno.EINVAL)
        above = inodes.find_within(tx, above).parent


def _insert_entry(tx: sqlite3.Connection, parent: int, name: bytes, child: int) -> None:
    tx.execute("INSERT INTO entries (parent, name, child) VALUES (?, ?, ?)", (parent, name, child))


def _delete_entry(tx: sqlite3.Connection, parent: int, name: bytes) -> None:
    tx.execute("DELETE FROM entries WHERE parent = ? AND name = ?", (parent, name))


def _point_entry(tx: sqlite3.Connection, parent: int, name: bytes, child: int) -> None:
    tx.execute("UPDATE entries SET child = ? WHERE parent = ? AND name = ?", (child, parent, name))


def _lost_a_name(tx: sqlite3.Connection, node: Inode, now_ns: int) -> None:
    left = 0 if node.is_directory else node.nlink - 1
    inodes.set_columns(tx, node.ino, nlink=left, ctime_ns=now_ns)


def _directory_changed(tx: sqlite3.Connection, ino: int, now_ns: int, links: int = 0) -> None:
    tx.execute(
        "UPDATE inodes SET nlink = nlink + ?, mtime_ns = ?, ctime_ns = ? WHERE ino = ?",
        (links, now_ns, now_ns, ino),
    )
