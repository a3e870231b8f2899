"""Tests that hold for both formats of marks take `mark_blocks`."""

from __future__ import annotations

import pytest

from tests.support.pool import memory_pool


@pytest.fixture(params=[0, 1], ids=["ghosts", "block"])
def mark_blocks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Marks in the places of ghosts, or in a block of their own behind each directory."""
    count: int = request.param
    monkeypatch.setattr(memory_pool, "MARK_BLOCKS", count)
    return count
