"""One run of the bench: first the speeds, in rounds, then counts on the same pools, then pools of their own.

A part that cannot be had here (no Redis) is left out with its reason. A part that fails is left out too, and
makes the run a failed one.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from agent.bench import (
    fault_probes,
    loop_probe,
    query_probe,
    s3_probe,
    single_probes,
    start_probes,
    tenant_probes,
)
from agent.bench.names_and_units import CATALOG, Entry
from agent.bench.prestage_probes import replayed
from agent.bench.probe_table import probe_for
from agent.bench.records import Figure
from agent.bench.redis_site import NotHere
from agent.bench.rounds import ROUNDS, Probe, details, middle, run_rounds
from agent.bench.single_probes import Counted, trace_hits
from agent.bench.sites import Sites
from agent.bench.virtiofs_probes import MOUNT, VIRTIOFS, copies_per_byte
from agent.errors import G35Error
from agent.host_os.cpu_idle import LOOK_SECONDS, wake_up_microseconds

SETTLE_SECONDS = 10 * LOOK_SECONDS
"""An agent whose requests have ended lets processors sleep again long before."""
COUNTED_ONCE: Mapping[str, Callable[[Sites, Entry], Counted]] = {
    "copies_fuse": lambda sites, entry: copies_per_byte(sites, entry.value_bytes, MOUNT),
    "copies_virtiofs": lambda sites, entry: copies_per_byte(sites, entry.value_bytes, VIRTIOFS),
    "write_amplification": lambda sites, _: single_probes.write_amplification(sites),
    "agent_rss": lambda sites, _: single_probes.agent_rss(sites),
}
"""By `Entry.kind`: what is counted on the pools of the speeds, in the order of names_and_units.py."""

ON_THEIR_OWN: Mapping[str, tuple[str, "Callable[[Path, Wishes], dict[str, Counted]]"]] = {
    "tenants": ("two tenants", lambda folder, _: tenant_probes.measure(folder)),
    "loop": ("an event loop that calls host_shim", lambda folder, _: loop_probe.measure(folder)),
    "stopped": ("an enclosure that stops", lambda folder, _: fault_probes.measure_stopped(folder)),
    "failover": ("a path that is cut off", lambda folder, _: fault_probes.measure_failover(folder)),
    "start": ("starts of a pool", lambda folder, _: start_probes.measure_start(folder)),
    "many_namespaces": (
        "starts with 1,000 namespaces", lambda folder, _: start_probes.measure_many_namespaces(folder)
    ),
    "query": ("queries of a router", lambda folder, _: query_probe.measure(folder)),
    "s3": ("gets by the S3 door", lambda folder, _: s3_probe.measure(folder)),
    "hit_ratio": ("replaying the trace", lambda folder, wishes: _replays(folder, wishes, trace_hits)),
    "prestage_replay": (
        "replaying with prestaging", lambda folder, wishes: _replays(folder, wishes, replayed)
    ),
}  # fmt: skip
"""By `Entry.kind`: what is measured once, on pools of its own in a folder that is made for it."""

Said = Callable[[str, float], None]
"""Hears what is being done, and which part of the run is behind us (0 to 1)."""


@dataclass(frozen=True, slots=True)
class Wishes:
    """What is to be measured, and for how long. `seconds` is for each speed, over all its rounds."""

    entries: Sequence[Entry]
    seconds: float
    trace: Path | None
    requests: int


@dataclass(slots=True)
class Results:
    """`left_out` are names with the reason why; `troubles` make the run a failed one."""

    figures: dict[str, Figure] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)
    troubles: list[str] = field(default_factory=list)

    def add(self, name: str, counted: Counted) -> None:
        self.figures[name] = Figure(CATALOG[name], counted.value, counted.details)

    def in_order(self) -> dict[str, Figure]:
        return {name: self.figures[name] for name in CATALOG if name in self.figures}


def run(wishes: Wishes, folder: Path, said: Said) -> Results:
    """Measure, in `folder`, which the caller makes and removes."""
    results = Results()
    kinds = {entry.kind for entry in wishes.entries}
    with Sites(folder / "speeds") as sites:
        _speeds(wishes, sites, results, said)
        for entry in wishes.entries:
            if count := COUNTED_ONCE.get(entry.kind):
                said(entry.name, 0.83)
                with _explained(results, entry.name):
                    results.add(entry.name, count(sites, entry))
        for site in sites.pools.values():
            results.troubles += site.complaints()
    wanted = {entry.name for entry in wishes.entries}
    for number, (kind, (what, measure)) in enumerate(ON_THEIR_OWN.items()):
        if kind in kinds:
            said(what, 0.86 + 0.14 * number / len(ON_THEIR_OWN))
            with _explained(results, kind):
                for name, counted in measure(folder / kind, wishes).items():
                    if name in wanted:
                        results.add(name, counted)
    return results


def _replays(
    folder: Path, wishes: Wishes, replay: Callable[[Sites, Path | None, int], dict[str, Counted]]
) -> dict[str, Counted]:
    with Sites(folder) as sites:
        return replay(sites, wishes.trace, wishes.requests)


def _speeds(wishes: Wishes, sites: Sites, results: Results, said: Said) -> None:
    probes: dict[str, Probe] = {}
    timed = [entry for entry in wishes.entries if entry.in_rounds]
    for number, entry in enumerate(timed):
        said(f"preparing {entry.name}", 0.2 * number / len(timed))
        with _explained(results, entry.name):
            probe = probe_for(entry, sites)
            probe.prepare()
            probes[entry.name] = probe
    steps = (ROUNDS + 1) * max(len(probes), 1)
    done = iter(range(steps))

    def heard(name: str, number: int) -> None:
        which = "warming up" if number < 0 else f"round {number + 1} of {ROUNDS}"
        said(f"{which}: {name}", 0.2 + 0.6 * next(done) / steps)

    def given_up(name: str, why: Exception) -> bool:
        """A store that fails in a round costs its name; what is not ours to expect ends the run."""
        if isinstance(why, G35Error):
            results.troubles.append(f"{name}: {why}")
        return isinstance(why, G35Error)

    rounds = run_rounds(probes, wishes.seconds, heard, given_up=given_up, settle=Processors().wait_to_sleep)
    for name, samples in rounds.items():
        results.figures[name] = Figure(CATALOG[name], middle(samples), details(samples))


@contextmanager
def _explained(results: Results, name: str) -> Iterator[None]:
    """What a name needs and is not there, or fails, costs that name and no other."""
    try:
        yield
    except NotHere as why:
        results.left_out[name] = str(why)
    except G35Error as error:
        results.troubles.append(f"{name}: {error}")


class Processors:
    """What processors may do when nothing of ours works, and how to have that again.

    An agent keeps them awake while values come, and a moment longer. A floor, or another store, that is
    measured in that moment would be slower or quicker than it is (docs/benchmarks.md).
    """

    def __init__(
        self,
        told: Callable[[], int | None] = wake_up_microseconds,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._told, self._clock, self._sleep = told, clock, sleep
        self._at_first = told()

    def wait_to_sleep(self) -> None:
        """Wait until they may sleep as at first, for SETTLE_SECONDS at most: others may ask as well."""
        end = self._clock() + SETTLE_SECONDS
        while self._clock() < end:
            now = self._told()
            if now is None or self._at_first is None or now >= self._at_first:
                return
            self._sleep(LOOK_SECONDS / 10)
