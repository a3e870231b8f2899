"""SGLang's HiCacheController with its own host pool on the pool: `sglang_controller_steps.py STATE`.

What is real: the pool of the device (on a CPU), the host's, the controller with its four threads, and its
storage back-ends: ours, and HiCacheFile on /shared. What is missing: a scheduler, and the copy between device
and host, a CUDA kernel; host pages are filled here. SGLang imports torchvision for images. No build of it
goes with this torch, so it is stubbed.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.metadata
import os
import sys
import threading
import types
from typing import Any

from engine_pool import EnginePool

from tests.support.waiting import wait_until

PAGE_TOKENS, LAYERS, HEADS, WIDTH = 16, 3, 4, 32
PAGES = 24
SECONDS = 60.0


class Nothing(type):
    """The metaclass of stubs: a class whose every attribute is the class again."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return cls


class Stubs(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """torchvision, as a package in which every name is a class that does nothing."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name.split(".")[0] == "torchvision":
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: Any) -> types.ModuleType:
        module = types.ModuleType(spec.name)
        module.__dict__["__getattr__"] = self.attribute
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        pass

    @staticmethod
    def attribute(name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Nothing(name, (), {})

    def install(self) -> None:
        """For all imports from now on, with a version that transformers knows."""
        version = importlib.metadata.version
        importlib.metadata.version = lambda name: "0.28.0" if name == "torchvision" else version(name)
        sys.meta_path.insert(0, self)


class Host:
    """A process's memory pools and its controller, as SGLang's radix cache makes them."""

    def __init__(self, backend: str, extra: dict[str, Any]) -> None:
        import torch
        from sglang.srt.managers.cache_controller import HiCacheController
        from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator
        from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
        from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost

        tokens = PAGES * PAGE_TOKENS
        device = MHATokenToKVPool(
            size=tokens, page_size=PAGE_TOKENS, dtype=torch.float16, head_num=HEADS, head_dim=WIDTH,
            layer_num=LAYERS, device="cpu", enable_memory_saver=False, enable_alt_stream=False,
        )  # fmt: skip
        self.pool = MHATokenToKVPoolHost(
            device._mha_buffer_info(), 2.0, 0, PAGE_TOKENS, "page_first", pin_memory=False,
            device_capacity_tokens=tokens, start_layer=0, end_layer=LAYERS - 1,
        )  # fmt: skip
        self.controller = HiCacheController(
            PagedTokenToKVPoolAllocator(tokens, PAGE_TOKENS, torch.float16, "cpu", device, False),
            self.pool, PAGE_TOKENS, torch.distributed.group.WORLD, threading.Event(),
            write_policy="write_through", io_backend="direct", storage_backend=backend,
            prefetch_threshold=PAGE_TOKENS, model_name="org/model", storage_backend_extra_config=extra,
        )  # fmt: skip

    def fill(self, pages: int, seed: int) -> Any:
        """Indices of `pages` pages with numbers in them."""
        import torch

        indices = self.pool.alloc(pages * PAGE_TOKENS)
        dice = torch.Generator().manual_seed(seed)
        for page in range(pages):
            first = int(indices[page * PAGE_TOKENS])
            shape = self.pool.get_data_page(first).shape
            self.pool.set_from_flat_data_page(first, torch.randn(shape, generator=dice).to(torch.float16))
        return indices

    def content(self, indices: Any) -> list[Any]:
        """The pages at `indices`."""
        return [self.pool.get_data_page(int(first)).clone() for first in indices[::PAGE_TOKENS]]

    def store(self, indices: Any, tokens: list[int]) -> None:
        """As the radix cache backs a node up, and until the controller says that it has."""
        self.controller.write_storage(indices, tokens, hashes(tokens))
        wait_until(lambda: not self.controller.ack_backup_queue.empty(), SECONDS, "the backup to end")
        self.controller.ack_backup_queue.get()

    def found(self, tokens: list[int]) -> Any:
        """The operation of a prefetch once the controller has asked its storage."""
        self.controller.prefetch("request", tokens)
        return self.controller.prefetch_hit_queue.get(timeout=SECONDS)

    def load(self, tokens: list[int]) -> tuple[int, Any]:
        """How many tokens a prefetch brought, and where they are."""
        operation = self.found(tokens)
        indices = self.pool.alloc(max(operation.storage_hit_count, PAGE_TOKENS))
        count = 0
        if operation.storage_hit_count:
            operation.host_indices = indices[: operation.storage_hit_count]
            self.controller.prefetch_buffer.put(operation)
            ended = False
            while not ended:
                told = self.controller.ack_prefetch_queue.get(timeout=SECONDS)
                count, ended = told.completed_tokens or count, told.completed_req
        return count, indices

    def end(self) -> None:
        self.controller.detach_storage_backend()


def hashes(tokens: list[int]) -> list[str]:
    """SGLang's own chain of page hashes."""
    from sglang.srt.managers.cache_controller import get_storage_hash_str

    found: list[str] = get_storage_hash_str(tokens, None, page_size=PAGE_TOKENS)
    return found


def stored_by_one_loaded_by_another(name: str, backend: str, extra: dict[str, Any]) -> None:
    import torch

    start = 1000 * len(name)  # others than the other back-ends have stored
    tokens = list(range(start, start + 10 * PAGE_TOKENS))
    first = Host(backend, dict(extra))
    assert first.found(tokens).storage_hit_count == 0
    indices = first.fill(10, 35)
    expected = first.content(indices)
    first.store(indices, tokens)
    first.end()
    other = Host(backend, dict(extra))
    count, room = other.load([*tokens, *range(9000, 9000 + 2 * PAGE_TOKENS)])
    assert count == len(tokens), count
    assert all(torch.equal(*each) for each in zip(other.content(room[:count]), expected, strict=True))
    other.end()
    print(f"{name}: 10 pages stored by one controller, loaded by another")


def main() -> None:
    pool = EnginePool(sys.argv[1])
    Stubs().install()
    import torch
    from sglang.srt.runtime_context import get_parallel

    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{pool.state / 'gloo'}", rank=0, world_size=1
    )
    get_parallel().override_permanently(
        tp_size=1, tp_rank=0, pp_size=1, pp_rank=0, attn_tp_size=1, attn_tp_rank=0, attn_cp_size=1,
        attn_cp_rank=0, attn_dcp_size=1, attn_dcp_rank=0, attn_dp_size=1, attn_dp_rank=0,
    )  # fmt: skip
    ours = {
        "backend_name": "g35",
        "module_path": "host_shim.sglang_hicache",
        "class_name": "G35HiCache",
        "interface_v1": 1,
        "g35": {"mount": str(pool.mount), "volume": "kv"},
    }
    stored_by_one_loaded_by_another("g35", "dynamic", ours)
    stored_by_one_loaded_by_another(
        "g35, by tensors", "dynamic", ours | {"interface_v1": 0, "g35": ours["g35"]}
    )
    for folder in pool.folders():
        os.environ["SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR"] = str(folder / "controller")
        stored_by_one_loaded_by_another(str(folder), "file", {})
    print("all steps done")


main()
