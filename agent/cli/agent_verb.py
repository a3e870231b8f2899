"""`g35 agent`: the DPU program itself, in the foreground."""

from __future__ import annotations

import functools
import logging
import os
import signal
import sys
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Annotated

import trio
import typer

from agent import systemd_notify
from agent.agent import serve
from agent.cli.trio_run import run_unwrapped
from agent.config import Configuration, load_configuration
from agent.errors import ConfigError
from agent.pool.begun_puts import BEGUN_BYTES
from agent.private_memory import keep_memory_private
from agent.process_limits import check_limits

Config = Annotated[Path, typer.Option("--config", help="The TOML file; see docs/reference/configuration.md.")]


def agent(
    config: Config,
    ready_file: Annotated[
        Path | None, typer.Option(help="Write this process's id here once the pool is served.")
    ] = None,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Log what goes well, too.")] = False,
) -> None:
    """Serve the pool until Ctrl-C, SIGTERM or an unmount. Says `ready` once it is up.

    Where it is served the configuration says: at a mount (agent.mount), to virtual machines by virtio-fs
    devices (a [[virtiofs]] table for each), or both.
    """
    logging.basicConfig(
        level=logging.INFO if verbose else logging.WARNING,
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
        stream=sys.stderr,
    )
    configuration = load_configuration(config)
    stay_on(configuration.agent.cpus)
    keep_memory_private()
    run(configuration, ready_file)


def stay_on(cpus: Collection[int]) -> None:
    """Run on these processors alone, as all threads do that are started from now on. Empty: as it is."""
    allowed = os.sched_getaffinity(0)
    if absent := sorted(set(cpus) - allowed):
        raise ConfigError(
            f"agent.cpus: {', '.join(map(str, absent))} may not be used here, only "
            f"{', '.join(map(str, sorted(allowed)))}"
        )
    if cpus:
        try:
            os.sched_setaffinity(0, cpus)
        except OSError as error:
            raise ConfigError(
                f"agent.cpus: Linux refuses it: {error.strerror}",
                "a unit of systemd that refuses sched_setaffinity(2), as ours does, has CPUAffinity= for it",
            ) from error


def run(configuration: Configuration, ready_file: Path | None) -> None:
    """Serve, with signals as the way to stop it. Raises G35Error where it cannot start."""

    def ready() -> None:
        check_limits(promised_bytes(configuration))
        if ready_file is not None:
            announce(ready_file)
        systemd_notify.notify(systemd_notify.READY, f"STATUS=serving {served(configuration)}")
        print("ready", flush=True)

    try:
        run_unwrapped(functools.partial(_main, configuration, ready))
    finally:
        if ready_file is not None:
            ready_file.unlink(missing_ok=True)


def promised_bytes(configuration: Configuration) -> int:
    """Memory that the agent takes while it serves, at the most. Registered memory is not in it: it is refused
    to clients where there is no room (agent/fs/registered_memory.py)."""
    staging = configuration.files.staging + (configuration.s3.staging if configuration.s3.listen else 0)
    waiting = sum(each.write_back_memory for each in configuration.policies if each.write == "back")
    kept = configuration.agent.directory_cache + configuration.prestage.memory
    return BEGUN_BYTES + kept + staging + waiting


def served(configuration: Configuration) -> str:
    """Where the pool is reached, for a line about it."""
    sockets = [str(device.socket) for device in configuration.virtiofs]
    mount = configuration.agent.mount
    return ", ".join([str(mount), *sockets] if mount is not None else sockets)


async def _main(configuration: Configuration, ready: Callable[[], None]) -> None:
    stop = trio.Event()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(_stop_on_signal, stop)
        nursery.start_soon(_say_alive)
        await serve(configuration, ready, stop)
        nursery.cancel_scope.cancel()


async def _stop_on_signal(stop: trio.Event) -> None:
    with trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
        async for _ in signals:
            systemd_notify.notify(systemd_notify.STOPPING, "STATUS=sealing what is staged")
            stop.set()


async def _say_alive() -> None:
    """Feed systemd's watchdog, if there is one, for as long as the supervisor's loop turns."""
    every = systemd_notify.watchdog_seconds()
    while every is not None:
        systemd_notify.notify(systemd_notify.ALIVE)
        await trio.sleep(every)


def announce(file: Path) -> None:
    """Write our process id, whole or not at all."""
    partial = file.with_suffix(".part")
    partial.write_text(f"{os.getpid()}\n")
    partial.replace(file)
