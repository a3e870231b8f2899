"""`/shared` over a pool in memory: a file that is written over builds on an earlier content, and keeps it."""

from __future__ import annotations

import errno
import os

import pytest

from agent.fs.interface import LockOwner, Opened
from agent.fs.shared.file_writer import FileWriter
from agent.fs.shared.paths import chunk_key
from agent.pool.steps import IoChannel, Steps, settle
from tests.support.fs.memory_shared import CALLER, CHUNK, OTHER, Files, SharedPool, refused
from tests.unit.shared.test_shared_face import DATA

THEIRS = LockOwner(12, OTHER.pid)
NEW = b"\x07" * CHUNK
CHUNKS = -(-len(DATA) // CHUNK)


def key_in(files: Files, number: int) -> bytes:
    manifest = files.manifest("f")
    assert manifest is not None
    return chunk_key(manifest.origin(number), number)


def with_new(*numbers: int) -> bytes:
    data = bytearray(DATA)
    for number in numbers:
        data[number * CHUNK : (number + 1) * CHUNK] = NEW
    return bytes(data)


@pytest.mark.parametrize("flags", [os.O_RDWR, os.O_WRONLY])
def test_a_file_that_has_lost_a_chunk_is_not_there_for_who_writes_it_over(
    files: Files, others: Files, flags: int
) -> None:
    files.put("f", DATA)
    others.evict(others.chunks, key_in(files, 3))
    refused(errno.ENOENT, files.open, "f", flags)
    assert files.manifest("f") is None
    files.collect()
    assert files.taken() == 0
    files.put("f", DATA)
    assert others.get("f") == DATA


def test_a_file_that_has_lost_a_chunk_may_be_written_anew(files: Files, others: Files) -> None:
    files.put("f", DATA)
    others.evict(others.chunks, key_in(files, 3))
    file = files.open("f", os.O_RDWR | os.O_TRUNC)
    files.pwrite(file, 0, NEW)
    files.close(file)
    assert others.get("f") == NEW


def test_a_file_that_is_not_to_be_read_just_now_is_not_given_up(pool: SharedPool, files: Files) -> None:
    files.put("f", DATA)
    for namespace in pool.namespaces[:2]:
        namespace.down = True
    refused(errno.ENOENT, files.open, "f", os.O_RDWR)
    for namespace in pool.namespaces[:2]:
        namespace.down = False
    assert files.get("f") == DATA


def test_cutting_a_file_that_has_lost_a_chunk_finds_none(files: Files, others: Files) -> None:
    files.put("f", DATA)
    others.evict(others.chunks, key_in(files, 0))
    file = files.lookup("f").attributes.ino, 0
    refused(errno.ENOENT, files.ftruncate, file, 2 * CHUNK)
    assert files.stat("f") is None
    assert not files.chunks.holds.held


def test_what_a_file_begins_with_is_not_evicted_here_before_it_is_closed(files: Files) -> None:
    files.put("f", DATA)
    file = files.open("f", os.O_RDWR)
    assert len(files.chunks.holds.held) == CHUNKS
    for number in range(files.volume.chunks_max // 8):
        files.put(f"g{number}", b"\x09" * (8 * CHUNK))
    assert files.pread(file, 0, len(DATA)) == DATA
    files.close(file)
    assert not files.chunks.holds.held


def test_two_processes_that_write_one_file_over_write_in_one_content(files: Files, others: Files) -> None:
    files.put("f", DATA)
    ours = files.open("f", os.O_RDWR)
    theirs = files.open("f", os.O_RDWR, OTHER)
    assert ours[0] == theirs[0]
    files.pwrite(ours, 0, NEW)
    files.close(ours)
    files.collect()
    assert others.get("f") == DATA, "the other process has not closed it"
    assert files.pread(theirs, 0, len(DATA)) == with_new(0)
    files.pwrite(theirs, CHUNK, NEW, THEIRS)
    files.flush(theirs, THEIRS)
    assert others.get("f") == with_new(0, 1), "the last close has published it"
    files.release(theirs)
    files.collect()
    assert others.get("f") == files.get("f") == with_new(0, 1)
    files.unlink("f")
    files.collect()
    assert others.stat("f") is None
    assert files.taken() == 0


def test_a_reader_keeps_what_it_opened_however_often_it_is_written_over(files: Files, others: Files) -> None:
    files.put("f", DATA)
    file = files.open("f")
    for number in range(3):
        writing = files.open("f", os.O_RDWR)
        files.pwrite(writing, number * CHUNK, NEW)
        files.close(writing)
        files.collect()
    assert files.pread(file, 0, len(DATA)) == DATA
    files.release(file)
    files.collect()
    assert others.get("f") == with_new(0, 1, 2)
    assert files.taken() == CHUNKS, "what the reader kept has gone"


def test_a_part_over_what_a_writer_published_does_not_take_the_place_of_what_came_then(
    files: Files, others: Files
) -> None:
    file = files.create("f")
    files.pwrite(file, 0, DATA)
    files.flush(file)
    files.put("g", NEW)
    files.rename("g", "f")
    files.collect()
    assert others.get("f") == NEW
    files.pwrite(file, CHUNK, NEW)
    refused(errno.ESTALE, files.close, file)
    files.collect()
    assert others.get("f") == NEW


def test_a_file_of_another_process_is_opened_by_what_is_there_now(files: Files) -> None:
    """What is open is counted once for each open, and let go of."""
    files.put("f", DATA)
    for flags in (os.O_RDONLY, os.O_RDWR, os.O_WRONLY):
        files.release(files.open("f", flags, CALLER))
    files.unlink("f")
    files.collect()
    assert files.taken() == 0
    assert not files.chunks.holds.held


def test_a_delete_that_waits_spares_what_was_opened_meanwhile(files: Files) -> None:
    """The name was looked up before it was replaced, and the file opened after that."""
    files.put("f", DATA)
    ino = files.lookup("f").attributes.ino
    files.put("g", NEW)
    files.rename("g", "f")
    file = files.open_node(ino)
    files.collect()
    assert files.pread(file, 0, len(DATA)) == DATA
    files.release(file)
    files.collect()
    assert files.taken() == 1
    assert settle(files.discards.collect(files.channel), files.channel) is False


@pytest.mark.interpreted
def test_who_opens_a_file_amid_its_last_close_keeps_what_it_builds_on(
    files: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    files.put("f", DATA)
    file = files.open("f", os.O_RDWR)
    files.pwrite(file, 0, NEW)
    again: list[tuple[int, int]] = []
    end = FileWriter.end

    def opened_meanwhile(writer: FileWriter, channel: IoChannel) -> Steps[None]:
        yield from end(writer, channel)
        opened = files.face.open(CALLER, file[0], os.O_RDWR)
        assert isinstance(opened, Opened)
        again.append((file[0], opened.handle))

    with monkeypatch.context() as patch:
        patch.setattr(FileWriter, "end", opened_meanwhile)
        files.close(file)
    there = files.manifest("f")
    assert there is not None
    files.discards.replaced(files.volume, there)
    files.collect()
    files.pwrite(again[0], CHUNK, NEW)
    files.close(again[0])
    assert files.get("f") == with_new(0, 1)
    assert not files.discards._opens
