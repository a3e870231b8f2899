"""What Tier 0 brings and costs: gets in place and over the fabric, and what the loss of a server costs.

    python -m tests.support.rungs.local_first_figures [--values N] [--json FILE]

Two agents on this machine. One has a file of it as its own SSD; both have an enclosure in memory. Values of
60,000 bytes lie in two ways: one copy of each on either of the two media, or two copies, the first one local.
Both agents get all values, in turns. Then the agent beside the SSD is killed, and the other gets them again.
Every value that comes is compared. There is no network: a real fabric adds its time to every get of `two`.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from agent.host_os.result_file import result_file
from emulator.jbof.enclosure import Enclosure, EnclosureSettings
from tests.support.local_rig import LocalRig, value_of
from tests.support.processes import Processes, Started
from tests.support.waiting import wait_until

VALUES: Final = 200
ROUNDS: Final = 3
WAIT_S: Final = 120.0
WAYS: Final[dict[str, dict[str, object]]] = {
    "one copy": {},
    "two, local first": {"copies": 2, "local_first": "true"},
}


def main(words: Sequence[str]) -> int:
    """0 where it could be measured."""
    parser = argparse.ArgumentParser(description="Measure gets in place, by the fabric and after a loss.")
    parser.add_argument("--values", type=int, default=VALUES, choices=range(8, 401), metavar="8..400")
    parser.add_argument("--json", type=result_file)
    given = parser.parse_args(words)
    rows = []
    print("| copies | gets | served | bytes over the fabric, a get | p50 | processor time, a get |")
    print("| --- | --- | --- | --- | --- | --- |")
    for copies, volume in WAYS.items():
        with tempfile.TemporaryDirectory(prefix="g35-local-first-") as folder:
            for row in _rows(Path(folder), volume, given.values):
                rows.append({"copies": copies, **row})
                print(
                    f"| {copies} | {row['gets']} | {row['served']} of {row['asked']} "
                    f"| {row['fabric_bytes']:,.0f} | {row['p50_ms']:.2f} ms | {row['processor_ms']:.2f} ms |",
                    flush=True,
                )
    if given.json is not None:
        given.json.write_text(json.dumps(rows, indent=1) + "\n")
    return 0


def _rows(folder: Path, volume: dict[str, object], values: int) -> list[dict[str, Any]]:
    processes = Processes(folder)
    rig = LocalRig(processes, folder, **volume)
    keys = [b"%016d" % number for number in range(values)]
    agents: dict[str, Started] = {}
    with Enclosure(EnclosureSettings(name="shelf", drives=1, drive_bytes=48 << 20)) as shelf:
        there = rig.enclosure("shelf", shelf.port, shelf.settings.subsystem_nqn)
        rig.configure("one", rig.local, there)
        try:
            ended, said = rig.verb("one", "pool", "format")
            assert ended == 0, said
            rig.configure("two", there, rig.as_enclosure)
            agents |= {name: rig.agent(name) for name in ("one", "two")}
            with rig.pool("one") as pool:
                assert all([pool.volume("kv").put(key, value_of(key)) for key in keys])
            wait_until(lambda: not rig.status("one")["scrub"]["copies_owed"], WAIT_S, "the second copies")
            both = list(agents.values())
            turns = [(_gets(rig, "one", both, keys), _gets(rig, "two", both, keys)) for _ in range(ROUNDS)]
            rows = [
                {"gets": "beside the SSD", **_middle([beside for beside, _ in turns])},
                {"gets": "elsewhere", **_middle([elsewhere for _, elsewhere in turns])},
            ]
            agents["one"].kill()
            wait_until(
                lambda: sum(each["connected"] for each in rig.status("two")["enclosures"]) == 1,
                WAIT_S,
                "the loss to be seen",
            )
            after = [_gets(rig, "two", [agents["two"]], keys) for _ in range(ROUNDS)]
            rows.append({"gets": "elsewhere, the server gone", **_middle(after)})
            return rows
        finally:
            rig.g35("unmount", folder / "mnt-one")
            for each in agents.values():
                if each.running:
                    each.stop(30)
            processes.end_all()


def _gets(rig: LocalRig, name: str, agents: Sequence[Started], keys: Sequence[bytes]) -> dict[str, Any]:
    """Get all values of one agent, one by one; what it took. `agents`: whose processor time counts."""
    wanted = {key: value_of(key) for key in keys}
    with rig.pool(name) as pool:
        volume = pool.volume("kv")
        before, used, times, served = _bytes(rig, name), _processor_seconds(agents), list[float](), 0
        for key in keys:
            began = time.perf_counter()
            got = volume.get(key)
            times.append(time.perf_counter() - began)
            assert got in (None, wanted[key]), "a wrong value"
            served += got is not None
        used = _processor_seconds(agents) - used
    fabric, hedged = (now - then for now, then in zip(_bytes(rig, name), before, strict=True))
    return {
        "asked": len(keys),
        "served": served,
        "fabric_bytes": fabric / len(keys),
        "hedge_bytes": hedged / len(keys),
        "p50_ms": 1000 * statistics.median(times),
        "processor_ms": 1000 * used / len(keys),
    }


def _middle(turns: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The median of each figure."""
    return {name: statistics.median(each[name] for each in turns) for name in turns[0]}


def _bytes(rig: LocalRig, name: str) -> tuple[int, int]:
    """Over the fabric so far, and how many of them a slow first copy was the reason for."""
    totals = rig.status(name)["totals"]
    return int(totals["flash_bytes_read"] - totals["local_bytes_read"]), int(totals["hedge_bytes"])


def _processor_seconds(agents: Sequence[Started]) -> float:
    ticks = 0
    for each in agents:
        fields = Path("/proc", str(each.pid), "stat").read_text().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
