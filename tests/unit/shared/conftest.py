"""A pool in memory, and two agents that show its files; a module with another pool has its own `pool`."""

from __future__ import annotations

import pytest

from tests.support.fs.memory_shared import Files, SharedPool


@pytest.fixture
def pool() -> SharedPool:
    return SharedPool()


@pytest.fixture
def files(pool: SharedPool) -> Files:
    return pool.agent()


@pytest.fixture
def others(pool: SharedPool) -> Files:
    return pool.agent()
