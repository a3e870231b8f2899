"""Connecting and disconnecting leaves nothing behind, at either end.

A hundred times here; `python -m tests.support.nvme.connect_leak` does it 10,000 times.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.nvme.connect_leak import connect_often


@pytest.mark.timeout(180)
@pytest.mark.parametrize("transport", ["tcp", "rdma"])
def test_a_hundred_times(transport: str, tmp_path: Path) -> None:
    outcome = connect_often(transport, 100, tmp_path)
    assert outcome.leaks() == []
