"""The operations of /fs one by one: results, errnos, times, listings, life and death of inodes."""

from __future__ import annotations

import errno
import os
import stat

from agent.fs.files.inodes import global_ino
from agent.fs.interface import ROOT_INODE, Attributes, Caller, Opened, SetAttributes
from tests.support.fs.files_calls import ROOT, FaceCalls
from tests.unit.files.conftest import BLOCK, World, refused

CALLER = Caller(uid=1000, gid=100, pid=1, umask=0o022)
UNKNOWN = global_ino(4711)


def attributes(calls: FaceCalls, path: str) -> Attributes:
    ino = calls.ino(path)
    return calls.do(lambda: calls.face.getattr(CALLER, ino, None))


def set_attributes(calls: FaceCalls, path: str, changes: SetAttributes) -> Attributes:
    ino = calls.ino(path)
    return calls.do(lambda: calls.face.setattr(CALLER, ino, changes, None))


# Blocks and slots.


def test_a_small_file_takes_the_smallest_slot_that_fits_and_a_tail_too(world: World) -> None:
    for size, slots in ((1, [512]), (513, [2048]), (BLOCK, [BLOCK]), (BLOCK + 600, [2048, BLOCK])):
        world.calls.put("file", b"x" * size)
        world.collect()
        assert sorted(capacity for capacity, _ in world.store.blocks.values()) == slots
        assert attributes(world.calls, "file").blocks * 512 == sum(slots)


def test_whole_blocks_go_to_the_store_at_once_and_without_staging(world: World) -> None:
    file = world.calls.open("file", os.O_CREAT | os.O_RDWR)
    world.calls.pwrite(file, b"x" * 2 * BLOCK, 0)
    assert world.face.gauges().staging_bytes == 0
    assert world.store.puts == 2
    world.calls.close(file)
    assert world.store.puts == 2


def test_sequential_small_writes_seal_each_block_once(world: World) -> None:
    file = world.calls.open("file", os.O_CREAT | os.O_RDWR)
    for at in range(0, 4 * BLOCK, BLOCK // 4):
        world.calls.pwrite(file, b"x" * (BLOCK // 4), at)
        assert world.store.puts == (at + BLOCK // 4) // BLOCK
        assert world.face.gauges().staging_bytes <= BLOCK
    world.calls.close(file)
    assert world.store.puts == 4
    assert world.store.gets == 0


def test_appending_and_syncing_in_turn_fetches_nothing(world: World) -> None:
    file = world.calls.open("file", os.O_CREAT | os.O_RDWR)
    for number in range(20):
        world.calls.pwrite(file, b"line\n", 5 * number)
        world.calls.fsync(file)
    assert world.store.gets == 0
    world.calls.close(file)
    assert world.calls.get("file") == b"line\n" * 20


def test_holes_take_no_room_and_read_as_zero(world: World) -> None:
    world.calls.put("file", b"")
    file = world.calls.open("file", os.O_RDWR)
    world.calls.pwrite(file, b"end", 1 << 40)
    assert world.calls.pread(file, 10, (1 << 40) - 4) == b"\0\0\0\0end"
    assert world.calls.pread(file, 100, 1 << 35) == bytes(100)
    world.calls.close(file)
    assert attributes(world.calls, "file").size == (1 << 40) + 3
    assert len(world.store.blocks) == 1
    world.calls.truncate("file", (1 << 63) - 1)
    world.calls.truncate("file", 5)
    assert world.calls.get("file") == bytes(5)


def test_cut_and_grown_again_a_file_does_not_show_what_it_had(world: World) -> None:
    world.calls.put("file", b"secret" * 1000)
    world.calls.truncate("file", 3)
    world.calls.truncate("file", 5000)
    assert world.calls.get("file") == b"sec" + bytes(4997)
    file = world.calls.open("file", os.O_RDWR)
    world.calls.pwrite(file, b"x", 4000)
    world.calls.close(file)
    assert world.calls.get("file") == b"sec" + bytes(3997) + b"x" + bytes(999)


def test_zero_range_and_punch(world: World) -> None:
    world.calls.put("file", b"x" * 4 * BLOCK)
    file = world.calls.open("file", os.O_RDWR)
    world.calls.fallocate(file, 0x10, 10, 3 * BLOCK)
    expected = b"x" * 10 + bytes(3 * BLOCK) + b"x" * (BLOCK - 10)
    assert world.calls.pread(file, 5 * BLOCK, 0) == expected
    world.calls.fallocate(file, 0x10, 4 * BLOCK - 1, 101)
    assert world.calls.fstat(file).size == 4 * BLOCK + 100
    world.calls.fallocate(file, 0x03, 0, 1 << 50)
    assert world.calls.pread(file, 5 * BLOCK, 0) == bytes(4 * BLOCK + 100)
    world.calls.close(file)
    world.collect()
    assert world.store.blocks == {}
    refused(errno.EBADF, lambda: world.calls.fallocate(file, 0, 0, 1))


def test_fallocate_refuses_what_cannot_fit_and_what_it_does_not_know(world: World) -> None:
    world.store.slots = {512: 0, 2048: 0, BLOCK: 3}
    file = world.calls.open("file", os.O_CREAT | os.O_RDWR)
    refused(errno.ENOSPC, lambda: world.calls.fallocate(file, 0, 0, 4 * BLOCK))
    assert world.calls.fstat(file).size == 0
    world.calls.fallocate(file, 0, 0, 3 * BLOCK)
    assert world.calls.fstat(file).size == 3 * BLOCK
    for mode in (0x02, 0x08, 0x20, 0x40, 0x80):
        refused(errno.EOPNOTSUPP, lambda mode=mode: world.calls.fallocate(file, mode, 0, 1))
    refused(errno.EINVAL, lambda: world.calls.fallocate(file, 0, 0, 0))
    refused(errno.EINVAL, lambda: world.calls.fallocate(file, 0, -1, 5))
    refused(errno.EFBIG, lambda: world.calls.fallocate(file, 0, (1 << 63) - 1, 5))
    world.calls.close(file)


def test_two_handles_see_each_other_at_once(world: World) -> None:
    one = world.calls.open("file", os.O_CREAT | os.O_RDWR)
    two = world.calls.open("file", os.O_RDWR)
    world.calls.pwrite(one, b"one", 0)
    assert world.calls.pread(two, 10, 0) == b"one"
    world.calls.pwrite(two, b"two", 1)
    assert world.calls.pread(one, 10, 0) == b"otwo"
    world.calls.close(one)
    world.calls.ftruncate(two, 2)
    assert world.calls.stat("file").size == 2
    world.calls.close(two)


def test_files_of_an_earlier_block_size_stay_readable_and_writable(world: World) -> None:
    world.calls.put("old", b"o" * 3 * BLOCK)
    world.restart(block_bytes=2048)
    world.calls.put("new", b"n" * 3 * BLOCK)
    file = world.calls.open("old", os.O_RDWR)
    world.calls.pwrite(file, b"!", BLOCK)
    world.calls.close(file)
    assert world.calls.get("old") == b"o" * BLOCK + b"!" + b"o" * (2 * BLOCK - 1)
    assert world.calls.get("new") == b"n" * 3 * BLOCK


# Open, create, handles.


def test_create_honours_exclusive_and_truncate(world: World) -> None:
    world.calls.put("file", b"content")
    face, do = world.face, world.calls.do
    refused(
        errno.EEXIST, lambda: do(lambda: face.create(CALLER, ROOT, b"file", 0o644, os.O_EXCL | os.O_RDWR))
    )
    entry, opened = do(lambda: face.create(CALLER, ROOT, b"file", 0o644, os.O_TRUNC | os.O_RDWR))
    assert entry.attributes.size == 0
    do(lambda: face.release(entry.attributes.ino, opened.handle))
    assert world.calls.get("file") == b""
    world.calls.mkdir("dir")
    refused(errno.EISDIR, lambda: do(lambda: face.create(CALLER, ROOT, b"dir", 0o644, os.O_RDWR)))


def test_a_handle_is_good_for_its_file_and_its_direction_only(world: World) -> None:
    reader = world.calls.open("file", os.O_CREAT | os.O_RDONLY)
    writer = world.calls.open("file", os.O_WRONLY)
    other = world.calls.open("other", os.O_CREAT | os.O_RDWR)
    refused(errno.EBADF, lambda: world.calls.pwrite(reader, b"x", 0))
    refused(errno.EBADF, lambda: world.calls.pread(writer, 1, 0))
    refused(errno.EBADF, lambda: world.calls.pread((reader[0], other[1]), 1, 0))
    refused(errno.EBADF, lambda: world.calls.fsync((reader[0], 4711)))
    refused(errno.EBADF, lambda: world.calls.do(lambda: world.face.release(reader[0], 4711)))
    refused(errno.EFBIG, lambda: world.calls.pwrite(writer, b"xx", (1 << 63) - 2))
    for file in (reader, writer, other):
        world.calls.close(file)
    refused(errno.EBADF, lambda: world.calls.pread(reader, 1, 0))


def test_numbers_that_are_none_are_refused(world: World) -> None:
    face, do = world.face, world.calls.do
    for ino in (UNKNOWN, 1, 0, ROOT & ~1, 2 << 56 | 99):
        refused(errno.ESTALE, lambda ino=ino: do(lambda: face.getattr(CALLER, ino, None)))
        refused(errno.ESTALE, lambda ino=ino: do(lambda: face.open(CALLER, ino, os.O_RDONLY)))
        refused(errno.ESTALE, lambda ino=ino: do(lambda: face.lookup(CALLER, ino, b"x")))
        refused(errno.ESTALE, lambda ino=ino: do(lambda: face.mkdir(CALLER, ino, b"x", 0o755)))
        refused(
            errno.ESTALE, lambda ino=ino: do(lambda: face.setattr(CALLER, ino, SetAttributes(size=1), None))
        )
        refused(errno.ESTALE, lambda ino=ino: do(lambda: face.setxattr(CALLER, ino, b"user.x", b"", 0)))
        refused(errno.ESTALE, lambda ino=ino: do(lambda: face.listxattr(CALLER, ino)))
        face.forget(ino, 3)


def test_names_that_are_none_are_refused(world: World) -> None:
    face, do = world.face, world.calls.do
    world.calls.put("file", b"")
    for name, code in (
        (b"", errno.EINVAL),
        (b".", errno.EINVAL),
        (b"..", errno.EINVAL),
        (b"a/b", errno.EINVAL),
        (b"a\0b", errno.EINVAL),
        (b"x" * 256, errno.ENAMETOOLONG),
    ):
        refused(code, lambda name=name: do(lambda: face.mkdir(CALLER, ROOT, name, 0o755)))
        refused(code, lambda name=name: do(lambda: face.create(CALLER, ROOT, name, 0o644, os.O_RDWR)))
        refused(code, lambda name=name: do(lambda: face.symlink(CALLER, ROOT, name, b"x")))
        refused(code, lambda name=name: do(lambda: face.rename(CALLER, ROOT, b"file", ROOT, name, 0)))
    refused(errno.ENAMETOOLONG, lambda: do(lambda: face.lookup(CALLER, ROOT, b"x" * 256)))
    refused(errno.ENAMETOOLONG, lambda: do(lambda: face.symlink(CALLER, ROOT, b"x", b"x" * 4096)))
    odd = bytes(range(1, 256)).replace(b"/", b"")
    entry = do(lambda: face.mkdir(CALLER, ROOT, odd, 0o755))
    assert do(lambda: face.lookup(CALLER, ROOT, odd)).attributes.ino == entry.attributes.ino
    refused(errno.EINVAL, lambda: do(lambda: face.rename(CALLER, ROOT, b"file", ROOT, b"other", 4)))
    refused(errno.EINVAL, lambda: do(lambda: face.rename(CALLER, ROOT, b"file", ROOT, b"other", 3)))


def test_what_is_no_directory_is_enotdir_and_what_is_no_file_is_refused(world: World) -> None:
    face, do = world.face, world.calls.do
    world.calls.put("file", b"")
    world.calls.mkdir("dir")
    world.calls.symlink("x", "link")
    file, directory, link = world.calls.ino("file"), world.calls.ino("dir"), world.calls.ino("link")
    refused(errno.ENOTDIR, lambda: do(lambda: face.lookup(CALLER, file, b"x")))
    refused(errno.ENOTDIR, lambda: do(lambda: face.mkdir(CALLER, file, b"x", 0)))
    refused(errno.ENOTDIR, lambda: do(lambda: face.opendir(CALLER, file, 0)))
    refused(errno.ENOTDIR, lambda: do(lambda: face.readdir(file, 0, 0)))
    refused(errno.EISDIR, lambda: do(lambda: face.open(CALLER, directory, os.O_RDONLY)))
    refused(errno.EISDIR, lambda: world.calls.truncate("dir", 0))
    refused(errno.EINVAL, lambda: do(lambda: face.readlink(CALLER, file)))
    refused(errno.EINVAL, lambda: do(lambda: face.open(CALLER, link, os.O_RDONLY)))
    refused(errno.EPERM, lambda: do(lambda: face.link(CALLER, directory, ROOT, b"x")))


def test_special_nodes(world: World) -> None:
    face, do = world.face, world.calls.do
    for kind in (stat.S_IFIFO, stat.S_IFSOCK, stat.S_IFCHR, stat.S_IFREG, 0):
        name = f"node{kind}".encode()
        entry = do(lambda kind=kind, name=name: face.mknod(CALLER, ROOT, name, kind | 0o666, 0x103))
        assert entry.attributes.mode == (kind or stat.S_IFREG) | 0o644
        assert entry.attributes.rdev == 0x103
    refused(errno.EPERM, lambda: do(lambda: face.mknod(CALLER, ROOT, b"d", stat.S_IFDIR, 0)))
    refused(errno.EINVAL, lambda: do(lambda: face.mknod(CALLER, ROOT, b"l", stat.S_IFLNK, 0)))


# Attributes.


def test_owner_mode_and_set_group_id(world: World) -> None:
    face, do = world.face, world.calls.do
    entry = do(lambda: face.mkdir(CALLER, ROOT, b"dir", 0o777))
    shown = entry.attributes
    assert (shown.uid, shown.gid, shown.mode, shown.nlink) == (1000, 100, stat.S_IFDIR | 0o755, 2)
    set_attributes(world.calls, "dir", SetAttributes(mode=stat.S_IFDIR | 0o2775, gid=55))
    inside = do(lambda: face.mkdir(CALLER, shown.ino, b"inside", 0o777)).attributes
    assert (inside.gid, inside.mode) == (55, stat.S_IFDIR | 0o2755)
    file, opened = do(lambda: face.create(CALLER, shown.ino, b"file", 0o666, os.O_RDWR))
    assert (file.attributes.gid, file.attributes.mode) == (55, stat.S_IFREG | 0o644)
    do(lambda: face.release(file.attributes.ino, opened.handle))
    assert attributes(world.calls, "dir").nlink == 3


def test_times(world: World) -> None:
    world.calls.put("file", b"content")
    before = attributes(world.calls, "file")
    file = world.calls.open("file", os.O_RDWR)
    world.calls.pwrite(file, b"x", 0)
    written = attributes(world.calls, "file")
    assert written.mtime_ns > before.mtime_ns
    assert written.ctime_ns >= written.mtime_ns
    # A time that a program sets stands, although what it wrote before is sealed after.
    changed = set_attributes(world.calls, "file", SetAttributes(mtime_ns=5, atime_ns=7))
    assert (changed.mtime_ns, changed.atime_ns) == (5, 7)
    world.calls.close(file)
    closed = attributes(world.calls, "file")
    assert (closed.mtime_ns, closed.atime_ns) == (5, 7)
    touched = set_attributes(world.calls, "file", SetAttributes(touch_atime=True, touch_mtime=True))
    assert touched.mtime_ns > written.mtime_ns
    world.calls.get("file")
    assert attributes(world.calls, "file").atime_ns > touched.atime_ns
    far = set_attributes(world.calls, "file", SetAttributes(mtime_ns=1 << 80))
    assert far.mtime_ns == (1 << 63) - 1
    grown = set_attributes(world.calls, "file", SetAttributes(size=100, mtime_ns=9))
    assert (grown.size, grown.mtime_ns) == (100, 9)


def test_directories_change_their_times_with_their_names(world: World) -> None:
    seen = attributes(world.calls, "").mtime_ns
    for call in (
        lambda: world.calls.mkdir("dir"),
        lambda: world.calls.put("file", b""),
        lambda: world.calls.link("file", "link"),
        lambda: world.calls.rename("link", "renamed"),
        lambda: world.calls.unlink("renamed"),
        lambda: world.calls.rmdir("dir"),
    ):
        call()
        now = attributes(world.calls, "").mtime_ns
        assert now > seen
        seen = now


# Listings.


def test_a_listing_neither_skips_nor_repeats_what_was_there_all_the_time(world: World) -> None:
    steady = [f"steady{number:03}" for number in range(100)]
    for name in steady:
        world.calls.put(name, b"")
    for number in range(100):
        world.calls.put(f"goes{number:03}", b"")
    seen: list[str] = []
    cookie = 0
    while batch := list(world.calls.do(lambda cookie=cookie: world.face.readdir(ROOT, 0, cookie)))[:7]:
        seen += [entry.name.decode() for entry in batch]
        cookie = batch[-1].cookie
        turn = len(seen)
        if turn > 180:
            continue  # a directory that grows as fast as it is read has no end
        for name in (f"goes{turn % 100:03}", f"goes{(turn + 50) % 100:03}"):
            if name in world.calls.listdir(""):
                world.calls.unlink(name)
        world.calls.put(f"new{turn}", b"")
        world.calls.put("replacement", b"")
        world.calls.rename("replacement", steady[turn % 100])
    assert len(seen) == len(set(seen))
    assert set(steady) <= set(seen)


def test_a_large_directory_is_listed_in_several_answers(world: World) -> None:
    with world.face._database.transaction() as tx:
        tx.executemany(
            "INSERT INTO entries (parent, name, child) VALUES (1, ?, 1)", [(b"%d" % n,) for n in range(3000)]
        )
    seen: set[bytes] = set()
    cookie, answers = 0, 0
    while batch := list(world.calls.do(lambda cookie=cookie: world.face.readdir(ROOT, 0, cookie))):
        seen |= {entry.name for entry in batch}
        cookie = batch[-1].cookie
        answers += 1
    assert len(seen) == 3002
    assert answers == 3


def test_dot_and_dotdot(world: World) -> None:
    world.calls.mkdir("dir")
    world.calls.mkdir("dir/below")
    for path, above in (("", ROOT_INODE), ("dir", ROOT), ("dir/below", world.calls.ino("dir"))):
        ino = world.calls.ino(path)
        dot, dotdot = list(world.calls.do(lambda ino=ino: world.face.readdir(ino, 0, 0)))[:2]
        assert (dot.name, dot.ino, dotdot.name, dotdot.ino) == (b".", ino, b"..", above)
    world.calls.rename("dir/below", "moved")
    moved = world.calls.ino("moved")
    assert next(iter(world.calls.do(lambda: world.face.readdir(moved, 0, 1)))).ino == ROOT
    assert world.calls.ino("moved/..") == ROOT


def test_nothing_is_made_in_a_removed_directory(world: World) -> None:
    world.calls.mkdir("dir")
    ino = world.calls.do(lambda: world.face.lookup(CALLER, ROOT, b"dir")).attributes.ino
    world.calls.rmdir("dir")
    refused(errno.ENOENT, lambda: world.calls.do(lambda: world.face.mkdir(CALLER, ino, b"x", 0o755)))
    refused(errno.ENOENT, lambda: world.calls.do(lambda: world.face.lookup(CALLER, ino, b"x")))
    assert [entry.name for entry in world.calls.do(lambda: world.face.readdir(ino, 0, 0))] == [b".", b".."]
    assert world.calls.do(lambda: world.face.getattr(CALLER, ino, None)).nlink == 0
    world.face.forget(ino, 1)
    refused(errno.ESTALE, lambda: world.calls.do(lambda: world.face.getattr(CALLER, ino, None)))


# Life and death of inodes.


def test_an_inode_lives_while_the_kernel_remembers_it(world: World) -> None:
    world.calls.put("file", b"x")
    entry = world.calls.do(lambda: world.face.lookup(CALLER, ROOT, b"file"))
    world.calls.do(lambda: world.face.lookup(CALLER, ROOT, b"file"))
    world.calls.unlink("file")
    ino = entry.attributes.ino
    world.face.forget(ino, 1)
    assert world.calls.do(lambda: world.face.getattr(CALLER, ino, None)).nlink == 0
    refused(errno.ENOENT, lambda: world.calls.do(lambda: world.face.link(CALLER, ino, ROOT, b"again")))
    file = world.calls.do(lambda: world.face.open(CALLER, ino, os.O_RDONLY))
    world.face.forget(ino, 1)
    assert world.calls.pread((ino, file.handle), 5, 0) == b"x"
    world.calls.close((ino, file.handle))
    refused(errno.ESTALE, lambda: world.calls.do(lambda: world.face.getattr(CALLER, ino, None)))
    assert world.face.gauges().inodes == 1


def test_an_unlinked_open_file_is_written_and_read_like_any_other(world: World) -> None:
    file = world.calls.open("file", os.O_CREAT | os.O_RDWR)
    world.calls.unlink("file")
    for at in range(0, 10 * BLOCK, 1000):
        world.calls.pwrite(file, b"%04d" % (at // 1000) * 250, at)
    for at in range(0, 10 * BLOCK - 1000, 1000):
        assert world.calls.pread(file, 4, at) == b"%04d" % (at // 1000)
    world.calls.close(file)
    world.collect()
    assert world.store.blocks == {}


def test_a_replaced_file_that_is_open_keeps_its_content(world: World) -> None:
    world.calls.put("file", b"old")
    file = world.calls.open("file", os.O_RDONLY)
    world.calls.put("new", b"new")
    world.calls.rename("new", "file")
    assert world.calls.pread(file, 10, 0) == b"old"
    assert world.calls.get("file") == b"new"
    world.calls.close(file)


def test_a_program_that_only_writes_a_new_file_passes_the_page_cache_by(world: World) -> None:
    def opened(flags: int) -> Opened:
        made = world.calls.do(lambda: world.face.open(CALLER, ino, flags))
        world.calls.do(lambda: world.face.release(ino, made.handle))
        return made

    entry, made = world.calls.do(lambda: world.face.create(CALLER, ROOT, b"new", 0o644, os.O_WRONLY))
    ino, file = entry.attributes.ino, (entry.attributes.ino, made.handle)
    assert made.direct_writes
    assert not made.direct_io
    assert opened(os.O_WRONLY | os.O_APPEND).direct_writes
    assert not opened(os.O_RDWR).direct_writes
    assert not opened(os.O_RDONLY).direct_writes
    world.calls.pwrite(file, b"some", 0)
    assert not opened(os.O_WRONLY).direct_writes
    assert opened(os.O_WRONLY | os.O_TRUNC).direct_writes
    world.calls.close(file)
