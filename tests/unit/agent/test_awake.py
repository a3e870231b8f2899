"""Processors are kept awake while there is work, and for a moment longer."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path

import pytest

from agent.awake import IDLE_SECONDS, Awake, AwakeWhileBusy


def test_it_asks_for_no_wake_up_time_at_all(tmp_path: Path) -> None:
    device = tmp_path / "cpu_dma_latency"
    device.touch()
    awake = Awake(device)
    assert awake.hold()
    assert awake.hold(), "asked again, it stands"
    assert struct.unpack("=i", device.read_bytes()) == (0,)
    awake.release()
    assert not awake.held
    awake.release()


def test_where_it_is_not_to_be_had_it_is_said_once(
    tmp_path: Path, expects_log: Callable[..., None], caplog: pytest.LogCaptureFixture
) -> None:
    expects_log("processors sleep between requests")
    awake = Awake(tmp_path / "none")
    assert not awake.hold()
    assert not awake.hold()
    assert ["No such file" in record.message for record in caplog.records] == [True]


def test_it_is_held_while_a_count_goes_on(tmp_path: Path) -> None:
    device = tmp_path / "cpu_dma_latency"
    device.touch()
    awake = Awake(device)
    busy = AwakeWhileBusy(awake)
    busy.look(0, 10.0)
    assert not awake.held, "nothing was asked for yet"
    busy.look(5, 11.0)
    assert awake.held
    busy.look(5, 11.0 + IDLE_SECONDS / 2)
    assert awake.held
    busy.look(6, 12.0 + IDLE_SECONDS)
    busy.look(6, 12.0 + 1.5 * IDLE_SECONDS)
    assert awake.held
    busy.look(6, 12.0 + 2 * IDLE_SECONDS)
    assert not awake.held
    busy.look(7, 100.0)
    assert awake.held
    busy.end()
    assert not awake.held


def test_it_is_not_asked_for_unless_it_is_wanted(tmp_path: Path) -> None:
    awake = Awake(tmp_path / "none")
    AwakeWhileBusy(awake, wanted=False).look(5, 1.0)
    assert not awake.held
