"""Whose blocks a metadata file names: the pool that they lie in, and the volume of each capacity.

Names that meet another pool (a wrong port, or what discovery lists while the right enclosure is away) find
none of their blocks, and each file would be taken for lost and removed. So a metadata file notes its pool
while it holds nothing, and from then on is opened with that pool only. It notes the volumes because a pool
may have several of one capacity.
"""

import json
import sqlite3
from collections.abc import Mapping
from contextlib import closing
from dataclasses import asdict, dataclass, field
from pathlib import Path

from agent.errors import G35Error

FACT = "home"


@dataclass(frozen=True, slots=True)
class PoolOfNames:
    """A pool, and of its volumes the id (hex) by the capacity of their slots, in bytes."""

    pool_id: str = ""
    volumes: Mapping[int, str] = field(default_factory=dict)

    @classmethod
    def of(cls, note: object) -> "PoolOfNames":
        """Read a note. A damaged note names no pool at all."""
        try:
            noted = json.loads(str(note))
            volumes = {int(size): str(volume) for size, volume in noted["volumes"].items()}
            return cls(str(noted["pool_id"]), volumes)
        except (ValueError, TypeError, KeyError, AttributeError):
            return cls()


class NamesElsewhere(G35Error):
    """The blocks that a metadata file names lie in another pool than the one that is there, or in a volume
    that was erased. No name of it was touched."""

    def __init__(self, message: str) -> None:
        super().__init__(
            message,
            "bring back what is missing and start again; where it is gone for good, remove this file and "
            "what is named after it (-wal, -shm): then the files are gone as well",
        )


def noted_home(path: Path) -> PoolOfNames:
    """What a metadata file notes; nothing where there is none, or it cannot be read."""
    if not path.exists():
        return PoolOfNames()
    try:
        with closing(sqlite3.connect(path)) as connection:
            return _noted(connection)
    except sqlite3.Error:
        return PoolOfNames()


def names_another(path: Path, pool_id: str) -> bool:
    """Whether a metadata file names something in another pool than this one, as far as it can be read."""
    noted = noted_home(path)
    if noted.pool_id in ("", pool_id):
        return False
    with closing(sqlite3.connect(path)) as connection:
        return _holds_anything(connection)


def settle_home(writer: sqlite3.Connection, path: Path, home: PoolOfNames) -> None:
    """In a transaction: note where the blocks lie. NamesElsewhere where named blocks lie elsewhere or
    unknown."""
    noted = _noted(writer)
    if noted.pool_id != home.pool_id:
        if _holds_anything(writer):
            where = f"pool {noted.pool_id}" if noted.pool_id else "a pool that it does not note"
            raise NamesElsewhere(f"{path} names blocks of {where}, and this is pool {home.pool_id}")
        noted = PoolOfNames(home.pool_id)
    # A volume that is not there now was erased. Its blocks are gone for good, and are met as lost.
    volumes = {**noted.volumes, **home.volumes}
    note = json.dumps(asdict(PoolOfNames(home.pool_id, volumes)), sort_keys=True)
    writer.execute("INSERT OR REPLACE INTO facts VALUES (?, ?)", (FACT, note))


def _noted(connection: sqlite3.Connection) -> PoolOfNames:
    row = connection.execute("SELECT value FROM facts WHERE name = ?", (FACT,)).fetchone()
    return PoolOfNames() if row is None else PoolOfNames.of(row[0])


def _holds_anything(connection: sqlite3.Connection) -> bool:
    """Whether it names a file or folder below its root, or a block that is to be deleted."""
    tables = ("entries", "blocks", "doomed")
    return any(connection.execute(f"SELECT 1 FROM {each} LIMIT 1").fetchone() for each in tables)
