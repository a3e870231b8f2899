"""The tables of docs/benchmarks.md, made of the records of several runs of one machine.

    .venv/bin/g35 bench --json build/run-1.json ...               five times
    .venv/bin/g35 bench --profile --json build/run-profile.json   once
    python -m tests.support.rungs.bench_page build/run-*.json

A table stands between `<!-- made: NAME -->` and `<!-- end -->`. A cell has the least and the greatest of the
runs: so far the machine drifts. Ratios are taken within a run, never across runs.
"""

import json
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from agent.bench.names_and_units import CATALOG, GOALS, LATENCY, LOAD_SIZES, LOADED, LOADS, PEERS

REPOSITORY = Path(__file__).parents[3]
PAGE = REPOSITORY / "docs/benchmarks.md"
_MADE = re.compile(r"(<!-- made: (.*?) -->\n).*?(<!-- end -->)", re.DOTALL)

Run = Mapping[str, Mapping[str, Any]]
"""Records of one run, by name."""

SHARES = ("client", "agent", "enclosure", "path", "send", "receive", "cipher", "copy", "floor")
FLOORS = (
    "get_1m_over_floor",
    "put_1m_over_floor",
    "get_1m_registered_over_floor",
    "put_1m_registered_over_floor",
    "get_64k_over_floor",
    "rdma_get_1m_over_floor",
)

_SIZES = (("64 KiB", "64k"), ("1 MiB", "1m"), ("4 MiB", "4m"))
_WAYS = (
    ("four in flight", ""),
    ("registered memory, four in flight", "_x4"),
    ("registered memory, one in flight", "_x1"),
)
BESIDE = (
    *(
        (f"{verb} {size}, {how}", f"{verb}_{key}{way}")
        for how, way in _WAYS
        for verb in ("get", "put")
        for size, key in _SIZES
    ),
    ("get 64 KiB, one at a time: p50, ms", "get_64k_p50_ms"),
)
"""Work that several stores do: what to call it, and its name without the store's."""
BATCHES = tuple(
    (f"{verb} {size}, batches of 32", f"{verb}_{key}_b32")
    for verb in ("get", "put")
    for size, key in (("64 KiB", "64k"), ("16 KiB", "16k"), ("4 KiB", "4k"))
)
UNDER_LOAD = tuple(
    (f"get {size} at {load} % of the highest rate: p99", f"get_{key}_load_{load}_p99_ms")
    for size, key in _SIZES
    if key in LOAD_SIZES
    for load in LOADS
)
ASKED: Sequence[tuple[str, str, float]] = (
    *((name, "", -goal) for name, goal in GOALS.items()),
    ("kv_get_64k_b32", "redis_get_64k_b32", 1.5),
    ("kv_put_64k_b32", "redis_put_64k_b32", 1.2),
    ("kv_get_16k_b32", "redis_get_16k_b32", 1),
    ("kv_get_4k_b32", "redis_get_4k_b32", 1),
    *(
        (f"kv_{verb}_{size}_x1", f"redis_{verb}_{size}_x1", 1)
        for size in ("64k", "1m")
        for verb in ("get", "put")
    ),
    ("fs_read_1g", "kv_get_4m", 0.7),
    ("fs_read_1g_direct", "kv_get_4m", 0.9),
    ("fs_write_1g_fsync", "kv_put_4m", 0.8),
    ("shared_get_16m", "by_path_get_16m", 0.9),
    ("shared_put_16m", "by_path_put_16m", 0.9),
    ("shim_loop_block_ms", "", -1),
    ("query_1k_p99_ms", "", -5),
    ("up_ready_s", "", -2),
    ("restart_first_hit_s", "", -0.5),
)
"""What the project wants of a record: so many times another one, or of its value where no other is named. At
least so much, at most where it is negative."""
EVEN = 0.05
"""Ratios so near to 1 in the median are called level."""


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    names = list(head)
    return "\n" + "\n".join(f"| {' | '.join(row)} |" for row in [names, ["---"] * len(names), *rows]) + "\n\n"


def spread(numbers: Sequence[float]) -> str:
    """The least and the greatest of them, in two or three digits."""
    least, greatest = _shown(min(numbers)), _shown(max(numbers))
    return least if least == greatest else f"{least} – {greatest}"


def _shown(number: float) -> str:
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}" if number < 1 else f"{number:.2f}"


def floors(runs: Sequence[Run]) -> str:
    """Microseconds a value: medians of the runs; how many times the floor: all of them."""
    rows = []
    for name in FLOORS:
        found = [run[name] for run in runs if name in run]
        if found:
            parts = [
                "–" if f"{share}_us" not in found[0] else _shown(median(one[f"{share}_us"] for one in found))
                for share in SHARES
            ]
            goal = f"{GOALS[name]:g}" if name in GOALS else "–"
            mounted = [one for one in found if "mount_us" in one]
            mount = _shown(median(one["mount_us"] for one in mounted)) if mounted else "–"
            with_mount = spread([one["times_with_mount"] for one in mounted]) if mounted else "–"
            times = spread([one["value"] for one in found])
            rows.append([f"`{name}`", *parts, f"**{times}**", goal, mount, with_mount])
    head = [
        "us of processor a value",
        *SHARES[:3],
        "**path**",
        *SHARES[4:8],
        "**floor**",
        "times the floor",
        "goal",
        "mount",
        "times, with the mount",
    ]
    return table(head, rows)


def goals(runs: Sequence[Run]) -> str:
    """What was asked, and in how many of the runs it was reached."""
    rows = []
    for name, other, asked in ASKED:
        found = [run for run in runs if name in run and (not other or other in run)]
        measured = [run[name]["value"] / (run[other]["value"] if other else 1) for run in found]
        if measured:
            met = sum(each <= -asked if asked < 0 else each >= asked for each in measured)
            what = f"`{name}`, of `{other}`" if other else f"`{name}`"
            limit = f"{abs(asked):g} {'at most' if asked < 0 else 'at least'}"
            rows.append([what, spread(measured), limit, f"{met} of {len(measured)}"])
    return table(["record", "measured", "asked", "reached in"], rows)


def beside(works: Sequence[tuple[str, str]], runs: Sequence[Run]) -> str:
    """What each store does, and how many times as good /kv is in the same run."""
    others = [
        peer for peer in PEERS if peer != "kv"
        and any(f"{peer}_{work}" in run and f"kv_{work}" in run for run in runs for _, work in works)
    ]  # fmt: skip
    rows = []
    for what, work in works:
        row, compared = [what, spread(own) if (own := _values(f"kv_{work}", runs)) else "–"], False
        for peer in others:
            ratios = ahead(work, peer, runs)
            compared = compared or bool(ratios)
            row += [spread(_values(f"{peer}_{work}", runs)), f"{_verdict(ratios)}"] if ratios else ["–", "–"]
        if compared:
            rows.append(row)
    return table(["GiB/s", "/kv", *(cell for peer in others for cell in (PEERS[peer], "times"))], rows)


def ahead(work: str, peer: str, runs: Sequence[Run]) -> list[float]:
    """How many times as good /kv is, of each run that has both; above 1 it is ahead."""
    own, other = f"kv_{work}", f"{peer}_{work}"
    pairs = [(run[own]["value"], run[other]["value"]) for run in runs if own in run and other in run]
    less_is_better = own in CATALOG and CATALOG[own].unit == LATENCY
    return [b / a if less_is_better else a / b for a, b in pairs]


def _verdict(ratios: Sequence[float]) -> str:
    """Bold where the other store is ahead in the median."""
    return f"**{spread(ratios)}**" if median(ratios) < 1 - EVEN else spread(ratios)


def behind(runs: Sequence[Run]) -> list[str]:
    """What another store does better, in the median of the runs; for the first paragraph."""
    found = []
    for what, work in (*BESIDE, *BATCHES, *UNDER_LOAD):
        for peer in PEERS:
            ratios = ahead(work, peer, runs) if peer != "kv" else []
            if ratios and median(ratios) < 1 - EVEN:
                found.append(f"- {what}: {spread(ratios)} of {PEERS[peer]}")
    return found


def under_load(runs: Sequence[Run]) -> str:
    """Milliseconds from the arrival of each request, and how many times as good /kv is at p99."""
    columns = ("offered_per_s", "p50_ms", "p99_ms", "p999_ms")
    rows = []
    for what, work in UNDER_LOAD:
        ratios = ahead(work, "redis", runs)
        if ratios:
            found = [[run[f"{peer}_{work}"] for run in runs if f"{peer}_{work}" in run] for peer in LOADED]
            cells = [spread([one[each] for one in records]) for records in found for each in columns]
            rows.append([what.removesuffix(" of the highest rate: p99"), *cells, _verdict(ratios)])
    names = ("/kv", PEERS["redis"])
    heads = [f"{name}: {what}" for name in names for what in ("a second", "p50", "p99", "p99.9")]
    return table(["ms from the arrival", *heads, "times at p99"], rows)


def all_else(runs: Sequence[Run]) -> str:
    """Every name that no other table has."""
    works = (*BESIDE, *BATCHES, *UNDER_LOAD)
    shown = {*FLOORS, *(f"{peer}_{work}" for peer in PEERS for _, work in works)}
    rows = []
    for name, entry in CATALOG.items():
        values = _values(name, runs)
        if not values or name in shown:
            continue
        ratios = [run[name]["ratio"] for run in runs if "ratio" in run.get(name, {})]
        rows.append(
            [
                f"`{name}`",
                f"{spread(values)} {entry.unit}",
                f"{spread(ratios)} of `{entry.floor}`" if ratios else "",
            ]
        )
    return table(["name", "value", "of its floor"], rows)


def _values(name: str, runs: Sequence[Run]) -> list[float]:
    return [run[name]["value"] for run in runs if name in run]


def profiles(runs: Sequence[Run]) -> str:
    """Of the profiles among them: a row for each process and each kind of its threads that matters."""
    rows = []
    for run in runs:
        for name, record in run.items():
            rows.append([f"**`{name}`**", *[""] * 4, f"**{_us(record['processor_us'])}**", "", ""])
            for process in record["processes"]:
                rows.append(_profile_row(process["process"], process))
                kinds = [kind for kind in process["kinds"] if _matters(kind, record)]
                if len(process["kinds"]) > 1:
                    rows += [_profile_row(f"– `{kind['kind']}`", kind) for kind in kinds]
    return table(["us a value", "threads", *PROFILE_COLUMNS], rows)


PROFILE_COLUMNS = ("lock", "cipher", "kernel", "processor", "queue", "waiting")
PROFILE_SHARE = 0.01
"""Threads with less of all processor time are left out of the page."""


def _matters(kind: Mapping[str, Any], record: Mapping[str, Any]) -> bool:
    return bool(kind["processor_us"] >= PROFILE_SHARE * record["processor_us"])


def _profile_row(name: str, share: Mapping[str, Any]) -> list[str]:
    return [name, str(share["threads"]), *(_us(share[f"{column}_us"]) for column in PROFILE_COLUMNS)]


def _us(number: float) -> str:
    return f"{number:,.0f}" if number >= 100 else f"{number:.1f}"


def is_profile(run: Run) -> bool:
    return any("processes" in record for record in run.values())


MADE: Mapping[str, Callable[[Sequence[Run]], str]] = {
    "profile": lambda runs: profiles([run for run in runs if is_profile(run)]),
    "behind": lambda runs: "\n" + "\n".join(behind(runs) or ["- nothing that was measured"]) + "\n\n",
    "goals": goals,
    "floors": floors,
    "beside": lambda runs: beside(BESIDE, runs),
    "batches": lambda runs: beside(BATCHES, runs),
    "under load": under_load,
    "all else": all_else,
}


def page_with(page: str, runs: Sequence[Run]) -> str:
    """The page with its tables made anew. Raises KeyError for a table that nobody makes."""
    speeds = [run for run in runs if not is_profile(run)]

    def made(found: re.Match[str]) -> str:
        text = MADE[found[2]](runs if found[2] == "profile" else speeds)
        return found[1] + text + found[3]

    return _MADE.sub(made, page)


def read(path: Path) -> Run:
    return {record["name"]: record for record in json.loads(path.read_text())}


def main(words: Sequence[str]) -> int:
    if not words:
        print("error: no runs; name the files of g35 bench --json", file=sys.stderr)
        return 2
    PAGE.write_text(page_with(PAGE.read_text(), [read(Path(word)) for word in words]))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
