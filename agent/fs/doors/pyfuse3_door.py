"""The reference door: the same operations through pyfuse3 and libfuse, selectable and the judge of ours.

Requests come in on one trio loop in a thread of its own; one of `worker_count` slots (a thread, its runner
and a read buffer) settles each operation. It has a third of the hot door's speed, and serves differential
tests.

pyfuse3 carries no fallocate (EOPNOTSUPP), no parallel direct writes and no skipping of FLUSH. Its session is
global, so a process has one such door at a time.
"""

import errno
import logging
import threading
import time
from pathlib import Path

import pyfuse3
import trio

from agent.fs.doors import mounting
from agent.fs.doors.door import GRACE_SECONDS, START_SECONDS, MakeRunner
from agent.fs.doors.mounting import MountError, MountOptions
from agent.fs.doors.pyfuse3_handlers import Handlers, Slot
from agent.fs.interface import Tree
from agent.host_os.rate_limited_log import Complaints

log = logging.getLogger(__name__)

STOP_SECONDS = 10.0

_one_door = threading.Lock()


class Pyfuse3Door:
    """A `Door` (agent/fs/doors/door.py) by way of libfuse."""

    def __init__(
        self,
        tree: Tree,
        mountpoint: Path,
        worker_count: int,
        make_runner: MakeRunner,
        options: MountOptions | None = None,
    ) -> None:
        self.mountpoint = mountpoint
        self._options = options or MountOptions()
        self._worker_count = worker_count
        self._make_runner = make_runner
        self._tree = tree
        self._thread: threading.Thread | None = None
        self._token: trio.lowlevel.TrioToken | None = None
        self._failure: BaseException | None = None
        self.initialised = threading.Event()
        self.complaints = Complaints(log)

    def start(self) -> None:
        if not _one_door.acquire(blocking=False):
            raise MountError("pyfuse3 serves one mount in a process, and there is one already")
        try:
            mounting.clear_dead_mount(self.mountpoint)
            if not self.mountpoint.is_dir():
                raise MountError(f"{self.mountpoint} is not a directory")
            self._thread = threading.Thread(target=self._serve, name="pyfuse3-door", daemon=True)
            self._thread.start()
        except BaseException:
            _one_door.release()
            raise
        deadline = time.monotonic() + START_SECONDS
        while not self.initialised.wait(0.05):
            if time.monotonic() > deadline or not self._thread.is_alive():
                self.stop(grace_seconds=0)
                raise MountError(f"pyfuse3 could not mount {self.mountpoint}") from self._failure
        if mounting.probe(self.mountpoint) in (None, errno.ENOTCONN):
            # libfuse has the last word on INIT, after the hook that we waited for.
            self.stop(grace_seconds=0)
            raise MountError(f"libfuse and the kernel did not agree on {self.mountpoint}")
        mounting.set_read_ahead(self.mountpoint, self._options.read_ahead_bytes)

    def wait(self, timeout: float | None = None) -> bool:
        if self._thread is None:
            return True
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def stop(self, grace_seconds: float = GRACE_SECONDS) -> None:
        thread = self._thread
        if thread is None:
            return
        if mounting.is_mounted(self.mountpoint):
            if not thread.is_alive():
                mounting.unmount(self.mountpoint, lazy=True)
            elif not mounting.unmount_when_idle(self.mountpoint, grace_seconds):
                log.warning("%s is busy: its open files end with ENOTCONN", self.mountpoint)
                if mounting.may_mount():
                    mounting.unmount(self.mountpoint, force=True)
                mounting.unmount(self.mountpoint, lazy=True)
                self._terminate()
        if not self.wait(STOP_SECONDS):
            raise MountError(f"the door of {self.mountpoint} did not end: an operation hangs")
        self._thread = None

    def _terminate(self) -> None:
        # Where the mount was only detached, the loop does not see the end by itself.
        if self._token is None:
            return
        try:
            trio.from_thread.run_sync(pyfuse3.terminate, trio_token=self._token)
        except trio.RunFinishedError:
            return

    def _serve(self) -> None:
        mounted = False
        slots = [
            Slot(index, self._make_runner, self._options.transfer_bytes)
            for index in range(self._worker_count)
        ]
        try:
            handlers = Handlers(self._tree, slots, self.complaints, self.initialised.set)
            pyfuse3.init(handlers, str(self.mountpoint), self._mount_options())
            mounted = True
            self._run_to_its_end()
        except BaseException as failure:
            self._failure = failure
            log.exception("the door of %s ended", self.mountpoint)
        finally:
            if mounted:
                pyfuse3.close(unmount=False)
            for slot in slots:
                slot.close(STOP_SECONDS)
            _one_door.release()

    def _run_to_its_end(self) -> None:
        try:
            trio.run(self._main)
        except* ConnectionAbortedError:
            # libfuse takes ENODEV alone for the end; the kernel says ECONNABORTED where the connection was
            # aborted (by an operator, or amid the unmount).
            log.debug("the connection of %s was aborted", self.mountpoint)

    async def _main(self) -> None:
        self._token = trio.lowlevel.current_trio_token()
        await pyfuse3.main(min_tasks=1, max_tasks=2 * self._worker_count + 8)

    def _mount_options(self) -> set[str]:
        options = {
            f"fsname={mounting.SUBTYPE}",
            f"subtype={mounting.SUBTYPE}",
            "default_permissions",
        }  # max_read is left out: libfuse wants it in INIT as well, where pyfuse3 has no say; 1 MiB holds
        allow_other = self._options.allow_other
        if allow_other or (allow_other is None and mounting.may_mount()):
            options.add("allow_other")
        return options
