"""A file that is open for reading: several reads of one chunk at once, and what is prestaged."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any, cast

import pytest

from agent.fs.shared.file_reader import AHEAD, AHEAD_BYTES, ASKED_AT_ONCE_BYTES, OpenFile, ReadsUnderWay
from agent.fs.shared.manifest import Kind, Manifest
from agent.fs.shared.volume import SharedVolume
from agent.pool.counters import MissCause
from agent.pool.steps import IoChannel, Steps, Wait, settle
from tests.support.fs.memory_shared import CALLER, CHUNK, SharedPool
from tests.support.pool.memory_channel import MemoryPending

IDENTITY = bytes(range(1, 17))
MANIFEST = Manifest(Kind.FILE, b"f", 0, 0, 0, 0, 0, 0, IDENTITY, 12 * CHUNK, CHUNK)


class SlowReader:
    """Waits once in each read, and must not be closed meanwhile."""

    cause: MissCause | None = None
    length = CHUNK

    def __init__(self) -> None:
        self.is_closed = False

    def read(self, channel: IoChannel, offset: int, into: memoryview, deadline: float) -> Steps[int]:
        yield Wait(MemoryPending(), deadline)
        assert not self.is_closed
        return len(into)

    def close(self) -> None:
        self.is_closed = True


def opened(
    ahead: Any = None, under_way: ReadsUnderWay | None = None, manifest: Manifest = MANIFEST
) -> tuple[OpenFile, list[SlowReader], Any]:
    files = SharedPool().agent()
    readers: list[SlowReader] = []

    class Chunks:
        timing = files.volume.timing

        def reader(self, key: bytes, prestage: object = None) -> SlowReader:
            readers.append(SlowReader())
            return readers[-1]

    volume = replace(files.volume, chunks=cast(Any, Chunks()))
    assert isinstance(volume, SharedVolume)
    return OpenFile(volume, manifest, (), ahead=ahead, under_way=under_way), readers, files.channel


def begun(file: OpenFile, channel: Any, offset: int, size: int) -> Steps[int]:
    steps = file.read(channel, offset, memoryview(bytearray(size)))
    next(steps)
    return steps


def ended(steps: Steps[int]) -> int:
    try:
        steps.send(True)
    except StopIteration as end:
        return int(end.value)
    raise AssertionError("it waits for more")


def test_a_chunk_is_read_on_after_another_read_came_to_its_end() -> None:
    file, readers, channel = opened()
    first = begun(file, channel, 0, 4096)
    last = begun(file, channel, CHUNK - 4096, 4096)
    assert ended(last) == 4096
    assert ended(first) == 4096
    assert len(readers) == 1
    assert readers[0].is_closed


def test_a_read_does_not_wait_for_another_that_begins_with_the_chunk() -> None:
    """It would wait with a worker of its own, for as long as the chunk's enclosure answers nobody."""
    file, readers, channel = opened()
    first = begun(file, channel, 0, 4096)
    readers[0].length = None  # type: ignore[assignment]
    second = begun(file, channel, 4096, 4096)
    assert len(readers) == 2
    assert ended(second) == 4096
    assert readers[1].is_closed
    readers[0].length = CHUNK
    assert ended(first) == 4096
    assert not readers[0].is_closed, "it is the one that is kept"


def test_what_came_is_served_though_another_read_of_the_chunk_was_late() -> None:
    file, readers, channel = opened()
    first = begun(file, channel, 0, 4096)
    readers[0].cause = MissCause.LATE
    assert ended(first) == 4096
    assert readers[0].is_closed, "the next read begins anew"


def test_chunks_beyond_those_that_are_kept_are_closed_by_their_last_read() -> None:
    file, readers, channel = opened()
    reads = [begun(file, channel, number * CHUNK, 4096) for number in range(8)]
    assert not any(reader.is_closed for reader in readers)
    assert [ended(read) for read in reads] == [4096] * 8
    assert [reader.is_closed for reader in readers] == [True] * 4 + [False] * 4
    file.close()
    assert all(reader.is_closed for reader in readers)


def test_a_file_read_from_its_beginning_has_the_next_chunks_brought() -> None:
    asked: list[bytes] = []
    file, _, channel = opened(lambda volume, key: asked.append(key))
    for number in range(3):
        assert ended(begun(file, channel, number * CHUNK, CHUNK)) == CHUNK
        assert len(asked) == AHEAD + number
    assert len(set(asked)) == len(asked)
    before = len(asked)
    assert ended(begun(file, channel, 9 * CHUNK, CHUNK)) == CHUNK
    assert len(asked) == before, "it jumped"


@pytest.mark.parametrize(
    ("chunk_bytes", "count"), [(AHEAD_BYTES // AHEAD, AHEAD), (AHEAD_BYTES, 1), (16 << 20, 1)]
)
def test_of_long_chunks_fewer_are_brought(chunk_bytes: int, count: int) -> None:
    asked: list[bytes] = []
    long = replace(MANIFEST, chunk_bytes=chunk_bytes, length=12 * chunk_bytes)
    file, _, _ = opened(lambda volume, key: asked.append(key), manifest=long)
    for number in range(3):
        file._look_ahead(number, 0)
        assert len(asked) == count + number


def test_nothing_is_brought_while_others_read() -> None:
    asked: list[bytes] = []
    under_way = ReadsUnderWay()
    file, _, channel = opened(lambda volume, key: asked.append(key), under_way)
    with under_way:
        assert ended(begun(file, channel, 0, CHUNK)) == CHUNK
    assert not asked
    assert under_way.count == 0


@pytest.mark.parametrize(
    ("length", "flags", "in_turn"),
    [
        (2 * CHUNK, os.O_DIRECT, False),
        (ASKED_AT_ONCE_BYTES, os.O_DIRECT, False),
        (ASKED_AT_ONCE_BYTES + 1, os.O_DIRECT, True),
        (ASKED_AT_ONCE_BYTES + 1, 0, False),
    ],
)
@pytest.mark.parametrize("chunk_bytes", [CHUNK, 16 << 20])
def test_the_kernel_asks_for_a_short_file_at_once(
    length: int, flags: int, in_turn: bool, chunk_bytes: int
) -> None:
    """With O_DIRECT by itself the kernel passes its page cache by, and waits for no piece before the next."""
    files = SharedPool(chunk_bytes=chunk_bytes).agent()
    files.put("f", bytes(length))
    opened = settle(files.face.open(CALLER, files.lookup("f").attributes.ino, flags), files.channel)
    assert opened.direct_io == in_turn
    assert opened.keep_cache != in_turn


def test_what_was_written_through_its_inode_stays_out_of_the_page_cache() -> None:
    files = SharedPool().agent()
    file = files.create("f")
    files.pwrite(file, 0, bytes(2 * CHUNK))
    files.close(file)
    opened = settle(files.face.open(CALLER, file[0], os.O_DIRECT), files.channel)
    assert opened.direct_io
    assert not opened.keep_cache
