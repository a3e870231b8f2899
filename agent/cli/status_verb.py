"""`g35 status` and `g35 top`: what the agent says of itself, once or live."""

import json
import time
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from agent.cli.record_options import AsJson
from agent.cli.standard_output import reader_has_left
from agent.cli.status_document import read_status
from agent.cli.tables import folding_table, print_tables
from agent.cli.top_screen import REST_LINES_LEAST, Scroll, fitted, follow_keys, typed_keys
from agent.cli.up.folder_trouble import told_of_owner
from agent.cli.up.interrupts import ended_by_signals
from agent.cli.up.layout import Layout, default_state
from agent.errors import G35Error
from agent.sizes import counted, readable_bytes, readable_seconds

NAMED_MAX = 8
"""Namespaces of a kind that are shown; all are in the JSON."""

State = Annotated[
    Path | None,
    typer.Option(readable=False, help="The state folder that g35 up was given; the same default."),
]
# Without a parser Click would look at it, and wait for ever for an agent that hangs.
Mount = Annotated[
    Path | None,
    typer.Option(
        parser=Path, metavar="<path>", help="Where the agent is mounted, instead of a state folder."
    ),
]


def status(
    state: State = None,
    mount: Mount = None,
    as_json: AsJson = False,
    bounds: Annotated[
        bool,
        typer.Option("--bounds", help="Show instead the counts that others can raise, and their limits."),
    ] = False,
) -> None:
    """Show pool, volumes, enclosures, hit ratio, miss causes and throughput since the agent's start."""
    found = read_status(_mount(state, mount))
    if as_json:
        print(json.dumps(found["bounds"] if bounds else found, indent=1))
        return
    print_tables(bounds_tables(found["bounds"]) if bounds else tables(found, None))


def top(
    state: State = None,
    mount: Mount = None,
    every: Annotated[float, typer.Option(min=0.1, max=60.0, help="Seconds between looks.")] = 1.0,
    times: Annotated[int, typer.Option(min=0, help="Looks before it ends; 0: until q or Ctrl-C.")] = 0,
) -> None:
    """Show the status live, with the rates of the last interval.

    The health of the pool stays on the screen. Arrows, space, b, g and G scroll the rest; q or Ctrl-C ends.
    """
    where = _mount(state, mount)
    earlier = read_status(where)
    console = Console()
    if times == 0 and console.is_terminal:
        with ended_by_signals():
            _on_screen(where, every, console, earlier)
        return
    live = None
    if console.is_terminal:  # elsewhere, Live would print the last look once more
        live = Live(tables(earlier, None), console=console, refresh_per_second=4)
    looks = 0
    with live or nullcontext(), suppress(KeyboardInterrupt):
        while (not times or looks < times) and not reader_has_left():
            time.sleep(every)
            now = read_status(where)
            if live is None:
                print_tables(tables(now, earlier))
            else:
                live.update(tables(now, earlier))
            earlier = now
            looks += 1


def _on_screen(where: Path, every: float, console: Console, earlier: dict[str, Any]) -> None:
    """Show the status on the whole screen until Ctrl-C, or q."""
    scroll = Scroll()
    page: tuple[dict[str, Any], dict[str, Any] | None] = (earlier, None)
    with typed_keys() as keys, Live(console=console, screen=True, auto_refresh=False) as live:

        def redraw() -> None:
            now, before = page
            rest = Group(*_traffic(now, before), *_room(now))
            whole = fitted(health_that_fits(now, console), rest, console, scroll, has_keys=keys is not None)
            live.update(whole, refresh=True)

        with suppress(KeyboardInterrupt):
            while True:
                redraw()
                if keys is None:
                    time.sleep(every)
                elif follow_keys(keys, scroll, redraw, every):
                    return
                page = (read_status(where), page[0])


def _mount(state: Path | None, mount: Path | None) -> Path:
    if mount is not None:
        return mount
    layout = Layout((state or default_state()).absolute())
    with told_of_owner(layout.state):
        running = layout.running()
    if running is None:
        if left := layout.mounts_left():
            return left[0]  # reading there tells of a dead mount, and of its cure
        raise G35Error(f"no pool is up in {layout.state}", "bring one up (g35 up), or give --mount")
    return Path(running.mount)


def tables(found: dict[str, Any], earlier: dict[str, Any] | None) -> Group:
    """The snapshot for people, health first; with an `earlier` one, rates between the two."""
    return Group(*_health(found), *_traffic(found, earlier), *_room(found))


def health_that_fits(found: dict[str, Any], console: Console) -> Group:
    """The health, with fewer enclosures that are well where the screen has no room for all."""
    most = max(1, console.height - 1 - REST_LINES_LEAST)
    rows = len(found["enclosures"])
    while True:
        shown = Group(*_health(found, rows))
        excess = len(console.render_lines(shown, console.options, pad=False)) - most
        if excess <= 0 or rows <= 1:
            return shown
        rows -= max(1, min(excess, rows // 2))


def _is_well(enclosure: dict[str, Any]) -> bool:
    return enclosure["connected"] and not (enclosure["namespaces_paused"] or enclosure["namespaces_suspect"])


def _health(found: dict[str, Any], rows: int | None = None) -> list[RenderableType]:
    """What an operator has to know first: what is away, what is not served, what waits for somebody.

    `rows`: of so many enclosures, those first that are not well; a line counts the others.
    """
    pool = found["pool"]
    there = pool["namespaces"]
    reached = f"{there - pool['namespaces_away']} of {counted(there, 'namespace')} reached"
    up = readable_seconds(found["uptime_s"])
    # A line of its own for each: ids and paths are longer than half a terminal.
    lines = [f"{reached}; the agent is up for {up}"]
    lines += [f"not served: {what}: {why}" for what, why in sorted(found["not_served"].items())]
    lines += [
        f"process {each['number']}: {each['state']}, {counted(each['gets'], 'get')}, started "
        f"{counted(each['starts'], 'time')}"
        for each in found.get("processes", ())
    ]
    lines += [f"pool    {pool['id']}", f"mount   {found['mount']}"]
    columns = ("namespaces", "paused", "suspect", "reconnects")
    enclosures = folding_table("Enclosures", ("enclosure", "state"), columns)
    every = found["enclosures"]
    listed = every if rows is None or rows >= len(every) else sorted(every, key=_is_well)[:rows]
    for each in listed:
        enclosures.add_row(
            each["name"], escape(_state(each)), str(each["namespaces"]), str(each["namespaces_paused"]),
            str(each["namespaces_suspect"]), str(each["reconnects"]),
        )  # fmt: skip
    shown: list[RenderableType] = [Text("\n".join(lines), overflow="fold"), enclosures]
    if more := len(every) - len(listed):
        unwell = sum(not _is_well(each) for each in every) - sum(not _is_well(each) for each in listed)
        shown.append(Text(f"{counted(more, 'enclosure')} more, {unwell} of them away, paused or suspect"))
    return [*shown, *_members(pool)]


def _traffic(found: dict[str, Any], earlier: dict[str, Any] | None) -> list[RenderableType]:
    """Rates, hits, and the causes of misses."""
    seconds = found["uptime_s"] - (earlier["uptime_s"] if earlier else 0.0)
    totals, before = found["totals"], earlier["totals"] if earlier else {}

    def rate(key: str) -> str:
        return f"{(totals[key] - before.get(key, 0)) / max(seconds, 1e-9) / 2**20:.1f} MiB/s"

    lines = [
        f"read {rate('bytes_read')}, written {rate('bytes_written')}, resident {_resident(found['memory'])}",
        f"hits: {_percent(totals['hit_ratio'])} of {totals['gets']} gets; misses: "
        f"{_causes(totals['miss_causes'])}",
        f"looked up by exists: {totals['lookups']} keys, {totals['lookups_absent']} absent",
    ]
    volumes = folding_table("Volumes: traffic", ("volume",), ("gets", "hits", "puts", "evicted"))
    for volume in found["volumes"]:
        volumes.add_row(
            volume["name"], str(volume["gets"]), _percent(volume["hit_ratio"]), str(volume["puts"]),
            str(volume["evictions"]),
        )  # fmt: skip
    prefixes = _prefixes([each for each in found["volumes"] if each["prefix_requests"]])
    ahead = _prestaged([each for each in found["volumes"] if each["prestaged_bytes"]])
    return [Text("\n".join(lines), overflow="fold"), volumes, *prefixes, *ahead]


def _room(found: dict[str, Any]) -> list[RenderableType]:
    """What volumes and tenants have and may have, and the door of S3-shaped clients."""
    volumes = folding_table("Volumes: room", ("volume", "kind", "suite"), ("slots", "taken (seen)"))
    for volume in found["volumes"]:
        volumes.add_row(
            volume["name"], volume["kind"], volume["suite"], str(volume["slots"]),
            str(volume["slots_seen_taken"]),
        )  # fmt: skip
    quotas = folding_table("Tenants: room", ("tenant", "slots", "size of slots"), ("refused",))
    bandwidths = folding_table("Tenants: bandwidth", ("tenant",), ("at most", "waited", "late"))
    for each in found["tenants"]:
        # On namespaces of keys there are no slots to count.
        more = "" if each["room_is_counted"] else ", more not counted"
        slots = f"{each['slots_known_taken']} of {each['slots_max'] or 'any'}{more}"
        most = readable_bytes(each["bytes_max"]) if each["bytes_max"] else "any"
        size = f"{readable_bytes(each['bytes_known_taken'])} of {most}{more}"
        speed = f"{readable_bytes(each['bandwidth_max'])}/s" if each["bandwidth_max"] else "any"
        name = escape(each["name"])
        quotas.add_row(name, slots, size, str(each["quota_puts_refused"]))
        bandwidths.add_row(name, speed, str(each["bandwidth_waits"]), str(each["bandwidth_late"]))
    of_tenants = [quotas, bandwidths] if found["tenants"] else []
    return [volumes, *of_tenants, *_g4(found.get("spill", [])), *_s3(found["s3"]), *_query(found["query"])]


def bounds_tables(rows: list[dict[str, Any]]) -> Group:
    """What others can raise: how much there is, how much one of them has, and how often one was refused."""
    counts = folding_table("Bounds", ("bound",), ("held", "limit", "most of one", "refused"))
    meanings = []
    for each in rows:
        shown = readable_bytes if each["name"].endswith("-bytes") else str
        numbers = (shown(each[key]) for key in ("held", "limit", "most_of_one"))
        counts.add_row(each["name"], *numbers, str(each["refusals"]))
        share = f"of one ({each['by']}): {each['share']}"
        meanings.append(f"{each['name']}: {each['counts']}; {share}; beyond: {each['refused']}")
    return Group(counts, Text("\n".join(meanings), overflow="fold"))


def _state(enclosure: dict[str, Any]) -> str:
    """Of a path: whether it is there, how it reaches the namespaces (ANA), what went on by another."""
    if not enclosure["connected"]:
        return f"away: {enclosure['fault']}"
    elsewhere = enclosure["sent_elsewhere"]
    access = [each.replace("_", "-") for each in enclosure["access"]]
    there = "on this machine" if enclosure.get("local") else "connected"
    return ", ".join([there, *access, *([f"{elsewhere} sent elsewhere"] if elsewhere else [])])


def _g4(places: list[dict[str, Any]]) -> list[RenderableType]:
    """What became of evicted values, for each place; nothing where there is none, or a tenant asks."""
    lines = []
    columns = ("bundles", "dropped", "deleted", "values back")
    volumes = folding_table("Volumes: G4", ("volume", "room"), columns)
    for place in places:
        ends = ", ".join(
            f"{place[key]} {key.replace('_', ' ')}" for key in ("late", "lost", "failed", "not_asked")
        )
        wrong = [*(["left alone for now"] if place["left_alone"] else []), place["error"]]
        said = "; ".join([f"{counted(place['asked'], 'range')} asked for, {ends}", *filter(None, wrong)])
        lines.append(f"G4 in {place['place']}: {said}")
        for name, each in place["volumes"].items():
            room = f"{readable_bytes(each['bytes_used'])} of {readable_bytes(each['bytes_max'])}"
            numbers = (each[key] for key in ("bundles", "bundles_dropped", "bundles_deleted", "returned"))
            volumes.add_row(escape(name), room, *map(str, numbers))
    return [Text("\n".join(lines), overflow="fold"), volumes] if places else []


def _s3(door: dict[str, Any] | None) -> list[Text]:
    """Where S3-shaped clients find the pool, and its counts; nothing where there is no such door."""
    if door is None:
        return []
    moved = f"read {readable_bytes(door['bytes_read'])}, written {readable_bytes(door['bytes_written'])}"
    requests = counted(sum(door["requests"].values()), "request")
    done = f"{counted(door['objects'], 'object')}, {requests}, {moved}"
    if door["rdma"]:
        by = f"read {readable_bytes(door['rdma_bytes_read'])}, written"
        by += f" {readable_bytes(door['rdma_bytes_written'])}"
        done += f"; RDMA at {door['rdma']}: {counted(door['rdma_connections'], 'connection')}, {by}"
        if lost := door.get("rdma_lost"):
            done += f"; its device failed ({lost}): plain HTTP until the agent is started again"
    return [_door("S3", door, "", done)]


def _members(pool: dict[str, Any]) -> list[Text]:
    """Who wants in, and how far a join is; nothing where there is nothing to be said, or a tenant asks."""
    lines = []
    if newcomers := pool.get("newcomers"):
        shown = sorted(newcomers.items())[:NAMED_MAX]
        first = ", ".join(f"{nguid} of {enclosure}" for nguid, enclosure in shown)
        more = " and more" if len(newcomers) > NAMED_MAX else ""
        lines.append(f"not in the pool (g35 pool add): {counted(len(newcomers), 'namespace')}: {first}{more}")
    for nguid, why in sorted(pool.get("newcomers_refused", {}).items())[:NAMED_MAX]:
        lines.append(f"does not join by itself: {nguid}: {why}")
    if waiting_for := pool.get("waiting_for"):
        lines.append(f"newcomers wait for: {waiting_for}")
    for nguid, said in sorted(pool.get("contested", {}).items())[:NAMED_MAX]:
        lines.append(f"contested: {nguid}: {said}")
    if unsettled := pool.get("volumes_unsettled"):
        left = "not known" if pool["moves_left"] is None else pool["moves_left"]
        lines.append(f"not settled (g35 pool settle): {', '.join(unsettled)}")
        lines.append(f"values moved: {pool['moves_values']}; left to move: {left}")
    return [Text("\n".join(lines), overflow="fold")] if lines else []


def _prestaged(volumes: list[dict[str, Any]]) -> list[Table]:
    """Results of reading ahead; nothing where nobody did."""
    if not volumes:
        return []
    table = folding_table("Volumes: prestaged", ("volume",), ("served gets", "useful", "wasted", "late"))
    for each in volumes:
        useful, wasted = (readable_bytes(each[f"prestage_{key}_bytes"]) for key in ("useful", "wasted"))
        table.add_row(each["name"], str(each["prestage_hits"]), useful, wasted, str(each["prestage_late"]))
    return [table]


def _prefixes(volumes: list[dict[str, Any]]) -> list[Table]:
    """What engines made of their prefixes; nothing where no connector has reported."""
    if not volumes:
        return []
    columns = ("requests", "asked", "usable", "loaded", "stored", "saved")
    table = folding_table("Volumes: prefixes", ("volume", "first holes"), columns)
    for each in volumes:
        saved = (each["prefix_saved_ms"] - each["prefix_cost_ms"]) / 1e3
        counts = (str(each[f"prefix_{key}"]) for key in columns[:-1])
        table.add_row(each["name"], _causes(each["prefix_holes"]), *counts, f"{saved:.1f} s")
    return [table]


def _query(door: dict[str, Any] | None) -> list[Text]:
    """Where routers ask, and what they were told; nothing where there is no such door."""
    if door is None:
        return []
    counted = f"{door['requests']} requests, {door['prompts']} prompts, {door['keys']} keys"
    found = (
        f"{door['keys_in_memory']} in memory, {door['keys_on_flash']} on flash, {door['keys_in_g4']} in G4"
    )
    return [_door("queries", door, "/query", f"{counted}: {found}")]


def _door(what: str, door: dict[str, Any], path: str, done: str) -> Text:
    scheme = "https" if door["tls"] else "http"
    where = ", ".join(f"{scheme}://{each}{path}" for each in door["listen"])
    refused = ", ".join(f"{code} {count}" for code, count in sorted(door["refusals"].items())) or "none"
    return Text(f"{what} at {where}: {done}; refused: {refused}", overflow="fold")


def _resident(memory: dict[str, int] | None) -> str:
    """A tenant's door does not say it."""
    return "-" if memory is None else readable_bytes(memory["resident_bytes"])


def _percent(ratio: float | None) -> str:
    return "-" if ratio is None else f"{ratio * 100:.1f} %"


def _causes(causes: dict[str, int]) -> str:
    return ", ".join(f"{name.replace('_', ' ')} {count}" for name, count in causes.items() if count) or "none"
