"""A worker's queue to one enclosure: connected, looked after, connected anew. Read remote/channel.py
first."""

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

from agent.remote.connect_attempt import ConnectAttempt
from agent.remote.enclosure import Enclosure
from agent.remote.fence import COMMAND_SECONDS
from nvmeof.errors import NvmeofError
from nvmeof.host.command import Command
from nvmeof.transport import HostQueue, connect_io_queue

QUEUE_DEPTH: Final = 64
CONNECT_SECONDS: Final = 1.0
CONNECT_WAIT_SECONDS: Final = 0.04
"""How long the request that first wants a queue waits for it to be connected; then it is a miss."""
CONNECT_PATIENT_SECONDS: Final = 0.25
"""The same of each request that has nothing else: of a file."""
RETRY_CONNECT_SECONDS: Final = 0.5
SILENT_SECONDS: Final = 2.0
"""A queue that says nothing for so long, though commands were given up on it, is connected anew: a stream
that lost bytes never finds its step again. Its enclosure is as it was, and so are the other queues there."""


class QueueSlot:
    """One queue to one enclosure, or the try to connect it, and when to try again."""

    def __init__(self, enclosure: Enclosure, queue_id: int, buffers: Sequence[memoryview]) -> None:
        """`buffers` are registered with every queue of the slot."""
        self.enclosure = enclosure
        self.queue: HostQueue | None = None
        self.epoch = -1
        """Of the session that the queue or the try belongs to."""
        self.began = 0
        """The number of that session (agent/pool/write/flush_tracking.py)."""
        self._queue_id = queue_id
        self._buffers = buffers
        self._connecting: ConnectAttempt | None = None
        self._next_try = 0.0
        """Before it, no other try with the same session."""
        self._waited_for = False
        """Whether a request has waited for the present try in vain: no other does."""

    def take(self, now: float, patience: float = 0.0, *, again: bool = False) -> HostQueue | None:
        """The queue; None where there is none within `patience` seconds, and it is then being connected.
        `again`: also where another request has waited for it in vain."""
        enclosure, queue = self.enclosure, self.queue
        if (
            queue is not None
            and self.epoch == enclosure.epoch
            and enclosure.session is not None
            and queue.alive
            and not queue.needs_reconnect
        ):
            oldest = queue.oldest_abandoned()
            if oldest is None:
                return queue
            silent_since = queue.silent_since()
            if silent_since is not None and now - silent_since >= SILENT_SECONDS:
                queue.close()
                self.queue = None
            elif now - oldest < COMMAND_SECONDS:
                return queue
        if self._connecting is not None and self.epoch != enclosure.epoch:
            # Of a session that is gone: a try of the new one need not wait for it.
            self._connecting.give_up()
            self._connecting = None
        if self._connecting is None and not self._begin_to_connect(now):
            return None
        assert self._connecting is not None
        if self._connecting.wait(patience if again or not self._waited_for else 0.0):
            return self._connected()
        self._waited_for = self._waited_for or patience > 0
        return None

    def wait_connected(self, seconds: float) -> None:
        """Until the try that is under way is over, if there is one."""
        if self._connecting is not None:
            self._connecting.wait(seconds)
            self.take(time.monotonic())

    def _begin_to_connect(self, now: float) -> bool:
        enclosure = self.enclosure
        session, epoch, began = enclosure.session, enclosure.epoch, enclosure.began
        queue, self.queue = self.queue, None
        connect: Callable[[], HostQueue]
        if queue is not None and queue.needs_reconnect and self.epoch == epoch and session is not None:
            connect = partial(_again, queue)
        else:
            if queue is not None:
                enclosure.complain(self.epoch)
                queue.close()
            tried = self.epoch == epoch and now < self._next_try
            if session is None or tried or self._queue_id > session.facts.io_queues:
                return False
            connect = partial(connect_io_queue, session, self._queue_id, QUEUE_DEPTH, CONNECT_SECONDS)
        self.epoch, self.began, self._waited_for = epoch, began, False
        self._connecting = ConnectAttempt(connect, f"{enclosure.name}-{self._queue_id}")
        return True

    def _connected(self) -> HostQueue | None:
        assert self._connecting is not None
        queue, self._connecting = self._connecting.queue, None
        if queue is None:
            self._next_try = time.monotonic() + RETRY_CONNECT_SECONDS
            self.enclosure.complain(self.epoch)
            return None
        if self.epoch != self.enclosure.epoch:
            queue.close()
            return None
        for buffer in self._buffers:
            queue.register(buffer)
        self.queue = queue
        return queue

    def close(self) -> None:
        if self._connecting is not None:
            self._connecting.give_up()
            self._connecting = None
        if self.queue is not None:
            self.queue.close()
            self.queue = None


def _again(queue: HostQueue) -> HostQueue:
    queue.reconnect()
    return queue


def submit(slot: QueueSlot, queue: HostQueue, built: Sequence[Command], more: bool) -> str | None:
    """Send the commands of one request; why it could not be done, and nothing is under way then."""
    if len(built) > 1 and not queue.has_room(len(built)):
        # To begin it and give it up would break a queue pair, with all that is under way there.
        submit_each(slot, queue, (), False)  # what waits for it leaves
        return f"the queue has no room for {len(built)} commands"
    why = submit_each(slot, queue, built, more)
    if why is not None:
        # The commands that went out stay in flight until they are abandoned here; the rest never went.
        for command in built:
            if not command.done and command.cid >= 0:
                queue.abandon(command)
    return why


def submit_each(slot: QueueSlot, queue: HostQueue, built: Sequence[Command], more: bool) -> str | None:
    """Send commands; why not all could be. Those that went have an id."""
    try:
        queue.submit_all(built, more=more)
    except NvmeofError as error:
        if not queue.alive:
            slot.enclosure.complain(slot.epoch)
        return str(error)
    return None
