"""`g35 trace generate`: make a trace for `g35 replay`."""

import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import typer

from agent.cli.standard_output import reader_has_left

app = typer.Typer(rich_markup_mode=None, no_args_is_help=True)


@app.callback()
def trace() -> None:
    """Make a trace for `g35 replay`."""


@app.command()
def generate(
    requests: Annotated[int, typer.Option(min=1, max=10_000_000, help="How many requests.")] = 600,
    seed: Annotated[int, typer.Option(min=0, help="The same seed makes the same trace.")] = 35,
    output: Annotated[Path | None, typer.Option(help="The file to write; default: standard output.")] = None,
) -> None:
    """Write a trace in Mooncake's format. It has growing conversations over shared system prompts."""
    from agent.replay.trace_generator import encode_line, made_trace

    with ExitStack() as open_files:
        out = sys.stdout if output is None else open_files.enter_context(output.open("w"))
        for request in made_trace(seed, requests):
            print(encode_line(request), file=out)
            if output is None and reader_has_left():
                return
