"""A small model on the CPU, its prefix recomputed and restored from a real pool."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

from tests.support.engines.engine_environments import engine_python
from tests.support.pool_up import PoolUp
from tests.support.processes import Processes

OPTIONS = (
    "--drives",
    "1",
    "--drive-size",
    "64M",
    "--no-files",
    "--value-size",
    "64K",
    "--read-deadline-ms",
    "2000",
)


def first_token(repository: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(engine_python("lmcache")), "-m", "host_shim.first_token", "--rounds", "2", *words],
        cwd=repository, capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip


def test_a_prefix_comes_back_bit_by_bit(processes: Processes, tmp_path: Path, repository: Path) -> None:
    engine_python("lmcache")
    pool, target = PoolUp(processes, tmp_path / "state", *OPTIONS), tmp_path / "said.json"
    mount = ("--mount", str(pool.mount))
    said = first_token(repository, *mount, "--lengths", "32,64", "--json", str(target))
    assert said.returncode == 0, said.stderr
    assert "restoring" in said.stdout
    found = json.loads(target.read_text())
    assert [row["tokens"] for row in found["rows"]] == [32, 64]
    for row in found["rows"]:
        assert row["bytes"] == row["tokens"] * (2 << 10)
        assert 0 <= row["logits_off"] < 1e-3
        assert row["recomputed_s"] > 0
        assert row["restored_s"] >= row["get_s"] > 0
    with pool.pool() as client:
        told = client.volume("kv").stats()
    assert told["hits"] >= (2 + 4) * 3
    assert pool.down() == 0
