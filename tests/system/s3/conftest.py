"""A door on loopback over blocks in memory, for most tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.engines.s3_served import Served, served


@pytest.fixture
def s3(tmp_path: Path) -> Iterator[Served]:
    with served(tmp_path) as made:
        yield made
