"""`g35 pool add` and `g35 pool settle`: namespaces that join a pool, and the end of what follows."""

import sys
from typing import Annotated

import typer

from agent.attach.inspect_namespaces import look_round, want_all
from agent.cli.pool_channel import Config, keys_of, refuse_served, with_channel
from agent.cli.tables import progress_bar
from agent.config.configuration import load_configuration
from agent.errors import G35Error, UserError
from agent.membership.join import (
    complete_map,
    join,
    misplaced_values,
    newcomers_in,
    numbers_of,
    pool_of,
    unsettled,
    with_namespaces,
)
from agent.membership.join import settle as settle_map
from agent.pool.map.document import PoolMap
from agent.remote.channel import WorkerChannel
from agent.remote.fabric import Fabric


def add(
    config: Config,
    namespaces: Annotated[
        list[str] | None, typer.Argument(help="NGUIDs of the namespaces to add; default: all that are blank.")
    ] = None,
    force: Annotated[
        bool, typer.Option(help="Also overwrite those of NAMESPACES that carry data, an old pool too.")
    ] = False,
) -> None:
    """Add namespaces to the pool. Every volume gets its share of them, and agents follow within seconds.

    Values stay where they are until an agent with pool.rebalance moves them. After an add that was cut short
    run it again.
    """
    configuration = load_configuration(config)
    named = {each.lower() for each in namespaces or ()}
    if force and not named:
        raise UserError("--force wants the namespaces to be named", "see g35 pool show")
    _, seal = keys_of(configuration)

    def work(fabric: Fabric, channel: WorkerChannel) -> tuple[PoolMap, set[str], int]:
        seen = look_round(fabric, channel)
        pool_map = pool_of(seen, named if force else frozenset(), seal)
        want_all(pool_map, seen, fabric)
        newcomers = newcomers_in(pool_map, seen, named, force)
        if newcomers:
            # Before anything is written: whether it can be done at all.
            taken = dict(newcomers)
            refuse_served(inspection for nguid, _, inspection in seen if nguid in taken)
            with_namespaces(pool_map, newcomers)
        completed = channel.run(complete_map(channel, pool_map, seen, seal))
        for nguid, _, inspection in seen:
            if inspection.claimants - {pool_map.pool_id} and nguid.hex() not in named:
                print(f"namespace {nguid.hex()} is not added: {inspection.detail}", file=sys.stderr)
        if newcomers:
            with progress_bar() as progress:
                task = progress.add_task("clearing directories", total=None)
                pool_map = channel.run(
                    join(
                        channel,
                        pool_map,
                        newcomers,
                        numbers_of(seen),
                        lambda count: progress.advance(task, count),
                        named if force else frozenset(),
                        seal,
                    )
                )
        return pool_map, {nguid.hex() for nguid, _ in newcomers}, completed

    pool_map, joined, completed = with_channel(configuration, work, make=True)
    if completed:
        print(f"{completed} namespace(s) now carry the newest map, as an earlier change was to have it")
    for name in sorted(named - joined):
        print(f"namespace {name} belongs to the pool already; what is on it was not touched")
    if not joined:
        print(f"pool {pool_map.pool_id}: no namespace to add")
        return
    print(f"pool {pool_map.pool_id}: {len(joined)} namespace(s) more, {len(pool_map.namespaces)} in all")
    print(
        "agents that reach what has joined follow within seconds; one whose configuration lacks the "
        "enclosure misses what lies there: give it the enclosure, and start it again"
    )
    print("an agent that has pool.rebalance set moves what belongs there now")


def settle(
    config: Config,
    drop: Annotated[
        bool,
        typer.Option(help="Give up values of key-value volumes that are not moved yet: they become misses."),
    ] = False,
) -> None:
    """End a join of namespaces, once all values have moved. This is checked first.

    Agents then look at earlier places no more, and further namespaces may join.
    """
    configuration = load_configuration(config)
    root, seal = keys_of(configuration)

    def work(fabric: Fabric, channel: WorkerChannel) -> int | None:
        seen = look_round(fabric, channel)
        pool_map = pool_of(seen, seal=seal)
        want_all(pool_map, seen, fabric)
        if not unsettled(pool_map):
            return None
        wrong = 0
        for volume in unsettled(pool_map):
            if pool_map.is_erased(volume):
                continue
            secret = pool_map.secret(volume, root)
            values, elsewhere = channel.run(
                misplaced_values(channel, pool_map, volume, secret, numbers_of(seen))
            )
            if elsewhere and (volume.kind == "files" or not drop):
                raise G35Error(
                    f"{elsewhere} of {values} values of volume {volume.name} have not been moved yet",
                    "let an agent go on moving (pool.rebalance); g35 status says how far it is"
                    + ("" if volume.kind == "files" else "; --drop gives them up"),
                )
            wrong += elsewhere
        channel.run(settle_map(channel, pool_map, numbers_of(seen), seal))
        return wrong

    wrong = with_channel(configuration, work)
    if wrong is None:
        print("nothing has joined since the pool was settled")
        return
    print(
        "settled: agents look at no earlier places any more" + (f"; {wrong} values dropped" if wrong else "")
    )
