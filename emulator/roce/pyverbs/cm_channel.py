"""Event channels of the connection manager. Part of `pyverbs.cmid`.

A channel serves connections of several devices, each with a lock of its own, so it has a lock, too: the
innermost, held for a moment only.
"""

import errno
import os
import select
import threading
from collections.abc import Callable
from typing import Final, NamedTuple

from emulator.roce.cm.connection import CmEvent, Connection
from emulator.roce.cm.events import CmEventType
from emulator.roce.pyverbs.base import EventRow, PyverbsObject
from emulator.roce.pyverbs.pyverbs_error import PyverbsRDMAError
from emulator.roce.runtime.channel import EventChannel
from emulator.roce.runtime.device import Device
from emulator.roce.runtime.errors import DeviceClosed

LOOK_AGAIN_MS: Final = 100
"""A thread that waits for several devices checks this often whether the channel is still open."""


class ChannelEvent(NamedTuple):
    """An entry of a channel: an event of a CMID with or without a connection."""

    type: CmEventType
    cmid: PyverbsObject | None
    event: CmEvent | None = None
    status: int = 0


class CMEventChannel(EventRow, PyverbsObject):
    """A row of events behind a file descriptor, readable while there are any."""

    __slots__ = ("_lock", "devices", "events")

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.events: EventChannel[ChannelEvent] = EventChannel()
        """The row itself: a driving thread counts it after every burst. Not in pyverbs."""
        # The descriptor of librdmacm blocks; a program that wants EAGAIN sets O_NONBLOCK on it.
        os.set_blocking(self.events.fileno(), True)
        self.devices: set[Device] = set()
        """The sources of its events."""

    def __del__(self) -> None:
        if getattr(self, "events", None) is not None:
            self.events.close()

    def close(self) -> None:
        """Close the descriptor; events that wait are lost, and a waiting thread gets EBADF."""
        with self._lock:
            self.events.close()
        for device in tuple(self.devices):
            if not device.closed:
                with device.turn():
                    pass  # the driving thread checks its condition again
        self.devices.clear()

    def happened(self, event: CmEvent) -> None:
        """The sink of connections: with their device's lock held. Not in pyverbs."""
        with self._lock:
            self.events.push(ChannelEvent(event.type, None, event, event.status))

    def tell(self, cmid: PyverbsObject, kind: CmEventType, status: int = 0) -> None:
        """An event of a CMID that has no connection. Not in pyverbs."""
        with self._lock:
            self.events.push(ChannelEvent(kind, cmid, None, status))

    def forget(self, connection: Connection | None, cmid: PyverbsObject) -> None:
        """Drop the events of an id that is destroyed (rdma_destroy_id). Not in pyverbs."""
        self.discard(
            lambda one: one.cmid is cmid or (one.event is not None and one.event.connection is connection)
        )

    def discard(self, unwanted: Callable[[ChannelEvent], bool]) -> None:
        """Drop events that wait. Not in pyverbs."""
        with self._lock:
            self.events.discard(unwanted)

    def take(self, *, wait: bool) -> ChannelEvent | None:
        """The next event; without `wait`, None where there is none. Not in pyverbs.

        PyverbsRDMAError: EBADF when the channel is closed before or meanwhile.
        """
        while True:
            with self._lock:
                if self.events.closed:
                    raise PyverbsRDMAError("Failed to create CMEvent", errno.EBADF)
                if len(self.events):
                    return self.events.pop()
            if not wait:
                return None
            self._wait()

    def _wait(self) -> None:
        """Wait for an event: with one device by driving it; with more their progress threads drive."""
        devices = tuple(self.devices)
        if len(devices) == 1:
            try:
                devices[0].drive_until(lambda: len(self.events) or self.events.closed, None)
                return
            except DeviceClosed:
                self.devices.discard(devices[0])
        with self._lock:
            if self.events.closed:
                return
            poll = select.poll()
            poll.register(self.fd, select.POLLIN)
        poll.poll(LOOK_AGAIN_MS)

    @property
    def blocking(self) -> bool:
        """Whether the descriptor blocks. Not in pyverbs."""
        with self._lock:
            return not self.events.closed and os.get_blocking(self.fd)
