"""The command of docs/tier0.md that measures local gets, remote ones, and the loss of a server."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.rungs import local_first_figures


def test_the_figures_say_what_stays_on_the_server_and_what_its_loss_costs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert local_first_figures.main(["--values", "24", "--json", str(tmp_path / "json")]) == 0
    rows = {(row["copies"], row["gets"]): row for row in json.loads((tmp_path / "json").read_text())}
    assert list(rows) == [
        (copies, gets)
        for copies in ("one copy", "two, local first")
        for gets in ("beside the SSD", "elsewhere", "elsewhere, the server gone")
    ]
    shown = capsys.readouterr().out.splitlines()
    assert len(shown) == 2 + len(rows)
    assert all(line.count("|") == 7 for line in shown)
    for (copies, gets), row in rows.items():
        assert (row["asked"], row["p50_ms"] > 0) == (24, True)
        if gets != "elsewhere, the server gone":
            assert row["served"] == 24
        if copies == "two, local first":
            # Slots of 64 KiB: none, or one. Now and then a directory comes with it, and on a slow machine
            # the other copy.
            assert row["served"] == 24
            most = 4096 if gets == "beside the SSD" else 69632
            assert most - 4096 <= row["fabric_bytes"]
            assert row["fabric_bytes"] - row["hedge_bytes"] <= most
    assert rows["one copy", "elsewhere, the server gone"]["served"] < 24


def test_too_few_values_or_too_many_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for values in ("7", "401", "x"):
        with pytest.raises(SystemExit):
            local_first_figures.main(["--values", values])
    assert "argument --values" in capsys.readouterr().err
