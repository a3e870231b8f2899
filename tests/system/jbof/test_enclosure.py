"""An enclosure as a process, with real sockets: serving, failing on request, dying and coming back."""

from __future__ import annotations

import itertools
import json
import os
import random
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import trio

from emulator.jbof.control_client import ControlError, ask
from emulator.jbof.enclosure import EnclosureError
from nvmeof.host import commands
from nvmeof.host.command import Command
from nvmeof.tcp.pdu import CapsuleCmd, ICReq
from nvmeof.transport.tcp import (
    NO_DIGESTS,
    Controller,
    Digests,
    connect_io_queue,
    open_controller,
)
from nvmeof.transport.tcp_queue import TcpHostQueue
from nvmeof.wire.cqe import decode_cqe_untrusted
from nvmeof.wire.fabrics import Connect, ConnectData
from nvmeof.wire.sqe import IoOpcode, Sqe
from nvmeof.wire.status import Status
from tests.support.needs import needs_admin
from tests.support.nvme import more_commands
from tests.support.nvme.enclosure_process import EnclosureProcess
from tests.support.nvme.entries import fabrics_entry, transport
from tests.support.nvme.pdus import encode_header, encode_pdu
from tests.support.nvme.transport_ways import discover
from tests.support.processes import Processes
from tests.support.waiting import wait_until

HOST = "nqn.2026-01.io.g35:tester"
HOST_ID = b"tester-host-id-0"
MIB = 1 << 20
BOTH = Digests(header=True, data=True)

Use = Callable[[TcpHostQueue, Controller], Any]


def with_queue(
    ready: dict[str, Any], use: Use, *, digests: Digests = NO_DIGESTS, keep_alive_s: float = 300.0
) -> Any:
    """Run `use` with a connected I/O queue. It blocks trio while it does, which a test may: no keep-alive is
    sent meanwhile."""

    async def session() -> Any:
        async with open_controller(
            ready["address"],
            ready["port"],
            ready["nqn"],
            HOST,
            HOST_ID,
            digests=digests,
            keep_alive_s=keep_alive_s,
        ) as controller:
            queue = connect_io_queue(controller.info, 1, 31)
            try:
                return use(queue, controller)
            finally:
                queue.close()

    return trio.run(session)


def run(queue: TcpHostQueue, command: Command, seconds: float = 20.0) -> Command:
    queue.submit(command)
    assert queue.wait(command, time.monotonic() + seconds), command
    return command


def read(queue: TcpHostQueue, slba: int, size: int, nsid: int = 1) -> bytes:
    into = bytearray(size)
    run(queue, commands.read(nsid, slba, size // 4096, memoryview(into))).check()
    return bytes(into)


def write(queue: TcpHostQueue, slba: int, data: bytes, nsid: int = 1) -> Command:
    return run(queue, commands.write(nsid, slba, len(data) // 4096, [data]))


@contextmanager
def enclosure(folder: Path, *arguments: str) -> Iterator[EnclosureProcess]:
    with EnclosureProcess.start(["--drive-size", "16M", *arguments], folder) as running:
        yield running


@pytest.mark.parametrize("digests", [NO_DIGESTS, BOTH], ids=["plain", "digests"])
@pytest.mark.parametrize("files", [False, True], ids=["memory", "files"])
@pytest.mark.parametrize("in_capsule", ["0", "16K", "2M"])
def test_write_and_read(tmp_path: Path, digests: Digests, files: bool, in_capsule: str) -> None:
    data = random.Random(35).randbytes(MIB + 4096)
    arguments = ["--folder", str(tmp_path / "flash")] if files else []

    def use(queue: TcpHostQueue, controller: Controller) -> None:
        assert write(queue, 3, data).status == 0
        assert write(queue, 0, data[:4096]).status == 0
        assert read(queue, 3, len(data)) == data
        run(queue, commands.flush(1)).check()
        flying = [commands.read(1, 3 + index, 64, memoryview(bytearray(64 * 4096))) for index in range(16)]
        for command in flying:
            queue.submit(command)
        for index, command in enumerate(flying):
            assert queue.wait(command, time.monotonic() + 20)
            command.check()
            assert command.data_in == data[index * 4096 : (index + 64) * 4096]

    with enclosure(tmp_path, "--in-capsule", in_capsule, *arguments) as running:
        with_queue(running.ready, use, digests=digests)
        counted = running.ask("stats")["drives"][0]
        assert counted["write_bytes"] == len(data) + 4096
        assert counted["read_bytes"] == len(data) + 16 * 64 * 4096
        assert counted["write_commands"] == 2


def test_discovery_and_hosts(tmp_path: Path) -> None:
    async def look(host: str) -> list[str]:
        entries = await discover("127.0.0.1", running.ready["port"], host, HOST_ID)
        return [entry.subsystem_nqn for entry in entries]

    with enclosure(tmp_path, "--allow-host", "nqn.friend", "--nqn", "nqn.2026-01.io.g35:mine") as running:
        assert running.ready["nqn"] == "nqn.2026-01.io.g35:mine"
        assert trio.run(look, "nqn.friend") == ["nqn.2026-01.io.g35:mine"]
        assert trio.run(look, "nqn.stranger") == []


def test_drives_come_and_go_under_a_connected_host(tmp_path: Path) -> None:
    async def session(running: EnclosureProcess) -> None:
        ready = running.ready
        async with open_controller(
            ready["address"], ready["port"], ready["nqn"], HOST, HOST_ID
        ) as controller:

            async def until(nsids: list[int]) -> None:
                with trio.fail_after(10):
                    while [namespace.nsid for namespace in controller.namespaces()] != nsids:
                        await controller.events.receive()

            await until([1, 2])
            running.ask("add", size=8 * MIB)
            await until([1, 2, 3])
            running.ask("remove", drive=0)
            await until([2, 3])
            running.ask("add", drive=0)
            await until([1, 2, 3])

    with enclosure(tmp_path, "--drives", "2") as running:
        trio.run(session, running)


def test_a_hung_drive_holds_up_nobody_else(tmp_path: Path) -> None:
    def use(queue: TcpHostQueue, controller: Controller) -> None:
        assert write(queue, 0, b"a" * 4096, 1).status == 0
        running.ask("hang", drive=0)
        hung = commands.read(1, 0, 1, memoryview(bytearray(4096)))
        queue.submit(hung)
        assert not queue.wait(hung, time.monotonic() + 0.05)
        assert read(queue, 0, 4096, nsid=2) == bytes(4096)
        other = connect_io_queue(controller.info, 2, 8)
        assert read(other, 0, 4096, nsid=2) == bytes(4096)
        other.close()
        assert not hung.done
        running.ask("heal", drive=0)
        assert queue.wait(hung, time.monotonic() + 20)
        assert hung.data_in == b"a" * 4096

    async def session() -> None:
        ready = running.ready
        async with open_controller(
            ready["address"], ready["port"], ready["nqn"], HOST, HOST_ID, io_queues=2
        ) as controller:
            queue = connect_io_queue(controller.info, 1, 31)
            use(queue, controller)
            queue.close()

    with enclosure(tmp_path, "--drives", "2") as running:
        trio.run(session)


def test_faults_by_command_line(tmp_path: Path) -> None:
    def jbof(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "emulator.jbof", *arguments],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    def use(queue: TcpHostQueue, controller: Controller) -> None:
        control = ["--control", str(running.control)]
        assert jbof("fault", "slow", *control, "--drive", "0", "--latency-ms", "200").returncode == 0
        before = time.monotonic()
        read(queue, 0, 4096)
        assert time.monotonic() - before >= 0.2
        assert (
            jbof("fault", "error", *control, "--status", "write_fault", "--operation", "write").returncode
            == 0
        )
        assert write(queue, 0, bytes(4096)).status == Status.WRITE_FAULT
        assert jbof("fault", "heal", *control).returncode == 0
        assert write(queue, 0, b"x" * 4096).status == 0
        flip = jbof("fault", "flip", *control, "--drive", "0", "--offset", "1K", "--length", "1")
        assert json.loads(flip.stdout) == {"bytes_changed": [1024]}
        assert read(queue, 0, 4096) != b"x" * 4096
        shown = json.loads(jbof("stats", *control).stdout)
        assert shown["drives"][0]["faults_injected"] == {"slow": 1, "error": 1, "flip_at_rest": 1}
        assert jbof("fault", "remove", *control, "--drive", "9").returncode == 1
        assert jbof("fault", "remove", *control).returncode == 2

    with enclosure(tmp_path) as running:
        with_queue(running.ready, use)
        assert jbof("fault", "kill", "--control", str(running.control)).returncode == 0
        assert running.process.wait(60) == -signal.SIGKILL
        assert jbof("stats", "--control", str(running.control)).returncode == 1


def test_killed_and_brought_back(tmp_path: Path) -> None:
    """What was acknowledged before SIGKILL is there afterwards, under the same names."""
    folder = ["--folder", str(tmp_path / "flash"), "--drives", "2"]
    dice = random.Random(35)
    blocks = {slba: dice.randbytes(65536) for slba in range(0, 1600, 16)}
    acknowledged: list[int] = []

    def use(queue: TcpHostQueue, controller: Controller) -> None:
        for slba, data in blocks.items():
            command = commands.write(1, slba, 16, [data])
            queue.submit(command)
            if len(acknowledged) == 60:
                running.process.kill()
            assert queue.wait(command, time.monotonic() + 20)
            if command.lost:
                break
            acknowledged.append(slba)
        else:
            raise AssertionError("the enclosure was not killed")
        assert not queue.alive

    with enclosure(tmp_path, *folder) as running:
        first = running.ready
        with_queue(running.ready, use)
    with enclosure(tmp_path, *folder, "--port", str(first["port"])) as again:
        assert again.ready == first

        def check(queue: TcpHostQueue, controller: Controller) -> None:
            assert len(acknowledged) >= 60
            for slba in acknowledged:
                assert read(queue, slba, 65536) == blocks[slba]

        with_queue(again.ready, check)


@needs_admin
def test_a_full_disk_is_a_status_and_the_old_blocks_stay(tmp_path: Path) -> None:
    flash = tmp_path / "flash"
    flash.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4M", "tmpfs", str(flash)], check=True)
    try:

        def use(queue: TcpHostQueue, controller: Controller) -> None:
            written = []
            for index in range(64):
                command = write(queue, index * 64, bytes([index + 1]) * (64 * 4096))
                if command.status:
                    assert command.status == Status.CAPACITY_EXCEEDED
                    break
                written.append(index)
            assert 8 <= len(written) < 63
            for index in written:
                assert read(queue, index * 64, 64 * 4096) == bytes([index + 1]) * (64 * 4096)
            run(queue, more_commands.write_zeroes(1, 0, 64, deallocate=True)).check()
            assert write(queue, 0, b"again".ljust(4096)).status == 0

        with enclosure(tmp_path, "--folder", str(flash)) as running:
            with_queue(running.ready, use)
    finally:
        subprocess.run(["umount", "-l", str(flash)], check=True)


def raw_connection(ready: dict[str, Any], *, kato: int = 0) -> socket.socket:
    """A socket on which Connect has succeeded on the admin queue; `kato` in milliseconds."""
    sock = socket.create_connection((ready["address"], ready["port"]), timeout=10)
    sock.sendall(encode_header(ICReq()))
    assert sock.recv(128, socket.MSG_WAITALL)[0] == 1
    data = ConnectData(HOST_ID, 0xFFFF, ready["nqn"], HOST).encode()
    sqe = fabrics_entry(Connect(0, 31, kato, cattr=4), 0)
    sock.sendall(b"".join(encode_pdu(CapsuleCmd(sqe, len(data)), data=(data,))))
    answer = sock.recv(24, socket.MSG_WAITALL)
    assert answer[0] == 5
    assert decode_cqe_untrusted(answer[8:]).status == 0
    return sock


def test_a_host_that_sends_without_reading_is_read_all_the_same(tmp_path: Path) -> None:
    """Both sides blocked in a send, each waiting for the other to read, would be a deadlock."""
    data = random.Random(35).randbytes(MIB)

    def use(queue: TcpHostQueue, controller: Controller) -> None:
        reads = [commands.read(1, 0, 256, memoryview(bytearray(MIB))) for _ in range(15)]
        writes = [commands.write(1, 256, 256, [data]) for _ in range(15)]
        for one, other in zip(reads, writes, strict=True):
            queue.submit(one)
            queue.submit(other)
        for command in (*reads, *writes):
            assert queue.wait(command, time.monotonic() + 20), command
            command.check()
        assert read(queue, 256, MIB) == data

    with enclosure(tmp_path, "--in-capsule", "2M") as running:
        with_queue(running.ready, use)


@pytest.mark.parametrize("room", ["8K", "2M"], ids=["asked-for", "in-capsule"])
def test_a_long_payload_may_arrive_in_any_pieces(tmp_path: Path, room: str) -> None:
    """The enclosure sleeps until much of it is there, and never for more than what is certain to come."""
    dice = random.Random(21)
    data = dice.randbytes(MIB)

    def use(queue: TcpHostQueue, controller: Controller) -> None:
        protocol, sock = queue._queue, queue._sock
        for pieces in ((1000, 523_288), (524_288,), (524_289,), (600_000, 524_288 - 72), (MIB - 1,)):
            command = commands.write(1, 0, 256, [data])
            queue.submit(command, more=True)
            protocol.submit(flush := commands.flush(1), time.monotonic())
            if room == "8K":  # up to the header of the data, which the enclosure asks for
                queue._push()
                queue._mark.clear()
                while not command.requested:
                    protocol.received(sock.recv_into(protocol.next_buffer()))
            stream = b"".join(protocol.output)
            for start, end in itertools.pairwise((0, *sorted(pieces), len(stream))):
                sock.sendall(stream[start:end])
            protocol.sent(len(stream))
            for each in (command, flush):
                assert queue.wait(each, time.monotonic() + 20)
                each.check()
            assert read(queue, 0, MIB) == data

    with enclosure(tmp_path, "--in-capsule", room) as running:
        with_queue(running.ready, use)


def test_a_host_that_dies_amid_a_long_payload_is_noticed(tmp_path: Path) -> None:
    def use(queue: TcpHostQueue, controller: Controller) -> None:
        before = running.ask("stats")["connections"]
        queue.submit(commands.write(1, 0, 256, [bytes(MIB)]), more=True)
        queue._sock.sendall(b"".join(queue._queue.output)[:5000])
        queue.close()
        wait_until(lambda: running.ask("stats")["connections"] == before - 1, 20)

    with enclosure(tmp_path, "--in-capsule", "2M") as running:
        with_queue(running.ready, use)


def test_a_silent_host_is_dropped(tmp_path: Path) -> None:
    with enclosure(tmp_path) as running:
        with raw_connection(running.ready, kato=1000) as sock:
            assert sock.recv(1) == b"", "closed after a second of silence"
        wait_until(lambda: not running.ask("stats")["controllers"], 20)


def test_a_live_server_survives_nonsense(tmp_path: Path) -> None:
    """Random bytes, random PDUs and spoiled sessions, a hundred at least; afterwards it serves as before."""
    dice = random.Random(35)
    flush = encode_header(CapsuleCmd(Sqe(IoOpcode.FLUSH, 1, 1, transport(0))))
    good = [encode_header(ICReq()), flush]
    with enclosure(tmp_path, "--drives", "2") as running:
        ready = running.ready
        descriptors = len(os.listdir(f"/proc/{running.process.pid}/fd"))
        deadline = time.monotonic() + 6
        count = 0
        while count <= 100 or (time.monotonic() < deadline and count < 1500):
            count += 1
            style = dice.randrange(4)
            sock = (
                raw_connection(ready)
                if style == 3
                else socket.create_connection((ready["address"], ready["port"]), timeout=10)
            )
            with sock:
                sock.settimeout(0.02)
                try:
                    if style == 0:
                        sock.sendall(dice.randbytes(dice.randrange(1, 4000)))
                    elif style == 1:
                        spoiled = bytearray(dice.choice(good))
                        spoiled[dice.randrange(len(spoiled))] = dice.randrange(256)
                        sock.sendall(spoiled)
                    else:
                        if style == 2:
                            sock.sendall(good[0])
                            assert len(sock.recv(128, socket.MSG_WAITALL)) == 128
                        kind = dice.choice([0, 2, 4, 6, 7, 9])
                        hlen = {0: 128, 2: 24, 4: 72, 6: 24}.get(kind, 24)
                        plen = dice.choice([hlen, hlen + 512, dice.randrange(1 << 32)])
                        head = bytes([kind, dice.choice([0, 4]), hlen, dice.choice([0, hlen])])
                        body = dice.randbytes(plen - 8 if plen < 4096 else 600)
                        sock.sendall(head + plen.to_bytes(4, "little") + body)
                    while sock.recv(4096):
                        pass
                except (TimeoutError, ConnectionError):
                    pass
        assert running.process.poll() is None

        def use(queue: TcpHostQueue, controller: Controller) -> None:
            assert write(queue, 0, b"still here".ljust(4096)).status == 0
            assert read(queue, 0, 4096).startswith(b"still here")

        with_queue(ready, use)
        wait_until(lambda: running.ask("stats")["connections"] == 0, 60)
        assert running.ask("stats")["controllers"] == []
        wait_until(lambda: len(os.listdir(f"/proc/{running.process.pid}/fd")) <= descriptors + 2, 20)
    log = (tmp_path / "jbof.log").read_text()
    assert "Traceback" not in log, log


def test_starting_and_stopping(tmp_path: Path, processes: Processes) -> None:
    control, ready = tmp_path / "c.sock", tmp_path / "ready.json"
    arguments = ["--drive-size", "1M", "--control", control, "--ready-file", ready]
    first = processes.python("-m", "emulator.jbof", *map(str, arguments))
    line = first.wait_for_line("ready ")
    said = json.loads(line.removeprefix("ready "))
    assert said == json.loads(ready.read_text())
    assert set(said) == {"address", "port", "transports", "nqn", "namespaces", "control", "rpc"}
    assert set(said["namespaces"][0]) == {"nsid", "nguid", "size", "lba_bytes", "command_set"}
    assert stat.S_IMODE(control.stat().st_mode) == 0o600
    with pytest.raises(ControlError):
        ask(control, "explode")
    second = processes.python("-m", "emulator.jbof", "--port", str(said["port"]))
    assert second.process.wait(60) == 1
    assert "cannot listen" in second.output
    third = processes.python("-m", "emulator.jbof", "--control", str(control))
    assert third.process.wait(60) == 1
    assert "another enclosure" in third.output
    assert first.stop() == 0
    assert not control.exists()
    assert not ready.exists()
    # A socket that a killed enclosure left behind is no obstacle.
    fourth = processes.python("-m", "emulator.jbof", *map(str, arguments))
    fourth.wait_for_line("ready ")
    fourth.kill()
    assert control.exists()
    fifth = processes.python("-m", "emulator.jbof", *map(str, arguments))
    fifth.wait_for_line("ready ")
    assert fifth.stop(how=signal.SIGINT) == 0


@pytest.mark.parametrize(
    "arguments",
    [
        ["--drive-size", "much"],
        ["--drive-size", "1000"],
        ["--lba-bytes", "1000"],
        ["--max-transfer", "3M"],
        ["--in-capsule", "7"],
        ["--nonsense"],
        ["fault"],
        ["stats"],
    ],
)
def test_wrong_arguments(processes: Processes, arguments: list[str]) -> None:
    assert processes.python("-m", "emulator.jbof", *arguments).process.wait(60) == 2


def test_a_start_that_fails_says_why(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(EnclosureError, match="cannot use the folder"):
        EnclosureProcess.start(["--folder", str(tmp_path / "file")], tmp_path)
