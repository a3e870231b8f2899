"""Prometheus metrics: the snapshot again, under stable names, on a loopback listener.

docs/reference/metrics.md lists them. The listener refuses any address that is not loopback: metrics
tell sizes and rates of every tenant, and who may see them is the operator's scraper on this machine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from agent.errors import ConfigError
from agent.telemetry.listen_address import parse_listen_address

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
    "bytes_copied": "Bytes that were copied once more than needed.",
}


DOOR_COUNTERS = {
    "bytes_read": "Bytes that reads through the door were answered with.",
    "bytes_written": "Bytes that writes through the door brought.",
    "bytes_copied": "Bytes copied between a buffer of the agent and the reader's or writer's memory. The "
    "kernel copies all that goes through a FUSE mount once; a virtio-fs device copies what lies scattered.",
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
    for volume in volumes:
        for cause, count in volume["miss_causes"].items():
            misses.add_metric([volume["name"], cause], count)
        slots.add_metric([volume["name"]], volume["slots"])
    yield misses
    yield slots


def _doors(doors: Mapping[str, Mapping[str, int]]) -> Iterator[Metric]:
    for field, help_text in DOOR_COUNTERS.items():
        family = CounterMetricFamily(f"g35_door_{field}", help_text, labels=["door"])
        for name, counts in doors.items():
            family.add_metric([name], counts[field])
        yield family


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
    for enclosure in enclosures:
        unproven.add_metric([enclosure["name"]], enclosure["authentication_failures"])
        up.add_metric([enclosure["name"]], float(enclosure["connected"]))
        paused.add_metric([enclosure["name"]], enclosure["namespaces_paused"])
        suspect.add_metric([enclosure["name"]], enclosure["namespaces_suspect"])
        reconnects.add_metric([enclosure["name"]], enclosure["reconnects"])
    yield from (up, paused, suspect, reconnects, unproven)


def serve(address: str, snapshot: Callable[[], Mapping[str, Any]]) -> Callable[[], None]:
    """Listen on a loopback "host:port"; a function that ends it. Raises ConfigError where that cannot be."""
    host, number = parse_listen_address(address)
    registry = CollectorRegistry()
    registry.register(Collector(snapshot))
    try:
        server, thread = start_http_server(number, host, registry)
    except OSError as error:
        raise ConfigError(f"cannot listen on {address}: {error.strerror}", "choose another port") from None

    def stop() -> None:
        server.shutdown()
        server.server_close()
        thread.join(5)

    return stop
