"""Descriptors of every kind at the socket of a guest's device: it serves on, and the agent can always end."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from agent.bench.virtio_driver.machine import Machine
from agent.fs.fuse.abi import Opcode
from agent.fs.virtiofs.back_end import PROTOCOL_FEATURES
from agent.host_os import foreign_descriptors
from agent.host_os.foreign_descriptors import left_behind
from agent.virtio.vhost_user import (
    FDS_MAX,
    U64,
    InflightArea,
    OneRegion,
    Region,
    RegionTable,
    Request,
    VringFd,
    encode_message,
)
from tests.support.fs.guest_requests import attributes_of
from tests.support.fs.memory_filesystem import MemoryFileSystem
from tests.support.fs.strange_front_end import StrangeFrontEnd, connect_when_heard
from tests.support.fs.virtiofs_served import served, started
from tests.support.halting import halt
from tests.support.pool_up import PoolUp
from tests.support.processes import Processes
from tests.support.waiting import wait_until

MIB = 1 << 20
LINGER = struct.pack("ii", 1, 2)
SCM_MAX_FD = 253
_libc = ctypes.CDLL(None, use_errno=True)
PUNCH_HOLE = 0x02 | 0x01


@pytest.fixture
def path(tmp_path: Path) -> Iterator[Path]:
    with served(tmp_path / "fs.sock", MemoryFileSystem()):
        yield tmp_path / "fs.sock"


@pytest.fixture
def closing() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def strange(tmp_path: Path) -> Iterator[StrangeFrontEnd]:
    with StrangeFrontEnd(tmp_path / "strange") as front_end:
        yield front_end


@pytest.fixture(autouse=True)
def _nobody_left_behind() -> Iterator[None]:
    yield
    wait_until(lambda: not left_behind(), 30, "receivers to end")


def memfd(flags: int = 0, seals: int = 0) -> int:
    descriptor = os.memfd_create("strange", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING | flags)
    os.ftruncate(descriptor, 2 * MIB)
    if seals:
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
    return descriptor


def full_event() -> int:
    event = os.eventfd(0)
    os.eventfd_write(event, 0xFFFF_FFFF_FFFF_FFFE)
    return event


def user_fault() -> int:
    number = {"x86_64": 323, "aarch64": 282}.get(os.uname().machine, -1)
    descriptor: int = _libc.syscall(number, os.O_CLOEXEC | 1)
    return descriptor if descriptor >= 0 else os.eventfd(0)  # where the kernel does not permit it


def lingering_socket(closing: ExitStack) -> int:
    """A TCP socket whose last close waits for a peer that does not read."""
    listener = closing.enter_context(socket.create_server(("127.0.0.1", 0)))
    client = socket.create_connection(listener.getsockname())
    closing.enter_context(listener.accept()[0])
    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, LINGER)
    client.setblocking(False)
    with contextlib.suppress(BlockingIOError):
        while True:
            client.send(bytes(MIB))
    client.setblocking(True)
    return client.detach()


KINDS: dict[str, Callable[[ExitStack, Path], int]] = {
    "pipe": lambda closing, folder: _one_of(os.pipe(), closing),
    "socket": lambda closing, folder: closing.enter_context(socket.socket(socket.AF_UNIX)).detach(),
    "lingering socket": lambda closing, folder: lingering_socket(closing),
    "hugetlb memfd": lambda closing, folder: memfd(os.MFD_HUGETLB, 2),
    "unsealed memfd": lambda closing, folder: memfd(),
    "memfd not for writing": lambda closing, folder: memfd(0, 2 | 8),
    "short memfd": lambda closing, folder: os.memfd_create("short", os.MFD_CLOEXEC),
    "path": lambda closing, folder: os.open(folder, os.O_PATH),
    "folder": lambda closing, folder: os.open(folder, os.O_RDONLY | os.O_DIRECTORY),
    "file": lambda closing, folder: os.open(folder / "file", os.O_RDWR | os.O_CREAT),
    "shared memory": lambda closing, folder: os.open("/dev/shm", os.O_RDWR | os.O_TMPFILE),
    "full event": lambda closing, folder: full_event(),
    "epoll": lambda closing, folder: os.dup(closing.enter_context(select.epoll()).fileno()),
    "proc": lambda closing, folder: os.open("/proc/self/mem", os.O_RDWR),
    "zero": lambda closing, folder: os.open("/dev/zero", os.O_RDWR),
    "user fault": lambda closing, folder: user_fault(),
    "process": lambda closing, folder: os.pidfd_open(os.getpid()),
}


def _one_of(both: tuple[int, int], closing: ExitStack) -> int:
    closing.callback(os.close, both[0])
    return both[1]


def payload_of(request: Request) -> bytes:
    """What the request needs to be taken for what it is."""
    match request:
        case Request.SET_MEM_TABLE:
            return RegionTable((Region(0, 2 * MIB, 0, 0),)).encode()
        case Request.ADD_MEM_REG | Request.REM_MEM_REG:
            return OneRegion(0, 2 * MIB, 0, 0).encode()
        case Request.SET_INFLIGHT_FD:
            return InflightArea(2 * MIB, 0, 1, 16).encode()
        case Request.SET_VRING_KICK | Request.SET_VRING_CALL | Request.SET_VRING_ERR:
            return VringFd(0).encode()
        case Request.SET_LOG_BASE:
            return bytes(16)
        case _:
            return b""


def connected(path: Path) -> socket.socket:
    asking = socket.socket(socket.AF_UNIX)
    asking.settimeout(60)
    connect_when_heard(asking, str(path))
    return asking


def said_with(path: Path, data: bytes, *descriptors: int, first: bytes = b"") -> bytes:
    """What the device answers to a message with descriptors, up to its hanging up or to our doing so."""
    with connected(path) as asking:
        if first:
            asking.sendall(first)
        socket.send_fds(asking, [data], list(descriptors))
        asking.shutdown(socket.SHUT_WR)
        found = b""
        with contextlib.suppress(ConnectionError):
            while piece := asking.recv(4096):
                found += piece
        return found


AGREED = encode_message(Request.SET_PROTOCOL_FEATURES, U64(int(PROTOCOL_FEATURES)).encode())


@pytest.mark.expects_log("front-end")
@pytest.mark.parametrize("kind", KINDS)
def test_no_kind_of_descriptor_harms_the_device_with_whatever_message(
    path: Path, tmp_path: Path, closing: ExitStack, kind: str
) -> None:
    """Alone, too many, and behind other messages; before and after features were agreed on."""
    made = KINDS[kind](closing, tmp_path)
    closing.callback(os.close, made)
    for request in (*FDS_MAX, Request.GET_FEATURES):
        for first, count in ((b"", 1), (AGREED, 1), (AGREED, 9)):
            message = encode_message(request, payload_of(request), need_reply=bool(first))
            said_with(path, message, *[made] * count, first=first)
    said_with(path, b"\1", *[made] * SCM_MAX_FD)
    with started(path) as machine:
        assert attributes_of(machine.client, 1).number == 1


@pytest.mark.expects_log("front-end")
@pytest.mark.parametrize("kind", [kind for kind in KINDS if "memfd" not in kind])
def test_a_running_device_ends_its_front_end_alone(
    path: Path, tmp_path: Path, closing: ExitStack, kind: str
) -> None:
    made = KINDS[kind](closing, tmp_path)
    closing.callback(os.close, made)
    with started(path) as machine:
        connection = machine.connection
        assert connection is not None
        connection.send(encode_message(Request.SET_VRING_ERR, VringFd(1).encode()), (made,))
        machine.lose()
    with started(path) as machine:
        assert attributes_of(machine.client, 1).number == 1


class TestFilesOfStrangers:
    """Those of a FUSE mount that the stranger serves himself."""

    @pytest.mark.expects_log("neither shared memory nor an eventfd")
    def test_a_close_that_fails(self, path: Path, strange: StrangeFrontEnd) -> None:
        strange.refuse(Opcode.FLUSH, Opcode.GETATTR)
        for request in FDS_MAX:
            strange.send(path, encode_message(request, payload_of(request)))
        with started(path) as machine:
            assert attributes_of(machine.client, 1).number == 1

    @pytest.mark.expects_log("neither shared memory nor an eventfd", "8 processes hang")
    def test_a_close_that_never_returns(self, path: Path, strange: StrangeFrontEnd) -> None:
        """The device serves others meanwhile; after eight of them it takes nothing until one comes back."""
        strange.hold(Opcode.FLUSH, Opcode.GETATTR)
        for number in range(foreign_descriptors.LEFT_BEHIND_MAX):
            strange.send(path, encode_message(Request.SET_VRING_ERR, VringFd(0).encode()))
            wait_until(lambda number=number: left_behind() > number, 30, "it to be left")
            if not number:
                with started(path) as machine:
                    assert attributes_of(machine.client, 1).number == 1
        with connected(path) as refused:
            assert refused.recv(1) == b""
        strange.let_go()
        wait_until(lambda: not left_behind(), 30, "receivers to end")
        with started(path) as machine:
            assert attributes_of(machine.client, 1).number == 1

    @pytest.mark.expects_log("second front-end was turned away")
    def test_one_who_is_turned_away_with_what_he_has_sent(self, path: Path, strange: StrangeFrontEnd) -> None:
        """Nobody reads what waits in his socket, and it goes with it."""
        strange.hold(Opcode.FLUSH, Opcode.GETATTR)
        with started(path) as machine:
            for _ in range(2 * foreign_descriptors.CLOSERS_MAX):
                strange.send(path, b"x", wait=False)
            assert attributes_of(machine.client, 1).number == 1

    @pytest.mark.expects_log("second front-end was turned away")
    def test_one_who_is_turned_away_with_sockets_that_linger(self, path: Path, closing: ExitStack) -> None:
        with started(path) as machine:
            for _ in range(2 * foreign_descriptors.CLOSERS_MAX):
                lingering = lingering_socket(closing)
                asking = closing.enter_context(socket.socket(socket.AF_UNIX))
                asking.setblocking(False)
                # Once as many close as may, and wait as may, nobody more is heard: EAGAIN.
                with contextlib.suppress(ConnectionError, BlockingIOError):
                    asking.connect(str(path))
                    socket.send_fds(asking, [b"x"], [lingering])
                threading.Thread(target=os.close, args=(lingering,)).start()
            assert attributes_of(machine.client, 1).number == 1

    @pytest.mark.expects_log("8 processes hang")
    def test_where_receivers_hang_newcomers_take_no_more_threads_than_may_close(
        self, path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        most, closers = foreign_descriptors.LEFT_BEHIND_MAX, foreign_descriptors._closers
        with monkeypatch.context() as hung, ExitStack() as busy:
            hung.setattr(foreign_descriptors, "left_behind", lambda: most)
            for _ in range(foreign_descriptors.CLOSERS_MAX):
                assert closers.acquire(blocking=False)
                busy.callback(closers.release)
            with connected(path) as newcomer:
                newcomer.settimeout(0.3)
                with pytest.raises(TimeoutError):
                    newcomer.recv(1)
                assert all(each.name != "close-aside" for each in threading.enumerate())
                busy.close()
                newcomer.settimeout(30)
                assert newcomer.recv(1) == b""
        with started(path) as machine:
            assert attributes_of(machine.client, 1).number == 1

    @pytest.mark.expects_log("hangs", "neither shared memory")
    def test_a_front_end_whose_receiver_hangs_has_the_device_no_longer_than_it_is_there(
        self, path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("agent.fs.virtiofs.door.LAST_WORDS_SECONDS", 0.2)
        with started(path) as machine:
            assert machine.connection is not None
            (receiver,) = _children()
            halt(receiver)
            machine.lose()
            with started(path) as other:
                assert attributes_of(other.client, 1).number == 1


def _children() -> list[int]:
    found = []
    for task in os.listdir("/proc/self/task"):
        found += [int(each) for each in Path(f"/proc/self/task/{task}/children").read_text().split()]
    return [each for each in found if b"descriptor_receiver" in Path(f"/proc/{each}/cmdline").read_bytes()]


@pytest.mark.expects_log("front-end", "malformed request")
def test_holes_that_are_punched_while_the_device_serves(path: Path) -> None:
    """Ordinary pages come back as zeros: the front-end has broken its own rings, and nothing else."""
    over = threading.Event()

    def punch(machine: Machine) -> None:
        while not over.is_set():
            for region in machine.memory.regions:
                whole = ctypes.c_long(region.size)
                assert _libc.fallocate(region.descriptor, PUNCH_HOLE, ctypes.c_long(0), whole) == 0

    for turn in range(5):
        with started(path) as machine:
            over.clear()
            puncher = threading.Thread(target=punch, args=(machine,))
            puncher.start()
            try:
                for _ in range(20):
                    for queue in machine.queues:
                        machine.client._desks.clear()
                        with contextlib.suppress(Exception):
                            machine.client.start(Opcode.GETATTR, 1, bytes(16), 104, queue)
                            queue.kick_now()
            finally:
                over.set()
                puncher.join()
            machine.client._desks.clear()
            machine.lose()
        with started(path) as machine:
            assert attributes_of(machine.client, 1).number == 1, turn


def test_an_agent_ends_in_time_whatever_it_was_handed(
    processes: Processes, tmp_path: Path, strange: StrangeFrontEnd
) -> None:
    """And serves its guest until then."""
    pool = PoolUp(processes, tmp_path / "state", "--virtiofs", "--drives", "1", "--drive-size", "256M")
    device = pool.state / "virtiofs.sock"
    agent = pool.pid("agent-process")
    strange.hold(Opcode.FLUSH, Opcode.GETATTR)
    for request in (Request.SET_VRING_KICK, Request.SET_MEM_TABLE, Request.SET_INFLIGHT_FD):
        strange.send(device, encode_message(request, payload_of(request)))
    with started(device, queues=1) as machine:
        assert attributes_of(machine.client, 1).number == 1
    began = time.monotonic()
    assert pool.down() == 0, pool.process.output
    assert not os.path.exists(f"/proc/{agent}"), "it has ended, and nobody waits for it"
    assert time.monotonic() - began < 60
