"""What a replay says of the agent's memory."""

from __future__ import annotations

from typing import Any

from agent.replay.report import FromMemory, Report
from agent.replay.tally import Tally

BEFORE: dict[str, Any] = {
    "hits": 10, "prestage_hits": 4, "prestage_late": 1, "prestaged_bytes": 1000, "prestage_useful_bytes": 400,
}  # fmt: skip
AFTER: dict[str, Any] = {
    "hits": 50, "prestage_hits": 34, "prestage_late": 3, "prestaged_bytes": 9000,
    "prestage_useful_bytes": 6400,
}  # fmt: skip


def report(memory: FromMemory | None) -> Report:
    return Report(
        Tally(), 1.0, 4096, 4096, planned_requests=0, finished=True, mount_alive=True, memory=memory
    )


def test_shares_are_of_what_happened_meanwhile() -> None:
    memory = FromMemory.between(BEFORE, AFTER)
    assert memory == FromMemory(gets=40, served=30, late=2, prestaged_bytes=8000, useful_bytes=6000)
    record = report(memory).record()
    assert record["memory_share"] == 0.75
    assert record["prestage_late"] == 2
    assert record["prestage_wasted_bytes"] == 2000
    assert record["prestage_wasted_share"] == 0.25
    rows = dict(report(memory).rows())
    assert rows["gets from memory"] == "75.0 %"
    assert rows["read ahead"] == "7.812 KiB, 1.953 KiB wasted, 2 late"


def test_where_nothing_was_read_ahead_nothing_is_said() -> None:
    memory = FromMemory.between(BEFORE, {**BEFORE, "hits": 20})
    assert memory is not None
    record = report(memory).record()
    assert (record["memory_share"], record["prestage_wasted_share"]) == (0.0, None)
    assert "read ahead" not in dict(report(memory).rows())
    assert report(None).record()["memory_share"] is None


def test_an_agent_that_was_started_meanwhile_says_nothing() -> None:
    assert FromMemory.between(AFTER, BEFORE) is None


def test_bytes_that_were_staged_before_and_used_now_are_no_negative_waste() -> None:
    memory = FromMemory.between({}, {"prestaged_bytes": 5, "prestage_useful_bytes": 9})
    assert memory is not None
    assert memory.wasted_bytes == 0
