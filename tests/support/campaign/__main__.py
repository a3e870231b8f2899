"""`make campaign`: every door and policy under every fault, for as long as one likes; see docs/campaign.md.

Prints a table (fault, injected, wrong, lost, hung). The exit code is 1 where one of the last three is not 0,
or a process outgrew its bounds, did not end well or stayed behind.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import threading
import time
from pathlib import Path

from agent.host_os.result_file import result_file
from tests.support.campaign.client import Client
from tests.support.campaign.faults import Faults
from tests.support.campaign.file_clients import FileClient, ObjectClient
from tests.support.campaign.findings import HUNG, WRONG, Findings
from tests.support.campaign.kv_clients import Keys, kv_clients
from tests.support.campaign.pod import AGENTS, KV_VOLUMES, Pod
from tests.support.campaign.watch import Watch
from tests.support.leaks import mounts_below, unmount_below
from tests.support.processes import Processes, mark_this_run, strays

PROGRESS_SECONDS = 10.0
WEEK_SECONDS = 7 * 86_400
CLIENT_END_SECONDS = 90.0
GROWTH_PERCENT_MAX = 10.0
GROWTH_JUDGED_SECONDS = 300.0
"""In a shorter run the caches are still filling, and growth says nothing."""
AFTERWARDS = "(after healing)"
SAID_CHARACTERS = 1500
"""What a finding tells of the last words of a process; its log goes with the folder."""


class Campaign:
    """One run in a folder."""

    def __init__(
        self, seconds: float, seed: int, folder: Path, processes: Processes, without: frozenset[str]
    ) -> None:
        self.findings = Findings()
        self._seconds, self._seed, self._without = seconds, seed, without
        self._processes = processes
        self._pod = Pod(processes, folder, seed)
        self._stop = threading.Event()
        self._watching = threading.Event()
        self.watch: Watch | None = None
        self.growth: float | None = None

    def run(self) -> None:
        """All of it, from an empty folder to processes that have ended."""
        self._pod.start()
        pod, seed, findings = self._pod, self._seed, self.findings
        files, objects = (
            FileClient(pod, seed, findings, self._stop),
            ObjectClient(pod, seed, findings, self._stop),
        )
        volumes = {volume: Keys(volume) for volume in KV_VOLUMES}
        clients = [*kv_clients(pod, volumes, seed, findings, self._stop), files, objects]
        self.watch = Watch(pod, clients, self._watching)
        faults = Faults(pod, self._processes, seed, findings, self._stop, self._without)
        try:
            for thread in (*clients, self.watch):
                thread.start()
            self._break_things(faults)
        finally:
            self._stop.set()
        self.growth = self.watch.trend.growth_percent(f"agent-{AGENTS[0]}")
        findings.begin(AFTERWARDS, 0)
        self._wait_for(clients)
        faults.heal()
        files.settle()
        objects.settle()
        self._add_up()
        self._watching.set()
        self.watch.join()
        self._end()

    def _break_things(self, faults: Faults) -> None:
        began = time.monotonic()
        told = began
        while (now := time.monotonic()) < began + self._seconds:
            if now > began + self._seconds / 2:
                faults.spare_the_agent()
            if now > told + PROGRESS_SECONDS:
                told = now
                self._say_how_far(now - began)
            faults.next()

    def _say_how_far(self, seconds: float) -> None:
        found = self.findings
        done = f"{found.injected.total():,} faults, {found.aside['hits']:,} hits, {found.bad} findings"
        print(f"campaign: {seconds:.0f} of {self._seconds:.0f} s, {done}; {found.fault}", flush=True)

    def _wait_for(self, clients: list[Client]) -> None:
        until = time.monotonic() + CLIENT_END_SECONDS
        for client in clients:
            client.join(max(0.0, until - time.monotonic()))
            if client.is_alive():
                self.findings.found(HUNG, f"{client.name} does not end")

    def _add_up(self) -> None:
        """Causes of misses add up to the misses, in each agent's own numbers."""
        for agent in AGENTS:
            totals = self._pod.status(agent)["totals"]
            causes = totals["miss_causes"]
            if sum(causes.values()) != totals["misses"]:
                self.findings.found(WRONG, f"agent {agent}: {totals['misses']} misses, and causes {causes}")

    def _end(self) -> None:
        """Ask all processes to end; agents have to do so well."""
        for name in reversed(self._pod.names):
            started = self._pod.running[name]
            code = started.stop(60)
            if name.startswith("agent") and code != 0:
                self.findings.found(WRONG, f"{name} ended with {code}:\n{started.output[-SAID_CHARACTERS:]}")

    def tracebacks(self) -> list[str]:
        """Processes that said something which only a bug says."""
        logs = {log.name: log.read_text(errors="replace") for log in self._pod.folder.glob("process-*.log")}
        return [
            f"{name} has a traceback:\n{text[text.index('Traceback') :][:2000]}"
            for name, text in logs.items()
            if "Traceback" in text
        ]


def campaign(
    seconds: float,
    seed: int,
    folder: Path,
    json_file: Path | None = None,
    without: frozenset[str] = frozenset(),
) -> int:
    """The whole run, in `folder`; the exit code."""
    mark = mark_this_run()
    before = strays(mark).keys()
    processes = Processes(folder)
    print(f"campaign: {seconds:g} s, seed {seed}", flush=True)
    run = Campaign(seconds, seed, folder, processes, without)
    wrong: list[str] = []
    try:
        run.run()
        wrong += [f"left mounted: {place}" for place in mounts_below(folder)]
        wrong += [f"left running: {what}" for pid, what in strays(mark).items() if pid not in before]
        wrong += run.tracebacks()
    finally:
        processes.end_all()
        unmount_below(folder)
    assert run.watch is not None
    faults = run.findings.injected.total()
    wrong += run.watch.complaints(faults)
    if seconds >= GROWTH_JUDGED_SECONDS and (run.growth is None or run.growth > GROWTH_PERCENT_MAX):
        wrong.append(f"the first agent's memory is not flat: {run.growth} %")
    _report(run, wrong)
    if json_file is not None:
        record = {"name": "campaign_findings", "value": run.findings.bad, "unit": "", "seconds": seconds}
        growth = {"name": "soak_rss_growth_percent", "value": run.growth, "unit": "%", "seconds": seconds}
        json_file.write_text(
            json.dumps([record | {"faults": faults}, growth | {"faults": faults}], indent=1) + "\n"
        )
    return 1 if wrong or run.findings.bad else 0


def _report(run: Campaign, wrong: list[str]) -> None:
    findings, watch = run.findings, run.watch
    assert watch is not None
    for line in findings.table():
        print(line)
    for what, count in sorted(findings.aside.items()):
        print(f"aside: {what}: {count:,}")
    for line in watch.trend.lines():
        print(f"trend: {line}")
    for name, count in sorted(watch.descriptors.items()):
        print(f"trend: {name}: {count} descriptors at most")
    grew = "too short a life to tell" if run.growth is None else f"{run.growth:+.1f} % since it had settled"
    print(f"trend: growth of the first agent: {grew}")
    for text in findings.texts:
        print(text, file=sys.stderr)
    for text in wrong:
        print(f"wrong: {text}", file=sys.stderr)
    print("campaign: " + ("not good" if wrong or findings.bad else "good"), flush=True)


def main(words: list[str] | None = None) -> int:
    """The entry point of `python -m tests.support.campaign`."""
    parser = argparse.ArgumentParser(
        prog="make campaign", description="Every door and policy under every fault, for a while."
    )
    parser.add_argument("--seconds", type=float, default=120.0, help="how long faults go on (default: 120)")
    parser.add_argument("--seed", type=int, default=35, help="of operations and faults (default: 35)")
    parser.add_argument("--json", type=result_file, help="where to write the records")
    parser.add_argument("--without", action="append", default=[], help="a fault to leave out (repeat)")
    chosen = parser.parse_args(words)
    if not 1 <= chosen.seconds <= WEEK_SECONDS:
        parser.error("argument --seconds: from 1 second to a week")
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="g35-campaign-") as folder:
        try:
            without = frozenset(chosen.without)
            code = campaign(chosen.seconds, chosen.seed, Path(folder), chosen.json, without)
        except KeyboardInterrupt:
            print("campaign: interrupted; what it started is gone", file=sys.stderr)
            code = 130
    print(f"campaign: {time.monotonic() - began:.1f} s in all")
    return code


if __name__ == "__main__":
    sys.exit(main())
