"""`/shared` over a pool in memory: what is written is not evicted here, and a close tells the truth."""

from __future__ import annotations

import dataclasses
import errno
import os

import pytest

from agent.fs.close_cause import Closing
from agent.fs.interface import FsError
from agent.fs.shared.call_prediction import READY_SECONDS
from agent.fs.shared.face import RENAME_NOREPLACE
from agent.fs.shared.file_content import KEPT_SECONDS
from agent.fs.shared.file_writer import ASKED_SECONDS
from agent.fs.shared.paths import chunk_key
from agent.pool.format.directory import SLOTS_PER_SET
from tests.support.fs.memory_shared import CALLER, CHUNK, OTHER, Files, SharedPool, refused

HALF = SLOTS_PER_SET // 2
ALONE = [0.0, 1000.0]


def one_set(directory_fresh: float = 0.0) -> SharedPool:
    """A volume of 64 chunks, all in one set."""
    return SharedPool((1,), (2,), directory_fresh=directory_fresh)


def content(chunks: int, seed: int = 0) -> bytes:
    return b"".join((number * 251 + seed).to_bytes(8, "little") * (CHUNK // 8) for number in range(chunks))


def readable(files: Files, name: str) -> bool:
    try:
        return bool(files.get(name))
    except FsError as why:
        if why.errno != errno.ENOENT:
            raise
        return False


def closed(files: Files, file: tuple[int, int]) -> bool:
    """Close a file: whether it is stored."""
    try:
        files.close(file)
    except FsError as why:
        if why.errno not in (errno.EIO, errno.ENOSPC):
            raise
        return False
    return True


def fill(files: Files, count: int) -> None:
    """Store other files, each of which has to find room."""
    for number in range(count):
        files.put(f"other{number}", content(1, number))


def write(files: Files, name: str, chunks: int, flags: int = os.O_RDWR) -> tuple[int, int]:
    file = files.create(name, flags=flags | os.O_TRUNC)
    for number in range(chunks):
        files.pwrite(file, number * CHUNK, content(chunks)[number * CHUNK : (number + 1) * CHUNK])
    return file


@pytest.mark.parametrize("alone", ALONE)
@pytest.mark.parametrize("chunks", [4, 20, HALF])
def test_a_file_that_is_written_keeps_its_chunks(alone: float, chunks: int) -> None:
    files = one_set(alone).agent()
    file = write(files, "f", chunks)
    files.name()
    fill(files, 2 * SLOTS_PER_SET)
    assert files.pread(file, 0, chunks * CHUNK) == content(chunks)
    files.close(file)
    assert not files.chunks.holds.held
    assert files.get("f") == content(chunks)


@pytest.mark.parametrize("alone", ALONE)
def test_a_file_that_did_not_find_room_is_an_error_of_its_close(alone: float) -> None:
    files = one_set(alone).agent()
    file = write(files, "f", HALF + 16)
    assert len(files.chunks.holds.held) <= HALF
    fill(files, HALF)
    refused(errno.ENOSPC, files.flush, file)
    files.release(file)
    assert files.stat("f") is None
    assert not files.chunks.holds.held
    files.collect()
    fill(files, HALF)


@pytest.mark.parametrize("alone", ALONE)
def test_a_long_file_beyond_the_bound_is_stored_where_nobody_took_its_room(alone: float) -> None:
    files = one_set(alone).agent()
    file = write(files, "f", HALF + 16)
    files.close(file)
    assert files.get("f") == content(HALF + 16)


def test_a_file_of_which_another_agent_took_a_chunk_is_an_error_of_its_close() -> None:
    pool = one_set()
    files, others = pool.agent(), pool.agent()
    file = write(files, "f", 4)
    writer = files.face._nodes.get(file[0]).writer
    assert writer is not None
    key = chunk_key(writer._stored[0][0], 0)
    files.channel.clock += ASKED_SECONDS
    others.evict(others.chunks, key)
    refused(errno.EIO, files.flush, file)
    files.release(file)
    assert others.stat("f") is None


@pytest.mark.parametrize("alone", ALONE)
def test_a_file_that_expires_before_its_close_is_an_error_of_it(alone: float) -> None:
    pool = one_set(alone)
    pool.chunks = dataclasses.replace(pool.chunks, ttl_seconds=10)
    files = pool.agent()
    file = write(files, "f", 4)
    files.channel.clock += 11
    refused(errno.EIO, files.flush, file)
    files.release(file)
    files.put("g", content(4))
    assert files.get("g") == content(4)
    files.channel.clock += 11
    assert files.stat("g") is None or not readable(files, "g")


def test_what_is_held_is_let_go_of(files: Files) -> None:
    held = files.chunks.holds.held
    file = write(files, "f", 8)
    files.name()
    files.pwrite(file, 0, content(2))
    files.name()
    assert len(held) <= 8, "what was written again is held once"
    files.ftruncate(file, 3 * CHUNK)
    assert len(held) <= 3
    files.ftruncate(file, 0)
    assert not held
    files.pwrite(file, 0, content(2))
    for _ in range(3):
        files.flush(file)
        files.pwrite(file, 0, content(2))
        files.name()
        assert len(held) == 2, "the next content has its own"
    files.close(file)
    assert not held


@pytest.mark.parametrize("how", [Closing.DYING, Closing.MEANT])
def test_a_writer_that_dies_or_removes_its_file_holds_nothing(files: Files, how: Closing) -> None:
    file = write(files, "f", 8)
    files.name()
    assert files.chunks.holds.held
    if how is Closing.DYING:
        files.flush(file, how=how)
        refused(errno.EIO, files.pread, file, 0, CHUNK)
    else:
        files.unlink("f")
        assert files.pread(file, 0, CHUNK) == content(1)
        files.flush(file)
    files.release(file)
    assert not files.chunks.holds.held
    assert files.stat("f") is None
    files.collect()
    assert not files.taken()


@pytest.mark.parametrize("alone", ALONE)
def test_many_writers_beside_each_other_find_room_and_hear_the_truth(alone: float) -> None:
    """There is room for one in sixteen of them."""
    files = one_set(alone).agent()
    opened = [files.create(f"f{number}", flags=os.O_RDWR | os.O_TRUNC) for number in range(1000)]
    for number, file in enumerate(opened):
        files.pwrite(file, 0, content(1, number))
    stored = 0
    for number, file in enumerate(opened):
        is_stored = closed(files, file)
        assert readable(files, f"f{number}") == is_stored
        stored += is_stored
    assert stored >= HALF
    files.put("g", content(2))
    assert files.get("g") == content(2)


def test_a_reader_and_a_writer_share_a_set_and_others_find_room() -> None:
    files = one_set(1000.0).agent()
    files.put("read", content(HALF))
    reading = files.open("read")
    writing = write(files, "f", 20)
    fill(files, 2 * SLOTS_PER_SET)
    assert files.pread(reading, 0, HALF * CHUNK) == content(HALF)
    refused(errno.ENOSPC, files.flush, writing)
    files.release(writing)
    files.release(reading)
    assert files.stat("f") is None
    assert not files.chunks.holds.held


def test_a_writer_holds_what_found_no_room_once_others_let_go() -> None:
    files = one_set(1000.0).agent()
    files.put("read", content(HALF))
    reading = files.open("read")
    writing = write(files, "f", 8)
    files.name()
    assert len(files.chunks.holds.held) == HALF
    files.release(reading)
    files.channel.clock += KEPT_SECONDS
    assert files.pread(writing, 0, CHUNK) == content(1)
    fill(files, 2 * SLOTS_PER_SET)
    assert files.pread(writing, 0, 8 * CHUNK) == content(8)
    files.close(writing)
    assert files.get("f") == content(8)


def test_two_agents_that_write_in_one_set_hear_the_truth() -> None:
    pool = one_set()
    agents = [pool.agent(), pool.agent()]
    opened = [write(each, f"f{number}", 24) for number, each in enumerate(agents)]
    for each in agents:
        fill(each, 3 * SLOTS_PER_SET)
        each.channel.clock += ASKED_SECONDS
    for number, each in enumerate(agents):
        is_stored = closed(each, opened[number])
        assert not each.chunks.holds.held
        assert readable(each, f"f{number}") == is_stored


def test_processes_that_fill_one_file_hold_it_together() -> None:
    files = one_set(1000.0).agent()
    first = files.create("f", flags=os.O_RDWR)
    second = files.create("f", OTHER, flags=os.O_RDWR)
    assert first[0] == second[0]
    files.pwrite(first, 0, content(4))
    files.pwrite(second, 4 * CHUNK, content(4, 9))
    files.name()
    files.close(first)
    fill(files, 2 * SLOTS_PER_SET)
    files.close(second)
    assert files.get("f") == content(4) + content(4, 9)


@pytest.mark.parametrize("alone", ALONE)
def test_a_file_that_is_gone_is_not_there_for_who_asks(alone: float) -> None:
    """There are two names for each chunk, so the names of files that are gone are there."""
    pool = one_set(alone)
    files = pool.agent()
    for number in range(60):
        files.put(f"f{number}", content(4, number))
    there = [number for number in range(60) if files.stat(f"f{number}") is not None]
    assert 8 <= len(there) <= 16
    assert [number for number in range(60) if readable(files, f"f{number}")] == there
    other = pool.agent()
    assert [number for number in range(60) if other.stat(f"f{number}") is not None] == there


def test_a_file_that_another_agent_evicted_is_not_there_for_who_asks() -> None:
    pool = one_set()
    files, others = pool.agent(), pool.agent()
    for number in range(16):
        files.put(f"f{number}", content(4, number))
    assert all(files.stat(f"f{number}") for number in range(16))
    for number in range(40):
        others.put(f"g{number}", content(1, number))
    there = [number for number in range(16) if files.stat(f"f{number}") is not None]
    assert [number for number in range(16) if readable(files, f"f{number}")] == there
    assert len(there) < 16


@pytest.mark.parametrize("alone", ALONE)
def test_the_name_of_a_file_that_is_gone_is_free(alone: float) -> None:
    files = one_set(alone).agent()
    for number in range(6):
        files.put(f"f{number}", content(4, number))
    fill(files, SLOTS_PER_SET)
    file = files.create("f0", flags=os.O_WRONLY | os.O_EXCL)
    files.pwrite(file, 0, content(4))
    files.close(file)
    assert files.get("f0") == content(4)
    refused(errno.ENOENT, files.rename, "f1", "elsewhere")
    files.put("new", content(2))
    files.rename("new", "f2", RENAME_NOREPLACE)
    assert files.get("f2") == content(2)
    assert files.stat("f3") is None
    refused(errno.EEXIST, files.rename, "f0", "f2", RENAME_NOREPLACE)


@pytest.mark.parametrize("alone", ALONE)
def test_who_lists_a_folder_may_remove_what_is_gone(alone: float) -> None:
    """As rmtree does: a name that a listing shows is there for who removes it."""
    files = one_set(alone).agent()
    for number in range(40):
        files.put(f"f{number}", content(4, number))
    files.face.opendir(CALLER, files.root, 0)
    names = files.listdir()
    assert len(names) == 40
    for name in sorted(names)[:30]:
        assert files.stat(name) is not None
        files.unlink(name)
    left = sorted(files.listdir())
    assert [files.stat(name) is not None for name in left[:2]].count(True) <= 2
    assert [name for name in left[2:] if files.stat(name)] == [n for n in left[2:] if readable(files, n)]


def test_the_names_of_a_volume_are_counted(files: Files) -> None:
    shown = files.face.statfs(files.root)
    assert (shown.files, shown.files_free) == (8 * SLOTS_PER_SET, 8 * SLOTS_PER_SET)  # type: ignore[union-attr]
    files.put("short", b"x")
    files.mkdir("d")
    shown = files.face.statfs(files.root)
    assert shown.files_free == shown.files - 2  # type: ignore[union-attr]
    assert shown.blocks_free == shown.blocks  # type: ignore[union-attr]


@pytest.mark.parametrize("alone", ALONE)
def test_what_is_held_for_who_looked_a_file_up_is_let_go_of_where_nobody_comes(alone: float) -> None:
    files = one_set(alone).agent()
    files.put("f", content(4))
    files.release(files.open("f"))
    assert files.stat("f") is not None, "a thread that opens what it looks up"
    files.name()
    assert len(files.chunks.holds.held) == 4
    files.channel.clock += 2 * READY_SECONDS
    files.name()
    assert not files.chunks.holds.held
    assert not len(files.face._unnamed)


def test_a_file_that_is_lost_amid_its_open_for_writing_is_not_there() -> None:
    pool = one_set()
    files, others = pool.agent(), pool.agent()
    files.put("f", content(4))
    manifest = files.manifest("f")
    assert manifest is not None
    found = files.lookup("f").attributes.ino
    refused(errno.ESTALE, lambda: files.settle(files.face.open(CALLER, found, os.O_RDWR)))
    again = files.lookup("f").attributes.ino
    others.evict(others.chunks, chunk_key(manifest.identity, 2))
    refused(errno.ENOENT, lambda: files.settle(files.face.open(CALLER, again, os.O_RDWR)))
    assert files.stat("f") is None
