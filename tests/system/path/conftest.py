"""Pools for the tests of the whole path; small, so that a test run starts many of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.support.fs.two_agents import TwoAgents
from tests.support.pool.two_tenants import TwoTenants
from tests.support.pool_up import SHARED_POOL, PoolUp, second_agent
from tests.support.processes import Processes

SMALL = ("--drive-size", "256M", "--read-deadline-ms", "10000")
"""A deadline that no busy machine reaches: tests of deadlines have their own."""


@pytest.fixture
def make_pool(processes: Processes, tmp_path: Path) -> Iterator[Callable[..., PoolUp]]:
    """Bring pools up, each in a state folder of its own; they are taken down at the end."""
    made: list[PoolUp] = []

    def make(*options: str) -> PoolUp:
        pool = PoolUp(processes, tmp_path / f"state-{len(made)}", *SMALL, *options)
        made.append(pool)
        return pool

    try:
        yield make
    finally:
        for pool in made:
            if pool.process.running:
                pool.down()


@pytest.fixture
def pool_up(make_pool: Callable[..., PoolUp]) -> PoolUp:
    """A pool of two enclosures with a drive each."""
    return make_pool("--drives", "1")


@pytest.fixture(scope="module")
def options() -> tuple[str, ...]:
    """Of `whole_pool`, beside the small ones; a module has its own where it wants others."""
    return ()


@pytest.fixture(scope="module")
def whole_pool(tmp_path_factory: pytest.TempPathFactory, options: tuple[str, ...]) -> Iterator[PoolUp]:
    """One like `pool_up`, for those tests of a module that break nothing of it; each has keys of its own."""
    processes = Processes(tmp_path_factory.mktemp("processes"))
    try:
        pool = PoolUp(processes, tmp_path_factory.mktemp("state"), *SMALL, "--drives", "1", *options)
        yield pool
        assert pool.down() == 0
    finally:
        processes.end_all()


@pytest.fixture
def two_tenants(processes: Processes, tmp_path: Path) -> Iterator[TwoTenants]:
    with ExitStack() as stack:
        yield TwoTenants(processes, tmp_path, stack)


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TwoAgents]:
    processes = Processes(tmp_path_factory.mktemp("processes"))
    try:
        pool = PoolUp(processes, tmp_path_factory.mktemp("state"), *SHARED_POOL)
        second, mount = second_agent(processes, pool, tmp_path_factory.mktemp("second"))
        yield TwoAgents(pool, mount)
        assert second.stop() == 0
        assert pool.down() == 0
    finally:
        processes.end_all()


@pytest.fixture
def folder(two: TwoAgents, request: pytest.FixtureRequest) -> str:
    """A folder of the test's own, made by the first agent; no agent deletes anything any more."""
    two.settle()
    name = request.node.name[:60].replace("[", "-").replace("]", "").replace("/", "-")
    (two.one / name).mkdir()
    return name
