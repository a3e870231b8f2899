"""SGLang's own loader and fault hooks on the pool, run by SGLang's interpreter: `sglang_steps.py STATE`."""

from __future__ import annotations

import os
import sys
from typing import Any

import torch
from engine_pool import EnginePool
from sglang.srt.mem_cache.hicache_storage import (
    HiCacheFile,
    HiCacheStorageConfig,
    HiCacheStorageFailureInjector,
    PoolHitPolicy,
    PoolName,
    PoolTransfer,
)
from sglang.srt.mem_cache.storage.backend_factory import StorageBackendFactory

PAGES, PAGE_TOKENS, LAYERS, WIDTH = 24, 16, 4, 128
ROUNDS = 40


class HostPool:
    """Stands for MHATokenToKVPoolHost, which does not import without CUDA: its layout and page buffers.

    page_first: (2, tokens, layers, width), two buffers a page; layer_first: (2, layers, tokens, width), two
    for each layer of a page. See sglang/srt/mem_cache/pool_host/mha.py, get_page_buffer_meta.
    """

    def __init__(self, layout: str, pages: int = PAGES) -> None:
        self.layout, self.page_size, self.dtype = layout, PAGE_TOKENS, torch.float16
        tokens = pages * PAGE_TOKENS
        inner = (tokens, LAYERS) if layout == "page_first" else (LAYERS, tokens)
        self.kv_buffer = torch.zeros((2, *inner, WIDTH), dtype=self.dtype)

    def page(self, at: int) -> torch.Tensor:
        tokens = slice(at * PAGE_TOKENS, (at + 1) * PAGE_TOKENS)
        return self.kv_buffer[:, tokens] if self.layout == "page_first" else self.kv_buffer[:, :, tokens]

    def get_page_buffer_meta(self, indices: torch.Tensor) -> tuple[list[int], list[int]]:
        addresses = []
        sizes = []
        for first in indices.tolist()[:: self.page_size]:
            page = self.page(first // self.page_size)
            parts = [page[0], page[1]]
            if self.layout == "layer_first":
                parts = [page[kv][layer] for layer in range(LAYERS) for kv in range(2)]
            for part in parts:
                assert part.is_contiguous()
                addresses.append(part.data_ptr())
                sizes.append(part.numel() * part.element_size())
        return addresses, sizes


def config(pool: EnginePool, **changes: Any) -> HiCacheStorageConfig:
    extra = {
        "backend_name": "g35",
        "module_path": "host_shim.sglang_hicache",
        "class_name": "G35HiCache",
        "interface_v1": 1,
        "g35": {"mount": str(pool.mount), "volume": "kv"},
    }
    fields: dict[str, Any] = dict(
        tp_rank=0, tp_size=1, pp_rank=0, pp_size=1, attn_cp_rank=0, attn_cp_size=1, is_mla_model=False,
        enable_storage_metrics=False, is_page_first_layout=True, model_name="org/model", extra_config=extra,
    )  # fmt: skip
    return HiCacheStorageConfig(**(fields | changes))


def backend(pool: EnginePool, host: HostPool, **changes: Any) -> Any:
    """As HiCacheController makes it."""
    made = StorageBackendFactory.create_backend("dynamic", config(pool, **changes), host)
    made.register_mem_pool_host(host)
    made.on_host_pools_registered()
    return made


def indices(first: int, count: int) -> torch.Tensor:
    return torch.arange(first * PAGE_TOKENS, (first + count) * PAGE_TOKENS)


def hashes(prefix: str, count: int = PAGES) -> list[str]:
    return [f"{prefix}{at:03d}".encode().hex().ljust(64, "0") for at in range(count)]


def fill(host: HostPool, prefix: str) -> None:
    torch.manual_seed(sum(prefix.encode()))
    host.kv_buffer.copy_(torch.randn(host.kv_buffer.shape, dtype=torch.float32))


def zero_copy(pool: EnginePool) -> None:
    for layout in ("page_first", "layer_first"):
        source, target = HostPool(layout), HostPool(layout)
        fill(source, layout)
        keys = hashes("k")
        writer, reader = backend(pool, source), backend(pool, target)
        assert writer.batch_exists(keys) == 0
        assert writer.batch_set_v1(keys[:10], indices(0, 10)) == [True] * 10
        assert writer.batch_set_v1(keys[12:], indices(12, PAGES - 12)) == [True] * (PAGES - 12)
        assert reader.batch_exists(keys) == 10
        assert reader.exists(keys[12])
        assert not reader.exists(keys[11])
        there = [at not in (10, 11) for at in range(PAGES)]
        assert reader.batch_get_v1(keys, indices(0, PAGES)) == there
        for at in range(PAGES):
            if there[at]:
                assert torch.equal(target.page(at), source.page(at)), f"page {at} of {layout}"
        other_rank = backend(pool, target, tp_rank=1, tp_size=2)
        assert other_rank.batch_exists(keys) == 0
        shared = [backend(pool, source, is_mla_model=True, tp_rank=rank, tp_size=2) for rank in range(2)]
        assert shared[0].batch_set_v1(keys[:1], indices(0, 1)) == [True]
        assert shared[1].batch_exists(keys[:1]) == 1
        for each in (writer, reader, other_rank, *shared):
            each.close()


def tensors(pool: EnginePool) -> None:
    """The older interface, with tensors instead of addresses."""
    made = backend(pool, HostPool("page_first"))
    keys = hashes("t", 3)
    values = [torch.randn(5000) for _ in keys]
    assert made.batch_set(keys[:2], values[:2])
    rooms = [torch.zeros(5000) for _ in keys]
    found = made.batch_get(keys, rooms)
    assert found[2] is None
    assert all(torch.equal(found[at], values[at]) for at in range(2))
    assert made.get(keys[0], torch.zeros(4999)) is None
    assert made.get(keys[0]) is None
    made.close()


def more_pools(pool: EnginePool) -> None:
    """The pools of hybrid models: their pages count for the prefix, by each pool's policy."""
    pages, states = HostPool("page_first"), HostPool("page_first")
    fill(pages, "v2 kv")
    fill(states, "v2 states")
    made = backend(pool, pages)
    made.register_mem_host_pool_v2(pages, PoolName.KV)
    made.register_mem_host_pool_v2(states, PoolName.MAMBA)
    keys = hashes("v2", 6)
    stored = made.batch_set_v2(
        [
            PoolTransfer(PoolName.KV, host_indices=indices(0, 5), keys=keys[:5]),
            PoolTransfer(PoolName.MAMBA, host_indices=indices(2, 1), keys=keys[2:3]),
        ]
    )
    assert stored == {PoolName.KV: [True] * 5, PoolName.MAMBA: [True]}
    asked = PoolTransfer(PoolName.MAMBA, keys=keys[:1], hit_policy=PoolHitPolicy.TRAILING_PAGES)
    found = made.batch_exists_v2(keys, [asked])
    assert found.kv_hit_pages == 3
    assert found.extra_pool_hit_pages == {PoolName.KV: 5, PoolName.MAMBA: 3}
    assert found.restorable_prefix_pages == [3]
    groups = PoolTransfer(
        PoolName.MAMBA, keys=keys[2:5], hit_policy=PoolHitPolicy.BLOCK_GROUPS, block_pages=4, group_pages=1
    )
    found = made.batch_exists_v2(keys, [groups])
    assert found.kv_hit_pages == 5
    assert found.extra_pool_hit_pages == {PoolName.KV: 5, PoolName.MAMBA: 4}
    expected = states.page(2).clone()
    states.kv_buffer.zero_()
    transfer = PoolTransfer(PoolName.MAMBA, host_indices=indices(2, 1), keys=keys[2:3])
    assert made.batch_get_v2([transfer]) == {PoolName.MAMBA: [True]}
    assert torch.equal(states.page(2), expected)
    made.close()


def fault_hooks(pool: EnginePool) -> None:
    """SGLang's random failures and delays: a page that counts as loaded is the right one."""
    os.environ["SGLANG_TEST_HICACHE_BACKEND_RANDOM_DELAY"] = "0.002"
    os.environ["SGLANG_TEST_HICACHE_BACKEND_RANDOM_FAILURE"] = "0.3"
    source, target = HostPool("page_first"), HostPool("page_first")
    fill(source, "hooks")
    writer, reader = backend(pool, source), backend(pool, target)
    assert isinstance(reader, HiCacheStorageFailureInjector)
    keys = hashes("h")
    loaded = failed = 0
    for turn in range(ROUNDS):
        first = turn % (PAGES - 4)
        writer.batch_set_v1(keys[first : first + 4], indices(first, 4))
        target.kv_buffer.fill_(-1)
        run = reader.batch_exists(keys[first : first + 4])
        for at, well in enumerate(reader.batch_get_v1(keys[first : first + run], indices(first, run))):
            failed += not well
            loaded += well
            assert not well or torch.equal(target.page(first + at), source.page(first + at))
    assert loaded
    writer.close()
    reader.close()
    del os.environ["SGLANG_TEST_HICACHE_BACKEND_RANDOM_DELAY"]
    del os.environ["SGLANG_TEST_HICACHE_BACKEND_RANDOM_FAILURE"]


def files(pool: EnginePool) -> None:
    """SGLang's own file back-end, on each face that has files."""
    for folder in pool.folders():
        os.environ["SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR"] = str(folder / "hicache")
        files_in(HiCacheFile(config(pool)))


def files_in(made: Any) -> None:
    keys = hashes("f", 3)
    values = [torch.randn(70_000) for _ in keys]
    assert made.batch_set(keys[:2], values[:2])
    assert made.batch_exists(keys) == 2
    for at in range(2):
        assert torch.equal(made.get(keys[at], torch.zeros(70_000)), values[at])
    assert made.get(keys[2], torch.zeros(70_000)) is None
    assert made.clear()
    assert made.batch_exists(keys) == 0


def deaths(pool: EnginePool) -> None:
    source, target = HostPool("page_first"), HostPool("page_first")
    fill(source, "deaths")
    writer, reader = backend(pool, source), backend(pool, target)
    keys = hashes("d")

    def look() -> list[bool | None]:
        writer.batch_set_v1(keys, indices(0, PAGES))
        reader.batch_exists(keys)
        target.kv_buffer.fill_(-1)
        came = reader.batch_get_v1(keys, indices(0, PAGES))
        return [torch.equal(target.page(at), source.page(at)) if came[at] else None for at in range(PAGES)]

    assert look() == [True] * PAGES
    pool.survives(look, lambda: look() == [True] * PAGES)
    writer.close()
    assert writer.batch_exists(keys) == 0  # detached at run time: a miss, and no exception
    reader.close()


def main() -> None:
    pool = EnginePool(sys.argv[1])
    for step in (zero_copy, tensors, more_pools, fault_hooks, files, deaths):
        step(pool)
    print("all steps done")


main()
