"""Puts that came in part and wait for their next piece: what they hold in memory is bounded, and none of them
keeps a slot for ever from those who want it.

A client that stops amid a value, or is stopped, leaves a slot that is reserved and up to a unit of bytes
that make no unit yet (on KV namespaces, the value); a session may have thousands of them. So those of all
volumes share BEGUN_BYTES. Where those are used up, the one that has waited longest is given up for the next,
if it got no byte for STALLED_SECONDS; and one that got none for IDLE_SECONDS is given up once somebody wants
for a slot of its volume, or for room in its tenant's quota. While nobody does, a slow writer may take its
time. A value that comes in one piece never waits, and is not in here. (The kernel cuts a write of 1 MiB in
two where the client's buffer begins amid a page: its second piece follows at once, and must not be refused
for long because of those that stand.)

Who waits is in here and touched by nobody. Its own thread takes it out with the next piece, whoever wants its
room takes it out to give it up: who took it out has it, so the one never meets the other.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import Final

from agent.pool.steps import Lanes

BEGUN_BYTES: Final = 256 << 20
"""Memory of an agent for pieces that wait; a put that would need more is refused."""
STALLED_SECONDS: Final = 1.0
"""Longer than all that BEGUN_BYTES has room for take to have a turn with the agent's workers."""
IDLE_SECONDS: Final = 30.0
"""Longer than a client takes between two pieces, were it to wait for its disk or to swap."""
GIVEN_UP: Final = "no byte of it came for long, and its room was wanted"
TOO_MANY: Final = "too many values are being written in pieces"


class PartialPut:
    """One put, as it waits. What it holds is its own to count: `held` bytes of BEGUN_BYTES."""

    _waits = False
    _given_up = False
    held = 0

    def abandon(self, lanes: Lanes) -> None:
        """Let go of slot and memory, of which there are none here; it goes on no more.

        Called by whoever took it out of `PartialPuts`.
        """

    def _wait_for_more(self, begun: PartialPuts, volume_id: bytes, held: int, lanes: Lanes) -> bool:
        """From now on it may be given up. `held`: its bytes in memory. False: there is no room for them."""
        before, self.held = self.held, held
        if begun.add(self, volume_id, held - before, lanes):
            self._waits = True
            return True
        self.held = before
        return False

    def _was_given_up(self, begun: PartialPuts, volume_id: bytes) -> bool:
        """It does not wait any more. True: what it had is gone, or is just being let go by another thread."""
        if self._waits:
            self._waits = False
            self._given_up = not begun.take_out(self, volume_id)
        return self._given_up


class PartialPuts:
    """The puts that wait, those first that have waited longest. Safe from any thread."""

    def __init__(self, bytes_max: int = BEGUN_BYTES) -> None:
        self.bytes_max = bytes_max
        self.bytes_held = 0
        """Of those that wait, and of those that waited and are getting their next piece."""
        self._of_volume: dict[bytes, OrderedDict[PartialPut, float]] = {}
        """By volume, and since when each waits."""
        self._holding: OrderedDict[PartialPut, bytes] = OrderedDict()
        """Those of all volumes that hold memory, and their volume."""
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return sum(len(line) for line in self._of_volume.values())

    def add(self, put: PartialPut, volume_id: bytes, more: int, lanes: Lanes) -> bool:
        """It waits from now on, and holds `more` bytes than before. False, and nothing done: no room."""
        now = lanes.now()
        while True:
            with self._lock:
                if more <= 0 or self.bytes_held + more <= self.bytes_max:
                    self.bytes_held += more
                    line = self._of_volume.get(volume_id)
                    if line is None:
                        line = self._of_volume[volume_id] = OrderedDict()
                    line[put] = now
                    if put.held:
                        self._holding[put] = volume_id
                    return True
                stalled = self._take_stalled(now)
            if stalled is None:
                return False
            stalled.abandon(lanes)

    def take_out(self, put: PartialPut, volume_id: bytes) -> bool:
        """It waits no more, and holds what it held. False: another thread has taken it out."""
        with self._lock:
            self._holding.pop(put, None)
            return self._of_volume[volume_id].pop(put, None) is not None

    def give_back(self, size: int) -> None:
        """Bytes that a put held, which was taken out."""
        with self._lock:
            self.bytes_held -= size

    def make_way(self, volume_id: bytes, lanes: Lanes) -> bool:
        """Somebody wants for a slot of the volume: give up those that are idle. True where there was one."""
        line = self._of_volume.get(volume_id)
        if not line:  # as mostly
            return False
        idle, before = [], lanes.now() - IDLE_SECONDS
        with self._lock:
            while line:
                put, since = next(iter(line.items()))
                if since > before:
                    break
                del line[put]
                self._holding.pop(put, None)
                idle.append(put)
        for put in idle:
            put.abandon(lanes)
        return bool(idle)

    def _take_stalled(self, now: float) -> PartialPut | None:
        """The one that has held memory for longest without a byte. Called with the lock held."""
        for put, volume_id in self._holding.items():
            line = self._of_volume[volume_id]
            if line[put] > now - STALLED_SECONDS:
                return None
            del line[put], self._holding[put]
            return put
        return None
