"""The links of a reader to the process that lends it slots (slot_lender.py), each for one call at a time."""

import contextlib
import queue
import socket
from collections.abc import Iterator, Sequence
from typing import Final

from agent.pool.errors import PutElsewhere
from agent.pool.write.borrowed_slots import SlotLink
from agent.pool.write.slot_messages import MESSAGE_BYTES_MAX
from agent.remote.fabric import Fabric

TAKE_SECONDS: Final = 0.1
"""For a link that is in use; then the first process stores the values itself."""
ANSWER_SECONDS: Final = 30.0
"""For an answer, beyond the time of a put: so long the other process waits for enclosures."""


class BorrowedLinks:
    """All of a reader. Safe from any thread."""

    def __init__(self, sockets: Sequence[socket.socket], fabric: Fabric, put_seconds: float) -> None:
        """`put_seconds`: as long as a put may take."""
        self._fabric = fabric
        self._free: queue.LifoQueue[_Link] = queue.LifoQueue()
        self._whole = len(sockets)
        for each in sockets:
            each.settimeout(put_seconds + ANSWER_SECONDS)
            self._free.put(_Link(each))

    @contextlib.contextmanager
    def take(self) -> Iterator[SlotLink]:
        """See `SlotLinks`."""
        if not self._whole:
            raise PutElsewhere
        try:
            link = self._free.get(timeout=TAKE_SECONDS)
        except queue.Empty:
            raise PutElsewhere from None
        try:
            yield link
        finally:
            if link.is_whole:
                self._free.put(link)
            else:
                self._whole -= 1

    def namespace(self, nguid: bytes) -> int | None:
        nguids = self._fabric.nguids
        return nguids.index(nguid) if nguid in nguids else None

    def may_land(self, namespace: int, offset: int, size: int, now: float) -> bool:
        """See `SlotLinks`: what was sent and not answered has a fence (agent/remote/fence.py)."""
        fabric = self._fabric
        return fabric.fence.stands(fabric.nguids[namespace], offset, size, now)


class _Link:
    def __init__(self, link: socket.socket) -> None:
        self._link = link
        self.is_whole = True

    def exchange(self, message: bytes) -> bytes:
        """See `SlotLink`."""
        try:
            self._link.sendall(message)
            answer = self._link.recv(MESSAGE_BYTES_MAX + 1)
        except OSError:
            answer = b""
        if not answer:
            self.broken()
            raise PutElsewhere
        return answer

    def broken(self) -> None:
        self.is_whole = False
        self._link.close()
