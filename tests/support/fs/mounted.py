"""A door over a tree in memory, for as long as a `with` block lasts."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from agent.fs.doors.door import Door
from agent.fs.doors.make_door import DoorKind, make_door
from agent.fs.doors.mounting import is_mounted
from agent.host_os.workers_on_duty import Roster
from tests.support.fs.memory_filesystem import MemoryFileSystem
from tests.support.pool.inline_runner import inline_runner

KINDS: tuple[DoorKind, ...] = ("dev_fuse", "pyfuse3")


@contextlib.contextmanager
def mounted(
    kind: DoorKind, mountpoint: Path, filesystem: Any | None = None, workers: int = 3
) -> Iterator[Door]:
    with contextlib.suppress(FileExistsError):
        mountpoint.mkdir()
    tree = filesystem or MemoryFileSystem()
    # No runner tells when it waits, so who rests has to find out.
    roster = Roster(workers)
    door = make_door(kind, tree, mountpoint, workers, inline_runner, roster=roster)
    door.start()
    try:
        yield door
    finally:
        door.stop()
        assert not is_mounted(mountpoint)


def python(code: str, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Run Python in a process of its own: what would wait for the mount while holding our GIL (a page
    fault in a mapped file) must not run in the process that serves the mount."""
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
