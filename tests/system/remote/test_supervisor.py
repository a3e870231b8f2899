"""Sessions to a real enclosure that refuses us, grants less than we ask for, or leaves a write unanswered."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

import pytest
import trio

from agent.config.configuration import EnclosureSection
from agent.remote.fence import COMMAND_SECONDS, GivenUp
from agent.remote.supervisor import Supervisor
from agent.service.queue_plan import EXTRA_QUEUES, granted_workers
from emulator.jbof.enclosure import Enclosure, EnclosureSettings
from nvmeof.controller.settings import ControllerSettings
from nvmeof.host import commands
from tests.support.waiting import LATE_SESSION

pytestmark = pytest.mark.expects_log(LATE_SESSION)

HOST, HOST_ID = "nqn.2026-01.io.g35:tester", b"tester-host-id-0"
DRIVES = {"drives": 1, "drive_bytes": 1 << 20}


def section(enclosure: Enclosure) -> EnclosureSection:
    return EnclosureSection(
        name="shelf", address="127.0.0.1", port=enclosure.port, nqn=enclosure.settings.subsystem_nqn
    )


async def until(condition: Callable[[], object], what: str) -> None:
    with trio.move_on_after(60):
        while not condition():  # noqa: ASYNC110 - polled: workers and the enclosure know no trio
            await trio.sleep(0.01)
        return
    raise AssertionError(f"not within 60 s: {what}")


@pytest.mark.expects_log("not connected, and tried again")
def test_an_enclosure_that_refused_us_is_found_once_it_lets_us_in(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        with Enclosure(EnclosureSettings(allowed_hosts=frozenset({"nqn.somebody:else"}), **DRIVES)) as shelf:
            supervisor = Supervisor([section(shelf)], HOST, HOST_ID, 2)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(supervisor.run)
                await supervisor.all_tried(10)
                [ours] = supervisor.fabric.enclosures
                # The second and the third try say nothing new.
                await until(lambda: shelf.stats()["connections_accepted"] >= 3, "three tries")
                assert ours.session is None
                assert "refused" in ours.fault.lower() or "host" in ours.fault.lower()
                shelf.subsystem.allowed_hosts = None
                await until(lambda: ours.session is not None, "the session")
                nursery.cancel_scope.cancel()

    trio.run(main)
    told = [line for line in caplog.messages if "not connected, and tried again" in line]
    assert len(told) == 1


@pytest.mark.expects_log("was taken away")
def test_a_namespace_that_an_enclosure_takes_away_is_said(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)

    async def main() -> None:
        with Enclosure(EnclosureSettings(drives=2, drive_bytes=1 << 20)) as shelf:
            supervisor = Supervisor([section(shelf)], HOST, HOST_ID, 2)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(supervisor.run)
                await supervisor.all_tried(10)
                [ours] = supervisor.fabric.enclosures
                await until(lambda: len(ours.namespaces) == 2, "both")
                shelf.remove_drive(0)
                await until(lambda: len(ours.namespaces) == 1, "a namespace less")
                shelf.add_drive(0)
                await until(lambda: len(ours.namespaces) == 2, "both again")
                nursery.cancel_scope.cancel()

    trio.run(main)
    told = [line for line in caplog.messages if "namespace 1 (" in line]
    assert ["was taken away" in told[0], "is new" in told[1], len(told)] == [True, True, 2]


@pytest.mark.expects_log("grants 5 I/O queues")
def test_the_workers_are_as_many_as_the_poorest_enclosure_has_queues_for(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def told() -> list[str]:
        return [line for line in caplog.messages if "grants 5 I/O queues" in line]

    async def main() -> None:
        settings = EnclosureSettings(controller=ControllerSettings(max_io_queues=5), **DRIVES)
        with Enclosure(settings) as shelf:
            supervisor = Supervisor([section(shelf)], HOST, HOST_ID, 4 + EXTRA_QUEUES)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(supervisor.run)
                await until(lambda: supervisor.fabric.enclosures[0].session is not None, "the session")
                assert granted_workers(supervisor.fabric, 4) == 5 - EXTRA_QUEUES
                assert len(told()) == 1
                assert granted_workers(supervisor.fabric, 1) == 1
                assert len(told()) == 1
                # One that joins, or comes back, while more are in use is named as well.
                supervisor.queues_in_use = 4 + EXTRA_QUEUES
                epoch = supervisor.fabric.enclosures[0].epoch
                supervisor.fabric.enclosures[0].complain(epoch)
                await until(lambda: len(told()) == 2, "the second line")
                nursery.cancel_scope.cancel()

    caplog.set_level(logging.WARNING)
    trio.run(main)
    assert "of the 8 that are needed" in told()[0]
    assert "of the 8 in use" in told()[1]


def test_a_session_ends_for_a_write_that_nobody_looks_after() -> None:
    """The worker that gave it up has nothing more to ask of the enclosure."""

    async def main() -> None:
        with Enclosure(EnclosureSettings(**DRIVES)) as shelf:
            supervisor = Supervisor([section(shelf)], HOST, HOST_ID, 2)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(supervisor.run)
                await supervisor.all_tried(10)
                [ours] = supervisor.fabric.enclosures
                await until(lambda: ours.session is not None, "the session")
                fence, write, epoch = supervisor.fabric.fence, commands.flush(1), ours.epoch
                write.submitted_at = time.monotonic() - COMMAND_SECONDS + 0.2
                fence.put_up(bytes(16), 0, 4096, 0.0, time.monotonic(), GivenUp([write], ours, epoch))
                await until(lambda: ours.epoch > epoch and ours.session is not None, "another session")
                assert fence.stands(bytes(16), 0, 4096, time.monotonic()), "it may have been under way"
                nursery.cancel_scope.cancel()

    trio.run(main)


@pytest.mark.expects_log("shown by no enclosure that this agent knows")
def test_namespaces_of_the_pool_that_nobody_shows_are_named_once(caplog: pytest.LogCaptureFixture) -> None:
    def told() -> list[str]:
        return [line for line in caplog.messages if "shown by no enclosure" in line]

    async def main() -> None:
        with Enclosure(EnclosureSettings(**DRIVES)) as shelf:
            supervisor = Supervisor([section(shelf)], HOST, HOST_ID, 2)
            fabric = supervisor.fabric
            async with trio.open_nursery() as nursery:
                nursery.start_soon(supervisor.run)
                await supervisor.all_tried(10)
                await until(lambda: fabric.enclosures[0].namespaces, "its namespaces")
                shown = [each.nguid for each in fabric.enclosures[0].namespaces]
                fabric.adopt([*shown, b"\xee" * 16])
                await until(told, "the line")
                # Two more looks say nothing new.
                fabric.grow([*shown, b"\xee" * 16, b"\xdd" * 16])
                await until(lambda: len(told()) == 2, "the line of the other")
                nursery.cancel_scope.cancel()

    caplog.set_level(logging.WARNING)
    trio.run(main)
    assert "ee" * 16 in told()[0]
    assert "ee" * 16 not in told()[1]
