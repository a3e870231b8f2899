"""A thread that serves one virtqueue: a chain taken, answered and completed, then the next.

It sleeps in poll(2) on the driver's kick and on an event of our own that tells it to stop. While there is
work it asks for no kicks.
"""

from __future__ import annotations

import logging
import os
import select
import threading
from collections.abc import Callable

from agent.fs.complaints import Complaints
from agent.fs.virtiofs.device_queue import BadRing, Chain, DeviceQueue
from agent.fs.virtiofs.surroundings import drain, signal

log = logging.getLogger(__name__)

LOOK_AGAIN_SECONDS = 1.0
"""A queue is looked at even when nobody kicks: what a driver lost to a missing barrier costs this long."""
STOP_SECONDS = 10.0
"""How long a worker may take to end its last operation; operations have shorter deadlines of their own."""

Serve = Callable[[Chain], int]
"""Answers a chain; how many bytes were written into it."""


class WorkerStuck(Exception):
    """A worker did not end: its operation hangs."""


class QueueWorker:
    """One run of one queue, from its start to its stop."""

    def __init__(
        self,
        name: str,
        queue: DeviceQueue,
        kick: int,
        call: int,
        make_serve: Callable[[], Serve],
        complaints: Complaints,
    ) -> None:
        """`kick` and `call` stay the caller's and open until the worker has stopped; `make_serve` is called
        in the worker's own thread."""
        self.queue = queue
        self.broken = False
        self._kick = kick
        self._call = call
        self._make_serve = make_serve
        self._complaints = complaints
        self._stopping = False
        self._stop_event = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> int:
        """End it after the request that it is at; the available idx to go on from."""
        self._stopping = True
        signal(self._stop_event)
        self._thread.join(STOP_SECONDS)
        if self._thread.is_alive():
            raise WorkerStuck(f"{self._thread.name} did not end: an operation hangs")
        os.close(self._stop_event)
        return self.queue.next_available

    def _work(self) -> None:
        try:
            self._loop(self._make_serve())
        except BadRing as bad:
            self.broken = True
            self._complaints.peer(f"the ring of {self._thread.name}", f"{bad}; the queue is stopped")
        except BaseException:
            # Not of a request: those stay within the session. The other queues go on.
            self.broken = True
            log.exception("%s ended", self._thread.name)

    def _loop(self, serve: Serve) -> None:
        queue, call = self.queue, self._call
        pop, push = queue.pop, queue.push
        poller = select.poll()
        poller.register(self._kick, select.POLLIN)
        poller.register(self._stop_event, select.POLLIN)
        queue.awake()
        while not self._stopping:
            chain = pop()
            if chain is not None:
                written = serve(chain)
                if push(chain.head, written):
                    signal(call)
            elif queue.may_sleep():
                poller.poll(LOOK_AGAIN_SECONDS * 1000)
                drain(self._kick)
                queue.awake()
