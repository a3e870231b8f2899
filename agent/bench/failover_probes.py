"""A path that is cut off in the middle of gets: how long gets take while they go over to the other.

Each enclosure is reached at two ports. One port of the first enclosure is closed, with all its connections,
and later opened again, several times; counted are the gets that began while the agent changed over.
"""

from __future__ import annotations

import json
import socket
import time
from pathlib import Path

from agent.bench.fault_site import LOOK_SECONDS, gets_during, pool_up, told
from agent.bench.single_probes import Counted
from agent.cli.up.layout import Layout
from agent.errors import G35Error

ENCLOSURES = 2
SWITCHES = 5
SWITCH_SECONDS = 0.5
"""Gets that begin so soon after a port was closed count."""
BACK_SECONDS_MAX = 30.0
ANSWER_SECONDS = 10.0


def measure(folder: Path) -> dict[str, Counted]:
    """`failover_get_p99_ms`, on a pool of its own below `folder`."""
    switches: list[float] = []

    def switch_often() -> None:
        switches.extend(_switch(layout) for _ in range(SWITCHES))

    with pool_up(folder, ENCLOSURES, "--ports", "2") as layout:
        gets = gets_during(layout, switch_often)
    p99, details = told([get for get in gets if any(0 <= get.began - at < SWITCH_SECONDS for at in switches)])
    return {"failover_get_p99_ms": Counted(p99, details | {"switches": SWITCHES})}


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
