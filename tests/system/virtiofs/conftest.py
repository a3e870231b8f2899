"""The device before a machine: over a tree in memory, and of a real agent."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from agent.bench.virtio_driver.machine import Machine, queues_offered
from tests.support.fs.memory_filesystem import MemoryFileSystem
from tests.support.fs.virtiofs_served import served
from tests.support.pool_up import PoolUp
from tests.support.processes import Processes


@pytest.fixture
def tree() -> MemoryFileSystem:
    return MemoryFileSystem()


@pytest.fixture(params=[False, True], ids=["here", "by-a-reader"])
def path(request: pytest.FixtureRequest, tmp_path: Path, tree: MemoryFileSystem) -> Iterator[Path]:
    """Of a door over `tree`. Who serves the request queues; a reader carries every request."""
    with served(tmp_path / "fs.sock", tree, by_reader=request.param):
        yield tmp_path / "fs.sock"


@pytest.fixture
def pool_up(request: pytest.FixtureRequest, processes: Processes, tmp_path: Path) -> Iterator[PoolUp]:
    """With the test file's OPTIONS."""
    pool = PoolUp(processes, tmp_path / "state", *request.module.OPTIONS)
    try:
        yield pool
    finally:
        if pool.process.running:
            pool.down()


@pytest.fixture
def machine(pool_up: PoolUp) -> Iterator[Machine]:
    socket = pool_up.state / "virtiofs.sock"
    queues = queues_offered(socket) - 1
    with Machine(socket, request_queues=queues, memory_bytes=64 << 20) as made:
        made.start(patience=30)
        made.client.init()
        yield made
