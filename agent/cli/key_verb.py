"""`g35 key`: the root key of a pool."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from agent.inline.secrets import create_root_key, load_root_key

app = typer.Typer(no_args_is_help=True, help="The root key, which wraps the keys of all volumes.")


@app.command()
def new(file: Annotated[Path, typer.Argument(help="Where to write it; must not exist.")]) -> None:
    """Make a root key in a file of mode 0600. Whoever loses it loses the pool: keep a copy offline."""
    create_root_key(file)
    print(f"{file}: a new root key")


@app.command()
def check(file: Annotated[Path, typer.Argument(help="A key file.")]) -> None:
    """Say whether a key file is usable, and the fingerprint that tells it from others."""
    print(f"{file}: usable, fingerprint {load_root_key(file).fingerprint().hex()}")
