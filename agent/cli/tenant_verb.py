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
from agent.pool.key_epochs import (
    QUIET_SECONDS,
    left_under_earlier,
    rotating,
    with_new_data_keys,
    without_earlier_keys,
)
from agent.pool.kv_opening import clear_keys
from agent.pool.opening import clear_directories, newest_map
from agent.pool.pool_map import MapTenant, PoolMap
from agent.pool.tenants import find_tenant, replace_map, volumes_of, with_limits, with_tenant, without_key
from agent.remote.fabric import Fabric
from agent.remote.lanes import WorkerLanes
from agent.sizes import parse_size

Config = Annotated[Path, typer.Option("--config", help="The TOML file with the enclosures.")]
Name = Annotated[str, typer.Argument(help="The tenant.")]

QuotaBytes = Annotated[
    str | None, typer.Option(help="Bytes of slots that it may take up in the pool, such as 10G; 0: no limit.")
]
QuotaSlots = Annotated[
    int | None, typer.Option(min=0, help="Slots that it may take up in the pool; 0: no limit.")
]
Bandwidth = Annotated[
    str | None,
    typer.Option(help="Bytes a second, such as 500M, that it may move through each agent; 0: no limit."),
]

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
    columns = ("slots", "bytes", "bytes/s")
    table = folding_table("Tenants, and what they may have", ("tenant", "key", "volumes"), columns)
    for row in rows:
        limits = (row["quota_slots"], row["quota_bytes"], row["bandwidth"])
        shown = (str(limit or "any") for limit in limits)
        table.add_row(row["name"], row["key"], ", ".join(row["volumes"]) or "none", *shown)
    Console().print(table)


def rows_of(pool_map: PoolMap) -> list[dict[str, Any]]:
    """Each tenant for `list`. A pool from before they had keys has a row that says so."""
    if not pool_map.tenants:
        names = [volume.name for volume in pool_map.volumes]
        row = {"name": "default", "key": "the root key (an old pool)", "volumes": names}
        return [{**row, "quota_slots": 0, "quota_bytes": 0, "bandwidth": 0}]
    return [
        {
            "name": tenant.name,
            "key": "erased" if tenant.is_erased else "its own",
            "volumes": [volume.name for volume in volumes_of(pool_map, tenant)],
            "quota_slots": tenant.quota_slots,
            "quota_bytes": tenant.quota_bytes,
            "bandwidth": tenant.bandwidth,
        }
        for tenant in pool_map.tenants
    ]


@app.command()
def add(
    name: Name,
    config: Config,
    quota_bytes: QuotaBytes = None,
    quota_slots: QuotaSlots = None,
    bandwidth: Bandwidth = None,
) -> None:
    """Give a tenant a key, and volumes: those of the configuration that name it, in room that is left.

    What it may have of the pool is changed later by `g35 tenant set`. A tenant that was erased gets a fresh
    key and its volumes back, empty; of one that is there only the limits that are named change.
    Agents serve new volumes once they are started again.
    """
    configuration = load_configuration(config)
    if not 1 <= len(name) <= 64:
        raise UserError("a tenant's name has 1 to 64 characters")
    limits = _limits(quota_bytes, quota_slots, bandwidth)
    root = root_key_in(configuration.agent.key_file)
    wishes = [each.wish() for each in configuration.volumes]

    def work(fabric: Fabric, lanes: WorkerLanes) -> int:
        pool_map, numbers = _look_at_all(fabric, lanes)
        # A root key that is not the pool's must not wrap anything in it.
        for volume in pool_map.volumes:
            if not pool_map.is_erased(volume):
                pool_map.secret(volume, root)
        changed, fresh = with_tenant(pool_map, name, wishes, root)
        changed = with_limits(changed, name, **limits)
        for volume in fresh:
            lanes.run(clear_directories(lanes, volume, numbers, lambda _: None))
            for nguid in volume.kv_namespaces:
                lanes.run(clear_keys(lanes, numbers[nguid], lambda _: None))
        _replace(lanes, changed, numbers)
        return len(fresh)

    count = with_lanes(configuration, work)
    print(
        f"tenant {name}: a key of its own, {count} new volume(s); agents serve them from their next start on"
    )


@app.command("set")
def set_limits(
    name: Name,
    config: Config,
    quota_bytes: QuotaBytes = None,
    quota_slots: QuotaSlots = None,
    bandwidth: Bandwidth = None,
) -> None:
    """Change what a tenant may have of the pool; what is not named stays as it is.

    Agents that serve keep to it within seconds. One that holds more than it may have loses, value by value,
    what seems least wanted of its own. It takes no root key.
    """
    limits = _limits(quota_bytes, quota_slots, bandwidth)
    if not limits:
        raise UserError("nothing to set", "give --quota-bytes, --quota-slots or --bandwidth")

    def work(fabric: Fabric, lanes: WorkerLanes) -> MapTenant:
        pool_map, numbers = _look_at_all(fabric, lanes)
        changed = with_limits(pool_map, name, **limits)
        _replace(lanes, changed, numbers)
        return find_tenant(changed, name)

    tenant = with_lanes(load_configuration(config), work)
    slots, size, rate = (each or "any" for each in (tenant.quota_slots, tenant.quota_bytes, tenant.bandwidth))
    print(f"tenant {name}: {slots} slots, {size} bytes of slots, {rate} bytes a second through each agent")


@app.command()
def rotate(
    name: Name,
    config: Config,
    wait: Annotated[
        float, typer.Option(min=0, help="Seconds to wait for the end of the rotation, once it has begun.")
    ] = 0.0,
) -> None:
    """Give the volumes of a tenant new data keys, or end a rotation that was begun.

    Agents that serve seal anew what is stored, and nobody has to stop. Called again, it says how much is
    left; where nothing is, the earlier keys are overwritten on every namespace. To begin takes the root key.
    """
    configuration = load_configuration(config)

    def work(fabric: Fabric, lanes: WorkerLanes) -> str:
        pool_map, numbers = _look_at_all(fabric, lanes)
        if not rotating(pool_map, name):
            pool_map = with_new_data_keys(pool_map, name, root_key_in(configuration.agent.key_file))
            _replace(lanes, pool_map, numbers)
            if not wait:
                return "begun; agents seal anew what is stored. Say it again to see how much is left"
        end = time.monotonic() + wait
        while left := _left_under_earlier(lanes, pool_map, name, numbers):
            if time.monotonic() >= end:
                return f"{left} values are under the earlier keys still; agents that serve see to them"
            time.sleep(min(1.0, max(0.0, end - time.monotonic())))
        ended = {volume.volume_id for volume in rotating(pool_map, name)}
        _replace(lanes, without_earlier_keys(pool_map, ended), numbers)
        return f"the earlier keys of {len(ended)} volumes are overwritten, nothing is left under them"

    print(f"tenant {name}: {with_lanes(configuration, work)}")


def _left_under_earlier(lanes: WorkerLanes, pool_map: PoolMap, name: str, numbers: dict[str, int]) -> int:
    """How many values are left; 0 only where there was none twice, with time for the last writes between."""

    def count() -> int:
        return sum(
            lanes.run(left_under_earlier(lanes, volume, numbers)) for volume in rotating(pool_map, name)
        )

    left = count()
    if not left:
        time.sleep(QUIET_SECONDS)
        left = count()
    return left


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


def _look_at_all(fabric: Fabric, lanes: WorkerLanes) -> tuple[PoolMap, dict[str, int]]:
    """As `_look`. Raises G35Error where a namespace of the pool is not reached."""
    pool_map, numbers = _look(fabric, lanes)
    away = [each.nguid for each in pool_map.namespaces if each.nguid not in numbers]
    if away:
        raise G35Error(
            f"{len(away)} of the pool's namespaces are not reached; not connected: {unreached(fabric)}",
            "this is done with all of them; nothing was changed",
        )
    return pool_map, numbers


def _replace(lanes: WorkerLanes, pool_map: PoolMap, numbers: dict[str, int]) -> None:
    left = lanes.run(replace_map(lanes, pool_map, numbers))
    if left:
        raise G35Error(f"not everywhere: {_told(left)}", "look at the enclosures, and do it again")


def _limits(quota_bytes: str | None, quota_slots: int | None, bandwidth: str | None) -> dict[str, int]:
    """What was named on the command line. Raises UserError for what is no size."""
    limits = {} if quota_slots is None else {"quota_slots": quota_slots}
    for key, text in (("quota_bytes", quota_bytes), ("bandwidth", bandwidth)):
        if text is not None:
            try:
                size = parse_size(text)
            except ValueError as bad:
                raise UserError(f"{text!r} is no size: {bad}") from None
            assert isinstance(size, int)
            limits[key] = size
    return limits


def _told(left: dict[str, str]) -> str:
    return ", ".join(f"{nguid} ({why})" for nguid, why in left.items())
