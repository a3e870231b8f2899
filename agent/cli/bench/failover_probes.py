"""A path that is cut off in the middle of gets: how long gets take while they go over to the other.

Each enclosure is reached at two ports. One port of the first enclosure is closed, with all its connections,
and later opened again, several times; counted are the gets that began while the agent changed over.
"""

from __future__ import annotations

import json
import random
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from agent.cli.bench.contents import Contents, pages
from agent.cli.bench.single_probes import Counted
from agent.cli.bench.sites import IN_FLIGHT, says_ready
from agent.cli.up.children import Child
from agent.cli.up.layout import Layout
from agent.errors import G35Error
from agent.fs.mounting import clear_dead_mount
from host_shim.block_key import key_of
from host_shim.pool import Pool

ENCLOSURES = 2
VALUE_BYTES = 64 << 10
VALUES = 400
DEADLINE_MS = 50.0
SWITCHES = 5
SWITCH_SECONDS = 0.5
"""Gets that begin so soon after a port was closed count."""
BACK_SECONDS_MAX = 30.0
ANSWER_SECONDS = 10.0
LOOK_SECONDS = 0.02


def measure(folder: Path) -> dict[str, Counted]:
    """`failover_get_p99_ms`, on a pool of its own below `folder`."""
    with _pool_up(folder) as layout, Pool(layout.default_mount(), sessions=IN_FLIGHT + 1) as pool:
        volume, contents = pool.volume("kv"), Contents(VALUE_BYTES)
        keys = [key_of(f"failing over {number}") for number in range(VALUES)]
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
            switches = [_switch(layout) for _ in range(SWITCHES)]
        finally:
            stop.set()
            for thread in threads:
                thread.join()
    if wrong:
        raise G35Error(f"{len(wrong)} gets brought wrong bytes")
    times = sorted(
        (seconds, there)
        for each in took
        for began, seconds, there in each
        if any(at <= began < at + SWITCH_SECONDS for at in switches)
    )
    if not times:
        raise G35Error("no get began while a path was cut off")
    details = {
        "deadline_ms": DEADLINE_MS,
        "gets": len(times),
        "misses": sum(not there for _, there in times),
        "longest_ms": round(times[-1][0] * 1e3, 3),
        "switches": SWITCHES,
    }
    return {"failover_get_p99_ms": Counted(times[len(times) * 99 // 100][0] * 1e3, details)}


def _switch(layout: Layout) -> float:
    """Cut the first path off and give it back; when that was, in seconds of `time.monotonic`."""
    _wait_used(layout, "jbof-0")
    control = layout.enclosure(0, "sock")
    at = time.monotonic()
    _set_port(control, up=False)
    time.sleep(SWITCH_SECONDS)
    _set_port(control, up=True)
    return at


def _set_port(control: Path, *, up: bool) -> None:
    """Ask over the enclosure's control socket, for starting a program would take the cores from the gets."""
    with socket.socket(socket.AF_UNIX) as asking:
        asking.settimeout(ANSWER_SECONDS)
        asking.connect(str(control))
        asking.sendall(json.dumps({"verb": "port", "number": 1, "up": up}).encode() + b"\n")
        with asking.makefile("rb") as lines:
            answer = json.loads(lines.readline())
    if not answer["ok"]:
        raise G35Error(f"the enclosure did not change its port: {answer['error']}")


def _wait_used(layout: Layout, name: str) -> None:
    """Until all of the enclosure's namespaces are reached by the path of this name."""
    end = time.monotonic() + BACK_SECONDS_MAX
    status_file = layout.default_mount() / ".g35/status.json"
    while True:
        paths = {each["name"]: each for each in json.loads(status_file.read_text())["enclosures"]}
        if paths[name]["namespaces"] and all(each["connected"] for each in paths.values()):
            return
        if time.monotonic() > end:
            raise G35Error(f"path {name} was not back within {BACK_SECONDS_MAX:.0f} s")
        time.sleep(LOOK_SECONDS)


@contextmanager
def _pool_up(folder: Path) -> Iterator[Layout]:
    folder.mkdir()
    layout, log = Layout(folder / "up"), folder / "pool.log"
    command = [
        sys.executable, "-P", "-m", "agent.cli", "up", "--state", str(layout.state),
        "--enclosures", str(ENCLOSURES), "--drives", "1", "--drive-size", "128M", "--media", "memory",
        "--transport", "tcp", "--ports", "2", "--no-files", "--value-size", str(VALUE_BYTES), "--no-restart",
        "--read-deadline-ms", str(DEADLINE_MS),
    ]  # fmt: skip
    child = Child("the pool", command, log, lambda: says_ready(log), folder / "pool.pid")
    with ExitStack() as undo:
        undo.callback(clear_dead_mount, layout.default_mount())
        undo.callback(child.stop)
        child.start()
        child.wait_ready(seconds=120.0)
        yield layout
