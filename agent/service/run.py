"""Serve a pool from the first connection to the last unmount.

`serve` is the program. It brings up the sessions to the enclosures, finds the pool map, makes the agent and
starts its services in their order; it takes all of them down in the opposite order. Nothing that matters is
kept in memory, so every shutdown may be interrupted."""

import logging
from collections.abc import Callable
from contextlib import AsyncExitStack

import trio

from agent.attach.connect import connected, say_what_is_away
from agent.attach.inspect_namespaces import find_pool
from agent.attach.map_history import map_seal
from agent.config.configuration import Configuration
from agent.errors import G35Error
from agent.fs.doors.mounting import MountError
from agent.host_os.cpu_idle import keep_awake
from agent.host_os.presence import set_mark
from agent.host_os.ticks import next_tick
from agent.inline.secrets import root_key_in
from agent.remote.channel_pool import ChannelPool
from agent.service.agent import Agent
from agent.service.doors import MOUNT_DOOR, Doors
from agent.service.queue_plan import QueuePlan, granted_workers, spare_queues

log = logging.getLogger(__name__)

LOOK_SECONDS = 0.25
"""How soon an unmount by somebody else is noticed."""


async def serve(configuration: Configuration, ready: Callable[[], None], stop: trio.Event) -> None:
    """Serve the mount until `stop` is set or somebody unmounts it; `ready` is called once it is up."""
    root = root_key_in(configuration.agent.key_file)
    wanted = QueuePlan.of(configuration)
    async with (
        connected(configuration, wanted.total, serve=True) as supervisor,
        AsyncExitStack() as cleanup,
    ):
        fabric = supervisor.fabric
        workers = granted_workers(fabric, len(wanted.workers), wanted.extra)
        spare = spare_queues(fabric, workers + wanted.extra, len(wanted.slots))
        queues = QueuePlan.of(configuration, workers, spare)
        supervisor.queues_in_use = queues.total
        settings = configuration.agent.model_copy(update={"workers": workers})
        configuration = configuration.model_copy(update={"agent": settings})
        channels = ChannelPool(fabric)
        cleanup.callback(channels.close)
        seal = map_seal(root, settings.state)
        first = channels.take(queues.workers.start)
        pool_map, others = await trio.to_thread.run_sync(find_pool, fabric, first, seal)
        cleanup.callback(set_mark(pool_map.pool_id).close)
        fabric.adopt([bytes.fromhex(namespace.nguid) for namespace in pool_map.namespaces])
        say_what_is_away(fabric)
        agent = await trio.to_thread.run_sync(
            Agent, configuration, pool_map, root, seal, fabric, channels, queues, others
        )
        for service in agent.services.values():
            try:
                await trio.to_thread.run_sync(service.start)
            except MountError as error:
                raise G35Error(f"cannot mount at {settings.mount}: {error}", "see g35 doctor") from None
            cleanup.push_async_callback(_on_thread, service.stop)
        ready()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(keep_awake, settings.stay_awake, channels.work_done)
            await _until_over(agent.doors, stop)
            nursery.cancel_scope.cancel()


async def _on_thread(end: Callable[[], None]) -> None:
    """Run an end on a thread, to its end: the sessions must be kept alive for as long as it takes."""
    with trio.CancelScope(shield=True):
        await trio.to_thread.run_sync(end)


async def _until_over(doors: Doors, stop: trio.Event) -> None:
    """Until `stop`, an unmount, or the end of the last door. The end of a guest's device is that guest's loss
    alone."""
    served = dict(doors)
    while not stop.is_set():
        for name, door in list(served.items()):
            if door.wait(0.0):
                del served[name]
                if name == MOUNT_DOOR or not served:
                    log.info(
                        "the door %s is served no longer: somebody has unmounted the pool, or see above", name
                    )
                    return
                log.error(
                    "the door %s is served no longer; the others are. Restart the agent to have it back", name
                )
        with trio.move_on_at(next_tick(LOOK_SECONDS)):
            await stop.wait()
