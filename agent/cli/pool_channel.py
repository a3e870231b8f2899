"""What the verbs on a pool share: a channel (connect, do the work, hang up), options, and guards.

Ctrl-C ends a verb as a crash would: requests under way are waited for shortly, and the next call of the verb
completes or undoes the rest.
"""

import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated, TypeVar

import trio
import typer

from agent.attach.connect import connected
from agent.attach.inspect_namespaces import look_round
from agent.attach.map_history import map_seal
from agent.cli.trio_run import run_unwrapped
from agent.config.configuration import Configuration
from agent.errors import UserError
from agent.host_os.presence import serving_processes
from agent.inline.secrets import RootKey, root_key_in
from agent.pool.map.document import PoolMap
from agent.pool.map.inspect import Inspection, newest_map
from agent.pool.map.map_seal import MapSeal
from agent.remote.channel import VerbChannel, WorkerChannel
from agent.remote.fabric import Fabric
from agent.sizes import parse_size

T = TypeVar("T")
Config = Annotated[
    Path, typer.Option("--config", help="The agent's TOML file, for enclosures, root key and volumes.")
]


def size_option(text: str | None) -> str | None:
    """A size on the command line, such as 10G; the text stays, for its unit."""
    try:
        parse_size(text)
    except ValueError as bad:
        raise typer.BadParameter(f"{text!r} is no size: {bad}") from None
    return text


def keys_of(configuration: Configuration) -> tuple[RootKey, MapSeal]:
    """The root key, and the seal that it puts on what verbs write. Raises ConfigError."""
    root = root_key_in(configuration.agent.key_file)
    return root, map_seal(root, configuration.agent.state)


END_SECONDS = 2.0
"""How long the end of a verb waits for the request that is under way; it may be one to a dead enclosure."""


def with_channel(
    configuration: Configuration, work: Callable[[Fabric, WorkerChannel], T], *, make: bool = False
) -> T:
    """Connect, and do blocking work on a channel of its own thread. `make`: local namespaces that are not
    made yet are made."""

    async def main() -> T:
        async with connected(configuration, 1, make=make) as supervisor:
            fabric = supervisor.fabric
            channel = VerbChannel(fabric, 1)
            ended = threading.Event()

            def on_thread() -> T:
                try:
                    channel.connect_ahead()
                    return work(fabric, channel)
                finally:
                    channel.close()
                    ended.set()

            try:
                return await trio.to_thread.run_sync(on_thread, abandon_on_cancel=True)
            finally:
                channel.stop()
                with trio.CancelScope(shield=True), trio.move_on_after(END_SECONDS):
                    while not ended.is_set():  # noqa: ASYNC110 - an abandoned thread cannot tell trio
                        await trio.sleep(0.02)

    return run_unwrapped(main)


def map_in_force(configuration: Configuration, seal: MapSeal | None = None) -> PoolMap:
    """The pool map that the enclosures carry. Raises G35Error where there is none."""

    def work(fabric: Fabric, channel: WorkerChannel) -> PoolMap:
        return newest_map([each for _, _, each in look_round(fabric, channel)], seal)

    return with_channel(configuration, work)


def refuse_served(inspections: Iterable[Inspection]) -> None:
    """Raises UserError where a pool that lies there is served by an agent of this machine.

    That would go on writing into what is another pool's by then, until it finds out
    (agent/attach/map_watch.py). An agent elsewhere cannot be seen from here.
    """
    pools = {each.superblock.pool_map.pool_id for each in inspections if each.superblock is not None}
    processes = serving_processes(pools)
    if processes:
        raise UserError(
            f"the pool there is being served, by process {', '.join(map(str, processes))}; "
            "it was not touched",
            "end the agent first: g35 unmount, or g35 down",
        )
