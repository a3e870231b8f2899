"""`/kv` over a pool in memory: whose value a writer may take away again, and how a lost value reads."""

from __future__ import annotations

import errno
import os
import random

import pytest

from agent.fs.interface import Caller, FsError
from agent.fs.kv_face import KV_ROOT, KvFace
from agent.pool.steps import settle
from tests.support.memory_pool import MemoryPool, PoolAgent

CALLER = Caller(0, 0, 1)
NAME = b"a" * 32
KEY = bytes.fromhex(NAME.decode())
VALUE = random.Random(6).randbytes(200_000)


class Files:
    """The face, with an agent of its own, driven as a door does."""

    def __init__(self, pool: MemoryPool) -> None:
        self.agent: PoolAgent = pool.agent()
        self.face = KvFace([self.agent.volume], lambda: self.agent.lanes)
        self.folder = settle(self.face.lookup(CALLER, KV_ROOT, b"v"), self.agent.lanes).attributes.ino

    def create(self) -> tuple[int, int]:
        entry, opened = settle(
            self.face.create(CALLER, self.folder, NAME, 0o644, os.O_WRONLY), self.agent.lanes
        )
        return entry.attributes.ino, opened.handle

    def open(self) -> tuple[int, int]:
        entry = settle(self.face.lookup(CALLER, self.folder, NAME), self.agent.lanes)
        ino = entry.attributes.ino
        return ino, settle(self.face.open(CALLER, ino, os.O_RDONLY), self.agent.lanes).handle

    def write(self, file: tuple[int, int], offset: int, data: bytes) -> None:
        assert settle(self.face.write(*file, offset, memoryview(data)), self.agent.lanes) == len(data)

    def flush(self, file: tuple[int, int]) -> None:
        settle(self.face.flush(*file), self.agent.lanes)

    def read(self, file: tuple[int, int], offset: int, size: int) -> bytes:
        into = bytearray(size)
        count = settle(self.face.read(*file, offset, memoryview(into)), self.agent.lanes)
        return bytes(into[:count])


@pytest.fixture
def pool() -> MemoryPool:
    return MemoryPool((2,), value_bytes=262_144)


def expect(number: int, action: object, *arguments: object) -> None:
    with pytest.raises(FsError) as refused:
        action(*arguments)  # type: ignore[operator]
    assert refused.value.errno == number


def test_writing_on_removes_what_this_writer_stored(pool: MemoryPool) -> None:
    files = Files(pool)
    file = files.create()
    files.write(file, 0, b"first half")
    files.flush(file)
    assert files.agent.get(KEY) == b"first half"
    expect(errno.EIO, files.write, file, 10, b"second half")
    assert not isinstance(files.agent.get(KEY), bytes)


def test_writing_on_leaves_a_value_that_was_there_alone(pool: MemoryPool) -> None:
    files = Files(pool)
    early, late = files.create(), files.create()
    files.write(late, 0, b"late")
    files.write(early, 0, b"early")
    files.flush(early)
    expect(errno.EEXIST, files.flush, late)
    expect(errno.EIO, files.write, late, 4, b"more")
    assert files.agent.get(KEY) == b"early"
    # The same for one that finds it stored when it begins.
    third = files.create()
    files.write(third, 0, b"third")
    expect(errno.EEXIST, files.flush, third)
    expect(errno.EIO, files.write, third, 5, b"more")
    assert files.agent.get(KEY) == b"early"


def test_writing_on_after_a_refusal_leaves_another_s_value_alone(pool: MemoryPool) -> None:
    files, others = Files(pool), pool.agent()
    file = files.create()
    files.write(file, 0, b"mine")
    pool.namespaces[0].broken = True
    expect(errno.EIO, files.flush, file)
    pool.namespaces[0].broken = False
    assert others.put(KEY, b"theirs").stored
    expect(errno.EIO, files.write, file, 4, b"more")
    assert others.get(KEY) == b"theirs"


def test_a_value_lost_in_the_middle_is_not_a_shorter_one(pool: MemoryPool) -> None:
    files = Files(pool)
    assert files.agent.put(KEY, VALUE).stored
    file = files.open()
    assert files.read(file, 0, 65_536) == VALUE[:65_536]
    pool.namespaces[0].down = True
    expect(errno.EIO, files.read, file, 65_536, 65_536)
    pool.namespaces[0].down = False
    expect(errno.EIO, files.read, file, 131_072, 65_536)
    assert files.agent.tally.gets_hit == 0
    assert files.agent.tally.gets_missed == 1
    whole = files.open()
    assert files.read(whole, 0, 262_144) == VALUE
    assert files.read(whole, len(VALUE), 4096) == b"", "the end is no loss"


def test_a_value_lost_before_its_first_range_is_an_empty_file(pool: MemoryPool) -> None:
    files = Files(pool)
    assert files.agent.put(KEY, VALUE).stored
    file = files.open()
    pool.namespaces[0].down = True
    assert files.read(file, 0, 65_536) == b""
    assert files.read(file, 65_536, 65_536) == b""
