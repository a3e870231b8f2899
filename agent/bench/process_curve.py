"""How gets and puts grow with the processes of an agent: a pool for each number, and the same clients.

    python -m agent.bench.process_curve [--processes 1,2,4,8] [--seconds 2] [--json FILE]

Four measurements of each pool: gets and puts of 64 KiB in batches of 32, and of 1 MiB. Clients, agent and
enclosures have processors of their own where there are six or more: a quarter for clients, a quarter for
enclosures, the rest for the agent. The result is JSON, on standard output without `--json`.
"""

import argparse
import json
import os
import platform
import sys
import time
from collections.abc import Collection, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from agent.bench.client_process import LineClient
from agent.bench.processor_time import process_seconds
from agent.bench.sites import READ_DEADLINE_MS, pool_up
from agent.cli.temporary_folder import temporary_folder
from agent.cli.up.interrupts import EXIT_INTERRUPTED, ended_by_signals
from agent.errors import G35Error
from agent.host_os.result_file import result_file
from nvmeof import compiled

GIBIBYTE: Final = 1 << 30
MEASURED: Final = (("64k_b32", 64 << 10, 32), ("1m", 1 << 20, 1))
"""What a row is called, bytes of a value, values of a call."""
THREADS: Final = 4
"""Of each client."""
APART_FROM: Final = 6
"""Processors from which on clients, agent and enclosures each have their own."""
SERVING_SECONDS: Final = 60.0


@dataclass(frozen=True, slots=True)
class Plan:
    """Which processors who has, and how many clients and enclosures there are; each is one interpreter."""

    clients: tuple[int, ...]
    agent: tuple[int, ...]
    enclosures: tuple[int, ...]

    @classmethod
    def of(cls, processors: Collection[int]) -> "Plan":
        given = tuple(sorted(processors))
        if len(given) < APART_FROM:
            return cls(given, given, given)
        part = len(given) // 4
        return cls(given[:part], given[2 * part :], given[part : 2 * part])

    @property
    def is_apart(self) -> bool:
        return self.clients != self.agent


def measure(counts: Sequence[int], seconds: float, drive_bytes: int, folder: Path) -> dict[str, Any]:
    """The curve. Raises G35Error."""
    plan = Plan.of(os.sched_getaffinity(0))
    rows = []
    for number, count in enumerate(counts):
        for row in _measured(count, plan, seconds, drive_bytes, folder / f"pool-{number}"):
            rows.append(row)
            print(f"{row['name']} with {count}: {row['gib_per_s']:.2f} GiB/s", file=sys.stderr, flush=True)
    alone = {row["name"]: row["gib_per_s"] for row in rows if row["processes"] == counts[0]}
    for row in rows:
        row["over_first"] = row["gib_per_s"] / alone[row["name"]] if alone[row["name"]] else None
    return {
        "machine": platform.machine(),
        "hot_modules": compiled.state,
        "processors": {"clients": plan.clients, "agent": plan.agent, "enclosures": plan.enclosures},
        "apart": plan.is_apart,
        "client_threads": THREADS,
        "rows": rows,
    }


def _measured(count: int, plan: Plan, seconds: float, drive_bytes: int, folder: Path) -> list[dict[str, Any]]:
    """The rows of an agent of so many processes."""
    enclosures = len(plan.enclosures) if plan.is_apart else 1
    workers = max(2, -(-len(plan.agent) // count))
    options = [
        "--enclosures", str(enclosures), "--drives", "1", "--drive-size", str(drive_bytes), "--prefault",
        "--no-files", "--processes", str(count), "--workers", str(workers),
    ]  # fmt: skip
    with pool_up(folder, 1 << 20, READ_DEADLINE_MS, *options) as layout, ExitStack() as stack:
        mount = layout.default_mount
        agent = [int(layout.agent_process.read_text()), *_serving(mount, count)]
        for pid in agent:
            pin(pid, plan.agent)
        for number in range(enclosures):
            pin(int(layout.enclosure(number, "pid").read_text()), plan.enclosures)
        clients = []
        for number in range(len(plan.clients) if plan.is_apart else 2):
            command = [sys.executable, "-P", "-m", "agent.bench.curve_client", str(mount), str(number)]
            client = LineClient(f"client {number}", [*command, str(THREADS)], folder / f"client-{number}.log")
            stack.callback(client.stop)
            pin(client.pid, plan.clients)
            clients.append(client)
        rows = []
        for name, size, batch in MEASURED:
            for client in clients:
                client.ask("fill", size=size, batch=batch, turns=2 * count)
            for verb in ("get", "put"):
                before = list(map(process_seconds, agent))
                for client in clients:
                    client.tell(verb, seconds, size=size, batch=batch)
                answers = [client.heard() for client in clients]
                spent = [now - was for now, was in zip(map(process_seconds, agent), before, strict=True)]
                rows.append(_row(f"{verb}_{name}", count, answers, spent))
        return rows


def _row(name: str, count: int, answers: Sequence[dict[str, Any]], spent: Sequence[float]) -> dict[str, Any]:
    moved = sum(each["bytes"] for each in answers)
    lasted = max(each["seconds"] for each in answers)
    return {
        "name": name,
        "processes": count,
        "gib_per_s": moved / lasted / GIBIBYTE,
        "values_per_s": sum(each["operations"] for each in answers) / lasted,
        "misses": sum(each["misses"] for each in answers),
        "agent_cpus_busy": [seconds / lasted for seconds in spent],
    }


def _serving(mount: Path, count: int) -> list[int]:
    """The process ids of the readers, once all serve. Raises G35Error."""
    until = time.monotonic() + SERVING_SECONDS
    while True:
        rows = json.loads((mount / ".g35/status.json").read_text())["processes"]
        if len(rows) == count - 1 and all(row["state"] == "serving" for row in rows):
            return [row["pid"] for row in rows]
        if time.monotonic() > until:
            raise G35Error(f"not all of {count} processes serve: {rows}", "see the log of the pool")
        time.sleep(0.05)


def pin(pid: int, processors: Collection[int]) -> None:
    """Have all threads of a process, and those that they start, run on these processors alone. Threads that
    are bound to one processor stay so, to the first of these."""
    one = {min(processors)}
    for thread in Path(f"/proc/{pid}/task").iterdir():
        with suppress(OSError):  # it has ended
            shares_one = len(os.sched_getaffinity(int(thread.name))) == 1
            os.sched_setaffinity(int(thread.name), one if shares_one else processors)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--processes", default="1,2,4,8", help="numbers of processes, with commas between")
    parser.add_argument("--seconds", type=float, default=2.0, help="of each measurement")
    parser.add_argument(
        "--drive-mib", type=int, default=2048, help="of each enclosure's one drive, in memory"
    )
    parser.add_argument("--json", type=result_file, help="file for the result; default: standard output")
    given = parser.parse_args()
    counts = [int(each) for each in given.processes.split(",")]
    try:
        with ended_by_signals(), temporary_folder("g35-curve-") as folder:
            found = measure(counts, given.seconds, given.drive_mib << 20, folder)
    except G35Error as error:
        raise SystemExit(f"error: {error}; {error.advice}") from None
    except KeyboardInterrupt:
        raise SystemExit(EXIT_INTERRUPTED) from None
    text = json.dumps(found, indent=1)
    if given.json is not None:
        given.json.write_text(text + "\n")
    else:
        print(text)


if __name__ == "__main__":
    main()
