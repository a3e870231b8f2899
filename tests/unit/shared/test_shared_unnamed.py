"""Chunks of a file that are on flash before their directories name them: when they are named, and by whom."""

from __future__ import annotations

import errno
import random
from collections.abc import Generator

import pytest

from agent.fs.shared.face import SharedFace
from agent.fs.shared.recent_names import NamesSeen
from agent.fs.shared.unnamed import NAMED_WITH_DATA, UNNAMED_MAX, UNNAMED_SECONDS, UnnamedChunks
from agent.pool.steps import Acquire, Steps
from agent.pool.volume.puts_in_pieces import IDLE_SECONDS
from tests.support.fs.memory_shared import CHUNK, MAKER, Files, SharedPool, refused

DATA = random.Random(1818).randbytes(40 * CHUNK)


def test_chunks_that_come_at_once_are_named_together(files: Files) -> None:
    file = files.create("f")
    chunks = NAMED_WITH_DATA + UNNAMED_MAX
    files.pwrite(file, 0, DATA[: (chunks - 1) * CHUNK])
    assert (files.taken(), files.reserved()) == (NAMED_WITH_DATA, UNNAMED_MAX - 1)
    files.close(file)
    file = files.create("g")
    files.pwrite(file, 0, DATA[: chunks * CHUNK])
    assert files.reserved() == 0
    files.close(file)
    assert files.get("f") == DATA[: (chunks - 1) * CHUNK]
    assert files.get("g") == DATA[: chunks * CHUNK]


def test_no_more_are_unnamed_than_the_bound(files: Files) -> None:
    file = files.create("f")
    for at in range(0, len(DATA), 5 * CHUNK):
        files.pwrite(file, at, DATA[at : at + 5 * CHUNK])
        assert files.reserved() < UNNAMED_MAX
    files.close(file)
    assert files.get("f") == DATA
    files.channel.clock += IDLE_SECONDS  # nobody has opened what was looked up
    files.name()
    assert files.reserved() == len(files.face._unnamed) == 0


def test_chunks_that_come_slowly_are_named_one_by_one(files: Files) -> None:
    """Other agents may take the same slots meanwhile, so none waits longer than a put trusts a directory."""
    file = files.create("f")
    named = []
    for at in range(0, 5 * CHUNK, CHUNK):
        files.pwrite(file, at, DATA[at : at + CHUNK])
        named.append(files.taken())
    assert named == [1, 2, 3, 4, 5]
    files.close(file)
    assert files.get("f") == DATA[: 5 * CHUNK]


def test_a_program_reads_what_it_has_just_written(files: Files) -> None:
    file = files.create("f")
    files.pwrite(file, 0, DATA[: 5 * CHUNK])
    assert files.pread(file, CHUNK // 2, 4 * CHUNK) == DATA[CHUNK // 2 : CHUNK // 2 + 4 * CHUNK]
    files.pwrite(file, 100, b"x" * 100)
    files.close(file)
    assert files.get("f") == DATA[:100] + b"x" * 100 + DATA[200 : 5 * CHUNK]


@pytest.mark.parametrize("is_full", [True, False])
def test_a_program_that_stops_amid_its_file_has_it_when_it_goes_on(is_full: bool) -> None:
    files = SharedPool((1,), (4,)).agent()
    file = files.create("f")
    files.pwrite(file, 0, DATA[: 4 * CHUNK])
    files.name()
    assert files.taken() == NAMED_WITH_DATA, "it may go on at once"
    files.channel.clock += UNNAMED_SECONDS
    files.name()
    assert (files.taken(), files.reserved(), len(files.face._unnamed)) == (4, 0, 0)
    files.channel.clock += IDLE_SECONDS + 1
    for number in range(59 if is_full else 1):
        files.put(f"g{number}", DATA[:CHUNK])
    files.pwrite(file, 4 * CHUNK, DATA[4 * CHUNK : 5 * CHUNK])
    files.close(file)
    assert files.get("f") == DATA[: 5 * CHUNK]


def test_chunks_that_wait_leave_most_of_a_small_volume_to_others() -> None:
    files = SharedPool((1,), (4,)).agent()
    opened = [files.create(f"f{number}") for number in range(12)]
    for at in range(0, 4 * CHUNK, CHUNK):
        for file in opened:
            files.pwrite(file, at, DATA[at : at + CHUNK])
            assert files.reserved() <= 64 // 8
    for file in opened:
        files.close(file)
    assert [files.get(f"f{number}") for number in range(12)] == [DATA[: 4 * CHUNK]] * 12


def test_a_file_whose_slots_went_to_others_is_refused(files: Files) -> None:
    """Where upkeep came to nothing."""
    files = SharedPool((1,), (4,)).agent()
    file = files.create("f")
    files.pwrite(file, 0, DATA[: 4 * CHUNK])
    files.channel.clock += IDLE_SECONDS + 1
    for number in range(62):
        files.put(f"g{number}", DATA[:CHUNK])
    refused(errno.EIO, files.close, file)
    assert files.stat("f") is None
    files.collect()
    assert (files.taken(), files.reserved()) == (62, 0)


def test_a_chunk_whose_slot_went_to_another_while_its_write_waited_is_refused() -> None:
    """For another operation of the file, which holds its lock."""
    files = SharedPool((1,), (8,)).agent()
    for number in range(63 - NAMED_WITH_DATA):
        files.put(f"old{number}", DATA[:CHUNK])
    file, data = files.create("f"), memoryview(DATA[: (NAMED_WITH_DATA + 1) * CHUNK])
    steps, channel = files.face.write(*file, 0, data, MAKER), files.channel
    assert isinstance(steps, Generator)
    locks: list[object] = []
    answer = None
    channel.is_driving = True
    while True:
        wanted = steps.send(answer)
        if isinstance(wanted, Acquire):
            if wanted.lock in locks and files.reserved():
                break  # The last chunk is on flash, and its write takes the file's lock again.
            locks.append(wanted.lock)
            answer = wanted.lock.acquire(blocking=False)
        else:
            answer = wanted.pending.done
    assert isinstance(wanted, Acquire)
    assert files.reserved() == 1
    channel.clock += IDLE_SECONDS + 1
    for number in range(2):
        files.put(f"g{number}", DATA[:CHUNK])
    channel.is_driving = True
    answer = wanted.lock.acquire(blocking=False)
    refused(errno.EIO, _take_all, steps, answer)
    refused(errno.EIO, files.close, file)
    assert files.stat("f") is None


def _take_all(steps: Steps[int], answer: bool) -> None:
    """Drive steps that wait for locks alone, all of which are free."""
    while True:
        wanted = steps.send(answer)
        assert isinstance(wanted, Acquire)
        answer = wanted.lock.acquire(blocking=False)


def test_an_enclosure_that_goes_before_the_close_is_an_error_of_the_close(
    pool: SharedPool, files: Files
) -> None:
    file = files.create("f")
    files.pwrite(file, 0, DATA[: 8 * CHUNK])
    assert files.reserved() == 8 - NAMED_WITH_DATA
    pool.namespaces[0].broken = True
    refused(errno.EIO, files.close, file)
    pool.namespaces[0].broken = False
    assert files.stat("f") is None
    files.collect()
    assert files.reserved() == 0
    files.put("f", DATA[: 8 * CHUNK])
    assert pool.agent().get("f") == DATA[: 8 * CHUNK]


def test_upkeep_tells_the_next_call_what_it_could_not_name(pool: SharedPool, files: Files) -> None:
    file = files.create("f")
    files.pwrite(file, 0, DATA[: 8 * CHUNK])
    files.channel.clock += UNNAMED_SECONDS
    pool.namespaces[0].broken = True
    files.name()
    pool.namespaces[0].broken = False
    refused(errno.EIO, files.pwrite, file, 8 * CHUNK, DATA[:CHUNK])
    refused(errno.EIO, files.close, file)
    assert files.stat("f") is None
    assert len(files.face._unnamed) == 0


def test_a_chunk_that_is_written_again_before_it_is_named_leaves_its_slot(files: Files) -> None:
    file = files.create("f")
    files.pwrite(file, 0, DATA[: 3 * CHUNK])
    files.pwrite(file, 0, DATA[CHUNK : 2 * CHUNK])
    files.close(file)
    assert files.get("f") == DATA[CHUNK : 2 * CHUNK] + DATA[CHUNK : 3 * CHUNK]
    files.collect()
    assert (files.taken(), files.reserved()) == (3, 0)


def test_what_is_cut_off_before_it_is_named_leaves_its_slot(files: Files) -> None:
    file = files.create("f")
    files.pwrite(file, 0, DATA[: 5 * CHUNK])
    files.ftruncate(file, 2 * CHUNK + 7)
    files.close(file)
    assert files.get("f") == DATA[: 2 * CHUNK + 7]
    files.collect()
    assert (files.taken(), files.reserved()) == (3, 0)


def test_a_file_that_loses_its_name_amid_its_writes_leaves_nothing(files: Files) -> None:
    file = files.create("f")
    files.pwrite(file, 0, DATA[: 5 * CHUNK])
    files.unlink("f")
    files.close(file)
    files.collect()
    assert (files.taken(), files.reserved()) == (0, 0)


def test_the_tables_of_all_doors_are_the_ones_that_a_face_is_given(files: Files) -> None:
    """They are empty then, and an empty table is false."""
    seen, unnamed = NamesSeen(), UnnamedChunks()
    face = SharedFace([files.volume], files.channel.current, files.discards, seen=seen, unnamed=unnamed)
    assert face._seen is seen
    assert face._unnamed is unnamed
