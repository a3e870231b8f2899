"""A part of a pool that breaks in the middle of gets: how long those take that begin meanwhile.

*stopped*: one of three enclosures is sent SIGSTOP. Its connections stay up, so only missing answers tell. A
get of a value there ends as a miss at its deadline, and much sooner once the enclosure is suspected.
*failover*: each enclosure is reached at two ports. One port of the first is closed with its connections and
opened again, several times. The gets count that begin while the agent changes over.
"""

import json
import os
import random
import signal
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agent.bench.contents import Contents, pages
from agent.bench.own_pool import ask_enclosure
from agent.bench.single_probes import Counted
from agent.bench.sites import IN_FLIGHT, pool_up
from agent.cli.up.layout import Layout
from agent.errors import G35Error
from host_shim.block_key import key_of
from host_shim.pool import Pool

VALUE_BYTES = 64 << 10
VALUES = 600
DEADLINE_MS = 50.0
LOOK_SECONDS = 0.02

STOPPED_OF = 3
"""Enclosures, of which one stops."""
WARM_SECONDS = 2.0
STOPPED_SECONDS = 5.0
NOTICE_SECONDS_MAX = 30.0

FAILOVER_OF = 2
SWITCHES = 5
SWITCH_SECONDS = 0.5
"""Gets that begin so soon after a port was closed count."""
BACK_SECONDS_MAX = 30.0


@dataclass(frozen=True, slots=True)
class Get:
    """When a get began, by `time.monotonic`, the seconds that it took, and whether it was a hit."""

    began: float
    seconds: float
    hit: bool


def small_pool(folder: Path, enclosures: int, *words: str) -> AbstractContextManager[Layout]:
    """A pool of one drive an enclosure, over TCP; `words` are further options."""
    return pool_up(
        folder, VALUE_BYTES, DEADLINE_MS, "--enclosures", str(enclosures),
        "--drives", "1", "--drive-size", "128M", "--transport", "tcp", "--no-files", *words,
    )  # fmt: skip


def gets_during(layout: Layout, what: Callable[[], None]) -> list[Get]:
    """Store VALUES values and get them at random from IN_FLIGHT threads until `what` returns: all gets.

    Every value that came is compared; raises G35Error for a wrong byte.
    """
    contents = Contents(VALUE_BYTES)
    keys = [key_of(f"value {number}") for number in range(VALUES)]
    took: list[list[Get]] = [[] for _ in range(IN_FLIGHT)]
    wrong: list[int] = []
    stop = threading.Event()
    with Pool(layout.default_mount, sessions=IN_FLIGHT + 1) as pool:
        volume = pool.volume("kv")
        for number, key in enumerate(keys):
            if not volume.put(key, contents.value(number)):
                raise G35Error("the agent refused a put into a volume that is nearly empty")

        def get(at: int) -> None:
            dice, buffer = random.Random(at), pages(VALUE_BYTES)
            while not stop.is_set():
                number = dice.randrange(VALUES)
                began = time.monotonic()
                hit = volume.get_into(keys[number], buffer) == VALUE_BYTES
                took[at].append(Get(began, time.monotonic() - began, hit))
                if hit and buffer != contents.value(number):
                    wrong.append(number)

        threads = [threading.Thread(target=get, args=(at,), name=f"get-{at}") for at in range(IN_FLIGHT)]
        for thread in threads:
            thread.start()
        try:
            what()
        finally:
            stop.set()
            for thread in threads:
                thread.join()
    if wrong:
        raise G35Error(f"{len(wrong)} gets brought wrong bytes")
    return [get for each in took for get in each]


def _p99_of(gets: list[Get]) -> tuple[float, dict[str, Any]]:
    """The 99th percentile of their times in ms, and what goes into the record beside it."""
    if not gets:
        raise G35Error("no get began in the time that counts")
    times = sorted(get.seconds * 1e3 for get in gets)
    return times[len(times) * 99 // 100], {
        "deadline_ms": DEADLINE_MS,
        "gets": len(times),
        "misses": sum(not get.hit for get in gets),
        "longest_ms": round(times[-1], 3),
    }


def _paths(layout: Layout) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((layout.default_mount / ".g35/status.json").read_text())[
        "enclosures"
    ]
    return found


def measure_stopped(folder: Path) -> dict[str, Counted]:
    """`notice_stopped_s` and `get_p99_ms_while_stopped`, on a pool of their own below `folder`."""
    seen: list[tuple[float, float]] = []

    def stop_one() -> None:
        time.sleep(WARM_SECONDS)
        seen.append(_stop_one(layout))

    with small_pool(folder, STOPPED_OF) as layout:
        gets = gets_during(layout, stop_one)
    ((stopped_at, noticed),) = seen
    p99, details = _p99_of([get for get in gets if get.began >= stopped_at])
    details["enclosures"] = STOPPED_OF
    return {"notice_stopped_s": Counted(noticed, details), "get_p99_ms_while_stopped": Counted(p99, details)}


def _stop_one(layout: Layout) -> tuple[float, float]:
    """Stop the first enclosure for STOPPED_SECONDS: when that was, and the seconds until it was noticed."""
    pid = int(layout.enclosure(0, "pid").read_text())
    stopped_at = time.monotonic()
    os.kill(pid, signal.SIGSTOP)
    try:
        while not _is_noticed(layout):
            if time.monotonic() > stopped_at + NOTICE_SECONDS_MAX:
                raise G35Error(f"a stopped enclosure was not noticed in {NOTICE_SECONDS_MAX:.0f} s")
            time.sleep(LOOK_SECONDS)
        noticed = time.monotonic() - stopped_at
        time.sleep(max(0.0, STOPPED_SECONDS - noticed))
    finally:
        os.kill(pid, signal.SIGCONT)
    return stopped_at, noticed


def _is_noticed(layout: Layout) -> bool:
    first = _paths(layout)[0]
    return bool(first["namespaces_suspect"]) or not first["connected"]


def measure_failover(folder: Path) -> dict[str, Counted]:
    """`failover_get_p99_ms`, on a pool of its own below `folder`."""
    switches: list[float] = []

    def switch_often() -> None:
        switches.extend(_switch(layout) for _ in range(SWITCHES))

    with small_pool(folder, FAILOVER_OF, "--ports", "2") as layout:
        gets = gets_during(layout, switch_often)
    p99, details = _p99_of(
        [get for get in gets if any(0 <= get.began - at < SWITCH_SECONDS for at in switches)]
    )
    return {"failover_get_p99_ms": Counted(p99, details | {"switches": SWITCHES})}


def _switch(layout: Layout) -> float:
    """Cut the first path off and give it back; when that was, in seconds of `time.monotonic`."""
    _wait_used(layout, "jbof-0")
    control = layout.enclosure(0, "sock")
    at = time.monotonic()
    ask_enclosure(control, "port", number=1, up=False)
    time.sleep(SWITCH_SECONDS)
    ask_enclosure(control, "port", number=1, up=True)
    return at


def _wait_used(layout: Layout, name: str) -> None:
    """Until all of the enclosure's namespaces are reached by the path of this name."""
    end = time.monotonic() + BACK_SECONDS_MAX
    while True:
        paths = {each["name"]: each for each in _paths(layout)}
        if paths[name]["namespaces"] and all(each["connected"] for each in paths.values()):
            return
        if time.monotonic() > end:
            raise G35Error(f"path {name} was not back within {BACK_SECONDS_MAX:.0f} s")
        time.sleep(LOOK_SECONDS)
