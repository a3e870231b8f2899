"""Options of connectors as engines hand them over: what has the wrong type is said, and not used."""

from __future__ import annotations

import math
from typing import Any

import pytest

from host_shim.connector_options import ConnectorOptions, HiCacheOptions, checked_seconds
from host_shim.named_values import NamedValues
from host_shim.pool import Pool
from tests.support.engines.scripted_agent import ScriptedAgent

WRONG: list[tuple[str, Any]] = [
    ("mount", ""), ("mount", 5), ("mount", None),
    ("volume", 5), ("volume", ""), ("volume", None), ("volume", "v" * 1000),
    ("threads", "4"), ("threads", True), ("threads", 0), ("threads", 65), ("threads", None),
    ("parallel", 1.5), ("parallel", -1), ("parallel", "2"),
    ("ttl", "60"), ("ttl", -1), ("ttl", 0), ("ttl", 1 << 40), ("ttl", (1 << 32) - 0.5), ("ttl", True),
    ("ttl", math.inf), ("ttl", math.nan),
    ("prestage", "false"), ("prestage", 0), ("prestage", None),
]  # fmt: skip


@pytest.mark.parametrize(("name", "value"), WRONG)
def test_a_value_of_the_wrong_type_or_range_is_refused(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f'"{name}"'):
        ConnectorOptions.from_dict({"mount": "/mnt", name: value})


def test_what_makes_sense_is_taken() -> None:
    given = {"mount": "/mnt", "volume": "v", "threads": 64, "parallel": 1, "ttl": 0.5, "prestage": False}
    assert ConnectorOptions.from_dict(given) == ConnectorOptions("/mnt", "v", 64, 1, 0.5, False)
    assert ConnectorOptions.from_dict({"mount": "/mnt", "ttl": (1 << 32) - 1}).ttl == (1 << 32) - 1


@pytest.mark.parametrize(
    "pools",
    [
        {"kv": "other"},
        {"indexer": ""},
        {"indexer": 5},
        {5: "kv"},
        ["indexer"],
        None,
        {str(n): "v" for n in range(65)},
    ],
)
def test_volumes_for_pools(pools: Any) -> None:
    taken = HiCacheOptions.from_dict({"mount": "/mnt", "pools": {"indexer": "small"}})
    assert taken.pools == {"indexer": "small"}
    with pytest.raises(ValueError, match='"pools" has a volume'):
        HiCacheOptions.from_dict({"mount": "/mnt", "pools": pools})


@pytest.mark.parametrize("value", [-1, 0, "1", None, True, math.nan, math.inf, 61])
def test_deadlines(value: Any) -> None:
    checked_seconds("lookup_deadline", 60, 60)
    with pytest.raises(ValueError, match='"lookup_deadline" is a number of seconds'):
        checked_seconds("lookup_deadline", value, 60)


def test_no_request_is_made_with_a_time_to_live_that_it_cannot_carry() -> None:
    with Pool("/nowhere", files=ScriptedAgent()) as pool, pytest.raises(ValueError, match="time to live"):
        NamedValues(pool, "kv", ttl=-1)
