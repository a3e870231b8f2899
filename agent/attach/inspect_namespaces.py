"""The superblocks and the pool map on the namespaces that are reached."""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Final

from agent.errors import G35Error
from agent.pool.map.document import PoolMap
from agent.pool.map.inspect import Inspection, inspect, newest_map, with_strangers
from agent.pool.map.kv_superblock import inspect_kv
from agent.pool.map.map_seal import MapSeal
from agent.pool.map.superblock import MAP_IO_SECONDS, Head
from agent.pool.steps import IoChannel, Steps
from agent.pool.volume.side_by_side import Part, Parts
from agent.remote.channel import WorkerChannel
from agent.remote.enclosure import Enclosure
from agent.remote.fabric import Fabric
from agent.remote.path_prober import START_SECONDS, PathProber
from nvmeof.host.namespaces import NamespaceInfo

WITH_ALL = (
    "this is done with all of them, and nothing was changed: bring them back; for a pool that has lost one "
    "for good there is only a new format (g35 pool format --force), which costs all values and files"
)
"""What to do where a namespace of the pool is not reached."""
LOOK_ROUND_SECONDS: Final = 10.0
"""For the look of an agent that starts. What an enclosure that hangs carries is seen later, by
agent/attach/map_watch.py."""
LOOKS_IN_FLIGHT: Final = 4
"""Namespaces of one enclosure that are looked at together: a mebibyte each, which may be eight commands."""


def look_round(
    fabric: Fabric, channel: WorkerChannel, seconds: float = math.inf
) -> list[tuple[bytes, int, Inspection]]:
    """Every reachable namespace: NGUID, bytes, content. The channel numbers them in this order.

    Namespaces of other pools that discovery brought are marked as strangers. A path that discovery lists is
    used where it leads to the same medium as a path in use. `seconds`: what has not been read by then counts
    as unreadable.
    """
    shown: dict[bytes, list[tuple[Enclosure, NamespaceInfo]]] = {}
    for enclosure in list(fabric.enclosures):
        for namespace in enclosure.namespaces:
            shown.setdefault(namespace.nguid, []).append((enclosure, namespace))
    fabric.adopt(list(shown), is_pool=False)
    PathProber(fabric).turn(channel, START_SECONDS)
    seen, by_discovery = [], []
    wanted: dict[str, list[tuple[int, NamespaceInfo]]] = {}
    for number, (nguid, claims) in enumerate(shown.items()):
        route = fabric.routes[number]
        if route is not None:
            # Where two enclosures claim one, that of the other is nothing to us.
            subsystem = route.enclosure.subsystem
            claims = [each for each in claims if each[0].subsystem == subsystem] or claims
        enclosure, namespace = claims[0]
        seen.append((nguid, namespace.size_bytes))
        by_discovery.append(all(each.discovered for each, _ in claims))
        wanted.setdefault(enclosure.subsystem, []).append((number, namespace))
    found = channel.run(look_at_all(channel, list(wanted.values()), channel.now() + seconds))
    inspections = [
        replace(found[number], by_discovery=discovered) for number, discovered in enumerate(by_discovery)
    ]
    judged = with_strangers(inspections, fabric.own_pool)
    return [(nguid, size, each) for (nguid, size), each in zip(seen, judged, strict=True)]


def find_pool(fabric: Fabric, channel: WorkerChannel, seal: MapSeal) -> tuple[PoolMap, dict[int, str]]:
    """The map in force, and the namespaces of it, by their numbers there, that carry another pool."""
    seen = look_round(fabric, channel, LOOK_ROUND_SECONDS)
    if not seen:
        raise G35Error(
            f"no enclosure shows a namespace; not connected: {unreached(fabric)}",
            "check addresses, ports and NQNs, and that the enclosures allow this host",
        )
    pool_map = newest_map([inspection for _, _, inspection in seen], seal)
    carried = {nguid.hex(): each.superblock.pool_map.pool_id for nguid, _, each in seen if each.superblock}
    others = {number: carried.get(each.nguid, "") for number, each in enumerate(pool_map.namespaces)}
    return pool_map, {
        number: other for number, other in others.items() if other not in ("", pool_map.pool_id)
    }


def look_at_all(
    channel: IoChannel, wanted: Sequence[Sequence[tuple[int, NamespaceInfo]]], deadline: float
) -> Steps[dict[int, Inspection]]:
    """The content of each namespace, by its number. `wanted` has them by enclosure.

    Some of each are looked at together, and an enclosure that does not answer holds up no other."""
    known: dict[Head, PoolMap] = {}
    found: dict[int, Inspection] = {}

    def look_at(those: Iterator[tuple[int, NamespaceInfo]]) -> Part:
        for number, namespace in those:
            found[number] = yield from _look_at(channel, number, namespace, deadline, known)

    parts = Parts(channel)
    try:
        for of_enclosure in wanted:
            those = iter(of_enclosure)
            for number, _ in of_enclosure[:LOOKS_IN_FLIGHT]:
                parts.start(number, look_at(those))
        while len(parts):
            yield from parts.go_on(may_grow=False)
    finally:
        parts.close()
    return found


def _look_at(
    channel: IoChannel,
    number: int,
    namespace: NamespaceInfo,
    deadline: float,
    known: dict[Head, PoolMap],
) -> Steps[Inspection]:
    if namespace.kv is None:
        return (yield from inspect(channel, number, namespace.nguid, namespace.size_bytes, deadline, known))
    seconds = min(MAP_IO_SECONDS, max(0.0, deadline - channel.now()))
    found = yield from inspect_kv(channel, number, namespace.nguid, seconds, known)
    return replace(found, kv=namespace.kv)


def want_all(pool_map: PoolMap, seen: Iterable[tuple[bytes, int, Inspection]], fabric: Fabric) -> None:
    """Raises G35Error where a namespace of the pool is not among those that are reached."""
    missing = {each.nguid for each in pool_map.namespaces} - {nguid.hex() for nguid, _, _ in seen}
    if missing:
        raise G35Error(
            f"{len(missing)} of the pool's {len(pool_map.namespaces)} namespaces are not reached; "
            f"not connected: {unreached(fabric)}",
            WITH_ALL,
        )


def unreached(fabric: Fabric) -> str:
    """The enclosures that are not connected, and why, for an error message."""
    away = []
    for each in fabric.enclosures:
        if each.session is None:
            why = f"{each.taken}, and by its export: {each.fault}" if each.taken else each.fault
            away.append(f"{each.name} ({why})")
    return ", ".join(away) or "none"
