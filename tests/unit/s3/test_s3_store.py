"""A tenant's store: what is left over goes, what is lost is lost once, and what dies half-way is not seen."""

from __future__ import annotations

import errno
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from agent.fs.files import suspect_blocks
from agent.fs.files.metadata_database import Database
from agent.fs.files.options import FilesOptions
from agent.fs.interface import Caller, FsError
from agent.s3.errors import S3Error
from agent.s3.index import Piece, StoredObject
from agent.s3.store import TIDY_FILES, FileWriter, LostObject, ObjectReader, ObjectStore
from tests.support.pool.inline_runner import InlineRunner
from tests.support.pool.memory_blocks import MemoryBlockStore

CAPACITIES = (512, 2048)
RUN = InlineRunner()
Start = Callable[[], ObjectStore]


@pytest.fixture
def blocks() -> MemoryBlockStore:
    return MemoryBlockStore(CAPACITIES)


@pytest.fixture
def start(tmp_path: Path, blocks: MemoryBlockStore) -> Iterator[Start]:
    """Open the store; the one that was open before is left as if its process had died."""
    made: list[ObjectStore] = []
    options = FilesOptions(staging_bytes=64 << 10, workers=1, cache_seconds=0)

    def begin() -> ObjectStore:
        made.append(ObjectStore(tmp_path / "index.sqlite", tmp_path / "files.sqlite", blocks, options))
        return made[-1]

    yield begin
    for store in made:
        store.close()


def put(store: ObjectStore, key: str, data: bytes) -> None:
    writer = FileWriter(store, RUN)
    writer.write(RUN, memoryview(data))
    piece = writer.finish(RUN)
    spare = store.index.put("blocks", StoredObject(key, len(data), "tag", 1), [piece])
    writer.keep(RUN)
    store.discard(RUN, spare)


def get(store: ObjectStore, key: str) -> bytes:
    found = store.index.find("blocks", key)
    into = bytearray(found.size)
    reader = ObjectReader(store, found)
    try:
        reader.read(RUN, 0, memoryview(into))
    finally:
        reader.close(RUN)
    return bytes(into)


def settle(store: ObjectStore) -> None:
    while store.tidy(RUN):
        pass


def test_what_is_put_is_read_and_a_replaced_object_frees_its_blocks(
    start: Start, blocks: MemoryBlockStore
) -> None:
    store = start()
    store.index.make_bucket("blocks", 1)
    put(store, "a", b"one" * 3000)
    held = len(blocks.blocks)
    put(store, "a", b"two" * 3000)
    settle(store)
    assert get(store, "a") == b"two" * 3000
    assert len(blocks.blocks) == held
    assert store.index.spare(9) == []
    store.discard(RUN, store.index.remove("blocks", "a"))
    settle(store)
    assert not blocks.blocks
    assert not store.holds_anything()


def test_an_agent_that_dies_in_the_middle_of_a_put_leaves_the_old_object_and_no_blocks(
    start: Start, blocks: MemoryBlockStore
) -> None:
    store = start()
    store.index.make_bucket("blocks", 1)
    put(store, "a", b"old" * 3000)
    held = len(blocks.blocks)
    writer = FileWriter(store, RUN)
    writer.write(RUN, memoryview(b"new" * 3000))
    writer.finish(RUN)
    assert len(blocks.blocks) > held
    again = start()
    assert get(again, "a") == b"old" * 3000
    settle(again)
    assert len(blocks.blocks) == held


def test_tidying_leaves_what_is_being_written(start: Start) -> None:
    store = start()
    store.index.make_bucket("blocks", 1)
    writer = FileWriter(store, RUN)
    writer.write(RUN, memoryview(b"x" * 5000))
    settle(store)
    piece = writer.finish(RUN)
    store.index.put("blocks", StoredObject("a", 5000, "tag", 1), [piece])
    settle(store)
    writer.keep(RUN)
    settle(store)
    assert get(store, "a") == b"x" * 5000


def test_a_reader_of_a_replaced_object_reads_the_one_that_it_opened(start: Start) -> None:
    store = start()
    store.index.make_bucket("blocks", 1)
    put(store, "a", b"old" * 3000)
    reader = ObjectReader(store, store.index.find("blocks", "a"))
    into = bytearray(10)
    reader.read(RUN, 0, memoryview(into))
    put(store, "a", b"new" * 3000)
    settle(store)
    into = bytearray(9000)
    reader.read(RUN, 0, memoryview(into))
    assert into == b"old" * 3000
    reader.close(RUN)


def put_in_parts(store: ObjectStore, key: str, *bodies: bytes) -> None:
    pieces = []
    for body in bodies:
        writer = FileWriter(store, RUN)
        writer.write(RUN, memoryview(body))
        pieces.append(writer.finish(RUN))
        writer.keep(RUN)
    new = StoredObject(key, sum(map(len, bodies)), "tag", 1)
    store.discard(RUN, store.index.put("blocks", new, pieces))


def unlinks(store: ObjectStore, refused: Callable[[str], bool]) -> list[str]:
    """The names of files that the store tries to remove from now on; those that are `refused` stay."""
    tried: list[str] = []
    unlink = store.files.unlink

    def watched(caller: Caller, parent: int, name: bytes) -> object:
        tried.append(name.decode())
        if refused(name.decode()):
            raise FsError(errno.ENOSPC, "the disk is full")
        return unlink(caller, parent, name)

    store.files.unlink = watched  # type: ignore[method-assign,assignment]
    return tried


def test_an_object_of_many_parts_goes_a_few_files_at_a_time(start: Start, blocks: MemoryBlockStore) -> None:
    store = start()
    store.index.make_bucket("blocks", 1)
    put_in_parts(store, "a", *[b"x"] * 100)
    tried = unlinks(store, lambda name: False)
    store.discard(RUN, store.index.remove("blocks", "a"))
    assert 0 < len(tried) <= TIDY_FILES
    while len(tried) < 100:
        before = len(tried)
        assert store.tidy(RUN), "there is more"
        assert len(tried) - before <= TIDY_FILES
    settle(store)
    assert not blocks.blocks
    assert store.index.spare(9) == []


@pytest.mark.expects_log("a file that no object names stays for now")
def test_files_that_cannot_be_removed_cost_one_try_at_a_time_and_keep_no_others_back(
    start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    store = start()
    store.index.make_bucket("blocks", 1)
    put_in_parts(store, "a", *[b"x"] * 50)
    names = store.index.remove("blocks", "a")
    stuck = set(names)
    tried = unlinks(store, lambda name: name in stuck)
    for count in range(1, 30):
        assert not store.tidy(RUN), "it is not gone on with at once"
        assert len(tried) == count
    assert len(caplog.records) == 1
    stuck.difference_update(names[40:])
    for _ in range(len(names)):
        store.tidy(RUN)
    assert set(store.index.spare(99)) == stuck


@pytest.mark.parametrize("by", ["put", "remove"])
def test_a_reader_of_an_object_in_parts_reads_it_to_its_end(
    start: Start, blocks: MemoryBlockStore, by: str
) -> None:
    store = start()
    store.index.make_bucket("blocks", 1)
    bodies = [letter * 3000 for letter in (b"a", b"b", b"c")]
    put_in_parts(store, "a", *bodies)
    readers = [ObjectReader(store, store.index.find("blocks", "a")) for _ in range(2)]
    into = bytearray(10)
    readers[0].read(RUN, 0, memoryview(into))
    if by == "put":
        put(store, "a", b"new" * 3000)
    else:
        store.discard(RUN, store.index.remove("blocks", "a"))
    settle(store)
    for reader in readers:
        into = bytearray(9000)
        reader.read(RUN, 0, memoryview(into))
        assert into == b"".join(bodies)
        reader.close(RUN)
        reader.close(RUN)
        settle(store)
    assert store.index.spare(9) == []
    store.discard(RUN, store.index.remove("blocks", "a"))
    settle(store)
    assert not blocks.blocks
    assert not store.holds_anything()


def test_who_is_replaced_between_being_found_and_being_held_is_not_read(start: Start) -> None:
    store = start()
    store.index.make_bucket("blocks", 1)
    put_in_parts(store, "a", b"old", b"old")
    found = store.index.find("blocks", "a")
    pieces = store.index.pieces

    def replaced_and_then_pieces(
        found: StoredObject, hold: Callable[[list[Piece]], None] | None = None
    ) -> list[Piece]:
        put(store, "a", b"new")
        return pieces(found, hold)

    store.index.pieces = replaced_and_then_pieces  # type: ignore[method-assign]
    with pytest.raises(LostObject):
        ObjectReader(store, found)
    store.index.pieces = pieces  # type: ignore[method-assign]
    settle(store)
    assert store.files_held() == 0
    assert store.index.spare(9) == []
    assert get(store, "a") == b"new"


def test_who_is_replaced_as_soon_as_it_is_held_is_read_as_it_was(start: Start) -> None:
    store = start()
    store.index.make_bucket("blocks", 1)
    put_in_parts(store, "a", b"old", b"old")
    reader = ObjectReader(store, store.index.find("blocks", "a"))
    put(store, "a", b"new")
    settle(store)
    into = bytearray(6)
    reader.read(RUN, 0, memoryview(into))
    assert into == b"oldold"
    reader.close(RUN)
    settle(store)
    assert store.index.spare(9) == []


@pytest.mark.expects_log(".*")
def test_an_object_that_lost_a_block_is_lost_once_that_is_certain_and_one_that_is_away_may_come_back(
    start: Start, blocks: MemoryBlockStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(suspect_blocks, "LOOK_SECONDS", 0.0)
    store = start()
    store.index.make_bucket("blocks", 1)
    put(store, "a", b"x" * 9000)
    blocks.unavailable.add("get")
    with pytest.raises(S3Error) as refused:
        get(store, "a")
    assert refused.value.code == "ServiceUnavailable"
    blocks.unavailable.clear()
    assert get(store, "a") == b"x" * 9000
    blocks.blocks.pop(next(iter(blocks.blocks)))
    with pytest.raises(S3Error) as refused:
        get(store, "a")
    assert refused.value.code == "ServiceUnavailable"
    store.tidy(RUN)
    for _ in range(2):
        with pytest.raises(LostObject):
            get(store, "a")


def test_a_full_pool_refuses_and_keeps_nothing(start: Start, blocks: MemoryBlockStore) -> None:
    store = start()
    store.index.make_bucket("blocks", 1)
    put(store, "a", b"x" * 4096)
    held = len(blocks.blocks)
    blocks.refuse_as_full = True
    writer = FileWriter(store, RUN)
    with pytest.raises(S3Error) as refused:
        writer.write(RUN, memoryview(b"y" * 200_000))
    assert refused.value.code == "InsufficientStorage"
    writer.drop(RUN)
    blocks.refuse_as_full = False
    settle(store)
    assert len(blocks.blocks) == held
    assert get(store, "a") == b"x" * 4096


def test_a_get_of_one_file_asks_the_metadata_once(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    store = start()
    store.index.make_bucket("blocks", 1)
    put(store, "a", b"x" * 5000)
    asked: list[str] = []
    query = Database.query

    def counting(database: Database, statement: str, *arguments: object) -> list[Any]:
        asked.append(statement)
        return query(database, statement, *arguments)

    monkeypatch.setattr(Database, "query", counting)
    found, held = store.find_and_hold("blocks", "a")
    reader = ObjectReader(store, found, held)
    for offset, count in ((0, 5000), (2047, 3), (4999, 1)):
        into = bytearray(count)
        reader.read(RUN, offset, memoryview(into))
        assert into == b"x" * count
    assert len(asked) == 3
    assert store.files_held() == 1
    reader.close(RUN)
    assert store.files_held() == 0


def test_what_is_found_and_held_is_one_file_or_none(start: Start) -> None:
    store = start()
    store.index.make_bucket("blocks", 1)
    pieces = []
    for _ in range(2):
        writer = FileWriter(store, RUN)
        writer.write(RUN, memoryview(b"ab"))
        pieces.append(writer.finish(RUN))
        writer.keep(RUN)
    store.index.put("blocks", StoredObject("parts", 4, "tag", 1), pieces)
    store.index.put("blocks", StoredObject("short", 5, "tag", 1), pieces[:1])
    for key in ("parts", "short"):
        found, held = store.find_and_hold("blocks", key)
        assert (found.key, held, store.files_held()) == (key, [], 0)
    for bucket, key in (("blocks", "none"), ("none", "none")):
        with pytest.raises(S3Error):
            store.find_and_hold(bucket, key)
    assert get(store, "parts") == b"abab"


def test_a_range_that_crosses_a_lost_block_goes_the_long_way(start: Start, blocks: MemoryBlockStore) -> None:
    store = start()
    store.index.make_bucket("blocks", 1)
    put(store, "a", bytes(range(256)) * 20)
    blocks.blocks.pop(next(iter(blocks.blocks)))
    with pytest.raises((LostObject, S3Error)):
        get(store, "a")


def test_where_files_are_evicted_their_use_is_noted(tmp_path: Path, blocks: MemoryBlockStore) -> None:
    options = FilesOptions(staging_bytes=64 << 10, workers=1, cache_seconds=0, on_full="evict")
    store = ObjectStore(tmp_path / "index.sqlite", tmp_path / "files.sqlite", blocks, options)
    store.index.make_bucket("blocks", 1)
    put(store, "a", b"abc")
    with sqlite3.connect(tmp_path / "files.sqlite") as names:
        names.execute("UPDATE inodes SET used_ns = 1 WHERE stored > 0")
    assert get(store, "a") == b"abc"
    with sqlite3.connect(tmp_path / "files.sqlite") as names:
        assert names.execute("SELECT used_ns > 1 FROM inodes WHERE stored > 0").fetchall() == [(1,)]
    store.close()
