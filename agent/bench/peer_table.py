"""/kv and other stores side by side, for people."""

from __future__ import annotations

from collections.abc import Mapping

from rich.table import Table

from agent.bench.catalog import PEERS, SIZES
from agent.bench.records import Figure
from agent.cli.tables import folding_table


def beside_peers(figures: Mapping[str, Figure]) -> Table | None:
    """One row for each kind of work, one column for each store; None where only one was measured.

    A cell has the speed in GiB/s and, in brackets, the median and the 99th percentile of the times of single
    operations in milliseconds.
    """
    rows = [
        (f"{verb} {size}, {in_flight} in flight", f"{verb}_{size}_x{in_flight}")
        for verb in ("get", "put")
        for size in SIZES
        for in_flight in (1, 4)
    ]
    found = {
        what: {peer: figures[name] for peer in PEERS if (name := f"{peer}_{work}") in figures}
        for what, work in rows
    }
    found = {what: cells for what, cells in found.items() if len(cells) > 1}
    peers = [peer for peer in PEERS if any(peer in cells for cells in found.values())]
    if not found:
        return None
    made = folding_table("beside other stores", ("GiB/s (p50, p99 ms)",), peers)
    for what, cells in found.items():
        made.add_row(what, *(_cell(cells.get(peer)) for peer in peers))
    return made


def _cell(figure: Figure | None) -> str:
    if figure is None:
        return "-"
    p50, p99 = (figure.details.get(name) for name in ("p50_ms", "p99_ms"))
    times = "" if p50 is None else f" ({p50:.2f}, {p99:.2f})"
    return f"{figure.value:.2f}{times}"
