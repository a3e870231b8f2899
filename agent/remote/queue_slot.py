"""What a worker knows of one enclosure: the queue that it has there, or the try to get one
(remote/channel.py)."""

from __future__ import annotations

from typing import Final

from agent.remote.connect_attempt import ConnectAttempt
from nvmeof.transport import HostQueue

SILENT_SECONDS: Final = 2.0
"""A queue that says nothing for so long, though commands were given up on it, is connected anew: a stream
that lost bytes never finds its step again. Its enclosure is as it was, and so are the other queues there."""


class QueueSlot:
    """One queue to one enclosure, or the try to connect it, and when to try again."""

    __slots__ = ("began", "connecting", "epoch", "next_try", "queue", "waited_for")

    def __init__(self) -> None:
        self.queue: HostQueue | None = None
        self.connecting: ConnectAttempt | None = None
        self.epoch = -1
        self.began = 0
        """The number of its session (agent/pool/flush_tracking.py)."""
        self.next_try = 0.0
        """Before it, no other try with the same session."""
        self.waited_for = False
        """Whether a request has waited for the present try in vain: no other does."""

    def is_silent(self, now: float) -> bool:
        """Whether the queue has said nothing for `SILENT_SECONDS` though it was asked something."""
        since = self.queue.silent_since() if self.queue is not None else None
        return since is not None and now - since >= SILENT_SECONDS
