"""One try to connect a queue, on a thread of its own that lasts as long as the try.

An enclosure that hangs lets a connection be opened and then says nothing, and a connection may take seconds.
A request has milliseconds. So the worker waits for the try a moment at most (agent/remote/queue_slot.py);
after that the request is a miss.
"""

import logging
import threading
from collections.abc import Callable

from nvmeof.errors import NvmeofError
from nvmeof.linux_limits import SureThread
from nvmeof.transport import HostQueue

log = logging.getLogger(__name__)


class ConnectAttempt:
    """`connect` runs on a thread; it returns a queue, or raises `NvmeofError` or OSError.

    The queue belongs to the maker of the attempt once `wait` has returned True.
    """

    def __init__(self, connect: Callable[[], HostQueue], name: str) -> None:
        self.queue: HostQueue | None = None
        """The queue, once there is one; None after a try that failed."""
        self._connect = connect
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._unwanted = False
        try:
            SureThread(self._run, f"connect-{name}").start()
        except RuntimeError as refused:
            # Linux has no thread for it now: a try that failed.
            log.debug("connect-%s: %s", name, refused)
            self._unwanted = True
            self._over.set()

    def wait(self, seconds: float) -> bool:
        """Whether the try is over, waiting for that at most so long."""
        return self._over.wait(seconds)

    def give_up(self) -> None:
        """Nobody wants the queue any more: it is closed, at once or as soon as it is there."""
        with self._lock:
            self._unwanted = True
            queue, self.queue = self.queue, None
        if queue is not None:
            queue.close()

    def _run(self) -> None:
        queue = None
        try:
            queue = self._connect()
        except (NvmeofError, OSError) as error:
            log.debug("%s: %s", threading.current_thread().name, error)
        except Exception:
            # A bug: the requests miss, as for an enclosure that is away, and the log says why.
            log.exception("%s", threading.current_thread().name)
        with self._lock:
            if not self._unwanted:
                self.queue, queue = queue, None
        self._over.set()
        if queue is not None:
            queue.close()
