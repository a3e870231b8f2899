"""How long an asyncio event loop is held up that calls host_shim: it is to be under a millisecond.

Two processes do the same in turn: one makes calls from its loop as host_shim/pool.py says, with a ticker in
that loop; then one has the ticker alone while another makes the calls. What the second is held up is the
machine's doing, not host_shim's.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from agent.cli.bench.contents import Contents
from agent.cli.bench.loop_client import CALLS, TICKER, VALUES, key_number
from agent.cli.bench.single_probes import Counted
from agent.cli.bench.sites import PoolShape, PoolSite
from agent.errors import G35Error

VALUE_BYTES = 1 << 20
DRIVE_BYTES = 288 << 20
"""Room for 256 values, of which 20 are stored."""
SECONDS = 4.0
PATIENCE = 60.0


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
        calling = _heard(_started(site.mount, CALLS))
        beside = _started(site.mount, CALLS)
        alone = _heard(_started(site.mount, TICKER))
        _heard(beside)
    finally:
        site.stop()
    details = {
        **{name: calling[name] for name in ("p99_ms", "over_1_ms", "ticks", "calls", "before_others")},
        "value_bytes": VALUE_BYTES,
        "without_calls_ms": alone["longest_ms"],
        "without_calls_p99_ms": alone["p99_ms"],
        "without_calls_over_1_ms": alone["over_1_ms"],
    }
    return {"shim_loop_block_ms": Counted(calling["longest_ms"], details)}


def _started(mount: Path, what: str) -> subprocess.Popen[str]:
    command = [
        sys.executable, "-P", "-m", "agent.cli.bench.loop_client",
        what, str(mount), str(VALUE_BYTES), str(SECONDS),
    ]  # fmt: skip
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


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
