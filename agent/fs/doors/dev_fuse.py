"""The hot door: /dev/fuse, one queue and one thread for each worker, every request run to completion.

Read fuse/session.py first. A worker blocks in `readv` on its clone of the descriptor, has the session answer
in the same thread, and replies with `writev`. What a face has put off (after_reply.py) the worker does then,
before it reads the next request. So it does with requests that gave way (parked_requests.py). A worker's
buffers are one mapping:

    | page 0 ......... 80 bytes | data: 1 MiB, page-aligned | room: 1 MiB, page-aligned |
                       ^ a request is read to here

so that header and arguments of a WRITE end where a page begins, and one read puts its payload where O_DIRECT,
a cipher and a NIC would have it. Any other request runs on into `data`.
"""

import contextlib
import errno
import logging
import os
import select
import threading
import time
from pathlib import Path
from typing import Final

from agent.fs.after_reply import AfterReply, WorkAfterReply
from agent.fs.doors import mounting
from agent.fs.doors.door import GRACE_SECONDS, START_SECONDS, MakeRunner
from agent.fs.doors.mounting import MountError, MountOptions
from agent.fs.doors.parked_requests import Parked, ParkedRequests
from agent.fs.fuse.abi import PAGE_BYTES
from agent.fs.fuse.requests import WRITE_HEAD_BYTES
from agent.fs.fuse.session import AGAIN, FuseSession, Reply
from agent.host_os.payload_memory import payload_memory
from agent.host_os.workers_on_duty import LONG_BYTES, Roster, WorkerOnDuty, reads_always
from agent.pool.steps import Runner

log = logging.getLogger(__name__)

WORKERS_MAX: Final = 256
STOP_SECONDS: Final = 10.0
"""How long a worker may take to end its last operation; operations have shorter deadlines of their own."""
ELSEWHERE_SECONDS: Final = 1.0
"""How long after the unmount a worker may wait for a request; then the door looks for copies of the mount."""

GONE: Final = frozenset({errno.ENODEV, errno.ECONNABORTED})
"""What reading /dev/fuse says after the unmount, and after the connection was aborted."""


class WorkerBuffers:
    """What one worker reads into and answers from: page-aligned, private, mapped once."""

    def __init__(self, transfer_bytes: int) -> None:
        whole = payload_memory(PAGE_BYTES + 2 * transfer_bytes)
        self.request = whole[PAGE_BYTES - WRITE_HEAD_BYTES : PAGE_BYTES + transfer_bytes]
        self.data = whole[PAGE_BYTES : PAGE_BYTES + transfer_bytes]
        self.room = whole[PAGE_BYTES + transfer_bytes :]


class DevFuseDoor:
    """A `Door` (agent/fs/doors/door.py) that speaks to /dev/fuse itself."""

    def __init__(
        self,
        session: FuseSession,
        mountpoint: Path,
        worker_count: int,
        make_runner: MakeRunner,
        options: MountOptions | None = None,
        after_reply: AfterReply | None = None,
        parked: ParkedRequests | None = None,
        roster: Roster | None = None,
    ) -> None:
        """`parked`: where the runners' steps may give way (`WorkerChannel.share_waits`). `roster`: of workers
        whose runners know when they wait; without it every worker reads whenever it is free."""
        if not 1 <= worker_count <= WORKERS_MAX:
            raise ValueError(f"worker_count must be 1 to {WORKERS_MAX}")
        self.session = session
        self.mountpoint = mountpoint
        self._options = options or MountOptions(transfer_bytes=session.transfer_bytes)
        self._worker_count = worker_count
        self._make_runner = make_runner
        self._after_reply = after_reply or AfterReply(0)
        self._parked = ParkedRequests(lambda: False, 0) if parked is None else parked
        self._roster = roster
        self._stopping = False
        self._mounted = False
        self._workers: list[threading.Thread] = []
        self._duties: dict[int, WorkerOnDuty] = {}
        self._is_over = False
        """What is still asked, through a copy of the mount, gets no answer."""
        self._failures: list[BaseException] = []

    def start(self) -> None:
        first = mounting.mount(self.mountpoint, self._options)
        self._mounted = True
        descriptors = [first]
        try:
            while len(descriptors) < self._worker_count:
                descriptors.append(mounting.clone(first))
            self.serve(descriptors)
            self._wait_for_init()
        except BaseException:
            if not self._workers:
                for descriptor in descriptors:
                    os.close(descriptor)
            self.stop(grace_seconds=0)
            raise
        mounting.set_read_ahead(self.mountpoint, self._options.read_ahead_bytes)

    def serve(self, descriptors: list[int]) -> None:
        """Start a worker for each descriptor of a mount; each worker closes its own at its end."""
        for index, descriptor in enumerate(descriptors):
            worker = threading.Thread(
                target=self._work, args=(index, descriptor), name=f"fuse-{index}", daemon=True
            )
            worker.start()
            self._workers.append(worker)

    def wait(self, timeout: float | None = None) -> bool:
        deadline = None if timeout is None else time.monotonic() + timeout
        for worker in self._workers:
            worker.join(None if deadline is None else max(0.0, deadline - time.monotonic()))
            if worker.is_alive():
                return False
        return True

    def stop(self, grace_seconds: float = GRACE_SECONDS) -> None:
        device = mounting.device_of(self.mountpoint) if self._mounted else None
        if self._mounted and mounting.is_mounted(self.mountpoint) and self._serving():
            if not mounting.unmount_when_idle(self.mountpoint, grace_seconds):
                log.warning("%s is busy: its open files end with ENOTCONN", self.mountpoint)
                self._take_away()
        elif self._mounted and mounting.is_mounted(self.mountpoint):
            mounting.unmount(self.mountpoint, lazy=True)
        self._mounted = False
        if not self._wait_for_end(device):
            raise MountError(f"a worker of {self.mountpoint} did not end: an operation hangs")
        self._workers.clear()

    def _wait_for_end(self, device: str | None) -> bool:
        """Until no worker is at an operation. False: one hangs.

        An unmount leaves the copies of the mount in other mount namespaces, which a container engine or
        unshare(1) makes. The kernel then goes on with the connection, and a worker waits for a request that
        need not come. That worker is left behind: the end of the process ends the connection.
        """
        if self.wait(ELSEWHERE_SECONDS):
            return True
        self._is_over = True
        self._end_rest()
        deadline = time.monotonic() + STOP_SECONDS
        while not self.wait(mounting.POLL_SECONDS):
            if device is not None and mounting.is_connected(device) and not self._at_operations():
                log.warning(
                    "%s is mounted in another mount namespace as well: it ends there with this process",
                    self.mountpoint,
                )
                return True
            if time.monotonic() > deadline:
                return False
        return True

    def _at_operations(self) -> bool:
        """Whether a worker does anything else than to wait for a request of the kernel."""
        return any(
            worker.is_alive() and not (index in self._duties and self._duties[index].is_reading)
            for index, worker in enumerate(self._workers)
        )

    def _serving(self) -> bool:
        return any(worker.is_alive() for worker in self._workers)

    def _take_away(self) -> None:
        """End a mount that is in use: nobody gets an answer any more, and the name is free at once."""
        if mounting.may_mount():
            mounting.unmount(self.mountpoint, force=True)
            mounting.unmount(self.mountpoint, lazy=True)
            return
        # Without root the connection cannot be aborted, and a blocked read of /dev/fuse ends by nothing
        # but a request or the end of the mount. So each worker gets a request, sees that it should stop,
        # and closes its queue; the kernel aborts the connection with the last of them.
        root = os.open(self.mountpoint, os.O_PATH | os.O_DIRECTORY)
        try:
            mounting.unmount(self.mountpoint, lazy=True)
            self._stopping = True
            self._end_rest()
            deadline = time.monotonic() + STOP_SECONDS
            while self._serving() and time.monotonic() < deadline:
                waker = threading.Thread(target=_knock, args=(root,), name="fuse-knock", daemon=True)
                waker.start()
                waker.join(mounting.POLL_SECONDS)
        finally:
            os.close(root)

    def _wait_for_init(self) -> None:
        deadline = time.monotonic() + START_SECONDS
        while not self.session.initialised.wait(0.05):
            if self._failures:
                raise MountError(f"a worker could not start: {self._failures[0]}") from self._failures[0]
            if time.monotonic() > deadline or not self._serving():
                raise MountError("the kernel and the door did not agree on a protocol (INIT)")

    def _work(self, index: int, descriptor: int) -> None:
        after = self._after_reply.join()
        duty = reads_always() if self._roster is None else self._roster.workers[index]
        self._duties[index] = duty
        try:
            runner = self._make_runner(index)
            buffers = WorkerBuffers(self.session.transfer_bytes)
            self._loop(descriptor, buffers, runner, after, duty)
        except BaseException as failure:
            # Not of a request: those stay within the session. Without this worker the others go on, and
            # when the last is gone the kernel answers ENOTCONN for us.
            self._failures.append(failure)
            log.exception("worker %d of %s ended", index, self.mountpoint)
        finally:
            after.leave()
            duty.leave()
            os.close(descriptor)
            self._parked.leave(self._worker_count)

    def _end_rest(self) -> None:
        if self._roster is not None:
            self._roster.close()

    def _loop(
        self,
        descriptor: int,
        buffers: WorkerBuffers,
        runner: Runner,
        after: WorkAfterReply,
        duty: WorkerOnDuty,
    ) -> None:
        # Looked up once: this loop is the price of every request.
        answer, readv, writev = self.session.answer, os.readv, os.writev
        request, data, room = buffers.request, buffers.data, buffers.room
        read_into, parked, kernel = [request], self._parked, select.poll()
        kernel.register(descriptor, select.POLLIN)
        duty.requests_wait = lambda: bool(kernel.poll(0))
        while duty.ready() and not self._stopping:
            try:
                received = readv(descriptor, read_into)
            except OSError as error:
                if error.errno in GONE:
                    self._end_rest()
                    return
                # ENOENT: the request was interrupted before we had it. EINTR and EAGAIN: nothing happened.
                if error.errno in (errno.ENOENT, errno.EINTR, errno.EAGAIN):
                    duty.began(is_long=False)
                    continue
                raise
            duty.began(is_long=received >= LONG_BYTES)
            if self._is_over:
                return  # the kernel answers in our place, as this worker closes its queue
            after.is_free = False
            reply = answer(request, received, data, room, runner)
            if reply is AGAIN:
                is_aside = parked.put(request[:received], descriptor)
                reply = None if is_aside else self.session.refusal_of(request)
            if reply is not None:
                try:
                    writev(descriptor, reply)
                except OSError as error:
                    self._reply_failed(descriptor, request, reply, error, runner)
            if after.due:
                duty.is_stuck()
                self._do_after_reply(after, runner)
            if len(parked):
                self._serve_parked(kernel, data, room, runner)
            after.is_free = True

    def _serve_parked(self, kernel: select.poll, data: memoryview, room: memoryview, runner: Runner) -> None:
        """Serve what was put aside: one request before the next of the kernel, and all while the kernel has
        none. Those that give way once more are asked one after the other, for they may wait for several
        enclosures. Nobody is served whose mount has gone: each might hold up the end of the door."""
        in_vain = number = 0
        while in_vain < len(self._parked) and not self._stopping:
            news = kernel.poll(0)
            # Whichever worker takes the kernel's request comes by here afterwards.
            if news and (number or news[0][1] != select.POLLIN):
                return
            parked = self._parked.take()
            if parked is None:
                return
            number += 1
            in_vain = 0 if self._serve_again(parked, data, room, runner) else in_vain + 1

    def _serve_again(self, parked: Parked, data: memoryview, room: memoryview, runner: Runner) -> bool:
        request, descriptor = memoryview(parked.request), parked.descriptor
        reply = self.session.answer(request, len(request), data, room, runner)
        if reply is AGAIN:
            self._parked.put_back(parked)
            return False
        try:
            if reply is not None:
                os.writev(descriptor, reply)
        except OSError as error:
            assert reply is not None
            self._reply_failed(descriptor, request, reply, error, runner)
        finally:
            os.close(descriptor)
        return True

    def _do_after_reply(self, after: WorkAfterReply, runner: Runner) -> None:
        try:
            after.run(runner)
        except BaseException as bug:
            self.session.complaints.bug("work after a reply", bug)

    def _reply_failed(
        self, descriptor: int, request: memoryview, reply: Reply, error: OSError, runner: Runner
    ) -> None:
        if error.errno in GONE:
            return  # the next read says so, too
        if error.errno == errno.ENOENT:
            self.session.reply_was_lost(request, reply, runner)
            return
        self.session.complaints.bug("a reply that the kernel refused", error)
        with contextlib.suppress(OSError):
            os.writev(descriptor, self.session.refusal_of(request))


def _knock(root: int) -> None:
    with contextlib.suppress(OSError):
        os.fstatvfs(root)  # the kernel may answer a stat by itself
