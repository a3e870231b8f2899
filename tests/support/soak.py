"""`make soak`: the whole path for as long as one likes, with something going wrong all the time.

A pool is brought up as a user does it; a generated trace is replayed through its mount over and over, with
other keys each time; meanwhile a seeded dice breaks one part after another, and heals it. In the second half
the agent is no longer killed, so that its memory can be watched over one long life. At the end all is healed,
and what was stored then must be served. What was checked is printed, and how memory and logs went; `--json`
writes the growth as the record `soak_rss_growth_percent`, in the shape of `g35 bench --json`.

The exit code is 1 where anything was not as it must be. `--seed` repeats the faults, though not their timing.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from agent.cli.replay.report import Report, readable_bytes
from agent.cli.replay.running import ReplayOptions, run_replay
from agent.cli.replay.trace_making import encode_line, made_trace
from agent.errors import UserError
from tests.support.leaks import mounts_below, unmount_below
from tests.support.pool_up import PoolUp
from tests.support.processes import Processes, mark_this_run, strays
from tests.support.resource_trend import ResourceTrend
from tests.support.waiting import wait_until

UP = (
    "--drive-size", "384M", "--value-size", "64K", "--media", "files", "--read-deadline-ms", "200",
    "--prestage-memory", "32M",
)  # fmt: skip
ENCLOSURES = 2
BYTES_PER_TOKEN = 128
REQUESTS = 60
AGENT_BYTES_MAX = (300 + 64 + 32 + 256) << 20
"""300 MiB, and its caches: directories, prestaged values, files being written. There is little room for
prestaged values, so that it is soon full and does not hide what else grows."""
LOG_BYTES_MAX = 256 << 10
LOG_BYTES_EACH_FAULT = 8 << 10
"""What may be said of one fault; all that is said more often than faults happen would fill a disk."""
AGENT_KILLED = "agent killed"
GROWTH_PERCENT_MAX = 5.0
GROWTH_JUDGED_SECONDS = 300.0
"""In a shorter run the caches are still filling, and growth says nothing."""
HELD_SECONDS = 0.4
QUIET_SECONDS = 0.3


class Faults:
    """Breaks parts of a pool, one at a time, and heals them; counts what it did."""

    def __init__(self, pool_up: PoolUp, seed: int) -> None:
        self.counts: Counter[str] = Counter()
        self._pool = pool_up
        self._dice = random.Random(seed)
        self._kinds: dict[str, Callable[[int], None]] = {
            "slow drive": lambda at: self._for_a_while(at, "slow", drive=0, latency_ms=20.0),
            "hung drive": lambda at: self._for_a_while(at, "hang", drive=0),
            "error status": lambda at: self._for_a_while(
                at, "error", drive=0, status="unrecovered_read_error", probability=0.3
            ),
            "flipped bits": lambda at: self._for_a_while(at, "flip", drive=1, on_read=True, bits=3),
            "full drive": lambda at: self._for_a_while(at, "full", drive=1),
            "drive removed": self._remove_and_add,
            "enclosure killed": lambda at: self._kill(f"jbof-{at}"),
            AGENT_KILLED: lambda _: self._kill("agent-process"),
        }
        # Every kind once, in some order, before any comes again: a short run has seen many.
        self._next: list[str] = []

    def spare_the_agent(self) -> None:
        """From now on the agent is not killed."""
        self._kinds.pop(AGENT_KILLED, None)
        self._next = [kind for kind in self._next if kind != AGENT_KILLED]

    def one(self, stop: threading.Event) -> None:
        """The next fault, from its beginning to its end."""
        if not self._next:
            self._next = sorted(self._kinds)
            self._dice.shuffle(self._next)
        kind = self._next.pop()
        self.counts[kind] += 1
        self._stop = stop
        self._kinds[kind](self._dice.randrange(ENCLOSURES))
        stop.wait(QUIET_SECONDS)

    def _for_a_while(self, enclosure: int, verb: str, **fields: object) -> None:
        self._pool.fault(enclosure, verb, **fields)
        self._stop.wait(HELD_SECONDS)
        self._pool.fault(enclosure, "heal")

    def _remove_and_add(self, enclosure: int) -> None:
        self._pool.fault(enclosure, "remove", drive=1)
        self._stop.wait(HELD_SECONDS)
        self._pool.fault(enclosure, "add", drive=1)

    def _kill(self, name: str) -> None:
        self._pool.wait_restarted(name, self._pool.kill(name))
        if name != "agent-process":
            enclosure = int(name.rpartition("-")[2])
            wait_until(lambda: self._answers(enclosure), 30, f"{name} to answer again")

    def _answers(self, enclosure: int) -> bool:
        try:
            return bool(self._pool.fault(enclosure, "stats"))
        except Exception:
            return False  # it is not yet listening; whatever the client calls that


class Soak:
    """One run: what it did, and what was wrong."""

    def __init__(self, pool_up: PoolUp, folder: Path, seed: int) -> None:
        self.wrong: list[str] = []
        self.sums: Counter[str] = Counter()
        self.faults = Faults(pool_up, seed)
        self._pool = pool_up
        self._seed = seed
        self._trace = folder / "trace.jsonl"
        lines = [encode_line(request) for request in made_trace(seed, REQUESTS)]
        self._trace.write_text("\n".join(lines) + "\n")

    def replay(self, seed: int) -> Report:
        """One replay; what it counts as trouble is wrong here, too."""
        options = ReplayOptions(
            self._trace, self._pool.mount, bytes_per_token=BYTES_PER_TOKEN, seed=seed, progress=False,
            agent_wait=60.0,
        )  # fmt: skip
        while True:
            wait_until(self._pool.answers, 60, "the agent to answer")
            try:
                report = run_replay(options)
                break
            except UserError:
                if self._pool.answers():  # else it was killed just after it had answered
                    raise
        self.wrong += report.troubles()
        record = report.record()
        for name in (
            "requests",
            "blocks",
            "hits",
            "bytes_read",
            "bytes_written",
            "wrong_bytes",
            "agent_waits",
        ):
            self.sums[name] += record[name]
        self.sums["replays"] += 1
        return report

    def run(self, seconds: float, trend: ResourceTrend) -> None:
        """Replay on one thread and break on this one, for `seconds`."""
        stop = threading.Event()
        failure: list[BaseException] = []

        def play() -> None:
            try:
                while not stop.is_set():
                    self.replay(self._seed * 1_000_003 + self.sums["replays"])
            except BaseException as error:
                failure.append(error)
                stop.set()

        player = threading.Thread(target=play, name="soak")
        timer = threading.Timer(seconds, stop.set)
        player.start()
        timer.start()
        half = time.monotonic() + seconds / 2
        try:
            while not stop.is_set():
                if time.monotonic() > half:
                    self.faults.spare_the_agent()
                self.faults.one(stop)
                trend.look()
        finally:
            stop.set()
            timer.cancel()
            player.join()
        if failure:
            raise failure[0]

    def recover(self) -> None:
        """Everything healed: what is stored now is served, and the agent's own numbers add up."""
        for number in range(ENCLOSURES):
            self._pool.fault(number, "heal")
        self._pool.wait_connected(ENCLOSURES)

        def all_there() -> bool:
            found = self._pool.status()["enclosures"]
            return all(each["namespaces"] == 2 and not each["namespaces_paused"] for each in found)

        wait_until(all_there, 60, "every drive to be reached")
        self.replay(-1 & 0xFFFF_FFFF)
        again = self.replay(-1 & 0xFFFF_FFFF)
        if again.record()["hit_ratio"] < 0.9:
            self.wrong.append(
                f"after healing only {again.record()['hit_ratio']:.1%} of the blocks were served"
            )
        totals = self._pool.status()["totals"]
        if sum(totals["miss_causes"].values()) != totals["misses"]:
            self.wrong.append("the agent's miss causes do not add up to its misses")


def soak(seconds: float, seed: int, folder: Path, json_file: Path | None = None) -> int:
    """The whole run, in `folder`; the exit code."""
    mark = mark_this_run()
    before = strays(mark).keys()
    processes = Processes(folder)
    print(f"soak: {seconds:g} s, seed {seed}", flush=True)
    try:
        pool_up = PoolUp(processes, folder / "state", *UP)
        trend = ResourceTrend(pool_up.state, ("agent-process", *(f"jbof-{at}" for at in range(ENCLOSURES))))
        trend.look()
        run = Soak(pool_up, folder, seed)
        run.run(seconds, trend)
        growth = trend.growth_percent("agent-process")
        run.recover()
        trend.look()
        if seconds >= GROWTH_JUDGED_SECONDS and (growth is None or growth > GROWTH_PERCENT_MAX):
            run.wrong.append(f"the agent's memory is not flat: {_shown(growth)}")
        allowed = LOG_BYTES_MAX + LOG_BYTES_EACH_FAULT * run.faults.counts.total()
        run.wrong += trend.complaints({"agent-process": AGENT_BYTES_MAX}, allowed)
        if pool_up.down() != 0:
            run.wrong.append(f"g35 up ended with {pool_up.process.process.returncode}")
        run.wrong += [f"left mounted: {place}" for place in mounts_below(folder)]
        run.wrong += [f"left running: {what}" for pid, what in strays(mark).items() if pid not in before]
    finally:
        processes.end_all()
        unmount_below(folder)
    _report(run, trend, allowed)
    print(f"trend: agent-process: {_shown(growth)}")
    if json_file is not None:
        record = {"name": "soak_rss_growth_percent", "value": growth, "unit": "%", "seconds": seconds}
        record |= {"faults": run.faults.counts.total(), **run.sums}
        json_file.write_text(json.dumps([record], indent=1) + "\n")
    return 1 if run.wrong else 0


def _shown(growth: float | None) -> str:
    if growth is None:
        return "too short a life to tell its growth"
    return f"grew by {growth:+.1f} % since it had settled"


def _report(run: Soak, trend: ResourceTrend, log_bytes_allowed: int) -> None:
    sums = run.sums
    print(f"checked: {sums['replays']:,} replays, {sums['requests']:,} requests, {sums['blocks']:,} blocks")
    print(
        f"checked: every byte of {readable_bytes(sums['bytes_read'])} read, "
        f"{sums['wrong_bytes']:,} wrong; {readable_bytes(sums['bytes_written'])} written"
    )
    print("checked: hits and causes of misses add up, in every replay and in the agent's own counters")
    told = ", ".join(f"{kind} {count}" for kind, count in sorted(run.faults.counts.items()))
    print(f"checked: it goes on through {run.faults.counts.total():,} faults: {told}")
    print(f"checked: waited for the agent {sums['agent_waits']:,} times, and it came back each time")
    print("checked: after the last fault what is stored is served; nothing is left mounted or running")
    print(
        f"checked: logs hold {readable_bytes(trend.log_bytes)} of {readable_bytes(log_bytes_allowed)} allowed"
    )
    for line in trend.lines():
        print(f"trend: {line}")
    for what in run.wrong:
        print(f"wrong: {what}", file=sys.stderr)
    print("soak: " + ("not good" if run.wrong else "good"), flush=True)


def main(words: list[str] | None = None) -> int:
    """The entry point of `python -m tests.support.soak`."""
    parser = argparse.ArgumentParser(
        prog="make soak", description="The whole path under faults, for a while."
    )
    parser.add_argument("--seconds", type=float, default=60.0, help="how long faults go on (default: 60)")
    parser.add_argument("--seed", type=int, default=35, help="of keys and faults (default: 35)")
    parser.add_argument("--json", type=Path, help="where to write the record")
    chosen = parser.parse_args(words)
    if not 1 <= chosen.seconds <= 7 * 86_400:
        parser.error("argument --seconds: from 1 second to a week")
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="g35-soak-") as folder:
        code = soak(chosen.seconds, chosen.seed, Path(folder), chosen.json)
    print(f"soak: {time.monotonic() - began:.1f} s in all")
    return code


if __name__ == "__main__":
    sys.exit(main())
