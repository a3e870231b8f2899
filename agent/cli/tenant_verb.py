"""`g35 tenant`: whose volumes there are, a tenant more, and everything of one made unreadable."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from agent.agent import look_round, unreached
from agent.cli.folding_table import folding_table
from agent.cli.pool_lanes import with_lanes
from agent.config import Configuration, load_configuration
from agent.errors import G35Error, UserError
from agent.inline.root_keys import root_key_in
from agent.map_watch import EVERY_SECONDS
from agent.pool.kv_opening import clear_keys
from agent.pool.opening import clear_directories, newest_map
from agent.pool.pool_map import PoolMap
from agent.pool.tenants import find_tenant, replace_map, volumes_of, with_tenant, without_key
from agent.remote.fabric import Fabric
from agent.remote.lanes import WorkerLanes

Config = Annotated[Path, typer.Option("--config", help="The TOML file with the enclosures.")]
Name = Annotated[str, typer.Argument(help="The tenant.")]

app = typer.Typer(no_args_is_help=True, help="The tenants of a pool, each with a key of its own.")


@app.command("list")
def list_tenants(
    config: Config, as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False
) -> None:
    """Show the tenants, whether their keys are there or erased, and their volumes."""
    configuration = load_configuration(config)

    def work(fabric: Fabric, lanes: WorkerLanes) -> PoolMap:
        return newest_map([inspection for _, _, inspection in look_round(fabric, lanes)])

    rows = rows_of(with_lanes(configuration, work))
    if as_json:
        print(json.dumps(rows, indent=1))
        return
    table = folding_table("Tenants", ("tenant", "key", "volumes"), ())
    for row in rows:
        table.add_row(row["name"], row["key"], ", ".join(row["volumes"]) or "none")
    Console().print(table)


def rows_of(pool_map: PoolMap) -> list[dict[str, Any]]:
    """Each tenant for `list`. A pool from before they had keys has a row that says so."""
    if not pool_map.tenants:
        names = [volume.name for volume in pool_map.volumes]
        return [{"name": "default", "key": "the root key (an old pool)", "volumes": names}]
    return [
        {
            "name": tenant.name,
            "key": "erased" if tenant.is_erased else "its own",
            "volumes": [volume.name for volume in volumes_of(pool_map, tenant)],
        }
        for tenant in pool_map.tenants
    ]


@app.command()
def add(name: Name, config: Config) -> None:
    """Give a tenant a key, and volumes: those of the configuration that name it, in room that is left.

    A tenant that was erased gets a fresh key and its volumes back, empty; one that is there stays as it is.
    Agents serve new volumes once they are started again.
    """
    configuration = load_configuration(config)
    if not 1 <= len(name) <= 64:
        raise UserError("a tenant's name has 1 to 64 characters")
    root = root_key_in(configuration.agent.key_file)
    wishes = [each.wish() for each in configuration.volumes]

    def work(fabric: Fabric, lanes: WorkerLanes) -> int:
        pool_map, numbers = _look(fabric, lanes)
        away = [each.nguid for each in pool_map.namespaces if each.nguid not in numbers]
        if away:
            raise G35Error(
                f"{len(away)} of the pool's namespaces are not reached; not connected: {unreached(fabric)}",
                "a tenant is added with all of them; nothing was changed",
            )
        # A root key that is not the pool's must not wrap anything in it.
        for volume in pool_map.volumes:
            if not pool_map.is_erased(volume):
                pool_map.secret(volume, root)
        changed, fresh = with_tenant(pool_map, name, wishes, root)
        for volume in fresh:
            lanes.run(clear_directories(lanes, volume, numbers, lambda _: None))
            for nguid in volume.kv_namespaces:
                lanes.run(clear_keys(lanes, numbers[nguid], lambda _: None))
        left = lanes.run(replace_map(lanes, changed, numbers))
        if left:
            raise G35Error(f"not everywhere: {_told(left)}", "look at the enclosures, and add it again")
        return len(fresh)

    count = with_lanes(configuration, work)
    print(
        f"tenant {name}: a key of its own, {count} new volume(s); agents serve them from their next start on"
    )


@app.command()
def erase(
    name: Name,
    config: Config,
    yes: Annotated[bool, typer.Option("--yes", help="Without it nothing is done.")] = False,
) -> None:
    """Make everything of a tenant unreadable for ever: its key is overwritten on every namespace.

    It takes no root key, and as long for a full pool as for an empty one. Agents that serve the pool notice.
    Exits with 1 while a namespace may still hold the key, and says which; do it again once it is reached.
    """
    configuration = load_configuration(config)
    if not yes:
        raise UserError(
            f"everything that tenant {name} has stored would be lost, for whoever holds whatever key",
            "say --yes if that is meant",
        )

    done = erase_tenant(configuration, name)
    pool_map, left, seconds = done.pool_map, done.left, done.seconds
    if left:
        raise G35Error(
            f"{len(left)} of {len(pool_map.namespaces)} namespaces may still hold the key of tenant {name}: "
            f"{_told(left)}",
            "bring them back and erase it again; until then keep them from agents: one that reaches nothing "
            "else would serve the tenant",
        )
    count = len(volumes_of(pool_map, find_tenant(pool_map, name)))
    print(f"tenant {name}: erased on {len(pool_map.namespaces)} namespaces in {seconds * 1e3:.1f} ms")
    print(
        f"{count} volumes are unreadable; agents that serve the pool drop them within {EVERY_SECONDS + 1:g} s"
    )


@dataclass(frozen=True, slots=True)
class Erased:
    """The map without the tenant's key; where it may not be in force, and why; how long writing it took."""

    pool_map: PoolMap
    left: dict[str, str]
    seconds: float


def erase_tenant(configuration: Configuration, name: str) -> Erased:
    """Write the map without the tenant's key to every namespace that is reached. Raises ConfigError."""

    def work(fabric: Fabric, lanes: WorkerLanes) -> Erased:
        pool_map, numbers = _look(fabric, lanes)
        began = time.perf_counter()
        erased = without_key(pool_map, name)
        left = lanes.run(replace_map(lanes, erased, numbers))
        return Erased(erased, left, time.perf_counter() - began)

    return with_lanes(configuration, work)


def _look(fabric: Fabric, lanes: WorkerLanes) -> tuple[PoolMap, dict[str, int]]:
    """The pool map in force, and the numbers of the namespaces that are reached."""
    seen = look_round(fabric, lanes)
    pool_map = newest_map([inspection for _, _, inspection in seen])
    numbers = {nguid.hex(): number for number, (nguid, _, _) in enumerate(seen)}
    return pool_map, numbers


def _told(left: dict[str, str]) -> str:
    return ", ".join(f"{nguid} ({why})" for nguid, why in left.items())
