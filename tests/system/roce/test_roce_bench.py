"""The benchmark of the emulated NIC runs, compares contents, and says numbers with their units."""

from __future__ import annotations

import json

import pytest

from emulator.roce import bench


def test_every_record_is_a_number_with_a_unit() -> None:
    records = [
        bench.udp_gso(0.05), bench.roce_write_1m(0.1), bench.roce_read_1m(0.1),
        bench.roce_send_64b_p50_us(0.05),
    ]  # fmt: skip
    assert [record.name for record in records] == list(bench.RECORDS)
    assert all(record.value > 0 for record in records)
    assert [record.unit for record in records] == ["GiB/s", "GiB/s", "GiB/s", "us"]


def test_a_record_that_does_not_exist(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main(["roce_teleport"]) == 2
    assert "there are udp_gso" in capsys.readouterr().err


def test_records_are_json_lines(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(bench.RECORDS, "udp_gso", lambda _seconds: bench.Record("udp_gso", 1.5, "GiB/s"))
    assert bench.main(["udp_gso"]) == 0
    assert json.loads(capsys.readouterr().out) == {"name": "udp_gso", "value": 1.5, "unit": "GiB/s"}
