"""The agent's state as one document: the source of `g35 status`, `g35 top` and the metrics.

It is made on demand from counters that the workers write without locks, so two numbers in it may be a moment
apart. Sums are made here from one reading of each worker: gets are hits plus misses.
"""

import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from agent.pool.counters import MissCause, Tally, total
from agent.pool.read.prestage_cache import PrestageCache
from agent.pool.volume.directory_cache import DirectoryCache
from agent.pool.volume.volume import PoolVolume
from agent.remote.fabric import Fabric


@dataclass(frozen=True, slots=True, kw_only=True)
class Sources:
    """Everything that a snapshot is made from."""

    pool_id: str
    map_version: Callable[[], int]
    mount: str
    door: str
    volumes: Sequence[PoolVolume]
    fabric: Fabric
    directories: DirectoryCache
    prestage: PrestageCache
    tallies: Callable[[], Iterable[Mapping[str, Tally]]]
    files: Callable[[], Mapping[str, Any] | None] = lambda: None
    doors: Callable[[], Mapping[str, Mapping[str, int]]] = dict
    """For each door by its name: bytes_read, bytes_written, bytes_copied."""
    tenants: Callable[[], Sequence[Mapping[str, Any]]] = tuple
    """For each tenant: agent/tenancy/limits.py."""
    keys: Callable[[], Mapping[str, Mapping[str, Any]]] = dict
    """By volume, what is told of its data keys: agent/tenancy/key_rotation.py."""
    gates: Callable[[], Mapping[str, Mapping[str, float | None]]] = dict
    """By volume, the figures of its recompute gate, where it has one."""
    # The following are told of the whole pool only.
    membership: Callable[[], Mapping[str, Any]] = dict
    """agent/membership/auto_join.py"""
    service: Callable[[str], Any] = lambda _: None
    """The status of a service by its name (agent/service/agent.py); None where there is none."""
    bounds: Callable[[], Sequence[Mapping[str, Any]]] = tuple
    """Counts that a stranger can raise: agent/host_os/per_user_bounds.py."""
    not_served: dict[str, str] = field(default_factory=dict)
    """The parts of the configuration that are not served, and why."""
    whole: bool = True
    """False for a tenant: counts of all tenants together (memory, traffic of the flash) are left out."""
    guest: bool = False
    """For a guest's own eyes: process ids and paths of this machine are left out."""
    started_at: float = field(default_factory=time.time)


_APART = {
    "gets_hit",
    "prefix_holes_unknown",
    "flash_bytes_read",
    "flash_bytes_written",
    "local_bytes_read",
    "local_bytes_written",
}
_COUNTED = [each.name for each in fields(Tally) if each.default == 0 and each.name not in _APART]
"""Counters of a tally that the document has under the same name."""


_IN_TOTALS = frozenset({"kv", "shared"})
"""Kinds of volumes that totals are of. Names of shared files are asked for with each lookup, absent ones too,
and blocks of /fs are never a miss: both would hide how well the cache does."""


def _counts(tally: Tally) -> dict[str, Any]:
    hits, missed = tally.gets_hit, tally.gets_missed
    return {
        "gets": hits + missed,
        "hits": hits,
        "misses": missed,
        "hit_ratio": hits / (hits + missed) if hits + missed else None,
        "miss_causes": {cause.name.lower(): tally.misses[cause] for cause in MissCause},
        "prefix_holes": {
            **{cause.name.lower(): tally.prefix_holes[cause] for cause in MissCause},
            "unknown": tally.prefix_holes_unknown,
        },
        **{name: getattr(tally, name) for name in _COUNTED},
    }


def _prestaged(prestage: PrestageCache, volume_id: bytes) -> dict[str, int]:
    counts = prestage.counts(volume_id)
    return {
        "prestage_useful_bytes": counts.useful_bytes,
        "prestage_wasted_bytes": counts.wasted_bytes,
        "prestage_late": counts.late,
        "prestage_late_bytes": counts.late_bytes,
        "prestage_failed": counts.failed,
    }


def resident_bytes() -> int:
    """Resident memory of this process, without what it only shares: memory of guests and of clients."""
    with open("/proc/self/status") as file:
        lines = [line.split() for line in file if line.startswith(("RssAnon:", "RssFile:"))]
    return sum(int(kibibytes) << 10 for _, kibibytes, _ in lines)


def take(sources: Sources) -> dict[str, Any]:
    """The snapshot, ready for JSON. Bytes and seconds are in the names."""
    readings, keys, gates = list(sources.tallies()), sources.keys(), sources.gates()
    volumes = []
    of_values = []
    for volume in sources.volumes:
        if volume.erased:
            continue
        settings = volume.settings
        own = total(reading[settings.name] for reading in readings if settings.name in reading)
        slots, taken = volume.usage()
        if settings.kind in _IN_TOTALS:
            of_values.append(own)
        volumes.append(
            {
                "name": settings.name,
                "kind": settings.kind,
                "suite": settings.suite,
                "value_bytes": settings.value_bytes,
                "slots": slots,
                "slots_seen_taken": taken,
                "keys": keys.get(settings.name),
                "gate": gates.get(settings.name),
                **_counts(own),
                **_prestaged(sources.prestage, settings.volume_id),
            }
        )
    totals = _counts(total(of_values))
    if sources.whole:
        fabric = total(reading[""] for reading in readings if "" in reading)
        totals["flash_bytes_read"] = fabric.flash_bytes_read
        totals["flash_bytes_written"] = fabric.flash_bytes_written
        totals["local_bytes_read"] = fabric.local_bytes_read
        totals["local_bytes_written"] = fabric.local_bytes_written
    return {
        **({} if sources.guest else {"pid": os.getpid()}),
        "uptime_s": time.time() - sources.started_at,
        "pool": {
            "id": sources.pool_id,
            "map_version": sources.map_version(),
            "namespaces": len(sources.fabric.nguids),
            "namespaces_away": sum(route is None for route in sources.fabric.routes),
            **(sources.membership() if sources.whole else {}),
        },
        "mount": sources.mount,
        "door": sources.door,
        "totals": totals,
        "doors": {name: dict(counts) for name, counts in sources.doors().items()},
        "volumes": volumes,
        "tenants": _tenants(sources, volumes),
        "enclosures": _enclosures(sources.fabric),
        "files": sources.files(),
        "s3": sources.service("s3") if sources.whole else None,
        "query": sources.service("query") if sources.whole else None,
        "not_served": dict(sources.not_served) if sources.whole else {},
        "memory": _memory(sources) if sources.whole else None,
        "processes": list(sources.service("readers") or []) if sources.whole else [],
        "upkeep_failures": sources.service("upkeep") or 0 if sources.whole else None,
        "scrub": dict(sources.service("keeper") or {}) if sources.whole else None,
        "spill": list(sources.service("spill") or []) if sources.whole else [],
        "bounds": list(sources.bounds()) if sources.whole else [],
    }


_SUMMED = ("hits", "misses", "bytes_read", "puts", "puts_refused", "bytes_written")


def _tenants(sources: Sources, volumes: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Each tenant of which this status shows all volumes: its use is summed over them."""
    shown = {volume["name"]: volume for volume in volumes}
    rows = []
    for tenant in sources.tenants():
        own = [shown[name] for name in tenant["volumes"] if name in shown]
        if sources.whole or (own and len(own) == len(tenant["volumes"])):
            rows.append({**tenant, **{key: sum(volume[key] for volume in own) for key in _SUMMED}})
    return rows


def _memory(sources: Sources) -> dict[str, int]:
    return {
        "resident_bytes": resident_bytes(),
        "directories": len(sources.directories),
        "directories_max": sources.directories.capacity,
        "prestaged_bytes": sources.prestage.bytes_held,
        "prestaged_bytes_max": sources.prestage.budget_bytes,
        "registered_bytes": sources.service("memory") or 0,
    }


def _enclosures(fabric: Fabric) -> list[dict[str, Any]]:
    paused: dict[int, int] = {}
    members: dict[int, int] = {}
    for route, health in zip(fabric.routes, fabric.health, strict=False):  # they grow while we look
        if route is not None:
            members[id(route.enclosure)] = members.get(id(route.enclosure), 0) + 1
            if health.is_paused:
                paused[id(route.enclosure)] = paused.get(id(route.enclosure), 0) + 1
    return [
        {
            "name": enclosure.name,
            "local": enclosure.is_local,
            "connected": enclosure.session is not None,
            "fault": "" if enclosure.session is not None else enclosure.fault,
            "reconnects": enclosure.reconnects,
            "subsystem": enclosure.subsystem,
            "access": sorted({state.name.lower() for state in enclosure.access.values()}),
            "sent_elsewhere": enclosure.sent_elsewhere,
            "authentication_failures": enclosure.authentication_failures,
            "namespaces": members.get(id(enclosure), 0),
            "namespaces_paused": paused.get(id(enclosure), 0),
            "namespaces_suspect": fabric.suspects(enclosure),
        }
        for enclosure in fabric.enclosures
    ]
