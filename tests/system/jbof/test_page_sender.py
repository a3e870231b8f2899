"""Payload out of a drive's memory by reference: what arrives, whatever the sizes, socket and kernel."""

from __future__ import annotations

import fcntl
import os
import random
import select
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from emulator.jbof.drive import Drive
from emulator.jbof.medium import MemoryMedium
from nvmeof.tcp.crc32c import Buffer, crc32c
from nvmeof.tcp.pdu import CapsuleCmd
from nvmeof.transport import page_sender
from nvmeof.transport.drive_memory import DriveMemory, is_drive_memory
from nvmeof.transport.page_sender import LEAST_BYTES, PIPE_BYTES, PageSender, pays_here
from nvmeof.wire.sqe import IoOpcode, Sqe
from tests.support.nvme.entries import transport
from tests.support.nvme.pdus import encode_pdu
from tests.support.nvme.socket_host import exactly, io_queue

SIZE = 8 << 20
PAGE = 4096
CONTENT = random.Random(35).randbytes(SIZE)


@pytest.fixture(autouse=True)
def _no_spare_pipes() -> Iterator[None]:
    yield
    while page_sender._spare_pipes:
        for end in page_sender._spare_pipes.pop():
            os.close(end)


@pytest.fixture(scope="module")
def drive() -> Iterator[MemoryMedium]:
    medium = MemoryMedium(SIZE, prefault=True)
    medium.write(0, CONTENT)
    yield medium
    medium.close()


def tcp_pair(room: int | None = None) -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        if room is not None:
            server.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, room)
        here = socket.socket()
        if room is not None:
            here.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, room)
        here.connect(server.getsockname())
        return here, server.accept()[0]


class Link:
    """A sender, and a thread that receives what it sends."""

    def __init__(self, *, by_reference: bool = True, room: int | None = None) -> None:
        self.here, self.there = tcp_pair(room)
        self.sender = PageSender(self.here, by_reference=by_reference)
        self.arrived = bytearray()
        self._thread = threading.Thread(target=self._receive)

    def __enter__(self) -> Link:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.finish()
        self.there.close()

    def _receive(self) -> None:
        while piece := self.there.recv(1 << 20):
            self.arrived += piece

    def finish(self) -> None:
        self.sender.close()
        self.here.close()
        self._thread.join(30)
        assert not self._thread.is_alive()

    def send_all(self, parts: Sequence[Buffer]) -> int:
        """As a connection's thread does, which polls where nothing goes; how often that was."""
        full, rest = 0, list(parts)
        while rest:
            try:
                count = self.sender.send(rest)
            except BlockingIOError:
                full += 1
                assert select.select([], [self.here], [], 10)[1]
                continue
            assert count > 0
            while rest and count >= len(rest[0]):
                count -= len(rest.pop(0))
            if count:
                rest[0] = memoryview(rest[0])[count:]
        return full


LENGTHS = st.one_of(
    st.integers(1, 100),
    st.sampled_from(
        [
            LEAST_BYTES - 1,
            LEAST_BYTES,
            LEAST_BYTES + 1,
            PIPE_BYTES,
            PIPE_BYTES + 1,
            PIPE_BYTES + PAGE,
            3 * PIPE_BYTES,
        ]
    ),
    st.integers(LEAST_BYTES, 3 << 20),
)
PARTS = st.lists(st.tuples(st.booleans(), st.integers(0, 4 << 20), LENGTHS), min_size=1, max_size=6)


@given(PARTS, st.sampled_from([None, 64 << 10]), st.booleans())
def test_what_arrives_is_what_was_given(
    drive: MemoryMedium, parts: list[tuple[bool, int, int]], room: int | None, by_reference: bool
) -> None:
    given_parts: list[Buffer] = [
        drive.window(offset, length) if of_drive else CONTENT[offset : offset + length]
        for of_drive, offset, length in parts
    ]
    with Link(by_reference=by_reference, room=room) as link:
        link.send_all(given_parts)
        link.finish()
        assert link.arrived == b"".join(CONTENT[offset : offset + length] for _, offset, length in parts)


def test_only_pages_of_a_drive_go_by_reference(drive: MemoryMedium) -> None:
    """Shown by what must never be done to either: changed while nobody has received it yet."""
    here, there = tcp_pair()
    own = MemoryMedium(1 << 20, prefault=True)
    own.write(0, CONTENT[: 1 << 20])
    scratch = bytearray(CONTENT[: 1 << 20])
    with closing(here), closing(there):
        sender = PageSender(here, by_reference=True)
        for part in (memoryview(scratch), own.window(0, 1 << 20)):
            there.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4 << 20)
            sent = sender.send([part])
            assert sent >= 2 * PAGE
            part[:PAGE] = bytes(PAGE)
            got = there.recv(sent, socket.MSG_WAITALL)
            was_copied = got == CONTENT[:sent]
            assert was_copied is (part.obj is scratch)
            assert got[PAGE:] == CONTENT[PAGE:sent]
            sender.close()  # what was not sent is not wanted any more


def test_memory_that_is_given_back_leaves_as_it_was() -> None:
    medium = MemoryMedium(2 << 20, prefault=True)
    medium.write(0, CONTENT[: 2 << 20])
    here, there = tcp_pair()
    with closing(here), closing(there):
        sender = PageSender(here, by_reference=True)
        sent = sender.send([medium.window(0, LEAST_BYTES)])
        medium.punch(0, 2 << 20)
        sender.close()
        medium.close()
        assert there.recv(sent, socket.MSG_WAITALL) == CONTENT[:sent]


def sent_now(sender: PageSender, rest: memoryview) -> int:
    try:
        return sender.send([rest])
    except BlockingIOError:
        return 0


def test_a_host_that_does_not_read_holds_nobody_up(drive: MemoryMedium) -> None:
    here, there = tcp_pair(64 << 10)
    with closing(here), closing(there):
        sender = PageSender(here, by_reference=True)
        rest = drive.window(0, 4 << 20)
        began = time.monotonic()
        while (count := sent_now(sender, rest)) > 0:
            rest = rest[count:]
        assert rest
        assert time.monotonic() - began < 5
        # It goes on where it stopped.
        received = bytearray()
        while len(received) < 4 << 20:
            received += there.recv(1 << 20)
            while rest and (count := sent_now(sender, rest)) > 0:
                rest = rest[count:]
        assert received == CONTENT[: 4 << 20]
        sender.close()


@pytest.mark.parametrize("missing", ["vmsplice", "splice", "pipe", "larger pipe"])
def test_where_the_kernel_does_not_offer_it_payload_is_copied(
    drive: MemoryMedium, monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    def refuse(*_: object, **__: object) -> int:
        raise PermissionError(1, "not allowed")

    if missing == "splice":
        monkeypatch.setattr(os, "splice", refuse)
    elif missing == "pipe":
        monkeypatch.setattr(os, "pipe", refuse)
    elif missing == "larger pipe":
        monkeypatch.setattr(fcntl, "fcntl", refuse)
    else:  # into what is no pipe
        monkeypatch.setattr(
            os, "pipe", lambda: (os.open(os.devnull, os.O_RDONLY), os.open(os.devnull, os.O_WRONLY))
        )
        monkeypatch.setattr(fcntl, "fcntl", lambda *_: 0)
    with Link() as link:
        for _ in range(2):
            link.send_all([b"header", drive.window(0, 1 << 20), b"trailer"])
        link.finish()
        assert link.arrived == 2 * (b"header" + CONTENT[: 1 << 20] + b"trailer")


def test_a_dead_socket_is_an_error(drive: MemoryMedium) -> None:
    here, there = tcp_pair()
    there.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    there.close()
    sender = PageSender(here, by_reference=True)
    with closing(here), pytest.raises(ConnectionError):
        sender.send([drive.window(0, 1 << 20)])
    sender.close()


def test_views_of_a_drive_are_known_however_they_were_cut(drive: MemoryMedium) -> None:
    window = drive.window(PAGE, 2 * PAGE)
    assert is_drive_memory(window)
    assert is_drive_memory(memoryview(window)[10:].cast("B")[3:])
    assert not is_drive_memory(memoryview(bytearray(window)))
    assert not is_drive_memory(bytes(window))
    memory = DriveMemory(PAGE)
    assert memory[:] == bytes(PAGE)
    memory.close()


def test_pipes_are_shared_and_none_is_kept_with_something_in_it() -> None:
    def descriptors() -> int:
        return len(os.listdir("/proc/self/fd"))

    before = descriptors()
    medium = MemoryMedium(2 << 20, prefault=True)
    with Link() as link, Link() as other:
        for each in (link, other, link):
            each.send_all([medium.window(0, 1 << 20)])
        assert descriptors() == before + 4 + 2
    assert descriptors() == before + 2
    here, there = tcp_pair(64 << 10)
    with closing(here), closing(there):
        sender = PageSender(here, by_reference=True)
        assert 0 < sent_now(sender, medium.window(0, 1 << 20)) < 1 << 20
        assert descriptors() == before + 4
        sender.close()
    assert descriptors() == before
    medium.close()


def test_a_send_does_not_wait(drive: MemoryMedium) -> None:
    """Nor does it leave the socket in a mode in which receiving would not."""
    here, there = tcp_pair(64 << 10)
    with closing(here), closing(there):
        sender = PageSender(here, by_reference=True)
        rest = drive.window(0, 4 << 20)
        while (count := sent_now(sender, rest)) > 0:
            assert os.get_blocking(here.fileno())
            rest = rest[count:]
        assert rest
        assert os.get_blocking(here.fileno())
        sender.close()


@pytest.mark.parametrize(
    ("text", "pays"),
    [("always madvise [never]", False), ("[always] madvise never", True), ("always [madvise] never", True)],
)
def test_it_is_left_where_there_are_no_large_pages(tmp_path: Path, text: str, pays: bool) -> None:
    said = tmp_path / "enabled"
    assert not pays_here(said), "a kernel without them"
    said.write_text(text + "\n")
    assert pays_here(said) is pays


@pytest.mark.parametrize("blocks", [1, LEAST_BYTES // PAGE, 256, 257])
@pytest.mark.parametrize("digest", [False, True])
def test_an_enclosure_answers_long_reads_so(
    drive: MemoryMedium, monkeypatch: pytest.MonkeyPatch, blocks: int, digest: bool
) -> None:
    moved = []
    splice = os.splice

    def counting(*arguments: Any, **more: Any) -> int:
        moved.append(splice(*arguments, **more))
        return moved[-1]

    monkeypatch.setattr(os, "splice", counting)
    length = blocks * PAGE
    with io_queue(Drive(1, drive, nguid=bytes(15) + b"1"), data_digest=digest) as sock:
        for slba in (0, 5):
            sqe = Sqe(IoOpcode.READ, 7, 1, transport(length), slba, 0, blocks - 1)
            sock.sendall(b"".join(encode_pdu(CapsuleCmd(sqe, 0))))
            assert exactly(sock, 24)[0] == 7
            got = exactly(sock, length)
            assert got == CONTENT[slba * PAGE :][:length]
            if digest:
                assert int.from_bytes(exactly(sock, 4), "little") == crc32c(got)
    by_reference = pays_here() and length >= LEAST_BYTES and not digest
    assert sum(moved) == (2 * min(length, PIPE_BYTES) if by_reference else 0)
