"""What a long run says of memory and logs."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.support.campaign.resource_trend import LOOKS_MAX, Look, ResourceTrend


def test_what_outgrows_its_bound_is_said(tmp_path: Path) -> None:

    (tmp_path / "agent-process.pid").write_text(f"{os.getpid()}\n")
    (tmp_path / "agent.log").write_bytes(b"x" * 5000)
    trend = ResourceTrend(tmp_path, ("agent-process", "away"))
    for _ in range(3 * LOOKS_MAX):
        trend.look()
    assert trend.complaints({"agent-process": 1 << 50}, 5000) == []
    resident, logs = trend.complaints({"agent-process": 1}, 4999)
    assert resident.startswith("agent-process had ")
    assert logs == "the logs have 5,000 bytes; 4,999 are allowed"
    (line,) = trend.lines()
    assert "1. life" in line


def test_growth_is_told_of_the_last_life_once_it_has_settled(tmp_path: Path) -> None:
    trend = ResourceTrend(tmp_path, ("agent",))
    trend._looks["agent"] = [Look(at, 1, 900) for at in range(50)]
    trend._looks["agent"] += [Look(at, 2, 10 * at if at < 10 else 100 + at) for at in range(30)]
    assert trend.growth_percent("agent") == pytest.approx(100 * (127.5 - 111.5) / 111.5)
    trend._looks["agent"] = [Look(0, 1, 5)]
    assert trend.growth_percent("agent") is None
