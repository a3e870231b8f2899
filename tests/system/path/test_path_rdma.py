"""The whole path over NVMe/RDMA, on emulated devices: tests of the other files here, with that transport."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.support.pool_up import PoolUp
from tests.system.path.test_path_faults import (
    test_a_hung_enclosure_costs_a_bounded_wait,
    test_an_enclosure_killed_and_brought_back_under_load,
)
from tests.system.path.test_whole_path import (
    test_a_get_by_path_costs_one_command_on_the_fabric,
    test_batches_holes_prestage_pin_and_delete,
    test_what_was_put_is_got_by_shim_and_by_path,
)

__all__ = [
    "test_a_get_by_path_costs_one_command_on_the_fabric",
    "test_a_hung_enclosure_costs_a_bounded_wait",
    "test_an_enclosure_killed_and_brought_back_under_load",
    "test_batches_holes_prestage_pin_and_delete",
    "test_what_was_put_is_got_by_shim_and_by_path",
]


@pytest.fixture
def make_pool(make_pool: Callable[..., PoolUp]) -> Callable[..., PoolUp]:
    """Pools whose enclosures are reached by RDMA; what `pool_up` is made by, too."""
    return lambda *options: make_pool(*options, "--transport", "rdma")


def test_a_second_program_looks_at_the_pool(pool_up: PoolUp) -> None:
    """Each process has a device of its own, at an address that is free."""
    import subprocess
    import sys

    shown = subprocess.run(
        [sys.executable, "-m", "agent.cli", "pool", "show", "--config", str(pool_up.state / "agent.toml")],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert shown.returncode == 0, shown.stderr
    assert 'transport = "rdma"' in (pool_up.state / "agent.toml").read_text()
