"""Extended attributes of /fs, and the metadata file: foreign, of another version, on a full disk."""

from __future__ import annotations

import errno
import os
import sqlite3
from pathlib import Path
from types import SimpleNamespace

import pytest

from agent.errors import Fault
from agent.fs.files import inodes, metadata_database
from agent.fs.files.metadata_database import MetadataUnusable
from agent.fs.files.metadata_pool import PoolOfNames
from agent.fs.files.options import FilesOptions
from agent.fs.interface import FsError
from tests.unit.files.conftest import BLOCK, World, refused

# Extended attributes.


def test_extended_attributes(world: World) -> None:
    calls = world.calls
    calls.put("file", b"")
    refused(errno.ENODATA, lambda: calls.getxattr("file", "user.a"))
    calls.setxattr("file", "user.a", b"one", 1)
    refused(errno.EEXIST, lambda: calls.setxattr("file", "user.a", b"two", 1))
    calls.setxattr("file", "user.a", b"two", 2)
    refused(errno.ENODATA, lambda: calls.setxattr("file", "user.b", b"", 2))
    calls.setxattr("file", "user.b", b"", 0)
    assert calls.getxattr("file", "user.a") == b"two"
    assert calls.listxattr("file") == ["user.a", "user.b"]
    calls.removexattr("file", "user.a")
    refused(errno.ENODATA, lambda: calls.removexattr("file", "user.a"))
    assert calls.listxattr("file") == ["user.b"]
    world.restart()
    assert world.calls.getxattr("file", "user.b") == b""


def test_extended_attributes_are_bounded(world: World) -> None:
    calls = world.calls
    calls.put("file", b"")
    refused(errno.E2BIG, lambda: calls.setxattr("file", "user.a", b"x" * 65537, 0))
    refused(errno.ERANGE, lambda: calls.setxattr("file", "user." + "x" * 251, b"", 0))
    refused(errno.EOPNOTSUPP, lambda: calls.setxattr("file", "system.posix_acl_access", b"", 0))
    refused(errno.EOPNOTSUPP, lambda: calls.getxattr("file", "other"))
    refused(errno.EINVAL, lambda: calls.setxattr("file", "user.", b"", 0))
    refused(errno.EINVAL, lambda: calls.setxattr("file", "user.a", b"", 3))
    for number in range(16):
        calls.setxattr("file", f"user.{number}", b"x" * 65536, 0)
    refused(errno.ENOSPC, lambda: calls.setxattr("file", "user.more", b"x", 0))
    calls.setxattr("file", "user.1", b"", 0)
    calls.setxattr("file", "user.more", b"x", 0)


# The metadata file and the options.


def test_a_file_that_is_not_ours_is_refused(world: World) -> None:
    world.face.close()
    world.metadata.write_bytes(b"not a database at all, and long enough to be looked at" * 100)
    with pytest.raises(MetadataUnusable):
        world.start()


def test_a_metadata_file_of_a_later_version_is_refused(world: World) -> None:
    with world.face._database.transaction() as tx:
        tx.execute("PRAGMA user_version = 99")
    world.face.close()
    with pytest.raises(MetadataUnusable, match="schema 99"):
        world.start()


def test_a_full_disk_is_the_worlds_fault(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """At the WAL's fsync, in SQLite, and once the metadata are open."""
    world.face.close()

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def no_room(*_: object) -> None:
        raise sqlite3.OperationalError("disk I/O error")

    for where, what, failing in (
        (os, "fsync", full),
        (metadata_database.Database, "_prepare", no_room),
        (inodes, "ensure_root", lambda *_: full_refusal()),
    ):
        with monkeypatch.context() as patched:
            patched.setattr(where, what, failing)
            with pytest.raises(MetadataUnusable) as told:
                world.start()
        assert told.value.fault is Fault.WORLD
        assert "full" in f"{told.value}; {told.value.advice}"
    world.start()


@pytest.mark.parametrize("of_sqlite", [sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR_SHMSIZE])
def test_a_full_disk_is_named_where_sqlite_has_ended_the_transaction(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, of_sqlite: int
) -> None:
    def full(writer: sqlite3.Connection, *_: object) -> None:
        writer.execute("ROLLBACK")
        error = sqlite3.OperationalError("database or disk is full")
        error.sqlite_errorcode = of_sqlite
        raise error

    monkeypatch.setattr(metadata_database, "settle_home", full)
    monkeypatch.setattr(os, "statvfs", lambda _: SimpleNamespace(f_bavail=0))
    file = tmp_path / "files.sqlite"
    with pytest.raises(MetadataUnusable) as told:
        metadata_database.Database(file, PoolOfNames("aa" * 16))
    assert str(told.value) == f"{file}: the disk that has it is full"
    assert "make some room" in told.value.advice


def full_refusal() -> None:
    raise FsError(errno.ENOSPC, "no room")


def test_impossible_options_are_refused(world: World) -> None:
    with pytest.raises(ValueError, match="none of the capacities"):
        FilesOptions(block_bytes=4096).block_bytes_for((512, 8192))
    with pytest.raises(ValueError, match="ascend"):
        FilesOptions().block_bytes_for((8192, 512))
    with pytest.raises(ValueError, match="two blocks"):
        world.restart(staging_bytes=BLOCK)
    assert FilesOptions().block_bytes_for((1 << 16, 1 << 20, 1 << 22, 1 << 24)) == 1 << 22
    assert FilesOptions().block_bytes_for((1 << 24,)) == 1 << 24


@pytest.mark.expects_log("database or disk is full")
def test_a_full_disk_under_the_metadata_is_enospc(world: World) -> None:
    with world.face._database.transaction() as tx:
        [(pages,)] = tx.execute("PRAGMA page_count")
    world.face._database._writer.execute(f"PRAGMA max_page_count = {pages + 2}")
    made = 0

    def make_many() -> None:
        nonlocal made
        while made < 10_000:
            world.calls.mkdir(f"directory-{made}" * 10)
            made += 1

    refused(errno.ENOSPC, make_many)
    assert len(world.calls.listdir("")) == made
    world.face._database._writer.execute("PRAGMA max_page_count = 1000000")
    world.calls.mkdir("again")
