"""The superblocks and the pool map on the namespaces that are reached."""

from collections.abc import Iterable
from dataclasses import replace

from agent.errors import G35Error
from agent.pool.map.document import PoolMap
from agent.pool.map.inspect import Inspection, inspect, newest_map, with_strangers
from agent.pool.map.kv_superblock import inspect_kv
from agent.pool.map.map_seal import MapSeal
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


def look_round(fabric: Fabric, channel: WorkerChannel) -> list[tuple[bytes, int, Inspection]]:
    """Every reachable namespace: NGUID, bytes, content. The channel numbers them in this order.

    Namespaces of other pools that discovery brought are marked as strangers. A path that discovery lists is
    used where it leads to the same medium as a path in use.
    """
    shown: dict[bytes, list[tuple[Enclosure, NamespaceInfo]]] = {}
    for enclosure in list(fabric.enclosures):
        for namespace in enclosure.namespaces:
            shown.setdefault(namespace.nguid, []).append((enclosure, namespace))
    fabric.adopt(list(shown))
    PathProber(fabric).turn(channel, START_SECONDS)
    seen, inspections = [], []
    for number, (nguid, claims) in enumerate(shown.items()):
        route = fabric.routes[number]
        if route is not None:
            # Where two enclosures claim one, that of the other is nothing to us.
            subsystem = route.enclosure.subsystem
            claims = [each for each in claims if each[0].subsystem == subsystem] or claims
        namespace = claims[0][1]
        found = _look_at(channel, number, namespace)
        by_discovery = all(enclosure.discovered for enclosure, _ in claims)
        seen.append((nguid, namespace.size_bytes))
        inspections.append(replace(found, by_discovery=by_discovery))
    judged = with_strangers(inspections, fabric.own_pool)
    return [(nguid, size, each) for (nguid, size), each in zip(seen, judged, strict=True)]


def find_pool(fabric: Fabric, channel: WorkerChannel, seal: MapSeal) -> tuple[PoolMap, dict[int, str]]:
    """The map in force, and the namespaces of it, by their numbers there, that carry another pool."""
    seen = look_round(fabric, channel)
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


def _look_at(channel: WorkerChannel, number: int, namespace: NamespaceInfo) -> Inspection:
    if namespace.kv is None:
        return channel.run(inspect(channel, number, namespace.nguid, namespace.size_bytes))
    found = channel.run(inspect_kv(channel, number, namespace.nguid))
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
    away = [f"{each.name} ({each.fault})" for each in fabric.enclosures if each.session is None]
    return ", ".join(away) or "none"
