"""Reaching the namespaces of a pool: the sessions, the lanes of a process, and a look at what lies there."""

from __future__ import annotations

import logging
import threading
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace

import trio

from agent.attach.map_history import remembered_pool
from agent.config.configuration import Configuration, host_identity
from agent.host_os.cpu_idle import Work
from agent.pool.counters import Tally
from agent.pool.map.inspect import Inspection, inspect, with_strangers
from agent.pool.map.kv_superblock import inspect_kv
from agent.remote.channel import WorkerLanes
from agent.remote.credentials import secret_finder
from agent.remote.fabric import Enclosure, Fabric
from agent.remote.path_prober import START_SECONDS, Prover
from agent.remote.supervisor import Supervisor
from nvmeof.transport.base import NamespaceInfo

FIRST_TRY_SECONDS = 5.0
"""How long the start waits for enclosures. Those that come later join by themselves."""


log = logging.getLogger(__name__)

WITH_ALL = (
    "this is done with all of them, and nothing was changed: bring them back; for a pool that has lost one "
    "for good there is only a new format (g35 pool format --force), which costs all values and files"
)
"""What to do where a namespace of the pool is not reached."""


class LanesPool:
    """All lanes of this process, one for each queue id, and closed together."""

    def __init__(self, fabric: Fabric) -> None:
        self._fabric = fabric
        self._made: dict[int, WorkerLanes] = {}
        self._lock = threading.Lock()

    def take(self, queue_id: int) -> WorkerLanes:
        """The lanes of a queue id, for a thread to keep. Those that an earlier thread is done with go on:
        a second Connect of the same id could reach the enclosure before the end of the first."""
        with self._lock:
            lanes = self._made.get(queue_id)
            if lanes is not None:
                return lanes
            lanes = self._made[queue_id] = WorkerLanes(self._fabric, queue_id)
        lanes.connect_ahead()
        return lanes

    def tallies(self) -> Iterator[Mapping[str, Tally]]:
        """The counters of all lanes, each a copy of the table (not of the counts)."""
        for lanes in list(self._made.values()):
            yield dict(lanes.tallies)

    def work_done(self) -> Work:
        """What the volumes were asked for so far."""
        requests = transfers = moved = 0
        for each in self.tallies():
            for volume, tally in each.items():
                if volume:
                    done = tally.gets_hit + tally.puts
                    transfers += done
                    requests += done + tally.gets_missed + tally.lookups
                    moved += tally.bytes_read + tally.bytes_written
        return Work(requests, transfers, moved)

    def close(self) -> None:
        """Hang up all queues; no thread may use them any more."""
        for lanes in self._made.values():
            lanes.close()


@asynccontextmanager
async def connected(configuration: Configuration, io_queues: int) -> AsyncIterator[Supervisor]:
    """The sessions to the enclosures, for as long as the block runs; each was tried once."""
    host_nqn, host_id = host_identity(configuration.agent.state)
    verbs = configuration.fabric.choice
    supervisor = Supervisor(
        configuration.enclosures,
        host_nqn,
        host_id,
        io_queues,
        verbs,
        secret_finder(configuration.fabric),
        configuration.discovery,
    )
    if configuration.pool.membership == "auto":
        supervisor.newcomers_level = logging.INFO
    supervisor.fabric.own_pool = remembered_pool(configuration.agent.state)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(supervisor.run)
        await supervisor.all_tried(FIRST_TRY_SECONDS)
        yield supervisor
        nursery.cancel_scope.cancel()


def look_round(fabric: Fabric, lanes: WorkerLanes) -> list[tuple[bytes, int, Inspection]]:
    """Every namespace that is reachable: NGUID, bytes, what it carries. Numbers them in this order.

    Those of other pools that discovery brought are marked as strangers. Paths that discovery lists are used
    where they lead to the same medium as those that are in use.
    """
    shown: dict[bytes, list[tuple[Enclosure, NamespaceInfo]]] = {}
    for enclosure in list(fabric.enclosures):
        for namespace in enclosure.namespaces:
            shown.setdefault(namespace.nguid, []).append((enclosure, namespace))
    fabric.adopt(list(shown))
    Prover(fabric).turn(lanes, START_SECONDS)
    seen, inspections = [], []
    for number, (nguid, claims) in enumerate(shown.items()):
        route = fabric.routes[number]
        if route is not None:
            # Where two enclosures claim one, that of the other is nothing to us.
            subsystem = route.enclosure.subsystem
            claims = [each for each in claims if each[0].subsystem == subsystem] or claims
        namespace = claims[0][1]
        found = _look_at(lanes, number, namespace)
        by_discovery = all(enclosure.discovered for enclosure, _ in claims)
        seen.append((nguid, namespace.size_bytes))
        inspections.append(replace(found, by_discovery=by_discovery))
    judged = with_strangers(inspections, fabric.own_pool)
    return [(nguid, size, each) for (nguid, size), each in zip(seen, judged, strict=True)]


def _look_at(lanes: WorkerLanes, number: int, namespace: NamespaceInfo) -> Inspection:
    if namespace.kv is None:
        return lanes.run(inspect(lanes, number, namespace.nguid, namespace.size_bytes))
    found = lanes.run(inspect_kv(lanes, number, namespace.nguid))
    return replace(found, kv=namespace.kv)


def unreached(fabric: Fabric) -> str:
    """The enclosures that are not connected, and why, for an error message."""
    away = [f"{each.name} ({each.fault})" for each in fabric.enclosures if each.session is None]
    return ", ".join(away) or "none"


def say_what_is_away(fabric: Fabric) -> None:
    """A line in the log, where namespaces of the pool are not reached."""
    away = sum(route is None for route in fabric.routes)
    if away:
        log.warning(
            "%d of the pool's %d namespaces cannot be reached: their values are misses until they can",
            away,
            len(fabric.routes),
        )
