"""Which block holds which part of a file, and which blocks are to be deleted: rows, not bytes.

A block is *announced* in `doomed` before it is put; then one transaction makes it the current version, takes
back the announcement and dooms its predecessor; a sweep deletes doomed blocks. So each block in the store is
current or doomed at every moment, and the next start finds what a killed process left.
"""

import errno
import sqlite3
from dataclasses import dataclass

from agent.fs.files import inodes
from agent.fs.files.metadata_database import Database, marks
from agent.fs.interface import FsError


@dataclass(frozen=True, slots=True)
class SealedBlock:
    """The current version of a block: `length` valid bytes in a slot of `capacity`."""

    version: int
    capacity: int
    length: int


@dataclass(frozen=True, slots=True)
class DoomedBlock:
    """A block that no file has any more, still in the store perhaps."""

    seq: int
    ino: int
    position: int
    version: int
    capacity: int


def sealed_range(database: Database, ino: int, first: int, last: int) -> dict[int, SealedBlock]:
    """The blocks at positions `first` to `last`; what is absent is a hole."""
    rows = database.query(
        "SELECT position, version, capacity, length FROM blocks WHERE ino = ? AND position BETWEEN ? AND ?",
        ino,
        first,
        last,
    )
    return {position: SealedBlock(version, capacity, length) for position, version, capacity, length in rows}


def sealed_at(database: Database, ino: int, position: int) -> SealedBlock | None:
    return sealed_range(database, ino, position, position).get(position)


def announce(tx: sqlite3.Connection, ino: int, position: int, version: int, capacity: int) -> int:
    """Say that this block is about to be put; the number to take it back with."""
    cursor = tx.execute(
        "INSERT INTO doomed (ino, position, version, capacity, writing) VALUES (?, ?, ?, ?, 1)",
        (ino, position, version, capacity),
    )
    number = cursor.lastrowid
    assert number is not None
    return number


def take_back(tx: sqlite3.Connection, seq: int) -> None:
    """The announced block is current, or was certainly not stored."""
    tx.execute("DELETE FROM doomed WHERE seq = ?", (seq,))


def give_up(tx: sqlite3.Connection, seq: int) -> None:
    """The announced block may have been stored and will not become current."""
    tx.execute("UPDATE doomed SET writing = 0 WHERE seq = ?", (seq,))


def give_up_all(tx: sqlite3.Connection) -> None:
    """Doom all announced blocks. Called at the start: the process that announced them has died."""
    tx.execute("UPDATE doomed SET writing = 0 WHERE writing = 1")


def make_current(
    tx: sqlite3.Connection, ino: int, position: int, block: SealedBlock, end: int, mtime_ns: int | None
) -> None:
    """The block is now what the file has at `position`; its predecessor is doomed.

    The file ends at `end` or behind it, and was written at `mtime_ns`, where that is new.
    """
    old = _doom(tx, "ino = ? AND position = ?", (ino, position))
    tx.execute(
        "INSERT OR REPLACE INTO blocks VALUES (?, ?, ?, ?, ?)",
        (ino, position, block.version, block.capacity, block.length),
    )
    # One statement: each gives the interpreter's lock away, and gets it back behind others.
    changed = tx.execute(
        "UPDATE inodes SET stored = stored + ?, size = MAX(size, ?), mtime_ns = COALESCE(?, mtime_ns), "
        "ctime_ns = MAX(ctime_ns, COALESCE(?, ctime_ns)) WHERE ino = ?",
        (block.capacity - old, end, mtime_ns, mtime_ns, ino),
    )
    if not changed.rowcount:
        raise FsError(errno.ESTALE)


def store_size(tx: sqlite3.Connection, ino: int, size: int, mtime_ns: int | None) -> None:
    """The file ends at `size`, and was written at `mtime_ns`, where that is new."""
    tx.execute(
        "UPDATE inodes SET size = ?, mtime_ns = COALESCE(?, mtime_ns), "
        "ctime_ns = MAX(ctime_ns, COALESCE(?, ctime_ns)) WHERE ino = ?",
        (size, mtime_ns, mtime_ns, ino),
    )


def shorten(tx: sqlite3.Connection, ino: int, position: int, length: int) -> None:
    """From `length` on, the block reads as zero. No byte moves: the row says how much of it is valid."""
    if length == 0:
        drop(tx, ino, position, position)
    else:
        tx.execute(
            "UPDATE blocks SET length = ? WHERE ino = ? AND position = ? AND length > ?",
            (length, ino, position, length),
        )


def drop(tx: sqlite3.Connection, ino: int, first: int, last: int) -> None:
    """Make a hole of the positions `first` to `last`."""
    freed = _doom(tx, "ino = ? AND position BETWEEN ? AND ?", (ino, first, last))
    if freed:
        tx.execute("DELETE FROM blocks WHERE ino = ? AND position BETWEEN ? AND ?", (ino, first, last))
        _add_stored(tx, ino, -freed)


def destroy(tx: sqlite3.Connection, ino: int) -> bool:
    """Remove an inode without names, and doom its blocks; False when it is gone or has a name."""
    if tx.execute("SELECT 1 FROM inodes WHERE ino = ? AND nlink = 0", (ino,)).fetchone() is None:
        return False
    _doom(tx, "ino = ?", (ino,))
    for table in ("blocks", "xattrs", "inodes"):
        tx.execute(f"DELETE FROM {table} WHERE ino = ?", (ino,))
    return True


def _doom(tx: sqlite3.Connection, where: str, arguments: tuple[int, ...]) -> int:
    """Doom the current blocks that match; how much capacity they take."""
    capacity = tx.execute(
        f"SELECT COALESCE(SUM(capacity), 0) FROM blocks WHERE {where}", arguments
    ).fetchone()[0]
    if capacity:
        tx.execute(
            "INSERT INTO doomed (ino, position, version, capacity, writing) "
            f"SELECT ino, position, version, capacity, 0 FROM blocks WHERE {where}",
            arguments,
        )
    return int(capacity)


def _add_stored(tx: sqlite3.Connection, ino: int, bytes_more: int) -> None:
    stored = inodes.find_within(tx, ino).stored
    inodes.set_columns(tx, ino, stored=stored + bytes_more)


def doomed_after(database: Database, seq: int, limit: int) -> list[DoomedBlock]:
    """The next blocks to delete, oldest first."""
    rows = database.query(
        "SELECT seq, ino, position, version, capacity FROM doomed "
        "WHERE seq > ? AND writing = 0 ORDER BY seq LIMIT ?",
        seq,
        limit,
    )
    return [DoomedBlock(*row) for row in rows]


def doomed_backlog(database: Database, rows_at_most: int, after: int = 0) -> tuple[int, int]:
    """How many blocks (behind the number `after`) await deletion and what they take, looking at no more than
    `rows_at_most`."""
    [(count, capacity)] = database.query(
        "SELECT COUNT(*), COALESCE(SUM(capacity), 0) "
        "FROM (SELECT capacity FROM doomed WHERE seq > ? AND writing = 0 LIMIT ?)",
        after,
        rows_at_most,
    )
    return count, capacity


def deleted(tx: sqlite3.Connection, seqs: list[int]) -> None:
    """Forget these doomed blocks: the store has deleted them."""
    for start in range(0, len(seqs), 500):
        part = seqs[start : start + 500]
        tx.execute(f"DELETE FROM doomed WHERE seq IN ({marks(part)})", part)
