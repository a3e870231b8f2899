"""Run by vLLM's interpreter: its own tiering manager on the pool, with our tier and with its fs tier.

What is real is all that vLLM runs in its scheduler: spec, factory, primary tier, tiering manager. What is
missing is a GPU: the blocks' bytes are written into the primary tier by this script, and compared there.
Argument: the state folder of a running pool.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from vllm.v1.kv_offload.base import LookupResult, ReqContext, ScheduleEndContext, make_offload_key
from vllm.v1.kv_offload.config import (
    OffloadingCacheConfig,
    OffloadingConfig,
    OffloadingGroupConfig,
    OffloadingModelConfig,
    OffloadingParallelConfig,
)
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

from host_shim.block_hashes import vllm_block_hashes
from tests.support.halting import halted
from tests.support.waiting import wait_until
from tests.system.engines.engine_pool import EnginePool

BLOCK_BYTES = 128 << 10
BLOCKS = 64
STEP_SECONDS = 0.002
PATIENCE_SECONDS = 20.0
SCHEDULER_SECONDS = 0.25
"""A call of the scheduler takes well under a millisecond; this much on a machine that others keep busy."""


def config(tier: dict[str, Any]) -> OffloadingConfig:
    return OffloadingConfig(
        groups=(OffloadingGroupConfig(tokens_per_block=16, layer_names=("layer.0",), group_id=0),),
        worker_kv_bytes_per_block=BLOCK_BYTES,
        enable_kv_cache_events=False,
        extra_config={"cpu_bytes_to_use": BLOCKS * BLOCK_BYTES, "secondary_tiers": [tier]},
        engine_id=f"g35-test-{os.getpid()}",
        model=OffloadingModelConfig(name="org/model", dtype="float16"),
        cache=OffloadingCacheConfig(tokens_per_hash=16, blocks_per_chunk=1),
        parallel=OffloadingParallelConfig(
            rank=0,
            world_size=1,
            tp_size=1,
            pp_size=1,
            pcp_size=1,
            dcp_size=1,
            data_parallel_index=0,
            data_parallel_size=1,
            data_parallel_rank_local=None,
            is_parallelism_agnostic=True,
        ),
    )


class Scheduler:
    """As much of one as calls the manager: every call under its lock, and timed."""

    def __init__(self, tier: dict[str, Any]) -> None:
        self.spec = TieringOffloadingSpec(config(tier))
        self.manager = self.spec.get_manager()
        self.memory = np.asarray(self.manager.primary_tier.get_kv_memoryview())
        self.requests = 0
        self.longest = 0.0

    def call(self, method: Callable[..., Any], *arguments: Any) -> Any:
        with self.manager.lock:
            begun = time.monotonic()
            result = method(*arguments)
            self.longest = max(self.longest, time.monotonic() - begun)
        return result

    def request(self) -> ReqContext:
        self.requests += 1
        context = ReqContext(req_id=f"request-{self.requests}")
        self.call(self.manager.on_new_request, context)
        return context

    def step(self, context: ReqContext) -> None:
        self.call(self.manager.on_schedule_end, ScheduleEndContext((context.req_id,), ()))
        time.sleep(STEP_SECONDS)

    def settle(self, context: ReqContext) -> bool:
        until = time.monotonic() + PATIENCE_SECONDS
        while self.call(self.manager.has_pending_work):
            if time.monotonic() > until:
                return False
            self.step(context)
        return True

    def store(self, name: str, count: int) -> bool:
        """Whether the blocks were taken, and all jobs that this led to have ended."""
        context, keys = self.request(), keys_of(name, count)
        prepared = self.call(self.manager.prepare_store, keys, context)
        assert prepared is not None, "the primary tier is full"
        for key, chunk in zip(prepared.keys_to_store, prepared.store_spec.chunk_ids, strict=True):
            self.memory[chunk] = content(key)
        self.call(self.manager.complete_store, prepared.keys_to_store, context, True)
        settled = self.settle(context)
        self.call(self.manager.on_request_finished, context)
        return settled

    def load(self, name: str, count: int) -> list[bool | None]:
        """For each block: True right, None a miss, False wrong."""
        context, keys = self.request(), keys_of(name, count)
        until = time.monotonic() + PATIENCE_SECONDS
        while True:
            found = [self.call(self.manager.lookup, key, context) for key in keys]
            if not {LookupResult.RETRY, LookupResult.HIT_PENDING} & set(found):
                break
            assert time.monotonic() < until, f"a request waits for ever: {found}"
            self.step(context)
        seen: list[bool | None] = []
        for key, one in zip(keys, found, strict=True):
            seen.append(None)
            if one is LookupResult.HIT:
                (chunk,) = self.call(self.manager.prepare_load, [key], context).chunk_ids
                seen[-1] = bool(np.array_equal(self.memory[chunk], content(key)))
                self.call(self.manager.complete_load, [key], context)
        assert self.settle(context), "jobs that do not end"
        self.call(self.manager.on_request_finished, context)
        return seen

    def load_from_below(self, name: str, count: int) -> list[bool | None]:
        """`load` with an empty primary tier, as after a weight update."""
        with self.manager.lock:
            self.manager.reset_cache()
            self.manager.on_reset_flushed()
        return self.load(name, count)

    def close(self) -> None:
        del self.memory
        self.manager.shutdown()


def keys_of(name: str, count: int) -> list[Any]:
    tokens = [ord(name[index % len(name)]) + index for index in range(16 * count)]
    return [make_offload_key(each, 0) for each in vllm_block_hashes(tokens, 16)]


def content(key: bytes) -> np.ndarray:
    return np.resize(np.frombuffer(bytes(key), np.int8), BLOCK_BYTES)


def round_trip(tier: dict[str, Any], what: str) -> None:
    """Stored by one engine, loaded by it and by another that was started later."""
    engine = Scheduler(tier)
    assert engine.store(what, 12)
    assert engine.load_from_below(what, 20) == [True] * 12 + [None] * 8
    engine.close()
    other = Scheduler(tier)
    assert other.load(what, 20) == [True] * 12 + [None] * 8
    other.close()
    print(f"{what}: 12 blocks stored, loaded, and loaded by another engine")


def hanging_agent(pool: EnginePool, tier: dict[str, Any]) -> None:
    """An agent that hangs holds threads of the tier, and neither a request nor the scheduler."""
    engine = Scheduler(tier)
    assert engine.store("hang", 8)
    agent = int((pool.state / "agent-process.pid").read_text())
    with halted(agent):
        engine.longest = 0.0
        begun = time.monotonic()
        assert engine.load_from_below("hang", 8) == [None] * 8
        assert engine.store("hung", 8), "a store that does not end"
        seconds = time.monotonic() - begun
        assert seconds < 10, seconds
        assert engine.longest < SCHEDULER_SECONDS, engine.longest
    print(f"hang: misses after {seconds:.2f} s, no call over {1000 * engine.longest:.2f} ms")
    wait_until(lambda: engine.load_from_below("hang", 8) == [True] * 8, 20, "the blocks to be had again")
    engine.close()


def dying_pool(pool: EnginePool, tier: dict[str, Any]) -> None:
    """The agent with its mount and all enclosures die under an engine, which goes on."""
    engine = Scheduler(tier)
    assert engine.store("faults", 8)
    stores = 0

    def look() -> list[bool | None]:
        nonlocal stores
        stores += 1
        assert engine.store(f"more {stores}", 2), "a store that does not end"
        return engine.load_from_below("faults", 8)

    pool.survives(look, lambda: look() == [True] * 8)
    print(f"faults: survived, no call over {1000 * engine.longest:.2f} ms")
    engine.close()


def main() -> None:
    pool = EnginePool(sys.argv[1])
    ours = {
        "type": "G35Tier",
        "module_path": "host_shim.vllm_tier",
        "mount": str(pool.mount),
        "load_deadline": 2.0,
        "store_deadline": 2.0,
    }
    round_trip(dict(ours), "tier")
    for folder in pool.folders():
        round_trip({"type": "fs", "root_dir": str(folder / "vllm"), "n_read_threads": 4}, str(folder))
    hanging_agent(pool, dict(ours))
    dying_pool(pool, dict(ours))
    print("all steps done")


if __name__ == "__main__":
    main()
