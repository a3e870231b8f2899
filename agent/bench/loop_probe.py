"""How long host_shim holds up an asyncio event loop that calls it: less than a millisecond is the aim.

One process calls from its loop, with a ticker in that loop. On each of its two processors another process has
a ticker alone, and goes first. While one of these is late as well, the processor ran something else (a
hypervisor, the kernel). That time is not host_shim's and is not counted; the record has both numbers.
"""

import bisect
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from agent.bench.contents import Contents
from agent.bench.loop_client import CALLS, VALUES, WATCH, key_number
from agent.bench.single_probes import Counted
from agent.bench.sites import PoolShape, PoolSite
from agent.errors import G35Error

VALUE_BYTES = 1 << 20
DRIVE_BYTES = 288 << 20
"""Room for 256 values, of which 20 are stored."""
MEASURE_SECONDS = 4.0
PATIENCE = 60.0
PROCESSORS_MAX = 2
LATE_MS = 1.0

Late = tuple[float, float]
"""A tick: when it was due, and by how many milliseconds it was late."""


def measure(folder: Path) -> dict[str, Counted]:
    """`shim_loop_block_ms`, on a pool of its own below `folder`."""
    folder.mkdir()
    site = PoolSite("pool", PoolShape(VALUE_BYTES, DRIVE_BYTES), folder)
    try:
        site.start()
        contents = Contents(VALUE_BYTES)
        for number in range(VALUES):
            if not site.volume.put(key_number(number), contents.value(number)):
                raise G35Error("the agent refused a put into a volume that is nearly empty")
        calling, watched = _watched(site.mount)
    finally:
        site.stop()
    by_others = [held_up for found in watched for held_up in found["late"]]
    taken = TakenTime(by_others)
    own = sorted(taken.own_part(tick) for tick in calling["late"])
    whole = sorted(tick[1] for tick in calling["late"])
    aside = sorted(tick[1] for tick in by_others)
    details = {
        **{name: calling[name] for name in ("ticks", "calls", "before_others")},
        "p99_ms": _p99(own, calling["ticks"]),
        "over_1_ms": sum(one > LATE_MS for one in own),
        "value_bytes": VALUE_BYTES,
        "with_the_machine_ms": _latest(whole),
        "with_the_machine_p99_ms": _p99(whole, calling["ticks"]),
        "with_the_machine_over_1_ms": sum(one > LATE_MS for one in whole),
        "watching_ticks": sum(found["ticks"] for found in watched),
        "watching_ms": _latest(aside),
        "watching_over_1_ms": sum(one > LATE_MS for one in aside),
    }
    return {"shim_loop_block_ms": Counted(_latest(own), details)}


class TakenTime:
    """When a processor ran something else than what wanted to run there: each moment once, in order."""

    def __init__(self, by_others: Sequence[Late]) -> None:
        self._begins: list[float] = []
        self._ends: list[float] = []
        for begin, end in sorted((due, due + ms / 1e3) for due, ms in by_others):
            if self._ends and begin <= self._ends[-1]:
                self._ends[-1] = max(self._ends[-1], end)
            else:
                self._begins.append(begin)
                self._ends.append(end)

    def own_part(self, tick: Late) -> float:
        """Milliseconds for which a tick was late while the processors ran what wanted to run there."""
        due, own = tick
        seen = due + own / 1e3
        at = bisect.bisect_right(self._ends, due)
        while at < len(self._begins) and self._begins[at] < seen:
            own -= (min(seen, self._ends[at]) - max(due, self._begins[at])) * 1e3
            at += 1
        return max(own, 0.0)


def _latest(late: Sequence[float]) -> float:
    """Of what is sorted; 0 where no tick was late enough to be told of."""
    return round(late[-1], 4) if late else 0.0


def _p99(late: Sequence[float], ticks: int) -> float:
    """What 99 of 100 ticks were late at the most; those that are not in `late` (sorted) were less so."""
    place = ticks * 99 // 100 - (ticks - len(late))
    return round(late[place], 4) if place >= 0 else 0.0


def _watched(mount: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """What was seen by the process that calls, and meanwhile by those that watch its processors."""
    processors = sorted(os.sched_getaffinity(0))[:PROCESSORS_MAX]
    watching = [_started(WATCH, str(processor)) for processor in processors]
    try:
        words = (str(mount), str(VALUE_BYTES), str(MEASURE_SECONDS), ",".join(map(str, processors)))
        calling = _heard(_started(CALLS, *words))
        return calling, [_heard(each) for each in watching]
    finally:
        for each in watching:
            if each.poll() is None:
                each.kill()
                each.communicate()


def _started(*words: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-P", "-m", "agent.bench.loop_client", *words]
    return subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def _heard(process: subprocess.Popen[str]) -> dict[str, Any]:
    try:
        said, words = process.communicate(timeout=PATIENCE)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        raise G35Error("the client with an event loop hangs") from None
    if process.returncode:
        raise G35Error(f"the client with an event loop ended: {' '.join(words.strip().splitlines()[-1:])}")
    found: dict[str, Any] = json.loads(said)
    return found
