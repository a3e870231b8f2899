"""Reads that the hot door puts aside on a real mount: others are served, then these are answered."""

from __future__ import annotations

import contextlib
import errno
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from agent.fs.doors.dev_fuse import DevFuseDoor
from agent.fs.doors.parked_requests import ParkedRequests
from agent.fs.fuse.session import FuseSession
from agent.pool.steps import GaveWay
from tests.support.fs.memory_filesystem import MemoryFileSystem
from tests.support.needs import needs_mount_as_root
from tests.support.pool.inline_runner import inline_runner
from tests.support.waiting import wait_until

pytestmark = needs_mount_as_root

WORKERS = 2
CONTENT = bytes(range(256)) * 32


class SilentFlash(MemoryFileSystem):
    """While it is silent one read waits, and every other one gives way."""

    def __init__(self) -> None:
        super().__init__()
        self.silent = False
        self.answers = threading.Event()
        self._place = threading.Lock()

    def has_room(self) -> bool:
        return not self._place.locked()

    def read(self, ino: int, handle: int, offset: int, into: memoryview) -> Any:
        if self.silent:
            if not self._place.acquire(blocking=False):
                raise GaveWay
            try:
                assert self.answers.wait(60)
            finally:
                self._place.release()
        return super().read(ino, handle, offset, into)


class Rig:
    def __init__(self, place: Path) -> None:
        place.mkdir()
        self.place, self.flash = place, SilentFlash()
        self.parked = ParkedRequests(self.flash.has_room)
        session = FuseSession(self.flash)
        self.door = DevFuseDoor(session, place, WORKERS, inline_runner, parked=self.parked)
        self.door.start()
        for number in range(4):
            (place / str(number)).write_bytes(CONTENT)

    def read(self, number: int) -> bytes | int:
        """What a program reads, past the page cache, or the errno that it gets."""
        try:
            descriptor = os.open(self.place / str(number), os.O_RDONLY | os.O_DIRECT)
        except OSError as refused:
            return refused.errno or 0
        try:
            return os.pread(descriptor, len(CONTENT), 0)
        except OSError as refused:
            return refused.errno or 0
        finally:
            with contextlib.suppress(
                OSError
            ):  # the mount has gone, and the descriptor is closed all the same
                os.close(descriptor)


def test_others_are_served_beside_reads_that_wait_and_these_are_answered(tmp_path: Path) -> None:
    rig = Rig(tmp_path / "mount")
    try:
        rig.flash.silent = True
        with ThreadPoolExecutor(4) as programs:
            reads = [programs.submit(rig.read, number) for number in range(4)]
            try:
                wait_until(lambda: len(rig.parked) == 3, what="three reads to be put aside")
                assert sorted(os.listdir(rig.place)) == ["0", "1", "2", "3"], "one worker is free"
                assert not any(read.done() for read in reads)
            finally:
                rig.flash.answers.set()
            assert [read.result(60) for read in reads] == [CONTENT] * 4
        assert not len(rig.parked)
    finally:
        rig.flash.answers.set()
        rig.door.stop()


@pytest.mark.expects_log("is busy", "Transport endpoint")
def test_the_end_of_a_door_ends_what_it_put_aside(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    rig = Rig(tmp_path / "mount")
    rig.flash.silent = True
    with ThreadPoolExecutor(2) as programs:
        reads = [programs.submit(rig.read, number) for number in range(2)]
        stopper = threading.Thread(target=rig.door.stop, args=(0.1,))
        try:
            wait_until(lambda: len(rig.parked) == 1, what="a read to be put aside")
            stopper.start()
            # Nobody waits for the worker that waits: the mount is taken away from under both.
            assert {read.result(60) for read in reads} <= {errno.ENOTCONN, errno.ECONNABORTED}
        finally:
            rig.flash.answers.set()
        stopper.join(60)
    assert not stopper.is_alive()
    assert not len(rig.parked)
    wait_until(lambda: len(os.listdir("/proc/self/fd")) <= before, what="its descriptors to be closed")
