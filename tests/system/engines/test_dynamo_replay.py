"""The real trace through Dynamo's replay: its prefix cache finds as much as our caches of the same room."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from agent.claims.hit_curve import Cache, PoolCache, PrefixLru, Unbounded
from agent.claims.trace import Trace, read_trace
from agent.inline.secrets import SecretKey
from agent.replay.trace_lines import BLOCK_TOKENS
from agent.sim.pod_plan import PodPlan
from agent.sim.pod_run import PodRun
from agent.sim.workload import Request, trace_requests
from tests.support.engines.engine_environments import run_in_engine

STEPS = Path(__file__).with_name("dynamo_steps.py")
REQUESTS = 3000
SMALL, LARGE, ENDLESS = 8192, 32_768, 1_000_000
WITHIN = 0.02
SECRET = SecretKey(bytes(range(32)))


def _found_tokens(trace: Trace, cache: Cache) -> float:
    """The share of all prompts' tokens that a cache has when they are asked for."""
    found = asked = 0
    for request in range(trace.requests):
        blocks = trace.blocks[trace.starts[request] : trace.starts[request + 1]]
        found += trace.tokens_of(request, cache.play(request, blocks))
        asked += trace.tokens_of(request, len(blocks))
    return found / asked


def _simulated(file: Path, blocks: int) -> float:
    """The same of a simulated pool with room for so many blocks, asked by one host without memory."""
    value = 64 << 10
    plan = PodPlan(
        gpus=1, gpus_per_host=1, enclosures=2, drives=2, workers=1, bytes_per_token=value // BLOCK_TOKENS,
        drive_bytes=blocks // 4 // 64 * (4096 + 64 * (4096 + value)), g1_bytes=0, g2_bytes=0,
        read_deadline=5.0,
    )  # fmt: skip

    def one_by_one() -> Iterator[Request]:
        for request in trace_requests(file, REQUESTS, 1.0):
            yield request._replace(at=100.0 * request.number, output_tokens=0)

    row = PodRun("g35", plan, 35, BLOCK_TOKENS, one_by_one()).run()
    return row.cached_tokens / row.input_tokens


def test_the_reuse_of_the_real_trace_is_that_of_dynamos_replay(real_trace: Path, tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    with real_trace.open() as lines:
        file.write_text("".join(itertools.islice(lines, REQUESTS)))
    rooms = [str(room) for room in (SMALL, LARGE, ENDLESS)]
    printed = run_in_engine("dynamo", STEPS, str(file), str(BLOCK_TOKENS), *rooms)
    told = json.loads(printed[printed.index("found") + 5 :])
    assert all(each["completed_requests"] == REQUESTS for each in told.values())
    dynamo = {int(room): each["prefix_cache_reused_ratio"] for room, each in told.items()}
    trace = read_trace(file)
    ours = {
        "lru": {SMALL: PrefixLru(SMALL), LARGE: PrefixLru(LARGE), ENDLESS: Unbounded()},
        "pool": {LARGE: PoolCache(LARGE, trace, SECRET), ENDLESS: PoolCache(1 << 18, trace, SECRET)},
    }
    for name, caches in ours.items():
        for room, cache in caches.items():
            found = _found_tokens(trace, cache)
            print(f"{name}, {room} blocks: {found:.4f}, Dynamo {dynamo[room]:.4f}")
            assert found == pytest.approx(dynamo[room], abs=WITHIN), (name, room)


def test_the_simulated_pool_finds_as_much(real_trace: Path, tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    with real_trace.open() as lines:
        file.write_text("".join(itertools.islice(lines, 1000)))
    printed = run_in_engine("dynamo", STEPS, str(file), str(BLOCK_TOKENS), str(ENDLESS))
    told = json.loads(printed[printed.index("found") + 5 :])[str(ENDLESS)]
    found = _simulated(file, 1 << 16)
    print(f"simulated {found:.4f}, Dynamo {told['prefix_cache_reused_ratio']:.4f}")
    assert found == pytest.approx(told["prefix_cache_reused_ratio"], abs=WITHIN)
