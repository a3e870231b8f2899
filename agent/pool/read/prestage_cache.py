"""Values waiting in the agent's memory because somebody said, or it has learned, that they will be asked for.

They wait sealed, as they came from flash. The memory of the DPU then holds no more plain text than the
request in hand, erasing a key erases what waits too, and a get opens them by the same code as any other. Or
opened, where the operator wants that (docs/decisions/0032-sealed-or-open.md).

Bounded in bytes; the one asked for longest ago goes first, and what was only guessed has half of the room at
the most, so that guesses do not push out what was announced. Bounded in age as well: another agent may delete
the value or its enclosure may go, and nobody tells us, so what waits is not served for longer than that.

Places are (volume id, pseudonym of the key).
"""

import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final

MAX_AGE_SECONDS: Final = 60.0
"""Counted from the read off flash. A prefix that is announced is asked for within seconds."""

SWEEP_SECONDS: Final = 5.0
"""How long what is too old may still be held, where nobody asks for it."""

_Place = tuple[bytes, bytes]


@dataclass(slots=True)
class PrestageCounts:
    """Results of prestaging in one volume. Bytes are those of slots, headers included."""

    useful_bytes: int = 0
    """Served at least once from memory."""
    wasted_bytes: int = 0
    """Left memory without having been served."""
    late: int = 0
    """Gets of what was announced or guessed and not there yet; they went to flash."""
    late_bytes: int = 0
    """Read ahead, for a get that had come before the bytes did; they are not kept."""
    failed: int = 0
    """Keys whose read ahead raised an exception that nobody has thought of."""


@dataclass(slots=True)
class _Staged:
    generation: int
    slot: memoryview
    since: float
    guessed: bool
    clear: "OpenValue | None" = None
    """Instead of the slot, which is empty then."""
    used: bool = False

    @property
    def size(self) -> int:
        return len(self.slot) if self.clear is None else self.clear.size


class PrestageCache:
    """Sealed slots by volume and pseudonym. Safe from any thread. `clock`: seconds that never go back."""

    def __init__(
        self,
        budget_bytes: int,
        max_age: float = MAX_AGE_SECONDS,
        clock: Callable[[], float] = time.monotonic,
        *,
        waits_open: bool = False,
    ) -> None:
        """`waits_open`: what was announced waits opened."""
        self.budget_bytes = budget_bytes
        self.waits_open = waits_open
        self.max_age = max_age
        self._clock = clock
        self.bytes_held = 0
        """The bytes of values that wait, and of opened values that are gone from here and that readers still
        have."""
        self._lent = 0
        """The bytes of opened values that readers have; half of the room at the most."""
        self._guessed: OrderedDict[_Place, int] = OrderedDict()
        self._guessed_bytes = 0
        self._slots: OrderedDict[_Place, _Staged] = OrderedDict()
        self._expected: dict[_Place, bool] = {}
        """What is to be read, and whether it is only a guess."""
        self._counts: dict[bytes, PrestageCounts] = {}
        self._gone: set[bytes] = set()
        """Volumes that were discarded: what is on its way for them is not kept. As many as are served."""
        self._swept_at = clock()
        self._lock = threading.Lock()

    def find(self, volume_id: bytes, pseudonym: bytes, generation: int) -> memoryview | None:
        """Header and value as they lie on flash, where this very write of the key is staged.

        One that is only expected is expected no longer: its get has come, and goes to flash.
        """
        place = (volume_id, pseudonym)
        if place not in self._slots and place not in self._expected:
            return None
        with self._lock:
            staged = self._slots.get(place)
            if staged is None:
                if self._expected.pop(place, None) is not None:
                    self._count(volume_id).late += 1
                return None
            if staged.generation != generation or self._is_old(staged):
                self._drop(place)
                return None
            return None if staged.clear is not None else self._served(place, staged).slot

    def find_open(self, volume_id: bytes, pseudonym: bytes, generation: int) -> "OpenValue | None":
        """The value in clear, where this very write of the key waits so: the caller's until `let_go`.

        None as well where readers have so much that the next is to read from flash.
        """
        place = (volume_id, pseudonym)
        with self._lock:
            staged = self._slots.get(place)
            if staged is None or staged.clear is None:
                return None
            if staged.generation != generation or self._is_old(staged):
                self._drop(place)
                return None
            value = staged.clear
            if not value.readers and self._lent + value.size > self.budget_bytes // 2:
                return None
            self._lent += 0 if value.readers else value.size
            value.readers += 1
            return self._served(place, staged).clear

    def let_go(self, value: "OpenValue") -> None:
        """A reader is done with what `find_open` gave it."""
        with self._lock:
            value.readers -= 1
            if not value.readers:
                self._lent -= value.size
                self.bytes_held -= value.size if value.is_gone else 0

    def _served(self, place: _Place, staged: _Staged) -> _Staged:
        self._slots.move_to_end(place)
        if not staged.used:
            staged.used = True
            self._count(place[0]).useful_bytes += staged.size
        return staged

    def holds(self, volume_id: bytes, pseudonym: bytes) -> bool:
        return self.generation(volume_id, pseudonym) is not None

    def generation(self, volume_id: bytes, pseudonym: bytes) -> int | None:
        """Which write of the key is here; None where none is."""
        staged = self._slots.get((volume_id, pseudonym))
        return None if staged is None or self._is_old(staged) else staged.generation

    def expect(self, volume_id: bytes, pseudonym: bytes, *, guessed: bool = False) -> bool | None:
        """Somebody will read it into here. None: it is here already. False: that is expected already.

        What was guessed and is announced now is expected anew.
        """
        place = (volume_id, pseudonym)
        with self._lock:
            staged = self._slots.get(place)
            if staged is not None and not self._is_old(staged):
                return None
            if place in self._expected and (guessed or not self._expected[place]):
                return False
            self._expected[place] = guessed
            return True

    def is_expected(self, volume_id: bytes, pseudonym: bytes, *, guessed: bool | None = None) -> bool:
        """Whether it is; as a guess, or not as one, where that is asked."""
        expected = self._expected.get((volume_id, pseudonym))
        return expected is not None and guessed in (None, expected)

    def expect_no_more(self, volume_id: bytes, pseudonym: bytes, *, guessed: bool = False) -> None:
        """Nobody will read it into here, as a guess or as what was announced."""
        place = (volume_id, pseudonym)
        with self._lock:
            if self._expected.get(place) is guessed:
                del self._expected[place]

    def bring(
        self,
        volume_id: bytes,
        pseudonym: bytes,
        generation: int,
        slot: memoryview,
        *,
        guessed: bool = False,
        clear: "OpenValue | None" = None,
    ) -> bool:
        """Stage a slot that was expected, opened where that is given. False, and not kept: its get came
        meanwhile, or it alone is larger than the room for its kind."""
        with self._lock:
            if self._expected.pop((volume_id, pseudonym), None) is None:
                self._count(volume_id).late_bytes += len(slot)
                return False
        place, kept = (volume_id, pseudonym), slot if clear is None else memoryview(b"")
        staged = _Staged(generation, kept, self._clock(), guessed, clear)
        size, room_for_guesses = staged.size, self.budget_bytes // 2
        if size > (room_for_guesses if staged.guessed else self.budget_bytes):
            return False
        with self._lock:
            if place[0] in self._gone:
                return False
            if place in self._slots:
                self._drop(place)
            while staged.guessed and self._guessed_bytes + size > room_for_guesses:
                self._drop(next(iter(self._guessed)))
            while self.bytes_held + size > self.budget_bytes:
                if not self._slots:
                    return False
                self._drop(next(iter(self._slots)))
            self._slots[place] = staged
            self.bytes_held += size
            if staged.guessed:
                self._guessed[place] = size
                self._guessed_bytes += size
        return True

    def discard(self, volume_id: bytes, pseudonym: bytes) -> None:
        with self._lock:
            self._expected.pop((volume_id, pseudonym), None)
            if (volume_id, pseudonym) in self._slots:
                self._drop((volume_id, pseudonym))

    def discard_volume(self, volume_id: bytes) -> None:
        """Discard the volume's values for good: the volume was erased."""
        with self._lock:
            self._gone.add(volume_id)
            for place in [each for each in self._slots if each[0] == volume_id]:
                self._drop(place)
            for place in [each for each in self._expected if each[0] == volume_id]:
                del self._expected[place]

    def sweep(self) -> None:
        """Drop what is too old, if that was not done just now: perhaps nobody ever asks for it."""
        now = self._clock()
        if now - self._swept_at < SWEEP_SECONDS:
            return
        with self._lock:
            self._swept_at = now
            for place in [each for each, staged in self._slots.items() if self._is_old(staged)]:
                self._drop(place)

    def counts(self, volume_id: bytes) -> PrestageCounts:
        with self._lock:
            return replace(self._count(volume_id))

    def count_failed(self, volume_id: bytes) -> None:
        """A key could not be read into here, by a bug."""
        with self._lock:
            self._count(volume_id).failed += 1

    def _count(self, volume_id: bytes) -> PrestageCounts:
        counts = self._counts.get(volume_id)
        if counts is None:
            counts = self._counts[volume_id] = PrestageCounts()
        return counts

    def _is_old(self, staged: _Staged) -> bool:
        return self._clock() - staged.since > self.max_age

    def _drop(self, place: _Place) -> None:
        staged = self._slots.pop(place)
        if staged.clear is not None and staged.clear.readers:
            staged.clear.is_gone = True
        else:
            self.bytes_held -= staged.size
        self._guessed_bytes -= self._guessed.pop(place, 0)
        if not staged.used:
            self._count(place[0]).wasted_bytes += staged.size


@dataclass(slots=True, eq=False)
class OpenValue:
    """A value in clear, and when it expires (seconds since the epoch; 0: never)."""

    data: memoryview
    expiry: int
    size: int
    """Bytes of its slot, which are what it is reckoned at: the memory behind `data` is as long."""
    readers: int = 0
    is_gone: bool = False
    """Whether the value is gone from the cache. `PrestageCache` alone changes both."""
