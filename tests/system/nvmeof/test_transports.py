"""The transports over sockets and emulated devices: our enclosure behind them, or a peer that misbehaves."""

from __future__ import annotations

import random
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import replace

import pytest
import trio

from emulator.jbof.enclosure import Enclosure, EnclosureSettings
from nvmeof.controller.settings import ControllerSettings
from nvmeof.controller.tcp_rules import TcpSettings
from nvmeof.errors import (
    CommandFailed,
    ConnectionLost,
    ConnectRefused,
    LocalProtocolError,
    NvmeofError,
    QueueFull,
)
from nvmeof.host import commands
from nvmeof.host.command import Command
from nvmeof.host.controller_session import Change
from nvmeof.host.procedure import done
from nvmeof.transport import HostQueue, connect_io_queue, rdma_queue
from nvmeof.transport.reconnect import Connected, Disconnected, GivenUp, ReconnectPolicy, keep_controller
from nvmeof.transport.tcp import Controller, open_controller
from nvmeof.wire.identify import IdentifyCns
from nvmeof.wire.status import Status
from tests.support.nvme.nvme_ends import HOST, HOST_ID, same
from tests.support.nvme.transport_ways import WAYS, Way
from tests.support.waiting import wait_until

LBA = 4096
DRIVE = 64 << 20
PATIENCE_S = 20.0


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest) -> Way:
    return Way(request.param)


@pytest.fixture
def enclosure(way: Way) -> Iterator[Enclosure]:
    settings = EnclosureSettings(
        drives=2,
        drive_bytes=DRIVE,
        name="transport",
        allowed_hosts=frozenset({HOST}),
        controller=ControllerSettings(max_transfer_bytes=4 << 20, async_event_limit=64),
        tcp=TcpSettings(max_h2c_data=256 << 10),
        transports=way.transports,
        address=way.address,
    )
    with Enclosure(settings) as served:
        yield served


def opener(way: Way, enclosure: Enclosure, host: str = HOST, keep_alive_s: float = 5.0):  # type: ignore[no-untyped-def]
    return way.open_controller(
        enclosure.port,
        enclosure.settings.subsystem_nqn,
        host,
        HOST_ID,
        keep_alive_s=keep_alive_s,
        io_queues=4,
        connect_timeout_s=10.0,
    )


class Attached:
    """An I/O queue, used in the test's thread, with its controller held by trio in another."""

    def __init__(self, way: Way, enclosure: Enclosure) -> None:
        self._ready = threading.Event()
        self._stop: trio.Event | None = None
        self._token: trio.lowlevel.TrioToken | None = None
        self._way, self._enclosure = way, enclosure
        self._thread = threading.Thread(target=trio.run, args=(self._hold,))
        self.controller: Controller

    async def _hold(self) -> None:
        self._token, self._stop = trio.lowlevel.current_trio_token(), trio.Event()
        try:
            async with opener(self._way, self._enclosure) as self.controller:
                self._ready.set()
                await self._stop.wait()
        finally:
            self._ready.set()

    def __enter__(self) -> Attached:
        self._thread.start()
        assert self._ready.wait(60)
        return self

    def __exit__(self, *exc: object) -> None:
        assert self._token is not None
        assert self._stop is not None
        self._token.run_sync_soon(self._stop.set)
        self._thread.join(60)
        assert not self._thread.is_alive()

    def admin(self, command: Command) -> Command:
        """Run an admin command to its end."""
        return trio.from_thread.run(self.controller.perform, done(command), trio_token=self._token)

    def queue(self, qid: int = 1, depth: int = 16) -> HostQueue:
        return connect_io_queue(self.controller.info, qid, depth, 10.0)


def soon() -> float:
    return time.monotonic() + PATIENCE_S


def finish(queue: HostQueue, command: Command) -> Command:
    queue.submit(command)
    assert queue.wait(command, soon())
    return command


def test_io_of_all_sizes(way: Way, enclosure: Enclosure) -> None:
    with Attached(way, enclosure) as attached:
        queue = attached.queue()
        assert queue.max_transfer == 4 << 20
        for blocks in (1, 4, 5, 256, 1024):
            data = random.Random(blocks).randbytes(blocks * LBA)
            parts = [memoryview(data)[:LBA], data[LBA:]] if blocks > 1 else [data]
            assert finish(queue, commands.write(1, 9, blocks, parts)).status == 0
            into = memoryview(bytearray(len(data)))
            command = commands.read(1, 9, blocks, into)
            queue.submit(command)
            for stage in range(LBA, len(data) + 1, 64 * LBA):
                assert queue.wait(command, soon(), stage)
                assert same(into[:stage], data[:stage])
            assert queue.wait(command, soon())
            assert command.status == 0
            assert same(into, data)
        assert finish(queue, commands.flush(1)).status == 0
        assert finish(queue, commands.read(1, DRIVE // LBA, 1, memoryview(bytearray(LBA)))).status == 0x80
        assert queue.in_flight == 0
        queue.close()
        queue.close()
        assert not queue.alive
        with pytest.raises(ConnectionLost):
            queue.submit(commands.flush(1))


def test_both_directions_at_once_do_not_lock_up(way: Way, enclosure: Enclosure) -> None:
    """Many large writes and reads in flight: more than the socket buffers of both sides hold."""
    with Attached(way, enclosure) as attached:
        queue = attached.queue(depth=32)
        data = random.Random(1).randbytes(4 << 20)
        blocks = len(data) // LBA
        running: list[Command] = []
        for n in range(12):
            running.append(commands.write(1, n % 4 * blocks, blocks, [data]))
            running.append(commands.read(2, n % 4 * blocks, blocks, memoryview(bytearray(len(data)))))
        for command in running:
            queue.submit(command)
        for command in reversed(running):
            assert queue.wait(command, time.monotonic() + 60)
            assert command.status == 0
        into = memoryview(bytearray(len(data)))
        assert finish(queue, commands.read(1, 0, blocks, into)).status == 0
        assert same(into, data)
        queue.close()


def test_deadline_abandon_and_late_answer(
    way: Way, enclosure: Enclosure, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Giving up costs a queue of RDMA its pair: it has all the time to connect again.
    monkeypatch.setattr(rdma_queue, "RECONNECT_S", PATIENCE_S)
    with Attached(way, enclosure) as attached:
        queue = attached.queue(depth=2)
        drive = enclosure.drive(0)
        drive.set_faults(hung=True)
        enclosure.target.poke()
        into = memoryview(bytearray(b"\xaa" * (1 << 20)))
        command = commands.read(1, 0, 256, into)
        before = time.monotonic()
        queue.submit(command)
        start = time.monotonic()
        assert not queue.wait(command, start + 0.05)
        assert 0.045 < time.monotonic() - start < PATIENCE_S
        assert not queue.wait(command, start, 4096)
        queue.abandon(command)
        since = queue.oldest_abandoned()
        assert since is not None
        assert before <= since <= start
        assert queue.silent_since() == (since if not way.is_rdma else None)
        # The other drive of the enclosure goes on serving, on the same queue.
        assert finish(queue, commands.read(2, 0, 1, memoryview(bytearray(LBA)))).status == 0
        assert queue.silent_since() is None
        second = commands.read(1, 0, 1, memoryview(bytearray(LBA)))
        queue.submit(second)
        with pytest.raises(QueueFull):
            queue.submit(commands.flush(2))
        drive.set_faults(hung=False)
        enclosure.target.poke()
        assert queue.wait(second, soon())
        wait_until(lambda: queue.oldest_abandoned() is None, what="the late answer")
        assert not command.done
        assert same(into, b"\xaa" * (1 << 20))
        assert finish(queue, commands.flush(2)).status == 0
        queue.close()


def test_a_command_that_hangs_is_aborted(way: Way, enclosure: Enclosure) -> None:
    with Attached(way, enclosure) as attached:
        queue = attached.queue()
        enclosure.drive(0).set_faults(hung=True)
        hanging = commands.read(1, 0, 256, memoryview(bytearray(1 << 20)))
        queue.submit(hanging)
        assert not queue.wait(hanging, time.monotonic() + 0.05)
        aborted = attached.admin(commands.abort(1, hanging.cid))
        assert aborted.result & 1 == 0
        assert queue.wait(hanging, soon())
        assert hanging.status == Status.ABORT_REQUESTED
        assert finish(queue, commands.flush(2)).status == 0
        assert attached.admin(commands.abort(1, 4711)).result & 1 == 1
        queue.close()


def test_the_enclosure_dies_with_commands_in_flight(way: Way, enclosure: Enclosure) -> None:
    with Attached(way, enclosure) as attached:
        queue = attached.queue()
        enclosure.drive(0).set_faults(hung=True)
        enclosure.target.poke()
        running = [commands.read(1, n, 1, memoryview(bytearray(LBA))) for n in range(5)]
        for command in running:
            queue.submit(command)
        assert not queue.wait(running[0], time.monotonic() + 0.02)
        enclosure.close()
        for command in running:
            assert queue.wait(command, soon())
            assert command.lost
            assert command.status is None
        assert not queue.alive
        assert queue.in_flight == 0
        wait_until(attached.controller.ended.is_set, what="the session's end")
        assert isinstance(attached.controller.error, ConnectionLost)


def test_queue_ids_and_second_use(way: Way, enclosure: Enclosure) -> None:
    with Attached(way, enclosure) as attached:
        for qid in (0, 5, -1):
            with pytest.raises(LocalProtocolError):
                attached.queue(qid)
        queue = attached.queue(3, depth=10_000)
        assert queue.depth <= 1023
        with pytest.raises((ConnectRefused, ConnectionLost)):
            attached.queue(3)
        assert finish(queue, commands.flush(1)).status == 0
        queue.close()
        wait_until(lambda: _connects(attached, 3), what="the queue id to be free again")


def _connects(attached: Attached, qid: int) -> bool:
    try:
        attached.queue(qid).close()
    except (ConnectRefused, ConnectionLost):
        return False
    return True


# --- the admin side ------------------------------------------------------------------


def test_admin(way: Way, enclosure: Enclosure) -> None:
    async def main() -> None:
        async with opener(way, enclosure) as controller:
            assert controller.facts.cntlid == controller.identify.cntlid
            found = {namespace.nsid: namespace for namespace in controller.namespaces()}
            assert sorted(found) == [1, 2]
            assert found[1].size_bytes == DRIVE
            assert found[1].nguid != found[2].nguid
            with pytest.raises(CommandFailed) as caught:
                await controller.perform(done(commands.identify(0x99)))
            assert caught.value.status == Status.INVALID_FIELD
            async with trio.open_nursery() as nursery:
                for _ in range(100):
                    nursery.start_soon(controller.perform, done(commands.identify(IdentifyCns.CONTROLLER)))
            enclosure.remove_drive(1)
            with trio.fail_after(10):
                async for event in controller.events:
                    if event == Change.NAMESPACES:
                        break
            assert [namespace.nsid for namespace in controller.namespaces()] == [1]
            with trio.fail_after(10):
                await controller.reset()
            assert controller.error is None
            with pytest.raises(ConnectionLost):
                await controller.perform(done(commands.keep_alive()))

    trio.run(main)


def test_cancelled_admin_commands_keep_their_place(way: Way, enclosure: Enclosure) -> None:
    """Giving up on commands that are not answered never overruns the admin queue."""

    async def main() -> None:
        async with opener(way, enclosure) as controller:
            for _ in range(30):
                with trio.move_on_after(0.005):
                    # The controller holds these until something happens.
                    await controller.perform(done(commands.async_event_request()))
            assert not controller.ended.is_set()

    trio.run(main)


def test_what_the_block_raises_comes_out_as_it_is(way: Way, enclosure: Enclosure) -> None:
    async def main() -> None:
        with pytest.raises(KeyError):
            async with opener(way, enclosure):
                raise KeyError("x")
        with trio.move_on_after(0.1) as scope:
            async with opener(way, enclosure):
                await trio.sleep_forever()
        assert scope.cancelled_caught

    trio.run(main)
    wait_until(lambda: not enclosure.target.controllers, what="the controllers to be gone")


def test_refusals(way: Way, enclosure: Enclosure) -> None:
    async def main() -> None:
        with pytest.raises(ConnectRefused, match="connect invalid host"):
            async with opener(way, enclosure, host="nqn.2026-01.io.g35:stranger"):
                pass
        with pytest.raises(LocalProtocolError):
            async with open_controller("127.0.0.1", 1, "nqn.a", HOST, b"short"):
                pass

    trio.run(main)


def test_discover(way: Way, enclosure: Enclosure) -> None:
    async def main() -> None:
        entries = await way.discover(enclosure.port, HOST, HOST_ID)
        found = {(entry.subsystem_nqn, entry.address, entry.service) for entry in entries}
        assert (enclosure.settings.subsystem_nqn, way.address, str(enclosure.port)) in found

    trio.run(main)


@pytest.mark.parametrize("talk", [b"", b"SSH-2.0-OpenSSH_9.2p1 Debian\r\n" * 8])
def test_a_peer_that_is_no_controller(talk: bytes) -> None:
    """One that is silent, and one that speaks another protocol: an error within the time, no hang."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]

        def serve() -> None:
            peer, _ = listener.accept()
            with peer:
                peer.sendall(talk)
                while peer.recv(4096):
                    pass

        thread = threading.Thread(target=serve)
        thread.start()

        async def main() -> None:
            with pytest.raises(NvmeofError):
                async with open_controller("127.0.0.1", port, "nqn.a", HOST, HOST_ID, connect_timeout_s=0.3):
                    pass

        trio.run(main)
        thread.join(60)
        assert not thread.is_alive()


def test_nobody_listens(way: Way) -> None:
    async def main() -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            port = listener.getsockname()[1]
        with pytest.raises(ConnectionLost):
            async with way.open_controller(port, "nqn.a", HOST, HOST_ID, connect_timeout_s=0.5):
                pass

    trio.run(main)


@pytest.mark.expects_log("a controller is given up")
def test_the_keeper_connects_again_and_gives_up_in_the_end(way: Way) -> None:
    async def main() -> None:
        settings = EnclosureSettings(
            drives=1, drive_bytes=1 << 20, name="kept", transports=way.transports, address=way.address
        )
        enclosure = Enclosure(settings)
        enclosure.start()
        port = enclosure.port
        patient, impatient = (ReconnectPolicy(first_s=0.01, most_s=0.05, loss_s=s) for s in (60.0, 0.5))
        try:
            async with keep_controller(lambda: opener(way, enclosure), patient) as keeper:
                with trio.fail_after(60):
                    first = await keeper.events.receive()
                    assert isinstance(first, Connected)
                    await first.controller.perform(done(commands.identify(IdentifyCns.CONTROLLER)))

                    await keeper.reset()
                    assert isinstance(await keeper.events.receive(), Disconnected)
                    assert isinstance(await keeper.events.receive(), Connected)

                    enclosure.close()
                    assert isinstance(await keeper.events.receive(), Disconnected)
                    assert keeper.controller is None
                    enclosure = Enclosure(replace(settings, port=port))
                    enclosure.start()
                    event: object = None
                    while not isinstance(event, Connected):
                        event = await keeper.events.receive()
                    assert keeper.controller is event.controller
            async with keep_controller(lambda: opener(way, enclosure), impatient) as keeper:
                with trio.fail_after(60):
                    assert isinstance(await keeper.events.receive(), Connected)
                    enclosure.close()
                    while not isinstance(event := await keeper.events.receive(), GivenUp):
                        assert isinstance(event, Disconnected)
        finally:
            enclosure.close()

    trio.run(main)
