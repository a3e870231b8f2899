"""The objects of a tenant by bucket and key, and the files of their bytes: one SQLite file.

The bytes of an object are one file of the tenant's file system (agent/s3/store.py), or one for each part of a
multipart upload; completing an upload moves no byte. An object becomes visible, or is replaced, in the one
transaction that names its files. A file that no object names is in `spare` from before it is made until after
it is gone; the next opening removes leftovers of a process that died.

Keys are bytes, and SQLite's order of blobs is S3's order of keys, so a listing is a walk along the primary
key; with a delimiter it skips from one common prefix to the next.
"""
# One idea in one file: the tables and every statement on them, most of which one class has under one lock.

import json
import sqlite3
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple

from agent.errors import G35Error
from agent.fs.files.metadata_database import whole_or_not
from agent.http.gil_yield import with_rests
from agent.s3.errors import S3Error

SCHEMA_VERSION: Final = 1
BUCKETS_MAX: Final = 100
UPLOADS_MAX: Final = 1000
PARTS_MAX: Final = 10_000
COMPLETED_MAX: Final = 1000
"""Remembered completions of uploads, for clients whose answer was lost and who ask again."""
WAL_BYTES_KEPT: Final = 64 << 20
NAMES_BYTES: Final = 2 << 30
"""The default bound of an index on disk: some 4 million objects of the usual kind."""
_ROWS_MAX: Final = 64
"""Read at once from a listing with a delimiter, of which a common prefix skips the rest."""

_TABLES: Final = """
CREATE TABLE facts (name TEXT PRIMARY KEY, value INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE buckets (name TEXT PRIMARY KEY, made_ns INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE objects (
    bucket TEXT NOT NULL, key BLOB NOT NULL, id INTEGER NOT NULL, size INTEGER NOT NULL, etag TEXT NOT NULL,
    changed_ns INTEGER NOT NULL, extra TEXT NOT NULL, PRIMARY KEY (bucket, key)) WITHOUT ROWID;
CREATE TABLE pieces (
    id INTEGER NOT NULL, position INTEGER NOT NULL, file TEXT NOT NULL, size INTEGER NOT NULL,
    PRIMARY KEY (id, position)) WITHOUT ROWID;
CREATE TABLE uploads (
    name TEXT PRIMARY KEY, bucket TEXT NOT NULL, key BLOB NOT NULL, made_ns INTEGER NOT NULL,
    extra TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE parts (
    upload TEXT NOT NULL, number INTEGER NOT NULL, file TEXT NOT NULL, size INTEGER NOT NULL,
    etag TEXT NOT NULL, changed_ns INTEGER NOT NULL, checksum TEXT NOT NULL,
    PRIMARY KEY (upload, number)) WITHOUT ROWID;
CREATE TABLE spare (file TEXT PRIMARY KEY) WITHOUT ROWID
"""
_FOUND_WITH_PIECE: Final = """
SELECT o.key, o.size, o.etag, o.changed_ns, o.id, o.extra, p.file, p.size
FROM objects AS o LEFT JOIN pieces AS p ON p.id = o.id WHERE o.bucket = ? AND o.key = ? LIMIT 2
"""
_COMPLETED: Final = """
CREATE TABLE IF NOT EXISTS completed (
    upload TEXT PRIMARY KEY, bucket TEXT NOT NULL, key BLOB NOT NULL, etag TEXT NOT NULL,
    checksum TEXT NOT NULL, done_ns INTEGER NOT NULL) WITHOUT ROWID
"""
"""A later table. The version stays, because older programs read all else as it is."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A file that holds a part of an object."""

    file: str
    size: int


@dataclass(frozen=True, slots=True)
class StoredObject:
    """An object, without its bytes. `headers` are its writer's, returned to readers."""

    key: str
    size: int
    etag: str
    changed_ns: int
    id: int = 0
    headers: Mapping[str, str] = field(default_factory=dict)
    checksum: str = ""


@dataclass(frozen=True, slots=True)
class Part:
    number: int
    piece: Piece
    etag: str
    changed_ns: int
    checksum: str


@dataclass(frozen=True, slots=True)
class Upload:
    name: str
    key: str
    made_ns: int
    headers: Mapping[str, str]
    algorithm: str = ""
    """The announced checksum of its parts, if any."""


class ListedObject(NamedTuple):
    key: str
    size: int
    etag: str
    changed_ns: int


@dataclass(slots=True)
class Listing:
    """A page of a bucket, in order. `after`: the beginning of the next page; empty at the end."""

    objects: list[ListedObject] = field(default_factory=list)
    prefixes: list[str] = field(default_factory=list)
    after: str = ""


class Index:
    """Safe from any thread; each method is one short transaction."""

    def __init__(self, path: Path, bytes_max: int = NAMES_BYTES) -> None:
        """`bytes_max`: beyond it nothing new is taken; objects may be removed."""
        self._lock = threading.Lock()
        self._bytes_max = bytes_max
        try:
            self._connection = sqlite3.connect(
                path, isolation_level=None, check_same_thread=False, timeout=30
            )
            self._prepare(path)
        except sqlite3.Error as fault:
            raise G35Error(f"{path}: {fault}", "is the disk of agent.state full?") from fault

    def _prepare(self, path: Path) -> None:
        run = self._connection.execute
        version = run("PRAGMA user_version").fetchone()[0]
        if version not in (0, SCHEMA_VERSION):
            raise G35Error(
                f"{path} has schema {version}, this program reads {SCHEMA_VERSION}",
                "run the version of g35 that wrote it, or move the file away: its objects are lost then",
            )
        run("PRAGMA journal_mode = WAL")
        # As with /fs: a killed process loses nothing committed (agent/fs/files/metadata_database.py).
        run("PRAGMA synchronous = NORMAL")
        run(f"PRAGMA journal_size_limit = {WAL_BYTES_KEPT}")
        with whole_or_not(self._connection, "EXCLUSIVE"):
            if version == 0:
                for statement in _TABLES.split(";"):
                    run(statement)
                run("INSERT INTO facts VALUES ('openings', 0), ('objects', 0)")
                run(f"PRAGMA user_version = {SCHEMA_VERSION}")
            run(_COMPLETED)
            run("UPDATE facts SET value = value + 1 WHERE name = 'openings'")
        self.opening: int = run("SELECT value FROM facts WHERE name = 'openings'").fetchone()[0]

    def close(self) -> None:
        with self._lock:
            self._connection.close()

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        with self._lock:
            try:
                with whole_or_not(self._connection):
                    yield self._connection
            except sqlite3.Error as fault:
                raise S3Error("ServiceUnavailable", f"The index cannot be written: {fault}.") from fault

    def _ask(self, statement: str, *arguments: object) -> list[Any]:
        with self._lock:
            return self._connection.execute(statement, arguments).fetchall()

    def buckets(self) -> list[tuple[str, int]]:
        """Names and times of creation (nanoseconds)."""
        return self._ask("SELECT name, made_ns FROM buckets ORDER BY name")

    def check_bucket(self, name: str) -> None:
        """Raises S3Error where the tenant has no such bucket."""
        if not self._ask("SELECT 1 FROM buckets WHERE name = ?", name):
            raise _no_bucket()

    def make_bucket(self, name: str, now_ns: int) -> bool:
        """False where it was there. Raises S3Error."""
        with self._transaction() as tx:
            if tx.execute("SELECT 1 FROM buckets WHERE name = ?", (name,)).fetchone():
                return False
            if tx.execute("SELECT COUNT(*) FROM buckets").fetchone()[0] >= BUCKETS_MAX:
                raise S3Error("TooManyBuckets", f"A tenant has {BUCKETS_MAX} buckets at the most.")
            tx.execute("INSERT INTO buckets VALUES (?, ?)", (name, now_ns))
            return True

    def remove_bucket(self, name: str) -> None:
        with self._transaction() as tx:
            _bucket_within(tx, name)
            for table in ("objects", "uploads"):
                if tx.execute(f"SELECT 1 FROM {table} WHERE bucket = ? LIMIT 1", (name,)).fetchone():
                    raise S3Error("BucketNotEmpty", "The bucket has objects, or uploads under way.")
            tx.execute("DELETE FROM completed WHERE bucket = ?", (name,))
            tx.execute("DELETE FROM buckets WHERE name = ?", (name,))

    def count(self) -> int:
        """Number of objects."""
        return int(self._ask("SELECT value FROM facts WHERE name = 'objects'")[0][0])

    def find(self, bucket: str, key: str) -> StoredObject:
        """Raises S3Error."""
        rows = self._ask(
            "SELECT key, size, etag, changed_ns, id, extra FROM objects WHERE bucket = ? AND key = ?",
            bucket,
            key.encode(),
        )
        if not rows:
            self.check_bucket(bucket)
            raise S3Error("NoSuchKey", "There is no such object.")
        return _object(rows[0])

    def find_and_hold(
        self, bucket: str, key: str, hold: Callable[[list[Piece]], None]
    ) -> tuple[StoredObject, list[Piece]]:
        """As `find`. Where the object is one file, as most are, `hold` gets it as in `pieces`; none where it
        is several. Raises S3Error."""
        with self._lock:
            rows = self._connection.execute(_FOUND_WITH_PIECE, (bucket, key.encode())).fetchall()
            held = [Piece(*row[6:]) for row in rows if row[6] is not None]
            if len(held) != 1 or held[0].size != rows[0][1]:
                held = []
            hold(held)
        if not rows:
            self.check_bucket(bucket)
            raise S3Error("NoSuchKey", "There is no such object.")
        return _object(rows[0][:6]), held

    def pieces(self, found: StoredObject, hold: Callable[[list[Piece]], None] | None = None) -> list[Piece]:
        """The files of an object, in order; none where it was replaced or removed meanwhile.

        `hold` gets them while nobody can remove the object: its remover comes after it.
        """
        with self._lock:
            statement = "SELECT file, size FROM pieces WHERE id = ? ORDER BY position"
            pieces = [Piece(*row) for row in self._connection.execute(statement, (found.id,))]
            if hold is not None:
                hold(pieces)
            return pieces

    def put(
        self, bucket: str, new: StoredObject, pieces: Sequence[Piece], *, only_new: bool = False
    ) -> list[str]:
        """Make an object visible, or replace one; the files that become spare. Raises S3Error."""
        with self._transaction() as tx:
            return _put_within(tx, bucket, new, pieces, only_new)

    def replace(self, bucket: str, found: StoredObject, new: StoredObject, piece: Piece) -> list[str] | None:
        """As `put`. None where bytes or headers are no longer as they were found."""
        with self._transaction() as tx:
            where = "bucket = ? AND key = ? AND id = ? AND extra = ?"
            row = (bucket, found.key.encode(), found.id, _extra(found))
            if not tx.execute(f"SELECT 1 FROM objects WHERE {where}", row).fetchone():
                return None
            return _put_within(tx, bucket, new, [piece], False)

    def describe(self, bucket: str, new: StoredObject) -> bool:
        """Renew headers and time of an object. False where it was replaced or removed. Raises S3Error."""
        with self._transaction() as tx:
            self._check_room(tx)
            where = "bucket = ? AND key = ? AND id = ?"
            row = (new.changed_ns, _extra(new), bucket, new.key.encode(), new.id)
            return bool(
                tx.execute(f"UPDATE objects SET changed_ns = ?, extra = ? WHERE {where}", row).rowcount
            )

    def remove(self, bucket: str, key: str, *, only_id: int | None = None) -> list[str]:
        """Remove an object, if it is there; the files that become spare."""
        with self._transaction() as tx:
            _bucket_within(tx, bucket)
            return _remove_within(tx, bucket, key.encode(), only_id)

    def list_page(self, bucket: str, prefix: str, delimiter: str, after: str, most: int) -> Listing:
        """Up to `most` objects and common prefixes after `after`, which may be a common prefix itself."""
        self.check_bucket(bucket)
        page, start, end = Listing(), prefix.encode(), _past(prefix.encode())
        last = after.encode()
        if delimiter and last.startswith(start):
            # A common prefix of an earlier page is past with all its keys.
            at = last.find(delimiter.encode(), len(start))
            if at >= 0 and at + len(delimiter.encode()) == len(last):
                start, last = _past(last) or b"\xff" * 8, b""
        read = _ROWS_MAX
        while True:
            wanted = most + 1 - len(page.objects) - len(page.prefixes)
            if delimiter:
                wanted = min(wanted, read)
            rows = self._rows(bucket, start, last, end, wanted)
            for row in rows:
                at = -1 if not delimiter else row[0].find(delimiter.encode(), len(prefix.encode()))
                if len(page.objects) + len(page.prefixes) == most:
                    return page
                if at < 0:
                    page.objects.append(ListedObject(row[0].decode(), *row[1:]))
                    page.after = row[0].decode()
                    last = row[0]
                    continue
                common = row[0][: at + len(delimiter.encode())]
                page.prefixes.append(common.decode())
                page.after = common.decode()
                start, last = _past(common) or b"\xff" * 8, b""
                # The rows behind it were read in vain, and the next one may begin another prefix.
                read = 2
                break
            else:
                if len(rows) < wanted:
                    page.after = ""
                    return page
                read = min(read * 4, _ROWS_MAX)

    def _rows(self, bucket: str, start: bytes, after: bytes, end: bytes | None, most: int) -> list[Any]:
        # One lower bound: of two, SQLite seeks the first and reads all rows up to the other.
        where, arguments = "bucket = ? AND key > ?", [bucket, after]
        if after < start:
            where, arguments = "bucket = ? AND key >= ?", [bucket, start]
        if end is not None:
            where, arguments = where + " AND key < ?", [*arguments, end]
        statement = f"SELECT key, size, etag, changed_ns FROM objects WHERE {where} ORDER BY key LIMIT ?"
        return self._ask(statement, *arguments, most)

    def begin_upload(self, bucket: str, new: Upload) -> None:
        with self._transaction() as tx:
            _bucket_within(tx, bucket)
            self._check_room(tx)
            if tx.execute("SELECT COUNT(*) FROM uploads").fetchone()[0] >= UPLOADS_MAX:
                raise S3Error("SlowDown", f"There are {UPLOADS_MAX} uploads under way already.")
            extra = json.dumps({"headers": dict(new.headers), "algorithm": new.algorithm})
            row = (new.name, bucket, new.key.encode(), new.made_ns, extra)
            tx.execute("INSERT INTO uploads VALUES (?, ?, ?, ?, ?)", row)

    def upload(self, bucket: str, key: str, name: str) -> Upload:
        """Raises S3Error."""
        rows = self._ask(
            "SELECT name, key, made_ns, extra FROM uploads WHERE name = ? AND bucket = ? AND key = ?",
            name, bucket, key.encode(),
        )  # fmt: skip
        if not rows:
            raise _no_upload()
        return _upload(rows[0])

    def uploads(
        self, bucket: str, prefix: str = "", after: str = "", name: str = "", most: int = UPLOADS_MAX
    ) -> list[Upload]:
        """Up to `most`, by key and name, behind the upload `name` of the key `after`, or behind that key."""
        self.check_bucket(bucket)
        start, end, last = prefix.encode(), _past(prefix.encode()), after.encode()
        where = "bucket = ? AND key >= ? AND (key > ? OR (? AND key = ? AND name > ?))"
        arguments: list[object] = [bucket, start, last, bool(name), last, name]
        if end is not None:
            where, arguments = where + " AND key < ?", [*arguments, end]
        columns = "name, key, made_ns, extra"
        statement = f"SELECT {columns} FROM uploads WHERE {where} ORDER BY key, name LIMIT ?"
        return [_upload(row) for row in self._ask(statement, *arguments, most)]

    def old_uploads(self, before_ns: int) -> list[str]:
        """Names of those that were begun before."""
        return [row[0] for row in self._ask("SELECT name FROM uploads WHERE made_ns < ?", before_ns)]

    def put_part(self, upload: str, part: Part) -> list[str]:
        """Keep a part, or replace one; the files that become spare. Raises S3Error."""
        with self._transaction() as tx:
            if not tx.execute("SELECT 1 FROM uploads WHERE name = ?", (upload,)).fetchone():
                raise _no_upload()
            where = (upload, part.number)
            old = tx.execute("SELECT file FROM parts WHERE upload = ? AND number = ?", where).fetchall()
            row = (*where, part.piece.file, part.piece.size, part.etag, part.changed_ns, part.checksum)
            tx.execute("INSERT OR REPLACE INTO parts VALUES (?, ?, ?, ?, ?, ?, ?)", row)
            tx.execute("DELETE FROM spare WHERE file = ?", (part.piece.file,))
            return _spare_within(tx, [file for (file,) in old])

    def parts(self, upload: str, after: int = 0, most: int = PARTS_MAX) -> list[Part]:
        """Up to `most`, in order, behind the number `after`."""
        columns = "number, file, size, etag, changed_ns, checksum"
        where = "upload = ? AND number > ? ORDER BY number LIMIT ?"
        rows = self._ask(f"SELECT {columns} FROM parts WHERE {where}", upload, after, most)
        return [Part(row[0], Piece(row[1], row[2]), *row[3:]) for row in rows]

    def complete_upload(
        self, bucket: str, upload: str, new: StoredObject, parts: Sequence[Part], *, only_new: bool = False
    ) -> list[str]:
        """Make the parts an object, if they are still there; the files that become spare. Raises S3Error."""
        with self._transaction() as tx:
            rows = tx.execute("SELECT file FROM parts WHERE upload = ?", (upload,))
            files = {file for (file,) in with_rests(rows)}
            used = [part.piece for part in parts]
            if not files.issuperset(piece.file for piece in used):
                raise S3Error("InvalidPart", "A part was replaced, or the upload has ended, meanwhile.")
            tx.execute("DELETE FROM parts WHERE upload = ?", (upload,))
            tx.execute("DELETE FROM uploads WHERE name = ?", (upload,))
            old = _put_within(tx, bucket, new, used, only_new)
            row = (upload, bucket, new.key.encode(), new.etag, new.checksum, new.changed_ns)
            tx.execute("INSERT OR REPLACE INTO completed VALUES (?, ?, ?, ?, ?, ?)", row)
            oldest = "SELECT upload FROM completed ORDER BY done_ns DESC LIMIT -1 OFFSET ?"
            tx.execute(f"DELETE FROM completed WHERE upload IN ({oldest})", (COMPLETED_MAX,))
            return old + _spare_within(tx, sorted(files - {piece.file for piece in used}))

    def completed(self, bucket: str, key: str, upload: str) -> tuple[str, str] | None:
        """ETag and checksum of a completed upload, while it is remembered."""
        statement = "SELECT etag, checksum FROM completed WHERE upload = ? AND bucket = ? AND key = ?"
        rows = self._ask(statement, upload, bucket, key.encode())
        return (rows[0][0], rows[0][1]) if rows else None

    def abort_upload(self, upload: str) -> list[str]:
        """Remove an upload; the files that become spare. Raises S3Error."""
        with self._transaction() as tx:
            if not tx.execute("DELETE FROM uploads WHERE name = ?", (upload,)).rowcount:
                raise _no_upload()
            rows = tx.execute("SELECT file FROM parts WHERE upload = ?", (upload,)).fetchall()
            tx.execute("DELETE FROM parts WHERE upload = ?", (upload,))
            return _spare_within(tx, [file for (file,) in rows])

    def _check_room(self, tx: sqlite3.Connection) -> None:
        """Raises S3Error where the index is full. Writes after the check are bounded by the bodies under
        way."""
        count, free, size = (
            tx.execute(f"PRAGMA {name}").fetchone()[0]
            for name in ("page_count", "freelist_count", "page_size")
        )
        if (count - free) * size > self._bytes_max:
            raise S3Error("InsufficientStorage", "The names of this tenant take all the room that they may.")

    def announce(self, file: str) -> None:
        """Note a file before it is made. Raises S3Error, also where the index has no room for its name."""
        with self._transaction() as tx:
            self._check_room(tx)
            _spare_within(tx, [file])

    def spare(self, most: int, after: str = "") -> list[str]:
        """Files that no object names, in order, after `after`; files being written among them."""
        return [
            row[0]
            for row in self._ask("SELECT file FROM spare WHERE file > ? ORDER BY file LIMIT ?", after, most)
        ]

    def forget(self, file: str) -> None:
        with self._transaction() as tx:
            tx.execute("DELETE FROM spare WHERE file = ?", (file,))


def _put_within(
    tx: sqlite3.Connection, bucket: str, new: StoredObject, pieces: Sequence[Piece], only_new: bool
) -> list[str]:
    _bucket_within(tx, bucket)
    key = new.key.encode()
    if (
        only_new
        and tx.execute("SELECT 1 FROM objects WHERE bucket = ? AND key = ?", (bucket, key)).fetchone()
    ):
        raise S3Error("PreconditionFailed", "There is such an object already.")
    old = _remove_within(tx, bucket, key, None)
    tx.execute("UPDATE facts SET value = value + 1 WHERE name = 'objects'")
    tx.execute("INSERT OR IGNORE INTO facts VALUES ('last_id', 0)")
    tx.execute("UPDATE facts SET value = value + 1 WHERE name = 'last_id'")
    [number] = tx.execute("SELECT value FROM facts WHERE name = 'last_id'").fetchone()
    row = (bucket, key, number, new.size, new.etag, new.changed_ns, _extra(new))
    tx.execute("INSERT INTO objects VALUES (?, ?, ?, ?, ?, ?, ?)", row)
    rows = ((number, position, piece.file, piece.size) for position, piece in enumerate(pieces))
    tx.executemany("INSERT INTO pieces VALUES (?, ?, ?, ?)", with_rests(rows))
    tx.executemany("DELETE FROM spare WHERE file = ?", with_rests((piece.file,) for piece in pieces))
    return old


def _remove_within(tx: sqlite3.Connection, bucket: str, key: bytes, only_id: int | None) -> list[str]:
    row = tx.execute("SELECT id FROM objects WHERE bucket = ? AND key = ?", (bucket, key)).fetchone()
    if row is None or only_id not in (None, row[0]):
        return []
    tx.execute("DELETE FROM objects WHERE bucket = ? AND key = ?", (bucket, key))
    tx.execute("UPDATE facts SET value = value - 1 WHERE name = 'objects'")
    files = [file for (file,) in tx.execute("SELECT file FROM pieces WHERE id = ?", (row[0],)).fetchall()]
    tx.execute("DELETE FROM pieces WHERE id = ?", (row[0],))
    return _spare_within(tx, files)


def _spare_within(tx: sqlite3.Connection, files: list[str]) -> list[str]:
    tx.executemany("INSERT OR IGNORE INTO spare VALUES (?)", with_rests((file,) for file in files))
    return files


def _bucket_within(tx: sqlite3.Connection, name: str) -> None:
    if not tx.execute("SELECT 1 FROM buckets WHERE name = ?", (name,)).fetchone():
        raise _no_bucket()


def _extra(new: StoredObject) -> str:
    return json.dumps({"headers": dict(new.headers), "checksum": new.checksum})


def _object(row: Sequence[Any]) -> StoredObject:
    key, size, etag, changed_ns, number, text = row
    extra = json.loads(text)
    return StoredObject(key.decode(), size, etag, changed_ns, number, extra["headers"], extra["checksum"])


def _upload(row: Sequence[Any]) -> Upload:
    extra = json.loads(row[3])
    return Upload(row[0], row[1].decode(), row[2], extra["headers"], extra.get("algorithm", ""))


def _past(prefix: bytes) -> bytes | None:
    """The first key after all that begin with `prefix`; None where there is no end."""
    trimmed = prefix.rstrip(b"\xff")
    return trimmed[:-1] + bytes([trimmed[-1] + 1]) if trimmed else None


def _no_bucket() -> S3Error:
    return S3Error("NoSuchBucket", "There is no such bucket.")


def _no_upload() -> S3Error:
    return S3Error("NoSuchUpload", "There is no such upload.")
