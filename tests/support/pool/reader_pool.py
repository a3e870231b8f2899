"""A pool whose agent has several processes: their rows in the status, their mounts, and values to store."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from tests.support.pool_up import PoolUp
from tests.support.waiting import wait_until

MIB = 1 << 20
SHORT = 64 << 10


def value(key: int, length: int = SHORT) -> bytes:
    return random.Random(key).randbytes(1024) * (length // 1024)


def rows(pool: PoolUp) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = pool.status()["processes"]
    return found


def wait_serving(pool: PoolUp) -> None:
    wait_until(lambda: all(each["state"] == "serving" for each in rows(pool)), 60, "every process to serve")


def each_mount(pool: PoolUp) -> list[Path]:
    """Of every process, the first one first."""
    return [pool.mount, *sorted((pool.mount / ".g35").glob("process-*"))]
