"""A real pool whose drives and links are as slow as is asked, and `g35 sim` of the same: what each says.

    python -m tests.support.sim.throttled_pool --runs 5

prints the table of docs/pod.md. The rates are so low that the machine's processors hardly matter. What else
runs there matters: where it is permitted, the pool and the replay run before it (SCHED_RR).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from tests.support.leaks import unmount_below
from tests.support.pool_up import PoolUp
from tests.support.processes import Processes

TRACE = Path("agent/replay/sample_trace.jsonl")
REQUESTS = 300
VALUE_BYTES, TOKEN_BYTES = 64 << 10, 128
ENCLOSURES, DRIVES = 2, 2
WORKERS = 4
SEEDS = 4
BOTH = ("real", "`g35 sim`")
MIB = 1 << 20
READ_DEADLINE_MS = "10000"


class Rates(NamedTuple):
    """MiB a second: of each drive, and of each way of an enclosure's link."""

    drive: int
    link: int


DRIVES_LIMIT, LINKS_LIMIT = Rates(4, 64), Rates(16, 4)


class Outcome(NamedTuple):
    """Of one run of either. Throughput: MiB a second, read and written."""

    hit_ratio: float
    seconds: float
    throughput: float


def _outcome(record: dict[str, Any]) -> Outcome:
    moved = (record["bytes_read"] + record["bytes_written"]) / MIB
    return Outcome(record["hit_ratio"], record["seconds"], moved / record["seconds"])


def _json_of(output: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(output[output.index("{") : output.rindex("}") + 1])
    return found


def _run_first(threads: Iterable[int]) -> None:
    """Let threads run before those of the ordinary class, where it is permitted."""
    with contextlib.suppress(PermissionError, ProcessLookupError):
        for thread in threads:
            os.sched_setscheduler(thread, os.SCHED_RR, os.sched_param(1))


@contextlib.contextmanager
def _children_run_first() -> Iterator[None]:
    """What this thread starts meanwhile inherits its class."""
    before, parameter = os.sched_getscheduler(0), os.sched_getparam(0)
    try:
        _run_first([0])
        yield
    finally:
        os.sched_setscheduler(0, before, parameter)


def measured(processes: Processes, folder: Path, repository: Path, rates: Rates) -> tuple[Outcome, int]:
    """What a real pool does, and how many slots it has."""
    up = PoolUp(
        processes, folder / "state", "--media", "memory", "--prefault", "--enclosures", str(ENCLOSURES),
        "--drives", str(DRIVES), "--drive-size", "40M", "--value-size", "64K", "--no-files",
        "--workers", str(WORKERS), "--read-deadline-ms", READ_DEADLINE_MS,
    )  # fmt: skip
    for number in range(ENCLOSURES):
        up.fault(number, "model", bandwidth_mib_s=rates.drive)
        up.fault(number, "link", bandwidth_mib_s=rates.link)
    for name in ("agent-process", "jbof-0", "jbof-1"):
        _run_first(int(entry.name) for entry in Path(f"/proc/{up.pid(name)}/task").iterdir())
    with _children_run_first():
        replay = processes.g35(
            "replay", repository / TRACE, "--mount", up.mount, "--requests", str(REQUESTS),
            "--concurrency", str(WORKERS), "--bytes-per-token", str(TOKEN_BYTES), "--no-prestage", "--json",
        )  # fmt: skip
    assert replay.process.wait(200) == 0, replay.output
    slots = next(int(volume["slots"]) for volume in up.status()["volumes"] if volume["name"] == "kv")
    assert up.down() == 0
    return _outcome(_json_of(replay.output)), slots


def predicted(repository: Path, rates: Rates, slots: int) -> Outcome:
    """What `g35 sim` says of the same pool: the mean of some seeds. Each lays the blocks elsewhere, as each
    real pool does."""
    all_of = [_predicted(repository, rates, slots, seed) for seed in range(SEEDS)]
    return Outcome(*(sum(each) / SEEDS for each in zip(*all_of, strict=True)))


def _predicted(repository: Path, rates: Rates, slots: int, seed: int) -> Outcome:
    sets = slots // 64 // (ENCLOSURES * DRIVES)
    drive_bytes = sets * (4096 + 64 * (4096 + VALUE_BYTES))
    drive, link = (f"{rate * MIB / 1e6}MB/s" for rate in rates)
    words = [
        "--pod", "one", "--gpus", "1", "--gpus-per-host", "1", "--enclosures", ENCLOSURES, "--drives", DRIVES,
        "--drive-size", drive_bytes, "--bytes-per-token", TOKEN_BYTES, "--drive-read", drive,
        "--drive-write", drive, "--enclosure-nic", link, "--drive-latency-ms", 0, "--drive-tail-ms", 0,
        "--workers", WORKERS, "--players", WORKERS, "--trace", repository / TRACE, "--requests", REQUESTS,
        "--read-deadline-ms", READ_DEADLINE_MS, "--directory-fresh-ms", 1000, "--seed", seed, "--json",
    ]  # fmt: skip
    ran = subprocess.run(
        [sys.executable, "-P", "-m", "agent.cli", "sim", *map(str, words)],
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    return _outcome(_json_of(ran.stdout))


def main() -> None:
    """Play both as often as is asked, and print a table in Markdown."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=5)
    runs, repository = parser.parse_args().runs, Path(__file__).parents[3]
    heads = (
        "drive, link, MiB/s",
        "run",
        *(f"{what}, {whose}" for what in ("hits", "MiB/s") for whose in BOTH),
    )
    print(f"| {' | '.join(heads)} | off |")
    print("| --- " * (len(heads) + 1) + "|")
    for rates in (DRIVES_LIMIT, LINKS_LIMIT):
        for run in range(1, runs + 1):
            with tempfile.TemporaryDirectory() as name:
                folder, processes = Path(name), Processes(Path(name))
                try:
                    real, slots = measured(processes, folder, repository, rates)
                finally:
                    processes.end_all()
                    unmount_below(folder)
            told = predicted(repository, rates, slots)
            off = told.throughput / real.throughput - 1
            print(
                f"| {rates.drive}, {rates.link} | {run} | {real.hit_ratio:.4f} | {told.hit_ratio:.4f} "
                f"| {real.throughput:.2f} | {told.throughput:.2f} | {off:+.1%} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
