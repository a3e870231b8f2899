"""`g35 bench`: measure, show the table, write the records."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from agent.bench import records
from agent.bench.busy_loops import LOOPS_MAX, busy_loops
from agent.bench.names_and_units import CATALOG, chosen, matching, unknown
from agent.cli.tables import NOTE_COLUMNS, print_tables
from agent.cli.temporary_folder import temporary_folder
from agent.cli.up.interrupts import ended_by_signals
from agent.cli.up.up_arguments import size_between
from agent.errors import UserError, did_you_mean
from agent.host_os.result_file import why_not_writable
from agent.sizes import parse_size

if TYPE_CHECKING:
    from agent.bench.run_bench import Results, Said

MEASURE_SECONDS = 4.0
REQUESTS = 3000
TIERS_SECONDS = 120.0
TIERS_REQUESTS = 300
TIERS_VALUE_SIZE = "256K"


def _tiers_value_size(text: str | None) -> str | None:
    return None if text is None else size_between(1 << 16, 1 << 20)(text)


def bench(
    names: Annotated[list[str] | None, typer.Argument(help="What to measure; patterns too: '*_x4'.")] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", dir_okay=False, help="Write the records to this file.")
    ] = None,
    seconds: Annotated[
        float | None,
        typer.Option(
            min=0.05,
            max=3600.0,
            help=f"Time for each speed, over all its rounds; default: {MEASURE_SECONDS:g}. With --tiers the "
            f"most that playing may take; default: {TIERS_SECONDS:g}.",
        ),
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(exists=True, dir_okay=False, help="Trace of the hit ratio, or of --tiers."),
    ] = None,
    requests: Annotated[
        int | None,
        typer.Option(
            min=1,
            help=f"Requests of the trace to play; default: {REQUESTS}, with --tiers {TIERS_REQUESTS}.",
        ),
    ] = None,
    beside: Annotated[
        int,
        typer.Option(
            min=0, max=LOOPS_MAX, help="Busy loops that run meanwhile, as on a machine that has other work."
        ),
    ] = 0,
    list_: Annotated[bool, typer.Option("--list", help="List the names and end.")] = False,
    profile: Annotated[
        bool, typer.Option("--profile", help="Show where processor time goes, in place of speeds.")
    ] = False,
    tiers: Annotated[
        bool,
        typer.Option(
            "--tiers",
            help="Instead: the trace before files, /kv, KV namespaces, two copies with the first local, and "
            "/kv with G4, in turn.",
        ),
    ] = False,
    value_size: Annotated[
        str | None,
        typer.Option(
            callback=_tiers_value_size, help="With --tiers: size of a block, 64K to 1M; default: 256K."
        ),
    ] = None,
) -> None:
    """Measure the path and its floors in one run, and Redis and other stores beside it.

    It ends all that it started. --tiers plays one workload before five ways to keep blocks, for two minutes
    at the most. Exit code 1 where a measurement failed or its numbers contradict the agent's.
    """
    if beside and (tiers or profile):
        raise typer.BadParameter("it is for speeds", param_hint="--beside")
    if tiers:
        _check_tiers(names, list_, profile)
        _check_json(json_file)
        _bench_tiers(json_file, trace, requests or TIERS_REQUESTS, value_size or TIERS_VALUE_SIZE, seconds)
        return
    if value_size is not None:
        raise typer.BadParameter("it is for --tiers", param_hint="--value-size")
    wrong = unknown(names or [])
    if wrong:
        meant = did_you_mean(wrong[0], CATALOG)
        raise typer.BadParameter(
            f"no such name: {', '.join(wrong)}{meant}; see g35 bench --list", param_hint="NAME"
        )
    if list_:
        print_tables(records.listing(matching(names or [])))
        return
    _check_json(json_file)
    if profile:
        _profile(names or [], seconds or MEASURE_SECONDS, json_file)
        return
    # Here, and not above: `--list` and mistyped names need no ciphers, FUSE and numpy.
    from agent.bench.run_bench import Wishes, run

    wishes = Wishes(chosen(names or []), seconds or MEASURE_SECONDS, trace, requests or REQUESTS)
    with (
        ended_by_signals(),
        temporary_folder("g35-bench-") as folder,
        _progress() as said,
        busy_loops(beside),
    ):
        results = run(wishes, folder, said)
    _show(results, json_file, beside)
    if results.troubles:
        raise typer.Exit(1)


def _profile(names: list[str], seconds: float, json_file: Path | None) -> None:
    from agent.bench import processor_profile, profile_records
    from agent.bench.redis_site import NotHere

    wanted = matching(names or processor_profile.PROFILED)
    entries = [entry for name, entry in CATALOG.items() if name in wanted]
    for entry in entries:
        if not processor_profile.can_profile(entry):
            raise typer.BadParameter(
                f"{entry.name} cannot be profiled; names that begin with kv_ and redis_ can",
                param_hint="NAME",
            )
    try:
        with ended_by_signals(), temporary_folder("g35-bench-") as folder, _progress() as said:
            found = processor_profile.profiles(entries, seconds, folder / "profile", said)
    except NotHere as why:
        raise UserError(f"a name cannot be measured here: {why}", "install it, or name others") from None
    print_tables(*map(profile_records.table, found))
    if json_file is not None:
        profile_records.write(json_file, found)


def _check_json(json_file: Path | None) -> None:
    if json_file is not None and (why := why_not_writable(json_file)):
        raise typer.BadParameter(why, param_hint="--json")


def _check_tiers(names: list[str] | None, list_: bool, profile: bool) -> None:
    if profile:
        raise typer.BadParameter("it is for speeds", param_hint="--profile")
    if names:
        raise typer.BadParameter("it plays all its ways, and takes no names", param_hint="--tiers")
    if list_:
        raise typer.BadParameter("it has no names to list", param_hint="--tiers")


def _bench_tiers(
    json_file: Path | None, trace: Path | None, requests: int, value_size: str, seconds: float | None
) -> None:
    from agent.bench.single_probes import BUNDLED_TRACE
    from agent.bench.tiers import report
    from agent.bench.tiers.play import Workload, play

    value_bytes = cast(int, parse_size(value_size))
    workload = Workload(trace or BUNDLED_TRACE, requests, value_bytes, seconds or TIERS_SECONDS)
    with ended_by_signals(), temporary_folder("g35-bench-") as folder, _progress() as said:
        results = play(workload, folder, said)
    found = report.record(results)
    print_tables(report.table(found))
    for note in report.notes(found):
        print(textwrap.fill(note, NOTE_COLUMNS))
    if json_file is not None:
        report.write(json_file, found)
    troubles = report.contradictions(results)
    for trouble in troubles:
        print(f"error: {trouble}", file=sys.stderr)
    if troubles:
        raise typer.Exit(1)


def _show(results: Results, json_file: Path | None, beside: int) -> None:
    figures = results.in_order()
    tables = (
        records.table(figures),
        records.over_floors(figures),
        records.against_redis(figures),
        records.beside_peers(figures),
        records.under_load(figures),
    )
    print_tables(*(table for table in tables if table is not None))
    if json_file is not None:
        records.write(json_file, figures, beside)
    for name, why in results.left_out.items():
        print(f"skipped {name}: {why}", file=sys.stderr)
    for trouble in results.troubles:
        print(f"error: {trouble}", file=sys.stderr)


@contextmanager
def _progress() -> Iterator[Said]:
    """A bar where somebody looks, a line for each step elsewhere. It draws between rounds, never in one."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description:34}"), BarColumn(), TimeElapsedColumn())
    shown = Progress(
        *columns, console=console, transient=True, auto_refresh=False, disable=not console.is_terminal
    )
    with shown as progress:
        bar = progress.add_task("starting", total=1.0)

        def said(what: str, part: float) -> None:
            if console.is_terminal:
                progress.update(bar, description=what, completed=part, refresh=True)
            elif not what.startswith("round"):
                console.print(what, highlight=False)

        yield said
