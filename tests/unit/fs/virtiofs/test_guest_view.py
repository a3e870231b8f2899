"""What a guest may reach, what it gives back, and what it finds after its device was killed."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any, cast

import pytest

from agent.fs.fuse.abi import InitFlag
from agent.fs.fuse.session import Negotiated
from agent.fs.interface import (
    FACE_CONTROL,
    FACE_FILES,
    FACE_KV,
    FACE_SHIFT,
    NOBODY,
    PAGES,
    Attributes,
    Caller,
    Entry,
    FileSystem,
    FsError,
    LockOwner,
    Opened,
)
from agent.fs.virtiofs import guest_view
from agent.fs.virtiofs.guest_books import GuestBooks
from agent.fs.virtiofs.guest_view import GuestView
from agent.pool.steps import Outcome, Runner, settle
from tests.support.fs.memory_filesystem import MemoryFileSystem
from tests.support.pool.inline_runner import InlineRunner

ROOT = Caller()
RUN = InlineRunner()


def refused(code: int, operation: Callable[[], object]) -> None:
    with pytest.raises(FsError) as caught:
        settle(operation(), RUN)
    assert caught.value.errno == code


def books_at(path: Path) -> GuestBooks:
    """Books in which an INIT stands, as in those of any guest that has done something."""
    books = GuestBooks(path)
    if books.negotiated is None:
        books.agreed(Negotiated(38, InitFlag.MAX_PAGES, 1 << 20))
    return books


def made(view: GuestView, name: bytes, data: bytes = b"") -> tuple[int, int]:
    entry, opened = settle(view.create(ROOT, 1, name, 0o644, os.O_RDWR), RUN)
    if data:
        settle(view.write(entry.attributes.ino, opened.handle, 0, memoryview(data)), RUN)
    return entry.attributes.ino, opened.handle


class TestTwoGuests:
    """Of one tree, which numbers its nodes and handles for both."""

    def test_neither_reaches_what_the_other_was_told(self) -> None:
        tree = MemoryFileSystem()
        mine, other = GuestView(tree), GuestView(tree)
        ino, handle = made(mine, b"mine", b"secret")
        room = memoryview(bytearray(6))
        assert settle(mine.read(ino, handle, 0, room), RUN) == 6
        refused(errno.EBADF, lambda: other.read(ino, handle, 0, room))
        refused(errno.EBADF, lambda: other.write(ino, handle, 0, room))
        refused(errno.EBADF, lambda: other.release(ino, handle))
        refused(errno.EBADF, lambda: other.getattr(ROOT, ino, handle))
        for operation in (
            lambda: other.getattr(ROOT, ino, None),
            lambda: other.open(ROOT, ino, 0),
            lambda: other.lookup(ROOT, ino, b"x"),
            lambda: other.link(ROOT, ino, 1, b"x"),
            lambda: other.getxattr(ROOT, ino, b"user.x", memoryview(b"")),
            lambda: other.rename(ROOT, 1, b"a", ino, b"b", 0),
        ):
            refused(errno.ESTALE, operation)

    def test_a_guest_has_no_ioctls(self) -> None:
        """They register memory of a process, and the numbers of a guest's are another kernel's."""
        view = GuestView(MemoryFileSystem())
        ino, handle = made(view, b"mine")
        refused(errno.ENOTTY, lambda: view.ioctl(ROOT, ino, handle, 0xC0106701, memoryview(bytes(16))))

    def test_one_cannot_forget_for_the_other(self) -> None:
        tree = MemoryFileSystem()
        mine, other = GuestView(tree), GuestView(tree)
        ino, _ = made(mine, b"mine")
        other.forget(ino, 1)
        mine.forget(ino, 0)
        assert tree.nodes[ino].lookups == 1
        mine.forget(ino, 1 << 63)
        assert tree.nodes[ino].lookups == 0

    def test_what_a_guest_held_is_given_back(self) -> None:
        tree = MemoryFileSystem()
        view = GuestView(tree)
        ino, handle = made(view, b"file")
        settle(view.lookup(ROOT, 1, b"file"), RUN)
        settle(view.opendir(ROOT, 1, 0), RUN)
        assert view.held == (1, 2)
        view.give_everything_back(RUN)
        assert view.held == (0, 0)
        assert tree.nodes[ino].lookups == 0
        refused(errno.EBADF, lambda: view.read(ino, handle, 0, memoryview(bytearray(1))))


class Values(FileSystem):
    """A face of one value, whose number and handles are another process's business."""

    def __init__(self, first: int, content: bytes = b"a value") -> None:
        self.content = content
        self.ino = FACE_KV << FACE_SHIFT | first
        self.lookups = 0
        self.opens = 0

    def lookup(self, caller: Caller, parent: int, name: bytes) -> Outcome[Entry]:
        if name != b"key":
            raise FsError(errno.ENOENT)
        self.lookups += 1
        return Entry(Attributes(self.ino, 0o100644, len(self.content)))

    def forget(self, ino: int, lookups: int) -> None:
        assert ino == self.ino
        self.lookups -= lookups
        assert self.lookups >= 0

    def getattr(self, caller: Caller, ino: int, handle: int | None) -> Outcome[Attributes]:
        assert ino == self.ino
        return Attributes(ino, 0o100644, len(self.content))

    def open(self, caller: Caller, ino: int, flags: int) -> Outcome[Opened]:
        assert ino == self.ino
        self.opens += 1
        return Opened(self.opens)

    def read(self, ino: int, handle: int, offset: int, into: memoryview) -> Outcome[int]:
        assert (ino, handle) == (self.ino, self.opens)
        part = self.content[offset : offset + len(into)]
        into[: len(part)] = part
        return len(part)


class SlowFlush:
    """Another file system whose flush waits once."""

    def __init__(self, inner: object) -> None:
        self._inner = inner
        self.flushed: list[int] = []

    def flush(self, ino: int, handle: int, by: LockOwner = NOBODY) -> Generator[str, None, None]:
        yield "sealing"
        self.flushed.append(ino)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


class SlowWrite(SlowFlush):
    """Whose writes wait, too, before their data are where a flush finds them."""

    def write(
        self, ino: int, handle: int, offset: int, data: memoryview, by: LockOwner = NOBODY
    ) -> Generator[str, None, int]:
        yield "waiting for a block"
        return len(data)


class TellsUsers(SlowFlush):
    """Which keeps by whom each write came."""

    def write(self, ino: int, handle: int, offset: int, data: memoryview, by: LockOwner = NOBODY) -> int:
        self.flushed.append(-1 if by is PAGES else by.owner)
        return len(data)


def ended(steps: Any) -> Any:
    with pytest.raises(StopIteration) as end:
        next(steps)
    return end.value.value


def test_pages_that_a_guest_kernel_writes_are_told_from_what_its_programs_write(tmp_path: Path) -> None:
    tree = TellsUsers(MemoryFileSystem())
    view = GuestView(cast(FileSystem, tree), books_at(tmp_path / "books"))
    ino, handle = made(view, b"file", b"")
    tree.flushed.clear()
    for by in (LockOwner(7, 1234), PAGES):
        settle(view.write(ino, handle, 0, memoryview(b"data"), by), RUN)
    assert tree.flushed == [7, -1]


class TestFlushes:
    def test_a_write_during_a_flush_is_not_settled_by_it(self, tmp_path: Path) -> None:
        tree = SlowFlush(MemoryFileSystem())
        view = GuestView(cast(FileSystem, tree), books_at(tmp_path / "books"))
        ino, handle = made(view, b"file", b"first")
        flushing: Any = view.flush(ino, handle)
        next(flushing)
        settle(view.write(ino, handle, 5, memoryview(b"second")), RUN)
        ended(flushing)
        again = GuestView(cast(FileSystem, tree), books_at(tmp_path / "books"))
        refused(errno.EIO, lambda: again.fsync(ino, handle, False))

    def test_nor_one_that_had_begun_before_and_ended_after(self, tmp_path: Path) -> None:
        tree = SlowWrite(MemoryFileSystem())
        view = GuestView(cast(FileSystem, tree), books_at(tmp_path / "books"))
        ino, handle = made(view, b"file")
        writing: Any = view.write(ino, handle, 0, memoryview(b"data"))
        next(writing)
        flushing: Any = view.flush(ino, handle)
        next(flushing)
        ended(flushing)
        assert ended(writing) == 4
        again = GuestView(cast(FileSystem, tree), books_at(tmp_path / "books"))
        refused(errno.EIO, lambda: again.fsync(ino, handle, False))

    def test_whoever_had_the_file_open_hears_of_lost_data_once(self, tmp_path: Path) -> None:
        tree = MemoryFileSystem()
        view = GuestView(cast(FileSystem, tree), books_at(tmp_path / "books"))
        ino, writer = made(view, b"file", b"flushed")
        settle(view.fsync(ino, writer, False), RUN)
        other = settle(view.open(Caller(), ino, os.O_RDWR), RUN).handle
        clean, its_own = made(view, b"another", b"flushed")
        settle(view.fsync(clean, its_own, False), RUN)
        settle(view.write(ino, writer, 0, memoryview(b"lost")), RUN)
        again = GuestView(cast(FileSystem, tree), books_at(tmp_path / "books"))
        refused(errno.EIO, lambda: again.fsync(ino, writer, False))
        settle(again.fsync(ino, writer, False), RUN)
        settle(again.fsync(clean, its_own, False), RUN)
        third = GuestView(cast(FileSystem, tree), books_at(tmp_path / "books"))
        refused(errno.EIO, lambda: third.fsync(ino, other, False))
        settle(third.fsync(ino, other, False), RUN)

    @pytest.mark.interpreted
    def test_an_orderly_end_completes_no_value(self, tmp_path: Path) -> None:
        """A flush is a value's end: half of one would be there as a whole."""
        tree = SlowFlush(Values(70_000))
        books = books_at(tmp_path / "books")
        value, file = FACE_KV << FACE_SHIFT | 70_000, FACE_FILES << FACE_SHIFT | 5
        view = GuestView(cast(FileSystem, tree), books)
        for ino in (value, file):
            books.told(ino, 1, b"key")
            books.opened(ino, 1, os.O_WRONLY | os.O_CREAT)
            books.wrote(ino, 1)
            view._open[ino, 1] = (ino, 1)
        view.settle_everything(cast(Runner, Finishing()))
        assert tree.flushed == [file]
        again = GuestView(cast(FileSystem, tree), books_at(tmp_path / "books"))
        refused(errno.EIO, lambda: again.write(value, 1, 4, memoryview(b"more")))


class Finishing:
    """A runner for steps that need nothing done."""

    def run(self, steps: Any) -> Any:
        for _ in steps:
            pass


@pytest.mark.interpreted
def test_a_folder_counts_as_often_as_it_is_open(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guest_view, "HANDLES_MAX", 3)
    view = GuestView(MemoryFileSystem())
    view.books.opened(1, 0, 0, is_folder=True)
    for _ in range(2):
        view.books.opened(1, 0, 0, is_folder=True)
    refused(errno.ENFILE, lambda: view.opendir(ROOT, 1, 0))
    view.books.closed(1, 0)
    settle(view.opendir(ROOT, 1, 0), RUN)


class TestAfterAKill:
    @pytest.fixture
    def path(self, tmp_path: Path) -> Path:
        return tmp_path / "guest.books"

    def test_an_open_file_goes_on(self, path: Path) -> None:
        tree = MemoryFileSystem()
        view = GuestView(tree, books_at(path))
        ino, handle = made(view, b"file", b"content")
        settle(view.flush(ino, handle), RUN)
        again = GuestView(tree, books_at(path))
        room = memoryview(bytearray(7))
        assert settle(again.read(ino, handle, 0, room), RUN) == 7
        assert bytes(room) == b"content"
        assert settle(again.write(ino, handle, 7, memoryview(b"!")), RUN) == 1
        _, other = made(again, b"another")
        assert other != handle
        settle(again.release(ino, handle), RUN)
        refused(errno.EBADF, lambda: again.read(ino, handle, 0, room))

    def test_data_that_nobody_had_flushed_are_an_error_once(self, path: Path) -> None:
        tree = MemoryFileSystem()
        ino, handle = made(GuestView(tree, books_at(path)), b"file", b"content")
        again = GuestView(tree, books_at(path))
        refused(errno.EIO, lambda: again.fsync(ino, handle, False))
        assert settle(again.write(ino, handle, 0, memoryview(b"new")), RUN) == 3
        settle(again.fsync(ino, handle, False), RUN)

    @pytest.mark.interpreted
    def test_a_value_is_looked_up_again_and_read_from_its_beginning(self, path: Path) -> None:
        view = GuestView(Values(100_000), books_at(path))
        ino = settle(view.lookup(ROOT, 1, b"key"), RUN).attributes.ino
        handle = settle(view.open(ROOT, ino, 0), RUN).handle
        values = Values(200_000)
        again = GuestView(values, books_at(path))
        room = memoryview(bytearray(4))
        refused(errno.EIO, lambda: again.read(ino, handle, 4, room))
        assert settle(again.read(ino, handle, 0, room), RUN) == 4
        assert settle(again.read(ino, handle, 4, room), RUN) == 3
        assert settle(again.read(ino, handle, 7, room), RUN) == 0
        values.content = b""
        refused(errno.EIO, lambda: again.read(ino, handle, 0, room))
        settle(again.release(ino, handle), RUN)
        assert settle(again.getattr(ROOT, ino, None), RUN).ino == values.ino
        again.forget(ino, 1)
        assert values.lookups == 0

    @pytest.mark.interpreted
    def test_a_value_that_is_gone_is_stale_and_costs_nothing_to_forget(self, path: Path) -> None:
        view = GuestView(Values(100_000), books_at(path))
        ino = settle(view.lookup(ROOT, 1, b"key"), RUN).attributes.ino

        class Gone(Values):
            def lookup(self, caller: Caller, parent: int, name: bytes) -> Outcome[Entry]:
                raise FsError(errno.ENOENT)

        again = GuestView(Gone(200_000), books_at(path))
        refused(errno.ESTALE, lambda: again.open(ROOT, ino, 0))
        again.forget(ino, 1)
        assert again.held == (0, 0)

    @pytest.mark.interpreted
    def test_a_half_written_value_and_a_session_are_gone(self, path: Path) -> None:
        books = books_at(path)
        value, session, file = (face << FACE_SHIFT | 70_000 for face in (FACE_KV, FACE_CONTROL, FACE_FILES))
        books.told(value, 1, b"key")
        books.told(session, 1, b"")
        books.opened(value, 1, os.O_WRONLY | os.O_CREAT)
        books.opened(session, 2, os.O_RDWR)
        again = GuestView(Values(200_000), books_at(path))
        data = memoryview(b"more")
        refused(errno.EIO, lambda: again.write(value, 1, 4, data))
        refused(errno.EIO, lambda: again.flush(value, 1))
        assert settle(again.release(value, 1), RUN) is None
        refused(errno.ENOTCONN, lambda: again.write(session, 2, 0, data))
        refused(errno.EBADF, lambda: again.read(file, 1, 0, data))
