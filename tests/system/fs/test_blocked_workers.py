"""A door one of whose workers blocks where nobody knows of it: others read in its place."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from agent.fs.interface import Outcome
from tests.support.fs.memory_filesystem import MemoryFileSystem
from tests.support.fs.mounted import mounted
from tests.support.needs import needs_mount_as_root
from tests.support.waiting import wait_until

pytestmark = needs_mount_as_root


class Blocks(MemoryFileSystem):
    """Reads wait, from `blocked` on, until they are let go."""

    def __init__(self, blocked: int) -> None:
        super().__init__(direct_io=True)
        self.blocked, self.waiting, self.go = blocked, 0, threading.Event()

    def read(self, ino: int, handle: int, offset: int, into: memoryview) -> Outcome[int]:
        if offset < self.blocked and not self.go.is_set():
            self.waiting += 1
            self.go.wait(60)
        return super().read(ino, handle, offset, into)


@pytest.mark.parametrize("blocked", [1, 2])
def test_requests_are_served_while_workers_block(tmp_path: Path, blocked: int) -> None:
    tree = Blocks(blocked)
    with mounted("dev_fuse", tmp_path / "mount", tree, workers=3):
        path = tmp_path / "mount" / "file"
        path.write_bytes(bytes(range(100)))
        file = os.open(path, os.O_RDONLY)
        threads = [threading.Thread(target=os.pread, args=(file, 1, at)) for at in range(blocked)]
        try:
            for thread in threads:
                thread.start()
            wait_until(lambda: tree.waiting == blocked, what="reads that block")
            for at in range(50, 90):
                assert os.pread(file, 1, at) == bytes([at])
        finally:
            tree.go.set()
            for thread in threads:
                thread.join()
            os.close(file)


def test_a_door_ends_while_workers_rest(tmp_path: Path) -> None:
    for _ in range(5):
        with mounted("dev_fuse", tmp_path / "mount", workers=8):
            assert os.listdir(tmp_path / "mount") == []
