"""The metadata database of /fs: its tables, its one writer, its readers, and what is durable when.

SQLite in WAL mode. All changes go through one connection behind one lock (`Database.transaction`), each
operation of the file system being one transaction; questions go through connections of their own
(`Database.query`), which never wait for the writer.

Durability. `synchronous=NORMAL`: a commit is a write(2) into the WAL and no fsync. A killed process loses no
committed transaction. A machine that loses power may lose the newest ones, in order and never in part, as a
program that did not call fsync must expect. fsync(2) on a file ends in `Database.sync`, which fsyncs the WAL.
That is enough: a committed frame is in the WAL, or a checkpoint has moved it, which syncs the database file
before the WAL begins anew. `synchronous=FULL` would pay that fsync for each create and each rename.
"""

import errno
import logging
import os
import secrets
import sqlite3
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from agent.errors import G35Error
from agent.fs.files.block_store import FILE_SYSTEM_ID_BYTES
from agent.fs.files.metadata_pool import PoolOfNames, settle_home
from agent.fs.interface import FsError
from agent.host_os.rate_limited_log import Complaints

log = logging.getLogger(__name__)

SCHEMA_VERSION = 1
ROOT_LOCAL = 1
"""The root directory's inode number inside the face."""

FIRST_COOKIE = 16
"""Cookies below belong to `.` and `..`; those of names are the row numbers of `entries`."""

WAL_BYTES_KEPT = 64 * 1024 * 1024
PAGE_CACHE_KIB = 8 * 1024
BUSY_SECONDS = 30.0

_TABLES = f"""
-- What the file system knows of itself: its identity, how often it was opened, where its blocks lie.
CREATE TABLE facts (name TEXT PRIMARY KEY, value BLOB NOT NULL) WITHOUT ROWID;

-- One row a file, directory, link or node. AUTOINCREMENT: a number is never given twice.
-- stored: the capacities of its blocks added up. used_ns: last opened or closed, for eviction.
-- parent: of a directory only. target: of a symbolic link only.
CREATE TABLE inodes (
    ino INTEGER PRIMARY KEY AUTOINCREMENT,
    mode INTEGER NOT NULL, nlink INTEGER NOT NULL, uid INTEGER NOT NULL, gid INTEGER NOT NULL,
    rdev INTEGER NOT NULL, size INTEGER NOT NULL, stored INTEGER NOT NULL, block_bytes INTEGER NOT NULL,
    atime_ns INTEGER NOT NULL, mtime_ns INTEGER NOT NULL, ctime_ns INTEGER NOT NULL,
    used_ns INTEGER NOT NULL, parent INTEGER, target BLOB);
CREATE INDEX inodes_unlinked ON inodes (ino) WHERE nlink = 0;
CREATE INDEX inodes_by_use ON inodes (used_ns) WHERE stored > 0;

-- One row a name. A name keeps its cookie for life, so a listing that is under way neither skips nor
-- repeats a name that was there all the time, whatever comes and goes around it.
CREATE TABLE entries (
    cookie INTEGER PRIMARY KEY AUTOINCREMENT,
    parent INTEGER NOT NULL, name BLOB NOT NULL, child INTEGER NOT NULL,
    UNIQUE (parent, name));
CREATE INDEX entries_in_order ON entries (parent, cookie);
CREATE INDEX entries_of_child ON entries (child);
INSERT INTO sqlite_sequence (name, seq) VALUES ('entries', {FIRST_COOKIE});

-- The current version of each block of a file. What lies past `length` in a block reads as zero, as does
-- a block that has no row.
CREATE TABLE blocks (
    ino INTEGER NOT NULL, position INTEGER NOT NULL,
    version INTEGER NOT NULL, capacity INTEGER NOT NULL, length INTEGER NOT NULL,
    PRIMARY KEY (ino, position)) WITHOUT ROWID;

-- Blocks to be deleted from the store. With writing = 1: announced before it is put, so that a block
-- whose writer died in between is found here by the next start.
CREATE TABLE doomed (
    seq INTEGER PRIMARY KEY AUTOINCREMENT,
    ino INTEGER NOT NULL, position INTEGER NOT NULL, version INTEGER NOT NULL,
    capacity INTEGER NOT NULL, writing INTEGER NOT NULL);

CREATE TABLE xattrs (
    ino INTEGER NOT NULL, name BLOB NOT NULL, value BLOB NOT NULL, PRIMARY KEY (ino, name)) WITHOUT ROWID;
"""

_TRIGGERS = (
    "CREATE TRIGGER one_more AFTER INSERT ON inodes "
    "BEGIN UPDATE facts SET value = value + 1 WHERE name = 'inodes'; END",
    "CREATE TRIGGER one_less AFTER DELETE ON inodes "
    "BEGIN UPDATE facts SET value = value - 1 WHERE name = 'inodes'; END",
)
"""statfs(2) and the bound on files ask for the number of inodes; counting them would take too long."""


class MetadataUnusable(G35Error):
    """The metadata file is not ours, is of another version, or cannot be opened. The operator's to mend."""

    def __init__(self, message: str, advice: str = "") -> None:
        doubt = "is the disk of agent.state full, or the file another program's? See g35 doctor"
        super().__init__(message, advice or doubt)

    @classmethod
    def of(cls, path: Path, fault: sqlite3.Error | FsError) -> "MetadataUnusable":
        """What SQLite or the disk says of the file at `path`."""
        if _means_full_disk(path, fault):
            return cls(f"{path}: the disk that has it is full", "make some room on it, and start again")
        return cls(f"{path}: {fault}")


def _means_full_disk(path: Path, fault: sqlite3.Error | FsError) -> bool:
    if isinstance(fault, FsError):
        return fault.errno == errno.ENOSPC
    code: int = getattr(fault, "sqlite_errorcode", 0) & 0xFF
    if code != sqlite3.SQLITE_IOERR:
        return code == sqlite3.SQLITE_FULL
    try:
        return os.statvfs(path.parent).f_bavail == 0  # no room for the shared memory beside the file
    except OSError:
        return False


@contextmanager
def whole_or_not(connection: sqlite3.Connection, kind: str = "IMMEDIATE") -> Iterator[None]:
    """One transaction: all of it when the block ends, nothing of it when it raises."""
    connection.execute(f"BEGIN {kind}")
    try:
        yield
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:  # SQLite has ended it by itself where the disk is full
            connection.execute("ROLLBACK")
        raise


class Database:
    """The metadata file. Any thread may call any method."""

    def __init__(self, path: Path, home: PoolOfNames | None = None) -> None:
        """`home`: where its blocks lie. Raises MetadataUnusable, and NamesElsewhere (metadata_pool.py)."""
        self.path = path
        self._lock = threading.Lock()
        self._idle: list[sqlite3.Connection] = []
        self._complaints = Complaints(log)
        try:
            self._writer = self._connect()
        except sqlite3.Error as fault:
            raise MetadataUnusable.of(path, fault) from fault
        try:
            self._prepare(home)
            # The number of this opening is part of each version that it gives out; were it lost with the
            # power, the next opening would give the same ones out again.
            self.sync()
        except (sqlite3.Error, FsError) as fault:
            self._writer.close()
            raise MetadataUnusable.of(path, fault) from fault
        except BaseException:
            self._writer.close()
            raise

    def _connect(self) -> sqlite3.Connection:
        connection = sqlite3.connect(
            self.path,
            timeout=BUSY_SECONDS,
            isolation_level=None,
            check_same_thread=False,
            cached_statements=128,
        )
        connection.execute("PRAGMA synchronous = NORMAL")
        connection.execute(f"PRAGMA cache_size = -{PAGE_CACHE_KIB}")
        return connection

    def _prepare(self, home: PoolOfNames | None) -> None:
        writer = self._writer
        version = writer.execute("PRAGMA user_version").fetchone()[0]
        if version not in (0, SCHEMA_VERSION):
            raise MetadataUnusable(f"{self.path} has schema {version}, this program reads {SCHEMA_VERSION}")
        if version == 0 and writer.execute("SELECT COUNT(*) FROM sqlite_master").fetchone()[0]:
            raise MetadataUnusable(f"{self.path} is a database of something else")
        mode = writer.execute("PRAGMA journal_mode = WAL").fetchone()[0]
        if mode != "wal":
            raise MetadataUnusable(f"{self.path}: the file system under it cannot hold a write-ahead log")
        writer.execute(f"PRAGMA journal_size_limit = {WAL_BYTES_KEPT}")
        with whole_or_not(writer, "EXCLUSIVE"):
            if version == 0:
                for statement in (*_TABLES.split(";"), *_TRIGGERS):
                    writer.execute(statement)
                identity = secrets.token_bytes(FILE_SYSTEM_ID_BYTES)
                facts = [("file_system_id", identity), ("openings", 0), ("inodes", 0)]
                writer.executemany("INSERT INTO facts VALUES (?, ?)", facts)
                writer.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
            if home is not None:
                settle_home(writer, self.path, home)
            writer.execute("UPDATE facts SET value = value + 1 WHERE name = 'openings'")
            known = dict(writer.execute("SELECT name, value FROM facts"))
        self.file_system_id: bytes = known["file_system_id"]
        self.opening: int = known["openings"]

    @contextmanager
    def transaction(self) -> Iterator[sqlite3.Connection]:
        """Change the metadata: all of it when the block ends, nothing of it when it raises.

        The lock is held meanwhile, so no steps may be run inside. Trouble of SQLite's own is an
        `FsError`: ENOSPC where the disk under it is full, EIO otherwise.
        """
        with self._lock:
            try:
                with whole_or_not(self._writer):
                    yield self._writer
            except sqlite3.Error as fault:
                raise self._refusal(fault) from fault

    def query(self, statement: str, *arguments: object) -> list[Any]:
        """The rows of one SELECT, as of the last commit."""
        try:
            connection = self._idle.pop()
        except IndexError:
            connection = self._connect_reader()
        try:
            return connection.execute(statement, arguments).fetchall()
        except sqlite3.Error as fault:
            raise self._refusal(fault) from fault
        finally:
            # As many readers as threads ever asked at once; list operations are atomic.
            self._idle.append(connection)

    def each(self, statement: str) -> Iterator[Any]:
        """The rows of a long answer one by one, all as of one moment."""
        connection = self._connect_reader()
        try:
            yield from connection.execute(statement)
        except sqlite3.Error as fault:
            raise self._refusal(fault) from fault
        finally:
            connection.close()

    def _connect_reader(self) -> sqlite3.Connection:
        try:
            connection = self._connect()
            connection.execute("PRAGMA query_only = 1")
        except sqlite3.Error as fault:
            raise self._refusal(fault) from fault
        return connection

    def _refusal(self, fault: sqlite3.Error) -> FsError:
        code: int = getattr(fault, "sqlite_errorcode", 0) & 0xFF
        self._complaints.world("metadata of /fs", str(fault), logging.ERROR)
        return FsError(errno.ENOSPC if code == sqlite3.SQLITE_FULL else errno.EIO, f"metadata: {fault}")

    def sync(self) -> None:
        """Everything committed before is durable on this machine's disk (see the module docstring)."""
        try:
            # SQLite takes no POSIX locks on the WAL itself, so that closing it here drops none.
            descriptor = os.open(f"{self.path}-wal", os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return
        try:
            os.fsync(descriptor)
        except OSError as fault:
            raise FsError(fault.errno or errno.EIO, f"fsync of the metadata log: {fault}") from fault
        finally:
            os.close(descriptor)

    def close(self) -> None:
        """Close every connection; the last one moves the log into the database file."""
        while self._idle:
            self._idle.pop().close()
        with self._lock:
            self._writer.close()


def in_int64(value: int) -> int:
    """`value` cut to what a column of SQLite can hold; only absurd times are out of its range."""
    return max(-(1 << 63), min(value, (1 << 63) - 1))


def marks(values: Sequence[object]) -> str:
    return ",".join("?" * len(values))
