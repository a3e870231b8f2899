"""`/shared` over a pool in memory: several processes each write a part of one file, which each opens by its
path. On one agent they write in one content; of two agents only one can have the file."""

from __future__ import annotations

import errno
import os
import random

import pytest

from agent.fs.close_cause import Closing
from agent.fs.file_users import HOLDERS_MAX
from agent.fs.interface import PAGES, Caller, LockOwner
from agent.fs.shared import file_writer
from agent.fs.shared.gaps import CROSSING, CROSSING_MAX, stays
from agent.pool.steps import Acquire, Steps, settle
from tests.support.fs.memory_shared import CALLER, CHUNK, MAKER, OTHER, Files, SharedPool, refused
from tests.support.pool.memory_channel import rest_of

THEIRS = LockOwner(12, OTHER.pid)
STRANGER = Caller(5, 5, 2)
NOBODYS = 1 << 23
"""A number that no thread of this machine has."""
PART = CHUNK + 1000
"""A part ends amid a chunk, which the next part fills up."""


def part(number: int) -> bytes:
    return bytes([number + 1]) * PART


WHOLE = part(0) + part(1)


@pytest.fixture
def pool() -> SharedPool:
    return SharedPool((4, 4))


def made_beforehand(files: Files) -> None:
    file = files.create("f")
    files.ftruncate(file, len(WHOLE))
    files.close(file)


def fill(files: Files, ours: tuple[int, int], theirs: tuple[int, int], others: Files) -> None:
    """Both write their part and close; nobody sees half of the file."""
    before = others.manifest("f")
    files.pwrite(theirs, PART, part(1), THEIRS)
    files.flush(theirs, THEIRS)
    assert others.manifest("f") == before
    files.release(theirs)
    assert others.manifest("f") == before
    files.pwrite(ours, 0, part(0))
    files.flush(ours)
    assert others.get("f") == WHOLE, "the last close has published it"
    files.release(ours)
    assert others.get("f") == files.get("f") == WHOLE
    files.unlink("f")
    files.collect()
    assert files.taken() == 0
    assert not files.discards._opens


def test_processes_that_create_one_name_fill_one_file(files: Files, others: Files) -> None:
    ours, theirs = files.create("f"), files.create("f", OTHER)
    assert ours[0] == theirs[0]
    fill(files, ours, theirs, others)


def test_processes_fill_a_file_that_was_made_beforehand(files: Files, others: Files) -> None:
    made_beforehand(files)
    ours, theirs = files.open("f", os.O_RDWR), files.open("f", os.O_RDWR, OTHER)
    assert ours[0] == theirs[0]
    fill(files, ours, theirs, others)


def test_processes_that_open_a_file_at_the_same_time_fill_one(files: Files, others: Files) -> None:
    """The kernel has looked the name up for both, and opens for neither yet."""
    made_beforehand(files)
    found = files.lookup("f").attributes.ino
    opened = []
    for caller in (CALLER, OTHER):
        refused(errno.ESTALE, settle, files.face.open(caller, found, os.O_RDWR), files.channel)
    for caller in (CALLER, OTHER):
        ino = files.lookup("f", caller).attributes.ino
        opened.append((ino, settle(files.face.open(caller, ino, os.O_RDWR), files.channel).handle))
    assert opened[0][0] == opened[1][0]
    fill(files, opened[0], opened[1], others)


def test_a_process_that_comes_after_the_close_of_another_goes_on_from_its_part(files: Files) -> None:
    made_beforehand(files)
    ours = files.open("f", os.O_RDWR)
    files.pwrite(ours, 0, part(0))
    files.close(ours)
    theirs = files.open("f", os.O_RDWR, OTHER)
    files.pwrite(theirs, PART, part(1), THEIRS)
    files.close(theirs, THEIRS)
    assert files.get("f") == WHOLE


def test_a_file_is_whole_by_the_close_of_a_process_that_joined_and_wrote_nothing(
    files: Files, others: Files
) -> None:
    ours, theirs = files.create("f"), files.create("f", OTHER)
    files.pwrite(ours, 0, part(0))
    files.close(ours)
    assert others.stat("f") is None
    assert files.stat("f", OTHER) is not None, "a process that has it open sees it"
    files.flush(theirs, THEIRS)
    assert others.get("f") == part(0)


@pytest.mark.parametrize("has_written", [True, False])
def test_a_process_that_dies_with_its_part_takes_the_file_along(
    files: Files, others: Files, has_written: bool
) -> None:
    ours, theirs = files.create("f"), files.create("f", OTHER)
    files.pwrite(ours, 0, part(0))
    if has_written:
        files.pwrite(theirs, PART, part(1)[:500], THEIRS)
    files.close(theirs, THEIRS, Closing.DYING)
    refused(errno.EIO, files.pwrite, ours, 0, b"more")
    refused(errno.EIO, files.close, ours)
    assert others.stat("f") is None
    anew = files.create("f", OTHER)
    assert anew[0] != ours[0], "nobody joins what has failed"
    files.pwrite(anew, 0, WHOLE, THEIRS)
    files.close(anew, THEIRS)
    files.collect()
    assert others.get("f") == WHOLE
    assert files.taken() == -(-len(WHOLE) // CHUNK)


def test_nobody_joins_what_has_failed_in_a_file_that_was_made_beforehand(files: Files, others: Files) -> None:
    made_beforehand(files)
    ours, theirs = files.open("f", os.O_RDWR), files.open("f", os.O_RDWR, OTHER)
    files.close(theirs, THEIRS, Closing.DYING)
    third, its = Caller(0, 0, 3), LockOwner(13, 3)
    anew = files.open("f", os.O_RDWR, third)
    assert anew[0] != ours[0]
    files.pwrite(anew, 0, WHOLE, its)
    files.close(anew, its)
    refused(errno.EIO, files.close, ours)
    assert others.get("f") == WHOLE


def test_a_program_that_empties_the_file_writes_one_of_its_own(files: Files, others: Files) -> None:
    ours = files.create("f")
    theirs = files.create("f", OTHER, os.O_WRONLY | os.O_TRUNC)
    assert ours[0] != theirs[0]
    files.pwrite(ours, 0, WHOLE)
    files.pwrite(theirs, 0, WHOLE[::-1], THEIRS)
    files.close(theirs, THEIRS)
    files.close(ours)
    assert others.get("f") == WHOLE, "a whole content takes the place of any other"
    files.collect()
    assert files.taken() == -(-len(WHOLE) // CHUNK), "the room of the other is back"
    refused(errno.EEXIST, create_alone, files)


def create_alone(files: Files) -> None:
    files.open("f", os.O_RDWR)
    files.create("f", OTHER, os.O_WRONLY | os.O_EXCL)


@pytest.mark.parametrize("is_made", [True, False])
def test_of_two_agents_the_second_close_of_a_part_is_refused(
    files: Files, others: Files, is_made: bool
) -> None:
    if is_made:
        made_beforehand(files)
        ours, theirs = files.open("f", os.O_RDWR), others.open("f", os.O_RDWR)
    else:
        ours, theirs = files.create("f"), others.create("f")
    files.pwrite(ours, 0, part(0))
    others.pwrite(theirs, PART, part(1))
    files.close(ours)
    stored = files.get("f")
    assert stored[:PART] == part(0)
    refused(errno.ESTALE, others.close, theirs)
    assert files.get("f") == others.get("f") == stored
    for agent in (files, others):
        agent.collect()
        assert agent.reserved() == 0
    manifest = files.manifest("f")
    assert manifest is not None
    assert files.taken() == len(list(manifest.stored()))


def test_so_is_the_part_of_another_user(files: Files, others: Files) -> None:
    made_beforehand(files)
    ours, theirs = files.open("f", os.O_RDWR), files.open("f", os.O_RDWR, STRANGER)
    assert ours[0] != theirs[0]
    files.pwrite(ours, 0, part(0))
    files.pwrite(theirs, PART, part(1), THEIRS)
    files.close(ours)
    refused(errno.ESTALE, files.close, theirs, THEIRS)
    assert others.get("f") == part(0) + bytes(PART)


@pytest.mark.parametrize("number", range(12))
def test_only_a_content_that_was_written_whole_takes_the_place_of_anothers(number: int, seed: int) -> None:
    """Pieces in any order: where they cover the file, its close wins; with one left out it is refused."""
    rng = random.Random(f"{seed} {number}")
    pool = SharedPool((4, 4))
    files, others = pool.agent(), pool.agent()
    size = rng.choice([rng.randrange(1, 9000), rng.randrange(CHUNK, 6 * CHUNK)])
    data = rng.randbytes(size)
    ends = sorted({size, *(rng.randrange(1, size + 1) for _ in range(rng.randrange(5)))})
    pieces = list(zip([0, *ends], ends, strict=False))
    left_out = rng.choice(pieces) if number % 2 else None
    rng.shuffle(pieces)
    file = files.create("f", flags=os.O_RDWR)
    if rng.random() < 0.5:
        files.ftruncate(file, size)
    for begin, end in pieces:
        if (begin, end) != left_out:
            files.pwrite(file, begin, data[begin:end])
    files.ftruncate(file, size)
    others.put("f", b"of another")
    if left_out is None:
        files.close(file)
        assert others.get("f") == data
    else:
        refused(errno.ESTALE, files.close, file)
        assert files.get("f") == b"of another"


@pytest.mark.parametrize("sizes", [(5000, 100, 300), (CHUNK + 5000, CHUNK + 100, CHUNK + 300)])
def test_zeros_behind_a_cut_are_nobodys_bytes(files: Files, others: Files, sizes: tuple[int, ...]) -> None:
    written, cut, lengthened = sizes
    file = files.create("f", flags=os.O_RDWR)
    files.pwrite(file, 0, b"k" * written)
    files.ftruncate(file, cut)
    files.ftruncate(file, lengthened)
    others.put("f", b"of another")
    refused(errno.ESTALE, files.close, file)


class Looked:
    """A content that a file has just stored, about to be looked at again."""

    def __init__(self, files: Files) -> None:
        file = files.open("f", os.O_RDWR)
        files.pwrite(file, 0, part(0))
        files.close(file)
        self._channel = files.channel
        manifest = files.manifest("f")
        assert manifest is not None
        own = {chunk for chunk in manifest.stored() if chunk[0] == manifest.identity}
        self._steps = stays(files.channel, files.volume, manifest, own, files.channel.now())
        wanted = next(self._steps)
        assert isinstance(wanted, Acquire)
        assert CROSSING - 1e-6 < wanted.deadline - files.channel.now() <= CROSSING_MAX

    def stays(self) -> bool:
        return self._channel.run(rest_of(self._steps, False))


def test_a_content_that_was_written_in_part_is_looked_at_again(files: Files, others: Files) -> None:
    made_beforehand(files)
    assert Looked(files).stays()
    looked = Looked(files)
    others.put("f", WHOLE)
    assert not looked.stays(), "another host stored at the same time"
    looked = Looked(files)
    file = others.open("f", os.O_RDWR)
    others.pwrite(file, PART, part(1))
    others.close(file)
    assert looked.stays(), "the other built on it"
    looked = Looked(files)
    others.unlink("f")
    assert looked.stays(), "a file that is not there is a miss"


def test_where_nobody_says_what_became_of_it_the_store_counts(pool: SharedPool, files: Files) -> None:
    made_beforehand(files)
    looked = Looked(files)
    for namespace in pool.namespaces[2:]:
        namespace.down = True
    assert looked.stays()


@pytest.mark.interpreted
def test_the_part_that_did_not_stay_is_refused_and_leaves_nothing(
    files: Files, others: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    made_beforehand(files)

    def crossed(*_: object) -> Steps[bool]:
        yield from ()
        others.put("f", b"of another")
        return False

    file = files.open("f", os.O_RDWR)
    files.pwrite(file, 0, part(0))
    monkeypatch.setattr(file_writer, "stays", crossed)
    refused(errno.ESTALE, files.close, file)
    files.collect()
    assert files.get("f") == b"of another"
    assert files.taken() == 0


def test_a_file_that_is_written_over_and_then_renamed_takes_the_place_of_what_was_there(
    files: Files, others: Files
) -> None:
    files.put("f", WHOLE)
    file = files.open("f", os.O_RDWR)
    files.pwrite(file, 0, b"over")
    others.put("g", b"older")
    files.rename("f", "g")
    files.close(file)
    assert others.get("g") == b"over" + WHOLE[4:]
    assert others.stat("f") is None


def test_nobody_says_what_the_name_leads_to(pool: SharedPool, files: Files, others: Files) -> None:
    files.put("f", WHOLE)
    file = files.open("f", os.O_RDWR)
    files.pwrite(file, 0, b"over")
    for namespace in pool.namespaces[2:]:
        namespace.down = True
    refused(errno.EIO, files.close, file)
    for namespace in pool.namespaces[2:]:
        namespace.down = False
    assert others.get("f") == WHOLE


def test_pages_that_the_kernel_writes_wait_for_nobodys_close(files: Files, others: Files) -> None:
    """A program that changes the file through a mapping: FUSE names no owner of such a write."""
    file = files.create("f", flags=os.O_RDWR)
    files.ftruncate(file, len(WHOLE))
    for at in range(0, len(WHOLE), 4096):
        files.pwrite(file, at, WHOLE[at : at + 4096], PAGES)
    files.flush(file)
    assert others.get("f") == WHOLE
    files.pwrite(file, 0, b"more", PAGES)
    files.release(file)
    assert others.get("f") == b"more" + WHOLE[4:]


def test_a_thread_that_made_the_file_may_have_ended_at_its_close(files: Files, others: Files) -> None:
    file = files.create("f")
    files.pwrite(file, 0, WHOLE)
    files.flush(file, LockOwner(MAKER.owner, 99))
    assert others.get("f") == WHOLE


def test_so_many_processes_write_one_file_and_no_more(files: Files) -> None:
    first = files.create("f")
    for number in range(HOLDERS_MAX):
        assert files.create("f", Caller(0, 0, NOBODYS + number))[0] == first[0]
    refused(errno.EMFILE, files.create, "f", Caller(0, 0, NOBODYS - 1))
    assert files.create("f", CALLER)[0] == first[0]


@pytest.mark.interpreted
def test_a_rename_leaves_what_was_published_under_its_old_name_meanwhile(
    files: Files, others: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two processes that write to one temporary name, and each renames it."""
    files.put("tmp", WHOLE)
    put = files.face._names.put

    def published_meanwhile(*arguments: object) -> Steps[None]:
        monkeypatch.undo()
        yield from put(*arguments)  # type: ignore[arg-type]
        writer = files.face._writer(OTHER, 0, node, None, None, 0o644)
        yield from writer.write(files.channel, 0, memoryview(WHOLE[::-1]), THEIRS)
        yield from writer.publish(files.channel)
        writer.abandon()

    files.lookup("tmp")
    node = files.face._nodes.get(files.lookup("tmp").attributes.ino)
    monkeypatch.setattr(files.face._names, "put", published_meanwhile)
    files.rename("tmp", "f")
    files.collect()
    assert others.get("f") == WHOLE
    assert others.get("tmp") == WHOLE[::-1]


def test_the_room_of_a_content_that_another_process_replaced_is_back(files: Files, others: Files) -> None:
    """Each has opened the name before the other published under it."""
    makers = [files.create("f", caller, os.O_WRONLY | os.O_TRUNC) for caller in (CALLER, OTHER, STRANGER)]
    for number, file in enumerate(makers):
        owner = LockOwner(20 + number, (CALLER, OTHER, STRANGER)[number].pid)
        files.pwrite(file, 0, bytes([number]) * (3 * CHUNK), owner)
        files.close(file, owner)
    files.collect()
    assert others.get("f") == b"\2" * (3 * CHUNK)
    assert files.taken() == 3


def test_a_content_that_was_renamed_is_not_given_up_for_a_new_one_under_its_old_name(
    files: Files, others: Files
) -> None:
    files.put("tmp", WHOLE)
    theirs = files.open("tmp", os.O_WRONLY | os.O_TRUNC, OTHER)
    files.rename("tmp", "f")
    files.pwrite(theirs, 0, WHOLE[::-1], THEIRS)
    files.close(theirs, THEIRS)
    files.collect()
    assert others.get("f") == WHOLE
    assert others.get("tmp") == WHOLE[::-1]
