"""`g35 host`: the GPU host, a guest with the agent's virtio-fs device mounted.

Exit codes: 0 success, 1 failure, 2 wrong arguments, 130 Ctrl-C; with a command, the command's own; 125 where
the guest could not mount the device.
"""

import os
import tomllib
from pathlib import Path
from typing import Annotated

import typer

from emulator.lab import cli
from emulator.lab.accelerator import choose_accelerator
from emulator.lab.cache import REPOSITORY
from emulator.lab.device_socket import require_socket
from emulator.lab.gpu_host import GpuHostShape, gpu_host

MEMORY_MIB_MIN = 512
MEMORY_MIB_MAX = 64 << 10
CORES_MAX = 64
TAG_BYTES_MAX = 36
"""In the device's configuration space (virtio 1.2, 5.11.4)."""

THE_GUEST = "the GPU host"

app = typer.Typer(
    rich_markup_mode=None,
    add_completion=False,
    pretty_exceptions_enable=False,
)


@app.command()
def host(
    command: Annotated[
        list[str] | None,
        typer.Argument(
            help="The command and its arguments, after --; without one: a shell", show_default=False
        ),
    ] = None,
    socket: Annotated[
        Path | None,
        typer.Option(help="The agent's vhost-user socket; default: that of `g35 up --virtiofs`."),
    ] = None,
    config: Annotated[
        Path | None, typer.Option(help="The agent's configuration, instead of --socket.")
    ] = None,
    tag: Annotated[
        str, typer.Option(help="The device's tag, the first word after mount -t virtiofs.")
    ] = "g35",
    mount: Annotated[
        str, typer.Option(help="Folder of the guest to mount it at; empty: leave that to you.")
    ] = "/mnt/g35",
    memory: Annotated[
        int, typer.Option(help="MiB of memory.", min=MEMORY_MIB_MIN, max=MEMORY_MIB_MAX)
    ] = 2048,
    cpus: Annotated[int, typer.Option(help="Cores, each with a request queue.", min=1, max=CORES_MAX)] = 2,
    timeout: Annotated[
        float, typer.Option(help="With a command: seconds until the guest is ended.", min=1)
    ] = (3600.0),
    folder: Annotated[Path, typer.Option(help=cli.FOLDER_HELP)] = REPOSITORY,
    results: Annotated[
        Path | None, typer.Option(help="Folder for the files that the command leaves in /run/g35/results.")
    ] = None,
) -> None:
    """Start the GPU host: Debian's kernel in QEMU, the running agent's virtio-fs device mounted in it.

    Opens a shell there (`exit` powers it off; Ctrl-A X ends QEMU), or runs one command, prints what it
    prints and exits with its status. The agent goes on. Example: g35 host -- ls /mnt/g35/kv
    """
    if not 1 <= len(tag.encode()) <= TAG_BYTES_MAX:
        raise typer.BadParameter(f"a tag has 1 to {TAG_BYTES_MAX} bytes", param_hint="--tag")
    if mount and not mount.startswith("/"):
        raise typer.BadParameter("name it from the root, such as /mnt/g35", param_hint="--mount")
    if socket is not None and config is not None:
        raise typer.BadParameter("name the one or the other", param_hint="--socket, --config")
    place = socket or (socket_of(config) if config else default_socket())
    shape = GpuHostShape(memory, cpus, tag, mount)
    start = cli.checked_folder(folder)
    with cli.failures_told():
        require_socket(place)
        image = cli.prepared_image()
        accelerator = choose_accelerator(image)
        with gpu_host(
            command or "exec /bin/bash --login",
            place,
            image=image,
            accelerator=accelerator,
            shape=shape,
            folder=start,
            interactive=not command,
            tell=_tell,
        ) as guest:
            if not command:
                cli.wait_on_terminal(guest, THE_GUEST)
                return
            if cli.told.is_terminal:
                cli.told.print(f"booting {THE_GUEST}")
            try:
                status = guest.wait(timeout, cli.print_raw).status
            finally:
                if results is not None:
                    guest.copy_results(results)
        raise typer.Exit(status)


def default_socket() -> Path:
    """The socket of the agent of `g35 up --virtiofs` without --state."""
    base = os.environ.get("XDG_STATE_HOME")
    return (Path(base) if base else Path.home() / ".local/state") / "g35/virtiofs.sock"


def socket_of(config: Path) -> Path:
    """The socket that an agent's configuration names. Raises BadParameter for none or several."""
    try:
        with config.open("rb") as file:
            found = tomllib.load(file)
    except OSError as error:
        raise typer.BadParameter(f"{config}: {error.strerror}", param_hint="--config") from None
    except ValueError as error:  # tomllib's own, and bytes that are no UTF-8
        raise typer.BadParameter(f"{config} is no TOML: {error}", param_hint="--config") from None
    devices = found.get("virtiofs")
    sockets = [
        device["socket"]
        for device in (devices if isinstance(devices, list) else [devices])
        if isinstance(device, dict) and isinstance(device.get("socket"), str)
    ]
    if not sockets:
        raise typer.BadParameter(f"{config} names no socket in [virtiofs]", param_hint="--config")
    if len(sockets) != 1:
        names = ", ".join(sockets)
        raise typer.BadParameter(f"{config} has {names}: choose one by --socket", param_hint="--config")
    return Path(sockets[0])


def _tell(sentence: str) -> None:
    cli.told.print(sentence, markup=False, highlight=False, soft_wrap=True, end="\r\n")
