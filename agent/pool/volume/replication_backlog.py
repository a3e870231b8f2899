"""Keys whose second copy is still to be made, in a volume that keeps two
(agent/pool/maintenance/replication.py)."""

import threading
from collections import OrderedDict, deque
from typing import NamedTuple

OWED_MAX = 4096
"""What comes beyond is not noted: the key has one copy until a scrub finds that."""


DOUBTFUL_MAX = 256
"""While so many copies wait to be taken back, none is made."""


class NamedCopy(NamedTuple):
    """A copy that a directory names: where that lies, the slot in it, and which write of which key."""

    namespace: int
    offset: int
    slot: int
    pseudonym: bytes
    generation: int


class ReplicationBacklog:
    """Pseudonyms in the order of their puts, and copies to be taken back. Safe from any thread."""

    def __init__(self) -> None:
        self.dropped = 0
        self.not_made = 0
        """Looked at, and left with one copy: to be made by a scrub."""
        self._doubtful: deque[tuple[float, NamedCopy]] = deque()
        self._keys: OrderedDict[bytes, None] = OrderedDict()
        self._lock = threading.Lock()
        self._wakes = threading.Event()

    def __len__(self) -> int:
        return len(self._keys)

    def wake_by(self, event: threading.Event) -> None:
        """Set `event` whenever there is something to do again. Who waits for it clears it, and then takes
        everything there is before waiting."""
        self._wakes = event

    def note(self, pseudonym: bytes) -> None:
        with self._lock:
            if len(self._keys) >= OWED_MAX:
                self.dropped += 1
                return
            is_first = not self._keys
            self._keys[pseudonym] = None
        if is_first:
            # With more than one the keeper is awake, and goes on until there is none.
            self._wakes.set()

    def next(self) -> bytes | None:
        """The oldest, which is the caller's now."""
        if not self._keys:
            return None
        with self._lock:
            return self._keys.popitem(last=False)[0] if self._keys else None

    @property
    def doubtful(self) -> int:
        """How many copies wait to be taken back."""
        return len(self._doubtful)

    def doubt(self, copy: NamedCopy, due: float) -> None:
        """Take this copy back from `due` on: whether its original still stood could not be seen."""
        self._doubtful.append((due, copy))
        self._wakes.set()

    def due(self) -> float | None:
        """When the next copy is to be taken back; None where there is none."""
        with self._lock:
            return self._doubtful[0][0] if self._doubtful else None

    def next_doubtful(self, now: float) -> NamedCopy | None:
        """One that is due, which is the caller's now."""
        with self._lock:
            if not self._doubtful or self._doubtful[0][0] > now:
                return None
            return self._doubtful.popleft()[1]
