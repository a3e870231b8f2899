"""A block through the connectors of LMCache and SGLang and back, as the engines' own loaders make them.

For host_shim/engine_check.py, in the engine's interpreter; each function imports its engine. The block is
random and has a minute to live. Each says what it did, or raises `CheckFailed`.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import select
from typing import Any

BLOCK_BYTES = 60_000
"""Fits into the smallest slots that a volume can have, 64 KiB."""
TTL_SECONDS = 60
WAIT_SECONDS = 30.0


class CheckFailed(Exception):
    """What is wrong, for a person."""


class _Block:
    """What LMCache's adapters touch of a memory object: its bytes."""

    def __init__(self, data: bytes) -> None:
        self.byte_array = memoryview(bytearray(data))

    def get_size(self) -> int:
        return len(self.byte_array)


def lmcache_block(mount: str, volume: str) -> str:
    """LMCache's plug-in loader makes the L2 adapter; store, look up, load, delete."""
    key = importlib.import_module("lmcache.v1.distributed.api").ObjectKey
    adapters = importlib.import_module("lmcache.v1.distributed.l2_adapters")
    configs = importlib.import_module("lmcache.v1.distributed.l2_adapters.config")
    spec = {
        "type": "plugin",
        "module_path": "host_shim.lmcache_l2",
        "class_name": "G35L2Adapter",
        "adapter_params": {"mount": mount, "volume": volume, "ttl": TTL_SECONDS},
    }
    given = argparse.Namespace(l2_adapter=[json.dumps(spec)])
    (config,) = configs.parse_args_to_l2_adapters_config(given).adapters
    adapter = adapters.create_l2_adapter(config, l1_memory_desc=None)
    try:
        adapter.set_backend_identity("plugin")
        data, room = os.urandom(BLOCK_BYTES), _Block(bytes(BLOCK_BYTES))
        keys = [key(os.urandom(32), "g35-check", 0)]
        task = adapter.submit_store_task(keys, [_Block(data)])
        _wait(adapter.get_store_event_fd())
        _must(adapter.pop_completed_store_tasks()[task].is_successful(), "a block could not be stored")
        task = adapter.submit_lookup_and_lock_task(keys, {})
        _wait(adapter.get_lookup_and_lock_event_fd())
        _must(adapter.query_lookup_and_lock_result(task).test(0), "a block was stored and is not found")
        adapter.submit_unlock(keys)
        task = adapter.submit_load_task(keys, [room])
        _wait(adapter.get_load_event_fd())
        _must(adapter.query_load_result(task).test(0), "a block is found and cannot be loaded")
        _must(room.byte_array == data, "a WRONG block was loaded")
        adapter.delete(keys)
    finally:
        adapter.close()
    return f"LMCache's loader; {BLOCK_BYTES} bytes stored, found and loaded by the L2 adapter"


def sglang_page(mount: str, volume: str) -> str:
    """SGLang's `dynamic` loader makes the HiCache back-end; set, exists, get."""
    torch = importlib.import_module("torch")
    storage = importlib.import_module("sglang.srt.mem_cache.hicache_storage")
    factory = importlib.import_module("sglang.srt.mem_cache.storage.backend_factory").StorageBackendFactory
    extra = {
        "backend_name": "g35",
        "module_path": "host_shim.sglang_hicache",
        "class_name": "G35HiCache",
        "interface_v1": 1,
        "g35": {"mount": mount, "volume": volume, "ttl": TTL_SECONDS},
    }
    config = storage.HiCacheStorageConfig(
        tp_rank=0,
        tp_size=1,
        pp_rank=0,
        pp_size=1,
        attn_cp_rank=0,
        attn_cp_size=1,
        is_mla_model=False,
        enable_storage_metrics=False,
        is_page_first_layout=True,
        model_name="g35-check",
        extra_config=extra,
    )
    backend = factory.create_backend("dynamic", config, None)
    try:
        key = os.urandom(32).hex()
        page = torch.frombuffer(bytearray(os.urandom(BLOCK_BYTES)), dtype=torch.uint8)
        _must(backend.set(key, page), "a page could not be stored")
        _must(backend.batch_exists([key]) == 1, "a page was stored and is not found")
        found = backend.get(key, torch.zeros_like(page))
        _must(found is not None, "a page is found and cannot be loaded")
        _must(torch.equal(found, page), "a WRONG page was loaded")
    finally:
        backend.close()
    return f"SGLang's loader; a page of {BLOCK_BYTES} bytes stored, found and loaded by the back-end"


def _must(well: Any, otherwise: str) -> None:
    if not well:
        raise CheckFailed(otherwise)


def _wait(event: int) -> None:
    waiting = select.poll()
    waiting.register(event, select.POLLIN)
    _must(waiting.poll(int(WAIT_SECONDS * 1e3)), f"no answer within {WAIT_SECONDS:g} s")
    os.eventfd_read(event)
