"""`/kv` over a pool in memory: when a value is complete, who may take it away, and how a lost one reads."""

from __future__ import annotations

import errno
import os
import random

import pytest

from agent.fs.close_cause import Closing
from agent.fs.file_users import HOLDERS_MAX
from agent.fs.interface import NOBODY, Caller, FsError, LockOwner, SetAttributes
from agent.fs.kv_face import KV_ROOT, KvFace
from agent.pool.steps import settle
from tests.support.pool.memory_pool import MemoryPool, PoolAgent

CALLER = Caller(0, 0, 1)
MAKER = LockOwner(11, CALLER.pid)
CHILD = LockOwner(22, 2)
NAME = b"a" * 32
KEY = bytes.fromhex(NAME.decode())
VALUE = random.Random(6).randbytes(200_000)


class Files:
    """The face, with an agent of its own, driven as a door does."""

    def __init__(self, pool: MemoryPool) -> None:
        self.agent: PoolAgent = pool.agent()
        self.closing = Closing.MEANT
        self.face = KvFace([self.agent.served], lambda: self.agent.channel, judge=lambda *_: self.closing)
        self.folder = settle(self.face.lookup(CALLER, KV_ROOT, b"v"), self.agent.channel).attributes.ino

    def create(self, maker: Caller = CALLER) -> tuple[int, int]:
        entry, opened = settle(
            self.face.create(maker, self.folder, NAME, 0o644, os.O_WRONLY), self.agent.channel
        )
        return entry.attributes.ino, opened.handle

    def open(self) -> tuple[int, int]:
        entry = settle(self.face.lookup(CALLER, self.folder, NAME), self.agent.channel)
        ino = entry.attributes.ino
        return ino, settle(self.face.open(CALLER, ino, os.O_RDONLY), self.agent.channel).handle

    def write(self, file: tuple[int, int], offset: int, data: bytes, holder: LockOwner = MAKER) -> None:
        assert settle(self.face.write(*file, offset, memoryview(data), holder), self.agent.channel) == len(
            data
        )

    def flush(self, file: tuple[int, int], holder: LockOwner = MAKER, how: Closing = Closing.MEANT) -> None:
        self.closing = how
        settle(self.face.flush(*file, holder), self.agent.channel)

    def release(self, file: tuple[int, int]) -> None:
        settle(self.face.release(*file), self.agent.channel)

    def size(self, ino: int) -> int:
        return settle(self.face.getattr(CALLER, ino, None), self.agent.channel).size

    def read(self, file: tuple[int, int], offset: int, size: int) -> bytes:
        into = bytearray(size)
        count = settle(self.face.read(*file, offset, memoryview(into)), self.agent.channel)
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


@pytest.mark.parametrize("how", [Closing.DYING, Closing.UNTOLD])
def test_a_value_whose_writer_does_not_close_it_is_dropped_and_its_slot_is_free(
    pool: MemoryPool, how: Closing
) -> None:
    files = Files(pool)
    slots, taken = files.agent.volume.usage()
    file = files.create()
    files.write(file, 0, VALUE[:70_000])
    if how is Closing.DYING:
        files.flush(file, how=how)
    else:
        expect(errno.EOPNOTSUPP, files.flush, file, MAKER, how)
    number = errno.EIO if how is Closing.DYING else errno.EOPNOTSUPP
    expect(number, files.write, file, 70_000, VALUE[70_000:])
    expect(number, files.flush, file)
    files.release(file)
    assert not isinstance(files.agent.get(KEY), bytes)
    assert files.agent.volume.usage() == (slots, taken)
    assert not any(cached.reserved for cached in files.agent.volume.cache.snapshot())
    assert not len(files.agent.volume.puts_in_pieces)
    assert files.agent.put(KEY, VALUE).stored
    assert files.agent.get(KEY) == VALUE


def test_an_fsync_says_that_a_value_is_whole_where_nobody_tells_how_it_was_closed(pool: MemoryPool) -> None:
    files = Files(pool)
    file = files.create()
    files.write(file, 0, VALUE[:70_000], NOBODY)
    settle(files.face.fsync(*file, False), files.agent.channel)
    assert not isinstance(files.agent.get(KEY), bytes), "a program may write on after it"
    files.write(file, 70_000, VALUE[70_000:], NOBODY)
    settle(files.face.fsync(*file, False), files.agent.channel)
    files.flush(file, NOBODY, Closing.UNTOLD)
    assert files.agent.get(KEY) == VALUE
    # And one that goes on after its fsync has not said it.
    settle(files.face.unlink(CALLER, files.folder, NAME), files.agent.channel)
    file = files.create()
    files.write(file, 0, VALUE[:70_000], NOBODY)
    settle(files.face.fsync(*file, False), files.agent.channel)
    files.write(file, 70_000, VALUE[70_000:100_000], NOBODY)
    expect(errno.EOPNOTSUPP, files.flush, file, NOBODY, Closing.UNTOLD)
    assert not isinstance(files.agent.get(KEY), bytes)


def test_a_child_that_never_wrote_completes_nothing_and_spoils_nothing(pool: MemoryPool) -> None:
    files = Files(pool)
    file = files.create()
    files.write(file, 0, VALUE[:70_000])
    for how in Closing:
        files.flush(file, CHILD, how)
        assert not isinstance(files.agent.get(KEY), bytes)
    files.write(file, 70_000, VALUE[70_000:])
    files.flush(file)
    assert files.agent.get(KEY) == VALUE


def test_a_value_waits_for_all_who_wrote_and_for_its_maker(pool: MemoryPool) -> None:
    files = Files(pool)
    file = files.create()
    files.write(file, 0, VALUE[:70_000], CHILD)
    files.flush(file, CHILD, Closing.KEPT)
    files.flush(file, CHILD)
    assert not isinstance(files.agent.get(KEY), bytes)
    files.write(file, 70_000, VALUE[70_000:], LockOwner(33, 3))
    files.flush(file, MAKER, Closing.ONE)
    files.flush(file, MAKER)
    assert not isinstance(files.agent.get(KEY), bytes), "the second writer has it open"
    files.flush(file, LockOwner(33, 3))
    assert files.agent.get(KEY) == VALUE


def test_a_value_is_complete_at_the_last_close_of_those_who_may_not_be_looked_at(pool: MemoryPool) -> None:
    files = Files(pool)
    file = files.create()
    files.write(file, 0, VALUE, CHILD)
    files.flush(file, CHILD, Closing.ONE)
    files.flush(file, MAKER, Closing.ONE)
    assert not isinstance(files.agent.get(KEY), bytes)
    files.release(file)
    assert files.agent.get(KEY) == VALUE


def test_a_close_in_doubt_completes_a_value_only_when_nobody_has_it_open(pool: MemoryPool) -> None:
    files = Files(pool)
    file = files.create()
    files.write(file, 0, VALUE, CHILD)
    files.flush(file, MAKER)
    files.flush(file, CHILD, Closing.MANY)
    assert not isinstance(files.agent.get(KEY), bytes)
    files.release(file)
    assert files.agent.get(KEY) == VALUE


def test_a_writer_that_dies_after_a_close_in_doubt_stores_nothing(pool: MemoryPool) -> None:
    files = Files(pool)
    file = files.create()
    files.write(file, 0, VALUE[:70_000])
    files.flush(file, MAKER, Closing.MANY)
    files.flush(file, MAKER, Closing.DYING)
    files.release(file)
    assert not isinstance(files.agent.get(KEY), bytes)


def test_a_close_that_was_looked_at_settles_one_in_doubt(pool: MemoryPool) -> None:
    files = Files(pool)
    file = files.create()
    files.write(file, 0, VALUE)
    files.flush(file, MAKER, Closing.MANY)
    files.flush(file, MAKER)
    assert files.agent.get(KEY) == VALUE


def test_a_file_that_nobody_closed_stores_nothing(pool: MemoryPool) -> None:
    files = Files(pool)
    file = files.create()
    files.write(file, 0, VALUE)
    files.release(file)
    assert not isinstance(files.agent.get(KEY), bytes)


def test_a_declared_length_completes_a_value_with_its_last_byte(pool: MemoryPool) -> None:
    files = Files(pool)
    file = files.create()
    settle(files.face.setattr(CALLER, file[0], SetAttributes(size=len(VALUE)), file[1]), files.agent.channel)
    assert files.size(file[0]) == len(VALUE)
    files.write(file, 0, VALUE[:70_000])
    expect(errno.EINVAL, files.flush, file)
    files.release(file)
    assert not isinstance(files.agent.get(KEY), bytes)
    file = files.create()
    files.face.fallocate(*file, 0, 0, len(VALUE))
    files.write(file, 0, VALUE[:70_000])
    files.write(file, 70_000, VALUE[70_000:])
    assert files.agent.get(KEY) == VALUE
    files.flush(file, how=Closing.DYING)
    assert files.agent.get(KEY) == VALUE
    second = files.create()
    files.face.fallocate(*second, 0, 0, 5)
    files.write(second, 0, b"other")
    expect(errno.EEXIST, files.flush, second)
    for length in (0, 6, 1 << 40):
        change = SetAttributes(size=length)
        expect(errno.EPERM, files.face.setattr, CALLER, second[0], change, second[1])
    expect(errno.EFBIG, files.face.fallocate, *files.create(), 0, 0, 1 << 40)


def test_no_more_processes_than_are_remembered_write_one_value(pool: MemoryPool) -> None:
    files = Files(pool)
    file = files.create()
    for number in range(HOLDERS_MAX):
        files.write(file, number, b"x", LockOwner(100 + number, 100 + number))
    expect(errno.EMFILE, files.write, file, HOLDERS_MAX, b"x", LockOwner(99, 99))


@pytest.mark.parametrize("length", [5, 199_999])
def test_a_file_shows_the_length_of_what_it_reads_or_is_a_miss(pool: MemoryPool, length: int) -> None:
    """A value is removed, and another of another length stored, between the look-up and the read."""
    files = Files(pool)
    other = pool.agent()
    assert files.agent.put(KEY, VALUE).stored
    ino, handle = files.open()
    assert other.channel.run(other.served.delete(other.channel, KEY, other.deadline()))
    assert other.put(KEY, VALUE[:length]).stored
    assert files.read((ino, handle), 0, 262_144) == b""
    assert files.read((ino, handle), 0, 262_144) == b"", "for good: a reader may go on"
    assert files.size(ino) == len(VALUE)
    tally = files.agent.tally
    assert (tally.gets_hit, tally.gets_missed) == (0, 1)
    again = files.open()
    assert again[0] != ino
    assert files.size(again[0]) == length
    assert files.read(again, 0, 262_144) == VALUE[:length]
    assert files.size(ino) == len(VALUE)


def test_what_is_written_anew_changes_nothing_of_an_open_value(pool: MemoryPool) -> None:
    files = Files(pool)
    assert files.agent.put(KEY, VALUE).stored
    reader = files.open()
    writer = files.create()
    assert writer[0] != reader[0]
    files.write(writer, 0, b"short")
    assert (files.size(reader[0]), files.size(writer[0])) == (len(VALUE), 5)
    assert files.read(reader, 0, 262_144) == VALUE
