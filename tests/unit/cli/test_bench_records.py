"""The bench's names, records and tables: nothing is measured here."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from rich.console import Console

from agent.bench import records
from agent.bench.names_and_units import CATALOG, LATENCY, RATE, chosen, unknown
from agent.bench.probe_table import PROBES
from agent.bench.records import Figure

PROMISED = {
    "raw_tcp_1m": "GiB/s",
    "raw_tcp_4m": "GiB/s",
    "fuse_memory_1m": "GiB/s",
    "aes_1m": "GiB/s",
    "kv_get_1m": "GiB/s",
    "kv_get_1m_pyfuse3": "GiB/s",
    "kv_get_4m": "GiB/s",
    "kv_put_1m": "GiB/s",
    "kv_put_4m": "GiB/s",
    "kv_get_64k_p50_ms": "ms",
    "kv_get_64k_asleep_p50_ms": "ms",
    "redis_get_1m": "GiB/s",
    "redis_tls_get_1m": "GiB/s",
    "hit_ratio": "ratio",
    "lru_hit_ratio": "ratio",
    "hit_ratio_with_g4": "ratio",
    "virtiofs_get_1m": "GiB/s",
    "virtiofs_put_1m": "GiB/s",
    "copies_per_byte_fuse": "bytes/byte",
    "copies_per_byte_virtiofs": "bytes/byte",
    "host_cpu_s_per_gib_fuse": "s/GiB",
    "host_cpu_s_per_gib_virtiofs": "s/GiB",
    **{f"{store}_get_1m_x4": "GiB/s" for store in ("kv", "mooncake", "lm", "redis", "redis_tls")},
    "kv_get_4m_x4": "GiB/s",
    "mooncake_get_4m_x4": "GiB/s",
    "shim_loop_block_ms": "ms",
    **{name: "GiB/s" for name in ("fs_read_1g", "fs_read_1g_direct", "fs_write_1g_fsync")},
    "write_amplification": "ratio",
    "agent_rss_mib": "MiB",
    **{f"{name}_over_floor": "ratio" for name in ("get_1m", "put_1m", "get_64k", "rdma_get_1m")},
    **{f"{verb}_1m_registered_over_floor": "ratio" for verb in ("get", "put")},
}
"""Scripts outside the repository use these names."""


def figure(name: str, value: float) -> Figure:
    return Figure(CATALOG[name], value)


def test_the_promised_names_and_units_are_there() -> None:
    assert {name: CATALOG[name].unit for name in PROMISED} == PROMISED


def test_every_entry_can_be_measured_and_every_floor_is_an_entry() -> None:
    for name, entry in CATALOG.items():
        assert entry.name == name
        assert (entry.kind in PROBES) == entry.in_rounds
        if entry.floor is not None:
            assert CATALOG[entry.floor].unit == entry.unit


def test_a_long_file_stands_on_values_of_4_mib() -> None:
    floors = {name: CATALOG[name].floor for name in CATALOG if name.startswith("fs_")}
    assert floors == {
        "fs_read_1g": "kv_get_4m",
        "fs_read_1g_direct": "kv_get_4m",
        "fs_write_1g_fsync": "kv_put_4m",
    }


STORES = [name for name in CATALOG if name.startswith(("kv_", "redis_"))]


@pytest.mark.parametrize("name", [name for name in STORES if name.endswith("_b32")])
def test_batches_stand_on_pipelines_of_redis(name: str) -> None:
    entry = CATALOG[name]
    assert entry.unit == RATE
    assert entry.floor == (name.replace("kv_", "redis_") if name.startswith("kv_") else None)


@pytest.mark.parametrize("name", [name for name in STORES if not name.endswith("_b32")])
def test_speeds_of_stores_stand_on_raw_tcp_of_their_size(name: str) -> None:
    entry = CATALOG[name]
    floor = f"kv_get_{entry.size}" if entry.transport == "rdma" else f"raw_tcp_{entry.size}"
    assert entry.floor == (floor if entry.unit == RATE else None)
    assert f"_{entry.size}" in name


def test_a_choice_brings_its_floors_and_nothing_else() -> None:
    assert [entry.name for entry in chosen(["kv_get_1m"])] == ["raw_tcp_1m", "kv_get_1m"]
    assert [entry.name for entry in chosen(["hit_ratio"])] == ["lru_hit_ratio", "hit_ratio"]
    assert [entry.name for entry in chosen(["aes_1m", "aes_1m"])] == ["aes_1m"]
    assert [entry.name for entry in chosen(["*"])] == list(CATALOG)


def test_unknown_names_are_found() -> None:
    assert unknown(["aes_1m", "kv_get_2m", "nonsense"]) == ["kv_get_2m", "nonsense"]


def test_a_record_has_floor_and_ratio_only_where_there_is_one() -> None:
    figures = {
        "raw_tcp_1m": figure("raw_tcp_1m", 4.0),
        "kv_get_1m": Figure(CATALOG["kv_get_1m"], 3.0, {"operations": 7}),
    }
    assert records.records(figures) == [
        {"name": "raw_tcp_1m", "value": 4.0, "unit": "GiB/s"},
        {
            "name": "kv_get_1m",
            "value": 3.0,
            "unit": "GiB/s",
            "floor": "raw_tcp_1m",
            "ratio": 0.75,
            "operations": 7,
        },
    ]


@pytest.mark.parametrize("floor", [None, 0.0])
def test_there_is_no_ratio_without_a_floor_that_was_measured(floor: float | None) -> None:
    figures = {"kv_get_1m": figure("kv_get_1m", 3.0)}
    if floor is not None:
        figures["raw_tcp_1m"] = figure("raw_tcp_1m", floor)
    record = next(found for found in records.records(figures) if found["name"] == "kv_get_1m")
    assert "floor" not in record
    assert "ratio" not in record


def test_the_file_is_written_as_a_whole(tmp_path: Path) -> None:
    target = tmp_path / "bench.json"
    target.write_text("what was there before")
    records.write(target, {"aes_1m": figure("aes_1m", 9.87654321)})
    assert json.loads(target.read_text()) == [{"name": "aes_1m", "value": 9.87654, "unit": "GiB/s"}]
    assert list(tmp_path.iterdir()) == [target]


def test_busy_loops_beside_are_in_each_record(tmp_path: Path) -> None:
    target = tmp_path / "bench.json"
    records.write(target, {"aes_1m": figure("aes_1m", 2.0)}, 8)
    assert json.loads(target.read_text()) == [
        {"name": "aes_1m", "value": 2.0, "unit": "GiB/s", "busy_loops": 8}
    ]


def test_ahead_is_above_one_for_more_speed_and_for_less_time() -> None:
    assert records.ahead(figure("kv_get_1m", 3.0), figure("redis_get_1m", 1.5)) == 2.0
    fast, slow = figure("kv_get_64k_p50_ms", 0.1), figure("redis_get_64k_p50_ms", 0.2)
    assert fast.entry.unit == LATENCY
    assert records.ahead(fast, slow) == 2.0


def test_processor_time_is_shown_beside_its_floor() -> None:
    parts = {"client_us": 60.0, "agent_us": 300.0, "enclosure_us": 120.0, "path_us": 480.0, "floor_us": 240.0}
    parts |= {"mount_us": 180.0, "times_with_mount": 1.25}
    found = Figure(CATALOG["rdma_get_1m_over_floor"], 2.0, {**parts, "rounds": [1.9, 2.0, 2.3]})
    console = Console(width=170)
    with console.capture() as capture:
        shown = records.over_floors({"rdma_get_1m_over_floor": found, "aes_1m": figure("aes_1m", 1.0)})
        assert shown is not None
        console.print(shown)
    (row,) = [line for line in capture.get().splitlines() if "over_floor" in line]
    assert row.split()[1:] == [
        "60.000",
        "300",
        "120",
        "480",
        "-",
        "-",
        "-",
        "-",
        "240",
        "180",
        "2.00",
        "1.90-2.30",
        "-",
        "1.25",
    ]
    assert records.over_floors({"aes_1m": figure("aes_1m", 1.0)}) is None


def test_the_tables_show_what_was_measured() -> None:
    figures = {
        name: figure(name, value)
        for name, value in {"raw_tcp_1m": 4.0, "kv_get_1m": 3.0, "redis_get_1m": 1.5}.items()
    }
    console = Console(width=120)
    with console.capture() as capture:
        console.print(records.table(figures))
        beside = records.against_redis(figures)
        assert beside is not None
        console.print(beside)
        console.print(records.listing())
    text = capture.get()
    assert "0.75" in text
    assert "2.00" in text
    assert all(name in text for name in CATALOG)
    assert records.against_redis({"kv_get_1m": figures["kv_get_1m"]}) is None
