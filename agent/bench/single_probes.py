"""Numbers that are counted once rather than timed in rounds: bytes written, memory, hits of a trace."""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agent.bench.contents import Contents
from agent.bench.pool_probes import GetProbe, PutProbe, puts_at_a_time, shape_for
from agent.bench.sites import PoolShape, PoolSite, Sites
from agent.claims.hit_curve import SpillingPoolCache, share_of_blocks
from agent.claims.trace import read_trace
from agent.errors import G35Error, UserError
from agent.inline.secrets import SecretKey
from agent.pool.format.directory import SLOTS_PER_SET
from agent.pool.map.document import DATA_START, set_size
from agent.replay.replay_options import ReplayOptions
from agent.replay.run_replay import run_replay
from agent.replay.trace_lines import TraceFile, block_tokens_of
from host_shim.block_key import key_of

QUIET_SECONDS = 1.5
QUIET_TIMEOUT_SECONDS = 30.0
IDLE_WORK_SECONDS = 1.0
"""Work that an agent gets whose memory alone was asked for."""
TRACE_VALUE_BYTES = 64 << 10
TRACE_DRIVES = 2
PLACEMENT = SecretKey(bytes(range(32)))
"""Where blocks lie in what is only computed; any key does."""
BUNDLED_TRACE = Path(__file__).parent.parent / "replay" / "sample_trace.jsonl"


@dataclass(frozen=True, slots=True)
class Counted:
    """A number and the keys with which it can be checked."""

    value: float
    details: dict[str, Any]


def write_amplification(sites: Sites) -> Counted:
    """Bytes that the enclosure's drives were told to write, over bytes of values, at 1 MiB."""
    value_bytes = 1 << 20
    site = sites.pool(shape_for(value_bytes))
    contents = Contents(value_bytes)
    keys = [key_of(f"amplified {number}") for number in range(puts_at_a_time(value_bytes))]
    before = _quiet_written(site)
    for number, key in enumerate(keys):
        if not site.volume.put(key, contents.value(number)):
            raise G35Error("the agent refused a put into a volume that is a third full at most")
    written = _quiet_written(site) - before
    values = value_bytes * len(keys)
    site.bytes_put += values
    site.volume.delete(keys)
    return Counted(written / values, {"bytes_written": written, "bytes_of_values": values, "puts": len(keys)})


def _quiet_written(site: PoolSite) -> int:
    """Bytes written so far, once nothing more has been written for a while: directories may follow late."""
    end = time.monotonic() + QUIET_TIMEOUT_SECONDS
    seen = _written(site)
    while True:
        time.sleep(QUIET_SECONDS)
        now = _written(site)
        if now == seen:
            return now
        if time.monotonic() > end:
            raise G35Error("the drives are written to without end, though nobody stores anything")
        seen = now


def _written(site: PoolSite) -> int:
    return sum(drive["write_bytes"] for drive in site.drive_counters())


def agent_rss(sites: Sites) -> Counted:
    """Resident memory of the agents that have served the names before; the largest, in MiB."""
    if not sites.pools:
        shape = shape_for(1 << 20)
        for probe in (GetProbe(sites, shape), PutProbe(sites, shape)):
            probe.prepare()
            probe.round(IDLE_WORK_SECONDS)
    each = {
        site.mount.parent.name: round(site.status()["memory"]["resident_bytes"] / (1 << 20), 1)
        for shape, site in sites.pools.items()
        if shape.door == "fuse"
    }
    return Counted(max(each.values()), {"agents": each})


def trace_hits(sites: Sites, trace: Path | None, requests: int) -> dict[str, Counted]:
    """`hit_ratio` of the trace's first requests, with room for a quarter of their blocks, and
    `lru_hit_ratio`: that of a fully associative LRU of the same number of blocks."""
    path = trace or BUNDLED_TRACE
    blocks = unique_blocks(path, requests)
    sets = max(1, round(blocks / 4 / SLOTS_PER_SET / TRACE_DRIVES))
    drive_bytes = DATA_START + sets * set_size(TRACE_VALUE_BYTES)
    site = sites.pool(PoolShape(TRACE_VALUE_BYTES, drive_bytes, TRACE_DRIVES))
    slots = site.counters()["slots"]
    record = replay_record(site, path, requests)
    if record["lru_hit_ratio"] is None or record["lru_blocks"] != slots:
        raise G35Error(f"the LRU was given {record['lru_blocks']} blocks, the volume has {slots}")
    details = {key: record[key] for key in ("requests", "blocks", "wrong_bytes", "get_p50_ms", "miss_causes")}
    details |= {"trace": path.name, "unique_blocks": blocks, "slots": slots}
    return {
        "hit_ratio": Counted(record["hit_ratio"], details),
        "lru_hit_ratio": Counted(record["lru_hit_ratio"], {"slots": slots}),
        "hit_ratio_with_g4": _hits_with_g4(path, requests, slots),
    }


def _hits_with_g4(path: Path, requests: int, slots: int) -> Counted:
    """As the pool's directories have it with a place in G4 below (docs/tiers.md)."""
    trace = read_trace(path, requests=requests)
    cache = SpillingPoolCache(slots, trace, PLACEMENT, all_values=True)
    found = share_of_blocks(cache, trace)
    return Counted(found, {"slots": cache.slots, "copied": cache.copied, "from_g4": cache.from_below})


def replay_record(site: PoolSite, path: Path, requests: int, **options: Any) -> dict[str, Any]:
    """The record of a replay with blocks of TRACE_VALUE_BYTES. Raises G35Error where it failed."""
    tokens = TRACE_VALUE_BYTES // block_tokens_of(path)
    report = run_replay(
        ReplayOptions(
            path, site.mount, requests=requests, bytes_per_token=tokens, json_output=True, **options
        )
    )
    if report.troubles():
        raise G35Error(f"the replay of {path.name} failed: {'; '.join(report.troubles())}")
    return report.record()


def unique_blocks(path: Path, requests: int) -> int:
    """Distinct blocks of a trace's first requests. Raises UserError where there is none."""
    seen: set[int] = set()
    for request in TraceFile(path, False, requests):
        seen.update(request.hash_ids)
    if not seen:
        raise UserError(f"{path} has no request that can be played", "name a trace in Mooncake's format")
    return len(seen)
