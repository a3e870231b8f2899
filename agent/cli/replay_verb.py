"""`g35 replay TRACE`: play a KV-cache trace through a mount and verify every byte."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING

import typer

from agent.cli.record_options import options_of
from agent.replay.replay_options import ReplayOptions

if TYPE_CHECKING:
    from agent.replay.report import Report


@options_of(ReplayOptions)
def replay(_context: typer.Context, options: ReplayOptions) -> None:
    """Play a KV-cache trace through a mount as an engine would, and verify every byte.

    Exit code 1 if a wrong byte was served, the agent died for good, or not all requests were played.
    """
    from agent.replay.course import draw
    from agent.replay.run_replay import run_replay

    report = run_replay(options)
    if options.plot is not None:
        draw(report.samples, options.plot, f"{options.trace.name}, {report.sums.requests:,} requests")
    if options.json_output:
        print(json.dumps(report.record(), indent=2))
    else:
        show_table(report, f"replay of {options.trace.name}")
    for complaint in report.complaints:
        print(f"skipped {complaint}", file=sys.stderr)
    troubles = report.troubles()
    for trouble in troubles:
        print(f"error: {trouble}", file=sys.stderr)
    if not report.sums.requests:
        print(
            "hint: a trace has a request in each line, as JSON; `g35 trace generate` makes one",
            file=sys.stderr,
        )
    if troubles:
        raise typer.Exit(1)


def show_table(report: Report, title: str) -> None:
    from agent.cli.tables import print_facts

    print_facts(title, report.rows(), notes=report.notes())
