"""`g35 replay TRACE`: play a KV-cache trace through a mount and verify every byte."""

from __future__ import annotations

import json
import sys
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from agent.replay.report import Report

NOTE_COLUMNS = 80


def replay(
    trace: Annotated[Path, typer.Argument(help="The trace: JSON lines in Mooncake's format.")],
    # Without a parser Click would look at it, and wait for ever for an agent that hangs.
    mount: Annotated[Path, typer.Option(parser=Path, metavar="<path>", help="Where the pool is mounted.")],
    requests: Annotated[int, typer.Option(min=0, help="Play only the first N requests; 0: all.")] = 0,
    bytes_per_token: Annotated[
        int, typer.Option(min=1, max=32768, help="KV-cache bytes of a token; a block is 512 tokens.")
    ] = 2048,
    concurrency: Annotated[int, typer.Option(min=1, max=256, help="Requests played at a time.")] = 4,
    time_scale: Annotated[
        float, typer.Option(min=0.0, help="1: at the trace's pace, 10: ten times that, 0: without pauses.")
    ] = 0.0,
    volume: Annotated[str, typer.Option(help="The volume that takes the blocks.")] = "kv",
    seed: Annotated[
        int, typer.Option(min=0, max=(1 << 64) - 1, help="Another seed: other keys, other contents.")
    ] = 0,
    strict: Annotated[bool, typer.Option("--strict", help="Stop at the first broken line.")] = False,
    prestage: Annotated[bool, typer.Option(help="Announce a prefix to the agent before reading it.")] = True,
    agent_wait: Annotated[
        float,
        typer.Option(
            min=0.0,
            max=3600.0,
            help="Seconds to wait for an agent that has died; then the replay ends with 1.",
        ),
    ] = 10.0,
    lru_bytes: Annotated[
        str, typer.Option(help="Size of the LRU to compare with, such as 4G; default: the volume's.")
    ] = "",
    json_output: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
    plot: Annotated[
        Path | None, typer.Option(help="Draw hit ratio, throughput and latency: a .png, .svg or .pdf file.")
    ] = None,
) -> None:
    """Play a KV-cache trace through a mount as an engine would, and verify every byte.

    Exit code 1 if a wrong byte was served, the agent died for good, or not all requests were played.
    """
    from agent.config.configuration import parse_size
    from agent.replay.course import draw
    from agent.replay.run_replay import ReplayOptions, run_replay

    if plot is not None and plot.suffix not in (".png", ".svg", ".pdf"):
        raise typer.BadParameter("the file's name must end in .png, .svg or .pdf", param_hint="--plot")
    if plot is not None and not plot.parent.is_dir():
        raise typer.BadParameter(f"there is no folder {plot.parent}", param_hint="--plot")
    try:
        size = parse_size(lru_bytes) if lru_bytes else None
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--lru-bytes") from None
    options = ReplayOptions(
        trace=trace,
        mount=mount,
        volume=volume,
        requests=requests,
        bytes_per_token=bytes_per_token,
        concurrency=concurrency,
        time_scale=time_scale,
        seed=seed,
        strict=strict,
        prestage=prestage,
        agent_wait=agent_wait,
        lru_bytes=size if isinstance(size, int) else None,
        progress=not json_output,
    )
    report = run_replay(options)
    if plot is not None:
        draw(report.samples, plot, f"{trace.name}, {report.sums.requests:,} requests")
    if json_output:
        print(json.dumps(report.record(), indent=2))
    else:
        show_table(report, f"replay of {trace.name}")
    for complaint in report.complaints:
        print(f"skipped {complaint}", file=sys.stderr)
    troubles = report.troubles()
    for trouble in troubles:
        print(f"error: {trouble}", file=sys.stderr)
    if troubles:
        raise typer.Exit(1)


def show_table(report: Report, title: str) -> None:
    """The report as a table on standard output."""
    from agent.cli.tables import folding_table, print_tables

    table = folding_table(title, ("",), ("",), head=False)
    for what, how_much in report.rows():
        table.add_row(what, how_much)
    print_tables(table)
    for note in report.notes():
        print(textwrap.fill(note, NOTE_COLUMNS))
