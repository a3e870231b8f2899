"""An answer that comes late to a worker which has nothing else to do there is taken all the same."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import pytest
import trio

from agent.pool.counters import MissCause
from agent.pool.late_answers import wait_for
from agent.pool.steps import Steps
from agent.remote.channel import WorkerChannel
from agent.remote.supervisor import Supervisor
from emulator.jbof.enclosure import Enclosure, EnclosureSettings
from tests.support.waiting import LATE_SESSION
from tests.system.remote.test_supervisor import DRIVES, HOST, HOST_ID, section, until

T = TypeVar("T")


def write(channel: WorkerChannel, patience: float) -> Steps[MissCause | None]:
    pending = channel.write(0, 0, [bytes(4096)])
    return (yield from wait_for(channel, pending, channel.now() + patience))


@pytest.mark.expects_log(LATE_SESSION)
def test_an_answer_that_comes_late_to_an_idle_worker_resets_nothing() -> None:
    async def main() -> None:
        with Enclosure(EnclosureSettings(**DRIVES)) as shelf, ThreadPoolExecutor(1) as worker:

            async def by_worker(work: Callable[[], T]) -> T:
                doing = worker.submit(work)
                await until(doing.done, "the worker")
                return doing.result()

            supervisor = Supervisor([section(shelf)], HOST, HOST_ID, 2)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(supervisor.run)
                await supervisor.all_tried(10)
                fabric = supervisor.fabric
                [ours] = fabric.enclosures
                await until(lambda: ours.namespaces, "its namespace")
                fabric.adopt([ours.namespaces[0].nguid])
                channel, epoch = WorkerChannel(fabric, 1), ours.epoch
                await by_worker(channel.connect_ahead)
                shelf.drive(0).set_faults(hung=True)
                assert await by_worker(lambda: channel.run(write(channel, 0.05))) is MissCause.LATE
                place = fabric.nguids[0], 0, 4096
                assert fabric.fence.stands(*place, time.monotonic())
                shelf.drive(0).set_faults(hung=False)
                shelf.target.poke()
                await until(lambda: not fabric.fence.stands(*place, time.monotonic()), "the end of the fence")
                assert ours.epoch == epoch, "the controller is healthy"
                assert await by_worker(lambda: channel.run(write(channel, 10.0))) is None
                channel.close()
                nursery.cancel_scope.cancel()

    trio.run(main)
