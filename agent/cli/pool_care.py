"""`g35 pool scrub` and `g35 pool quarantine`: read all that is stored, and the slots whose medium is bad."""

import json
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Annotated, Any

import typer
from pydantic import TypeAdapter

from agent.attach.inspect_namespaces import look_round
from agent.attach.open_volumes import open_volumes
from agent.cli.pool_channel import Config, keys_of, size_option, with_channel
from agent.cli.record_options import AsJson
from agent.cli.tables import folding_table, progress_bar, table_console
from agent.config.configuration import load_configuration
from agent.errors import G35Error
from agent.membership.join import numbers_of
from agent.pool.maintenance.bad_slots import Quarantined, release, survey
from agent.pool.maintenance.replication import DOUBT_SECONDS, work_off
from agent.pool.maintenance.scrub import Pace, Scrubber, ScrubCounters
from agent.pool.map.document import PoolMap
from agent.pool.map.inspect import newest_map
from agent.pool.volume.directory_cache import DirectoryCache
from agent.pool.volume.volume import Volume, in_sets
from agent.remote.channel import WorkerChannel
from agent.remote.fabric import Fabric
from agent.sizes import Size, counted

DIRECTORIES_BYTES = 1 << 20
"""Of directories that a scrub by hand remembers: those that it writes."""
LISTED_MAX = 1000
TAKE_BACK_TRIES = 10
_RATE: TypeAdapter[int] = TypeAdapter(Size)


def scrub(
    config: Config,
    bandwidth: Annotated[
        str, typer.Option(callback=size_option, help="Bytes a second at the most, such as 500M; 0: no limit.")
    ] = "0",
    as_json: AsJson = False,
) -> None:
    """Read all stored values and remove bad ones.

    It makes second copies that are missing. Agents may serve meanwhile. Bad blocks of files are left to the
    agent that serves /fs. Exit code 1 where sets were skipped, because their enclosure is away or slow.
    """
    configuration = load_configuration(config)
    root, seal = keys_of(configuration)
    rate = _RATE.validate_python(bandwidth)

    def work(fabric: Fabric, channel: WorkerChannel) -> ScrubCounters:
        pool_map = newest_map([each for _, _, each in look_round(fabric, channel)], seal)
        fabric.adopt([bytes.fromhex(namespace.nguid) for namespace in pool_map.namespaces])
        cache = DirectoryCache(DIRECTORIES_BYTES)
        volumes = open_volumes(pool_map, root, configuration, cache)
        own = in_sets(volumes)
        scrubber = Scrubber(own)
        pace = Pace(rate or 1 << 62, lambda: 0)
        with progress_bar() as progress:
            task = progress.add_task("scrub", total=scrubber.sets)
            while not scrubber.counters.passes:
                read = channel.run(scrubber.advance(channel))
                progress.update(task, completed=scrubber.sets_done)
                time.sleep(pace.spend(read, time.monotonic()))
        take_back(own, channel)
        return scrubber.counters

    counters = with_channel(configuration, work)
    print(json.dumps(asdict(counters), indent=1) if as_json else told(counters))
    if counters.sets_skipped:
        raise typer.Exit(1)


def take_back(volumes: Sequence[Volume], channel: WorkerChannel) -> None:
    """Try for a while to free the second copies that may be of deleted values
    (agent/pool/maintenance/replication.py)."""
    for _ in range(TAKE_BACK_TRIES):
        if not any(volume.replication_backlog.doubtful for volume in volumes):
            return
        time.sleep(DOUBT_SECONDS)
        channel.run(work_off(volumes, channel))
    doubtful = sum(volume.replication_backlog.doubtful for volume in volumes)
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
        f"{counted(counters.slots_checked, 'slot')} read ({counters.bytes_read / 2**20:.0f} MiB): "
        f"{counters.slots_bad} bad, {counters.slots_stale} stale, {counters.slots_quarantined} set aside; "
        + "".join(f"{count} {what}; " for what, count in seldom.items() if count)
        + f"{counted(counters.sets_skipped, 'set')} skipped"
    )


def quarantine(
    config: Config,
    give_back: Annotated[
        bool,
        typer.Option("--release", help="Use the slots again. An agent that serves may set them aside anew."),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Show the slots that are set aside because their medium is bad. This reads all directories of the pool.

    Exit code 1 where a directory could not be read, or a slot not released.
    """
    configuration = load_configuration(config)
    seal = keys_of(configuration)[1] if give_back else None

    def work(fabric: Fabric, channel: WorkerChannel) -> dict[str, Any]:
        seen = look_round(fabric, channel)
        pool_map = newest_map([inspection for _, _, inspection in seen], seal)
        numbers = numbers_of(seen)
        found = look_for(pool_map, channel, numbers)
        released = 0
        if give_back:
            by_set: dict[tuple[str, int], set[int]] = defaultdict(set)
            for each in found["slots"]:
                by_set[each.nguid, each.offset].add(each.slot)
            places = {place: frozenset(slots) for place, slots in by_set.items()}
            released = channel.run(release(channel, places, numbers))
        return {**found, "released": released}

    found = with_channel(configuration, work)
    if as_json:
        print(json.dumps({**found, "slots": [each._asdict() for each in found["slots"]]}, indent=1))
    else:
        print_slots(found)
        if give_back:
            print(f"given back: {counted(found['released'], 'slot')}")
    if found["directories_unread"] or (give_back and found["released"] < len(found["slots"])):
        raise typer.Exit(1)


def look_for(pool_map: PoolMap, channel: WorkerChannel, numbers: dict[str, int]) -> dict[str, Any]:
    """The slots that are set aside, and how many directories could not be read."""
    slots: list[Quarantined] = []
    unread = 0
    for volume in pool_map.volumes:
        found = channel.run(survey(channel, volume, numbers))
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
    more_of_them = f", {more} not shown" if more > 0 else ""
    console.print(f"set aside: {counted(len(found['slots']), 'slot')}{more_of_them}")
    if found["directories_unread"]:
        console.print(f"directories that could not be read: {found['directories_unread']}")
