"""Files of /shared while one of two enclosures is away, and when it is back."""

from __future__ import annotations

import contextlib
import os
import random
import signal
from pathlib import Path

from tests.support.pool_up import SHARED_POOL, PoolUp
from tests.support.processes import Processes
from tests.support.waiting import wait_until

FILES = 24
BYTES = 9000
"""A file so short lies with its name."""


def test_files_are_stored_while_an_enclosure_is_away_and_none_is_older_when_it_is_back(
    processes: Processes, tmp_path: Path, seed: int
) -> None:
    rng = random.Random(seed)
    pool = PoolUp(processes, tmp_path / "state", *SHARED_POOL)
    try:
        base = pool.mount / "shared/shared"
        old = {f"f{number}": rng.randbytes(BYTES) for number in range(FILES)}
        for name, data in old.items():
            (base / name).write_bytes(data)
        new = {name: rng.randbytes(BYTES) for name in old if rng.random() < 0.5}

        def store(name: str, data: bytes) -> bool:
            with contextlib.suppress(OSError):
                (base / f"{name}.tmp").write_bytes(data)
                os.rename(base / f"{name}.tmp", base / name)
                return True
            return False

        stopped = pool.kill("jbof-0", signal.SIGSTOP)
        try:
            for name, data in new.items():
                wait_until(lambda name=name, data=data: store(name, data), 60, "the file to be stored")  # type: ignore[misc]
            assert pool.status()["pool"]["namespaces_left_out"] == 1
            assert {name: (base / name).read_bytes() for name in new} == new
        finally:
            os.kill(stopped, signal.SIGCONT)
        wait_until(lambda: not pool.status()["pool"]["namespaces_left_out"], 90, "the enclosure to count")
        for name, data in old.items():
            with contextlib.suppress(FileNotFoundError):
                assert (base / name).read_bytes() == new.get(name, data)
        assert {name: (base / name).read_bytes() for name in new} == new
        assert all(store(name, data) for name, data in old.items())
        assert {name: (base / name).read_bytes() for name in old} == old
    finally:
        assert pool.down() == 0
