"""How long a start takes: `g35 up` to its `ready`, and an agent that was killed to its next hit.

Each time is the least of STARTS: what is beside them on the machine only makes them longer. All of them are
in the record. Code is warm in the page cache, as at a second start.
"""

import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path

from agent.bench.single_probes import Counted
from agent.bench.sites import pool_up
from agent.cli.up.children import RESTART_SECONDS
from agent.errors import G35Error

STARTS = 3
LOOK_SECONDS = 0.002
READY_SECONDS = 300.0
HIT_SECONDS = 60.0
VALUE_BYTES = 64 << 10
DEADLINE_MS = 2000.0
USUAL = ("--enclosures", "2", "--drives", "2", "--drive-size", "256M")
ENCLOSURES_OF_THOUSAND = 4
THOUSAND = 1000
"""Namespaces, of one set each."""


def measure_start(folder: Path) -> dict[str, Counted]:
    """`up_ready_s` and `restart_first_hit_s`, on pools of their own below `folder`."""
    folder.mkdir()
    ready, hits = [], []
    for number in range(STARTS):
        took, hit = _start(folder / str(number), USUAL, restarts=1)
        ready.append(took)
        hits += hit
    return {"up_ready_s": _least(ready), "restart_first_hit_s": _least(hits)}


def measure_many_namespaces(folder: Path) -> dict[str, Counted]:
    """`start_1000_namespaces_s`, on a pool of its own below `folder`."""
    drives = str(THOUSAND // ENCLOSURES_OF_THOUSAND)
    words = ("--enclosures", str(ENCLOSURES_OF_THOUSAND), "--drives", drives, "--drive-size", "8M")
    folder.mkdir()
    _, hits = _start(folder / "many", (*words, "--no-files"), restarts=STARTS)
    counted = _least(hits)
    return {"start_1000_namespaces_s": Counted(counted.value, counted.details | {"namespaces": THOUSAND})}


def _least(seconds: Sequence[float]) -> Counted:
    return Counted(min(seconds), {"all_s": [round(each, 3) for each in seconds]})


def _start(folder: Path, words: Sequence[str], *, restarts: int) -> tuple[float, list[float]]:
    """Seconds of a `g35 up` on new drives in files, and from each kill of its agent to the next hit."""
    options = (*words, "--media", "files", "--restart")
    began = time.monotonic()
    with pool_up(folder, VALUE_BYTES, DEADLINE_MS, *options, seconds=READY_SECONDS) as layout:
        ready = time.monotonic() - began
        value, content = layout.default_mount / "kv/kv/first", os.urandom(VALUE_BYTES)
        value.write_bytes(content)
        hits = []
        for _ in range(restarts):
            # `g35 up` lets a child that dies at once wait for so long.
            time.sleep(2 * RESTART_SECONDS)
            began = time.monotonic()
            os.kill(int(layout.agent_process.read_text()), signal.SIGKILL)
            _wait_hit(value, content, began + HIT_SECONDS)
            hits.append(time.monotonic() - began)
    return ready, hits


def _wait_hit(value: Path, content: bytes, end: float) -> None:
    while time.monotonic() < end:
        try:
            if value.read_bytes() == content:
                return
        except OSError:
            pass  # the mount is dead, or there is none, or the value is a miss still
        time.sleep(LOOK_SECONDS)
    raise G35Error(f"an agent that was killed served no hit within {HIT_SECONDS:g} s", "see its log")
