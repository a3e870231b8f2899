"""The links of a reader to the process that lends it slots (slot_lender.py), each for one call at a time.

Each worker of a reader may have a call under way, and a call may wait for enclosures, here or in the other
process. No more than half of the workers may wait as long as a put may: so many calls are *patient*. Any
other gives way as in agent/remote/long_waits.py. So others are left to serve gets.
"""

import contextlib
import queue
import select
import socket
import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Final

from agent.host_os.workers_on_duty import STUCK_SECONDS, WorkerOnDuty
from agent.pool.errors import PutElsewhere
from agent.pool.write.borrowed_slots import SlotLink
from agent.pool.write.slot_messages import MESSAGE_BYTES_MAX
from agent.remote.fabric import Fabric

TAKE_SECONDS: Final = 0.1
"""For a link that is in use; then the first process stores the values itself."""
ANSWER_SECONDS: Final = 30.0
"""For an answer, beyond the time of a put: so long the other process waits for enclosures."""
_TIMEVAL: Final = struct.Struct("@ll")
"""Seconds and microseconds; of zero the kernel makes no limit."""


class BorrowedLinks:
    """All of a reader. Safe from any thread."""

    def __init__(
        self,
        sockets: Sequence[socket.socket],
        fabric: Fabric,
        put_seconds: float,
        patient: int = 1,
        *,
        lends_single: bool = True,
        duty: Callable[[], WorkerOnDuty | None] = lambda: None,
    ) -> None:
        """`put_seconds`: as long as a put may take. `patient`: calls at once that may take so long.
        `lends_single`: there are links for calls of one value, too. `duty`: of the worker that asks."""
        self._duty = duty
        self._fabric = fabric
        self._values_least = 1 if lends_single else 2
        self._patient, self._counting = patient, threading.Lock()
        self._free: queue.LifoQueue[_Link] = queue.LifoQueue()
        self._whole = len(sockets)
        for each in sockets:
            limit_waits(each, put_seconds + ANSWER_SECONDS)
            self._free.put(_Link(each, duty))

    @contextlib.contextmanager
    def take(self, values: int) -> Iterator[SlotLink]:
        """See `SlotLinks`."""
        if not self._whole or values < self._values_least:
            raise PutElsewhere
        try:
            link = self._free.get_nowait()
        except queue.Empty:
            link = self._wait_for_one()
        with self._counting:
            link.is_patient = self._patient > 0
            self._patient -= link.is_patient
        try:
            yield link
        finally:
            with self._counting:
                self._patient += link.is_patient
            if link.is_whole:
                self._free.put(link)
            else:
                self._whole -= 1

    def _wait_for_one(self) -> "_Link":
        if (duty := self._duty()) is not None:
            duty.is_stuck()
        try:
            return self._free.get(timeout=TAKE_SECONDS)
        except queue.Empty:
            raise PutElsewhere from None

    def namespace(self, nguid: bytes) -> int | None:
        nguids = self._fabric.nguids
        return nguids.index(nguid) if nguid in nguids else None

    def may_land(self, namespace: int, offset: int, size: int, now: float) -> bool:
        """See `SlotLinks`: what was sent and not answered has a fence (agent/remote/fence.py)."""
        fabric = self._fabric
        return fabric.fence.stands(fabric.nguids[namespace], offset, size, now)


class _Link:
    def __init__(self, link: socket.socket, duty: Callable[[], WorkerOnDuty | None]) -> None:
        self._link, self._duty = link, duty
        self._answers = select.poll()
        self._answers.register(link, select.POLLIN)
        self.is_whole = True
        self.is_patient = False

    def exchange(self, message: bytes) -> bytes:
        """See `SlotLink`."""
        try:
            self._link.sendall(message)
            self._let_others_read()
            answer = self._link.recv(MESSAGE_BYTES_MAX + 1)
        except OSError:
            answer = b""
        if not answer:
            self.broken()
            raise PutElsewhere
        return answer

    def _let_others_read(self) -> None:
        """Of the door's workers, where the answer takes long."""
        duty = self._duty()
        if duty is not None and duty.may_hold_up() and not self._answers.poll(STUCK_SECONDS * 1000):
            duty.is_stuck()

    def broken(self) -> None:
        self.is_whole = False
        self._link.close()


def limit_waits(link: socket.socket, seconds: float) -> None:
    """Have the kernel end each wait at a blocking socket after so many seconds, by BlockingIOError.

    A time-out of Python's own would poll before each message."""
    limit = _TIMEVAL.pack(int(seconds), int(seconds % 1 * 1e6))
    for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
        link.setsockopt(socket.SOL_SOCKET, option, limit)
