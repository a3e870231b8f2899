"""A mount that another mount namespace holds, too: the door ends all the same."""

from __future__ import annotations

import os
import subprocess
import threading
from pathlib import Path

import pytest

from agent.fs.doors.dev_fuse import DevFuseDoor
from agent.fs.fuse.session import FuseSession
from agent.host_os.workers_on_duty import Roster
from tests.support.fs.memory_filesystem import MemoryFileSystem
from tests.support.needs import needs_mount_as_root
from tests.support.pool.inline_runner import inline_runner
from tests.support.waiting import wait_until

pytestmark = needs_mount_as_root

WORKERS = 2


def _workers() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name.startswith("fuse-")}


@pytest.mark.expects_log("in another mount namespace")
@pytest.mark.parametrize("takes_turns", [False, True])
def test_a_copy_of_the_mount_keeps_no_door_from_its_end(tmp_path: Path, takes_turns: bool) -> None:
    place = tmp_path / "mount"
    place.mkdir()
    before = _workers()
    roster = Roster(WORKERS) if takes_turns else None
    door = DevFuseDoor(FuseSession(MemoryFileSystem()), place, WORKERS, inline_runner, roster=roster)
    door.start()
    try:
        (place / "name").write_bytes(b"content")
        command = ["unshare", "--mount", "--propagation", "private", "sh", "-c", "echo there; read end"]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as elsewhere:
            assert elsewhere.stdin is not None
            assert elsewhere.stdout is not None
            assert elsewhere.stdout.readline() == b"there\n"
            there = Path(f"/proc/{elsewhere.pid}/root{place}")
            assert (there / "name").read_bytes() == b"content"
            door.stop()
            assert not os.path.ismount(place)
            for _ in range(WORKERS):
                with pytest.raises(OSError):  # ECONNABORTED of a worker, ENOTCONN where none is left
                    (there / "name").read_bytes()
            elsewhere.stdin.close()
        wait_until(lambda: not _workers() - before, what="the workers to end")
    finally:
        door.stop(grace_seconds=0)
