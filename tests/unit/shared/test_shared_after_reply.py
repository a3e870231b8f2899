"""Chunks that are stored after the answer to their writer: the file is whole, or there is none."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Iterator

import pytest

from agent.fs.after_reply import AfterReply, WorkAfterReply
from agent.fs.interface import FsError
from agent.fs.shared.unnamed import UNNAMED_SECONDS
from agent.pool.steps import Acquire, Steps, settle
from tests.support.fs.memory_shared import CHUNK, MAKER, Files, SharedPool, refused

CONTENT = os.urandom(3 * CHUNK)


@pytest.fixture
def after() -> AfterReply:
    return AfterReply(8)


@pytest.fixture
def files(after: AfterReply) -> Files:
    return SharedPool().agent(after_reply=after)


@pytest.fixture
def put_off(after: AfterReply) -> Iterator[WorkAfterReply]:
    worker = after.join()
    yield worker
    worker.leave()


def write_chunks(files: Files, count: int = 3) -> tuple[tuple[int, int], list[bytearray]]:
    """A file whose chunks are under way, and the buffers of its requests."""
    file, buffers = files.create("f", flags=os.O_RDWR), []
    for number in range(count):
        buffers.append(bytearray(CONTENT[number * CHUNK : (number + 1) * CHUNK]))
        view = memoryview(buffers[-1])
        assert settle(files.face.write(*file, number * CHUNK, view, MAKER), files.channel) == CHUNK
    return file, buffers


def until_it_waits(steps: Steps[None]) -> Acquire:
    """Go on up to a lock that is held by somebody else."""
    request = next(steps)
    while True:
        assert isinstance(request, Acquire)
        if not request.lock.acquire(blocking=False):
            return request
        request = steps.send(True)


def do_due(files: Files, worker: WorkAfterReply, buffers: list[bytearray]) -> None:
    worker.run(files.channel)
    for buffer in buffers:
        buffer[:] = bytes(len(buffer))  # the next request's


def test_several_chunks_of_a_file_are_under_way_at_once(files: Files, put_off: WorkAfterReply) -> None:
    file, buffers = write_chunks(files)
    assert len(put_off.due) == 3
    assert files.reserved() == files.taken() == 0
    do_due(files, put_off, buffers)
    files.close(file)
    assert files.taken() == 3
    assert files.get("f") == CONTENT


def test_chunks_are_stored_before_the_answer_where_no_worker_is_free(
    files: Files, put_off: WorkAfterReply
) -> None:
    """The next request would wait for a worker, and the close for the chunks, on a worker of its own."""
    put_off.is_free = False
    file, _ = write_chunks(files)
    assert not put_off.due
    assert files.reserved() + files.taken() == 3
    files.close(file)
    assert files.get("f") == CONTENT


def test_a_free_worker_is_another_one(after: AfterReply, files: Files, put_off: WorkAfterReply) -> None:
    """A worker is not free while it serves the request that asks."""
    put_off.is_free = False
    others: list[WorkAfterReply] = []
    joining = threading.Thread(target=lambda: others.append(after.join()))
    joining.start()
    joining.join()
    file, buffers = write_chunks(files, 1)
    assert len(put_off.due) == 1
    others[0].leave()
    files.pwrite(file, CHUNK, CONTENT[CHUNK:])
    assert len(put_off.due) == 1, "the other worker has left"
    do_due(files, put_off, buffers)
    files.close(file)
    assert files.get("f") == CONTENT


@pytest.mark.parametrize("call", ["flush", "fsync", "read"])
def test_who_needs_the_chunks_waits_for_those_under_way(
    files: Files, put_off: WorkAfterReply, call: str
) -> None:
    file, buffers = write_chunks(files, 1)
    into = memoryview(bytearray(CHUNK))
    outcome = {
        "flush": lambda: files.face.flush(*file, MAKER),
        "fsync": lambda: files.face.fsync(*file, False),
        "read": lambda: files.face.read(*file, 0, into),
    }[call]()
    files.channel.is_driving = True
    waiting = until_it_waits(outcome)  # type: ignore[arg-type]
    do_due(files, put_off, buffers)
    assert waiting.lock.acquire(blocking=False)
    files.channel.run(resumed(outcome))  # type: ignore[arg-type]
    if call == "read":
        assert into == CONTENT[:CHUNK]
    files.close(file)
    assert files.get("f") == CONTENT[:CHUNK]


def resumed(steps: Steps[None]) -> Steps[None]:
    """Go on with steps that were told that they have the lock they waited for."""
    answer = True
    while True:
        try:
            request = steps.send(answer)
        except StopIteration:
            return
        answer = yield request


def test_a_chunk_that_cannot_be_stored_leaves_no_file(files: Files, put_off: WorkAfterReply) -> None:
    file, buffers = write_chunks(files)
    for namespace in files.channel.namespaces:
        namespace.down = True
    do_due(files, put_off, buffers)
    for namespace in files.channel.namespaces:
        namespace.down = False
    with pytest.raises(FsError) as failed:
        settle(files.face.fsync(*file, False), files.channel)
    assert failed.value.errno == errno.EIO
    refused(errno.EIO, files.close, file)
    assert files.stat("f") is None


def test_chunks_that_a_worker_leaves_undone_leave_no_file(files: Files, put_off: WorkAfterReply) -> None:
    file, _ = write_chunks(files)
    put_off.leave()
    refused(errno.EIO, files.pwrite, file, 3 * CHUNK, b"more")
    refused(errno.EIO, files.close, file)
    assert files.stat("f") is None


def test_what_was_stored_of_a_file_goes_where_a_worker_leaves_a_chunk_undone(
    files: Files, put_off: WorkAfterReply
) -> None:
    put_off.is_free = False
    file, _ = write_chunks(files)
    settle(files.face.fsync(*file, False), files.channel)
    files.channel.clock += UNNAMED_SECONDS
    files.name()
    assert files.taken() == 3
    put_off.is_free = True
    files.pwrite(file, 3 * CHUNK, CONTENT[:CHUNK])
    assert len(put_off.due) == 1
    put_off.leave()
    refused(errno.EIO, files.close, file)
    files.collect()
    assert files.taken() == files.reserved() == 0, "it makes no file any more"


def test_a_chunk_that_comes_after_the_last_close_goes(files: Files, put_off: WorkAfterReply) -> None:
    """The close waits for it no longer than for any other operation."""
    file, buffers = write_chunks(files, 1)
    refused(errno.EIO, files.close, file)
    do_due(files, put_off, buffers)
    files.name()
    files.collect()
    assert files.taken() == files.reserved() == 0
    assert files.stat("f") is None


@pytest.mark.interpreted
def test_a_fault_of_the_program_amid_a_chunk_leaves_no_file(
    files: Files, put_off: WorkAfterReply, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("a fault of the program")

    file, buffers = write_chunks(files, 1)
    with monkeypatch.context() as patch:
        patch.setattr(files.volume.chunks, "writer", broken)
        patch.setattr(files.volume.chunks, "unnamed_writer", broken)
        with pytest.raises(RuntimeError):
            do_due(files, put_off, buffers)
    refused(errno.EIO, files.close, file)
    assert files.stat("f") is None
