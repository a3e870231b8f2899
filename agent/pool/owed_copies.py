"""Keys whose second copy is still to be made, in a volume that keeps two (agent/pool/copies.py)."""

from __future__ import annotations

import threading
from collections import OrderedDict

OWED_MAX = 4096
"""What comes beyond is not noted: the key has one copy until a scrub finds that."""


class OwedCopies:
    """Pseudonyms in the order of their puts. Safe from any thread."""

    def __init__(self) -> None:
        self.dropped = 0
        self._keys: OrderedDict[bytes, None] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._keys)

    def note(self, pseudonym: bytes) -> None:
        with self._lock:
            if len(self._keys) >= OWED_MAX:
                self.dropped += 1
            else:
                self._keys[pseudonym] = None

    def next(self) -> bytes | None:
        """The oldest, which is the caller's now."""
        if not self._keys:
            return None
        with self._lock:
            return self._keys.popitem(last=False)[0] if self._keys else None
