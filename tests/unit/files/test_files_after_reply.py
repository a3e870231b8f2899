"""Blocks that are sealed after the answer to their writer: several at once, current in order, never lost.

The thread of a test is the worker that puts the seals off, so a test says when each of them goes on.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from agent.fs.after_reply import AfterReply, WorkAfterReply, after_reply_of
from agent.fs.files.face import FilesFace
from agent.fs.files.options import FilesOptions
from agent.host_os.per_user_bounds import CATALOGUE, Bounds
from agent.pool.steps import Acquire, Steps
from tests.support.fs.files_calls import FaceCalls
from tests.support.pool.inline_runner import InlineRunner
from tests.support.pool.memory_blocks import MemoryBlockStore
from tests.unit.files.conftest import BLOCK, World, refused

CREATE = os.O_CREAT | os.O_RDWR
RUN = InlineRunner()
WAITS_SECONDS = 0.05
"""So long a call that must not end yet is watched."""
FREE_SECONDS = 30.0
"""Within which a lock is free that nobody holds but for a moment."""


@pytest.fixture
def put_off(world: World) -> Iterator[WorkAfterReply]:
    """What this thread has put off; up to eight seals."""
    world.options = dataclasses.replace(world.options, workers=16, staging_bytes=16 * BLOCK)
    world.restart()
    worker = world.face.after_reply.join()
    yield worker
    worker.leave()


def block_of(number: int) -> bytes:
    return bytes([number]) * BLOCK


def written(world: World, blocks: int) -> tuple[int, int]:
    file = world.calls.open("file", CREATE)
    for number in range(blocks):
        assert world.calls.pwrite(file, block_of(number), number * BLOCK) == BLOCK
    return file


def content(blocks: int) -> bytes:
    return b"".join(map(block_of, range(blocks)))


def beside(call: threading.Thread) -> None:
    call.start()
    call.join(WAITS_SECONDS)
    assert call.is_alive(), "it did not wait for what is under way"


def test_several_blocks_of_a_file_are_under_way_at_once(world: World, put_off: WorkAfterReply) -> None:
    file = written(world, 4)
    assert len(put_off.due) == world.face.after_reply.under_way == 4
    assert world.store.puts == 0
    assert world.calls.pread(file, 5 * BLOCK, 0) == content(4)
    assert world.calls.fstat(file).size == 4 * BLOCK
    put_off.run(RUN)
    assert world.store.puts == 4
    assert world.face.after_reply.under_way == 0
    assert world.face.gauges().staging_bytes == 0
    assert world.calls.pread(file, 5 * BLOCK, 0) == content(4)
    world.calls.close(file)
    assert world.store.puts == 4


def test_blocks_that_are_filled_by_parts_are_put_off_too(world: World, put_off: WorkAfterReply) -> None:
    file = world.calls.open("file", CREATE)
    part = BLOCK // 4
    for at in range(0, 2 * BLOCK, part):
        world.calls.pwrite(file, content(2)[at : at + part], at)
    assert len(put_off.due) == 2
    put_off.run(RUN)
    assert world.calls.pread(file, 2 * BLOCK, 0) == content(2)
    assert world.face.gauges().staging_bytes == 0
    world.calls.close(file)


def test_a_request_over_several_blocks_puts_off_its_last(world: World, put_off: WorkAfterReply) -> None:
    file = world.calls.open("file", CREATE)
    assert world.calls.pwrite(file, content(3), 0) == 3 * BLOCK
    assert world.store.puts == 2
    assert len(put_off.due) == 1
    put_off.run(RUN)
    assert world.calls.pwrite(file, content(3)[BLOCK // 2 :], BLOCK // 2) == 2 * BLOCK + BLOCK // 2
    put_off.run(RUN)
    assert world.calls.pread(file, 3 * BLOCK, 0) == content(3)
    world.calls.close(file)


def until_it_waits(steps: Steps[None]) -> Acquire:
    """Go on with a seal up to where it waits for an earlier one."""
    request = next(steps)
    assert isinstance(request, Acquire)
    return request


def goes_on(steps: Steps[None], waited_for: Acquire) -> None:
    """What it waited for has ended: the seal comes to its own end. Another thread that waited for it too
    may hold the lock for a moment."""
    answer = waited_for.lock.acquire(timeout=FREE_SECONDS)
    with contextlib.suppress(StopIteration):
        while True:
            request = steps.send(answer)
            assert isinstance(request, Acquire)
            answer = request.lock.acquire(timeout=FREE_SECONDS)


def test_a_block_becomes_current_after_those_before_it(world: World, put_off: WorkAfterReply) -> None:
    file = written(world, 2)
    first, second = (work.steps() for work in put_off.due)
    waited_for = until_it_waits(second)
    assert world.store.puts == 1
    assert sealed_bytes(world) == 0
    RUN.run(first)
    assert sealed_bytes(world) == BLOCK
    goes_on(second, waited_for)
    assert sealed_bytes(world) == 2 * BLOCK
    world.calls.close(file)
    assert world.calls.get("file") == content(2)


def sealed_bytes(world: World) -> int:
    """What is left of the file where the agent is killed now."""
    [(size,)] = world.face._database.query("SELECT size FROM inodes WHERE ino = 2")
    [(stored,)] = world.face._database.query("SELECT COALESCE(SUM(length), 0) FROM blocks")
    assert size == stored
    return int(size)


def test_fsync_waits_for_what_is_under_way_and_begins_none_of_it_again(
    world: World, put_off: WorkAfterReply
) -> None:
    file = written(world, 3)
    other = FaceCalls(world.face, InlineRunner())
    syncing = threading.Thread(target=other.fsync, args=(file,))
    beside(syncing)
    assert world.store.flushes == 0
    put_off.run(RUN)
    syncing.join()
    assert world.store.puts == 3
    assert world.store.flushes == 1
    world.calls.close(file)


@pytest.mark.parametrize("change", ["truncate", "write"])
def test_who_changes_a_block_waits_for_its_seal(world: World, put_off: WorkAfterReply, change: str) -> None:
    file = written(world, 2)
    other = FaceCalls(world.face, InlineRunner())
    if change == "truncate":
        changing = threading.Thread(target=other.ftruncate, args=(file, 100))
    else:
        changing = threading.Thread(target=other.pwrite, args=(file, b"new", 97))
    beside(changing)
    assert world.calls.pread(file, 3 * BLOCK, 0) == content(2)
    put_off.run(RUN)
    changing.join()
    expected = bytearray(content(2))
    if change == "truncate":
        del expected[100:]
    else:
        expected[97:100] = b"new"
    assert world.calls.pread(file, 3 * BLOCK, 0) == expected
    world.calls.close(file)
    assert world.calls.get("file") == expected


def test_a_block_that_cannot_be_sealed_stays_though_its_request_is_over(
    world: World, put_off: WorkAfterReply
) -> None:
    file = world.calls.open("file", CREATE)
    buffer = bytearray(block_of(1))
    world.calls.do(lambda: world.face.write(*file, 0, memoryview(buffer)))
    world.store.unavailable = {"put"}
    put_off.run(RUN)
    buffer[:] = block_of(9)
    assert world.calls.pread(file, 2 * BLOCK, 0) == block_of(1)
    refused(errno.EIO, lambda: world.calls.pwrite(file, b"more", BLOCK))
    refused(errno.EIO, lambda: world.calls.fsync(file))
    world.store.unavailable = set()
    world.calls.fsync(file)
    world.restart()
    assert world.calls.get("file") == block_of(1)


def test_blocks_behind_one_that_failed_wait_for_it(world: World, put_off: WorkAfterReply) -> None:
    file = written(world, 3)
    first, second, third = (work.steps() for work in put_off.due)
    waited_for = until_it_waits(third)
    world.store.unavailable = {"put"}
    RUN.run(first)
    world.store.unavailable = set()
    RUN.run(second)
    goes_on(third, waited_for)
    assert sealed_bytes(world) == 0
    world.calls.fsync(file)
    assert sealed_bytes(world) == 3 * BLOCK
    world.collect()
    assert len(world.store.blocks) == 3
    world.calls.close(file)
    assert world.calls.get("file") == content(3)


def test_memory_is_taken_from_a_file_behind_what_is_under_way(world: World, put_off: WorkAfterReply) -> None:
    """Another file's writer seals a block of this one: it is not current before those that came before it."""
    world.options = dataclasses.replace(world.options, staging_bytes=2 * BLOCK)
    put_off.leave()
    world.restart()
    worker = world.face.after_reply.join()
    file = written(world, 1)
    assert world.calls.pwrite(file, b"tail", BLOCK) == 4
    other = FaceCalls(world.face, InlineRunner())
    another = world.calls.open("another", CREATE)
    writing = threading.Thread(target=other.pwrite, args=(another, block_of(7)[:3000], 0))
    writing.start()
    writing.join(WAITS_SECONDS)
    assert sealed_bytes(world) == 0
    worker.run(RUN)
    writing.join()
    assert sealed_bytes(world) == BLOCK + 4
    worker.leave()
    for each in (file, another):
        world.calls.close(each)
    assert world.calls.get("file") == content(1) + b"tail"


def test_what_a_worker_leaves_undone_the_next_request_does(world: World, put_off: WorkAfterReply) -> None:
    file = written(world, 2)
    put_off.leave()
    assert world.store.puts == 0
    assert world.face.after_reply.under_way == 0
    world.calls.close(file)
    assert world.store.puts == 2
    assert world.calls.get("file") == content(2)


def test_the_last_close_waits_for_what_is_under_way(world: World, put_off: WorkAfterReply) -> None:
    file = written(world, 1)
    world.calls.unlink("file")
    other = FaceCalls(world.face, InlineRunner())
    closing = threading.Thread(target=other.close, args=(file,))
    beside(closing)
    put_off.run(RUN)
    closing.join()
    world.collect()
    assert world.store.blocks == {}
    assert world.face.gauges().staging_bytes == 0


def test_a_full_store_is_not_taken_for_fuller_than_it_is(world: World, put_off: WorkAfterReply) -> None:
    """A block under way has its slot, and its room is still set aside: it counts once."""
    world.store.slots = {512: 0, 2048: 0, BLOCK: 3}
    file = written(world, 2)
    first, second = (work.steps() for work in put_off.due)
    waited_for = until_it_waits(second)
    other = FaceCalls(world.face, InlineRunner())
    writing = threading.Thread(target=other.pwrite, args=(file, block_of(2), 2 * BLOCK))
    beside(writing)
    RUN.run(first)
    goes_on(second, waited_for)
    writing.join()
    assert world.calls.pread(file, 4 * BLOCK, 0) == content(3)
    world.calls.close(file)


def test_the_seals_that_are_put_off_are_shown_and_bounded(tmp_path: Path) -> None:
    bounds, options = Bounds(), FilesOptions(workers=4, staging_bytes=8 * BLOCK)
    face = FilesFace(tmp_path / "files.sqlite", MemoryBlockStore((BLOCK,)), options, bounds=bounds)
    calls, worker = FaceCalls(face, RUN), face.after_reply.join()
    files = [calls.open(f"file{number}", CREATE) for number in range(3)]
    for number, file in enumerate(files):
        calls.pwrite(file, block_of(number), 0)
    row = {row["name"]: row for row in bounds.snapshot()}["stored-later"]
    assert (row["limit"], row["held"]) == (2, 2)
    assert calls.pread(files[2], BLOCK, 0) == block_of(2), "stored before its answer"
    worker.leave()
    for file in files:
        calls.close(file)
    face.close()
    many = FilesFace(tmp_path / "many.sqlite", MemoryBlockStore((BLOCK,)), FilesOptions(workers=1000))
    assert many.after_reply.most == CATALOGUE["stored-later"].most
    many.close()


class Done:
    """Work that notes what became of it."""

    def __init__(self) -> None:
        self.ran = self.ended = 0

    def steps(self) -> Steps[None]:
        yield from ()
        self.ran += 1

    def end(self) -> None:
        self.ended += 1


def test_work_is_put_off_up_to_the_bound_and_only_in_a_thread_that_does_it() -> None:
    after = AfterReply(2)
    work = [Done() for _ in range(4)]
    assert not after.has_room()
    assert not after.put_off(work[0])
    worker = after.join()
    assert [after.put_off(each) for each in work[:3]] == [True, True, False]
    assert (after.under_way, after.refusals) == (2, 1)
    assert not after.has_room()
    worker.run(RUN)
    assert [(each.ran, each.ended) for each in work] == [(1, 1), (1, 1), (0, 0), (0, 0)]
    assert after.put_off(work[3])
    worker.leave()
    assert (work[3].ran, work[3].ended, after.under_way) == (0, 1, 0)
    assert not after.put_off(work[0])


@pytest.mark.parametrize(("workers", "most"), [(1, 1), (2, 2), (3, 1), (4, 2), (16, 8), (256, 32)])
def test_half_of_many_workers_stay_free_of_what_is_put_off(workers: int, most: int) -> None:
    assert after_reply_of(workers, Bounds()).most == most


def test_work_that_raises_ends_and_so_does_what_was_due_beside_it() -> None:
    class Broken(Done):
        def steps(self) -> Steps[None]:
            yield from ()
            raise RuntimeError("a fault of the program")

    after, work = AfterReply(2), [Broken(), Done()]
    worker = after.join()
    assert all(map(after.put_off, work))
    with pytest.raises(RuntimeError):
        worker.run(RUN)
    assert [each.ended for each in work] == [1, 1]
    assert after.under_way == 0
    worker.leave()


def test_a_block_in_large_parts_is_what_was_written(world: World) -> None:
    """Large parts are copied without the interpreter's lock."""
    large = 4 << 20
    store = MemoryBlockStore((64 << 10, large))
    options = FilesOptions(staging_bytes=4 * large, workers=2)
    face = FilesFace(world.folder / "large.sqlite", store, options)
    calls = FaceCalls(face, InlineRunner())
    expected, file = bytearray(large + 5), calls.open("file", CREATE)
    parts = [(0, 1 << 20), (3 << 20, 1 << 20), (70_001, 200_003), (5, 3 << 20)]
    for number, (start, size) in enumerate(parts):
        part = bytes([number + 1]) * size
        expected[start : start + size] = part
        assert calls.pwrite(file, part, start) == size
        assert calls.pread(file, large, 0) == expected[: calls.fstat(file).size]
    calls.pwrite(file, b"end", large + 2)
    expected[large + 2 :] = b"end"
    calls.fsync(file)
    assert calls.pread(file, 2 * large, 0) == expected
    calls.close(file)
    face.close()
