"""`g35 tenant`: whose volumes there are, a tenant more, and everything of one made unreadable."""

import json
import sys
import time
from dataclasses import dataclass
from typing import Annotated, Any, TypeAlias

import typer

from agent.attach.inspect_namespaces import look_round, want_all
from agent.attach.map_watch import EVERY_SECONDS
from agent.cli.pool_channel import Config, keys_of, map_in_force, size_option, with_channel
from agent.cli.record_options import AsJson
from agent.cli.tables import folding_table, print_tables
from agent.config.configuration import Configuration, load_configuration
from agent.errors import G35Error, UserError, did_you_mean
from agent.inline.secrets import RootKey
from agent.membership.join import numbers_of
from agent.pool.map.commit import Change, Guard, change_map, simply
from agent.pool.map.document import TENANTS_MAX, MapTenant, PoolMap
from agent.pool.map.inspect import clear_directories, newest_map
from agent.pool.map.key_epochs import (
    left_under_earlier,
    rotating,
    slots_taken,
    with_new_data_keys,
    without_earlier_keys,
)
from agent.pool.map.kv_superblock import clear_keys
from agent.pool.map.map_seal import MapSeal
from agent.pool.map.tenant_changes import find_tenant, volumes_of, with_limits, with_tenant, without_key
from agent.pool.steps import Steps
from agent.pool.volume.key_transition import QUIET_SECONDS
from agent.remote.channel import WorkerChannel
from agent.remote.fabric import Fabric
from agent.sizes import parse_size, size_text, unit_of

Name = Annotated[str, typer.Argument(help="Name of the tenant.")]

QuotaBytes = Annotated[
    str | None,
    typer.Option(
        callback=size_option, help="Bytes of slots that it may take up in the pool, such as 10G; 0: no limit."
    ),
]
QuotaSlots = Annotated[
    int | None, typer.Option(min=0, help="Slots that it may take up in the pool; 0: no limit.")
]
Bandwidth = Annotated[
    str | None,
    typer.Option(
        callback=size_option,
        help="Bytes a second, such as 500M, that it may move through each agent; 0: no limit.",
    ),
]

app = typer.Typer(
    rich_markup_mode=None, no_args_is_help=True, help="The tenants of a pool, each with a key of its own."
)


@app.command("list")
def list_tenants(config: Config, as_json: AsJson = False) -> None:
    """Show the tenants, their volumes, and whose keys are erased."""
    rows = rows_of(map_in_force(load_configuration(config)))
    if as_json:
        print(json.dumps(rows, indent=1))
        return
    columns = ("slots", "bytes", "bytes/s")
    table = folding_table("Tenants, and what they may have", ("tenant", "key", "volumes"), columns)
    for row in rows:
        limits = (row["quota_slots"], row["quota_bytes"], row["bandwidth"])
        slots, size, rate = limits
        shown = (str(slots or "any"), size_text(size) if size else "any", size_text(rate) if rate else "any")
        table.add_row(row["name"], row["key"], ", ".join(row["volumes"]) or "none", *shown)
    print_tables(table)


def rows_of(pool_map: PoolMap) -> list[dict[str, Any]]:
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
    """Give a tenant a key, and volumes as the configuration says.

    The volumes take room that is left in the pool. `g35 tenant set` changes the limits later. An erased
    tenant gets a fresh key and its volumes back, empty; that takes some seconds, until no agent stores with
    earlier keys. For a tenant that exists only the named limits change, and none below its present use.
    Agents serve new volumes after a restart.
    """
    configuration = load_configuration(config)
    limits = _limits(quota_bytes, quota_slots, bandwidth)
    root, seal = keys_of(configuration)
    wishes = [each.wish() for each in configuration.volumes]

    def work(fabric: Fabric, channel: WorkerChannel) -> int:
        pool_map, numbers, _ = _look_at_maps(fabric, channel, seal)
        _check_root_key(pool_map, root)
        waited_for = pool_map = _let_agents_drop(channel, pool_map, numbers, name, seal)
        count = 0

        def change(base: PoolMap, guard: Guard) -> Steps[PoolMap]:
            nonlocal count
            _check_root_key(base, root)
            if is_erased(base, name) and not is_erased(waited_for, name):
                raise G35Error(f"tenant {name} was erased just now", "nothing was added; say it again")
            changed, fresh = with_tenant(base, name, wishes, root)
            for volume in fresh:
                yield from clear_directories(channel, volume, numbers, lambda _: None, guard)
                for nguid in volume.kv_namespaces:
                    yield from guard()
                    yield from clear_keys(channel, numbers[nguid], lambda _: None)
            count = len(fresh) or count
            asked = with_limits(changed, name, **limits)
            if changed is base:
                advice = f"if that is meant: g35 tenant set {name} --yes, with the same limits"
                refuse_to_shrink(channel, base, asked, name, numbers, _unit(quota_bytes), advice)
            return asked

        _replace(channel, pool_map, numbers, change, seal)
        return count

    count = with_channel(configuration, work)
    if not count and all(wish.tenant != name for wish in wishes):
        near = did_you_mean(name, {wish.tenant for wish in wishes})
        print(
            f"no volume of the configuration names tenant {name}{near}: if that is a slip, note that "
            f"a tenant's row stays in the pool map ({TENANTS_MAX} at most)",
            file=sys.stderr,
        )
    served = "; agents serve them from their next start on" if count else ""
    print(f"tenant {name}: a key of its own, {count} new volume(s){served}")


def _check_root_key(pool_map: PoolMap, root: RootKey) -> None:
    """One that is not the pool's must not wrap anything in it. Raises ConfigError."""
    for volume in pool_map.volumes:
        if not pool_map.is_erased(volume):
            pool_map.secret(volume, root)


def is_erased(pool_map: PoolMap, name: str) -> bool:
    return any(tenant.is_erased for tenant in pool_map.tenants if tenant.name == name)


def _let_agents_drop(
    channel: WorkerChannel, pool_map: PoolMap, numbers: dict[str, int], name: str, seal: MapSeal
) -> PoolMap:
    """Where a tenant was erased, wait until no agent stores for it any more: what one named after its
    directories were cleared would fill the new volumes with what nobody can open."""
    if not is_erased(pool_map, name):
        return pool_map
    # By a verb that was interrupted between two namespaces: from here on agents see it on any of them.
    pool_map = _replace(channel, pool_map, numbers, simply(lambda base: base), seal)
    print(f"{QUIET_SECONDS:g} s, in which agents drop what was erased", file=sys.stderr)
    time.sleep(QUIET_SECONDS)
    return pool_map


@app.command("set")
def set_limits(
    name: Name,
    config: Config,
    quota_bytes: QuotaBytes = None,
    quota_slots: QuotaSlots = None,
    bandwidth: Bandwidth = None,
    yes: Annotated[
        bool,
        typer.Option(
            "--yes", help="Also lower a limit below what the tenant holds, so that it loses values."
        ),
    ] = False,
) -> None:
    """Change the limits of a tenant. Limits that are not named stay.

    Agents apply them within seconds. A tenant above a new limit loses its least wanted values, one by one. So
    a limit below its present use takes --yes.
    """
    limits = _limits(quota_bytes, quota_slots, bandwidth)
    if not limits:
        raise UserError("nothing to set", "give --quota-bytes, --quota-slots or --bandwidth")
    configuration = load_configuration(config)
    seal = keys_of(configuration)[1]

    def work(fabric: Fabric, channel: WorkerChannel) -> MapTenant:
        pool_map, numbers, _ = _look_at_maps(fabric, channel, seal)
        asked = with_limits(pool_map, name, **limits)
        if not yes:
            refuse_to_shrink(channel, pool_map, asked, name, numbers, _unit(quota_bytes))
        change = simply(lambda base: with_limits(base, name, **limits))
        changed = _replace(channel, pool_map, numbers, change, seal)
        return find_tenant(changed, name)

    tenant = with_channel(configuration, work)
    print(f"tenant {name}: {limits_text(tenant, _unit(quota_bytes), _unit(bandwidth))}")


def limits_text(tenant: MapTenant, bytes_unit: str | None = None, rate_unit: str | None = None) -> str:
    """What a tenant may have, in the units that were typed where some were."""
    size = size_text(tenant.quota_bytes, bytes_unit) if tenant.quota_bytes else "any bytes"
    rate = size_text(tenant.bandwidth, rate_unit) if tenant.bandwidth else "any bytes"
    return f"{tenant.quota_slots or 'any'} slots, {size} of slots, {rate} a second through each agent"


def refuse_to_shrink(
    channel: WorkerChannel,
    pool_map: PoolMap,
    asked: PoolMap,
    name: str,
    numbers: dict[str, int],
    unit: str | None = None,
    advice: str = "say --yes if that is meant",
) -> None:
    """Raises UserError where a tenant holds more than it may have by the map that is asked for.

    `unit`: in which its quota of bytes was typed. `advice`: how to do it all the same, by the verb that asks.
    """
    before, after = find_tenant(pool_map, name), find_tenant(asked, name)
    slots_max, bytes_max = after.quota_slots, after.quota_bytes
    if (slots_max, bytes_max) == (before.quota_slots, before.quota_bytes):
        return
    slots = size = 0
    for volume in volumes_of(pool_map, before):
        taken = channel.run(slots_taken(channel, volume, numbers))
        slots, size = slots + taken, size + taken * pool_map.settings(volume).slot_bytes
    if (slots_max and slots > slots_max) or (bytes_max and size > bytes_max):
        raise UserError(
            f"tenant {name} holds {slots} slots, {size_text(size, unit)} of slots, may have "
            f"{slots_max or 'any'} and {size_text(bytes_max, unit) if bytes_max else 'any bytes'} then, and "
            "would lose what is too much",
            advice,
        )


@app.command()
def rotate(
    name: Name,
    config: Config,
    wait: Annotated[
        float, typer.Option(min=0, help="Seconds to wait for the end of the rotation, once it has begun.")
    ] = 0.0,
) -> None:
    """Give a tenant's volumes new data keys, or end a rotation.

    Agents seal the stored values anew while they serve. Run it again to see how many values are left; with
    none left, it overwrites the earlier keys on every namespace. A rotation that has not ended everywhere is
    ended first. Exit code 1 where --wait was given and the rotation is not over.
    """
    configuration = load_configuration(config)
    root, seal = keys_of(configuration)

    def work(fabric: Fabric, channel: WorkerChannel) -> str:
        pool_map, numbers, others = _look_at_maps(fabric, channel, seal)
        find_tenant(pool_map, name)
        # By a verb that was interrupted between two namespaces: from here on agents see it on any of them.
        pool_map = _replace(channel, pool_map, numbers, simply(lambda base: base), seal)
        if not rotating(pool_map, name) and any(holds_earlier_key(each, pool_map, name) for each in others):
            return "the rotation before is ended everywhere now; say it again for another one"
        if not rotating(pool_map, name):

            def begun(base: PoolMap) -> PoolMap:
                return base if rotating(base, name) else with_new_data_keys(base, name, root)

            pool_map = _replace(channel, pool_map, numbers, simply(begun), seal)
            if not wait:
                return "begun; agents seal anew what is stored. Say it again to see how much is left"
        end = time.monotonic() + wait
        while left := _left_under_earlier(channel, pool_map, name, numbers):
            if time.monotonic() >= end:
                what = f"{left} values are under the earlier keys still"
                if wait:
                    raise G35Error(f"tenant {name}: {what}", _who_sees_to_them(pool_map, name))
                return f"{what}; {_who_sees_to_them(pool_map, name)}"
            time.sleep(min(1.0, max(0.0, end - time.monotonic())))
            pool_map, numbers, _ = _look_at_maps(fabric, channel, seal)
            _refuse_erased(pool_map, name)
        ended = {volume.volume_id: volume.key_epoch for volume in rotating(pool_map, name)}

        def over(base: PoolMap) -> PoolMap:
            # Another rotation that has begun meanwhile is none that was looked at.
            waiting = {
                volume.volume_id
                for volume in rotating(base, name)
                if ended.get(volume.volume_id) == volume.key_epoch
            }
            return without_earlier_keys(base, waiting) if waiting else base

        _refuse_erased(_replace(channel, pool_map, numbers, simply(over), seal), name)
        if not ended:
            return "somebody else has ended the rotation meanwhile"
        return f"the earlier keys of {len(ended)} volume(s) are overwritten, nothing is left under them"

    try:
        print(f"tenant {name}: {with_channel(configuration, work)}")
    except KeyboardInterrupt:
        print(
            f"tenant {name}: no longer waited for. What was begun goes on: say it again (g35 tenant rotate "
            f"{name}) to see how much is left, and to end it",
            file=sys.stderr,
        )
        raise


def _refuse_erased(pool_map: PoolMap, name: str) -> None:
    if find_tenant(pool_map, name).is_erased:
        raise G35Error(f"tenant {name} was erased meanwhile", "it has no keys any more, nor an earlier one")


def _who_sees_to_them(pool_map: PoolMap, name: str) -> str:
    if any(volume.kind == "files" for volume in rotating(pool_map, name)):
        return (
            "agents that serve see to them, to blocks of files the one that has the files (in /fs or by S3); "
            "what files have that does not open stays until they are read or deleted. Say it again"
        )
    return "agents that serve see to them. Say it again"


def holds_earlier_key(earlier: PoolMap, pool_map: PoolMap, name: str) -> bool:
    """Whether a map that lay beside the one in force had a key that a rotation was to overwrite."""
    if all(tenant.name != name for tenant in earlier.tenants) or earlier.pool_id != pool_map.pool_id:
        return False
    epochs = {
        volume.volume_id: volume.key_epoch for volume in volumes_of(pool_map, find_tenant(pool_map, name))
    }
    return any(epochs.get(volume.volume_id) == volume.key_epoch for volume in rotating(earlier, name))


def _left_under_earlier(channel: WorkerChannel, pool_map: PoolMap, name: str, numbers: dict[str, int]) -> int:
    """How many values are left; 0 only where there was none twice, with time for the last writes between."""

    def count() -> int:
        return sum(
            channel.run(left_under_earlier(channel, volume, numbers)) for volume in rotating(pool_map, name)
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
    yes: Annotated[
        bool, typer.Option("--yes", help="Erase. Without it, only say what would be lost.")
    ] = False,
) -> None:
    """Make all of a tenant unreadable for ever. Its key is overwritten on every namespace.

    A full pool takes no longer than an empty one. Agents drop the tenant within seconds. Exit code 1 while a
    namespace, which is named, may still hold the key: erase again once it is reached.
    """
    configuration = load_configuration(config)
    seal = keys_of(configuration)[1]
    if not yes:
        tenant, names = with_channel(
            configuration,
            lambda fabric, channel: _named(_look_at_maps(fabric, channel, seal, all_of_them=False)[0], name),
        )
        volumes = f" in {len(names)} volume(s) ({', '.join(names)})" if names else ""
        raise UserError(
            f"tenant {name} was erased; --yes erases it where that was not reached then"
            if tenant.is_erased
            else f"everything that tenant {name} has stored{volumes} would be lost, under any key",
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
        f"{count} volume(s) unreadable; agents that serve the pool drop them within {EVERY_SECONDS + 1:g} s"
    )


def _named(pool_map: PoolMap, name: str) -> tuple[MapTenant, list[str]]:
    """A tenant and the names of its volumes. Raises ConfigError where the pool has none of that name."""
    tenant = find_tenant(pool_map, name)
    return tenant, [volume.name for volume in volumes_of(pool_map, tenant)]


@dataclass(frozen=True, slots=True)
class Erased:
    """The map without the tenant's key; where it may not be in force, and why; how long writing it took."""

    pool_map: PoolMap
    left: dict[str, str]
    seconds: float


def erase_tenant(configuration: Configuration, name: str) -> Erased:
    """Write the map without the tenant's key to every namespace that is reached. Raises ConfigError."""
    seal = keys_of(configuration)[1]

    def work(fabric: Fabric, channel: WorkerChannel) -> Erased:
        pool_map, numbers, _ = _look_at_maps(fabric, channel, seal, all_of_them=False)
        began = time.perf_counter()
        change = simply(lambda base: without_key(base, name))
        done = channel.run(change_map(channel, pool_map, numbers, change, all_of_them=False, seal=seal))
        return Erased(done.pool_map, done.left, time.perf_counter() - began)

    return with_channel(configuration, work)


_Maps: TypeAlias = tuple[PoolMap, dict[str, int], list[PoolMap]]
"""The pool map in force, the numbers of the namespaces that are reached, and all maps there that count."""


def _look_at_maps(
    fabric: Fabric, channel: WorkerChannel, seal: MapSeal, *, all_of_them: bool = True
) -> _Maps:
    """Raises G35Error where `all_of_them` are wanted and a namespace of the pool is not reached."""
    seen = look_round(fabric, channel)
    inspections = [inspection for _, _, inspection in seen]
    maps: list[PoolMap] = []
    for each in inspections:
        if each.superblock is not None:
            maps += each.maps or (each.superblock.pool_map,)
    pool_map = newest_map(inspections, seal)
    if all_of_them:
        want_all(pool_map, seen, fabric)
    return pool_map, numbers_of(seen), seal.counting(maps)


def _replace(
    channel: WorkerChannel, pool_map: PoolMap, numbers: dict[str, int], change: Change, seal: MapSeal
) -> PoolMap:
    """Change the map, beside others that do so meanwhile; what is in force then. Raises G35Error."""
    done = channel.run(change_map(channel, pool_map, numbers, change, seal=seal))
    if done.left:
        raise G35Error(f"not everywhere: {_told(done.left)}", "look at the enclosures, and do it again")
    return done.pool_map


def _limits(quota_bytes: str | None, quota_slots: int | None, bandwidth: str | None) -> dict[str, int]:
    limits = {} if quota_slots is None else {"quota_slots": quota_slots}
    for key, text in (("quota_bytes", quota_bytes), ("bandwidth", bandwidth)):
        if text is not None:
            size = parse_size(text)
            assert isinstance(size, int)
            limits[key] = size
    return limits


def _unit(text: str | None) -> str | None:
    """The unit that a limit was typed in; None where it was not."""
    return None if text is None else unit_of(text)


def _told(left: dict[str, str]) -> str:
    return ", ".join(f"{nguid} ({why})" for nguid, why in left.items())
