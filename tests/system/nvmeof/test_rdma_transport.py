"""Particular to RDMA: registered memory, commands given up, rejections, hosts that do wrong, sudden death."""

from __future__ import annotations

import mmap
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import trio

from emulator.jbof.enclosure import Enclosure, EnclosureSettings
from emulator.jbof.faults import ErrorFault, FlipFault
from emulator.jbof.rdma_connection import RdmaConnection
from emulator.roce.pyverbs.cmid import CMID
from emulator.roce.pyverbs.qp_attributes import QPAttr
from nvmeof.errors import ConnectionLost, LocalProtocolError, NvmeofError
from nvmeof.host import commands
from nvmeof.host.bring_up import connect_command
from nvmeof.rdma.work import BindWindow, Send
from nvmeof.transport import rdma_queue
from nvmeof.transport.base import Address, ControllerInfo, VerbsChoice
from nvmeof.transport.rdma import connect_io_queue, open_controller
from nvmeof.transport.rdma_connect import RdmaLink
from nvmeof.transport.rdma_queue import Linked, RdmaHostQueue, link_up
from nvmeof.transport.reconnect import Connected, Disconnected, keep_controller
from nvmeof.transport.verbs_provider import VerbsUnavailable, free_loopback_address, load_verbs
from nvmeof.wire.log_page import TransportType
from nvmeof.wire.rdma import RDMA_ADDRESS, ConnectRequest, RejectStatus
from nvmeof.wire.status import Status
from tests.support.nvme import more_commands
from tests.support.nvme.enclosure_process import EnclosureProcess
from tests.support.nvme.nvme_ends import HOST, HOST_ID, same
from tests.support.nvme.transport_ways import EMULATED, discover
from tests.support.processes import Processes
from tests.support.waiting import wait_until

LBA = 4096
PATIENCE_S = 20.0
KEEP_ALIVE_S = 3.0
"""Short, for its end is waited for; and longer than a busy machine leaves a process without a turn."""
VERBS = VerbsChoice(EMULATED)


def memory(size: int) -> memoryview:
    return memoryview(mmap.mmap(-1, size))


def soon() -> float:
    return time.monotonic() + PATIENCE_S


@pytest.fixture
def patient_reconnect(monkeypatch: pytest.MonkeyPatch) -> None:
    """A queue whose pair was broken has all the time to connect again: half a second is short for a machine
    that is busy with something else."""
    monkeypatch.setattr(rdma_queue, "RECONNECT_S", PATIENCE_S)


@pytest.fixture
def enclosure() -> Iterator[Enclosure]:
    settings = EnclosureSettings(
        drives=2, drive_bytes=32 << 20, name="rdma", transports=("rdma",), address=free_loopback_address()
    )
    with Enclosure(settings) as served:
        yield served


@pytest.fixture
def info(enclosure: Enclosure) -> Iterator[ControllerInfo]:
    """A live controller, held by trio in a thread."""
    ready, found = threading.Event(), []

    async def hold() -> None:
        nonlocal stop
        stop = trio.Event()
        settings = enclosure.settings
        opened = open_controller(
            settings.address, enclosure.port, settings.subsystem_nqn, HOST, HOST_ID, verbs=VERBS, io_queues=8
        )
        async with opened as controller:
            found.append((controller.info, trio.lowlevel.current_trio_token(), stop, controller))
            ready.set()
            await stop.wait()

    stop: trio.Event
    thread = threading.Thread(target=trio.run, args=(hold,))
    thread.start()
    assert ready.wait(60)
    known, token, event, controller = found[0]
    yield known
    assert not controller.ended.is_set(), controller.error
    token.run_sync_soon(event.set)
    thread.join(60)
    assert not thread.is_alive()


def finish(queue: RdmaHostQueue, command: commands.Command) -> commands.Command:
    queue.submit(command)
    assert queue.wait(command, soon())
    return command


def test_registered_memory_of_all_sizes(enclosure: Enclosure, info: ControllerInfo) -> None:
    queue = connect_io_queue(info, 1, 16)
    buffer = memory(4 << 20)
    queue.register(buffer)
    for blocks in (1, 2, 3, 64, 257, 512):
        size = blocks * LBA
        data = random.Random(blocks).randbytes(size)
        buffer[LBA : LBA + size] = data
        assert finish(queue, commands.write(1, blocks, blocks, [buffer[LBA : LBA + size]])).status == 0
        buffer[:] = bytes(len(buffer))
        into = buffer[7 * LBA : 7 * LBA + size]
        assert finish(queue, commands.read(1, blocks, blocks, into)).status == 0
        assert same(into, data)
        # Nothing beside it was touched.
        assert not any(buffer[: 7 * LBA])
        assert not any(buffer[7 * LBA + size : 7 * LBA + size + LBA])
        assert finish(queue, more_commands.compare(1, blocks, blocks, [into])).status == 0
    queue.close()


@pytest.mark.usefixtures("patient_reconnect")
def test_a_command_given_up_costs_a_new_queue_pair_and_nothing_else(
    enclosure: Enclosure, info: ControllerInfo
) -> None:
    """A slow drive answers after its reader has gone: his buffer is another's by then and stays as it is."""
    queue, other = connect_io_queue(info, 1, 8), connect_io_queue(info, 2, 8)
    buffer = memory(1 << 20)
    queue.register(buffer)
    drive = enclosure.drive(0)
    drive.set_faults(hung=True)
    command = commands.read(1, 0, 256, buffer)
    queue.submit(command)
    assert not queue.wait(command, time.monotonic() + 0.03)
    accepted = enclosure.stats()["connections_accepted"]
    began = time.monotonic()
    queue.abandon(command)
    assert queue.alive
    assert queue.in_flight == 0
    assert queue.oldest_abandoned() is None
    buffer[:] = b"\x5a" * len(buffer)
    # The other queue and the other drive go on; on this queue, over a new queue pair. The first drive hangs
    # all the while, so none of this can have waited for it.
    assert finish(other, commands.read(2, 0, 1, memory(LBA))).status == 0
    assert finish(queue, commands.read(2, 0, 1, memory(LBA))).status == 0
    assert time.monotonic() - began < PATIENCE_S
    assert enclosure.stats()["connections_accepted"] == accepted + 1
    drive.set_faults(hung=False)
    enclosure.target.poke()
    trial = commands.read(1, 0, 1, memory(LBA))
    assert finish(queue, trial).status == 0
    # The late answer had its time, and found nobody.
    assert same(buffer, b"\x5a" * len(buffer))
    assert not command.done
    assert finish(queue, commands.read(1, 0, 256, buffer)).status == 0
    assert same(buffer, bytes(len(buffer)))
    queue.close()
    other.close()


@pytest.mark.usefixtures("patient_reconnect")
def test_a_write_given_up_reads_nothing_of_what_comes_next(
    enclosure: Enclosure, info: ControllerInfo
) -> None:
    queue = connect_io_queue(info, 1, 8)
    buffer = memory(1 << 20)
    queue.register(buffer)
    for _ in range(20):
        command = commands.write(1, 0, 256, [buffer])
        queue.submit(command)
        queue.abandon(command)
        # In place of what was written: secrets of another request.
        buffer[:] = b"\x77" * len(buffer)
        into = memory(1 << 20)
        assert finish(queue, commands.read(1, 0, 256, into)).status == 0
        assert b"\x77" not in bytes(into)
        buffer[:] = bytes(len(buffer))
    queue.close()


# --- who is not let in ---------------------------------------------------------------


def dial(enclosure: Enclosure, request: ConnectRequest | bytes) -> str:
    """Connect with a request of our own making; what the answer was."""

    class Raw:
        def encode(self) -> bytes:
            return request if isinstance(request, bytes) else request.encode()

    link = RdmaLink(VERBS, load_verbs(EMULATED))
    deadline = soon()
    try:
        run(link, link.resolve(Address(enclosure.settings.address, enclosure.port), deadline), deadline)
        link.make_pair(room=64, receives=4, windows=0)
        run(link, link.connect(Raw(), deadline), deadline)  # type: ignore[arg-type]
    except ConnectionLost as error:
        return str(error)
    finally:
        link.close()
    return "accepted"


def run(link: RdmaLink, steps: object, deadline: float) -> None:
    for _ in steps:  # type: ignore[attr-defined]
        link.wait_event(deadline)


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        (b"short", RejectStatus.INVALID_RECORD_FORMAT),
        (b"\1".ljust(32, b"\0"), RejectStatus.INVALID_RECORD_FORMAT),
        (ConnectRequest(1000, 32, 32), RejectStatus.INVALID_QUEUE_ID),
        (ConnectRequest(0, 32, 1), RejectStatus.INVALID_HSQSIZE),
        (ConnectRequest(1, 32, 2000), RejectStatus.INVALID_HSQSIZE),
        (ConnectRequest(1, 0, 32), RejectStatus.INVALID_HRQSIZE),
    ],
)
def test_rejections(enclosure: Enclosure, request_: ConnectRequest | bytes, status: RejectStatus) -> None:
    words = status.name.lower().replace("_", " ")
    assert words in dial(enclosure, request_)
    assert dial(enclosure, ConnectRequest(0, 32, 32)) == "accepted"


@pytest.mark.parametrize("offered", [1, 128, 129, 255])
def test_a_peer_may_offer_more_reads_than_a_device_takes(
    enclosure: Enclosure, monkeypatch: pytest.MonkeyPatch, offered: int
) -> None:
    """As it stands in its REQ or REP, of which the connection manager makes the attributes."""
    made = CMID.init_qp_attr

    def with_offer(self: CMID, state: int) -> tuple[QPAttr, int]:
        attributes, mask = made(self, state)
        attributes.max_rd_atomic = attributes.max_dest_rd_atomic = offered
        return attributes, mask

    monkeypatch.setattr(CMID, "init_qp_attr", with_offer)
    assert dial(enclosure, ConnectRequest(0, 32, 32)) == "accepted"


def test_a_host_that_cannot_be_accepted_is_told_why(
    enclosure: Enclosure, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: RdmaConnection, entries: int, reads: int) -> None:
        raise ConnectionLost("scripted")

    with monkeypatch.context() as patched:
        patched.setattr(RdmaConnection, "_establish", fail)
        assert "no resources" in dial(enclosure, ConnectRequest(0, 32, 32))
    assert dial(enclosure, ConnectRequest(0, 32, 32)) == "accepted"


def test_discovery_says_how(enclosure: Enclosure) -> None:
    async def main() -> None:
        settings = enclosure.settings
        [entry] = await discover(settings.address, enclosure.port, HOST, HOST_ID, verbs=VERBS)
        assert entry.transport_type == TransportType.RDMA
        assert (entry.address, entry.service) == (settings.address, str(enclosure.port))
        assert entry.tsas == RDMA_ADDRESS

    trio.run(main)


def test_providers_that_are_not_there() -> None:
    async def main() -> None:
        with pytest.raises(VerbsUnavailable):
            async with open_controller(
                "127.0.0.2", 4420, "nqn.a", HOST, HOST_ID, verbs=VerbsChoice("no_such_verbs")
            ):
                pass
        with pytest.raises(VerbsUnavailable, match="local address"):
            async with open_controller("192.0.2.1", 4420, "nqn.a", HOST, HOST_ID, verbs=VERBS):
                pass

    trio.run(main)


# --- hosts that do wrong ------------------------------------------------------------------


@dataclass
class RawQueue:
    """An I/O queue whose work requests a test may spoil."""

    linked: Linked

    def settle(self, condition: Callable[[], object]) -> None:
        deadline = soon()
        while not condition():
            assert time.monotonic() < deadline
            self.linked.pump()
            assert self.linked.link.completions is not None
            self.linked.link.completions.wait(time.monotonic() + 0.01)

    def until_lost(self) -> str:
        """Wait for the end of the queue pair, told by a completion or the connection manager; the reason."""
        link = self.linked.link
        try:
            self.settle(link.event_waits)
        except NvmeofError as error:
            reason = str(error)
        else:
            link.look_at_events()
            reason = link.gone or ""
        self.linked.end(reason)
        return reason


@pytest.fixture
def raw(info: ControllerInfo) -> Iterator[RawQueue]:
    link = RdmaLink(VERBS, load_verbs(EMULATED))
    deadline = soon()
    steps = link_up(link, info.address, 7, info.facts.cntlid, 4, 4096, deadline)
    while True:
        try:
            next(steps)
        except StopIteration as end:
            queue = RawQueue(end.value)
            break
        link.wait_event(deadline)
    command = connect_command(info.config, 7, 5, info.facts.cntlid)
    queue.linked.queue.submit(command, 0.0)
    queue.linked.post()
    queue.settle(lambda: command.done)
    assert command.status == 0
    yield queue
    queue.linked.end("done")


def test_a_key_that_opens_nothing(enclosure: Enclosure, info: ControllerInfo, raw: RawQueue) -> None:
    """The controller's RDMA is refused, that queue pair is lost, and everything else goes on."""
    queue = raw.linked.queue
    command = commands.read(1, 0, 16, memory(16 * LBA))
    queue.submit(command, 0.0)
    bind, send = queue.sends.take()
    assert isinstance(bind, BindWindow)
    raw.linked.link.post([], [send])
    assert raw.until_lost()
    assert command.lost
    other = connect_io_queue(info, 1, 4)
    assert finish(other, commands.flush(1)).status == 0
    other.close()


def test_a_capsule_that_is_none(enclosure: Enclosure, info: ControllerInfo, raw: RawQueue) -> None:
    queue = raw.linked.queue
    queue.submit(commands.flush(1), 0.0)
    (send,) = queue.sends.take()
    assert isinstance(send, Send)
    raw.linked.link.post([], [send._replace(span=send.span._replace(length=10))])
    assert raw.until_lost()
    other = connect_io_queue(info, 1, 4)
    assert finish(other, commands.flush(1)).status == 0
    other.close()


# --- sudden death ----------------------------------------------------------------------------


def test_the_enclosure_is_killed_and_comes_back(tmp_path: Path) -> None:
    """kill -9: no goodbye. Deadlines are kept, the session ends, and the keeper finds the new enclosure."""
    address = free_loopback_address()
    arguments = ["--transport", "rdma", "--address", address, "--drive-size", "16M", "--folder"]
    arguments.append(str(tmp_path / "drives"))

    def work(info: ControllerInfo, kill: Callable[[], None]) -> None:
        queue = connect_io_queue(info, 1, 8)
        buffer = memory(1 << 20)
        queue.register(buffer)
        buffer[:] = random.Random(1).randbytes(1 << 20)
        assert finish(queue, commands.write(1, 0, 256, [buffer])).status == 0
        kill()
        command = commands.read(1, 0, 256, buffer)
        queue.submit(command)
        began = time.monotonic()
        assert not queue.wait(command, began + 0.05) or command.lost
        queue.abandon(command)
        with pytest.raises(ConnectionLost):
            queue.submit(commands.flush(1))
        # 0.05 s for the answer, and half a second to connect again; the rest is for a busy machine.
        assert time.monotonic() - began < 5.0
        assert not queue.alive
        queue.close()

    def again(info: ControllerInfo) -> None:
        queue = connect_io_queue(info, 1, 8)
        into = memory(1 << 20)
        assert finish(queue, commands.read(1, 0, 256, into)).status == 0
        assert same(into, random.Random(1).randbytes(1 << 20))
        queue.close()

    async def main() -> None:
        first = EnclosureProcess.start(arguments, tmp_path, name="mortal")
        running = [first]
        nqn = first.ready["nqn"]
        try:
            opened = lambda: open_controller(  # noqa: E731
                address, first.ready["port"], nqn, HOST, HOST_ID, verbs=VERBS, keep_alive_s=KEEP_ALIVE_S
            )
            async with keep_controller(opened) as keeper:
                with trio.fail_after(60):
                    event = await keeper.events.receive()
                    assert isinstance(event, Connected)
                    # In a thread: the session is kept alive meanwhile.
                    await trio.to_thread.run_sync(work, event.controller.info, first.kill)
                    assert isinstance(await keeper.events.receive(), Disconnected)
                    running.append(EnclosureProcess.start(arguments, tmp_path, name="mortal"))
                    while not isinstance(event := await keeper.events.receive(), Connected):
                        pass
                    await trio.to_thread.run_sync(again, event.controller.info)
        finally:
            for process in running:
                process.stop()

    trio.run(main)


HOST_PROGRAM = """
import sys, trio
from nvmeof.transport.rdma import VerbsChoice, connect_io_queue, open_controller

async def main():
    address, port, nqn, host, keep_alive = sys.argv[1:]
    verbs = VerbsChoice("emulator.roce.pyverbs")
    async with open_controller(
        address, int(port), nqn, host, bytes(range(16)), verbs=verbs, keep_alive_s=float(keep_alive)
    ) as controller:
        queue = connect_io_queue(controller.info, 1, 8)
        print("connected", flush=True)
        await trio.sleep_forever()

trio.run(main)
"""


def test_a_host_that_is_killed_is_forgotten(enclosure: Enclosure, processes: Processes) -> None:
    """No goodbye either: the keep-alive time passes, and its controller and queue pairs go."""
    settings = enclosure.settings
    host = processes.python(
        *("-c", HOST_PROGRAM, settings.address, str(enclosure.port), settings.subsystem_nqn, HOST),
        str(KEEP_ALIVE_S),
    )
    host.wait_for_line("connected")
    assert enclosure.stats()["connections"] == 2
    os.kill(host.process.pid, signal.SIGKILL)
    wait_until(lambda: not enclosure.stats()["controllers"], 60, "the controller to go")
    wait_until(lambda: enclosure.stats()["connections"] == 0, 60, "its queue pairs to go")


def test_faults_of_drives(enclosure: Enclosure, info: ControllerInfo) -> None:
    """Those of the control socket: they wake the one thread that serves all queue pairs."""
    queue = connect_io_queue(info, 1, 8)
    drive = enclosure.drive(0)
    data = random.Random(7).randbytes(16 * LBA)
    assert finish(queue, commands.write(1, 0, 16, [data])).status == 0
    drive.set_faults(hung=True)
    waiting = [commands.read(1, 0, 16, memory(16 * LBA)) for _ in range(4)]
    for command in waiting:
        queue.submit(command)
    assert not queue.wait(waiting[0], time.monotonic() + 0.05)
    assert finish(queue, commands.read(2, 0, 1, memory(LBA))).status == 0
    drive.heal()
    enclosure.target.poke()
    for command in waiting:
        assert queue.wait(command, soon())
        assert command.data_in is not None
        assert same(command.data_in, data)
    drive.set_faults(error=ErrorFault(Status.UNRECOVERED_READ_ERROR))
    assert finish(queue, commands.read(1, 0, 1, memory(LBA))).status == Status.UNRECOVERED_READ_ERROR
    drive.heal()
    drive.set_faults(flip_on_read=FlipFault(0, 16 * LBA))
    flipped = finish(queue, commands.read(1, 0, 16, memory(16 * LBA)))
    assert flipped.data_in is not None
    assert not same(flipped.data_in, data)
    drive.heal()
    drive.set_faults(lose_writes=1.0)
    assert finish(queue, commands.write(1, 0, 16, [bytes(16 * LBA)])).status == 0
    drive.heal()
    assert same(finish(queue, commands.read(1, 0, 16, memory(16 * LBA))).data_in, data)
    added = enclosure.add_drive()
    assert finish(queue, commands.write(added.number + 1, 0, 16, [data])).status == 0
    assert same(finish(queue, commands.read(added.number + 1, 0, 16, memory(16 * LBA))).data_in, data)
    enclosure.remove_drive(added.number)
    gone = finish(queue, commands.read(added.number + 1, 0, 1, memory(LBA)))
    assert gone.status == Status.INVALID_NAMESPACE
    queue.close()


def test_a_queue_that_is_not_there(info: ControllerInfo) -> None:
    with pytest.raises(LocalProtocolError):
        connect_io_queue(info, 9, 4)
