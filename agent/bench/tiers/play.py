"""One play: a trace before all ways at once, a few requests of each in turn, and the sums at the end.

So a machine that becomes slower for a while is slower for all of them, and a play that is cut short has had
the same requests everywhere.
"""

import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from agent.bench.tiers.links import Busy, Links
from agent.bench.tiers.metered_store import MeteredStore
from agent.bench.tiers.way_site import WaySite, way_site
from agent.bench.tiers.ways import DRIVES, WAYS, Way
from agent.errors import UserError
from agent.pool.format.directory import SLOTS_PER_SET
from agent.replay.content import BlockContent
from agent.replay.latencies import Latencies
from agent.replay.lru import LruBaseline
from agent.replay.player import Player, Schedule
from agent.replay.tally import Tally
from agent.replay.trace_lines import TraceFile, TraceRequest
from agent.sizes import readable_bytes

POOL_SHARE: Final = 4
"""A way has room for one in so many of the trace's blocks."""
REQUESTS_IN_TURN: Final = 5
FOLLOWS_SECONDS: Final = 0.02
"""After a turn's last request. What follows later is counted in bytes, and not in processor time."""
IDLE_SECONDS: Final = 3.0
"""How long is looked at what agents take when nobody asks them."""
SPILLED_AT_MOST: Final = 2
"""Times that a block lies in G4: it may be evicted again after it came back."""
STARTED: Final = 0.2
PLAYED: Final = 0.95
"""Parts of the progress."""

Said = Callable[[str, float], None]
"""Hears what is being done, and which part of the run is behind us (0 to 1)."""


@dataclass(frozen=True, slots=True)
class Workload:
    """What is played: the first `requests` of a trace (0: all), in `seconds` at the most."""

    trace: Path
    requests: int
    value_bytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Played:
    """What became of one way. `tally` is the host's; `links` and `volume` have the agent's own counters, and
    the enclosure's."""

    way: Way
    tally: Tally
    lookup_latencies: Latencies
    host_seconds: float
    """Processor time of calls into the mount."""
    links: Links
    busy: Busy
    """Beyond what an idle agent and an idle enclosure take."""
    idle_share: float
    """Of a processor, that an idle agent takes."""
    volume: Mapping[str, Any]
    room: int
    """Blocks."""
    flash_bytes: int
    g4_bytes: int
    """Of the files below, looked at after `links`: a bundle may have been stored since."""


@dataclass(frozen=True, slots=True)
class Results:
    """All ways after the same `requests` of `requests_wanted`. `blocks` are distinct ones of the trace."""

    workload: Workload
    blocks: int
    broken_lines: int
    """Of the trace, that were skipped."""
    lru: LruBaseline
    requests: int
    requests_wanted: int
    seconds: float
    ways: Sequence[Played]


class _Lane:
    def __init__(self, site: WaySite, content: BlockContent) -> None:
        self.site = site
        self._store = MeteredStore(site.store)
        self.player = Player(self._store, content, Schedule(iter(())), prestage=False)
        self._before = site.look()
        self._busy = Busy()

    def turn(self, requests: Sequence[TraceRequest]) -> None:
        """Play some requests. What follows a put soon, a second copy or one for G4, is part of the turn."""
        began = self.site.busy()
        for request in requests:
            self.player.play(request)
        time.sleep(FOLLOWS_SECONDS)
        self._busy += self.site.busy() - began

    def wait_quiet(self) -> None:
        self._after, self._quiet_since = self.site.look_when_quiet(), self.site.busy()

    def played(self, sets: int, value_bytes: int) -> Played:
        """Some time after `wait_quiet`, in which nobody asked."""
        site, way = self.site, self.site.way
        idle = site.busy() - self._quiet_since
        volume = site.volume()
        return Played(
            way, self.player.tally, self._store.lookup_latencies, self._store.seconds,
            self._after.since(self._before), self._busy.beyond(idle), idle.agent / idle.seconds, volume,
            volume["slots"] // way.copies, way.flash_bytes(sets, value_bytes), site.bytes_below(),
        )  # fmt: skip


def play(workload: Workload, folder: Path, said: Said) -> Results:
    """Start all ways in `folder`, play, and end them. Raises UserError for a trace without blocks,
    and where there is no room for the ways."""
    trace = TraceFile(workload.trace, False, workload.requests)
    requests = list(trace)
    blocks = len({hash_id for request in requests for hash_id in request.hash_ids})
    if not blocks:
        raise UserError(f"{workload.trace} has no blocks to play", "name a trace in Mooncake's format")
    sets = max(1, round(blocks / POOL_SHARE / SLOTS_PER_SET / DRIVES))
    _check_room(WAYS, sets, blocks * workload.value_bytes, workload.value_bytes, folder)
    content = BlockContent(workload.value_bytes)
    lru = LruBaseline(sets * SLOTS_PER_SET * DRIVES)
    with ExitStack() as stack:
        sites = []
        for number, way in enumerate(WAYS):
            said(f"starting {way.name}", STARTED * number / len(WAYS))
            site = way_site(way, sets, workload.value_bytes, folder / f"way-{number}")
            sites.append(stack.enter_context(site))
        lanes = [_Lane(site, content) for site in sites]
        began = time.monotonic()
        count = _play(lanes, requests, lru, began + workload.seconds, said)
        seconds = time.monotonic() - began
        said("waiting for what follows late", PLAYED)
        for lane in lanes:
            lane.wait_quiet()
        time.sleep(IDLE_SECONDS)
        played = [lane.played(sets, workload.value_bytes) for lane in lanes]
        said("ending", 1.0)
    return Results(workload, blocks, trace.broken_lines, lru, count, len(requests), seconds, played)


def _check_room(ways: Sequence[Way], sets: int, spilled_max: int, value_bytes: int, folder: Path) -> None:
    """Raises UserError where there is none: drives are memory, and what is evicted to G4 lies in `folder`."""
    drives = sum(way.flash_bytes(sets, value_bytes) for way in ways)
    spilled = SPILLED_AT_MOST * spilled_max if any(way.spills for way in ways) else 0
    for what, wanted, free in (
        ("of memory for their drives", drives, available_memory()),
        (f"in {folder} for G4", spilled, free_bytes(folder)),
    ):
        if wanted > free:
            raise UserError(
                f"the ways take {readable_bytes(wanted)} {what}, and {readable_bytes(free)} are free",
                "play fewer --requests, or a smaller --value-size",
            )


def free_bytes(folder: Path) -> int:
    return shutil.disk_usage(folder).free


def available_memory() -> int:
    """Bytes that programs may still take without swapping."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:"))


def _play(
    lanes: Sequence[_Lane], requests: Sequence[TraceRequest], lru: LruBaseline, end: float, said: Said
) -> int:
    """How many requests were played by the end of the trace, or of the time."""
    count = 0
    while count < len(requests) and time.monotonic() < end:
        part = count / len(requests)
        said(f"round: {count:,} of {len(requests):,} requests", STARTED + (PLAYED - STARTED) * part)
        some = requests[count : count + REQUESTS_IN_TURN]
        for lane in lanes:
            lane.turn(some)
        for request in some:
            lru.play(request.hash_ids)
        count += len(some)
    return count
