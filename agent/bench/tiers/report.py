"""What a play says: a table for people, a record for programs, and where its numbers contradict others."""

import json
import os
import platform
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from rich.table import Table

from agent.bench.tiers.play import Played, Results
from agent.cli.tables import folding_table
from agent.host_os.whole_file import write_whole
from agent.replay.latencies import Latencies
from agent.replay.tally import Cause
from agent.sizes import readable_bytes

LINKS: Final[Mapping[str, str]] = {
    "to_host": "agent to host",
    "from_host": "host to agent",
    "from_enclosures": "enclosures to agent",
    "to_enclosures": "agent to enclosures",
    "from_local": "local device to agent",
    "to_local": "agent to local device",
    "from_g4": "G4 to agent",
    "to_g4": "agent to G4",
}
"""Names of the bytes in `Links`, and in words."""


def record(results: Results) -> dict[str, Any]:
    """For `--json`. Bytes, and milliseconds and microseconds where the name says so."""
    workload = results.workload
    return {
        "taken_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": machine(),
        "trace": workload.trace.name,
        "requests": results.requests,
        "requests_wanted": results.requests_wanted,
        "seconds": round(results.seconds, 1),
        "broken_lines": results.broken_lines,
        "distinct_blocks": results.blocks,
        "block_bytes": workload.value_bytes,
        "lru_hit_ratio": round(results.lru.hit_ratio, 6),
        "lru_blocks": results.lru.capacity,
        "ways": [_record(played) for played in results.ways],
    }


def machine() -> dict[str, Any]:
    """What the figures were taken on."""
    return {
        "processors": len(os.sched_getaffinity(0)),
        "processor": _processor(),
        "kernel": platform.release(),
        "python": platform.python_version(),
    }


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _record(played: Played) -> dict[str, Any]:
    tally, links = played.tally, played.links
    operations = max(1, tally.hits + tally.puts)

    def each(seconds: float) -> float:
        return round(seconds * 1e6 / operations, 1)

    return {
        "way": played.way.name,
        "what": played.way.what,
        "room_blocks": played.room,
        "flash_bytes": played.flash_bytes,
        "hit_ratio": round(tally.hits / max(1, tally.blocks), 6),
        "blocks": tally.blocks,
        "gets": tally.hits,
        "puts": tally.puts,
        "puts_refused": tally.puts_refused,
        "wrong_bytes": tally.wrong_bytes,
        "miss_causes": {str(cause): tally.misses[cause] for cause in Cause},
        "bytes": {name: getattr(links, name) for name in LINKS},
        "drive_commands": links.drive_commands,
        "lookup_p50_ms": _milliseconds(played.lookup_latencies, 0.5),
        "lookup_p99_ms": _milliseconds(played.lookup_latencies, 0.99),
        "get_p50_ms": _milliseconds(tally.get_latencies, 0.5),
        "get_p99_ms": _milliseconds(tally.get_latencies, 0.99),
        "put_p50_ms": _milliseconds(tally.put_latencies, 0.5),
        "put_p99_ms": _milliseconds(tally.put_latencies, 0.99),
        "host_us": each(played.host_seconds),
        "agent_us": each(played.busy.agent),
        "enclosure_us": each(played.busy.enclosure),
        "idle_agent_percent": round(100 * played.idle_share, 2),
    }


def _milliseconds(latencies: Latencies, share: float) -> float | None:
    seconds = latencies.quantile(share)
    return None if seconds is None else round(1e3 * seconds, 4)


Row = tuple[str, Callable[[Mapping[str, Any]], str]]


def _pair(name: str) -> Callable[[Mapping[str, Any]], str]:
    def cell(way: Mapping[str, Any]) -> str:
        found = [way[f"{name}_{share}_ms"] for share in ("p50", "p99")]
        return "-" if None in found else " / ".join(f"{value:.2f}" for value in found)

    return cell


def _link(name: str) -> Callable[[Mapping[str, Any]], str]:
    return lambda way: readable_bytes(way["bytes"][name]) if way["bytes"][name] else "-"


ROWS: Final[Sequence[Row]] = (
    ("room, blocks", lambda way: f"{way['room_blocks']:,}"),
    ("flash that this takes", lambda way: readable_bytes(way["flash_bytes"])),
    ("hit ratio", lambda way: f"{way['hit_ratio']:.3f}"),
    ("gets that were served", lambda way: f"{way['gets']:,}"),
    ("puts, of them refused", lambda way: f"{way['puts']:,}, {way['puts_refused']:,}"),
    *((words, _link(name)) for name, words in LINKS.items()),
    (
        "drive commands, a get or put",
        lambda way: f"{way['drive_commands'] / max(1, way['gets'] + way['puts']):.2f}",
    ),
    ("look-up of a prompt, p50 / p99 ms", _pair("lookup")),
    ("get, p50 / p99 ms", _pair("get")),
    ("put, p50 / p99 ms", _pair("put")),
    ("host's processor time, us a get or put", lambda way: f"{way['host_us']:,.0f}"),
    ("agent's", lambda way: f"{way['agent_us']:,.0f}"),
    ("enclosure's", lambda way: f"{way['enclosure_us']:,.0f}"),
    ("idle agent, % of a processor", lambda way: f"{way['idle_agent_percent']:.1f}"),
)


def table(found: Mapping[str, Any]) -> Table:
    """A row for each figure, a column for each way, out of a record."""
    made = folding_table("g35 bench --tiers", ("",), [way["way"] for way in found["ways"]])
    for words, cell in ROWS:
        made.add_row(words, *(cell(way) for way in found["ways"]))
    return made


def notes(found: Mapping[str, Any]) -> list[str]:
    """What the table does not say by itself, in sentences."""
    on, size = found["machine"], readable_bytes(found["block_bytes"])
    played = f"{found['requests']:,} requests of {found['trace']}"
    if found["requests"] < found["requests_wanted"]:
        played += f" (of {found['requests_wanted']:,}: the time was over)"
    if found["broken_lines"]:
        played += f" ({found['broken_lines']:,} broken lines skipped)"
    return [
        f"{found['taken_at'][:10]}, {on['processors']} processors ({on['processor']}), Linux {on['kernel']}, "
        f"Python {on['python']}.",
        f"{played}, {found['distinct_blocks']:,} distinct blocks of {size}, one request at a time. An LRU of "
        f"{found['lru_blocks']:,} blocks: {found['lru_hit_ratio']:.3f}.",
        *(f"{way['way']}: {way['what']}." for way in found["ways"]),
        "Drives and the local device are memory of this machine, and G4 is a folder on its disk: times are "
        "what software takes, with no flash and no network in them.",
    ]


def write(path: Path, found: Mapping[str, Any]) -> None:
    write_whole(path, json.dumps(found, indent=1) + "\n")


def contradictions(results: Results) -> list[str]:
    """Why the play counts as failed, in sentences; empty where all numbers agree."""
    return [f"{played.way.name}: {line}" for played in results.ways for line in _contradictions(played)]


def _contradictions(played: Played) -> list[str]:
    tally, links, way, found = played.tally, played.links, played.way, []
    if tally.wrong_bytes:
        found.append(f"{tally.wrong_bytes} wrong bytes were served, in {tally.wrong_blocks} blocks")
    if tally.hits + tally.misses.total() != tally.blocks:
        found.append("the causes of misses do not add up to the misses")
    if tally.misses[Cause.AGENT_DOWN]:
        found.append("the agent did not answer")
    got, put = tally.bytes_read, tally.bytes_written
    there = played.volume["puts_already_there"] * (put // max(1, tally.puts - tally.puts_refused))
    if played.volume["bytes_read"] != got:
        found.append(f"{got} bytes were got, the agent counts {played.volume['bytes_read']}")
    if played.volume["bytes_written"] + there < put:
        found.append(f"{put} bytes were put, the agent counts {played.volume['bytes_written']}")
    below = links.from_enclosures + links.from_local + links.from_g4
    kept = links.to_enclosures + links.to_local
    for what, least, counted in (
        ("to the host", got, links.to_host),
        ("from the host", put, links.from_host),
        ("from flash and G4", got, below),
        ("to flash", put - there + played.volume["copy_bytes"], kept),
    ):
        if counted < least:
            found.append(f"{counted} bytes went {what}, fewer than the {least} of the values")
    if not way.local_first and links.from_local + links.to_local:
        found.append("a local device moved bytes, and the way has none")
    if links.to_g4 > played.g4_bytes:
        found.append(f"{links.to_g4} bytes went to G4, and {played.g4_bytes} lie there")
    return found
