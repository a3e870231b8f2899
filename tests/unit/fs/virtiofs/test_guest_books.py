"""The books of a guest: what one process writes the next one reads, wherever it was killed."""

from __future__ import annotations

import errno
import os
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.errors import G35Error
from agent.fs.fuse.abi import InitFlag
from agent.fs.fuse.session import Negotiated
from agent.fs.virtiofs import guest_books
from agent.fs.virtiofs.guest_books import HEADER, RECORD, GuestBooks, Node, OpenFile

AGREED = Negotiated(38, InitFlag.MAX_PAGES | InitFlag.DIRECT_IO_ALLOW_MMAP, 1 << 20)
IDENTITY = bytes(range(16))


def books_at(path: Path) -> GuestBooks:
    return GuestBooks(path, IDENTITY)


def header(flags: int = 0, transfer: int = 1 << 20) -> bytes:
    """Of epoch 7, with a check that is right."""
    head = HEADER.pack(guest_books.MAGIC, 7, IDENTITY, flags, 38, transfer, 1, 0)
    return head[:-4] + zlib.crc32(head[: guest_books.READY_AT]).to_bytes(4, "little")


@pytest.fixture(autouse=True, scope="module")
def short_files() -> Iterator[None]:
    """Some tests make hundreds."""
    usual, guest_books.FILE_BYTES_LEAST = guest_books.FILE_BYTES_LEAST, 16 << 10
    yield
    guest_books.FILE_BYTES_LEAST = usual


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "state" / "guest.books"


def test_the_next_process_finds_it_all(path: Path) -> None:
    first = books_at(path)
    first.agreed(AGREED)
    first.told(5, 1, b"name")
    first.told(5, 1, b"name")
    first.told(6, 5, b"")
    first.told(7, 5, "ß".encode())
    assert first.forgot(7, 9) == 1
    first.opened(5, 11, 0x8002)
    first.opened(6, 0, 0x10000, is_folder=True)
    first.opened(6, 0, 0x10000, is_folder=True)
    first.opened(5, 12, 1)
    assert first.closed(5, 12)
    first.wrote(5, 11)
    # Nothing was closed: the process was killed here.
    second = books_at(path)
    assert second.epoch == first.epoch + 1 == 2
    assert second.negotiated == AGREED
    assert second.nodes == {5: Node(2, 1, b"name"), 6: Node(1, 5, b"")}
    assert second.files == {(5, 11): OpenFile(0x8002, False, 1, True), (6, 0): OpenFile(0x10000, True, 2)}
    second.settled(5, 11, second.writes(5, 11))
    assert not books_at(path).files[5, 11].dirty
    for each in (first, second):
        each.close()


def test_the_file_is_for_its_owner_alone(path: Path) -> None:
    books_at(path).close()
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_guest_that_begins_anew_holds_nothing(path: Path) -> None:
    first = books_at(path)
    first.agreed(AGREED)
    first.told(5, 1, b"name")
    nodes, files = first.clear()
    assert (list(nodes), files) == ([5], {})
    second = books_at(path)
    assert second.negotiated is None
    assert not second.nodes
    first.agreed(AGREED)


def test_books_of_another_tree_are_void(path: Path) -> None:
    first = books_at(path)
    first.agreed(AGREED)
    first.told(5, 1, b"name")
    other = GuestBooks(path, bytes(16))
    assert (other.epoch, other.negotiated, other.nodes) == (2, None, {})


def test_a_full_file_is_written_anew(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guest_books, "FILE_BYTES_LEAST", HEADER.size + 4 * RECORD.size)
    first = books_at(path)
    first.agreed(AGREED)
    for number in range(200):
        first.told(number, 1, b"x" * number)
        if number % 3:
            first.forgot(number, 1)
        else:
            first.opened(number, number, 2)
            first.wrote(number, number)
    second = books_at(path)
    assert second.negotiated == AGREED
    assert second.nodes == first.nodes
    assert second.files == first.files
    assert len(second.nodes) == 67
    assert not path.with_name("guest.books.new").exists()


STEP = st.tuples(
    st.sampled_from(["told", "forgot", "opened", "closed", "wrote", "settled"]), st.integers(1, 4)
)


@given(st.lists(STEP, max_size=40), st.integers(0, 40))
def test_a_record_that_was_not_completed_ends_the_books_at_some_moment(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[str, int]], cut: int
) -> None:
    path = tmp_path_factory.mktemp("books") / "b"
    books = books_at(path)
    books.agreed(AGREED)
    moments = []
    for verb, number in steps:
        moments.append((dict(books.nodes), set(books.files)))
        match verb:
            case "told":
                books.told(number, 1, b"name %d" % number)
            case "forgot":
                books.forgot(number, 1)
            case "opened":
                books.opened(number, number, 2)
            case "closed":
                books.closed(number, number)
            case "wrote":
                books.wrote(number, number)
            case _:
                books.settled(number, number, books.writes(number, number))
    moments.append((dict(books.nodes), set(books.files)))
    content = bytearray(path.read_bytes())
    at = HEADER.size
    for _ in range(cut):
        if content[at]:
            at += RECORD.size + RECORD.unpack_from(content, at)[1]  # and the name
    content[at] = 0  # the kind, which is written last; what else there is of the record stays
    content[at + RECORD.size :] = bytes(len(content) - at - RECORD.size)
    path.write_bytes(content)
    again = books_at(path)
    assert set(again.files) in [files for _, files in moments]
    assert set(again.nodes) in [set(nodes) for nodes, _ in moments]
    for each in (books, again):
        each.close()


@given(st.binary(max_size=300))
def test_any_file_can_be_read(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    path = tmp_path_factory.mktemp("books") / "b"
    path.write_bytes(header() + content)
    books = books_at(path)
    assert books.epoch == 8
    books.close()


@pytest.mark.parametrize("at", [8, 16, 33, 41, 46, 60])
def test_a_header_that_was_damaged_is_not_believed(path: Path, at: int) -> None:
    path.parent.mkdir()
    damaged = bytearray(header())
    damaged[at] ^= 0x40
    path.write_bytes(damaged + guest_books.record(1, 1, 5, 1))
    books = books_at(path)
    assert (books.negotiated, books.nodes) == (None, {})
    books.close()


def test_a_record_that_was_damaged_ends_the_books(path: Path) -> None:
    path.parent.mkdir()
    records = [bytearray(guest_books.record(1, 1, number, 1, b"name")) for number in (5, 6, 7)]
    records[1][9] ^= 1  # of the number of a node: it would name another one
    path.write_bytes(header() + b"".join(records))
    books = books_at(path)
    assert set(books.nodes) == {5}
    books.close()


@pytest.mark.interpreted
def test_a_folder_that_is_opened_for_ever_takes_no_room_in_the_file(path: Path) -> None:
    books = books_at(path)
    books.agreed(AGREED)
    for _ in range(5000):
        books.opened(5, 0, 0x10000, is_folder=True)
    assert books.opens == 5000
    assert path.stat().st_size == guest_books.FILE_BYTES_LEAST
    again = books_at(path)
    assert again.files == {(5, 0): OpenFile(0x10000, True, 5000)}
    assert again.closed(5, 0)
    assert again.opens == 4999
    for each in (books, again):
        each.close()


def test_more_lookups_than_a_record_can_count(path: Path) -> None:
    books = books_at(path)
    books.agreed(AGREED)
    books.told(5, 1, b"name")
    books.nodes[5].lookups = (1 << 33) + 1
    again = books_at(path)  # of the first record alone: the count was changed behind the file
    again.close()
    books._write_anew()
    again = books_at(path)
    assert again.nodes == {5: Node((1 << 33) + 1, 1, b"name")}
    assert books.forgot(5, 1 << 63) == (1 << 32) - 1
    for each in (books, again):
        each.close()


def test_what_was_written_while_a_flush_went_on_is_not_settled_by_it(path: Path) -> None:
    books = books_at(path)
    books.agreed(AGREED)
    books.opened(5, 1, 2)
    books.wrote(5, 1)
    before = books.writes(5, 1)
    books.wrote(5, 1)
    books.settled(5, 1, before)
    assert books.files[5, 1].dirty
    books.settled(5, 1, books.writes(5, 1))
    assert not books.files[5, 1].dirty
    books.close()


class FullDisk:
    """posix_fallocate(3) of a disk on which nothing is left."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.is_full = True
        real = os.posix_fallocate

        def asked(descriptor: int, offset: int, length: int) -> None:
            if self.is_full:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            real(descriptor, offset, length)

        monkeypatch.setattr(os, "posix_fallocate", asked)


def test_every_block_is_allocated_when_the_file_is_made(path: Path) -> None:
    """A write through a mapping has no way to say that the disk is full: it ends the process."""
    books_at(path).close()
    assert path.stat().st_blocks * 512 >= guest_books.FILE_BYTES_LEAST


@pytest.mark.expects_log("no room for the books")
def test_a_disk_that_is_full_from_the_start(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = FullDisk(monkeypatch)
    books = books_at(path)
    books.agreed(AGREED)
    books.told(5, 1, b"name")
    assert set(books.nodes) == {5}
    assert not list(path.parent.iterdir())
    disk.is_full = False
    books.clear()
    books.agreed(AGREED)  # the guest mounts again
    books.told(6, 1, b"name")
    again = books_at(path)
    assert set(again.nodes) == {6}
    for each in (books, again):
        each.close()


@pytest.mark.expects_log("no room for the books")
@pytest.mark.interpreted
def test_a_disk_that_fills_leaves_no_books_to_believe(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    books = books_at(path)
    books.agreed(AGREED)
    disk = FullDisk(monkeypatch)
    for number in range(2000):
        books.told(number, 1, b"")
    assert len(books.nodes) == 2000
    disk.is_full = False
    again = books_at(path)
    assert (again.negotiated, again.nodes) == (None, {})
    for each in (books, again):
        each.close()


def test_a_folder_in_the_place_of_the_books(path: Path) -> None:
    path.mkdir(parents=True)
    with pytest.raises(G35Error, match="books of a guest") as refused:
        books_at(path)
    assert "agent.state" in refused.value.advice
