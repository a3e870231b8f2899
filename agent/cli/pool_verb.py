"""`g35 pool`: lay out a pool on the namespaces of the configured enclosures, and look at one."""

import functools
import json
import sys
from pathlib import Path
from shlex import quote
from typing import Annotated, Any

import typer

from agent.attach.inspect_namespaces import look_round, unreached
from agent.attach.map_history import MapHistory
from agent.cli import pool_care, pool_members
from agent.cli.pool_channel import Config, refuse_served, with_channel
from agent.cli.record_options import AsJson
from agent.cli.tables import folding_table, progress_bar, table_console
from agent.config.configuration import load_configuration
from agent.errors import G35Error, UserError
from agent.fs.files.metadata_pool import names_another
from agent.inline.secrets import root_key_in
from agent.membership.join import numbers_of
from agent.pool.format.directory import KEY_BYTES, SLOTS_PER_SET
from agent.pool.format.sealed_slot import HEADER_BYTES
from agent.pool.maintenance.bad_slots import Quarantined
from agent.pool.map.document import MapVolume, PoolMap, plan_pool
from agent.pool.map.inspect import (
    Content,
    Inspection,
    clear_directories,
    newest_map,
    sets_of,
)
from agent.pool.map.kv_superblock import clear_keys
from agent.pool.map.map_seal import MapSeal
from agent.pool.map.namespace_claims import heads_of, want_unchanged
from agent.pool.map.replicas import KEY_PLACES, write_superblock
from agent.pool.map.superblock import COPY_OFFSETS
from agent.pool.volume.settings import LOCAL_NGUID
from agent.remote.channel import WorkerChannel
from agent.remote.fabric import Fabric
from agent.sizes import counted

LOPSIDED_SHARE = 0.9
"""Of two copies' room: with less, it is said at the format."""

_SECRETS: Any = {
    "volumes": {"__all__": {"wrapped_secret", "earlier_secret"}},
    "tenants": {"__all__": {"wrapped_key"}},
}

app = typer.Typer(
    rich_markup_mode=None,
    no_args_is_help=True,
    help="The pool on the enclosures' namespaces: make it, show it, let it grow, look after it.",
)
app.command()(pool_members.add)
app.command()(pool_members.settle)
app.command()(pool_care.scrub)
app.command()(pool_care.quarantine)


@app.command("format")
def format_pool(
    config: Config,
    force: Annotated[
        bool,
        typer.Option(
            help="Also overwrite namespaces that carry anything, an old pool too; never while an agent of "
            "this machine serves them."
        ),
    ] = False,
) -> None:
    """Make a pool on the namespaces of the configuration.

    It gets the volumes of the configuration. Namespaces that carry anything are refused without --force, with
    which their contents are lost.
    """
    configuration = load_configuration(config)
    if not configuration.volumes:
        raise UserError(f"{config} describes no volume", "add at least one [[volumes]] section")
    key_file = configuration.agent.key_file
    root = root_key_in(key_file, f"for a new pool, make one: g35 key new {quote(str(key_file))}")
    seen_maps = MapHistory(configuration.agent.state)

    def work(fabric: Fabric, channel: WorkerChannel) -> PoolMap:
        away = [enclosure for enclosure in fabric.enclosures if enclosure.session is None]
        if away:
            raise G35Error(
                f"not connected: {unreached(fabric)}", "a pool is formatted with all its enclosures"
            )
        seen = look_round(fabric, channel)
        if not seen:
            raise G35Error("the enclosures show no namespace", "add drives to them")
        planned = plan_pool(
            [(nguid, size) for nguid, size, inspection in seen if inspection.kv is None],
            [each.wish() for each in configuration.volumes],
            root,
            [(nguid, size) for nguid, size, inspection in seen if inspection.kv is not None],
        )
        pool_map = MapSeal(root).put(planned)
        numbers = numbers_of(seen)
        # A namespace of a kind that no volume wants is left as it is.
        members = {namespace.nguid for namespace in pool_map.namespaces}
        seen = [row for row in seen if row[0].hex() in members]
        _refuse_foreign(seen, force)
        refuse_served(inspection for _, _, inspection in seen)
        _refuse_short_values(pool_map, seen)
        unchanged = {
            nguid.hex(): functools.partial(
                want_unchanged, channel, nguid, number := numbers[nguid.hex()],
                channel.run(heads_of(channel, nguid, number)),
            )
            for nguid, _, inspection in seen
            if inspection.kv is None
        }  # fmt: skip
        with progress_bar() as progress:
            task = progress.add_task("clearing directories", total=sets_of(pool_map))
            for volume in pool_map.volumes:
                advance = functools.partial(progress.advance, task)
                for extent in volume.extents:
                    part = volume.model_copy(update={"extents": (extent,)})
                    channel.run(clear_directories(channel, part, numbers, advance, unchanged[extent.nguid]))
            task = progress.add_task("clearing keys", total=None)
            for nguid, _, inspection in seen:
                if inspection.kv is not None:
                    advance = functools.partial(progress.advance, task)
                    channel.run(clear_keys(channel, numbers[nguid.hex()], advance))
        for look in unchanged.values():
            channel.run(look())
        for nguid, _, inspection in seen:
            places = COPY_OFFSETS if inspection.kv is None else KEY_PLACES
            channel.run(write_superblock(channel, numbers[nguid.hex()], nguid, pool_map, places))
        return pool_map

    pool_map = with_channel(configuration, work, make=True)
    for volume in pool_map.volumes:
        if hint := short_of_second_copies(volume):
            print(hint, file=sys.stderr)
    seen_maps.note(pool_map, {volume.volume_id for volume in pool_map.volumes}, has_seal=True)
    for names in sorted(configuration.agent.state.glob("*files.sqlite")):
        if names_another(names, pool_map.pool_id):
            print(_of_another_pool(names), file=sys.stderr)
    members, volumes = len(pool_map.namespaces), len(pool_map.volumes)
    print(f"pool {pool_map.pool_id}: {counted(members, 'namespace')}, {counted(volumes, 'volume')}")


@app.command()
def show(
    config: Config,
    as_json: AsJson = False,
    quarantined: Annotated[
        bool, typer.Option(help="Also show the slots that are set aside; this reads all directories.")
    ] = False,
) -> None:
    """Show the namespaces, and the volumes of their pool.

    Exit code 1 where a directory could not be read for --quarantined.
    """
    configuration = load_configuration(config)

    def work(fabric: Fabric, channel: WorkerChannel) -> tuple[dict[str, Any], G35Error | None]:
        seen = look_round(fabric, channel)
        rows = [
            {
                "nguid": nguid.hex(),
                "enclosure": route.enclosure.name if (route := fabric.routes[number]) else "",
                "bytes": size,
                "content": inspection.content.value,
                "detail": inspection.detail,
            }
            for number, (nguid, size, inspection) in enumerate(seen)
        ]
        inspections = [inspection for _, _, inspection in seen]
        found, refused = pool_in(inspections)
        if found is None and refused is None:
            refused = not_looked_at(inspections, unreached(fabric))
        shown = {
            "namespaces": rows,
            "pool": found.model_dump(mode="json", exclude=_SECRETS) if found is not None else None,
            "not_connected": unreached(fabric),
        }
        if found is not None and quarantined:
            numbers = numbers_of(seen)
            aside = pool_care.look_for(found, channel, numbers)
            shown["quarantined"] = {**aside, "slots": [each._asdict() for each in aside["slots"]]}
        return shown, refused

    shown, refused = with_channel(configuration, work)
    if as_json:
        print(json.dumps(shown, indent=1))
    else:
        _print_tables(shown, undecided=refused is not None)
        if "quarantined" in shown:
            slots = [Quarantined(**each) for each in shown["quarantined"]["slots"]]
            pool_care.print_slots({**shown["quarantined"], "slots": slots})
    if refused is not None:
        raise refused
    if "quarantined" in shown and shown["quarantined"]["directories_unread"]:
        raise typer.Exit(1)


def pool_in(inspections: list[Inspection]) -> tuple[PoolMap | None, G35Error | None]:
    """The map in force, if there is one; and where pools are there and none can be gone by, why not."""
    if all(inspection.content is not Content.POOL for inspection in inspections):
        return None, None
    try:
        return newest_map(inspections), None
    except G35Error as refused:
        return None, refused


def not_looked_at(inspections: list[Inspection], away: str) -> G35Error | None:
    """Where no pool was found: why there may be one all the same; None where all there is was looked at.

    `away`: the enclosures that are not connected, in words, or "none".
    """
    unread = [each.detail for each in inspections if each.content is Content.UNREADABLE]
    if inspections and away == "none" and not unread:
        return None
    reasons = [f"not connected: {away}"] if away != "none" else []
    if unread:
        count = counted(len(unread), "namespace")
        reasons.append(f"{count} could not be read ({', '.join(sorted(set(unread)))})")
    return G35Error(
        "no pool was seen, and not all was looked at" if inspections else "no namespace was reached",
        "; ".join(reasons) or "the enclosures that there are show none; add drives to them",
    )


def short_of_second_copies(volume: MapVolume) -> str:
    """What to say of a volume whose second copies have less room than the first; empty where they have."""
    sets = [extent.sets for extent in volume.extents]
    largest, where = max(sets, default=0), "one namespace"
    if volume.local_first:
        near = sum(each.sets for each in volume.extents if each.nguid.startswith(LOCAL_NGUID.hex()))
        largest, where = max(near, sum(sets) - near), "one side: servers' own SSDs, or enclosures"
    beside = sum(sets) - largest
    if volume.copies < 2 or 2 * beside >= LOPSIDED_SHARE * sum(sets):
        return ""
    return (
        f"volume {volume.name}: most of its slots lie on {where}; so there is room for two copies of "
        f"{SLOTS_PER_SET * beside} values only; what comes beyond is kept once. Drives of one size hold more"
    )


def _of_another_pool(names: Path) -> str:
    """What is said of a file of names that goes with none of the blocks here."""
    # The index of a tenant of the S3 door lists objects that are nowhere without the names of their files.
    index = names.with_name(names.name.replace(".files.", "."))
    those = " and ".join(str(each) for each in dict.fromkeys((names, index)))
    return (
        f"{names} names files of another pool, and is not served with this one; if that is gone, "
        f"remove {those}, and what is named after them (-wal, -shm)"
    )


def _refuse_foreign(seen: list[tuple[bytes, int, Inspection]], force: bool) -> None:
    for nguid, _, inspection in seen:
        if inspection.content is Content.UNREADABLE:
            raise G35Error(
                f"namespace {nguid.hex()} cannot be read: {inspection.detail}",
                "the log of its enclosure says why, where it turned this host away",
            )
        if inspection.content is not Content.BLANK and not force:
            raise UserError(
                f"namespace {nguid.hex()} carries {carried(inspection.content, inspection.detail)}; "
                "it was not touched",
                "--force overwrites it, and whatever is there is lost",
            )


def _refuse_short_values(pool_map: PoolMap, seen: list[tuple[bytes, int, Inspection]]) -> None:
    """Before anything is written: every KV namespace takes the slots of the volume that is to lie there."""
    for volume in pool_map.volumes:
        slot_bytes = HEADER_BYTES + volume.value_bytes
        for nguid, _, inspection in seen:
            kv = inspection.kv
            if kv is None or nguid.hex() not in volume.kv_namespaces:
                continue
            if kv.value_max < slot_bytes or kv.key_max < KEY_BYTES:
                raise UserError(
                    f"namespace {nguid.hex()} takes keys of {kv.key_max} and values of {kv.value_max} bytes; "
                    f"volume {volume.name} needs {KEY_BYTES} and {slot_bytes}",
                    "lower the volume's value_size, or let the enclosure take longer ones (MDTS)",
                )


def carried(content: Content, detail: str) -> str:
    """What a namespace carries, in words. What is foreign is often said whole by the detail."""
    if content is Content.FOREIGN:
        return content.value if detail in ("", content.value, "it is not blank") else detail
    return f"{content.value} ({detail})" if detail else content.value


def _strange(shown: dict[str, Any]) -> int:
    """Blank namespaces that could join."""
    members = {each["nguid"] for each in (shown["pool"] or {}).get("namespaces", [])}
    blank = [each for each in shown["namespaces"] if each["content"] == Content.BLANK.value]
    return sum(each["nguid"] not in members for each in blank) if members else 0


def _print_tables(shown: dict[str, Any], *, undecided: bool) -> None:
    console = table_console()
    table = folding_table("Namespaces", ("namespace", "enclosure", "carries"), ("GiB",))
    for row in shown["namespaces"]:
        carries = carried(Content(row["content"]), row["detail"])
        table.add_row(row["nguid"], row["enclosure"], carries, f"{row['bytes'] / 2**30:.2f}")
    console.print(table)
    if (strange := _strange(shown)) > 0:
        words = "namespace does" if strange == 1 else "namespaces do"
        console.print(f"{strange} blank {words} not belong to the pool; see g35 pool add")
    if shown["not_connected"] != "none":
        console.print(f"not connected: {shown['not_connected']}")
    if shown["pool"] is None:
        if not undecided:
            console.print("no pool; make one with g35 pool format")
        return
    title = f"Pool {shown['pool']['pool_id']}"
    table = folding_table(title, ("volume", "kind", "suite"), ("value KiB", "slots", "copies"))
    for volume in shown["pool"]["volumes"]:
        slots = str(64 * sum(extent["sets"] for extent in volume["extents"]))
        if volume["settled"]:
            joined = 64 * sum(extent["sets"] for extent in volume["extents"][volume["settled"] :])
            slots += f", {joined} of them joined"
        if volume["kv_namespaces"]:
            slots = f"on {counted(len(volume['kv_namespaces']), 'KV namespace')}"
        table.add_row(
            volume["name"], volume["kind"], volume["suite"], str(volume["value_bytes"] >> 10), slots,
            str(volume["copies"]),
        )  # fmt: skip
    console.print(table)
