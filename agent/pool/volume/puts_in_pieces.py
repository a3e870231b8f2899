"""Puts that came in part and wait for their next piece: bounded in memory, and none keeps a slot for ever.

A client that stops amid a value leaves a reserved slot and up to a unit of bytes (on KV namespaces, the
value); a session may have thousands of them. So the puts of all volumes share BEGUN_BYTES. Where those are
used up, a put is given up for the next if it got no byte for STALLED_SECONDS, or if its volume holds more
than that of the next is about to. Clients of one volume, however busy, leave to others as much as they take.
A put that got none for IDLE_SECONDS is given up once another wants a slot of its volume, or room in its
tenant's quota; otherwise a slow writer may take its time. A value in one piece never waits. (The kernel cuts
a write of 1 MiB in two where the client's buffer begins amid a page: its second piece follows at once, and
must not be refused for long because of idle puts.)

Nobody touches a put that waits. Its own thread takes it out with the next piece, or another thread to give it
up. The thread that took it out has it, so the two never meet.
"""

import threading
from abc import ABC, abstractmethod
from collections import OrderedDict
from typing import Final

from agent.pool.steps import IoChannel

BEGUN_BYTES: Final = 256 << 20
"""Memory of an agent for pieces that wait; a put that would need more is refused."""
STALLED_SECONDS: Final = 1.0
"""Longer than all that BEGUN_BYTES has room for take to have a turn with the agent's workers."""
IDLE_SECONDS: Final = 30.0
"""Longer than a client takes between two pieces, were it to wait for its disk or to swap."""


class PutInPieces(ABC):
    """One put, as it waits (agent/pool/write/writer_base.py)."""

    held = 0
    """Its bytes of BEGUN_BYTES, its own to count."""

    @abstractmethod
    def abandon(self, channel: IoChannel) -> None:
        """Let go of slot and memory. Called by the thread that took it out of `PutsInPieces`."""


class PutsInPieces:
    """The puts that wait, those first that have waited longest. Safe from any thread."""

    def __init__(self, bytes_max: int = BEGUN_BYTES) -> None:
        self.bytes_max = bytes_max
        self.bytes_held = 0
        """The bytes of puts that wait, and of puts that waited and are getting their next piece."""
        self._of_volume: dict[bytes, OrderedDict[PutInPieces, float]] = {}
        """By volume, and since when each waits."""
        self._holding: dict[bytes, OrderedDict[PutInPieces, None]] = {}
        """Those that hold memory, by volume; those first that have waited longest."""
        self._held: dict[bytes, int] = {}
        """Bytes of those, by volume."""
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return sum(len(line) for line in self._of_volume.values())

    def waiting(self, volume_id: bytes) -> int:
        """How many of a volume wait, each with a slot of its own."""
        return len(self._of_volume.get(volume_id, ()))

    def add(self, put: PutInPieces, volume_id: bytes, more: int, channel: IoChannel) -> bool:
        """It waits from now on, and holds `more` bytes than before. False, and nothing done: no room."""
        now = channel.now()
        while True:
            with self._lock:
                if more <= 0 or self.bytes_held + more <= self.bytes_max:
                    self.bytes_held += more
                    line = self._of_volume.get(volume_id)
                    if line is None:
                        line = self._of_volume[volume_id] = OrderedDict()
                    line[put] = now
                    if put.held:
                        self._holding.setdefault(volume_id, OrderedDict())[put] = None
                        self._held[volume_id] = self._held.get(volume_id, 0) + put.held
                    return True
                given_up = self._take_stalled(now) or self._take_of_the_greediest(volume_id, more)
            if given_up is None:
                return False
            given_up.abandon(channel)

    def take_out(self, put: PutInPieces, volume_id: bytes) -> bool:
        """It waits no more, and holds what it held. False: another thread has taken it out."""
        with self._lock:
            if self._of_volume[volume_id].pop(put, None) is None:
                return False
            self._holds_no_more(put, volume_id)
            return True

    def give_back(self, size: int) -> None:
        """Bytes that a put held, which was taken out."""
        with self._lock:
            self.bytes_held -= size

    def make_way(self, volume_id: bytes, channel: IoChannel) -> bool:
        """Somebody wants for a slot of the volume: give up those that are idle. True where there was one."""
        line = self._of_volume.get(volume_id)
        if not line:  # as mostly
            return False
        idle, before = [], channel.now() - IDLE_SECONDS
        with self._lock:
            while line:
                put, since = next(iter(line.items()))
                if since > before:
                    break
                del line[put]
                self._holds_no_more(put, volume_id)
                idle.append(put)
        for put in idle:
            put.abandon(channel)
        return bool(idle)

    def _take_stalled(self, now: float) -> PutInPieces | None:
        """A put that has held memory for long without a byte. Called with the lock held."""
        for volume_id, holding in self._holding.items():
            put = next(iter(holding), None)
            if put is not None and self._of_volume[volume_id][put] <= now - STALLED_SECONDS:
                return self._taken(put, volume_id)
        return None

    def _take_of_the_greediest(self, volume_id: bytes, more: int) -> PutInPieces | None:
        """Where another volume holds more than this one is about to: the put of that which has waited
        longest. Called with the lock held."""
        other = max(self._held, key=self._held.__getitem__, default=volume_id)
        if self._held.get(other, 0) <= self._held.get(volume_id, 0) + more:
            return None
        return self._taken(next(iter(self._holding[other])), other)

    def _taken(self, put: PutInPieces, volume_id: bytes) -> PutInPieces:
        del self._of_volume[volume_id][put]
        self._holds_no_more(put, volume_id)
        return put

    def _holds_no_more(self, put: PutInPieces, volume_id: bytes) -> None:
        """Note that a put that was taken out holds no memory. Called with the lock held."""
        if put.held and put in self._holding.get(volume_id, ()):
            del self._holding[volume_id][put]
            self._held[volume_id] -= put.held
