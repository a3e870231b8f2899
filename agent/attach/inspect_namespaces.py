"""What the namespaces that are reached carry: superblocks and the pool map."""

from __future__ import annotations

from dataclasses import replace

from agent.pool.map.inspect import Inspection, inspect, with_strangers
from agent.pool.map.kv_superblock import inspect_kv
from agent.remote.channel import WorkerLanes
from agent.remote.enclosure import Enclosure
from agent.remote.fabric import Fabric
from agent.remote.path_prober import START_SECONDS, PathProber
from nvmeof.transport.base import NamespaceInfo

WITH_ALL = (
    "this is done with all of them, and nothing was changed: bring them back; for a pool that has lost one "
    "for good there is only a new format (g35 pool format --force), which costs all values and files"
)
"""What to do where a namespace of the pool is not reached."""


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
    PathProber(fabric).turn(lanes, START_SECONDS)
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
