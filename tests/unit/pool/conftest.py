"""What tests of calls by registered memory share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from agent.fs.control.registered_memory import RegisteredMemory


@pytest.fixture
def memory() -> Iterator[RegisteredMemory]:
    memory = RegisteredMemory(1 << 30)
    yield memory
    memory.close()
