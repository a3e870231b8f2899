"""Channels of events and completion queues as a queue waits for them. Read `verbs_provider.py` first.

Apart from it because this runs with every command, and is compiled: a thread that drives the emulated device
asks its condition after every burst.
"""

import contextlib
import select
import time
from collections.abc import Callable
from typing import Any, Final, TypeAlias

from nvmeof.errors import ConnectionLost

POLL_AT_MOST: Final = 64
"""Completions taken in one call."""

Taken: TypeAlias = tuple[int, int, int, int, int, int]
"""A completion: number of the queue pair, id of the work request, status, bytes, the R_Key that was
invalidated (where the flags say so), flags."""


class Channel:
    """A channel with its descriptor, which is readable while an event waits."""

    def __init__(self, channel: Any, fd: int) -> None:
        self.channel = channel
        self.fd = fd
        # The emulator's events lie in this process: to count them saves a system call with every look.
        self._events: Any = getattr(channel, "events", None)
        self._poll = select.poll()
        self._poll.register(fd, select.POLLIN)

    def waits(self) -> bool:
        return bool(self._poll.poll(0)) if self._events is None else len(self._events) > 0

    def wait(self, seconds: float) -> bool:
        """Until an event waits; False when it did not come in time."""
        return bool(self._poll.poll(seconds * 1000))


class Completions:
    """A completion queue and the ways to wait for it. Used by one thread or task.

    `provider` is the name of the package that `queue` is of, `failure` the exception that it raises.
    """

    def __init__(
        self, context: Any, queue: Any, channel: Channel, provider: str, failure: type[Exception]
    ) -> None:
        self._context = context
        self._driven = hasattr(getattr(context, "device", None), "drive_until")
        self._provider, self._failure = provider, failure
        self.channel, self.fd = channel.channel, channel.fd
        self.queue = queue
        # The device's own queue, which this process can look into without a call of the provider.
        self._row: Any = self.queue.native if self._driven else None
        self._poll = select.poll()
        self._poll.register(self.fd, select.POLLIN)

    def watch(self, fd: int) -> None:
        """Let `wait` return for this descriptor too."""
        self._poll.register(fd, select.POLLIN)

    def arm(self) -> None:
        """`fd` becomes readable with the next completion; look once more before waiting."""
        self.queue.req_notify()

    def consume(self) -> None:
        """Take the event that made `fd` readable."""
        with contextlib.suppress(self._failure):  # it was none of ours, or was taken already
            self.channel.get_cq_event(self.queue)
            self.queue.ack_events(1)

    def take(self) -> list[Taken]:
        """What has completed. Raises what the provider raises."""
        row = self._row
        if row is not None:
            # The emulator's `poll` would look at its socket first, and so does `wait`, which comes next.
            if not len(row):
                return []
            return [
                (one.qp_num, one.wr_id, int(one.status), one.byte_len, one.imm, int(one.flags))
                for one in row.poll(POLL_AT_MOST)
            ]
        count, completions = self.queue.poll(POLL_AT_MOST)
        if not count:
            return []
        return [
            (one.qp_num, one.wr_id, int(one.status), one.byte_len, one.imm_data, int(one.wc_flags))
            for one in completions
        ]

    def wait(self, deadline: float, also: Callable[[], object] = lambda: False) -> None:
        """Until there may be a completion, `also()` holds (asked while driving), or `deadline` has come."""
        if self._driven:
            row = self._row
            try:
                self._context.device.drive_until(lambda: len(row) or also(), deadline)
            except Exception as error:
                raise ConnectionLost(f"{self._provider}: {error}") from error
            return
        left = deadline - time.monotonic()
        if left > 0:
            for fd, _ in self._poll.poll(left * 1000):
                if fd == self.fd:
                    self.consume()

    @property
    def needs_arming(self) -> bool:
        """Whether `arm` has to be called before `wait`."""
        return not self._driven

    def close(self) -> None:
        self.queue.close()
        self.channel.close()
