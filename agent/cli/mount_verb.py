"""`g35 mount` and `g35 unmount`: the agent in the background, for people and scripts that think in mounts."""

import os
import shlex
import signal
import sys
import time
from pathlib import Path
from typing import Annotated

import typer

from agent.cli.status_document import DeadMount, read_status
from agent.cli.up.children import detach, end_process, told_by
from agent.cli.up.layout import is_alive
from agent.config.configuration import load_configuration
from agent.errors import G35Error, UserError
from agent.fs.doors.mounting import clear_dead_mount, is_mounted
from agent.host_os.hung_agent import AgentHangs
from nvmeof.authentication.private_files import user_name

READY_SECONDS = 30.0


def mount(
    config: Annotated[Path, typer.Option("--config", help="The agent's TOML file.")],
    log: Annotated[
        Path | None, typer.Option(help="The agent's log; default: agent.log in its state folder.")
    ] = None,
) -> None:
    """Start the agent of a configuration in the background. Returns once its mount serves."""
    configuration = load_configuration(config)
    settings = configuration.agent
    if settings.mount is None:
        raise G35Error(f"{config} names no agent.mount", "start such an agent with g35 agent")
    if is_mounted(settings.mount) and _is_served(settings.mount):
        raise G35Error(f"an agent serves {settings.mount} already", f"g35 unmount {settings.mount}")
    settings.state.mkdir(parents=True, exist_ok=True, mode=0o700)
    words = log or settings.state / "agent.log"
    ready_file = settings.state.absolute() / "mounted.pid"
    ready_file.unlink(missing_ok=True)
    command = [sys.executable, "-P", "-m", "agent.cli", "agent", "--config", str(config.absolute())]
    process = detach([*command, "--ready-file", str(ready_file)], words)
    try:
        while not ready_file.exists():
            if process.poll() is not None:
                said = told_by(words.read_text(errors="replace"), process.returncode)
                raise G35Error(f"the agent did not start: {said}", f"its log is {words}")
            time.sleep(0.05)
    except KeyboardInterrupt:
        # It has a session of its own, which a Ctrl-C at the terminal does not reach.
        end_process(process, READY_SECONDS)
        raise
    print(f"mounted at {settings.mount}, process {process.pid}")


def unmount(
    where: Annotated[
        Path, typer.Argument(parser=Path, metavar="<path>", help="The folder where the agent is mounted.")
    ],
) -> None:
    """End the agent behind a mount. It first stores what open files have staged, and unmounts.

    A dead mount, whose agent has ended already, is cleared away.
    """
    try:
        pid = int(read_status(where)["pid"])
    except DeadMount:
        clear_dead_mount(where)
        print(f"unmounted {where}, whose agent had ended already")
        return
    try:
        os.kill(pid, signal.SIGTERM)
    except PermissionError:
        owner = user_name(os.stat(f"/proc/{pid}").st_uid)
        raise UserError(
            f"user {owner} runs the agent behind {where}, process {pid}; you may not end it",
            f"run this as {owner if owner == 'root' else f'{owner} or as root'}: "
            f"sudo g35 unmount {shlex.quote(str(where))}",
        ) from None
    end = time.monotonic() + READY_SECONDS
    while is_alive(pid):
        if time.monotonic() > end:
            raise G35Error(f"the agent, process {pid}, does not end", "look at its log")
        time.sleep(0.05)
    print(f"unmounted {where}")


def _is_served(where: Path) -> bool:
    try:
        return bool(read_status(where))
    except AgentHangs:
        raise
    except G35Error:
        return False
