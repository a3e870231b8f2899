"""fsync(2) while an enclosure is away: files whose blocks are elsewhere are synced, and no others."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from agent.fs.files import fsync_tracking
from agent.fs.files.face import FilesFace
from agent.fs.files.options import FilesOptions
from agent.fs.files.pool_store import PoolBlockStore
from tests.support.fs.files_calls import FaceCalls
from tests.support.pool.memory_pool import MemoryPool, PoolAgent

BLOCK = 16384
FILES = 24


class Shelves:
    """/fs over a volume that lies on two namespaces."""

    def __init__(self, folder: Path) -> None:
        self.pool = MemoryPool()
        self.pool.settings = replace(self.pool.settings, kind="files")
        self.here, self.there = self.pool.namespaces
        self._folder = folder
        self.start()

    def start(self) -> None:
        self.agent: PoolAgent = self.pool.agent()
        store = PoolBlockStore([self.agent.volume], lambda: self.agent.channel)
        options = FilesOptions(staging_bytes=4 * BLOCK, workers=4, cache_seconds=0)
        self.face = FilesFace(
            self._folder / "files.sqlite", store, options, clock=lambda: self.agent.channel.clock
        )
        self.calls = FaceCalls(self.face, self.agent.channel)

    def write(self, number: int, content: bytes) -> None:
        file = self.calls.open(f"f{number}", os.O_CREAT | os.O_WRONLY)
        self.calls.pwrite(file, content, 0)
        self.calls.close(file)

    def fsync(self, number: int) -> int:
        """0, or the errno."""
        file = self.calls.open(f"f{number}", os.O_WRONLY)
        try:
            self.calls.fsync(file)
        except OSError as refusal:
            return refusal.errno or -1
        finally:
            self.calls.close(file)
        return 0

    def lost_with_the_other(self) -> set[int]:
        """Files that cannot be read while it is away."""
        found = set()
        for number in range(FILES):
            file = self.calls.open(f"f{number}", os.O_RDONLY)
            try:
                self.calls.pread(file, 100, 0)
            except OSError:
                found.add(number)
            self.calls.close(file)
        return found


@pytest.fixture
def shelves(tmp_path: Path) -> Iterator[Shelves]:
    made = Shelves(tmp_path)
    for number in range(FILES):
        made.write(number, b"%d" % number * 3000)
    yield made
    made.face.close()


@pytest.mark.parametrize("started_again", [False, True])
def test_only_files_with_blocks_there_fail(shelves: Shelves, started_again: bool) -> None:
    if started_again:
        # What was written before is not durable, and the directories are not remembered.
        shelves.face.close()
        shelves.start()
    shelves.there.down = True
    refused = {number for number in range(FILES) if shelves.fsync(number)}
    assert refused == shelves.lost_with_the_other()
    assert 2 < len(refused) < FILES - 2
    for number in range(FILES, 2 * FILES):
        shelves.write(number, b"new" * 3000)
        assert shelves.fsync(number) == 0
    shelves.there.down = False
    assert all(shelves.fsync(number) == 0 for number in refused)


def test_what_was_flushed_before_is_no_matter(shelves: Shelves) -> None:
    assert shelves.fsync(0) == 0
    shelves.there.down = True
    assert all(shelves.fsync(number) == 0 for number in range(FILES))
    assert shelves.there.flushes == 1


def test_a_flush_that_failed_is_asked_for_again(shelves: Shelves) -> None:
    shelves.there.unflushable = True
    refused = [number for number in range(FILES) if shelves.fsync(number) == errno.EIO]
    assert refused
    assert all(shelves.fsync(number) == errno.EIO for number in refused)
    shelves.there.unflushable = False
    assert shelves.fsync(refused[0]) == 0
    flushes = shelves.there.flushes
    assert shelves.fsync(refused[1]) == 0
    assert shelves.there.flushes == flushes, "one flush was for all of them"


MORE = range(FILES, FILES + 12)


def write_more(shelves: Shelves) -> None:
    """Blocks that are acknowledged and not flushed, a file each."""
    for number in MORE:
        shelves.write(number, b"%d" % number * 2000)


def unreadable(shelves: Shelves) -> set[int]:
    found = set()
    for number in MORE:
        file = shelves.calls.open(f"f{number}", os.O_RDONLY)
        try:
            assert len(shelves.calls.pread(file, 4000, 0)) == 4000
        except OSError:
            found.add(number)
        shelves.calls.close(file)
    return found


@pytest.mark.expects_log("are lost: an enclosure had acknowledged them|lost a block and was removed")
def test_what_was_lost_with_the_power_before_the_flush_fails_the_fsync_once(shelves: Shelves) -> None:
    assert shelves.fsync(0) == 0
    kept = dict(shelves.there.blocks)
    write_more(shelves)
    shelves.there.new_session(kept)
    lost = {number for number in MORE if shelves.fsync(number) == errno.EIO}
    assert 0 < len(lost) < len(MORE)
    assert all(shelves.fsync(number) == 0 for number in lost)
    assert unreadable(shelves) == lost


def test_a_session_that_ended_without_a_loss_fails_no_fsync(shelves: Shelves) -> None:
    assert shelves.fsync(0) == 0
    write_more(shelves)
    shelves.there.new_session()
    reads, flushes = shelves.there.reads, shelves.there.flushes
    assert all(shelves.fsync(number) == 0 for number in MORE)
    assert shelves.there.reads > reads, "they were looked for"
    assert shelves.there.flushes > flushes
    reads = shelves.there.reads
    assert all(shelves.fsync(number) == 0 for number in range(MORE.stop))
    assert shelves.there.reads == reads, "once is enough, and what was synced before is not looked for"


def test_an_enclosure_that_is_away_leaves_the_doubt(shelves: Shelves) -> None:
    assert shelves.fsync(0) == 0
    kept = dict(shelves.there.blocks)
    write_more(shelves)
    shelves.there.new_session()
    shelves.there.down = True
    away = {number for number in MORE if shelves.fsync(number)}
    assert away == unreadable(shelves)
    shelves.there.down = False
    shelves.there.flushes, before = 0, dict(shelves.there.blocks)
    assert all(shelves.fsync(number) == 0 for number in away)
    assert shelves.there.flushes
    assert shelves.there.blocks == before
    assert before != kept


def test_blocks_that_wait_for_a_flush_are_bounded(shelves: Shelves, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fsync_tracking, "BLOCKS_MAX", 4)
    assert shelves.fsync(0) == 0
    flushes = shelves.here.flushes + shelves.there.flushes
    kept = dict(shelves.there.blocks)
    write_more(shelves)
    assert shelves.here.flushes + shelves.there.flushes > flushes, "a put that finds it full flushes"
    shelves.there.new_session(kept)
    assert all(shelves.fsync(number) == 0 for number in MORE[:3]), "they were flushed while the session stood"
