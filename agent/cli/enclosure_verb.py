"""`g35 enclosure`: make an enclosure what a file describes, and look at one."""

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from agent.cli.record_options import AsJson
from agent.cli.standard_output import discard_output
from agent.cli.tables import folding_table, print_tables, table_console
from agent.enclosure_control.apply import ApplyFailed, Target, apply, planned
from agent.enclosure_control.configfs_target import ROOT, ConfigfsTarget
from agent.enclosure_control.description import Description, load_description
from agent.enclosure_control.plan import SIZES
from agent.enclosure_control.records import BdevStats, Present
from agent.enclosure_control.rpc_client import TIMEOUT_S
from agent.enclosure_control.rpc_target import RpcTarget
from agent.enclosure_control.steps import Step
from agent.errors import UserError, printable
from agent.sizes import counted, size_text

EXIT_DIFFERS = 3

app = typer.Typer(
    rich_markup_mode=None,
    no_args_is_help=True,
    help="Configure SPDK, `g35 jbof` or the kernel's nvmet by a description (docs/enclosures.md).",
)

DescriptionFile = Annotated[
    Path, typer.Argument(metavar="DESCRIPTION", help="The TOML file that describes the enclosure.")
]
Rpc = Annotated[
    Path | None, typer.Option("--rpc", metavar="SOCKET", help="RPC socket of an SPDK target or `g35 jbof`.")
]
Configfs = Annotated[
    bool, typer.Option("--configfs", help="The kernel's nvmet on this machine, in place of --rpc; as root.")
]
ConfigfsRoot = Annotated[Path, typer.Option("--configfs-root", help="The folder of nvmet.")]
Timeout = Annotated[
    float, typer.Option(min=0.1, max=3600, help="Seconds that one call may take, by the wall clock.")
]
Prune = Annotated[
    bool,
    typer.Option(
        help="Also remove what the description does not name, malloc bdevs with their contents; never "
        "logical volumes."
    ),
]


@app.command("apply")
def apply_description(
    description: DescriptionFile,
    rpc: Rpc = None,
    configfs: Configfs = False,
    configfs_root: ConfigfsRoot = ROOT,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the calls and make none. Secrets are hidden.")
    ] = False,
    prune: Prune = False,
    timeout: Timeout = TIMEOUT_S,
) -> None:
    """Make the enclosure what the file describes. Parts that match already stay untouched."""
    wanted = _wanted(description, prune)
    with _target(rpc, configfs, configfs_root, timeout) as target:
        if dry_run:
            found = planned(target, wanted, prune=prune)
            for call in target.show(found.steps):
                _say(call)
            _say_left_alone(found.left_alone)
            return
        try:
            applied = apply(target, wanted, prune=prune, on_step=lambda step: _say(f"done: {step}"))
        except ApplyFailed as failure:
            _say(f"failed: {failure.failed}")
            for step in failure.left:
                _say(f"not begun: {step}")
            raise
    _say_left_alone(applied.left_alone)
    _say(counted(len(applied.done), "step") if applied.done else "nothing to do")


@app.command()
def diff(
    description: DescriptionFile,
    rpc: Rpc = None,
    configfs: Configfs = False,
    configfs_root: ConfigfsRoot = ROOT,
    prune: Prune = False,
    timeout: Timeout = TIMEOUT_S,
    as_json: AsJson = False,
) -> None:
    """Show what `apply` would change. Exit code 3 if there is any change."""
    wanted = _wanted(description, prune)
    with _target(rpc, configfs, configfs_root, timeout) as target:
        found = planned(target, wanted, prune=prune)
        calls = target.show(found.steps)
    if as_json:
        shown = [{"step": str(step), "call": call} for step, call in zip(found.steps, calls, strict=True)]
        print(json.dumps({"steps": shown, "left_alone": list(found.left_alone)}, indent=1))
    else:
        for step in found.steps:
            _say(f"{_sign(step)} {step}")
        _say_left_alone(found.left_alone)
        if not found.steps:
            print("as described")
    if found.steps:
        raise typer.Exit(EXIT_DIFFERS)


@app.command()
def show(
    rpc: Rpc = None,
    configfs: Configfs = False,
    configfs_root: ConfigfsRoot = ROOT,
    timeout: Timeout = TIMEOUT_S,
    as_json: AsJson = False,
) -> None:
    """Show the enclosure's transports, bdevs and subsystems."""
    with _target(rpc, configfs, configfs_root, timeout) as target:
        present = target.read()
    if as_json:
        print(json.dumps(asdict(present), indent=1))
        return
    _print_present(present)


@app.command()
def stats(rpc: Rpc = None, timeout: Timeout = TIMEOUT_S, as_json: AsJson = False) -> None:
    """Show the counters of the enclosure's bdevs. nvmet has none."""
    if rpc is None:
        raise UserError("counters are read over the RPC", "give --rpc SOCKET")
    target = RpcTarget.at(rpc, timeout)
    try:
        counters = target.stats()
    finally:
        target.close()
    if as_json:
        print(json.dumps([asdict(each) for each in counters], indent=1))
        return
    table = folding_table(
        "Bdevs since they were made",
        ("bdev",),
        ("reads", "MiB", "mean µs", "writes", "MiB", "mean µs", "failed"),
    )
    for each in counters:
        _add_row(table, *_row(each))
    print_tables(table)


def _wanted(file: Path, prune: bool) -> Description:
    wanted = load_description(file)
    if prune and not any(rows for _, rows in wanted):
        raise UserError(
            f"{file} describes nothing: --prune would remove all that the enclosure has",
            "is it the right file? To empty an enclosure, describe no more than its transports",
        )
    return wanted


@contextmanager
def _target(rpc: Path | None, configfs: bool, root: Path, timeout_s: float) -> Iterator[Target]:
    if (rpc is not None) == configfs:
        raise UserError("which enclosure?", "give either --rpc SOCKET or --configfs")
    target: Target = RpcTarget.at(rpc, timeout_s) if rpc is not None else ConfigfsTarget(root)
    try:
        yield target
    finally:
        target.close()


def _sign(step: Step) -> str:
    return "-" if type(step).__name__.startswith(("Remove", "Delete")) else "+"


def _say_left_alone(things: tuple[str, ...]) -> None:
    for each in things:
        _say(f"left alone, not described: {each}")


def _say(text: str) -> None:
    """A line about progress. A reader that closes the pipe does not stop the work."""
    try:
        print(printable(text), flush=True)
    except BrokenPipeError:
        discard_output(sys.stdout.fileno())


def _add_row(table: Table, *cells: str) -> None:
    """Add cells without markup: names may have brackets."""
    table.add_row(*(Text(printable(each)) for each in cells))


def _print(console: Console, text: str) -> None:
    console.print(Text(printable(text)))


def _row(each: BdevStats) -> list[str]:
    def mean(total_s: float, commands: int) -> str:
        # No device takes no time: an enclosure that says so does not measure it.
        return f"{total_s / commands * 1e6:.0f}" if commands and total_s else "-"

    return [
        each.name,
        str(each.read_commands), f"{each.read_bytes / 2**20:.1f}",
        mean(each.read_latency_s, each.read_commands),
        str(each.write_commands), f"{each.write_bytes / 2**20:.1f}",
        mean(each.write_latency_s, each.write_commands), str(each.failed_commands),
    ]  # fmt: skip


def _print_present(present: Present) -> None:
    console = table_console()
    if present.bdevs:
        table = folding_table("Bdevs", ("bdev", "kind", "also called"), ("size", "block"))
        for bdev in present.bdevs:
            also = ", ".join(bdev.aliases) or (bdev.filename or "")
            _add_row(table, bdev.name, bdev.kind, also, size_text(bdev.size), size_text(bdev.block_size))
        console.print(table)
    for subsystem in present.subsystems:
        _print(console, f"subsystem {subsystem.nqn}, serial {subsystem.serial}, model {subsystem.model}")
        table = folding_table("", ("what", "which", "with"))
        for namespace in subsystem.namespaces:
            _add_row(table, f"namespace {namespace.nsid}", namespace.bdev, namespace.nguid)
        for listener in subsystem.listeners:
            _add_row(table, "listener", str(listener), "")
        for host in subsystem.hosts:
            keys = ", ".join(filter(None, (host.key, host.controller_key)))
            _add_row(table, "host", host.nqn, f"keys {keys}" if keys else "")
        if subsystem.allow_any_host:
            _add_row(table, "host", "any", "")
        if table.row_count:
            console.print(table)
    if present.nvme:
        table = folding_table("NVMe controllers", ("controller", "address", "subsystem"))
        for controller in present.nvme:
            _add_row(table, controller.name, str(controller.address or ""), controller.subnqn)
        console.print(table)
    for transport in present.transports:
        options = ", ".join(
            f"{name} {size_text(value) if name in SIZES else value}" for name, value in transport.options
        )
        _print(console, f"transport {transport.trtype}" + (f": {options}" if options else ""))
    if not present.transports:
        _print(console, "no transport")
    _print(console, f"keys: {', '.join(each.name for each in present.keys) or 'none'}")
    if not present.subsystems:
        _print(console, "no subsystem")
