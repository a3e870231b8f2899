"""What FuseSession makes of operations that fail and of requests that no kernel would send.

Whatever comes: each request is answered with a well-formed reply (FusePeer.raw checks it) or ignored, and
nothing is raised.
"""

from __future__ import annotations

import errno
import logging
import os
import random
import stat
import threading
import time
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.fs.fuse.abi import Opcode
from agent.fs.fuse.session import NO_ANSWER, FuseSession, errno_for_kernel
from agent.fs.interface import NOBODY, Attributes, Caller, DirectoryEntry, Entry, FsError, LockOwner
from agent.host_os.rate_limited_log import Complaints
from agent.pool.steps import Acquire, Outcome, Steps
from tests.support.fs import fuse_records
from tests.support.fs.fuse_peer import FusePeer
from tests.support.fs.fuse_records import InHeader
from tests.support.fs.memory_filesystem import FaultyFileSystem, MemoryFileSystem
from tests.support.pool.inline_runner import InlineRunner


class TestFaults:
    @pytest.mark.expects_log("answered EIO")
    @pytest.mark.parametrize("fault", [ValueError("bug"), MemoryError(), SystemExit(1), RecursionError()])
    def test_whatever_an_operation_raises_is_eio(
        self, filesystem: MemoryFileSystem, fault: BaseException
    ) -> None:
        faulty = FaultyFileSystem(filesystem)
        peer = FusePeer(FuseSession(faulty))  # type: ignore[arg-type]
        peer.init()
        made, opened = peer.create(b"f")
        for name in ("getattr", "statfs", "read", "write", "forget", "create"):
            faulty.faults[name] = lambda: fault
        assert peer.ask(Opcode.GETATTR, fuse_records.GetattrIn(0, 0).encode()).errno == errno.EIO
        assert peer.ask(Opcode.STATFS).errno == errno.EIO
        assert (
            peer.ask(Opcode.READ, fuse_records.ReadIn(opened.handle, 0, 9).encode(), made.nodeid).errno
            == errno.EIO
        )
        data = fuse_records.WriteIn(opened.handle, 0, 1, 0).encode() + b"x"
        assert peer.ask(Opcode.WRITE, data, made.nodeid).errno == errno.EIO
        assert peer.raw(peer.request(Opcode.FORGET, fuse_records.ForgetIn(1).encode(), made.nodeid)) is None
        assert faulty.raised == 5
        faulty.faults.clear()
        assert peer.ask(Opcode.STATFS).errno == 0

    @pytest.mark.parametrize("code", [0, -5, 512, 100_000, 133])
    def test_an_errno_that_the_kernel_would_not_take(self, filesystem: MemoryFileSystem, code: int) -> None:
        faulty = FaultyFileSystem(filesystem)
        faulty.faults["statfs"] = lambda: FsError(code)
        peer = FusePeer(FuseSession(faulty))  # type: ignore[arg-type]
        peer.init()
        assert peer.ask(Opcode.STATFS).errno == errno_for_kernel(code) == (133 if code == 133 else errno.EIO)

    @pytest.mark.expects_log("answered EIO")
    @pytest.mark.parametrize("answer", [-1, 10, 1 << 70, None, "many"])
    def test_a_count_that_cannot_be(self, answer: Any) -> None:
        class Counts(MemoryFileSystem):
            def read(self, ino: int, handle: int, offset: int, into: memoryview) -> Outcome[int]:
                value: int = answer
                return value

            def write(
                self, ino: int, handle: int, offset: int, data: memoryview, by: LockOwner = NOBODY
            ) -> Outcome[int]:
                value: int = answer
                return value

        peer = FusePeer(FuseSession(Counts()))
        peer.init()
        assert peer.ask(Opcode.READ, fuse_records.ReadIn(1, 0, 9).encode()).errno == errno.EIO
        assert peer.ask(Opcode.WRITE, fuse_records.WriteIn(1, 0, 9, 0).encode() + bytes(9)).errno == errno.EIO

    @pytest.mark.expects_log("answered EIO")
    def test_values_that_do_not_fit_their_fields(self) -> None:
        class Boundless(MemoryFileSystem):
            def lookup(self, caller: Caller, parent: int, name: bytes) -> Outcome[Entry]:
                return Entry(Attributes(ino=1 << 64, mode=0))

            def getattr(self, caller: Caller, ino: int, handle: int | None) -> Outcome[Attributes]:
                return Attributes(ino=1, mode=-1)

            def readdir(self, ino: int, handle: int, cookie: int) -> Outcome[Iterable[DirectoryEntry]]:
                return [DirectoryEntry(b"a", -1, 0, 1)]

        peer = FusePeer(FuseSession(Boundless()))
        peer.init()
        assert peer.ask(Opcode.LOOKUP, b"a\0").errno == errno.EIO
        assert peer.ask(Opcode.GETATTR, fuse_records.GetattrIn(0, 0).encode()).errno == errno.EIO
        assert peer.ask(Opcode.READDIR, fuse_records.ReadIn(0, 0, 4096).encode()).errno == errno.EIO

    def test_steps_are_run_to_their_end(self) -> None:
        class Stepping(MemoryFileSystem):
            def read(self, ino: int, handle: int, offset: int, into: memoryview) -> Outcome[int]:
                return self._steps(into)

            def _steps(self, into: memoryview) -> Steps[int]:
                lock = threading.Lock()
                assert (yield Acquire(lock, time.monotonic() + 5)) is True
                into[:4] = b"done"
                return 4

        peer = FusePeer(FuseSession(Stepping()))
        peer.init()
        assert peer.ask(Opcode.READ, fuse_records.ReadIn(1, 0, 100).encode()).body == b"done"

    def test_a_listing_looks_each_name_up_once(self) -> None:
        """The kernel forgets each once, too. Compiled, a listing in the bound of a slice was made twice."""
        looked_up = []

        class Lists(MemoryFileSystem):
            def lookup(self, caller: Caller, parent: int, name: bytes) -> Outcome[Entry]:
                looked_up.append(name)
                return Entry(Attributes(ino=2, mode=stat.S_IFREG))

            def readdir(self, ino: int, handle: int, cookie: int) -> Outcome[Iterable[DirectoryEntry]]:
                return [DirectoryEntry(name, 2, stat.S_IFREG, at + 1) for at, name in enumerate((b"a", b"b"))]

        peer = FusePeer(FuseSession(Lists()))
        peer.init()
        assert peer.ask(Opcode.READDIRPLUS, fuse_records.ReadIn(0, 0, 4096).encode()).errno == 0
        assert looked_up == [b"a", b"b"]

    def test_a_lost_reply_gives_back_what_it_carried(
        self, peer: FusePeer, filesystem: MemoryFileSystem
    ) -> None:
        body = fuse_records.CreateIn(os.O_RDWR, stat.S_IFREG, 0, 0).encode() + b"f\0"
        request = memoryview(peer.request(Opcode.CREATE, body))
        reply = peer.session.answer(request, len(request), memoryview(b""), peer.room, peer.runner)
        assert reply is not None
        assert filesystem.open_handles == 1
        peer.session.reply_was_lost(request, reply, InlineRunner())
        assert filesystem.open_handles == 0
        assert all(node.lookups == 0 for node in filesystem.nodes.values())


class TestComplaints:
    def test_one_line_in_an_interval(self, caplog: pytest.LogCaptureFixture) -> None:
        now = 0.0
        log = logging.getLogger("test.complaints")
        log.propagate = False
        log.addHandler(caplog.handler)
        try:
            complaints = Complaints(log, 10.0, lambda: now)
            for _ in range(1000):
                complaints.bug("READ", ValueError("x"))
            complaints.peer("LOOKUP", "no NUL")
            assert len(caplog.records) == 2
            assert complaints.count == 1001
            now = 11.0
            complaints.bug("READ", ValueError("x"))
            assert "999 more" in caplog.records[-1].getMessage()
        finally:
            log.removeHandler(caplog.handler)


NAME = b"some name\0"
WELL_FORMED: dict[Opcode, bytes] = {
    Opcode.LOOKUP: NAME,
    Opcode.FORGET: fuse_records.ForgetIn(1).encode(),
    Opcode.GETATTR: fuse_records.GetattrIn(0, 0).encode(),
    Opcode.SETATTR: fuse_records.SetattrIn(1, 0, 0, 0, 0, 0, 0, 0, 0, 0o755, 0, 0).encode(),
    Opcode.SYMLINK: NAME + NAME,
    Opcode.MKNOD: fuse_records.MknodIn(stat.S_IFIFO, 0, 0).encode() + NAME,
    Opcode.MKDIR: fuse_records.MkdirIn(0o755, 0).encode() + NAME,
    Opcode.UNLINK: NAME,
    Opcode.RMDIR: NAME,
    Opcode.RENAME: fuse_records.RenameIn(1).encode() + NAME + NAME,
    Opcode.RENAME2: fuse_records.Rename2In(1, 0).encode() + NAME + NAME,
    Opcode.LINK: fuse_records.LinkIn(1).encode() + NAME,
    Opcode.OPEN: fuse_records.OpenIn(0, 0).encode(),
    Opcode.READ: fuse_records.ReadIn(1, 0, 4096).encode(),
    Opcode.WRITE: fuse_records.WriteIn(1, 0, 10, 0).encode() + bytes(10),
    Opcode.RELEASE: fuse_records.ReleaseIn(1, 0, 0).encode(),
    Opcode.FSYNC: fuse_records.FsyncIn(1, 0).encode(),
    Opcode.SETXATTR: fuse_records.SetxattrIn(4, 0).encode() + b"user.x\0abcd",
    Opcode.GETXATTR: fuse_records.GetxattrIn(0).encode() + b"user.x\0",
    Opcode.LISTXATTR: fuse_records.GetxattrIn(0).encode(),
    Opcode.REMOVEXATTR: b"user.x\0",
    Opcode.FLUSH: fuse_records.FlushIn(1).encode(),
    Opcode.OPENDIR: fuse_records.OpenIn(0, 0).encode(),
    Opcode.READDIR: fuse_records.ReadIn(1, 0, 4096).encode(),
    Opcode.RELEASEDIR: fuse_records.ReleaseIn(1, 0, 0).encode(),
    Opcode.FSYNCDIR: fuse_records.FsyncIn(1, 0).encode(),
    Opcode.CREATE: fuse_records.CreateIn(0, stat.S_IFREG, 0, 0).encode() + NAME,
    Opcode.BATCH_FORGET: fuse_records.BatchForgetIn(1).encode() + fuse_records.ForgetOne(5, 1).encode(),
    Opcode.FALLOCATE: fuse_records.FallocateIn(1, 0, 1, 0).encode(),
}


class TestMalformed:
    @pytest.mark.expects_log("malformed request|a request")
    @pytest.mark.parametrize("opcode", WELL_FORMED, ids=lambda opcode: opcode.name)
    def test_truncated_at_every_byte(self, peer: FusePeer, opcode: Opcode) -> None:
        whole = peer.request(opcode, WELL_FORMED[opcode])
        for length in range(len(whole)):
            # Once with a header that tells the truth about the shorter message, once with one that lies.
            told = whole[:length] if length < 4 else length.to_bytes(4, "little") + whole[4:length]
            for message in (told, whole[:length]):
                answer = peer.raw(message)
                if length < 40 or opcode in NO_ANSWER:
                    assert answer is None
                else:
                    assert answer is not None
                    assert answer.errno == errno.EIO

    @pytest.mark.expects_log("malformed request")
    @pytest.mark.parametrize("words", [1, 2, 500, 0xFFFF])
    def test_extensions_longer_than_the_message(self, peer: FusePeer, words: int) -> None:
        header = InHeader(40 + 10, Opcode.LOOKUP, 9, 1, 0, 0, 0, words).encode()
        answer = peer.raw(header + NAME)
        assert answer is not None
        assert answer.errno == errno.EIO

    def test_extensions_are_no_part_of_the_arguments(self, peer: FusePeer) -> None:
        header = InHeader(40 + 10 + 16, Opcode.LOOKUP, 9, 1, 0, 0, 0, 2).encode()
        answer = peer.raw(header + NAME + b"\xff" * 16)
        assert answer is not None
        assert answer.errno == errno.ENOENT

    @pytest.mark.expects_log(".*")
    @given(
        opcode=st.one_of(st.sampled_from(sorted(Opcode)), st.integers(0, 60), st.integers(0, 2**32 - 1)),
        node=st.one_of(st.integers(0, 5), st.integers(0, 2**64 - 1)),
        words=st.one_of(st.just(0), st.integers(0, 2**16 - 1)),
        body=st.binary(max_size=200),
        lie=st.one_of(st.just(0), st.integers(-50, 5000)),
    )
    def test_any_bytes(self, opcode: int, node: int, words: int, body: bytes, lie: int) -> None:
        peer = FusePeer(FuseSession(MemoryFileSystem(capacity=4 << 20)), room_bytes=8192)
        peer.init()
        peer.create(b"f")
        length = max(0, 40 + len(body) + lie)
        peer.raw(InHeader(length, opcode, 77, node, 1, 2, 3, words).encode() + body)
        assert peer.ask(Opcode.STATFS).errno == 0 or opcode == Opcode.DESTROY

    @pytest.mark.expects_log(".*")
    def test_well_formed_but_for_a_few_bytes(self, seed: int) -> None:
        """Well-formed requests with a few bytes changed: more of them get past the lengths."""
        dice = random.Random(seed)
        peer = FusePeer(FuseSession(MemoryFileSystem(capacity=4 << 20)), room_bytes=1 << 16)
        peer.init()
        answered = refused = 0
        for _ in range(20_000):
            opcode = dice.choice(list(WELL_FORMED))
            body = bytearray(WELL_FORMED[opcode])
            for _ in range(dice.randrange(4)):
                body[dice.randrange(len(body))] = dice.choice(
                    (0, 1, 2, 0x7F, 0x80, 0xFF, dice.randrange(256))
                )
            answer = peer.raw(peer.request(opcode, bytes(body), dice.choice((1, 2, 3, 4, 5, 2**64 - 1))))
            answered += answer is not None
            refused += answer is not None and answer.errno != 0
        assert 0 < refused < answered
        assert peer.ask(Opcode.STATFS).errno == 0
