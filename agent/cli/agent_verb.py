"""`g35 agent`: the DPU program itself, in the foreground."""

import functools
import logging
import os
import signal
import sys
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Annotated, Final

import trio
import typer

from agent.cli.trio_run import run_unwrapped
from agent.config.configuration import Configuration, load_configuration
from agent.errors import ConfigError
from agent.host_os import garbage, systemd_notify
from agent.host_os.private_memory import keep_memory_private
from agent.host_os.whole_file import write_whole
from agent.pool.volume.puts_in_pieces import BEGUN_BYTES
from agent.query.query_json import BODY_BYTES_MAX
from agent.service.queue_plan import QueuePlan, queues_at
from agent.service.reader import OTHER_QUEUES
from agent.service.run import serve
from nvmeof.linux_limits import RESERVE_BYTES, Need, check_limits
from nvmeof.transport.local_queue import IO_THREADS, MAX_TRANSFER

PROGRAM_BYTES: Final = 384 << 20
"""Python, its libraries and the tables of an agent that has nothing to do."""
QUEUE_BYTES: Final = 12 << 20
"""Buffers of one worker: those of its channel and of its door."""
OTHER_THREADS: Final = 16
"""Beside those with queues: the supervisor's, metrics, and what connects."""
OTHER_FILES: Final = 64
"""Beside those of queues: the doors', the log's, clients that connect, readers of metrics."""

Config = Annotated[Path, typer.Option("--config", help="The TOML file; see docs/reference/configuration.md.")]


def agent(
    config: Config,
    ready_file: Annotated[
        Path | None,
        typer.Option(help="Write this process's id there once the pool is served; removed at the end."),
    ] = None,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Log at level INFO; without it, warnings and errors.")
    ] = False,
) -> None:
    """Serve the pool until Ctrl-C, SIGTERM or an unmount. Prints `ready` once it is up.

    The configuration names the doors, one at least: a mount (agent.mount), virtio-fs devices for virtual
    machines (a [[virtiofs]] table for each), S3 ([s3]).
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
            f"{', '.join(map(str, sorted(allowed)))}",
            "name others, or let the service use them (taskset, AllowedCPUs= of its unit)",
        )
    if cpus:
        try:
            os.sched_setaffinity(0, cpus)
        except OSError as error:
            raise ConfigError(
                f"agent.cpus: Linux refuses it: {error.strerror}",
                "a unit of systemd that refuses sched_setaffinity(2) has CPUAffinity= for it",
            ) from error


def run(configuration: Configuration, ready_file: Path | None) -> None:
    """Serve, with signals as the way to stop it. Raises G35Error where it cannot start."""

    check_limits(agent_need(configuration))

    def ready() -> None:
        garbage.search_seldom()
        if ready_file is not None:
            write_whole(ready_file, f"{os.getpid()}\n")
        systemd_notify.notify(systemd_notify.READY, f"STATUS=serving {served(configuration)}")
        print("ready", flush=True)

    try:
        run_unwrapped(functools.partial(_main, configuration, ready))
    finally:
        if ready_file is not None:
            ready_file.unlink(missing_ok=True)


def agent_need(configuration: Configuration) -> Need:
    """What an agent takes while it serves, at the most.

    Registered memory and that of guests are not in it: they are refused where there is no room.
    """
    settings, s3 = configuration.agent, configuration.s3
    staging = configuration.files.staging + (s3.staging if s3.listen else 0)
    waiting = sum(each.write_back_memory for each in configuration.policies if each.write == "back")
    asked = configuration.query.requests * BODY_BYTES_MAX if configuration.query.listen else 0
    promised = (
        asked + BEGUN_BYTES + settings.directory_cache + configuration.prestage.memory + staging + waiting
    )
    queues = QueuePlan.of(configuration).total
    paths = sum(len(each.each_path()) for each in configuration.enclosures)
    local = len(configuration.local)
    readers = settings.process_count - 1
    of_each = settings.worker_count + OTHER_QUEUES + (s3.workers if s3.listen else 0)
    of_guests = sum(len(queues_at(configuration, number)) for number in range(1, settings.process_count))
    of_readers = readers * of_each + of_guests
    return Need(
        "its configuration",
        PROGRAM_BYTES
        + RESERVE_BYTES
        + promised
        + queues * QUEUE_BYTES
        + local * IO_THREADS * MAX_TRANSFER
        + readers * PROGRAM_BYTES
        + of_readers * QUEUE_BYTES,
        queues + OTHER_THREADS + local * (IO_THREADS + 1) + of_readers + readers * OTHER_THREADS,
        2 * queues * (paths + 1) + OTHER_FILES,
        ", or lower agent.directory_cache, prestage.memory, files.staging and write_back_memory",
    )


def served(configuration: Configuration) -> str:
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
