"""A small `/shared` that is full: what is open is kept, a close tells the truth, and so does a stat."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.fs.two_agents import data_of
from tests.support.pool_up import PoolUp
from tests.support.processes import Processes
from tests.support.waiting import wait_until

MIB = 1 << 20
LENGTH = 8 * MIB
SMALL_POOL = ("--drive-size", "256M", "--drives", "2", "--enclosures", "2", "--read-deadline-ms", "10000")
WRITER = """
import os, sys
fd = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT)
for number in range(8):
    os.pwrite(fd, bytes(1 << 20), number << 20)
print("written", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def pool(processes: Processes, tmp_path: Path) -> Iterator[PoolUp]:
    pool = PoolUp(processes, tmp_path / "state", *SMALL_POOL)
    yield pool
    assert pool.down() == 0


def held(pool: PoolUp) -> int:
    return next(row["held"] for row in pool.status()["bounds"] if row["name"] == "held-keys")


def fill(base: Path, name: str) -> list[Path]:
    """Store twice as many files of a chunk as there is room for."""
    found = os.statvfs(base)
    paths = [base / f"{name}{number}" for number in range(2 * found.f_blocks * found.f_frsize // MIB)]
    for number, path in enumerate(paths):
        path.write_bytes(data_of(number, MIB))
    return paths


def readable(path: Path, wanted: bytes) -> bool:
    try:
        found = path.read_bytes()
    except FileNotFoundError:
        return False
    assert found == wanted, "a wrong byte"
    return True


def test_a_file_that_is_written_amid_evictions_is_stored_whole(pool: PoolUp, seed: int) -> None:
    base, data = pool.mount / "shared/shared", data_of(seed, LENGTH)
    descriptor = os.open(base / "f", os.O_RDWR | os.O_CREAT)
    assert sum(os.pwrite(descriptor, data[at : at + MIB], at) for at in range(0, LENGTH, MIB)) == LENGTH
    others = fill(base, "g")
    assert not others[0].exists(), "the volume has evicted"
    assert b"".join(os.pread(descriptor, MIB, at) for at in range(0, LENGTH, MIB)) == data
    os.close(descriptor)
    assert readable(base / "f", data)


def test_a_stat_of_a_full_volume_says_what_an_open_says(pool: PoolUp) -> None:
    base = pool.mount / "shared/shared"
    paths = fill(base, "g")
    wanted = {path: data_of(number, MIB) for number, path in enumerate(paths)}
    there = [path for path in paths if path.exists()]
    assert 0 < len(there) < len(paths)
    assert [path for path in paths if readable(path, wanted[path])] == there
    gone = next(path for path in paths if path not in there)
    descriptor = os.open(gone, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    os.write(descriptor, b"new")
    os.close(descriptor)
    assert readable(gone, b"new")


def test_a_writer_that_is_killed_holds_nothing(pool: PoolUp) -> None:
    base = pool.mount / "shared/shared"
    with subprocess.Popen(
        [sys.executable, "-c", WRITER, base / "f"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as writer:
        assert writer.stdout is not None
        assert writer.stdout.readline() == b"written\n"
        wait_until(lambda: held(pool) == 8, 30, "all chunks to be held")
        writer.send_signal(signal.SIGKILL)
    wait_until(lambda: not held(pool), 30, "the holds to go")
    assert not (base / "f").exists()
