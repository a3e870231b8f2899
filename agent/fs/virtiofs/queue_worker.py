"""A thread that serves one virtqueue: a chain taken, answered and completed, then the next.

It sleeps in epoll(7) on the driver's kick and on a stop event of our own. While there is work it asks for no
kicks. The kick is watched by its edges and never read: a read of an eventfd that the front-end shares could
sleep for ever.
"""

import logging
import os
import select
import threading
import time
from collections.abc import Callable
from typing import Final

from agent.fs.virtiofs.device_queue import BadRing, Chain, DeviceQueue
from agent.fs.virtiofs.front_end_descriptors import FREE_SECONDS, Call, signal
from agent.host_os.rate_limited_log import Complaints

log = logging.getLogger(__name__)

LOOK_AGAIN_SECONDS: Final = 1.0
"""A queue is looked at even when nobody kicks: what a driver lost to a missing barrier costs this long."""
SLOW_SECONDS: Final = 10.0
"""A last operation that takes longer is told, once. It is waited for: a seal of many blocks on a slow
enclosure ends by the deadlines of its commands, each for itself."""

Serve = Callable[[Chain], int]
"""Answers a chain; how many bytes were written into it."""


class QueueWorker:
    """One run of one queue, from its start to its stop."""

    def __init__(
        self,
        name: str,
        queue: DeviceQueue,
        kick: int,
        call: Call,
        make_serve: Callable[[], Serve],
        complaints: Complaints,
    ) -> None:
        """`kick` stays the caller's and open until the worker has stopped; `make_serve` is called in the
        worker's own thread."""
        self.queue = queue
        self.broken = False
        self._kick = kick
        self._call = call
        self._make_serve = make_serve
        self._complaints = complaints
        self._stopping = False
        self._stop_event = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._worker = threading.Thread(target=self._work, name=name, daemon=True)

    def start(self) -> None:
        self._worker.start()

    def stop(self) -> int:
        """End it after the request that it is at; the available idx to go on from."""
        self._stopping = True
        signal(self._stop_event)
        thread, since, told = self._worker, time.monotonic(), False
        while thread.is_alive():
            thread.join(FREE_SECONDS)
            self._call.free()
            if not told and time.monotonic() - since > SLOW_SECONDS:
                told = True
                log.warning("%s is still at its last operation; its queue ends after that", thread.name)
        os.close(self._stop_event)
        return self.queue.next_available

    def _work(self) -> None:
        try:
            self._loop(self._make_serve())
        except BadRing as bad:
            self.broken = True
            self._complaints.peer(f"the ring of {self._worker.name}", f"{bad}; the queue is stopped")
        except BaseException:
            # Not of a request: those stay within the session. The other queues go on.
            self.broken = True
            log.exception("%s ended", self._worker.name)

    def _loop(self, serve: Serve) -> None:
        with select.epoll() as poller:
            poller.register(self._kick, select.EPOLLIN | select.EPOLLET)
            poller.register(self._stop_event, select.EPOLLIN)
            self._serve_until_stopped(serve, poller)

    def _serve_until_stopped(self, serve: Serve, poller: select.epoll) -> None:
        queue, call = self.queue, self._call.signal
        pop, push = queue.pop, queue.push
        queue.awake()
        if queue.may_owe_call:
            call()  # one too many is nothing to a driver; for one that never comes it waits for ever
        while not self._stopping:
            chain = pop()
            if chain is not None:
                written = serve(chain)
                if push(chain.head, written):
                    call()
            elif queue.may_sleep():
                poller.poll(LOOK_AGAIN_SECONDS)
                queue.awake()
