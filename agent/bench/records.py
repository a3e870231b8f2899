"""What becomes of a number: a record for programs, a row for people."""

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

from rich.table import Table

from agent.bench.names_and_units import (
    CATALOG,
    GOALS,
    LATENCY,
    LOAD_SIZES,
    LOADED,
    LOADS,
    OVER_FLOOR,
    PEERS,
    SIZES,
    Entry,
)
from agent.cli.tables import folding_table
from agent.host_os.whole_file import write_whole


@dataclass(frozen=True, slots=True)
class Figure:
    """One measured number. `details` go into the record as further keys."""

    entry: Entry
    value: float
    details: Mapping[str, Any] = field(default_factory=dict)


def ratio(figure: Figure, figures: Mapping[str, Figure]) -> float | None:
    """The number over its floor; None where there is no floor, or where it could not be measured."""
    floor = figures.get(figure.entry.floor or "")
    return None if floor is None or not floor.value else figure.value / floor.value


def records(figures: Mapping[str, Figure]) -> list[dict[str, Any]]:
    """The list that `--json` writes: name, value, unit, floor and ratio where there is one, details."""
    made = []
    for name, figure in figures.items():
        record: dict[str, Any] = {"name": name, "value": _rounded(figure.value), "unit": figure.entry.unit}
        over = ratio(figure, figures)
        if over is not None:
            record |= {"floor": figure.entry.floor, "ratio": _rounded(over)}
        made.append(record | dict(figure.details))
    return made


def write(path: Path, figures: Mapping[str, Figure], busy_loops: int = 0) -> None:
    """`busy_loops`: so many ran meanwhile, and each record says so."""
    found = records(figures)
    if busy_loops:
        found = [record | {"busy_loops": busy_loops} for record in found]
    write_whole(path, json.dumps(found, indent=1) + "\n")


def table(figures: Mapping[str, Figure]) -> Table:
    made = folding_table("g35 bench", ("name", "unit", "floor"), ("value", "ratio"))
    for name, figure in figures.items():
        over = ratio(figure, figures)
        floor = figure.entry.floor or "" if over is not None else ""
        made.add_row(
            name, figure.entry.unit, floor, _shown(figure.value), "" if over is None else f"{over:.2f}"
        )
    return made


def against_redis(figures: Mapping[str, Figure]) -> Table | None:
    """/kv beside Redis at each size; None where no two of them were measured together.

    A factor above 1 says that /kv is ahead: for speeds /kv over Redis, for latencies Redis over /kv.
    """
    made = folding_table("kv beside Redis", ("",), ("kv", "redis", "ahead by", "redis TLS", "ahead by"))
    for what in [f"{verb}_{size}" for verb in ("get", "put") for size in SIZES] + ["get_64k_p50_ms"]:
        own = figures.get(f"kv_{what}")
        others = [figures.get(f"{redis}_{what}") for redis in ("redis", "redis_tls")]
        if own is None or not any(others):
            continue
        cells = [f"{what} ({own.entry.unit})", _shown(own.value)]
        for other in others:
            if other is None:
                cells += ["-", ""]
                continue
            cells += [_shown(other.value), f"{ahead(own, other):.2f}"]
        made.add_row(*cells)
    return made if made.row_count else None


def ahead(own: Figure, other: Figure) -> float:
    """How many times as good `own` is; less time is better, more of anything else is."""
    better, worse = (other, own) if own.entry.unit == LATENCY else (own, other)
    return better.value / worse.value if worse.value else float("inf")


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
        made.add_row(what, *(_speed_and_times(cells.get(peer)) for peer in peers))
    return made


def under_load(figures: Mapping[str, Figure]) -> Table | None:
    """One row for each load, times in milliseconds from the arrival; None where none was measured."""
    rows = [
        (f"get {size} at {load} %", [figures.get(f"{peer}_get_{size}_load_{load}_p99_ms") for peer in LOADED])
        for size, load in product(LOAD_SIZES, LOADS)
    ]
    heads = [f"{peer} {what}" for peer in LOADED for what in ("a second", "p50", "p99", "p99.9")]
    made = folding_table("under a fixed load (ms)", ("",), (*heads, "ahead by"))
    for what, found in rows:
        if any(found):
            own, other = found
            over = "" if own is None or other is None else f"{ahead(own, other):.2f}"
            made.add_row(what, *_times_at_rate(own), *_times_at_rate(other), over)
    return made if made.row_count else None


def _times_at_rate(figure: Figure | None) -> list[str]:
    names = ("offered_per_s", "p50_ms", "p99_ms", "p999_ms")
    return ["-"] * 4 if figure is None else [_shown(figure.details[name]) for name in names]


def _speed_and_times(figure: Figure | None) -> str:
    if figure is None:
        return "-"
    p50, p99 = (figure.details.get(name) for name in ("p50_ms", "p99_ms"))
    times = "" if p50 is None else f" ({p50:.2f}, {p99:.2f})"
    return f"{figure.value:.2f}{times}"


def over_floors(figures: Mapping[str, Figure]) -> Table | None:
    """Processor time over that of the work no design can leave out; None where none was measured.

    Microseconds a value, of each process and of each part of the floor. A dash: no such part. `mount` is
    what a mount costs by itself; the last column has that in the place of the copy (over_floor.py).
    """
    shares = ("client", "agent", "enclosure", "path", "send", "receive", "cipher", "copy", "floor", "mount")
    title = "processor time over its floor (us a value)"
    made = folding_table(title, ("name",), (*shares, "over", "rounds", "goal", "over, with mount"))
    for name, figure in figures.items():
        if figure.entry.kind.startswith(OVER_FLOOR):
            taken = [figure.details.get(f"{share}_us") for share in shares]
            rounds = figure.details["rounds"]
            made.add_row(
                name,
                *("-" if each is None else _shown(each) for each in taken),
                f"{figure.value:.2f}",
                f"{min(rounds):.2f}-{max(rounds):.2f}",
                f"{GOALS[name]:g}" if name in GOALS else "-",
                "-" if (times := figure.details.get("times_with_mount")) is None else f"{times:.2f}",
            )
    return made if made.row_count else None


def listing(names: Collection[str] = ()) -> Table:
    made = folding_table("", ("name", "unit", "what"))
    for entry in CATALOG.values():
        if not names or entry.name in names:
            floor = f"; floor: {entry.floor}" if entry.floor else ""
            made.add_row(entry.name, entry.unit, entry.what + floor)
    return made


def _rounded(value: float) -> float:
    """Four significant digits and a guard: more would be noise, and less would show in ratios."""
    return float(f"{value:.6g}")


def _shown(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}" if value < 0.1 else f"{value:.3f}"
