"""A pool with a virtio-fs device, and a `g35 host` that has it mounted, while a `with` block lasts."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.support.lab.guest_calls import GuestCalls
from tests.support.pool_up import PoolUp
from tests.support.processes import Processes, Started
from tests.support.waiting import wait_until

BOOT_S = 900.0


@dataclass(frozen=True, slots=True)
class GpuHostUp:
    """A pool outside, and a `g35 host` that has it mounted."""

    pool: PoolUp
    process: Started
    call: GuestCalls


@contextlib.contextmanager
def processes_in(folder: Path) -> Iterator[Processes]:
    processes = Processes(folder)
    try:
        yield processes
    finally:
        processes.end_all()


@contextlib.contextmanager
def pool_of(processes: Processes, state: Path, *options: str) -> Iterator[PoolUp]:
    up = PoolUp(processes, state, *options)
    yield up
    assert up.down() == 0, up.process.output


@contextlib.contextmanager
def gpu_host_of(pool: PoolUp, processes: Processes, temporary: Path) -> Iterator[GpuHostUp]:
    """Its command's words and exit status come out. It calls functions of tests/lab/gpu_host_steps.py."""
    process = processes.g35(
        *("host", "--config", pool.state / "agent.toml", "--memory", "1024", "--"),
        *(sys.executable, "-m", "tests.support.lab.guest_calls", "tests.lab.gpu_host_steps"),
        environment={"TMPDIR": str(temporary)},
    )

    def exchange() -> Path | None:
        assert process.running, process.output
        return next((found.parent for found in temporary.glob("*/exchange/script")), None)

    found = wait_until(exchange, BOOT_S, "the guest to be set up")
    assert found is not None
    up = GpuHostUp(pool, process, GuestCalls(found, lambda: process.running))
    yield up
    up.call.leave(7)
    assert process.process.wait(BOOT_S) == 7, process.output
    assert list(temporary.iterdir()) == [], "nothing of the guest is left"
