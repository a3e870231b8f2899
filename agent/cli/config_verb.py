"""`g35 config`: check a configuration file, or print the reference of all keys."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from agent.config import load_configuration, reference_markdown

app = typer.Typer(no_args_is_help=True, help="The configuration file.")


@app.command()
def check(file: Annotated[Path, typer.Argument(help="The TOML file.")]) -> None:
    """Say whether a configuration file can be used, without starting anything."""
    configuration = load_configuration(file)
    print(
        f"{file}: usable; {len(configuration.enclosures)} enclosures, "
        f"{len(configuration.volumes)} volumes, mount at {configuration.agent.mount}"
    )


@app.command()
def reference() -> None:
    """Print every key with its default and meaning, in Markdown."""
    print(reference_markdown(), end="")
