"""LMCache's own code on the pool, run by LMCache's interpreter: `lmcache_steps.py STATE`."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import os
import select
import sys
from typing import Any

import torch
from engine_pool import EnginePool
from lmcache.v1.distributed.api import ObjectKey
from lmcache.v1.distributed.l2_adapters import create_l2_adapter
from lmcache.v1.distributed.l2_adapters.config import parse_args_to_l2_adapters_config
from lmcache.v1.memory_management import MemoryFormat, MemoryObjMetadata, TensorMemoryObj
from lmcache.v1.platform import consume_fd

from tests.support.waiting import wait_until

BLOCKS, FLOATS = 12, 60_000
BLOCK_KB = 256


def adapter_json(pool: EnginePool) -> str:
    return json.dumps(
        {
            "type": "plugin",
            "module_path": "host_shim.lmcache_l2",
            "class_name": "G35L2Adapter",
            "adapter_params": {"mount": str(pool.mount), "volume": "kv"},
        }
    )


def run_main(main: Any, *arguments: str) -> str:
    """What a command-line program of LMCache prints."""
    printed = io.StringIO()
    old, sys.argv = sys.argv, ["lmcache", *arguments]
    try:
        with contextlib.redirect_stdout(printed):
            outcome = main()
            if asyncio.iscoroutine(outcome):
                asyncio.run(outcome)
    except SystemExit as ended:
        if ended.code:
            raise AssertionError(printed.getvalue()) from None
    finally:
        sys.argv = old
    return printed.getvalue()


def check_adapter(spec: str) -> None:
    from lmcache.v1 import basic_check

    printed = run_main(
        basic_check.main, "--mode", "test_l2_adapter", "--obj-size", "65536", "--l2-adapter", spec
    )
    for operation in ("LOOKUP (absent)", "STORE", "LOOKUP (exist)", "LOAD"):
        (row,) = [line for line in printed.splitlines() if line.startswith(f"| {operation} ")]
        assert "100.0%" in row, printed
    assert "Validation (content): 5/5" in printed, printed
    assert "FAIL" not in printed, printed


def bench(spec: str) -> None:
    from lmcache.cli.main import main

    options = ("--data-size-kb", str(BLOCK_KB), "--num-keys", "4", "--in-flight", "4", "--rounds", "2")
    found = run_main(
        lambda: main(
            ["bench", "l2", "--l2-adapter", spec, *options, "--no-skip-verify", "--lookup-max-hit-rate", "1"]
        )
    )
    assert "All 16 keys data verified OK" in found, found
    assert found.count("success_keys=16/16") == 3, found
    assert found.count("loaded=16/16") == 3, found


class Adapter:
    """The adapter as LMCache's loader makes it, and what its controllers do with it."""

    def __init__(self, pool: EnginePool) -> None:
        class Arguments:
            l2_adapter = [adapter_json(pool)]  # noqa: RUF012

        (config,) = parse_args_to_l2_adapters_config(Arguments()).adapters
        self.adapter = create_l2_adapter(config, l1_memory_desc=None)
        self.adapter.set_backend_identity("plugin")
        self.keys = [ObjectKey(bytes([at]) * 32, "org/model", 0, cache_salt="tenant") for at in range(BLOCKS)]
        self.values = [torch.full((FLOATS,), float(at + 1)) for at in range(BLOCKS)]

    def store(self) -> bool:
        task = self.adapter.submit_store_task(self.keys, [memory(each) for each in self.values])
        done: dict[int, Any] = {}
        while task not in done:
            wait_event(self.adapter.get_store_event_fd())
            done |= self.adapter.pop_completed_store_tasks()
        return bool(done[task].is_successful())

    def look_up(self) -> list[bool]:
        task = self.adapter.submit_lookup_and_lock_task(self.keys, {})
        wait_event(self.adapter.get_lookup_and_lock_event_fd())
        bitmap = self.adapter.query_lookup_and_lock_result(task)
        assert self.adapter.query_lookup_and_lock_result(task) is None  # answers once
        return [bitmap.test(at) for at in range(BLOCKS)]

    def load(self) -> list[bool | None]:
        """For each block: right, None for a miss, False for a wrong one."""
        rooms = [torch.full((FLOATS,), -1.0) for _ in range(BLOCKS)]
        task = self.adapter.submit_load_task(self.keys, [memory(each) for each in rooms])
        wait_event(self.adapter.get_load_event_fd())
        bitmap = self.adapter.query_load_result(task)
        return [torch.equal(rooms[at], self.values[at]) if bitmap.test(at) else None for at in range(BLOCKS)]

    def all_there(self) -> bool:
        return self.load() == [True] * BLOCKS

    def survives(self, pool: EnginePool) -> None:
        def look() -> list[bool | None]:
            self.look_up()
            self.store()
            return self.load()

        assert self.look_up() == [False] * BLOCKS
        assert self.store()
        assert self.look_up() == [True] * BLOCKS
        assert self.all_there()
        pool.survives(look, lambda: self.store() and self.all_there())
        assert self.adapter.report_status()["is_healthy"]
        self.adapter.delete(self.keys[:3])
        wait_until(lambda: self.look_up() == [False] * 3 + [True] * (BLOCKS - 3), 10, "keys to be deleted")
        self.adapter.close()


def memory(tensor: Any) -> Any:
    metadata = MemoryObjMetadata(
        shape=tensor.shape,
        dtype=tensor.dtype,
        address=tensor.data_ptr(),
        phy_size=tensor.numel() * tensor.element_size(),
        fmt=MemoryFormat.KV_2LTD,
        ref_count=1,
    )
    return TensorMemoryObj(tensor, metadata, parent_allocator=None)


def wait_event(event: int) -> None:
    waiting = select.poll()
    waiting.register(event, select.POLLIN)
    assert waiting.poll(30_000), "no task ended within 30 s"
    consume_fd(event)


def in_process(pool: EnginePool) -> None:
    """The storage plug-in under LMCache's storage manager: put, get, a shorter last chunk, remove."""
    file = pool.state / "lmcache.yaml"
    file.write_text(
        "chunk_size: 256\nlocal_cpu: true\nmax_local_cpu_size: 0.1\nstorage_plugins: [g35]\n"
        "extra_config:\n  storage_plugin.g35.module_path: host_shim.lmcache_storage\n"
        "  storage_plugin.g35.class_name: G35StorageBackend\n"
        f"  g35.mount: {pool.mount}\n  g35.volume: kv\n"
    )
    os.environ["LMCACHE_CONFIG_FILE"] = str(file)
    from lmcache.v1.check.utils import create_storage_manager_with_config, create_test_key

    manager = create_storage_manager_with_config("org/model")
    backend = manager.storage_backends["g35"]
    keys = [create_test_key("org/model", f"chunk {at}") for at in range(4)]
    shapes, dtypes = manager.metadata.get_shapes(), manager.metadata.get_dtypes()
    tokens = shapes[0][2]
    last = torch.Size([*shapes[0][:2], tokens // 2, *shapes[0][3:]])
    chunks = [manager.allocate(shapes[0] if at < 3 else last, dtypes[0]) for at in range(4)]
    for at, each in enumerate(chunks):
        each.tensor.fill_(float(at + 1))
    assert backend.batched_contains(keys) == 0
    backend.batched_submit_put_task(keys, chunks)
    wait_until(lambda: not any(map(backend.exists_in_put_tasks, keys)), 20, "the chunks to be stored")
    absent = create_test_key("org/model", "absent")
    assert backend.batched_contains([*keys[:2], absent, keys[3]]) == 2
    for at, chunk in enumerate(manager.batched_get(keys, location="g35")):
        assert chunk.tensor.shape == (shapes[0] if at < 3 else last)
        assert torch.equal(chunk.tensor, chunks[at].tensor)
    found = asyncio.run(backend.batched_get_non_blocking("lookup", [keys[0], absent, keys[1]]))
    assert len(found) == 1
    assert torch.equal(found[0].tensor, chunks[0].tensor)
    assert asyncio.run(backend.batched_async_contains("lookup", [keys[0], keys[1], absent])) == 2
    assert backend.remove(keys[0])
    assert not backend.contains(keys[0])
    old = pool.kill(("agent-process",))
    assert backend.get_blocking(keys[1]) is None
    backend.batched_submit_put_task([absent], [chunks[0]])
    pool.wait_back(old)
    wait_until(lambda: backend.contains(keys[1]), 20, "the agent to be found again")
    assert torch.equal(backend.get_blocking(keys[1]).tensor, chunks[1].tensor)
    manager.close()


def groups_of_layers(pool: EnginePool) -> None:
    """The storage plug-in with layers of two shapes, which LMCache groups after it has made the plug-in."""
    from lmcache.utils import EngineType
    from lmcache.v1.check.utils import create_storage_manager_with_config, create_test_key
    from lmcache.v1.gpu_connector.utils import normalize_and_discover_per_layer_formats
    from lmcache.v1.kv_layer_groups import KVLayerGroupsManager

    manager = create_storage_manager_with_config("org/hybrid")
    backend, metadata = manager.storage_backends["g35"], manager.metadata
    layers = [torch.zeros(2, 8, 2, 16, 8 if at % 3 else 4, dtype=torch.float16) for at in range(6)]
    caches, formats = normalize_and_discover_per_layer_formats(layers, [], EngineType.VLLM, {})
    metadata.kv_layer_groups_manager = KVLayerGroupsManager(caches, engine_kv_formats=formats)
    assert metadata.get_num_groups() == 2
    tokens = (metadata.chunk_size, metadata.chunk_size // 4)
    keys = [create_test_key("org/hybrid", f"chunk {at}") for at in range(2)]
    chunks = [manager.allocate(metadata.get_shapes(count), metadata.get_dtypes()) for count in tokens]
    for at, chunk in enumerate(chunks):
        for group in range(2):
            chunk.get_tensor(group).copy_(torch.randn(metadata.get_shapes(tokens[at])[group]))
    backend.batched_submit_put_task(keys, chunks)
    wait_until(lambda: not any(map(backend.exists_in_put_tasks, keys)), 20, "the chunks to be stored")
    assert backend.batched_contains(keys) == 2
    for loaded in (manager.batched_get(keys, location="g35"), [backend.get_blocking(key) for key in keys]):
        for at, chunk in enumerate(loaded):
            assert chunk.get_shapes() == metadata.get_shapes(tokens[at])
            assert chunk.get_num_tokens() == tokens[at]
            for group in range(2):
                assert torch.equal(chunk.get_tensor(group), chunks[at].get_tensor(group))
    manager.close()


def main() -> None:
    pool = EnginePool(sys.argv[1])
    check_adapter(adapter_json(pool))
    bench(adapter_json(pool))
    for folder in pool.folders():
        check_adapter(json.dumps({"type": "fs", "base_path": str(folder / "lmcache")}))
    Adapter(pool).survives(pool)
    in_process(pool)
    groups_of_layers(pool)
    print("all steps done")


main()
