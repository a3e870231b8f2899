"""`/shared` in a guest: a close that nobody can judge, and an agent that was killed and starts again."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import cast

import pytest

from agent.fs.close_cause import how_closed
from agent.fs.fuse.abi import InitFlag
from agent.fs.fuse.session import Negotiated
from agent.fs.interface import Caller, FileSystem, FsError, LockOwner
from agent.fs.shared.face import SharedFace
from agent.fs.shared.nodes import SHARED_ROOT
from agent.fs.virtiofs.guest_books import GuestBooks
from agent.fs.virtiofs.guest_view import GuestView
from agent.pool.steps import Outcome, settle
from tests.support.fs.memory_shared import CHUNK, Files, SharedPool

CALLER = Caller(0, 0, 4711)
HOLDER = LockOwner(11, 4711)
DATA = bytes(range(256)) * (3 * CHUNK // 256)


class Guest:
    """A guest's view of an agent's face, which judges closes as an agent does."""

    def __init__(self, files: Files, books: Path) -> None:
        self.files = files
        self.books = GuestBooks(books)
        if self.books.negotiated is None:
            self.books.agreed(Negotiated(38, InitFlag.MAX_PAGES, 1 << 20))
        self.face = SharedFace(
            [files.volume], files.channel.current, files.discards, epoch=self.books.epoch, judge=how_closed
        )
        self.view = GuestView(cast(FileSystem, self.face), self.books, "guest-0")

    def run(self, outcome: Outcome[object]) -> object:
        return settle(outcome, self.files.channel)

    def lookup(self, parent: int, name: bytes) -> int:
        return settle(self.view.lookup(CALLER, parent, name), self.files.channel).attributes.ino

    def walk(self, path: str) -> int:
        node = SHARED_ROOT
        self.books.told(node, 1, b"")
        for name in path.encode().split(b"/"):
            node = self.lookup(node, name)
        return node

    def write(self, folder: int, name: bytes, data: bytes) -> None:
        """As cp does: create, write, close."""
        entry, opened = settle(self.view.create(CALLER, folder, name, 0o644, os.O_WRONLY), self.files.channel)
        file = entry.attributes.ino, opened.handle
        for at in range(0, len(data), CHUNK):
            self.run(self.view.write(*file, at, memoryview(data[at : at + CHUNK]), HOLDER))
        self.run(self.view.flush(*file, HOLDER))
        self.run(self.view.release(*file))

    def read(self, file: tuple[int, int], offset: int, size: int) -> bytes:
        into = bytearray(size)
        count = settle(self.view.read(*file, offset, memoryview(into)), self.files.channel)
        return bytes(into[:count])


@pytest.fixture
def pool() -> SharedPool:
    return SharedPool()


def test_a_guest_writes_beside_the_name_and_renames(pool: SharedPool, tmp_path: Path) -> None:
    guest, host = Guest(pool.agent(), tmp_path / "books"), pool.agent()
    root = guest.walk("v")
    made = settle(guest.view.mkdir(CALLER, root, b"a", 0o755), guest.files.channel)
    folder = made.attributes.ino
    for content in (DATA, b"", DATA[:5]):
        guest.write(folder, b"f.tmp", content)
        guest.lookup(folder, b"f.tmp")
        guest.run(guest.view.rename(CALLER, folder, b"f.tmp", folder, b"f", 0))
        assert host.get("a/f") == content
        assert host.stat("a/f.tmp") is None


def test_a_guest_is_counted_as_one_holder(pool: SharedPool, tmp_path: Path) -> None:
    guest = Guest(pool.agent(), tmp_path / "books")
    root = guest.walk("v")
    entry, opened = settle(
        guest.view.create(Caller(1000, 0, 5), root, b"f", 0o644, os.O_WRONLY), guest.files.channel
    )
    assert guest.face._open_writers._held == {"guest-0": 1}
    guest.run(guest.view.release(entry.attributes.ino, opened.handle))


def test_folders_and_files_go_on_after_the_agent_was_killed(pool: SharedPool, tmp_path: Path) -> None:
    before = Guest(pool.agent(), tmp_path / "books")
    root = before.walk("v")
    for name in (b"a", b"b"):
        made = settle(before.view.mkdir(CALLER, root, name, 0o755), before.files.channel)
        root = made.attributes.ino
    before.write(root, b"f", DATA)
    before.write(root, b"g", DATA)
    nodes = [before.lookup(root, name) for name in (b"f", b"g")]
    opened = [
        (node, settle(before.view.open(CALLER, node, os.O_RDONLY), before.files.channel).handle)
        for node in nodes
    ]
    written = settle(before.view.create(CALLER, root, b"w", 0o644, os.O_WRONLY), before.files.channel)
    writer = written[0].attributes.ino, written[1].handle
    before.run(before.view.write(*writer, 0, memoryview(DATA[:100]), HOLDER))

    again = Guest(pool.agent(), tmp_path / "books")
    assert again.read(opened[0], 0, CHUNK) == DATA[:CHUNK]
    assert again.read(opened[0], CHUNK, CHUNK) == DATA[CHUNK : 2 * CHUNK]
    with pytest.raises(FsError) as refused:
        again.read(opened[1], CHUNK, CHUNK)
    assert refused.value.errno == errno.EIO, "its beginning came from an earlier agent"
    with pytest.raises(FsError) as refused:
        again.run(again.view.write(*writer, 100, memoryview(b"more"), HOLDER))
    assert refused.value.errno == errno.EIO
    assert settle(again.view.getattr(CALLER, root, None), again.files.channel).ino
    again.write(root, b"h", DATA)
    assert pool.agent().get("a/b/h") == DATA
    again.run(again.view.unlink(CALLER, root, b"h"))
    assert pool.agent().stat("a/b/h") is None
