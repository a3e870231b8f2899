"""The simulation against the real path: a pool on this machine finds as much of a trace as `g35 sim` says,
and is as fast as it says."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from agent.replay.trace_lines import BLOCK_TOKENS
from agent.sim.pod_plan import PodPlan
from agent.sim.pod_run import PodRun
from agent.sim.workload import Request, trace_requests
from tests.support.leaks import mounts_below, unmount_below
from tests.support.needs import needs_mount
from tests.support.processes import Processes
from tests.support.sim.throttled_pool import DRIVES_LIMIT, LINKS_LIMIT, Rates, measured, predicted

TRACE = Path("agent/replay/sample_trace.jsonl")
REQUESTS = 300
VALUE_BYTES, TOKEN_BYTES = 64 << 10, 128
ENCLOSURES, DRIVES = 2, 2
WITHIN = 0.005
THROUGHPUT_WITHIN = 0.15

pytestmark = [
    needs_mount,
    pytest.mark.timeout(240),
]


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[Path]:
    """A pool of two enclosures that is too small for the trace."""
    processes = Processes(tmp_path)
    try:
        up = processes.g35(
            "up", "--state", tmp_path / "state", "--media", "memory", "--enclosures", str(ENCLOSURES),
            "--drives", str(DRIVES), "--drive-size", "16M", "--value-size", "64K", "--no-files",
            "--read-deadline-ms", "5000",
        )  # fmt: skip
        up.wait_for_line("ready", 60)
        yield tmp_path / "state" / "mnt"
        assert up.stop(60) == 0
        assert mounts_below(tmp_path) == []
    finally:
        processes.end_all()
        unmount_below(tmp_path)


def _simulated(repository: Path, slots: int) -> tuple[int, int]:
    """Blocks that the simulated pool of so many slots finds, of how many."""
    sets = slots // 64 // (ENCLOSURES * DRIVES)
    plan = PodPlan(
        gpus=1, gpus_per_host=1, enclosures=ENCLOSURES, drives=DRIVES, workers=1, bytes_per_token=TOKEN_BYTES,
        drive_bytes=sets * (4096 + 64 * (4096 + VALUE_BYTES)), g1_bytes=0, g2_bytes=0, gate=False,
        read_deadline=5.0,
    )  # fmt: skip

    def one_by_one() -> Iterator[Request]:
        for request in trace_requests(repository / TRACE, REQUESTS, 1.0):
            yield request._replace(at=10.0 * request.number, output_tokens=0)

    row = PodRun("g35", plan, 35, BLOCK_TOKENS, one_by_one()).run()
    return row.blocks_loaded, row.blocks


def test_the_hit_ratio_is_that_of_a_real_pool(mount: Path, repository: Path, tmp_path: Path) -> None:
    processes = Processes(tmp_path)
    replay = processes.g35(
        "replay", repository / TRACE, "--mount", mount, "--requests", str(REQUESTS), "--concurrency", "1",
        "--bytes-per-token", str(TOKEN_BYTES), "--no-prestage", "--json",
    )  # fmt: skip
    assert replay.process.wait(200) == 0
    output = replay.output
    record = json.loads(output[output.index("{") : output.rindex("}") + 1])
    status = json.loads((mount / ".g35/status.json").read_text())
    kv = next(volume for volume in status["volumes"] if volume["name"] == "kv")
    assert kv["evictions"] > 0
    hits, blocks = _simulated(repository, kv["slots"])
    print(f"real {record['hit_ratio']:.4f}, simulated {hits / blocks:.4f}", file=sys.stderr)
    assert record["blocks"] == blocks
    assert hits / blocks == pytest.approx(record["hit_ratio"], abs=WITHIN)


@pytest.mark.nightly  # what else runs on the machine slows the real pool
@pytest.mark.parametrize("rates", [DRIVES_LIMIT, LINKS_LIMIT], ids=["drives", "links"])
def test_throughput_is_that_of_a_real_pool_of_the_same_rates(
    repository: Path, tmp_path: Path, processes: Processes, rates: Rates
) -> None:
    real, slots = measured(processes, tmp_path, repository, rates)
    told = predicted(repository, rates, slots)
    print(f"real {real}, simulated {told}", file=sys.stderr)
    assert told.hit_ratio == pytest.approx(real.hit_ratio, abs=WITHIN)
    assert told.throughput == pytest.approx(real.throughput, rel=THROUGHPUT_WITHIN)
    assert mounts_below(tmp_path) == []
