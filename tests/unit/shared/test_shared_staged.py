"""Memory of files that are written in part comes back, however their writers end."""

from __future__ import annotations

import contextlib
import errno
import os
import random
from collections.abc import Callable
from typing import Any

import pytest

from agent.fs.close_cause import Closing
from agent.fs.interface import FsError, SetAttributes
from agent.fs.shared import file_content
from agent.fs.shared.chunks import STAGED
from agent.fs.shared.face import OPEN_FILES, WRITERS
from agent.host_os.per_user_bounds import Bounds
from agent.pool.steps import Acquire, settle
from tests.support.fs.memory_shared import CALLER, CHUNK, Files, SharedPool, refused

File = tuple[int, int]
Step = Callable[[Files, list[File]], None]


def create(files: Files, held: list[File]) -> None:
    held.append(files.create("f", flags=os.O_RDWR))


def write_in_part(files: Files, held: list[File]) -> None:
    for number in range(3):
        files.pwrite(held[-1], number * CHUNK + 7, b"in part")


def write_on(files: Files, held: list[File]) -> None:
    files.pwrite(held[-1], CHUNK // 2, bytes(2 * CHUNK))


def write_a_unit(files: Files, held: list[File]) -> None:
    """Where a chunk is longer, it goes to flash as it is."""
    files.pwrite(held[-1], CHUNK, bytes(CHUNK))


def write_the_first_unit(files: Files, held: list[File]) -> None:
    files.pwrite(held[-1], 0, bytes(CHUNK))


def flush(files: Files, held: list[File]) -> None:
    files.flush(held[-1])


def sync(files: Files, held: list[File]) -> None:
    settle(files.face.fsync(*held[-1], False), files.channel)


def cut(files: Files, held: list[File]) -> None:
    files.ftruncate(held[-1], CHUNK + 5)


def open_again(files: Files, held: list[File]) -> None:
    held.append(files.open("f", os.O_RDWR))


def open_emptied(files: Files, held: list[File]) -> None:
    held.append(files.open("f", os.O_RDWR | os.O_TRUNC))


def read(files: Files, held: list[File]) -> None:
    files.pread(held[-1], 5, 2 * CHUNK)


def rename(files: Files, held: list[File]) -> None:
    files.rename("f", "g")
    files.rename("g", "f")


def unlink(files: Files, held: list[File]) -> None:
    files.unlink("f")


def close_one(files: Files, held: list[File]) -> None:
    files.close(held.pop(0))


def grow_too_large(files: Files, held: list[File]) -> None:
    end = files.volume.chunks_max * files.volume.chunk_bytes
    refused(errno.ENOSPC, files.pwrite, held[-1], end, b"x")


def truncate_by_name(files: Files, held: list[File]) -> None:
    ino = files.lookup("f").attributes.ino
    settle(files.face.setattr(CALLER, ino, SetAttributes(size=CHUNK + 9), None), files.channel)


SCRIPTS: list[list[Step]] = [
    [create, write_in_part, write_on, flush, write_in_part, cut, open_again, write_in_part, sync, read],
    [create, write_in_part, flush, open_emptied, write_in_part, close_one, rename, write_on, unlink],
    [create, write_on, flush, close_one, truncate_by_name, open_again, write_in_part, rename, open_emptied],
    [create, write_in_part, open_again, grow_too_large, open_emptied, close_one],
    [create, write_in_part, unlink, write_in_part, cut, flush],
    [create, write_a_unit, write_the_first_unit, write_a_unit, read, flush, open_again, write_a_unit, cut],
    [create, write_the_first_unit, write_in_part, unlink, write_a_unit],
]


def end_all(files: Files, held: list[File], how: Closing) -> None:
    """The processes end: each descriptor is flushed and released."""
    for file in held:
        try:
            files.close(file, how=how)
        except FsError:
            continue
    held.clear()


def nothing_is_held(files: Files, bounds: Bounds) -> None:
    held = {each.name: bounds.of(each).held for each in (STAGED, WRITERS, OPEN_FILES)}
    assert held == dict.fromkeys(held, 0)


@pytest.mark.parametrize("script", range(len(SCRIPTS)))
@pytest.mark.parametrize("how", [Closing.DYING, Closing.MEANT])
@pytest.mark.parametrize("fault", [None, "broken", "down", "hung", "memory"])
@pytest.mark.parametrize("units", [1, 4])
def test_a_writer_that_ends_after_any_step_leaves_nothing(
    script: int, how: Closing, fault: str | None, units: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = SCRIPTS[script]
    for last in range(len(steps)):
        pool, bounds = SharedPool(chunk_bytes=units * CHUNK, directory_fresh=1.0), Bounds()
        files, held = pool.agent(bounds), list[File]()
        for step in steps[:last]:
            try:
                step(files, held)
            except (FsError, IndexError):
                continue  # the program goes on after an error
        with monkeypatch.context() as patch:
            _strike(pool, fault, patch)
            with contextlib.suppress(FsError, MemoryError, IndexError):
                steps[last](files, held)
            if last % 2:  # while the fault lasts, or after it
                end_all(files, held, how)
        for namespace in pool.namespaces:
            namespace.broken = namespace.down = namespace.hung = False
        end_all(files, held, how)
        nothing_is_held(files, bounds)
        assert files.reserved() == 0
        files.put("f", b"the name is free")
        assert files.get("f") == b"the name is free"


def _strike(pool: SharedPool, fault: str | None, patch: pytest.MonkeyPatch) -> None:
    if fault == "memory":

        def no_memory(_: int) -> Any:
            raise MemoryError

        patch.setattr(file_content, "Staged", no_memory)
    elif fault is not None:
        for namespace in pool.namespaces[:2]:
            setattr(namespace, fault, True)


def test_programs_at_random_under_faults_leave_nothing() -> None:
    for seed in range(30):
        dice, bounds = random.Random(seed), Bounds()
        pool = SharedPool(chunk_bytes=dice.choice([1, 4]) * CHUNK, directory_fresh=1.0)
        files, held = pool.agent(bounds), list[File]()
        every = [step for script in SCRIPTS for step in script]
        for _ in range(25):
            namespace, fault = dice.choice(pool.namespaces), dice.choice(("broken", "down", "hung"))
            setattr(namespace, fault, dice.random() < 0.3)
            try:
                dice.choice(every)(files, held)
            except (FsError, IndexError, AssertionError):
                continue
            except pytest.fail.Exception:
                continue  # `refused`, of what went well
        end_all(files, held, dice.choice((Closing.DYING, Closing.MEANT)))
        nothing_is_held(files, bounds)


@pytest.mark.interpreted
def test_a_chunk_whose_older_bytes_did_not_come_is_no_zeros(monkeypatch: pytest.MonkeyPatch) -> None:
    files = SharedPool().agent()
    older = bytes(range(1, 256)) * (2 * CHUNK // 255 + 1)
    files.put("f", older)
    file = files.open("f", os.O_RDWR)
    with monkeypatch.context() as patch:

        def no_memory(*_: Any) -> Any:
            raise MemoryError

        patch.setattr(file_content, "read_chunk", no_memory)
        with pytest.raises(MemoryError):
            files.pwrite(file, 10, b"new")
    files.pwrite(file, 20, b"new")
    files.close(file)
    assert files.get("f") == older[:20] + b"new" + older[23:]


def test_the_last_close_waits_for_another_operation_however_long_it_takes() -> None:
    bounds = Bounds()
    files = SharedPool().agent(bounds)
    file = files.create("f")
    files.pwrite(file, 5, b"in part")
    writer = files.face._nodes.get(file[0]).writer
    assert writer is not None
    files.channel.is_driving = True
    writer._lock.acquire()
    steps: Any = files.face.release(*file)
    for answer in (None, False, False):  # a deadline each
        assert isinstance(steps.send(answer), Acquire)
    writer._lock.release()
    assert writer._lock.acquire(timeout=1)
    with pytest.raises(StopIteration):
        steps.send(True)
    files.channel.is_driving = False
    assert bounds.of(STAGED).held == 0
