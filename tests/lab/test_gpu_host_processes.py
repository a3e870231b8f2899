"""The GPU host's queues at two processes of the agent: kernels from 6.11 on have one for each processor."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from emulator.lab.image import LabImage
from tests.support.lab.gpu_host_up import GpuHostUp, gpu_host_of, pool_of, processes_in
from tests.support.waiting import wait_until

OPTIONS = (
    *("--virtiofs", "--processes", "2", "--media", "memory", "--drive-size", "256M"),
    *("--enclosures", "1", "--read-deadline-ms", "20000"),
)
COUNT, TURNS = 6, 3
SIZES = {"short": 20_000, "long": 200_000}
"""By one GETXATTR, and by a ticket."""


@pytest.fixture(scope="module")
def gpu(lab_image: LabImage, tmp_path_factory: pytest.TempPathFactory) -> Iterator[GpuHostUp]:
    folders = (tmp_path_factory.mktemp(name) for name in ("processes", "state", "gpu-host"))
    with (
        processes_in(next(folders)) as processes,
        pool_of(processes, next(folders), *OPTIONS) as pool,
        gpu_host_of(pool, processes, next(folders)) as up,
    ):
        yield up


def served(gpu: GpuHostUp) -> tuple[str, int, int]:
    """State, starts and hits of the other process."""
    (row,) = gpu.pool.status()["processes"]
    return row["state"], row["starts"], row["hits"]


def get_by_each_processor(gpu: GpuHostUp) -> None:
    for processor in range(2):
        for name, size in SIZES.items():
            found = gpu.call(
                "get_values_by", processor=processor, name=name, count=COUNT, size=size, turns=TURNS
            )
            assert found == {"hits": COUNT * TURNS, "misses": 0, "wrong": 0}


def test_each_process_serves_a_processor_of_the_guest(gpu: GpuHostUp) -> None:
    wait_until(lambda: served(gpu)[0] == "serving", 240, "the other process to serve")
    for name, size in SIZES.items():
        assert gpu.call("put_values", name=name, count=COUNT, size=size) == COUNT
    get_by_each_processor(gpu)
    wait_until(lambda: served(gpu)[2] == COUNT * TURNS * len(SIZES), 60, "gets by one processor")
    (row,) = gpu.pool.status()["processes"]
    os.kill(row["pid"], signal.SIGKILL)
    get_by_each_processor(gpu)
    wait_until(lambda: served(gpu)[:2] == ("serving", 2), 240, "the other process to be started again")
    get_by_each_processor(gpu)
