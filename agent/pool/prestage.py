"""Values waiting in the agent's memory because somebody said that they will be asked for.

They wait sealed, as they came from flash: the memory of the DPU then holds no more plain text than the
request in hand, erasing a key erases what waits too, and a get opens them by the same code as any other.
Opening costs about a fifteenth of what fetching does, so the choice is cheap.

Bounded in bytes; the one asked for longest ago goes first. Bounded in age as well: another agent may delete
the value or its enclosure may go, and nobody tells us, so what waits is not served for longer than that.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

MAX_AGE_SECONDS = 60.0
"""Counted from the read off flash. A prefix that is announced is asked for within seconds."""


@dataclass(frozen=True, slots=True)
class _Staged:
    generation: int
    slot: memoryview
    since: float


class PrestageCache:
    """Sealed slots by volume and key. Safe from any thread. `clock` gives seconds that never go back."""

    def __init__(
        self,
        budget_bytes: int,
        max_age: float = MAX_AGE_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.budget_bytes = budget_bytes
        self.max_age = max_age
        self._clock = clock
        self.bytes_held = 0
        self._slots: OrderedDict[tuple[bytes, bytes], _Staged] = OrderedDict()
        self._lock = threading.Lock()

    def find(self, volume_id: bytes, key: bytes, generation: int) -> memoryview | None:
        """Header and value as they lie on flash, where this very write of the key is staged."""
        with self._lock:
            staged = self._slots.get((volume_id, key))
            if staged is None:
                return None
            if staged.generation != generation or self._is_old(staged):
                self._drop((volume_id, key))
                return None
            self._slots.move_to_end((volume_id, key))
            return staged.slot

    def holds(self, volume_id: bytes, key: bytes) -> bool:
        staged = self._slots.get((volume_id, key))
        return staged is not None and not self._is_old(staged)

    def add(self, volume_id: bytes, key: bytes, generation: int, slot: memoryview) -> bool:
        """Stage a slot. False where it alone is larger than the budget."""
        if len(slot) > self.budget_bytes:
            return False
        with self._lock:
            if (volume_id, key) in self._slots:
                self._drop((volume_id, key))
            while self.bytes_held + len(slot) > self.budget_bytes:
                self._drop(next(iter(self._slots)))
            self._slots[volume_id, key] = _Staged(generation, slot, self._clock())
            self.bytes_held += len(slot)
        return True

    def discard(self, volume_id: bytes, key: bytes) -> None:
        with self._lock:
            if (volume_id, key) in self._slots:
                self._drop((volume_id, key))

    def discard_volume(self, volume_id: bytes) -> None:
        with self._lock:
            for place in [each for each in self._slots if each[0] == volume_id]:
                self._drop(place)

    def _is_old(self, staged: _Staged) -> bool:
        return self._clock() - staged.since > self.max_age

    def _drop(self, place: tuple[bytes, bytes]) -> None:
        self.bytes_held -= len(self._slots.pop(place).slot)
