"""Prometheus metrics: the snapshot again, under stable names, on a loopback listener.

docs/reference/metrics.md lists them. The listener refuses any address that is not loopback: metrics
tell sizes and rates of every tenant, and who may see them is the operator's scraper on this machine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, make_wsgi_app
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from agent.errors import ConfigError
from agent.host_os.bounds import Bounds
from agent.telemetry.formats import with_formats_we_know
from agent.telemetry.listen_address import parse_listen_address
from agent.telemetry.listener import CONNECTIONS, Listener

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
    "gets_gated": "Gets refused as late, because computing the value again is quicker; among the misses.",
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
}


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


AUTO_MEMBERSHIP = {
    "joins": "Times that this agent let newcomers into the pool.",
    "joined_namespaces": "Namespaces that it let in.",
    "settles": "Times that it settled the pool.",
    "maps_mended": "Times that it brought copies of the pool map that differed to one map.",
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
    "connections_refused": "Connections that were closed: at the TLS handshake, or of one address too many.",
}
S3_GAUGES = {"connections": "Connections now.", "objects": "Objects of all tenants."}

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


class Collector:
    """Turns a snapshot into metric families, whenever the registry asks for them."""

    def __init__(self, snapshot: Callable[[], Mapping[str, Any]]) -> None:
        self._snapshot = snapshot

    def collect(self) -> Iterator[Metric]:
        state = self._snapshot()
        yield from _volumes(state["volumes"])
        yield from _enclosures(state["enclosures"])
        yield from _doors(state["doors"])
        yield from _tenants(state["tenants"])
        yield from _membership(state["pool"])
        yield from _s3(state["s3"])
        yield GaugeMetricFamily(
            "g35_not_served",
            "/fs and tenants of the S3 door that are not served, for their files lie in another pool.",
            value=len(state["not_served"]),
        )
        yield CounterMetricFamily(
            "g35_upkeep_failures",
            "Turns of upkeep's duties that failed for a reason that nobody has thought of; see the log.",
            value=state.get("upkeep_failures") or 0,
        )
        for name, help_text in SCRUB_COUNTERS.items():
            yield CounterMetricFamily(f"g35_scrub_{name}", help_text, value=state["scrub"].get(name, 0))
        owed = state["scrub"].get("copies_owed", 0)
        yield GaugeMetricFamily("g35_copies_owed", "Second copies that are still to be made.", value=owed)
        yield CounterMetricFamily(
            "g35_copies_not_made",
            "Second copies that puts owed and that could not be made; a scrub makes them where it can.",
            value=state["scrub"].get("copies_not_made", 0),
        )
        doubted = state["scrub"].get("copies_in_doubt", 0)
        yield GaugeMetricFamily(
            "g35_copies_in_doubt",
            "Second copies that are to be taken back as soon as their enclosure answers.",
            value=doubted,
        )
        totals, memory = state["totals"], state["memory"]
        for name, help_text in (
            ("flash_bytes_read", "Bytes read from namespaces."),
            ("flash_bytes_written", "Bytes written to namespaces."),
        ):
            yield CounterMetricFamily(f"g35_{name}", help_text, value=totals[name])
        for name, help_text in (
            ("resident_bytes", "Resident memory of the agent."),
            ("directories", "Directories remembered."),
            ("prestaged_bytes", "Bytes waiting in memory."),
            ("registered_bytes", "Memory of clients that is mapped for them."),
        ):
            yield GaugeMetricFamily(f"g35_memory_{name}", help_text, value=memory[name])


def _volumes(volumes: list[Mapping[str, Any]]) -> Iterator[Metric]:
    for field, help_text in VOLUME_COUNTERS.items():
        family = CounterMetricFamily(f"g35_volume_{field}", help_text, labels=["volume"])
        for volume in volumes:
            family.add_metric([volume["name"]], volume[field])
        yield family
    misses = CounterMetricFamily(
        "g35_volume_misses", "Gets that found nothing, by their one cause.", labels=["volume", "cause"]
    )
    slots = GaugeMetricFamily("g35_volume_slots", "Slots of the volume.", labels=["volume"])
    used = GaugeMetricFamily(
        "g35_volume_key_used_part",
        "Of what its data key may seal through this agent; at 1 puts are refused.",
        labels=["volume"],
    )
    resealed = CounterMetricFamily(
        "g35_volume_resealed", "Values that were sealed anew under a new data key.", labels=["volume"]
    )
    for volume in volumes:
        for cause, count in volume["miss_causes"].items():
            misses.add_metric([volume["name"], cause], count)
        slots.add_metric([volume["name"]], volume["slots"])
        if keys := volume["keys"]:
            used.add_metric([volume["name"]], keys["key_used_part"])
            resealed.add_metric([volume["name"]], keys["resealed"])
    yield misses
    yield from (slots, used, resealed)


def _doors(doors: Mapping[str, Mapping[str, int]]) -> Iterator[Metric]:
    for field, help_text in DOOR_COUNTERS.items():
        family = CounterMetricFamily(f"g35_door_{field}", help_text, labels=["door"])
        for name, counts in doors.items():
            family.add_metric([name], counts[field])
        yield family


def _tenants(tenants: list[Mapping[str, Any]]) -> Iterator[Metric]:
    for kind, table in ((CounterMetricFamily, TENANT_COUNTERS), (GaugeMetricFamily, TENANT_GAUGES)):
        for field, help_text in table.items():
            family = kind(f"g35_tenant_{field}", help_text, labels=["tenant"])
            for tenant in tenants:
                family.add_metric([tenant["name"]], tenant[field])
            yield family


def _s3(door: Mapping[str, Any] | None) -> Iterator[Metric]:
    """Of an agent without such a door the families have no samples."""
    for field, (help_text, label) in S3_TABLES.items():
        family = CounterMetricFamily(f"g35_s3_{field}", help_text, labels=[label])
        for name, count in door[field].items() if door is not None else ():
            family.add_metric([name], count)
        yield family
    for kind, table in ((CounterMetricFamily, S3_COUNTERS), (GaugeMetricFamily, S3_GAUGES)):
        for field, help_text in table.items():
            yield kind(f"g35_s3_{field}", help_text, value=None if door is None else door[field])


def _membership(pool: Mapping[str, Any]) -> Iterator[Metric]:
    newcomers = len(pool.get("newcomers", ()))
    yield GaugeMetricFamily("g35_pool_namespaces", "Namespaces of the pool map.", value=pool["namespaces"])
    yield GaugeMetricFamily(
        "g35_pool_namespaces_away", "Those that cannot be reached.", value=pool["namespaces_away"]
    )
    yield GaugeMetricFamily(
        "g35_pool_newcomers",
        "Namespaces that enclosures show and the pool map does not name.",
        value=newcomers,
    )
    yield GaugeMetricFamily(
        "g35_pool_contested",
        "Namespaces of the pool that several enclosures claim, or that carry another pool, or none.",
        value=len(pool.get("contested", ())),
    )
    yield CounterMetricFamily(
        "g35_pool_moved_values", "Values moved to namespaces that joined.", value=pool.get("moves_values", 0)
    )
    yield CounterMetricFamily(
        "g35_pool_moved_bytes", "Bytes of the slots of those.", value=pool.get("moves_bytes", 0)
    )
    for field, help_text in AUTO_MEMBERSHIP.items():
        yield CounterMetricFamily(f"g35_pool_{field}", help_text, value=pool.get(field, 0))
    refused = len(pool.get("newcomers_refused", ()))
    yield GaugeMetricFamily(
        "g35_pool_newcomers_refused", "Newcomers that carry something, and do not join.", value=refused
    )


def _enclosures(enclosures: list[Mapping[str, Any]]) -> Iterator[Metric]:
    up = GaugeMetricFamily("g35_enclosure_up", "1 while its session stands.", labels=["enclosure"])
    paused = GaugeMetricFamily(
        "g35_enclosure_namespaces_paused", "Namespaces that do not answer.", labels=["enclosure"]
    )
    suspect = GaugeMetricFamily(
        "g35_enclosure_namespaces_suspect",
        "Namespaces that get no new values: slower or less true than their peers.",
        labels=["enclosure"],
    )
    reconnects = CounterMetricFamily(
        "g35_enclosure_reconnects", "Sessions that had to be made anew.", labels=["enclosure"]
    )
    unproven = CounterMetricFamily(
        "g35_enclosure_authentication_failures",
        "Tries to connect that failed because one side could not prove itself.",
        labels=["enclosure"],
    )
    elsewhere = CounterMetricFamily(
        "g35_enclosure_sent_elsewhere",
        "Requests that this path left unanswered and that went on by another path of its enclosure.",
        labels=["enclosure"],
    )
    for enclosure in enclosures:
        elsewhere.add_metric([enclosure["name"]], enclosure["sent_elsewhere"])
        unproven.add_metric([enclosure["name"]], enclosure["authentication_failures"])
        up.add_metric([enclosure["name"]], float(enclosure["connected"]))
        paused.add_metric([enclosure["name"]], enclosure["namespaces_paused"])
        suspect.add_metric([enclosure["name"]], enclosure["namespaces_suspect"])
        reconnects.add_metric([enclosure["name"]], enclosure["reconnects"])
    yield from (up, paused, suspect, reconnects, unproven, elsewhere)


def serve(
    address: str, snapshot: Callable[[], Mapping[str, Any]], bounds: Bounds | None = None
) -> Callable[[], None]:
    """Listen on a loopback "host:port"; a function that ends it. Raises ConfigError where that cannot be."""
    host, number = parse_listen_address(address)
    registry = CollectorRegistry()
    registry.register(Collector(snapshot))
    try:
        listener = Listener(host, number, with_formats_we_know(make_wsgi_app(registry)))
    except OSError as error:
        raise ConfigError(f"cannot listen on {address}: {error.strerror}", "choose another port") from None
    if bounds is not None:
        bounds.watch(CONNECTIONS, lambda: {"metrics": listener.connections})
    listener.start()
    return listener.stop
