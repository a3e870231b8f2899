"""An enclosure that stops in the middle of gets: when the agent notices, and how long gets take meanwhile.

One of three enclosures is sent SIGSTOP. Its connections stay up and its peer's kernel takes what is sent, so
nothing but the missing answers says so. A get whose value lies there ends as a miss at its deadline at the
latest; once the enclosure is under suspicion it ends much sooner.
"""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

from agent.bench.fault_site import LOOK_SECONDS, gets_during, pool_up, told
from agent.bench.single_probes import Counted
from agent.cli.up.layout import Layout
from agent.errors import G35Error

ENCLOSURES = 3
WARM_SECONDS = 2.0
STOPPED_SECONDS = 5.0
NOTICE_SECONDS_MAX = 30.0


def measure(folder: Path) -> dict[str, Counted]:
    """`notice_stopped_s` and `get_p99_ms_while_stopped`, on a pool of their own below `folder`."""
    seen: list[tuple[float, float]] = []

    def stop_one() -> None:
        time.sleep(WARM_SECONDS)
        seen.append(_stop_one(layout))

    with pool_up(folder, ENCLOSURES) as layout:
        gets = gets_during(layout, stop_one)
    ((stopped_at, noticed),) = seen
    p99, details = told([get for get in gets if get.began >= stopped_at])
    details["enclosures"] = ENCLOSURES
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
