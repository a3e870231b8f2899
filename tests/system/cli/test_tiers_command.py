"""`g35 bench --tiers` over real pools: every cell is there, and the sums hold; never a time."""

from __future__ import annotations

import json
from pathlib import Path

from agent.bench.tiers.report import LINKS, ROWS
from agent.bench.tiers.ways import WAYS
from tests.support.needs import needs_mount
from tests.support.processes import Processes

pytestmark = needs_mount

VALUE = 256 << 10
"""As many evicted values as fill a bundle, so that some go to G4."""


def test_tiers(processes: Processes, tmp_path: Path) -> None:
    """A name as short as the paths of sockets want it."""
    target = tmp_path / "tiers.json"
    words = ("--tiers", "--requests", "60", "--json", target)
    bench = processes.g35("bench", *words, environment={"TMPDIR": str(tmp_path)})
    assert bench.process.wait(300) == 0, bench.output
    found = json.loads(target.read_text())
    assert (found["requests"], found["block_bytes"]) == (60, VALUE)
    assert [way["way"] for way in found["ways"]] == [way.name for way in WAYS]
    lines = {line[:40].strip(): line for line in bench.output.splitlines()}
    for words, _cell in ROWS:
        assert words[:40].strip() in lines, words
    for way in found["ways"]:
        assert way["wrong_bytes"] == 0
        assert way["blocks"] == way["gets"] + sum(way["miss_causes"].values())
        assert 0.3 < way["hit_ratio"] < 0.8
        assert found["lru_blocks"] <= way["room_blocks"] <= found["lru_blocks"] + 2
        assert all(
            way[f"{what}_{share}_ms"] > 0 for what in ("get", "put", "lookup") for share in ("p50", "p99")
        )
        assert way["host_us"] > 0
        assert set(way["bytes"]) == set(LINKS)
        _check_sums(way)
    files, pooled, kv_native, local_first, with_g4 = found["ways"]
    assert local_first["bytes"]["from_local"] > pooled["bytes"]["from_enclosures"] / 2
    assert local_first["bytes"]["from_enclosures"] < pooled["bytes"]["from_enclosures"] / 2
    assert with_g4["bytes"]["to_g4"] > 0
    assert kv_native["drive_commands"] > pooled["drive_commands"]
    assert files["flash_bytes"] > pooled["flash_bytes"]
    assert not list(tmp_path.glob("g35-bench-*"))


def _check_sums(way: dict[str, object]) -> None:
    """Bytes over links against the counts of gets and puts."""
    moved = way["bytes"]
    assert isinstance(moved, dict)
    got, put = int(str(way["gets"])) * VALUE, (int(str(way["puts"])) - int(str(way["puts_refused"]))) * VALUE
    # Beside the values: names of keys, and answers about them.
    assert got <= moved["to_host"] < 1.05 * got
    assert put <= moved["from_host"] < 1.05 * put + (1 << 20)
    assert got <= moved["from_enclosures"] + moved["from_local"] + moved["from_g4"]
    kept = moved["to_enclosures"] + moved["to_local"]
    if way["way"] == "local first":
        # Second copies, but for those whose place was taken before they were made.
        assert 1.5 * put < kept < 3 * put
    else:
        assert put <= kept < 1.5 * put
    if way["way"] != "with G4":
        assert moved["to_g4"] == moved["from_g4"] == 0
    if way["way"] != "local first":
        assert moved["to_local"] == moved["from_local"] == 0
