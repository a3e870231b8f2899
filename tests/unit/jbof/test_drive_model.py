"""The model of a drive's speed: plain arithmetic, so plain numbers."""

from __future__ import annotations

import pytest

from emulator.jbof.drive_model import DriveModel, DriveModelSettings, LinkModel


def test_off_by_default() -> None:
    assert DriveModelSettings().is_off
    assert DriveModel(DriveModelSettings()).due(is_read=True, length=1 << 20, now=5.0) == 5.0


def test_latency_by_direction() -> None:
    model = DriveModel(DriveModelSettings(read_latency_s=0.1, write_latency_s=0.02))
    assert model.due(is_read=True, length=4096, now=1.0) == pytest.approx(1.1)
    assert model.due(is_read=False, length=4096, now=1.0) == pytest.approx(1.02)
    assert model.due(is_read=True, length=4096, now=1.0) == pytest.approx(1.1), "latencies overlap"


def test_bandwidth_is_shared_by_what_is_in_flight() -> None:
    model = DriveModel(DriveModelSettings(bandwidth_bytes_per_s=1000.0))
    assert model.due(is_read=True, length=500, now=0.0) == pytest.approx(0.5)
    assert model.due(is_read=False, length=500, now=0.0) == pytest.approx(1.0)
    assert model.due(is_read=True, length=100, now=5.0) == pytest.approx(5.1), "idle time is not saved up"


def test_commands_per_second() -> None:
    model = DriveModel(DriveModelSettings(commands_per_s=10.0, read_latency_s=1.0))
    assert [model.due(is_read=True, length=1, now=0.0) for _ in range(3)] == pytest.approx([1.1, 1.2, 1.3])


def test_the_same_seed_gives_the_same_times() -> None:
    settings = DriveModelSettings(read_latency_s=0.1, jitter=0.5, seed=7)
    first = [DriveModel(settings).due(is_read=True, length=1, now=0.0) for _ in range(1)]
    one, two = DriveModel(settings), DriveModel(settings)
    times = [one.due(is_read=True, length=1, now=0.0) for _ in range(50)]
    assert times == [two.due(is_read=True, length=1, now=0.0) for _ in range(50)]
    assert times[:1] == first
    assert all(0.05 <= time <= 0.15 for time in times)
    assert len(set(times)) > 40


@pytest.mark.parametrize(
    "wrong", [{"read_latency_s": -1.0}, {"commands_per_s": float("inf")}, {"jitter": 1.5}]
)
def test_settings_that_cannot_be(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError):
        DriveModelSettings(**wrong)  # type: ignore[arg-type]


def test_a_link_carries_each_way_by_itself() -> None:
    link = LinkModel()
    assert link.due(is_read=True, length=1 << 20, now=5.0) == 5.0
    link.set_rate(1000.0)
    assert link.due(is_read=True, length=500, now=5.0) == pytest.approx(5.5)
    assert link.due(is_read=True, length=500, now=5.0) == pytest.approx(6.0)
    assert link.due(is_read=False, length=500, now=5.0) == pytest.approx(5.5)
    with pytest.raises(ValueError, match="rate of a link"):
        link.set_rate(float("nan"))
