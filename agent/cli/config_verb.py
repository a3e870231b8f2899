"""`g35 config`: check a configuration file, print the reference of all keys, or the unit of a service."""

import sys
from enum import StrEnum
from importlib import resources
from pathlib import Path
from typing import Annotated

import typer

from agent.config.configuration import load_configuration, reference_markdown
from agent.service.why_alone import alone_though_asked

_INSTALLED = "/opt/g35/bin/"
"""Where the units look for g35, unless they are printed for another environment."""


class Service(StrEnum):
    """What there is a unit for; the value is its file's name."""

    AGENT = "g35-agent.service"
    JBOF = "g35-jbof@.service"
    NO_MOUNT = "no-mount.conf"
    """A drop-in for the agent's."""


app = typer.Typer(rich_markup_mode=None, no_args_is_help=True, help="The configuration file of an agent.")


@app.command()
def check(file: Annotated[Path, typer.Argument(help="The TOML file.")]) -> None:
    """Say whether a configuration is usable. Nothing is started."""
    configuration = load_configuration(file)
    print(
        f"{file}: usable; mount at {configuration.agent.mount or 'no folder'}, "
        f"enclosures: {len(configuration.enclosures)}, local devices: {len(configuration.local)}, "
        f"volumes: {len(configuration.volumes)}, "
        f"virtio-fs devices: {len(configuration.virtiofs)}"
    )
    if said := alone_though_asked(configuration):
        print(f"{file}: {said}")


@app.command()
def reference() -> None:
    """Print every key with its default and meaning, in Markdown."""
    print(reference_markdown(), end="")


def unit_text(name: str, programs: Path) -> str:
    """A unit of agent/deploy whose program is the `g35` in the folder `programs`."""
    text = (resources.files("agent") / "deploy" / name).read_text(encoding="utf-8")
    return text.replace(_INSTALLED, f"{programs}/")


@app.command()
def unit(
    name: Annotated[
        Service,
        typer.Argument(
            help="g35-agent.service; g35-jbof@.service, for enclosures; no-mount.conf, a drop-in for an "
            "agent without a mount."
        ),
    ] = Service.AGENT,
) -> None:
    """Print a hardened systemd unit. It starts the g35 of this environment; see docs/deploy_bluefield.md."""
    print(unit_text(name, Path(sys.executable).parent), end="")
