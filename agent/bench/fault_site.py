"""A pool of a few enclosures, and gets from it all the while something is done to it.

What `stopped_probes.py` and `failover_probes.py` stand on: both break a part in the middle of gets, and say
how long those took which began meanwhile.
"""

from __future__ import annotations

import random
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agent.bench.contents import Contents, pages
from agent.bench.sites import IN_FLIGHT, says_ready
from agent.cli.up.children import Child
from agent.cli.up.layout import Layout
from agent.errors import G35Error
from agent.fs.doors.mounting import clear_dead_mount
from host_shim.block_key import key_of
from host_shim.pool import Pool

VALUE_BYTES = 64 << 10
VALUES = 600
DEADLINE_MS = 50.0
LOOK_SECONDS = 0.02


@dataclass(frozen=True, slots=True)
class Get:
    """When a get began, by `time.monotonic`, the seconds that it took, and whether it was a hit."""

    began: float
    seconds: float
    hit: bool


@contextmanager
def pool_up(folder: Path, enclosures: int, *words: str) -> Iterator[Layout]:
    """`g35 up` with drives in memory over TCP, in a folder that is made; `words` are further options."""
    folder.mkdir()
    layout, log = Layout(folder / "up"), folder / "pool.log"
    command = [
        sys.executable, "-P", "-m", "agent.cli", "up", "--state", str(layout.state),
        "--enclosures", str(enclosures), "--drives", "1", "--drive-size", "128M", "--media", "memory",
        "--transport", "tcp", "--no-files", "--value-size", str(VALUE_BYTES), "--no-restart",
        "--read-deadline-ms", str(DEADLINE_MS), *words,
    ]  # fmt: skip
    child = Child("the pool", command, log, lambda: says_ready(log), folder / "pool.pid")
    with ExitStack() as undo:
        undo.callback(clear_dead_mount, layout.default_mount())
        undo.callback(child.stop)
        child.start()
        child.wait_ready(seconds=120.0)
        yield layout


def gets_during(layout: Layout, what: Callable[[], None]) -> list[Get]:
    """Store VALUES values and get them at random from IN_FLIGHT threads until `what` returns: all gets.

    Every value that came is compared; raises G35Error for a wrong byte.
    """
    contents = Contents(VALUE_BYTES)
    keys = [key_of(f"value {number}") for number in range(VALUES)]
    took: list[list[Get]] = [[] for _ in range(IN_FLIGHT)]
    wrong: list[int] = []
    stop = threading.Event()
    with Pool(layout.default_mount(), sessions=IN_FLIGHT + 1) as pool:
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


def told(gets: list[Get]) -> tuple[float, dict[str, Any]]:
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
