"""`/shared` over a pool in memory: opens, closes and renames of several processes that cross each other."""

from __future__ import annotations

import errno
import os
import threading

import pytest

from agent.fs import close_cause
from agent.fs.close_cause import PROCESSES_MAX, Closing, process_of
from agent.fs.file_users import HOLDERS_MAX, Closed, FileUsers
from agent.fs.interface import Caller, LockOwner
from agent.pool.steps import Acquire, Steps, settle
from tests.support.fs.memory_shared import CALLER, CHUNK, MAKER, OTHER, Files, SharedPool, refused
from tests.support.pool.memory_channel import rest_of

THEIRS = LockOwner(12, OTHER.pid)
WHOLE = b"w" * (CHUNK + 1000)
NOBODYS = 1 << 23
"""A number that no thread of this machine has (PID_MAX_LIMIT is 1 << 22)."""


@pytest.fixture
def pool() -> SharedPool:
    return SharedPool((4, 4))


def looked_up(files: Files) -> int:
    """The first half of an open(2) of another process."""
    return files.lookup("f", OTHER).attributes.ino


def open_found(files: Files, ino: int) -> tuple[int, int]:
    """The second half, as `Files.open`."""
    refused(errno.ESTALE, settle, files.face.open(OTHER, ino, os.O_RDWR), files.channel)
    return open_again(files)


def open_again(files: Files) -> tuple[int, int]:
    ino = looked_up(files)
    return ino, settle(files.face.open(OTHER, ino, os.O_RDWR), files.channel).handle


@pytest.mark.parametrize("data", [WHOLE, b"short"])
def test_an_open_amid_the_close_of_one_that_wrote_nothing_has_it_all(files: Files, data: bytes) -> None:
    files.put("f", data)
    ours = files.open("f", os.O_RDWR)
    refused(errno.ESTALE, settle, files.face.open(OTHER, looked_up(files), os.O_RDWR), files.channel)
    files.close(ours)
    assert files.pread(open_again(files), 0, len(WHOLE)) == data


def test_an_open_amid_the_death_of_one_that_wrote_is_refused_or_whole(files: Files) -> None:
    files.put("f", WHOLE)
    ours = files.open("f", os.O_RDWR)
    refused(errno.ESTALE, settle, files.face.open(OTHER, looked_up(files), os.O_RDWR), files.channel)
    files.pwrite(ours, 0, b"part")
    files.close(ours, MAKER, Closing.DYING)
    refused(errno.ESTALE, open_again, files)
    files.face._written.retried(OTHER, files.face._nodes.get(looked_up(files)))
    file = files.open("f", os.O_RDWR, OTHER)
    assert files.pread(file, 0, len(WHOLE)) == WHOLE


@pytest.mark.parametrize("data", [WHOLE, b"short"])
def test_an_open_that_another_process_crosses_goes_on_from_its_content(files: Files, data: bytes) -> None:
    files.put("f", data)
    found = looked_up(files)
    ours = files.open("f", os.O_RDWR)
    files.pwrite(ours, 0, b"x")
    files.close(ours)
    theirs = open_found(files, found)
    files.pwrite(theirs, len(data), b"more", THEIRS)
    files.close(theirs, THEIRS)
    assert files.get("f") == b"x" + data[1:] + b"more"


def test_so_does_one_that_is_crossed_while_it_looks_up_once_more(files: Files) -> None:
    files.put("f", WHOLE)
    refused(errno.ESTALE, settle, files.face.open(OTHER, looked_up(files), os.O_RDWR), files.channel)
    files.put("f", WHOLE[::-1] + b"y")
    theirs = open_again(files)
    files.pwrite(theirs, 0, b"x", THEIRS)
    files.close(theirs, THEIRS)
    assert files.get("f") == b"x" + WHOLE[::-1][1:] + b"y"


def test_processes_that_open_amid_the_close_of_the_maker_write_in_one_file(files: Files) -> None:
    """One is told of the maker's file before its end, and the other after it."""
    ours = files.create("f")
    files.pwrite(ours, 0, WHOLE)
    files.flush(ours)
    ino = looked_up(files)
    refused(errno.ESTALE, settle, files.face.open(OTHER, ino, os.O_RDWR), files.channel)
    files.release(ours)
    third = Caller(0, 0, 3)
    refused(errno.ESTALE, settle, files.face.open(third, ino, os.O_RDWR), files.channel)
    theirs = open_again(files)
    assert files.lookup("f", third).attributes.ino == theirs[0]


@pytest.mark.parametrize("has_part", [True, False])
def test_a_create_after_the_close_of_another_process_opens_its_file(files: Files, has_part: bool) -> None:
    """The name was not there when it was looked up."""
    refused(errno.ENOENT, files.lookup, "f", OTHER)
    files.put("f", WHOLE)
    refused(errno.EEXIST, files.create, "f", OTHER, os.O_RDWR | os.O_EXCL)
    theirs = files.create("f", OTHER, os.O_RDWR)
    if has_part:
        files.pwrite(theirs, len(WHOLE), b"more", THEIRS)
    files.close(theirs, THEIRS)
    assert files.get("f") == WHOLE + (b"more" if has_part else b"")


def test_a_create_to_read_opens_it_too(files: Files) -> None:
    files.put("f", WHOLE)
    theirs = files.create("f", OTHER, os.O_RDONLY)
    assert files.pread(theirs, 0, len(WHOLE)) == WHOLE
    files.release(theirs)
    assert not files.chunks.holds.held


def test_a_create_whose_file_went_meanwhile_makes_one(files: Files, others: Files) -> None:
    files.put("f", WHOLE)
    others.unlink("f")
    theirs = files.create("f", OTHER, os.O_RDWR)
    files.pwrite(theirs, 0, b"new", THEIRS)
    files.close(theirs, THEIRS)
    assert others.get("f") == b"new"


def test_one_that_makes_a_name_to_read_neither_sees_nor_keeps_what_another_writes(
    files: Files, others: Files
) -> None:
    ours = files.create("f")
    theirs = files.create("f", OTHER, os.O_RDONLY)
    files.pwrite(ours, 0, WHOLE[:5])
    assert files.pread(theirs, 0, 5) == b""
    files.pwrite(ours, 5, WHOLE[5:])
    files.close(ours)
    assert others.get("f") == WHOLE
    files.close(theirs, THEIRS)
    assert others.get("f") == WHOLE


def test_a_file_that_is_made_and_not_written_takes_the_place_of_none(files: Files, others: Files) -> None:
    """Of two hosts each opens the name with O_CREAT, and one writes."""
    ours, theirs = files.create("f"), others.create("f", flags=os.O_RDWR)
    files.pwrite(ours, 0, WHOLE)
    files.close(ours)
    others.close(theirs)
    assert files.get("f") == others.get("f") == WHOLE
    emptied = others.create("f", flags=os.O_RDWR | os.O_TRUNC)
    others.close(emptied)
    assert files.get("f") == b""


@pytest.mark.parametrize("is_whole", [True, False])
@pytest.mark.parametrize("by_other_agent", [True, False])
def test_a_file_that_was_renamed_meanwhile_keeps_its_chunks(
    files: Files, others: Files, is_whole: bool, by_other_agent: bool
) -> None:
    files.put("f", WHOLE)
    ours = files.open("f", os.O_WRONLY | (os.O_TRUNC if is_whole else 0))
    files.pwrite(ours, 0, WHOLE[::-1] if is_whole else b"part")
    if by_other_agent:
        others.rename("f", "g")
    else:
        files.rename("f", "g", caller=OTHER)
    if is_whole:
        files.close(ours)
        assert others.get("f") == WHOLE[::-1]
    else:
        refused(errno.ESTALE, files.close, ours)
        assert others.stat("f") is None
    files.put("f", b"anew")
    for agent in (files, others):
        agent.collect()
    assert others.get("g") == WHOLE


@pytest.mark.parametrize("data", [WHOLE, b"short"])
def test_a_file_that_was_written_over_whole_in_place_takes_the_place_of_any(
    files: Files, others: Files, data: bytes
) -> None:
    files.put("f", data)
    ours = files.open("f", os.O_RDWR)
    for at in range(0, len(data), 30_000):
        files.pwrite(ours, at, data[::-1][at : at + 30_000])
    others.put("f", b"theirs")
    files.close(ours)
    assert others.get("f") == data[::-1]


def test_a_part_over_ones_own_content_takes_the_place_of_no_other(files: Files, others: Files) -> None:
    """The other agent has given the chunks up on which the part would build."""
    ours = files.create("f")
    files.pwrite(ours, 0, WHOLE)
    files.flush(ours)
    others.put("f", WHOLE[::-1])
    others.collect()
    files.pwrite(ours, CHUNK, b"part")
    refused(errno.ESTALE, files.close, ours)
    files.collect()
    assert others.get("f") == WHOLE[::-1]


def test_what_was_published_stays_when_one_dies_afterwards(files: Files, others: Files) -> None:
    ours, theirs = files.create("f"), files.create("f", OTHER)
    files.pwrite(ours, 0, WHOLE)
    files.flush(ours)  # a child has it open still
    files.close(theirs, THEIRS)
    assert others.get("f") == WHOLE
    files.close(files.open("f", os.O_RDWR, OTHER), THEIRS, Closing.DYING)
    files.release(ours)
    files.collect()
    assert others.get("f") == WHOLE


def test_and_when_a_write_afterwards_has_no_room(files: Files, others: Files) -> None:
    ours = files.create("f")
    files.pwrite(ours, 0, WHOLE)
    files.flush(ours)
    refused(errno.ENOSPC, files.pwrite, ours, CHUNK * 100_000, b"x")
    files.release(ours)
    files.collect()
    assert others.get("f") == WHOLE


def test_the_room_of_a_file_that_was_written_over_in_many_places_is_back() -> None:
    """Its manifest is too long to be remembered."""
    files = SharedPool((16, 16)).agent()
    count = 120
    files.put("f", bytes(count * CHUNK))
    file = files.open("f", os.O_RDWR)
    for number in range(0, count, 2):
        files.pwrite(file, number * CHUNK, b"b" * CHUNK)
    files.close(file)
    files.collect()
    assert files.taken() == count
    file = files.open("f", os.O_WRONLY | os.O_TRUNC)
    files.pwrite(file, 0, b"c" * CHUNK)
    files.close(file)
    files.collect()
    assert files.taken() == 1


def test_any_number_of_processes_write_a_file_one_after_the_other(files: Files) -> None:
    ours = files.create("f")
    count = 2 * HOLDERS_MAX + 3
    for number in range(count):
        caller, owner = Caller(0, 0, NOBODYS + number), LockOwner(5000 + number, NOBODYS + number)
        theirs = files.create("f", caller)
        files.pwrite(theirs, number, b"x", owner)
        files.close(theirs, owner)
    files.close(ours)
    assert files.get("f") == b"x" * count


def test_a_file_is_not_whole_while_its_maker_has_it_open_again(files: Files, others: Files) -> None:
    ours, theirs = files.create("f"), files.create("f", OTHER)
    files.pwrite(ours, 0, b"a")
    files.close(ours)
    ours = files.open("f", os.O_RDWR)
    files.pwrite(theirs, 1, b"b", THEIRS)
    files.close(theirs, THEIRS)
    assert others.stat("f") is None
    files.pwrite(ours, 2, b"c")
    files.close(ours)
    assert others.get("f") == b"abc"


def test_a_thread_that_joined_may_have_ended_at_its_process_close() -> None:
    users = FileUsers(1, NOBODYS, lambda *_: Closing.MEANT)
    opened: list[int] = []

    def open_it() -> None:
        opened.append(threading.get_native_id())
        users.join(opened[0])

    thread = threading.Thread(target=open_it)
    thread.start()
    thread.join()
    assert process_of(threading.get_native_id()) == os.getpid()
    for number in range(PROCESSES_MAX + 2):
        assert process_of(NOBODYS + number) == NOBODYS + number
    assert len(close_cause._processes) <= PROCESSES_MAX
    assert users.close(LockOwner(1, NOBODYS), b"f") is Closed.NOT_YET
    ours = LockOwner(2, threading.get_native_id())
    users.note(ours)
    assert users.close(ours, b"f") is Closed.WHOLE


def test_a_last_close_amid_a_rename_leaves_the_new_name_free(files: Files) -> None:
    """A close returns before its RELEASE is served, so a rename that follows it crosses that."""
    ours = files.create("f")
    files.pwrite(ours, 0, WHOLE)
    files.flush(ours)
    node = files.face._nodes.get(ours[0])
    assert node.writer is not None
    lock = node.writer._lock
    steps = files.face.rename(CALLER, files.root, b"f", files.root, b"g", 0)

    def until_the_file_is_wanted() -> Steps[None]:
        wanted = next(steps)
        while not (isinstance(wanted, Acquire) and wanted.lock is lock):
            wanted = steps.send((yield wanted))
        files.release(ours)
        yield from rest_of(steps, (yield wanted))

    files.channel.run(until_the_file_is_wanted())
    assert files.get("g") == WHOLE
    assert not files.face._written._written
    files.unlink("g")
    files.close(files.create("g", flags=os.O_WRONLY | os.O_EXCL))
