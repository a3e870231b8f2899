"""`g35 spill`: what a pool has in G4, seen, checked and deleted (docs/tiers.md)."""

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Annotated, Any

import typer

from agent.cli.pool_channel import Config, keys_of, map_in_force
from agent.cli.record_options import AsJson
from agent.cli.tables import folding_table, table_console
from agent.config.configuration import Configuration, load_configuration
from agent.config.spill_section import SpillSection
from agent.errors import G35Error, UserError
from agent.pool.map.document import PoolMap
from agent.sizes import counted
from agent.spill.care import check, usage
from agent.spill.care import drop as drop_prefix
from agent.spill.names import GENERATION_SECONDS, pool_prefix, volume_prefix
from agent.spill.target import Target, TargetError
from agent.spill.tier import target_of

app = typer.Typer(rich_markup_mode=None, no_args_is_help=True)
GIB = 1 << 30


@app.callback()
def spill() -> None:
    """What the pool has in G4, the folders and buckets of `[[spill]]`."""


def _places(config: Any) -> tuple[Configuration, PoolMap]:
    configuration = load_configuration(config)
    if not configuration.spill:
        raise UserError(f"{config} has no table [[spill]]", "docs/tiers.md shows one")
    _, seal = keys_of(configuration)
    return configuration, map_in_force(configuration, seal)


@contextmanager
def _opened(section: SpillSection) -> Iterator[Target]:
    # A verb writes nothing, so a place without room is none of its matters.
    target = target_of(section, wants_room=False)
    try:
        target.check()
        yield target
    except TargetError as error:
        raise G35Error(f"{section.name}: {error}", "see that the place is there, and try again") from None
    finally:
        target.close()


def _names(pool_map: PoolMap) -> dict[str, str]:
    return {each.volume_id: each.name for each in pool_map.volumes}


@app.command()
def status(config: Config, as_json: AsJson = False) -> None:
    """Show what each volume has at each place. This lists the place, and reads no value."""
    configuration, pool_map = _places(config)
    names, rows, wall = _names(pool_map), [], time.time()
    for section in configuration.spill:
        with _opened(section) as target:
            for volume, found in sorted(usage(target, pool_map.pool_id, wall).items()):
                what = names.get(volume, "erased" if volume else "no bundles")
                rows.append({"place": section.name, "volume": what, "volume_id": volume, **asdict(found)})
    if as_json:
        print(json.dumps(rows, indent=1))
        return
    table = folding_table("", ("place", "volume", "bundles", "GiB", "oldest, days"))
    for row in rows:
        days = (row["oldest_generations"] * GENERATION_SECONDS) / 86_400
        table.add_row(
            row["place"], row["volume"], str(row["bundles"]), f"{row['bytes'] / GIB:.2f}", f"{days:.0f}"
        )
    table_console().print(table)


@app.command()
def scrub(config: Config, as_json: AsJson = False) -> None:
    """Read and check all bundles; delete what no value can come from.

    That is bundles without a good value, and files that a crash left half written an hour ago or earlier.
    """
    configuration, pool_map = _places(config)
    results = []
    for section in configuration.spill:
        with _opened(section) as target:
            found = check(target, pool_map.pool_id)
        results.append({"place": section.name, **asdict(found)})
        if not as_json:
            print(
                f"{section.name}: {counted(found.bundles, 'bundle')} with "
                f"{counted(found.values, 'good value')}, {counted(found.bad_values, 'bad value')}; "
                f"{counted(found.bad_count, 'bundle')} deleted, "
                f"{counted(found.leftovers, 'leftover')} deleted"
                + (f", {found.being_written} being written" if found.being_written else "")
            )
    if as_json:
        print(json.dumps(results, indent=1))


@app.command()
def drop(
    config: Config,
    volume: Annotated[str, typer.Option(help="Delete the bundles of this volume.")] = "",
    erased: Annotated[
        bool, typer.Option("--erased", help="Delete those of volumes that the pool has no more.")
    ] = False,
    everything: Annotated[bool, typer.Option("--all", help="Delete all that the pool has there.")] = False,
) -> None:
    """Delete bundles of this pool: say which by one option. Gets that need them are misses (`g4_lost`)."""
    if (bool(volume) + erased + everything) != 1:
        raise typer.BadParameter("say one of --volume NAME, --erased and --all")
    configuration, pool_map = _places(config)
    names = _names(pool_map)
    if volume and volume not in names.values():
        raise UserError(f"the pool has no volume {volume}", f"it has {', '.join(sorted(names.values()))}")
    for section in configuration.spill:
        count = size = 0
        with _opened(section) as target:
            found = usage(target, pool_map.pool_id, time.time())
            if everything:
                prefixes = [pool_prefix(pool_map.pool_id)]
            else:
                wanted = [
                    each
                    for each in found
                    if each and (names.get(each) == volume if volume else each not in names)
                ]
                prefixes = [volume_prefix(pool_map.pool_id, bytes.fromhex(each)) for each in wanted]
            for prefix in prefixes:
                for stored in drop_prefix(target, prefix):
                    count += 1
                    size += stored.size
        print(f"{section.name}: {counted(count, 'bundle')} deleted, {size / GIB:.2f} GiB")
