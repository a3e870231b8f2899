"""Prometheus metrics: the snapshot again, under stable names (docs/reference/metrics.md).

The listener refuses any address that is not loopback: metrics tell sizes and rates of every tenant.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

from prometheus_client import CollectorRegistry, make_wsgi_app
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from agent.config.listen_address import parse_listen_address
from agent.errors import ConfigError
from agent.host_os.per_user_bounds import Bounds
from agent.telemetry.listener import CONNECTIONS, Listener, with_formats_we_know

VOLUME_COUNTERS = {
    "hits": "Gets that were served.",
    "bytes_read": "Bytes of values that were served.",
    "puts": "Values that were stored.",
    "puts_already_there": "Puts of keys that were stored before.",
    "puts_refused": "Puts that were not stored.",
    "bytes_written": "Bytes of values that were stored.",
    "deletes": "Keys that were removed.",
    "evictions": "Live values that made room.",
    "evictions_expired": "Expired values that made room.",
    "lookups": "Keys asked for by exists.",
    "lookups_absent": "Keys that exists found absent; no gets, and not among the misses.",
    "directory_reads": "Directory blocks read from flash.",
    "stale_hints": "Remembered entries that led to a slot since reused.",
    "corrupt_entries": "Directory entries that were damaged.",
    "prestage_hits": "Gets served from memory.",
    "prestaged_bytes": "Bytes brought into memory ahead of a get.",
    "prestage_useful_bytes": "Of those, bytes that were served from memory at least once.",
    "prestage_wasted_bytes": "Of those, bytes that left memory without having been served.",
    "prestage_late": "Gets of what was announced or guessed and not in memory yet.",
    "prestage_late_bytes": "Bytes that were read ahead for such a get, and not kept.",
    "prestage_failed": "Keys whose read ahead failed by a bug; see the log.",
    "gets_gated": "Gets refused as late, because computing the value again is quicker; among the misses.",
    "gets_from_g4": "Gets that were served out of G4; among the hits.",
    "bytes_from_g4": "Bytes that G4 gave for those, sealed.",
    "puts_declined": "Puts taken and not stored, because their keys were new and the volume is full.",
    "puts_written_back": "Puts acknowledged before they were on flash.",
    "puts_lost": "Of those, values that could not be stored afterwards.",
    "bytes_copied": "Bytes that were copied once more than needed.",
    "copies_made": "Second copies, of a volume that keeps two.",
    "copy_bytes": "Bytes of values in second copies.",
    "hedged_reads": "Gets that asked both copies, because the first was slow.",
    "hedge_wins": "Of those, where the copy that was asked later came first.",
    "hedge_bytes": "Bytes that hedged gets asked for in addition.",
    "other_copy_reads": "Gets that the other copy served, because the first was bad, away or late.",
    "prefix_requests": "Requests of engines that connectors have reported.",
    "prefix_asked": "Blocks that these requests asked for.",
    "prefix_found": "Of those, blocks that were there.",
    "prefix_usable": "Of those, blocks before the first hole.",
    "prefix_stored": "Blocks that these requests stored.",
    "prefix_loaded": "Blocks that these requests loaded.",
    "prefix_load_ms": "Milliseconds that loading them took.",
    "prefix_saved_ms": "Milliseconds that loading saved against computing.",
    "prefix_cost_ms": "Milliseconds that loading took more than computing would have.",
}


SPILL_COUNTERS = {
    "asked": "Ranges that gets asked a place in G4 for.",
    "late": "Of those, ranges that did not come by the deadline.",
    "lost": "Of those, ranges of objects that are not there.",
    "failed": "Of those, ranges that the place refused.",
    "not_asked": "Marks that gets met and did not follow, for the answer would have come too late.",
    "bundles": "Bundles that were stored there.",
    "bytes": "Bytes of those.",
    "values": "Values in those.",
    "bundles_dropped": "Bundles that the place did not take, or has no room for.",
    "bundles_deleted": "Bundles that were deleted, for room or with their volume.",
    "returned": "Values that went back from there to flash.",
    "sets_dropped": "Sets whose next victims were not copied, because too many waited.",
}
SPILL_GAUGES = {"bytes_used": "Bytes that bundles take there, as far as is known."}

SCRUB_COUNTERS = {
    "bytes_read": "Bytes that scrub has read.",
    "slots_checked": "Slots that scrub has opened.",
    "slots_bad": "Slots that did not prove themselves, and whose entries were removed.",
    "slots_stale": "Entries that were removed because their slots held something else.",
    "slots_quarantined": "Slots that were set aside because their medium is bad.",
    "slots_young": "Slots that scrub did not look at, for a put or a get of them was a moment ago.",
    "slots_left": "Slots of files that are bad, and are left to who reads the files.",
    "copies_missing": "Values that scrub met of which no second copy could be made.",
    "sets_skipped": "Sets that scrub left out: away, under suspicion, nothing opened, or errors around.",
    "passes": "Passes over all that is stored.",
}


DOOR_COUNTERS = {
    "bytes_read": "Bytes that reads through the door were answered with.",
    "bytes_written": "Bytes that writes through the door brought.",
    "bytes_copied": "Bytes copied between a buffer of the agent and the reader's or writer's memory. The "
    "kernel copies all that goes through a FUSE mount once; a virtio-fs device copies what lies scattered.",
}

S3_TABLES = {
    "requests": ("Requests that were authenticated, by S3's name of the operation.", "operation"),
    "refusals": ("Requests that were refused, by S3's code.", "code"),
}
S3_COUNTERS = {
    "bytes_read": "Bytes of objects that were sent.",
    "bytes_written": "Bytes of objects and parts that were stored.",
    "bodies_broken_off": "Answers that ended early, because the rest of an object could not be had.",
    "rdma_bytes_read": "Of the bytes that were sent, those that went into clients' memory by RDMA.",
    "rdma_bytes_written": "Of the bytes that were stored, those that came from clients' memory by RDMA.",
    "rdma_failures": "Requests that failed because a transfer by RDMA did.",
    "connections_refused": "Connections that were closed: at the TLS handshake, or of one address too many.",
}
S3_GAUGES = {
    "connections": "Connections now.",
    "objects": "Objects of all tenants.",
    "rdma_connections": "RDMA connections of clients now.",
}

TENANT_COUNTERS = {
    "bytes_read": "Bytes of values that were served.",
    "bytes_written": "Bytes of values that were stored.",
    "quota_puts_refused": "Puts that the quota left no room for.",
    "quota_evictions": "Values of the tenant's own that made room because of its quota.",
    "bandwidth_waits": "Gets and puts that waited for bandwidth.",
    "bandwidth_late": "Gets and puts that bandwidth did not come in time for.",
}
TENANT_GAUGES = {
    "slots_known_taken": "Slots taken, as far as the agent has counted.",
    "slots_max": "Its quota of slots; 0: none.",
    "bytes_known_taken": "Bytes of those slots, headers among them.",
    "bytes_max": "Its quota of bytes; 0: none.",
    "bandwidth_max": "Bytes a second that it may move through this agent; 0: no limit.",
}


QUERY_TABLES = {
    "holes": ("Prompts that were not served whole, by the cause of the first hole.", "cause"),
    "refusals": ("Queries that were refused, by the status of HTTP.", "status"),
}
QUERY_COUNTERS = {
    "requests": "Requests of known tenants.",
    "tokens_refused": "Requests without a token of the door.",
    "over_rate": "Requests of tenants that had asked for their keys of that second.",
    "prompts": "Prompts that were answered.",
    "keys": "Keys of those.",
    "keys_in_memory": "Keys of leading runs that waited in memory.",
    "keys_on_flash": "Keys of leading runs that were on flash.",
    "keys_in_g4": "Keys of leading runs that were in G4 alone.",
    "connections_refused": "Connections that were closed: at the TLS handshake, or of one address too many.",
}
QUERY_GAUGES = {"connections": "Connections now."}

ENCLOSURE_GAUGES = {
    "up": "1 while its session stands.",
    "namespaces_paused": "Namespaces that do not answer.",
    "namespaces_suspect": "Namespaces that get no new values: slower or less true than their peers.",
}
ENCLOSURE_COUNTERS = {
    "reconnects": "Sessions that had to be made anew.",
    "authentication_failures": "Tries to connect that failed because one side could not prove itself.",
    "sent_elsewhere": "Requests that this path left unanswered and that went on by another path of its "
    "enclosure.",
}

_GAUGE, _COUNTER = GaugeMetricFamily, CounterMetricFamily
Kind: TypeAlias = type[GaugeMetricFamily] | type[CounterMetricFamily]

OF_THE_POOL: tuple[tuple[Kind, str, str, str], ...] = (
    (_GAUGE, "not_served", "not_served",
     "/fs and tenants of the S3 door whose files lie in another pool, and `processes` that this agent "
     "cannot have."),
    (_COUNTER, "upkeep_failures", "upkeep_failures",
     "Turns of upkeep's duties that failed for a reason that nobody has thought of; see the log."),
    *((_COUNTER, f"scrub_{name}", f"scrub.{name}", help) for name, help in SCRUB_COUNTERS.items()),
    (_GAUGE, "copies_owed", "scrub.copies_owed", "Second copies that are still to be made."),
    (_COUNTER, "copies_not_made", "scrub.copies_not_made",
     "Second copies that puts owed and that could not be made; a scrub makes them where it can."),
    (_GAUGE, "copies_in_doubt", "scrub.copies_in_doubt",
     "Second copies that are to be taken back as soon as their enclosure answers."),
    (_COUNTER, "flash_bytes_read", "totals.flash_bytes_read", "Bytes read from namespaces."),
    (_COUNTER, "flash_bytes_written", "totals.flash_bytes_written", "Bytes written to namespaces."),
    (_COUNTER, "local_bytes_read", "totals.local_bytes_read",
     "Of those, bytes read from devices of this machine in place."),
    (_COUNTER, "local_bytes_written", "totals.local_bytes_written",
     "Of those, bytes written to devices of this machine in place."),
    (_GAUGE, "memory_resident_bytes", "memory.resident_bytes", "Resident memory of the agent."),
    (_GAUGE, "memory_directories", "memory.directories", "Directories remembered."),
    (_GAUGE, "memory_prestaged_bytes", "memory.prestaged_bytes", "Bytes waiting in memory."),
    (_GAUGE, "memory_registered_bytes", "memory.registered_bytes",
     "Memory of clients that is mapped for them."),
    (_GAUGE, "pool_namespaces", "pool.namespaces", "Namespaces of the pool map."),
    (_GAUGE, "pool_namespaces_away", "pool.namespaces_away", "Those that cannot be reached."),
    (_GAUGE, "pool_newcomers", "pool.newcomers",
     "Namespaces that enclosures show and the pool map does not name."),
    (_GAUGE, "pool_contested", "pool.contested",
     "Namespaces of the pool that several enclosures claim, or that carry another pool, or none."),
    (_COUNTER, "pool_moved_values", "pool.moves_values", "Values moved to namespaces that joined."),
    (_COUNTER, "pool_moved_bytes", "pool.moves_bytes", "Bytes of the slots of those."),
    (_COUNTER, "pool_joins", "pool.joins", "Times that this agent let newcomers into the pool."),
    (_COUNTER, "pool_joined_namespaces", "pool.joined_namespaces", "Namespaces that it let in."),
    (_COUNTER, "pool_settles", "pool.settles", "Times that it settled the pool."),
    (_COUNTER, "pool_maps_mended", "pool.maps_mended",
     "Times that it brought copies of the pool map that differed to one map."),
    (_GAUGE, "pool_newcomers_refused", "pool.newcomers_refused",
     "Newcomers that carry something, and do not join."),
)  # fmt: skip
"""Kind, name, place in the snapshot and help. A collection counts by its length, a missing place as 0."""


PROCESS_GAUGES = {"up": "1 where a process of the agent beside the first serves gets, and is not late."}
PROCESS_COUNTERS = {
    "starts": "Times that it was started.",
    "gets": "Gets that it has served; those of the volumes have them, too.",
    "hits": "Of those, what was there.",
    "bytes_read": "Bytes of values that it has served.",
}


class Collector:
    """Turns a snapshot into metric families, whenever the registry asks for them."""

    def __init__(self, snapshot: Callable[[], Mapping[str, Any]]) -> None:
        self._snapshot = snapshot

    def collect(self) -> Iterator[Metric]:
        state = self._snapshot()
        for kind, name, place, help_text in OF_THE_POOL:
            yield kind(f"g35_{name}", help_text, value=_number_at(state, place))
        yield from _volumes(state["volumes"])
        doors = [{"name": name, **counts} for name, counts in state["doors"].items()]
        yield from _labelled("door", doors, _COUNTER, DOOR_COUNTERS)
        yield from _labelled("tenant", state["tenants"], _COUNTER, TENANT_COUNTERS)
        yield from _labelled("tenant", state["tenants"], _GAUGE, TENANT_GAUGES)
        enclosures = [{**each, "up": float(each["connected"])} for each in state["enclosures"]]
        yield from _labelled("enclosure", enclosures, _GAUGE, ENCLOSURE_GAUGES)
        yield from _labelled("enclosure", enclosures, _COUNTER, ENCLOSURE_COUNTERS)
        processes = [
            {**each, "name": str(each["number"]), "up": float(each["state"] == "serving")}
            for each in state.get("processes", ())
        ]
        yield from _labelled("process", processes, _GAUGE, PROCESS_GAUGES)
        yield from _labelled("process", processes, _COUNTER, PROCESS_COUNTERS)
        places = [_spill_row(place) for place in state["spill"]]
        yield from _labelled("spill", places, _COUNTER, SPILL_COUNTERS)
        yield from _labelled("spill", places, _GAUGE, SPILL_GAUGES)
        yield from _http_door("s3", state["s3"], S3_TABLES, S3_COUNTERS, S3_GAUGES)
        yield from _http_door("query", state["query"], QUERY_TABLES, QUERY_COUNTERS, QUERY_GAUGES)


def _spill_row(place: Mapping[str, Any]) -> dict[str, Any]:
    """A place in G4, with the sums of its volumes."""
    summed: dict[str, Any] = {**place, "name": place["place"]}
    for field in (*SPILL_COUNTERS, *SPILL_GAUGES):
        if field not in place:
            summed[field] = sum(volume[field] for volume in place["volumes"].values())
    return summed


def _number_at(state: Mapping[str, Any], place: str) -> float:
    found: Any = state
    for part in place.split("."):
        found = found.get(part) or 0 if found else 0
    return found if isinstance(found, int | float) else len(found)


def _labelled(
    label: str, rows: Sequence[Mapping[str, Any]], kind: Kind, table: Mapping[str, str]
) -> Iterator[Metric]:
    """A family for each field of a table, with a sample for each row, by its name."""
    for field, help_text in table.items():
        family = kind(f"g35_{label}_{field}", help_text, labels=[label])
        for row in rows:
            family.add_metric([row["name"]], row[field])
        yield family


def _volumes(volumes: Sequence[Mapping[str, Any]]) -> Iterator[Metric]:
    yield from _labelled("volume", volumes, _COUNTER, VOLUME_COUNTERS)
    yield from _labelled("volume", volumes, _GAUGE, {"slots": "Slots of the volume."})
    keys = [{"name": volume["name"], **volume["keys"]} for volume in volumes if volume["keys"]]
    used = "Of what its data key may seal through this agent; at 1 puts are refused."
    yield from _labelled("volume", keys, _GAUGE, {"key_used_part": used})
    resealed = "Values that were sealed anew under a new data key."
    yield from _labelled("volume", keys, _COUNTER, {"resealed": resealed})
    misses = CounterMetricFamily(
        "g35_volume_misses", "Gets that found nothing, by their one cause.", labels=["volume", "cause"]
    )
    holes = CounterMetricFamily(
        "g35_volume_prefix_holes", "First holes of reported requests, by cause.", labels=["volume", "cause"]
    )
    for volume in volumes:
        for cause, count in volume["miss_causes"].items():
            misses.add_metric([volume["name"], cause], count)
        for cause, count in volume["prefix_holes"].items():
            holes.add_metric([volume["name"], cause], count)
    yield misses
    yield holes


_Tables: TypeAlias = Mapping[str, tuple[str, str]]


def _http_door(
    name: str,
    door: Mapping[str, Any] | None,
    tables: _Tables,
    counters: Mapping[str, str],
    gauges: Mapping[str, str],
) -> Iterator[Metric]:
    """Of an agent without such a door the families have no samples."""
    for field, (help_text, label) in tables.items():
        family = CounterMetricFamily(f"g35_{name}_{field}", help_text, labels=[label])
        for each, count in door[field].items() if door is not None else ():
            family.add_metric([each], count)
        yield family
    for kind, table in ((_COUNTER, counters), (_GAUGE, gauges)):
        for field, help_text in table.items():
            yield kind(f"g35_{name}_{field}", help_text, value=None if door is None else door[field])


def listener_at(
    address: str, snapshot: Callable[[], Mapping[str, Any]], bounds: Bounds | None = None
) -> Listener:
    """The listener on a loopback "host:port", to be started. Raises ConfigError where that cannot be."""
    host, number = parse_listen_address(address)
    registry = CollectorRegistry()
    registry.register(Collector(snapshot))
    try:
        listener = Listener(host, number, with_formats_we_know(make_wsgi_app(registry)))
    except OSError as error:
        raise ConfigError(f"cannot listen on {address}: {error.strerror}", "choose another port") from None
    if bounds is not None:
        bounds.watch(CONNECTIONS, lambda: {"metrics": listener.connections})
    return listener
