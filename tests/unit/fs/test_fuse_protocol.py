"""FuseSession over a tree in memory: INIT and every opcode. What goes wrong is in test_fuse_faults.py."""

from __future__ import annotations

import errno
import os
import stat

import pytest

from agent.fs.fuse.abi import WRITE_CACHE, WRITE_LOCKOWNER, InitFlag, Opcode
from agent.fs.fuse.session import WANTED, FuseSession
from agent.fs.interface import NOBODY, PAGES, Caller, LockOwner, Opened
from agent.pool.steps import Outcome
from tests.support.fs.fuse_peer import Answer, FusePeer
from tests.support.fs.fuse_records import (
    AttrOut,
    BatchForgetIn,
    CreateIn,
    DirentHead,
    EntryOut,
    FallocateIn,
    FlushIn,
    ForgetIn,
    ForgetOne,
    FsyncIn,
    GetattrIn,
    GetxattrIn,
    InHeader,
    InitIn,
    InitOut,
    IoctlIn,
    LinkIn,
    MkdirIn,
    MknodIn,
    OpenIn,
    OpenOut,
    ReadIn,
    ReleaseIn,
    Rename2In,
    RenameIn,
    SetattrIn,
    SetxattrIn,
    StatfsOut,
    WriteIn,
    WriteOut,
)
from tests.support.fs.memory_filesystem import MemoryFileSystem


def write(peer: FusePeer, node: int, handle: int, offset: int, data: bytes, flags: int = 0) -> int:
    answer = peer.ask(Opcode.WRITE, WriteIn(handle, offset, len(data), flags).encode() + data, node)
    assert answer.errno == 0
    return WriteOut.decode_untrusted(answer.body).size


def setattr_body(**fields: int) -> bytes:
    values = dict.fromkeys(SetattrIn.__slots__, 0) | fields
    return SetattrIn(**values).encode()


class TestInit:
    def test_agrees_on_what_both_know(self, filesystem: MemoryFileSystem) -> None:
        session = FuseSession(filesystem)
        told = InitOut.decode_untrusted(FusePeer(session).init().body)
        assert (told.major, told.minor) == (7, 39)
        assert told.flags | told.flags2 << 32 == WANTED
        assert told.max_write == 1 << 20
        assert told.max_pages == 256
        assert told.max_readahead == 4 << 20
        assert (told.max_background, told.congestion_threshold, told.time_granularity) == (64, 48, 1)
        assert session.initialised.is_set()
        assert session.negotiated is not None

    def test_with_linux_6_1_without_the_newer_flags(self, filesystem: MemoryFileSystem) -> None:
        session = FuseSession(filesystem)
        told = InitOut.decode_untrusted(FusePeer(session).init(minor=37, flags2=0x8).body)
        assert told.minor == 37
        assert told.flags2 == 0
        assert session.negotiated is not None
        assert not session.negotiated.flags & InitFlag.DIRECT_IO_ALLOW_MMAP

    def test_with_the_short_init_of_older_kernels(self, filesystem: MemoryFileSystem) -> None:
        told = InitOut.decode_untrusted(FusePeer(FuseSession(filesystem)).init(minor=31).body)
        assert told.minor == 31
        assert told.flags2 == 0
        assert told.max_pages == 256

    def test_flags2_counts_with_init_ext_only(self, filesystem: MemoryFileSystem) -> None:
        flags = 0xFFFF_FFFF & ~InitFlag.INIT_EXT
        told = InitOut.decode_untrusted(FusePeer(FuseSession(filesystem)).init(flags=flags).body)
        assert told.flags2 == 0

    def test_a_newer_major_is_asked_to_come_down(self, filesystem: MemoryFileSystem) -> None:
        peer = FusePeer(FuseSession(filesystem))
        answer = peer.ask(Opcode.INIT, InitIn(8, 0, 0, 0).encode() + bytes(48))
        assert answer.errno == 0
        assert InitOut.decode_untrusted(answer.body).major == 7
        assert not peer.session.initialised.is_set()

    @pytest.mark.expects_log("the kernel speaks FUSE")
    @pytest.mark.parametrize(("major", "minor"), [(6, 45), (7, 27)])
    def test_too_old_is_refused(self, filesystem: MemoryFileSystem, major: int, minor: int) -> None:
        peer = FusePeer(FuseSession(filesystem))
        assert peer.ask(Opcode.INIT, InitIn(major, minor, 0, 0xFFFF_FFFF).encode()).errno == errno.EPROTO

    @pytest.mark.expects_log("malformed request")
    def test_nothing_is_served_before_init_or_after_destroy(self, filesystem: MemoryFileSystem) -> None:
        peer = FusePeer(FuseSession(filesystem))
        assert peer.ask(Opcode.STATFS).errno == errno.EIO
        peer.init()
        assert peer.ask(Opcode.STATFS).errno == 0
        assert peer.ask(Opcode.DESTROY).errno == 0
        assert peer.ask(Opcode.STATFS).errno == errno.EIO


class TestNames:
    def test_lookup_and_forget(self, peer: FusePeer, filesystem: MemoryFileSystem) -> None:
        assert peer.ask(Opcode.LOOKUP, b"x\0").errno == errno.ENOENT
        made, _ = peer.create(b"x")
        found = EntryOut.decode_untrusted(peer.ask(Opcode.LOOKUP, b"x\0").body)
        assert found.nodeid == found.attributes.ino == made.nodeid
        assert filesystem.nodes[made.nodeid].lookups == 2
        assert peer.raw(peer.request(Opcode.FORGET, ForgetIn(1).encode(), made.nodeid)) is None
        assert filesystem.nodes[made.nodeid].lookups == 1
        batch = BatchForgetIn(1).encode() + ForgetOne(made.nodeid, 1).encode()
        assert peer.raw(peer.request(Opcode.BATCH_FORGET, batch)) is None
        assert filesystem.nodes[made.nodeid].lookups == 0

    @pytest.mark.parametrize(
        ("name", "code"),
        [
            (b"", errno.EINVAL),
            (b".", errno.EINVAL),
            (b"..", errno.EINVAL),
            (b"a/b", errno.EINVAL),
            (b"/", errno.EINVAL),
            (b"n" * 256, errno.ENAMETOOLONG),
            (b"n" * 255, 0),
            (b"\xff\xfe\x01", 0),
            (b"...", 0),
        ],
    )
    def test_a_name_is_one_component_of_a_path(self, peer: FusePeer, name: bytes, code: int) -> None:
        end = name + b"\0"
        for opcode, body in (
            (Opcode.LOOKUP, end),
            (Opcode.UNLINK, end),
            (Opcode.RMDIR, end),
            (Opcode.MKDIR, MkdirIn(0o755, 0).encode() + end),
            (Opcode.MKNOD, MknodIn(stat.S_IFREG, 0, 0).encode() + end),
            (Opcode.SYMLINK, end + b"target\0"),
            (Opcode.CREATE, CreateIn(0, stat.S_IFREG, 0, 0).encode() + end),
            (Opcode.LINK, LinkIn(1).encode() + end),
            (Opcode.RENAME, RenameIn(1).encode() + end + b"b\0"),
            (Opcode.RENAME, RenameIn(1).encode() + b"b\0" + end),
            (Opcode.RENAME2, Rename2In(1, 0).encode() + end + b"b\0"),
        ):
            answer = peer.ask(opcode, body)
            if code:
                assert answer.errno == code, opcode
            else:
                assert answer.errno not in (errno.EINVAL, errno.ENAMETOOLONG), opcode

    def test_directories_links_and_renames(self, peer: FusePeer) -> None:
        folder = EntryOut.decode_untrusted(
            peer.ask(Opcode.MKDIR, MkdirIn(0o750, 0o22).encode() + b"d\0").body
        )
        assert stat.S_ISDIR(folder.attributes.mode)
        assert folder.attributes.uid == 1000
        made, _ = peer.create(b"f")
        assert peer.ask(Opcode.LINK, LinkIn(made.nodeid).encode() + b"g\0", folder.nodeid).errno == 0
        assert peer.ask(Opcode.RENAME, RenameIn(folder.nodeid).encode() + b"f\0g\0").errno == 0
        assert peer.ask(Opcode.RENAME2, Rename2In(1, 1).encode() + b"f\0d\0").errno == errno.EEXIST
        assert peer.ask(Opcode.RENAME2, Rename2In(1, 4).encode() + b"f\0h\0").errno == errno.EINVAL
        assert peer.ask(Opcode.RENAME2, Rename2In(folder.nodeid, 0).encode() + b"f\0h\0").errno == 0
        assert peer.ask(Opcode.RMDIR, b"d\0").errno == errno.ENOTEMPTY
        for name in (b"g", b"h"):
            assert peer.ask(Opcode.UNLINK, name + b"\0", folder.nodeid).errno == 0
        assert peer.ask(Opcode.RMDIR, b"d\0").errno == 0

    def test_symbolic_links_and_special_files(self, peer: FusePeer) -> None:
        link = EntryOut.decode_untrusted(peer.ask(Opcode.SYMLINK, b"l\0../any where\xff\0").body)
        assert peer.ask(Opcode.READLINK, node=link.nodeid).body == b"../any where\xff"
        assert peer.ask(Opcode.SYMLINK, b"m\0" + b"t" * 4096 + b"\0").errno == errno.ENAMETOOLONG
        assert peer.ask(Opcode.SYMLINK, b"m\0\0").errno == errno.EINVAL
        pipe = peer.ask(Opcode.MKNOD, MknodIn(stat.S_IFIFO | 0o600, 7, 0).encode() + b"p\0")
        assert stat.S_ISFIFO(EntryOut.decode_untrusted(pipe.body).attributes.mode)

    def test_readdir_takes_what_fits_and_goes_on(self, peer: FusePeer) -> None:
        for index in range(40):
            peer.create(b"file-%02d" % index)
        handle = OpenOut.decode_untrusted(peer.ask(Opcode.OPENDIR, OpenIn(0, 0).encode()).body).handle
        names, cookie = [], 0
        while True:
            answer = peer.ask(Opcode.READDIR, ReadIn(handle, cookie, 200).encode())
            assert answer.errno == 0
            assert len(answer.body) <= 200
            at = 0
            while at < len(answer.body):
                head = DirentHead.decode_untrusted(answer.body, at)
                names.append(answer.body[at + 24 : at + 24 + head.name_bytes])
                cookie, at = head.cookie, at + (24 + head.name_bytes + 7) // 8 * 8
            if not answer.body:
                break
        assert names == [b".", b"..", *(b"file-%02d" % index for index in range(40))]
        assert peer.ask(Opcode.READDIR, ReadIn(handle, 0, 8).encode()).errno == errno.EINVAL
        assert peer.ask(Opcode.FSYNCDIR, FsyncIn(handle, 1).encode()).errno == 0
        assert peer.ask(Opcode.RELEASEDIR, ReleaseIn(handle, 0, 0).encode()).errno == 0


class TestFiles:
    def test_read_answers_in_the_room_and_write_takes_from_the_data(self, peer: FusePeer) -> None:
        made, opened = peer.create(b"f")
        data = os.urandom(300_000)
        assert write(peer, made.nodeid, opened.handle, 5, data) == len(data)
        assert (
            peer.ask(Opcode.READ, ReadIn(opened.handle, 0, 7).encode(), made.nodeid).body
            == bytes(5) + data[:2]
        )
        whole = peer.ask(Opcode.READ, ReadIn(opened.handle, 5, 1 << 20).encode(), made.nodeid)
        assert whole.body == data
        reply = peer.session.answer(
            memoryview(peer.request(Opcode.READ, ReadIn(opened.handle, 5, 4096).encode(), made.nodeid)),
            80,
            memoryview(b""),
            peer.room,
            peer.runner,
        )
        assert reply is not None
        assert isinstance(reply[1], memoryview)
        assert reply[1].obj is peer.room.obj

    def test_a_write_whose_data_lie_elsewhere(self, peer: FusePeer) -> None:
        """As virtio-fs has it: header and arguments in one buffer, data in another."""
        made, opened = peer.create(b"f")
        header = InHeader(80 + 9, Opcode.WRITE, 3, made.nodeid, 0, 0, 0).encode()
        head = memoryview(header + WriteIn(opened.handle, 0, 9, 0).encode())
        assert peer.session.answer(head, 89, memoryview(b"elsewhere"), peer.room, peer.runner) is not None
        assert peer.ask(Opcode.READ, ReadIn(opened.handle, 0, 100).encode(), made.nodeid).body == b"elsewhere"

    def test_the_owner_of_a_write_and_pages_that_have_none(self) -> None:
        owners: list[LockOwner] = []

        class TellsOwners(MemoryFileSystem):
            def write(
                self, ino: int, handle: int, offset: int, data: memoryview, by: LockOwner = NOBODY
            ) -> Outcome[int]:
                owners.append(by)
                return len(data)

        peer = FusePeer(FuseSession(TellsOwners()))
        peer.init()
        for flags in (0, WRITE_LOCKOWNER, WRITE_CACHE):
            body = WriteIn(1, 0, 4, flags, 77).encode() + b"data"
            assert peer.ask(Opcode.WRITE, body).errno == 0
        assert [each.owner for each in owners] == [0, 77, 0]
        assert [each is PAGES for each in owners] == [False, False, True]

    @pytest.mark.parametrize(
        ("offset", "size", "code"),
        [(0, (1 << 20) + 1, errno.EINVAL), (1 << 63, 1, errno.EINVAL), ((1 << 63) - 1, 1, errno.EINVAL)],
    )
    def test_a_read_beyond_all_bounds(self, peer: FusePeer, offset: int, size: int, code: int) -> None:
        made, opened = peer.create(b"f")
        assert peer.ask(Opcode.READ, ReadIn(opened.handle, offset, size).encode(), made.nodeid).errno == code

    @pytest.mark.expects_log("WRITE: malformed request")
    def test_a_write_beyond_all_bounds(self, peer: FusePeer) -> None:
        made, opened = peer.create(b"f")
        beyond = WriteIn(opened.handle, (1 << 63) - 2, 4, 0).encode() + b"data"
        assert peer.ask(Opcode.WRITE, beyond, made.nodeid).errno == errno.EFBIG
        lying = WriteIn(opened.handle, 0, 5, 0).encode() + b"data"
        assert peer.ask(Opcode.WRITE, lying, made.nodeid).errno == errno.EIO

    def test_attributes(self, peer: FusePeer) -> None:
        made, opened = peer.create(b"f")
        body = setattr_body(
            valid=1 | 2 | 4 | 8 | 16 | 32 | 64,
            handle=opened.handle,
            size=1 << 62,
            mode=0o4711,
            uid=5,
            gid=6,
            atime=-7,
            atime_ns=8,
            mtime=9,
            mtime_ns=10,
        )
        told = AttrOut.decode_untrusted(peer.ask(Opcode.SETATTR, body, made.nodeid).body).attributes
        assert (told.size, stat.S_IMODE(told.mode), told.uid, told.gid) == (1 << 62, 0o4711, 5, 6)
        assert (told.atime, told.atime_ns, told.mtime, told.mtime_ns) == (-7, 8, 9, 10)
        again = peer.ask(Opcode.GETATTR, GetattrIn(1, opened.handle).encode(), made.nodeid)
        assert AttrOut.decode_untrusted(again.body).attributes == told
        now = peer.ask(Opcode.SETATTR, setattr_body(valid=16 | 32 | 128 | 256), made.nodeid)
        assert AttrOut.decode_untrusted(now.body).attributes.mtime > 1_600_000_000
        bad = setattr_body(valid=16, atime_ns=1_000_000_000)
        assert peer.ask(Opcode.SETATTR, bad, made.nodeid).errno == errno.EINVAL
        assert (
            peer.ask(Opcode.SETATTR, setattr_body(valid=8, size=1 << 63), made.nodeid).errno == errno.EINVAL
        )

    def test_set_id_bits_go_when_the_kernel_says_so(self, peer: FusePeer) -> None:
        made, opened = peer.create(b"f")

        def mode() -> int:
            answer = peer.ask(Opcode.GETATTR, GetattrIn(0, 0).encode(), made.nodeid)
            return stat.S_IMODE(AttrOut.decode_untrusted(answer.body).attributes.mode)

        def chmod() -> None:
            peer.ask(Opcode.SETATTR, setattr_body(valid=1, mode=0o6775), made.nodeid)
            assert mode() == 0o6775

        chmod()
        write(peer, made.nodeid, opened.handle, 0, b"by root")
        assert mode() == 0o6775
        write(peer, made.nodeid, opened.handle, 0, b"by somebody", flags=4)
        assert mode() == 0o775
        chmod()
        peer.ask(Opcode.SETATTR, setattr_body(valid=2, uid=5), made.nodeid)
        assert mode() == 0o775
        chmod()
        peer.ask(Opcode.OPEN, OpenIn(os.O_TRUNC, 1).encode(), made.nodeid)
        assert mode() == 0o775

    def test_what_else_an_open_file_can_do(self, peer: FusePeer, filesystem: MemoryFileSystem) -> None:
        made, opened = peer.create(b"f")
        write(peer, made.nodeid, opened.handle, 0, b"abcdef")
        for opcode, body in (
            (Opcode.FLUSH, FlushIn(opened.handle).encode()),
            (Opcode.FSYNC, FsyncIn(opened.handle, 0).encode()),
            (Opcode.FALLOCATE, FallocateIn(opened.handle, 1, 2, 3).encode()),
        ):
            assert peer.ask(opcode, body, made.nodeid).errno == 0
        told = peer.ask(Opcode.READ, ReadIn(opened.handle, 0, 10).encode(), made.nodeid).body
        assert told == b"a\0\0def"
        wide = FallocateIn(opened.handle, 1 << 62, 1 << 62, 0).encode()
        assert peer.ask(Opcode.FALLOCATE, wide, made.nodeid).errno == errno.EINVAL
        second = OpenOut.decode_untrusted(
            peer.ask(Opcode.OPEN, OpenIn(os.O_TRUNC, 0).encode(), made.nodeid).body
        )
        for handle in (opened.handle, second.handle):
            assert peer.ask(Opcode.RELEASE, ReleaseIn(handle, 0, 0).encode(), made.nodeid).errno == 0
        assert filesystem.open_handles == 0
        assert peer.ask(Opcode.RELEASE, ReleaseIn(99, 0, 0).encode(), made.nodeid).errno == errno.EBADF

    def test_how_an_opened_file_is_described(self) -> None:
        class Describes(MemoryFileSystem):
            def open(self, caller: Caller, ino: int, flags: int) -> Outcome[Opened]:
                return Opened(77, True, True, True, True)

        peer = FusePeer(FuseSession(Describes()))
        peer.init()
        told = OpenOut.decode_untrusted(peer.ask(Opcode.OPEN, OpenIn(0, 0).encode()).body)
        assert (told.handle, told.flags) == (77, 0b1100011)

    @pytest.mark.parametrize(("flags2", "flags"), [(0xFFFF_FFFF, 0b1), (0, 0)])
    def test_direct_writes_need_a_kernel_that_drops_their_pages(self, flags2: int, flags: int) -> None:
        class Describes(MemoryFileSystem):
            def open(self, caller: Caller, ino: int, flags: int) -> Outcome[Opened]:
                return Opened(77, direct_writes=True)

        peer = FusePeer(FuseSession(Describes()))
        peer.init(flags2=flags2)
        told = OpenOut.decode_untrusted(peer.ask(Opcode.OPEN, OpenIn(0, 0).encode()).body)
        assert (told.handle, told.flags) == (77, flags)

    def test_statfs(self, peer: FusePeer) -> None:
        told = StatfsOut.decode_untrusted(peer.ask(Opcode.STATFS).body)
        assert told.blocks == 8192
        assert told.block_size == told.fragment_size == 65536
        assert told.name_bytes_max == 255

    def test_extended_attributes(self, peer: FusePeer) -> None:
        def put(name: bytes, value: bytes, flags: int = 0) -> int:
            return peer.ask(
                Opcode.SETXATTR, SetxattrIn(len(value), flags).encode() + name + b"\0" + value
            ).errno

        def get(name: bytes, room: int) -> tuple[int, bytes]:
            answer = peer.ask(Opcode.GETXATTR, GetxattrIn(room).encode() + name + b"\0")
            return answer.errno, answer.body

        assert put(b"user.a", b"v\0v") == 0
        assert put(b"user.b", b"") == 0
        assert put(b"user.a", b"", 1) == errno.EEXIST
        assert put(b"user.c", b"", 2) == errno.ENODATA
        assert get(b"user.a", 0) == (0, b"\x03" + bytes(7))
        assert get(b"user.a", 3) == (0, b"v\0v")
        assert get(b"user.a", 2) == (errno.ERANGE, b"")
        assert get(b"user.b", 9) == (0, b"")
        assert get(b"user.x", 9) == (errno.ENODATA, b"")
        assert peer.ask(Opcode.LISTXATTR, GetxattrIn(0).encode()).body == b"\x0e" + bytes(7)
        assert peer.ask(Opcode.LISTXATTR, GetxattrIn(14).encode()).body == b"user.a\0user.b\0"
        assert peer.ask(Opcode.LISTXATTR, GetxattrIn(13).encode()).errno == errno.ERANGE
        assert peer.ask(Opcode.REMOVEXATTR, b"user.a\0").errno == 0
        assert peer.ask(Opcode.REMOVEXATTR, b"user.a\0").errno == errno.ENODATA
        assert put(b"security.capability", b"x") == errno.EOPNOTSUPP
        assert put(b"n" * 256, b"") == errno.ERANGE

    @pytest.mark.parametrize(
        "opcode",
        [
            Opcode.ACCESS,
            Opcode.LSEEK,
            Opcode.INTERRUPT,
            Opcode.COPY_FILE_RANGE,
            Opcode.POLL,
            Opcode.TMPFILE,
            Opcode.STATX,
            Opcode.SETLK,
            Opcode.SYNCFS,
            Opcode.BMAP,
            0,
            7,
            4096,
            0xFFFF_FFFF,
        ],
    )
    def test_what_the_kernel_can_do_without(self, peer: FusePeer, opcode: int) -> None:
        assert peer.ask(opcode, bytes(56)).errno == errno.ENOSYS

    def test_ioctl(self, peer: FusePeer) -> None:
        assert peer.ask(Opcode.IOCTL, bytes(32)).errno == errno.ENOTTY

    @pytest.mark.expects_log("malformed request")
    def test_ioctls_of_a_file_system_that_has_some(self) -> None:
        class Answers(MemoryFileSystem):
            def ioctl(
                self, caller: Caller, ino: int, handle: int, command: int, data: memoryview
            ) -> Outcome[bytes]:
                return repr((caller.uid, caller.pid, ino, handle, command, bytes(data))).encode()

        peer = FusePeer(FuseSession(Answers()))
        peer.init()

        def ioctl(data: bytes, out_size: int = 100, flags: int = 0, in_size: int | None = None) -> Answer:
            asked = IoctlIn(7, flags, 0xC0306703, 0xDEAD, len(data) if in_size is None else in_size, out_size)
            return peer.ask(Opcode.IOCTL, asked.encode() + data, node=3)

        expected = repr((1000, 4242, 3, 7, 0xC0306703, b"data")).encode()
        assert ioctl(b"data") == Answer(0, bytes(16) + expected)
        assert ioctl(b"data", out_size=len(expected)).body == bytes(16) + expected
        assert ioctl(b"data", out_size=len(expected) - 1).errno == errno.EINVAL
        assert ioctl(b"data", flags=1).errno == errno.ENOTTY
        assert ioctl(b"data", in_size=5).errno == errno.EIO
        assert peer.session.complaints.count == 1
        assert peer.ask(Opcode.IOCTL, bytes(31)).errno == errno.EIO
