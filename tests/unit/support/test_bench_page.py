"""The tables of docs/benchmarks.md out of records that are made up here."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.support.rungs import bench_page
from tests.support.rungs.bench_page import MADE, behind, main, page_with, spread


def run(**values: float) -> dict[str, dict[str, Any]]:
    return {name: {"name": name, "value": value} for name, value in values.items()}


RUNS = [
    run(kv_get_1m=4.0, redis_get_1m=2.0, kv_get_64k=0.5, redis_get_64k=1.0)
    | run(kv_get_4k_b32=0.2, redis_get_4k_b32=0.1),
    run(kv_get_1m=3.0, redis_get_1m=2.5, kv_get_64k=0.6, redis_get_64k=1.0)
    | run(kv_get_4k_b32=0.3, redis_get_4k_b32=0.1),
]


def rows(text: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line]


def test_a_cell_has_the_least_and_the_greatest() -> None:
    assert spread([2.0, 1.5, 3.25]) == "1.50 – 3.25"
    assert spread([0.5]) == "0.5"
    assert spread([1234.5, 99.994]) == "99.99 – 1,234"


def test_stores_are_compared_within_a_run_and_who_is_ahead_is_bold() -> None:
    head, _, *body = rows(MADE["beside"](RUNS))
    assert head == ["GiB/s", "/kv", "Redis", "times"]
    assert body == [
        ["get 64 KiB, four in flight", "0.5 – 0.6", "1.00", "**0.5 – 0.6**"],
        ["get 1 MiB, four in flight", "3.00 – 4.00", "2.00 – 2.50", "1.20 – 2.00"],
    ]


def test_less_time_is_better() -> None:
    found = run(kv_get_64k_p50_ms=0.2, redis_get_64k_p50_ms=0.1)
    assert bench_page.ahead("get_64k_p50_ms", "redis", [found]) == [0.5]


def test_what_is_worse_than_a_peer_is_listed() -> None:
    assert behind(RUNS) == ["- get 64 KiB, four in flight: 0.5 – 0.6 of Redis"]
    assert "nothing that was measured" in MADE["behind"]([run(kv_get_1m=1.0)])


def test_batches_are_a_table_of_their_own() -> None:
    *_, body = rows(MADE["batches"](RUNS))
    assert body == ["get 4 KiB, batches of 32", "0.2 – 0.3", "0.1", "2.00 – 3.00"]


def test_times_under_a_fixed_load_are_a_table_of_their_own() -> None:
    times = {"offered_per_s": 900.0, "p50_ms": 0.5, "p99_ms": 2.5, "p999_ms": 4.0}
    names = ("kv_get_1m_load_60_p99_ms", "redis_get_1m_load_60_p99_ms")
    found = {
        name: {"name": name, "value": value, **times} for name, value in zip(names, (2.0, 1.0), strict=True)
    }
    head, _, body = rows(MADE["under load"]([found]))
    assert len(head) == len(body) == 10
    assert body == ["get 1 MiB at 60 %", *["900", "0.5", "2.50", "4.00"] * 2, "**0.5**"]
    assert behind([found]) == ["- get 1 MiB at 60 % of the highest rate: p99: 0.5 of Redis"]
    assert "load" not in MADE["all else"]([found])


def test_floors_have_medians_of_their_parts_and_all_of_their_values() -> None:
    name = "get_64k_over_floor"
    shares = {f"{share}_us": 10.0 for share in bench_page.SHARES if share != "copy"}
    made = [{name: {"name": name, "value": value, **shares}} for value in (2.5, 2.0, 3.0)]
    *_, body = rows(MADE["floors"](made))
    times = ["**2.00 – 3.00**", "2", "–", "–"]
    assert body == [f"`{name}`", *["10.00"] * 4, *["10.00"] * 3, "–", "10.00", *times]
    for record in (run[name] for run in made):
        record |= {"mount_us": 30.0, "times_with_mount": record["value"] / 2}
    *_, body = rows(MADE["floors"](made))
    assert body[-2:] == ["30.00", "1.00 – 1.50"]


def test_what_was_asked_stands_beside_what_was_measured() -> None:
    made = [
        run(put_1m_over_floor=value, kv_get_4k_b32=0.5, redis_get_4k_b32=other, shim_loop_block_ms=0.5)
        for value, other in ((1.3, 0.5), (1.5, 0.4), (1.4, 1.0))
    ]
    assert rows(MADE["goals"](made))[2:] == [
        ["`put_1m_over_floor`", "1.30 – 1.50", "1.4 at most", "2 of 3"],
        ["`kv_get_4k_b32`, of `redis_get_4k_b32`", "0.5 – 1.25", "1 at least", "2 of 3"],
        ["`shim_loop_block_ms`", "0.5", "1 at most", "3 of 3"],
    ]


def test_all_else_has_what_no_other_table_has() -> None:
    found = [{**RUNS[0], "raw_tcp_1m": {"name": "raw_tcp_1m", "value": 5.0}}]
    *_, body = rows(MADE["all else"](found))
    assert body == ["`raw_tcp_1m`", "5.00 GiB/s", ""]


def test_profiles_have_processes_and_the_threads_that_matter() -> None:
    times = {f"{column}_us": 100.0 for column in bench_page.PROFILE_COLUMNS}
    kinds = [
        {"kind": "fuse", "threads": 2, **times},
        {"kind": "main", "threads": 1, **times, "processor_us": 1.0},
    ]
    client = {"process": "client", "threads": 1, **times, "kinds": [{"kind": "bench", "threads": 1, **times}]}
    record = {
        "name": "kv_get_1m", "processor_us": 201.5,
        "processes": [client, {"process": "agent", "threads": 3, **times, "kinds": kinds}],
    }  # fmt: skip
    profile = {"kv_get_1m": record}
    _, _, *body = rows(MADE["profile"]([*RUNS, profile]))
    assert [row[0] for row in body] == ["**`kv_get_1m`**", "client", "agent", "– `fuse`"]
    assert body[0][5] == "**202**"
    assert body[3][1:] == ["2", *["100"] * 6]
    page = "<!-- made: beside -->\n<!-- end -->\n"
    assert page_with(page, [*RUNS, profile]) == page_with(page, RUNS)


def test_tables_are_put_between_their_marks_and_nothing_else_changes() -> None:
    page = "before\n<!-- made: behind -->\nold\n<!-- end -->\nafter\n"
    made = page_with(page, RUNS)
    assert made.startswith("before\n<!-- made: behind -->\n")
    assert made.endswith("<!-- end -->\nafter\n")
    assert "old" not in made
    assert page_with(made, RUNS) == made


def test_the_page_has_each_table_once_and_it_is_filled() -> None:
    page = bench_page.PAGE.read_text()
    found = re.findall(r"<!-- made: (.*?) -->\n(.*?)<!-- end -->", page, re.DOTALL)
    assert sorted(name for name, _ in found) == sorted(MADE)
    assert all(made.strip() for _, made in found)


def test_runs_are_read_from_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page, records = tmp_path / "page.md", tmp_path / "run.json"
    page.write_text("<!-- made: batches -->\n<!-- end -->\n")
    records.write_text(json.dumps(list(RUNS[0].values())))
    monkeypatch.setattr(bench_page, "PAGE", page)
    assert main([str(records)]) == 0
    assert "get 4 KiB, batches of 32" in page.read_text()
    assert main([]) == 2
    assert "no runs" in capsys.readouterr().err
