"""An enclosure that stops in the middle of gets: when the agent notices, and how long gets take meanwhile.

One of three enclosures is sent SIGSTOP. Its connections stay up and its peer's kernel takes what is sent, so
nothing but the missing answers says so. A get whose value lies there ends as a miss at its deadline at the
latest; once the enclosure is under suspicion it ends much sooner.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from agent.cli.bench.contents import Contents, pages
from agent.cli.bench.single_probes import Counted
from agent.cli.bench.sites import IN_FLIGHT, says_ready
from agent.cli.up.children import Child
from agent.cli.up.layout import Layout
from agent.errors import G35Error
from agent.fs.mounting import clear_dead_mount
from host_shim.block_key import key_of
from host_shim.pool import Pool

ENCLOSURES = 3
VALUE_BYTES = 64 << 10
VALUES = 600
DEADLINE_MS = 50.0
WARM_SECONDS = 2.0
STOPPED_SECONDS = 5.0
NOTICE_SECONDS_MAX = 30.0
LOOK_SECONDS = 0.02


def measure(folder: Path) -> dict[str, Counted]:
    """`notice_stopped_s` and `get_p99_ms_while_stopped`, on a pool of their own below `folder`."""
    with _pool_up(folder) as layout, Pool(layout.default_mount(), sessions=IN_FLIGHT + 1) as pool:
        volume, contents = pool.volume("kv"), Contents(VALUE_BYTES)
        keys = [key_of(f"stopped {number}") for number in range(VALUES)]
        for number, key in enumerate(keys):
            if not volume.put(key, contents.value(number)):
                raise G35Error("the agent refused a put into a volume that is nearly empty")
        stop = threading.Event()
        took: list[list[tuple[float, float, bool]]] = [[] for _ in range(IN_FLIGHT)]
        wrong: list[int] = []

        def get(at: int) -> None:
            dice, buffer = random.Random(at), pages(VALUE_BYTES)
            while not stop.is_set():
                number = dice.randrange(VALUES)
                began = time.monotonic()
                there = volume.get_into(keys[number], buffer) == VALUE_BYTES
                took[at].append((began, time.monotonic() - began, there))
                if there and buffer != contents.value(number):
                    wrong.append(number)

        threads = [threading.Thread(target=get, args=(at,), name=f"get-{at}") for at in range(IN_FLIGHT)]
        for thread in threads:
            thread.start()
        try:
            time.sleep(WARM_SECONDS)
            stopped_at, noticed = _stop_one(layout)
        finally:
            stop.set()
            for thread in threads:
                thread.join()
    if wrong:
        raise G35Error(f"{len(wrong)} gets brought wrong bytes")
    times = sorted((seconds, there) for each in took for began, seconds, there in each if began >= stopped_at)
    p99 = times[len(times) * 99 // 100][0] * 1e3
    details = {
        "deadline_ms": DEADLINE_MS,
        "gets": len(times),
        "misses": sum(not there for _, there in times),
        "longest_ms": round(times[-1][0] * 1e3, 3),
        "enclosures": ENCLOSURES,
    }
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
    status: dict[str, Any] = json.loads((layout.default_mount() / ".g35/status.json").read_text())
    first = status["enclosures"][0]
    return bool(first["namespaces_suspect"]) or not first["connected"]


@contextmanager
def _pool_up(folder: Path) -> Iterator[Layout]:
    folder.mkdir()
    layout, log = Layout(folder / "up"), folder / "pool.log"
    command = [
        sys.executable, "-P", "-m", "agent.cli", "up", "--state", str(layout.state),
        "--enclosures", str(ENCLOSURES), "--drives", "1", "--drive-size", "128M", "--media", "memory",
        "--transport", "tcp", "--no-files", "--value-size", str(VALUE_BYTES), "--no-restart",
        "--read-deadline-ms", str(DEADLINE_MS),
    ]  # fmt: skip
    child = Child("the pool", command, log, lambda: says_ready(log), folder / "pool.pid")
    with ExitStack() as undo:
        undo.callback(clear_dead_mount, layout.default_mount())
        undo.callback(child.stop)
        child.start()
        child.wait_ready(seconds=120.0)
        yield layout
