"""What open files have staged when the agent ends, in order or by a kill."""

from __future__ import annotations

import contextlib
import os
import random
import threading
from collections.abc import Callable
from pathlib import Path

from tests.support.needs import needs_mount
from tests.support.pool_up import PoolUp
from tests.support.waiting import wait_until


def test_an_orderly_end_seals_what_an_open_file_has_staged(make_pool: Callable[..., PoolUp]) -> None:
    """The collector has worked by then, so its queue is connected: an id is not to be connected twice."""
    pool_up = make_pool("--drives", "1")
    files = pool_up.mount / "fs"
    (files / "gone").write_bytes(bytes(5000))
    (files / "gone").unlink()
    data = random.Random(1).randbytes(40_000)

    def collected() -> bool:
        found = pool_up.status()["files"]
        return bool(found["blocks_deleted"])

    wait_until(collected, 30, "the collector to delete a block")
    descriptor = os.open(files / "file", os.O_WRONLY | os.O_CREAT)
    try:
        assert os.write(descriptor, data) == len(data)
        assert pool_up.down() == 0
    finally:
        with contextlib.suppress(OSError):
            os.close(descriptor)
    log = (pool_up.state / "agent.log").read_text()
    assert "could not be sealed" not in log
    assert "sequence" not in log
    pool_up.start_again()
    assert (files / "file").read_bytes() == data


class FileWriter:
    """Writes files of random content, one after the other, and remembers which of them are safe."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.folder = folder
        self.written: dict[str, bytes] = {}
        self.safe: set[str] = set()
        """Closed, or synced while they stay open."""
        self._open: list[int] = []
        self._dice = random.Random(seed)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._work)
        self._thread.start()

    def _work(self) -> None:
        with contextlib.suppress(OSError):
            while not self._stop.is_set():
                self._write_one(f"{self.folder.name}-{len(self.written)}")

    def _write_one(self, name: str) -> None:
        data = self._dice.randbytes(self._dice.choice([10, 4096, 70_001, 1_500_000]))
        self.written[name] = data
        descriptor = os.open(self.folder / name, os.O_WRONLY | os.O_CREAT)
        stays_open = len(self._open) < 5 and self._dice.random() < 0.2
        try:
            for at in range(0, len(data), 50_000):
                os.write(descriptor, data[at : at + 50_000])
            if stays_open:
                os.fsync(descriptor)
        finally:
            if stays_open:
                self._open.append(descriptor)
            else:
                os.close(descriptor)
        self.safe.add(name)

    def end(self) -> None:
        self._stop.set()
        self._thread.join(60)
        assert not self._thread.is_alive(), "a call hangs"
        while self._open:
            with contextlib.suppress(OSError):
                os.close(self._open.pop())


def test_a_killed_agent_loses_no_file_that_was_closed_or_synced(
    make_pool: Callable[..., PoolUp], seed: int
) -> None:
    pool_up = make_pool("--drives", "1")
    written: dict[Path, bytes] = {}
    for life in range(3):
        folder = pool_up.mount / f"fs/life-{life}"
        folder.mkdir()
        writer = FileWriter(folder, seed + life)
        try:
            count = 5 + 10 * life
            wait_until(lambda writer=writer, count=count: len(writer.safe) >= count, 60, "files")
            old = pool_up.kill("agent-process")
        finally:
            writer.end()
        pool_up.wait_restarted("agent-process", old)
        for name, data in writer.written.items():
            if name in writer.safe:
                written[folder / name] = data
            elif (folder / name).exists():
                # Not acknowledged: it may end early, and has no byte that was not written there.
                found = (folder / name).read_bytes()
                assert data.startswith(found), f"seed {seed}: {name}, {len(found)} bytes of {len(data)}"
        assert {each.name for each in folder.iterdir()} <= set(writer.written)
        for path, data in written.items():
            assert path.read_bytes() == data, f"seed {seed}: {path.name} in life {life}"
    assert pool_up.status()["files"]["blocks_lost"] == 0
    assert len(written) > 30


pytestmark = needs_mount
