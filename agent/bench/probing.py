"""From a name of the catalog to the probe that measures it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from agent.bench.catalog import Entry
from agent.bench.floors import AesProbe, FuseMemoryProbe, RawTcpProbe
from agent.bench.peer_probes import PeerProbe
from agent.bench.pool_probes import GetProbe, LatencyProbe, PutProbe, shape_for
from agent.bench.prestage_probes import PrestagedProbe
from agent.bench.redis_probes import RedisGetProbe, RedisPutProbe
from agent.bench.roce_probes import RoceProbe
from agent.bench.rounds import Probe
from agent.bench.sites import Sites
from agent.bench.virtiofs_probes import MOUNT, VIRTIOFS, CpuProbe, FileCpuProbe, VirtiofsProbe


def _peer(peer: str, verb: str) -> Callable[[Sites, Entry], Probe]:
    return lambda sites, entry: PeerProbe(sites, peer, verb, entry.value_bytes, entry.in_flight)


PROBES: Mapping[str, Callable[[Sites, Entry], Probe]] = {
    "raw_tcp": lambda sites, entry: RawTcpProbe(sites, entry.value_bytes),
    "fuse_memory": lambda sites, entry: FuseMemoryProbe(sites, entry.value_bytes),
    "aes": lambda sites, entry: AesProbe(entry.value_bytes),
    "kv_get": lambda sites, entry: GetProbe(sites, shape_for(entry.value_bytes, entry.door, entry.transport)),
    "kv_get_single": lambda sites, entry: GetProbe(sites, shape_for(entry.value_bytes), batch=1),
    "kv_put": lambda sites, entry: PutProbe(sites, shape_for(entry.value_bytes, entry.door)),
    "kv_get_p50": lambda sites, entry: LatencyProbe(sites, shape_for(entry.value_bytes)),
    "kv_get_asleep_p50": lambda sites, entry: LatencyProbe(
        sites, replace(shape_for(entry.value_bytes), stay_awake="never")
    ),
    "roce": lambda sites, entry: RoceProbe(entry.name, entry.unit),
    "virtiofs_get": lambda sites, entry: VirtiofsProbe(sites, entry.value_bytes, "get"),
    "virtiofs_put": lambda sites, entry: VirtiofsProbe(sites, entry.value_bytes, "put"),
    "host_cpu_mount": lambda sites, entry: CpuProbe(sites, entry.value_bytes, MOUNT),
    "host_cpu_virtiofs": lambda sites, entry: CpuProbe(sites, entry.value_bytes, VIRTIOFS),
    "host_cpu_file": lambda sites, entry: FileCpuProbe(sites, entry.value_bytes),
    "redis_get": lambda sites, entry: RedisGetProbe(sites, entry.value_bytes, tls=entry.tls),
    "redis_put": lambda sites, entry: RedisPutProbe(sites, entry.value_bytes, tls=entry.tls),
    "redis_get_p50": lambda sites, entry: RedisGetProbe(
        sites, entry.value_bytes, tls=entry.tls, clients=1, median_only=True
    ),
    "kv_get_in_flight": lambda sites, entry: GetProbe(
        sites, shape_for(entry.value_bytes), batch=1, in_flight=entry.in_flight, registered=True
    ),
    "kv_put_in_flight": lambda sites, entry: PutProbe(
        sites, shape_for(entry.value_bytes), batch=1, in_flight=entry.in_flight, registered=True
    ),
    "prestaged_get_in_flight": lambda sites, entry: PrestagedProbe(
        sites, shape_for(entry.value_bytes), entry.in_flight
    ),
    "redis_get_in_flight": lambda sites, entry: RedisGetProbe(
        sites, entry.value_bytes, tls=entry.tls, clients=entry.in_flight
    ),
    "redis_put_in_flight": lambda sites, entry: RedisPutProbe(
        sites, entry.value_bytes, tls=entry.tls, clients=entry.in_flight
    ),
    **{
        f"{peer}_{verb}_in_flight": _peer(peer, verb)
        for peer in ("mooncake", "lm")
        for verb in ("get", "put")
    },
}
"""By `Entry.kind`; what is not here is counted once (single_probes.py)."""


def probe_for(entry: Entry, sites: Sites) -> Probe:
    return PROBES[entry.kind](sites, entry)
