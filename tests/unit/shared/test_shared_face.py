"""`/shared` over a pool in memory, on two agents: what is seen when, and what a lost chunk is."""

from __future__ import annotations

import errno
import os
import random

import pytest

from agent.fs.close_cause import Closing
from agent.fs.interface import Caller, LockOwner, SetAttributes
from agent.fs.shared.nodes import SHARED_ROOT
from agent.fs.shared.paths import path_key
from agent.fs.shared.unnamed import NAMED_WITH_DATA, UNNAMED_SECONDS
from agent.pool.steps import settle
from tests.support.fs.memory_shared import CALLER, CHUNK, OTHER, Files, SharedPool, refused

DATA = random.Random(18).randbytes(5 * CHUNK + 777)


# -- writing and reading --------------------------------------------------------------------------


@pytest.mark.parametrize("length", [0, 1, 5000, 12_000, 13_000, CHUNK - 1, CHUNK, CHUNK + 1, 5 * CHUNK + 777])
@pytest.mark.parametrize("piece", [4096, 50_000, CHUNK, 1 << 20])
def test_a_file_is_the_same_on_every_agent(files: Files, others: Files, length: int, piece: int) -> None:
    files.put("f", DATA[:length], piece)
    for agent in (files, others):
        assert agent.get("f") == DATA[:length]
        found = agent.stat("f")
        assert found is not None
        assert found.size == length


def test_nothing_is_seen_before_the_close_and_all_is_seen_after_it(files: Files, others: Files) -> None:
    file = files.create("f")
    files.pwrite(file, 0, DATA)
    assert others.stat("f") is None
    assert files.stat("f", OTHER) is None, "another process of the same machine"
    own = files.stat("f")
    assert own is not None
    assert own.size == len(DATA)
    files.flush(file)
    assert others.get("f") == DATA
    files.release(file)


def test_pieces_in_any_order_make_the_file(files: Files, others: Files) -> None:
    pieces = [(at, DATA[at : at + 10_000]) for at in range(0, len(DATA), 10_000)]
    random.Random(7).shuffle(pieces)
    file = files.create("f")
    for at, piece in pieces:
        files.pwrite(file, at, piece)
    files.close(file)
    assert others.get("f") == DATA


def test_what_was_never_written_is_zeros_and_takes_no_room(files: Files, others: Files) -> None:
    file = files.create("f")
    files.ftruncate(file, 10 * CHUNK + 5)
    files.pwrite(file, 7 * CHUNK, DATA[:CHUNK])
    files.close(file)
    wanted = bytearray(10 * CHUNK + 5)
    wanted[7 * CHUNK : 8 * CHUNK] = DATA[:CHUNK]
    assert others.get("f") == bytes(wanted)
    assert files.taken() == 1


def test_a_file_made_beforehand_is_filled_in_later(files: Files, others: Files) -> None:
    file = files.create("f")
    files.ftruncate(file, 3 * CHUNK)
    files.close(file)
    again = others.open("f", os.O_RDWR)
    for number in (2, 0, 1):
        others.pwrite(again, number * CHUNK, DATA[number * CHUNK : (number + 1) * CHUNK])
    assert files.get("f") == bytes(3 * CHUNK)
    others.close(again)
    assert files.get("f") == DATA[: 3 * CHUNK]
    manifest = files.manifest("f")
    assert manifest is not None
    assert manifest.runs == ()


def test_a_file_is_written_over_in_part_and_readers_keep_what_they_opened(
    files: Files, others: Files
) -> None:
    files.put("f", DATA)
    reader = files.open("f")
    writer = files.open("f", os.O_RDWR)
    assert writer[0] != reader[0], "what is written has an inode of its own"
    files.pwrite(writer, CHUNK + 10, b"new")
    assert (
        files.pread(writer, CHUNK + 8, 8)
        == DATA[CHUNK + 8 : CHUNK + 10] + b"new" + DATA[CHUNK + 13 : CHUNK + 16]
    )
    files.close(writer)
    files.collect()
    assert files.pread(reader, 0, len(DATA)) == DATA
    files.release(reader)
    wanted = DATA[: CHUNK + 10] + b"new" + DATA[CHUNK + 13 :]
    assert others.get("f") == wanted
    files.collect()
    assert files.taken() == 6, "the chunk that was replaced is gone"


def test_two_agents_that_write_one_file_over_leave_one_of_both_whole(files: Files, others: Files) -> None:
    files.put("f", bytes(4 * CHUNK))
    mine, theirs = files.open("f", os.O_RDWR), others.open("f", os.O_RDWR)
    for number in range(4):
        files.pwrite(mine, number * CHUNK, b"a" * CHUNK)
        others.pwrite(theirs, number * CHUNK, b"b" * CHUNK)
    others.close(theirs)
    files.close(mine)
    assert others.get("f") == files.get("f") == b"a" * 4 * CHUNK


def test_truncating_an_open_name_begins_a_new_content(files: Files, others: Files) -> None:
    files.put("f", DATA)
    file = files.open("f", os.O_WRONLY | os.O_TRUNC)
    files.pwrite(file, 0, b"short")
    assert others.get("f") == DATA
    files.close(file)
    assert others.get("f") == b"short"
    files.collect()
    assert files.taken() == 0


def test_truncate_by_path_is_seen_at_once(files: Files, others: Files) -> None:
    files.put("f", DATA)
    for size in (CHUNK + 5, 3 * CHUNK, 0):
        ino = files.lookup("f").attributes.ino
        settle(files.face.setattr(CALLER, ino, SetAttributes(size=size), None), files.channel)
        kept = DATA[: min(size, CHUNK + 5)]
        assert others.get("f") == kept.ljust(size, b"\0")


def test_a_cut_tail_does_not_come_back(files: Files) -> None:
    file = files.create("f")
    files.pwrite(file, 0, DATA)
    files.ftruncate(file, CHUNK + 100)
    files.ftruncate(file, 3 * CHUNK)
    files.close(file)
    assert files.get("f") == DATA[: CHUNK + 100].ljust(3 * CHUNK, b"\0")


def test_a_file_goes_on_after_it_was_closed_by_one_of_its_descriptors(files: Files, others: Files) -> None:
    file = files.create("f")
    files.pwrite(file, 0, DATA[:CHUNK])
    files.flush(file)
    files.pwrite(file, CHUNK, DATA[CHUNK : 2 * CHUNK])
    assert others.get("f") == DATA[:CHUNK]
    files.close(file)
    assert others.get("f") == DATA[: 2 * CHUNK]


# -- who closed it ---------------------------------------------------------------------------------


@pytest.mark.parametrize("is_named", [True, False])
def test_a_writer_that_dies_leaves_nothing(files: Files, others: Files, is_named: bool) -> None:
    file = files.create("f")
    files.pwrite(file, 0, DATA)
    if is_named:
        files.channel.clock += UNNAMED_SECONDS
        files.name()
    assert (files.taken(), files.reserved()) == (
        (5, 0) if is_named else (NAMED_WITH_DATA, 5 - NAMED_WITH_DATA)
    )
    files.flush(file, how=Closing.DYING)
    files.release(file)
    assert files.stat("f") is others.stat("f") is None
    files.collect()
    assert files.taken() == files.reserved() == 0
    assert files.face._staged.held == 0


def test_a_writer_that_dies_leaves_the_earlier_content(files: Files, others: Files) -> None:
    files.put("f", DATA)
    file = files.open("f", os.O_RDWR)
    files.pwrite(file, 0, b"half")
    files.close(file, how=Closing.DYING)
    files.collect()
    assert others.get("f") == DATA


def test_a_file_whose_writer_never_closed_it_is_dropped_at_its_end(files: Files) -> None:
    file = files.create("f")
    files.pwrite(file, 0, DATA)
    files.release(file)
    assert files.stat("f") is None
    files.collect()
    assert files.taken() == 0


def test_where_nobody_can_say_how_it_was_closed_it_is_there(files: Files, others: Files) -> None:
    file = files.create("f")
    files.pwrite(file, 0, DATA, LockOwner(5, 0))
    files.flush(file, LockOwner(5, 0), Closing.UNTOLD)
    assert others.get("f") == DATA
    files.release(file)
    empty = files.create("e")
    files.flush(empty, LockOwner(5, 0), Closing.UNTOLD)
    assert others.get("e") == b""
    files.release(empty)


# -- names -------------------------------------------------------------------------------------------


def test_tmp_and_rename_is_how_engines_write(files: Files, others: Files) -> None:
    for folder in ("m", "m/abc", "m/abc/de_g0"):
        files.mkdir(folder)
    for content in (DATA, DATA[::-1]):
        files.put("m/abc/de_g0/f.tmp", content)
        files.rename("m/abc/de_g0/f.tmp", "m/abc/de_g0/f")
        assert others.get("m/abc/de_g0/f") == files.get("m/abc/de_g0/f") == content
        assert others.stat("m/abc/de_g0/f.tmp") is None
    files.collect()
    assert files.taken() == 6, "what was replaced is gone"


def test_a_file_that_is_being_written_is_stored_under_its_new_name(files: Files, others: Files) -> None:
    file = files.create("f.tmp")
    files.pwrite(file, 0, DATA)
    files.rename("f.tmp", "f")
    assert others.stat("f") is None
    files.close(file)
    assert others.get("f") == DATA
    assert others.stat("f.tmp") is None


def test_rename_may_refuse_to_replace(files: Files) -> None:
    files.put("a", b"a")
    files.put("b", b"b")
    refused(errno.EEXIST, files.rename, "a", "b", 1)
    refused(errno.EINVAL, files.rename, "a", "b", 2)
    assert files.get("b") == b"b"
    files.rename("a", "c", 1)
    assert files.get("c") == b"a"


def test_a_folder_is_not_renamed_nor_replaced(files: Files) -> None:
    files.mkdir("a")
    files.put("f", b"f")
    refused(errno.EXDEV, files.rename, "a", "b")
    refused(errno.EISDIR, files.rename, "f", "a")


def test_folders_are_seen_by_every_agent(files: Files, others: Files) -> None:
    files.mkdir("a")
    refused(errno.EEXIST, others.mkdir, "a")
    others.mkdir("a/b")
    files.put("a/b/f", DATA)
    assert others.get("a/b/f") == DATA
    refused(errno.ENOTEMPTY, files.rmdir, "a/b")
    others.unlink("a/b/f")
    files.rmdir("a/b")
    assert others.stat("a/b") is None
    refused(errno.ENOENT, files.mkdir, "x/y")
    others.rmdir("a")
    assert files.stat("a") is None


def test_a_listing_shows_what_was_seen(files: Files, others: Files) -> None:
    files.mkdir("a")
    files.put("a/f", b"1")
    files.put("a/g", b"2")
    files.unlink("a/g")
    assert files.listdir() == {"a"}
    assert files.listdir("a") == {"f"}
    assert others.listdir("a") == set()
    others.get("a/f")
    assert others.listdir("a") == {"f"}


def test_an_evicted_folder_with_names_that_were_seen_is_made_anew(pool: SharedPool, files: Files) -> None:
    files.mkdir("a")
    files.put("a/f", DATA)
    files.evict(files.names, path_key(b"a"))
    assert files.get("a/f") == DATA
    assert pool.agent().get("a/f") == DATA


def test_a_removed_file_is_gone_everywhere_and_its_room_comes_back(files: Files, others: Files) -> None:
    files.put("f", DATA)
    others.unlink("f")
    assert files.stat("f") is None
    refused(errno.ENOENT, files.unlink, "f")
    others.collect()
    assert files.taken() == 0


def test_a_file_removed_while_it_is_open_is_read_to_its_end(files: Files) -> None:
    files.put("f", DATA)
    file = files.open("f")
    files.unlink("f")
    files.collect()
    assert files.pread(file, 0, len(DATA)) == DATA
    files.release(file)
    files.collect()
    assert files.taken() == 0


def test_a_file_removed_while_it_is_written_is_never_there(files: Files) -> None:
    file = files.create("f")
    files.pwrite(file, 0, DATA)
    files.unlink("f")
    files.close(file)
    assert files.stat("f") is None
    files.collect()
    assert files.taken() == 0


def test_o_excl_refuses_what_another_process_is_writing(files: Files) -> None:
    file = files.create("f", flags=os.O_WRONLY | os.O_EXCL)
    refused(errno.EEXIST, files.create, "f", OTHER, os.O_WRONLY | os.O_EXCL)
    files.close(file)


@pytest.mark.parametrize("name", [b"", b".", b"..", b"a/b", b"a\0b"])
def test_what_is_no_name_is_refused(files: Files, name: bytes) -> None:
    for action in (
        lambda: files.face.lookup(CALLER, files.root, name),
        lambda: files.face.create(CALLER, files.root, name, 0o644, os.O_WRONLY),
        lambda: files.face.mkdir(CALLER, files.root, name, 0o755),
        lambda: files.face.rename(CALLER, files.root, b"a", files.root, name, 0),
    ):
        refused(errno.EINVAL, lambda action=action: settle(action(), files.channel))


def test_paths_are_long_and_deep_to_a_bound() -> None:
    pool = SharedPool(name_sets=(64, 64))
    files, others = pool.agent(), pool.agent()
    node = files.root
    for _ in range(1000):
        made = settle(files.face.mkdir(CALLER, node, b"d", 0o755), files.channel)
        node = made.attributes.ino
    for _ in range(8):
        made = settle(files.face.mkdir(CALLER, node, b"n" * 250, 0o755), files.channel)
        node = made.attributes.ino
    refused(errno.ENAMETOOLONG, settle_mkdir, files, node, b"n" * 250)
    refused(errno.ENAMETOOLONG, settle_mkdir, files, files.root, b"n" * 256)
    path = "/".join(["d"] * 1000)
    files.put(path + "/f", DATA)
    assert others.get(path + "/f") == DATA


def settle_mkdir(files: Files, node: int, name: bytes) -> None:
    settle(files.face.mkdir(CALLER, node, name, 0o755), files.channel)


def test_mode_and_owner_are_those_of_the_maker(files: Files, others: Files) -> None:
    entry, opened = settle(
        files.face.create(Caller(7, 8, 1, 0o027), files.root, b"f", 0o666, os.O_WRONLY), files.channel
    )
    file = entry.attributes.ino, opened.handle
    settle(files.face.setattr(CALLER, file[0], SetAttributes(mtime_ns=5), file[1]), files.channel)
    files.close(file)
    found = others.stat("f")
    assert found is not None
    assert (found.mode & 0o7777, found.uid, found.gid, found.mtime_ns) == (0o640, 7, 8, 5)


@pytest.mark.parametrize("fault", ["down", "broken"])
def test_the_folder_of_a_volume_keeps_its_owner_while_an_enclosure_is_away(
    pool: SharedPool, files: Files, fault: str
) -> None:
    """Else its engines' user hears EACCES, or one whom it was closed to comes in."""
    settle(files.face.setattr(CALLER, files.root, SetAttributes(mode=0o700, uid=5), None), files.channel)
    for namespace in pool.namespaces:
        setattr(namespace, fault, True)
    found = settle(files.face.lookup(CALLER, SHARED_ROOT, b"v"), files.channel).attributes
    assert (found.mode & 0o7777, found.uid) == (0o700, 5)


def test_a_lookup_that_came_late_has_as_much_patience_when_it_comes_again(
    pool: SharedPool, files: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its steps may have given way to others: it is served once more."""
    files.put("f", DATA)
    slow = list[bool]()
    monkeypatch.setattr(files.channel, "waits_for_slow", lambda: slow.append(True))
    for down in (True, True, False):
        slow.clear()
        for namespace in pool.namespaces:
            namespace.down = down
        assert (files.stat("f") is None) is down
        assert slow


def test_a_folder_keeps_its_mode_and_the_volume_too(files: Files, others: Files) -> None:
    files.mkdir("a")
    for ino in (files.root, files.lookup("a").attributes.ino):
        settle(files.face.setattr(CALLER, ino, SetAttributes(mode=0o1777, uid=5), None), files.channel)
    assert others.lookup("a").attributes.mode & 0o7777 == 0o1777
    found = settle(others.face.getattr(CALLER, others.root, None), others.channel)
    assert (found.mode & 0o7777, found.uid) == (0o1777, 5)
