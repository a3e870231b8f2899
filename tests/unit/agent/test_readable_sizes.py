"""Sizes and times for people."""

from __future__ import annotations

import pytest

from agent.sizes import parse_size, readable_bytes, readable_seconds, typed_size


@pytest.mark.parametrize(
    ("seconds", "said"),
    [
        (0, "0 s"), (59.9, "59 s"), (60, "1 min 0 s"), (2564, "42 min 44 s"), (3600, "1 h 0 min"),
        (86399, "23 h 59 min"), (86400, "1 d 0 h"), (1e7, "115 d 17 h"),
    ],
)  # fmt: skip
def test_a_time_is_said_in_its_two_largest_units(seconds: float, said: str) -> None:
    assert readable_seconds(seconds) == said


@pytest.mark.parametrize(
    ("count", "said"), [(0, "0 B"), (416653312, "397.4 MiB"), (1 << 30, "1 GiB"), (5 << 50, "5,120 TiB")]
)
def test_a_size_is_said_with_four_digits(count: int, said: str) -> None:
    assert readable_bytes(count) == said


@pytest.mark.parametrize("size", [1, 4096, 1 << 20, 1028 << 10, 3 << 40, 12345])
def test_a_size_as_typed_is_the_same_size(size: int) -> None:
    assert parse_size(typed_size(size)) == size
