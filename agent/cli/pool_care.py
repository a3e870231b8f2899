"""`g35 pool scrub` and `g35 pool quarantine`: read all that is stored, and the slots whose medium is bad."""

from __future__ import annotations

import json
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import TypeAdapter
from rich.progress import Progress

from agent.attach.inspect_namespaces import look_round
from agent.attach.map_history import map_seal
from agent.attach.open_volumes import open_volumes
from agent.cli.pool_lanes import with_lanes
from agent.cli.tables import folding_table, table_console
from agent.config.configuration import load_configuration
from agent.errors import G35Error, UserError
from agent.inline.root_keys import root_key_in
from agent.pool.maintenance.bad_slots import Quarantined, release, survey
from agent.pool.maintenance.replication import DOUBT_SECONDS, work_off
from agent.pool.maintenance.scrub import Pace, Scrubber, ScrubCounters
from agent.pool.map.document import PoolMap
from agent.pool.map.inspect import newest_map
from agent.pool.volume.directory_cache import DirectoryCache
from agent.pool.volume.volume import Volume
from agent.remote.channel import WorkerLanes
from agent.remote.fabric import Fabric
from agent.sizes import Size

Config = Annotated[Path, typer.Option("--config", help="The TOML file with the enclosures.")]
AsJson = Annotated[bool, typer.Option("--json", help="For programs.")]
DIRECTORIES_BYTES = 1 << 20
"""Of directories that a scrub by hand remembers: those that it writes."""
LISTED_MAX = 1000
TAKE_BACK_TRIES = 10
_RATE: TypeAdapter[int] = TypeAdapter(Size)


def scrub(
    config: Config,
    bandwidth: Annotated[
        str, typer.Option(help="Bytes a second at the most, such as 500M; 0: as many as come.")
    ] = "0",
    as_json: AsJson = False,
) -> None:
    """Read all that is stored now, and take out what is bad. Second copies that are missing are made.

    The agents of the pool may go on serving. What is away or does badly is skipped; then it ends with 1.
    Blocks of files are read, and what is bad of them is left to the agent that serves /fs.
    """
    configuration = load_configuration(config)
    root = root_key_in(configuration.agent.key_file)
    seal = map_seal(root, configuration.agent.state)
    try:
        rate = _RATE.validate_python(bandwidth)
    except ValueError:
        raise UserError(f"--bandwidth {bandwidth} is no size", "write for example 500M") from None

    def work(fabric: Fabric, lanes: WorkerLanes) -> ScrubCounters:
        pool_map = newest_map([each for _, _, each in look_round(fabric, lanes)], seal)
        fabric.adopt([bytes.fromhex(namespace.nguid) for namespace in pool_map.namespaces])
        cache = DirectoryCache(DIRECTORIES_BYTES)
        volumes = open_volumes(pool_map, root, configuration, cache)
        in_sets = [volume for volume in volumes if isinstance(volume, Volume)]
        for volume in in_sets:
            volume.left_to_others = volume.settings.kind == "files"
        scrubber = Scrubber(in_sets)
        pace = Pace(rate or 1 << 62, lambda: 0)
        with Progress(transient=True) as progress:
            task = progress.add_task("scrub", total=scrubber.sets)
            while not scrubber.counters.passes:
                read = lanes.run(scrubber.advance(lanes))
                progress.update(task, completed=scrubber.sets_done)
                time.sleep(pace.spend(read, time.monotonic()))
        take_back(in_sets, lanes)
        return scrubber.counters

    counters = with_lanes(configuration, work)
    print(json.dumps(asdict(counters), indent=1) if as_json else told(counters))
    if counters.sets_skipped:
        raise typer.Exit(1)


def take_back(volumes: Sequence[Volume], lanes: WorkerLanes) -> None:
    """Try for a while to free the second copies that may be of deleted values
    (agent/pool/maintenance/replication.py)."""
    for _ in range(TAKE_BACK_TRIES):
        if not any(volume.owed.doubtful for volume in volumes):
            return
        time.sleep(DOUBT_SECONDS)
        lanes.run(work_off(volumes, lanes))
    doubtful = sum(volume.owed.doubtful for volume in volumes)
    if doubtful:
        raise G35Error(
            f"{doubtful} second copies could not be taken back, whose values may have been deleted meanwhile",
            "see to the enclosures, and delete those keys again",
        )


def told(counters: ScrubCounters) -> str:
    """What a scrub did, for people. What is seldom is said only where it was."""
    seldom = {
        "too young to look at": counters.slots_young,
        "bad of files, and left to who reads the files": counters.slots_left,
        "values with one copy of two": counters.copies_missing,
    }
    return (
        f"{counters.slots_checked} slots read ({counters.bytes_read / 2**20:.0f} MiB): "
        f"{counters.slots_bad} bad, {counters.slots_stale} stale, {counters.slots_quarantined} set aside; "
        + "".join(f"{count} {what}; " for what, count in seldom.items() if count)
        + f"{counters.sets_skipped} sets skipped"
    )


def quarantine(
    config: Config,
    give_back: Annotated[
        bool,
        typer.Option(
            "--release", help="Give the slots back. An agent that serves meanwhile may set them aside again."
        ),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Show the slots that are set aside because their medium is bad. It reads all directories of the pool,
    and ends with 1 where it could not read them all, or not give back all slots.
    """
    configuration = load_configuration(config)
    agent = configuration.agent
    seal = map_seal(root_key_in(agent.key_file), agent.state) if give_back else None

    def work(fabric: Fabric, lanes: WorkerLanes) -> dict[str, Any]:
        seen = look_round(fabric, lanes)
        pool_map = newest_map([inspection for _, _, inspection in seen], seal)
        numbers = {nguid.hex(): number for number, (nguid, _, _) in enumerate(seen)}
        found = look_for(pool_map, lanes, numbers)
        released = 0
        if give_back:
            by_set: dict[tuple[str, int], set[int]] = defaultdict(set)
            for each in found["slots"]:
                by_set[each.nguid, each.offset].add(each.slot)
            places = {place: frozenset(slots) for place, slots in by_set.items()}
            released = lanes.run(release(lanes, places, numbers))
        return {**found, "released": released}

    found = with_lanes(configuration, work)
    if as_json:
        print(json.dumps({**found, "slots": [each._asdict() for each in found["slots"]]}, indent=1))
    else:
        print_slots(found)
        if give_back:
            print(f"{found['released']} slots were given back")
    if found["directories_unread"] or (give_back and found["released"] < len(found["slots"])):
        raise typer.Exit(1)


def look_for(pool_map: PoolMap, lanes: WorkerLanes, numbers: dict[str, int]) -> dict[str, Any]:
    """The slots that are set aside, and how many directories could not be read."""
    slots: list[Quarantined] = []
    unread = 0
    for volume in pool_map.volumes:
        found = lanes.run(survey(lanes, volume, numbers))
        slots += found.quarantined
        unread += found.unread
    return {"slots": slots, "directories_unread": unread}


def print_slots(found: dict[str, Any]) -> None:
    """For people: the first of them, and how many more."""
    console = table_console()
    table = folding_table("Set aside", ("volume", "namespace", "since"), ("set at", "slot"))
    for each in found["slots"][:LISTED_MAX]:
        since = datetime.fromtimestamp(each.since, UTC).isoformat(" ", "seconds")
        table.add_row(each.volume, each.nguid, since, str(each.offset), str(each.slot))
    if found["slots"]:
        console.print(table)
    more = len(found["slots"]) - LISTED_MAX
    console.print(f"{len(found['slots'])} slots are set aside" + (f", {more} not shown" if more > 0 else ""))
    if found["directories_unread"]:
        console.print(f"{found['directories_unread']} directories could not be read")
