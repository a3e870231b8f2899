"""Asymmetric access: what a host learns of each port of an enclosure, and what its commands end with."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
import trio

from agent.remote.supervisor import Supervisor
from emulator.jbof.control import answer
from emulator.jbof.enclosure import Enclosure, EnclosureError, EnclosureSettings
from nvmeof.errors import ConnectRefused
from nvmeof.host import commands
from nvmeof.host.controller_session import Change
from nvmeof.transport.base import Address, ControllerInfo, HostQueue
from nvmeof.transport.controller import Controller
from nvmeof.transport.tcp import connect_io_queue, open_controller
from nvmeof.wire.ana import AnaState
from nvmeof.wire.status import Status
from tests.system.remote.test_supervisor import HOST, HOST_ID, section, until

TWO_PORTS = EnclosureSettings(drives=1, kv_drives=1, drive_bytes=1 << 20, ports=2)


def open_port(shelf: Enclosure, number: int) -> object:
    return open_controller("127.0.0.1", shelf.ports[number - 1], shelf.subsystem.nqn, HOST, HOST_ID)


def status_of_a_read(queue: HostQueue) -> int | None:
    command = commands.read(1, 0, 1, memoryview(bytearray(4096)))
    queue.submit(command)
    assert queue.wait(command, time.monotonic() + 10)
    return command.status


def test_each_port_reports_its_own_state() -> None:
    async def next_change(controller: Controller) -> None:
        with trio.fail_after(20):
            while await controller.events.receive() is not Change.ACCESS:
                pass

    async def main() -> None:
        with Enclosure(TWO_PORTS) as shelf:
            async with open_port(shelf, 1) as first, open_port(shelf, 2) as second:  # type: ignore[attr-defined]
                assert first.access == second.access == {1: AnaState.OPTIMIZED}
                assert [each.ana_group for each in first.namespaces()] == [1, 1]
                queue = connect_io_queue(first.info, 1, 8, 5.0)
                other = connect_io_queue(second.info, 1, 8, 5.0)
                try:
                    assert status_of_a_read(queue) == 0
                    for state, status in (
                        ("inaccessible", Status.ANA_INACCESSIBLE),
                        ("persistent-loss", Status.ANA_PERSISTENT_LOSS),
                        ("change", Status.ANA_TRANSITION),
                        ("non-optimized", Status.SUCCESS),
                    ):
                        line = f'{{"verb": "access", "number": 1, "state": "{state}"}}'
                        assert answer(shelf, line.encode()) == ({"ok": True}, False)
                        await next_change(first)
                        assert first.access[1] is AnaState[state.upper().replace("-", "_")]
                        assert status_of_a_read(queue) == status
                        assert status_of_a_read(other) == 0
                    assert second.access == {1: AnaState.OPTIMIZED}
                finally:
                    queue.close()
                    other.close()

    trio.run(main)


def test_a_queue_is_of_the_port_of_its_controller() -> None:
    async def main() -> None:
        with Enclosure(TWO_PORTS) as shelf:
            async with open_port(shelf, 1) as first:  # type: ignore[attr-defined]
                wrong: ControllerInfo = replace(first.info, address=Address("127.0.0.1", shelf.ports[1]))
                with pytest.raises(ConnectRefused):
                    connect_io_queue(wrong, 1, 8, 5.0)

    trio.run(main)


def test_an_enclosure_with_one_port_reports_nothing() -> None:
    async def main() -> None:
        with Enclosure(EnclosureSettings(drives=1, drive_bytes=1 << 20)) as shelf:
            async with open_controller("127.0.0.1", shelf.port, shelf.subsystem.nqn, HOST, HOST_ID) as only:
                assert only.access == {}
                assert only.identify.anacap == only.identify.nanagrpid == 0
            said, _ = answer(shelf, b'{"verb": "access", "number": 1, "state": "change"}')
            assert not said["ok"]
            assert not answer(shelf, b'{"verb": "port", "number": 1, "up": false}')[0]["ok"]

    trio.run(main)
    with pytest.raises(EnclosureError, match="1 to 16 ports"):
        EnclosureSettings(ports=17)
    with pytest.raises(EnclosureError, match="of TCP"):
        EnclosureSettings(ports=2, transports=("rdma",))


@pytest.mark.expects_log("not connected, and tried again")
def test_routes_follow_the_paths() -> None:
    async def main() -> None:
        with Enclosure(TWO_PORTS) as shelf:
            paths = (f"127.0.0.1:{shelf.ports[1]}",)
            supervisor = Supervisor([section(shelf).model_copy(update={"paths": paths})], HOST, HOST_ID, 2)
            fabric = supervisor.fabric
            async with trio.open_nursery() as nursery:
                nursery.start_soon(supervisor.run)
                await supervisor.all_tried(10)
                fabric.adopt([drive.nguid for drive in shelf.drives])

                def ways() -> list[list[str]]:
                    return [[way.enclosure.name for way in each] for each in fabric.ways]

                await until(lambda: ways() == [["shelf", "shelf#2"]] * 2, "two ways")
                assert all(enclosure.has_other_paths for enclosure in fabric.enclosures)
                assert fabric.strays == {}
                shelf.set_access(1, AnaState.NON_OPTIMIZED)
                await until(lambda: ways() == [["shelf#2", "shelf"]] * 2, "the optimized one first")
                shelf.set_access(2, AnaState.INACCESSIBLE)
                await until(lambda: ways() == [["shelf"]] * 2, "the one that serves")
                shelf.set_access(1, AnaState.INACCESSIBLE)
                await until(lambda: fabric.routes == (None, None), "no way")
                shelf.set_access(2, AnaState.OPTIMIZED)
                await until(lambda: ways() == [["shelf#2"]] * 2, "the second")
                shelf.set_port_up(2, False)
                await until(lambda: ways() == [[]] * 2, "no way again")
                nursery.cancel_scope.cancel()

    trio.run(main)
