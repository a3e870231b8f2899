"""Discovery controllers that stay connected: real sockets, our enclosure, one that goes and comes back."""

from __future__ import annotations

import logging
import shutil
import threading
from collections.abc import Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trio

from agent.attach.inspect_namespaces import look_round
from agent.config.configuration import DiscoverySection, EnclosureSection
from agent.pool.map.inspect import Inspection
from agent.remote.channel import WorkerChannel
from agent.remote.fabric import Fabric
from agent.remote.supervisor import Supervisor
from emulator.jbof.enclosure import Enclosure, EnclosureSettings
from nvmeof.controller.subsystem import Subsystem
from nvmeof.errors import NvmeofError
from nvmeof.transport.discovery import PIECE_BYTES, follow_discovery
from nvmeof.transport.reconnect import ReconnectPolicy
from nvmeof.transport.tcp import open_controller
from nvmeof.wire.fabrics import DISCOVERY_NQN
from nvmeof.wire.log_page import DISCOVERY_ENTRY, DiscoveryEntry
from tests.support.nvme.nvme_ends import HOST, HOST_ID
from tests.support.waiting import LATE_SESSION

DRIVES = {"drives": 1, "drive_bytes": 1 << 20}


async def until(condition: Callable[[], object], what: str) -> None:
    with trio.move_on_after(60):
        while not condition():  # noqa: ASYNC110 - polled: the enclosure knows no trio
            await trio.sleep(0.01)
        return
    raise AssertionError(f"not within 60 s: {what}")


class Heard:
    """What a follower was told."""

    def __init__(self) -> None:
        self.logs: list[Sequence[DiscoveryEntry]] = []
        self.faults = 0

    def listed(self, entries: Sequence[DiscoveryEntry]) -> None:
        self.logs.append(entries)

    def unreachable(self, error: NvmeofError | None) -> None:
        self.faults += 1

    def names(self) -> set[str]:
        return {entry.subsystem_nqn for entry in self.logs[-1]} if self.logs else set()


def test_every_change_of_the_log_is_heard_over_one_connection() -> None:
    """Subsystems and ports come and go, more than one command brings; then the controller itself goes."""
    heard = Heard()

    async def main() -> None:
        with Enclosure(EnclosureSettings(**DRIVES)) as shelf:
            port, own = shelf.port, shelf.settings.subsystem_nqn

            def opener():  # type: ignore[no-untyped-def]
                return open_controller("127.0.0.1", port, DISCOVERY_NQN, HOST, HOST_ID, keep_alive_s=60.0)

            async with trio.open_nursery() as nursery:
                nursery.start_soon(
                    follow_discovery,
                    opener,
                    heard.listed,
                    heard.unreachable,
                    ReconnectPolicy(first_s=0.05, most_s=0.1),
                )
                await until(lambda: heard.names() == {own}, "the first log")
                many = PIECE_BYTES // DISCOVERY_ENTRY.size + 3
                shelf.target.add_port(DiscoveryEntry("127.0.0.1", "4776"))
                for number in range(many):
                    shelf.target.add_subsystem(Subsystem(f"nqn.x:{number}", serial="s"))
                await until(lambda: len(heard.names()) == many + 1, "all")
                shelf.target.remove_subsystem("nqn.x:7")
                await until(lambda: "nqn.x:7" not in heard.names(), "one less")
                extra = DiscoveryEntry("127.0.0.1", "4777")
                shelf.target.add_port(extra)
                await until(lambda: any(e.service == "4777" for e in heard.logs[-1]), "the port")
                shelf.target.remove_port(extra)
                await until(lambda: all(e.service != "4777" for e in heard.logs[-1]), "no port")
                assert heard.faults == 0
                assert shelf.stats()["connections_accepted"] == 1
                told = len(heard.logs)
                for controller in shelf.target.controllers:
                    with shelf.target.lock:
                        controller.end("the test says so")
                await until(lambda: heard.faults and len(heard.logs) > told, "it came back")
                nursery.cancel_scope.cancel()

    trio.run(main)


def test_a_controller_that_tells_nothing_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nvmeof.transport.discovery.ASK_ANYWAY_S", 0.05)
    heard = Heard()

    async def main() -> None:
        with Enclosure(EnclosureSettings(**DRIVES)) as shelf:

            @asynccontextmanager
            async def opener():  # type: ignore[no-untyped-def]
                async with open_controller(
                    "127.0.0.1", shelf.port, DISCOVERY_NQN, HOST, HOST_ID, keep_alive_s=60.0
                ) as controller:
                    object.__setattr__(controller.identify, "oaes", 0)
                    for each in shelf.target.controllers:
                        each.discovery_changed = lambda: None  # type: ignore[method-assign]
                    yield controller

            async with trio.open_nursery() as nursery:
                nursery.start_soon(
                    follow_discovery, opener, heard.listed, heard.unreachable, ReconnectPolicy()
                )
                await until(lambda: heard.logs, "the first log")
                shelf.target.add_port(DiscoveryEntry("127.0.0.1", "4776"))
                shelf.target.add_subsystem(Subsystem("nqn.x:silent", serial="s"))
                await until(lambda: "nqn.x:silent" in heard.names(), "it was asked")
                nursery.cancel_scope.cancel()

    trio.run(main)


@pytest.mark.expects_log("it is not used", "left out", LATE_SESSION)
def test_a_copy_of_a_shelf_that_discovery_lists_displaces_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Somebody copies the folder of a shelf and starts it elsewhere; then the original goes and comes back.
    The copy's drives are of no pool that counts either."""

    async def main() -> None:
        with Enclosure(EnclosureSettings(name="own", folder=tmp_path / "own", **DRIVES)) as own:
            [drive] = own.drives
            shutil.copytree(tmp_path / "own", tmp_path / "copy", ignore=shutil.ignore_patterns("*.lock"))
            discovery = DiscoverySection(name="pod", address="127.0.0.1", port=own.port)
            named = EnclosureSection(
                name="own", address="127.0.0.1", port=own.port, nqn=own.settings.subsystem_nqn
            )
            supervisor = Supervisor([named], HOST, HOST_ID, 2, discovery=[discovery])
            fabric = supervisor.fabric

            def used() -> list[str]:
                return [way.enclosure.name for way in fabric.ways[0]]

            async with trio.open_nursery() as nursery:
                nursery.start_soon(supervisor.run)
                await supervisor.all_tried(10)
                fabric.adopt([drive.nguid])
                with Enclosure(EnclosureSettings(name="copy", folder=tmp_path / "copy", **DRIVES)) as copy:
                    assert copy.drives[0].nguid == drive.nguid
                    nqn = copy.settings.subsystem_nqn
                    own.target.add_subsystem(Subsystem(nqn, serial="s"))
                    own.target.add_port(DiscoveryEntry("127.0.0.1", str(copy.port), subsystem_nqn=nqn))
                    await until(lambda: fabric.contested, "the copy is seen")
                    assert used() == ["own"]
                    await until(lambda: "left out" in caplog.text, "the log says so")
                    found: list[tuple[bytes, int, Inspection]] = []
                    thread = threading.Thread(target=lambda: found.extend(looked_round(fabric)))
                    thread.start()
                    await until(lambda: not thread.is_alive(), "the look round")
                    assert [(size, each.by_discovery) for _, size, each in found] == [(1 << 20, False)]
                    own_session, fabric.enclosures[0].session = fabric.enclosures[0].session, None
                    fabric.refresh()
                    assert used() == []
                    fabric.enclosures[0].session = own_session
                    fabric.refresh()
                    assert used() == ["own"]
                nursery.cancel_scope.cancel()

    trio.run(main)


def looked_round(fabric: Fabric) -> list[tuple[bytes, int, Inspection]]:
    channel = WorkerChannel(fabric, 1)
    try:
        return look_round(fabric, channel)
    finally:
        channel.close()


@pytest.mark.expects_log("not connected, and tried again", "are not in the pool", "are shown by no enclosure")
def test_enclosures_by_discovery_come_go_and_come_back(caplog: pytest.LogCaptureFixture) -> None:
    """One discovery controller lists another enclosure beside its own. What is away stays until it is listed
    no longer; what is listed no longer stays while it is connected."""
    caplog.set_level(logging.INFO)

    async def main() -> None:
        with Enclosure(EnclosureSettings(name="one", **DRIVES)) as one:
            discovery = DiscoverySection(name="lab", address="127.0.0.1", port=one.port)
            named = EnclosureSection(
                name="byname", address="127.0.0.1", port=one.port, nqn=one.settings.subsystem_nqn
            )
            supervisor = Supervisor([named], HOST, HOST_ID, 2, discovery=[discovery])
            fabric = supervisor.fabric
            async with trio.open_nursery() as nursery:
                nursery.start_soon(supervisor.run)
                await supervisor.all_tried(10)
                # The one in the configuration is not taken twice.
                assert [each.name for each in fabric.enclosures] == ["byname"]
                with Enclosure(EnclosureSettings(name="two", **DRIVES)) as two:
                    nguid = two.drives[0].nguid
                    fabric.adopt([nguid])
                    nqn = two.settings.subsystem_nqn
                    one.target.add_subsystem(Subsystem(nqn, serial="s"))
                    there = DiscoveryEntry("127.0.0.1", str(two.port), subsystem_nqn=nqn)
                    one.target.add_port(there)
                    await until(lambda: fabric.routes[0] is not None, "a route to the discovered enclosure")
                    one.target.remove_port(there)
                    await trio.sleep(0.3)
                    # Nobody lists it any more, and it works.
                    assert fabric.routes[0] is not None
                    assert len(fabric.enclosures) == 2
                await until(lambda: fabric.routes[0] is None, "it is away")
                await until(lambda: len(fabric.enclosures) == 1, "only the one of the configuration")
                assert len(supervisor.discovered) == 0
                nursery.cancel_scope.cancel()

    trio.run(main)
    assert any("found by discovery" in line and "tcp at 127.0.0.1" in line for line in caplog.messages)
    assert any("is listed no longer" in line for line in caplog.messages)
