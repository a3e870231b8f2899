"""Modules shaped like LMCache's and SGLang's, as far as host_shim's connectors touch them.

For tests of the connectors' logic where no engine is installed; tests/system/engines has the real ones.
Shapes are those of lmcache 0.5.6 and sglang 0.5.23.
"""

from __future__ import annotations

import enum
import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any


class Bitmap:
    def __init__(self, length: int) -> None:
        self.bits = [False] * length

    def set(self, at: int) -> None:
        self.bits[at] = True


class L2StoreResult(int):
    def __new__(cls, success: bool, transferred: int) -> L2StoreResult:
        return super().__new__(cls, transferred if success else -1)

    def is_successful(self) -> bool:
        return self >= 0


class L2AdapterInterface:
    def __init__(self, max_capacity_bytes: int = 0) -> None:
        self.notified: list[tuple[str, list[Any]]] = []

    def _notify_keys_stored(self, keys: list[Any], sizes: list[int]) -> None:
        self.notified.append(("stored", list(zip(keys, sizes, strict=True))))

    def _notify_keys_accessed(self, keys: list[Any]) -> None:
        self.notified.append(("accessed", keys))

    def _notify_keys_deleted(self, keys: list[Any], sizes: list[int]) -> None:
        self.notified.append(("deleted", list(zip(keys, sizes, strict=True))))


class StoragePluginInterface:
    def __init__(
        self, dst_device: str, config: Any, metadata: Any, local_cpu_backend: Any, loop: Any
    ) -> None:
        self.local_cpu_backend = local_cpu_backend


class RemoteConnector:
    def reshape_partial_chunk(self, chunk: Any, length: int) -> Any:
        if length % self.single_token_size:  # type: ignore[attr-defined]
            raise ValueError("no whole number of tokens")
        chunk.length = length
        return chunk


class MemoryFormat(enum.Enum):
    KV_2LTD = 1
    KV_MLA_FMT = 2


@dataclass(frozen=True)
class ObjectKey:
    chunk_hash: bytes
    model_name: str = "org/model"
    kv_rank: int = 0
    object_group_id: int = 0
    cache_salt: str = ""


@dataclass(frozen=True)
class CacheEngineKey:
    text: str

    def to_string(self) -> str:
        return self.text


@dataclass(eq=False)
class Memory:
    """A memory object of LMCache: some bytes, and who still needs them."""

    data: bytearray
    references: int = 1
    length: int = 0
    meta: SimpleNamespace = field(default_factory=SimpleNamespace)
    group_prefix_sum: list[int] = field(default_factory=list)

    @property
    def byte_array(self) -> memoryview:
        return memoryview(self.data)

    def get_size(self) -> int:
        return len(self.data)

    def ref_count_up(self) -> None:
        self.references += 1

    def ref_count_down(self) -> None:
        self.references -= 1


class HiCacheStorage:
    def register_mem_pool_host(self, pool: Any) -> None:
        self.mem_pool_host = pool


class PoolName(enum.Enum):
    KV = "kv"
    MAMBA = "mamba"
    COMPRESSED = "deepseek_v4_c4"


class PoolHitPolicy(enum.Enum):
    ALL_PAGES = "all_pages"
    TRAILING_PAGES = "trailing_pages"
    BLOCK_GROUPS = "block_groups"
    OF_TOMORROW = "of_tomorrow"


@dataclass
class PoolTransferResult:
    kv_hit_pages: int
    extra_pool_hit_pages: dict[Any, int]
    restorable_prefix_pages: list[int] | None = None

    @classmethod
    def empty(cls) -> PoolTransferResult:
        return cls(0, {})


@dataclass
class PoolTransfer:
    name: PoolName
    host_indices: Any = None
    keys: list[str] | None = None
    hit_policy: PoolHitPolicy = PoolHitPolicy.ALL_PAGES
    block_pages: int = 0
    group_pages: int = 0


@dataclass
class HiCacheStorageConfig:
    extra_config: dict[str, Any]
    model_name: str = "org/model"
    is_mla_model: bool = False
    tp_rank: int = 0
    tp_size: int = 1
    pp_rank: int = 0
    pp_size: int = 1
    attn_cp_rank: int = 0
    attn_cp_size: int = 1
    dcp_size: int = 1
    dcp_rank: int = 0
    logical_page_size: int | None = None
    more: dict[str, Any] = field(default_factory=dict)


_MODULES: dict[str, dict[str, Any]] = {
    "lmcache.lmcache_native": {"Bitmap": Bitmap},
    "lmcache.v1.distributed.internal_api": {"L2StoreResult": L2StoreResult},
    "lmcache.v1.distributed.l2_adapters.base": {"L2AdapterInterface": L2AdapterInterface},
    "lmcache.v1.memory_management": {"MemoryFormat": MemoryFormat},
    "lmcache.v1.storage_backend.abstract_backend": {"StoragePluginInterface": StoragePluginInterface},
    "lmcache.v1.storage_backend.connector.base_connector": {"RemoteConnector": RemoteConnector},
    "sglang.srt.mem_cache.hicache_storage": {
        "HiCacheStorage": HiCacheStorage,
        "PoolHitPolicy": PoolHitPolicy,
        "PoolName": PoolName,
        "PoolTransferResult": PoolTransferResult,
    },
}


@contextmanager
def connector_with_fake_engine(module: str) -> Iterator[ModuleType]:
    """A connector of host_shim, imported with the modules above in the engine's place, then forgotten."""
    before = dict(sys.modules)
    for name, contents in _MODULES.items():
        parts = name.split(".")
        for end in range(1, len(parts) + 1):
            sys.modules.setdefault(".".join(parts[:end]), ModuleType(".".join(parts[:end])))
        vars(sys.modules[name]).update(contents)
    try:
        yield importlib.import_module(module)
    finally:
        for name in set(sys.modules) - set(before):
            if name == module or name.split(".")[0] in ("lmcache", "sglang"):
                del sys.modules[name]
