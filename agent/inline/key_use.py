"""How often an agent has sealed under each data key, and where that has to end.

Counted are writes of slots. The numbers stand in the agent's state folder, each ahead of what was sealed: a
crash loses nothing of the count but makes it larger, by CHUNK at most. Where the limits come from:
docs/security.md.
"""

from __future__ import annotations

import json
import logging
import os
import threading
from pathlib import Path

log = logging.getLogger(__name__)

FILE = "key_use.json"
CHUNK = 1 << 20
"""Writes that are noted ahead: one write of the file for so many slots."""
GCM_WRITES_MAX = 1 << 42
XTS_BLOCKS_MAX = 1 << 44
"""AES blocks, of 16 bytes, that one agent seals under one key."""
AGENTS = 64
"""The limits leave room for so many agents on one pool."""


def writes_max(suite: str, value_bytes: int) -> int:
    """How many slots of so many bytes an agent may seal under one key."""
    if suite == "aes-256-xts+crc64":
        return XTS_BLOCKS_MAX // (value_bytes // 16)
    return GCM_WRITES_MAX


class KeyUse:
    """One key's count. Safe from any thread."""

    def __init__(self, book: KeyUseBook, fingerprint: str, most: int) -> None:
        self._book = book
        self._fingerprint = fingerprint
        self.most = most
        self.writes = self._noted = book.noted(fingerprint)
        self._warned = False
        self._lock = threading.Lock()

    @property
    def is_used_up(self) -> bool:
        return self.writes >= self.most

    @property
    def part(self) -> float:
        """Of what the key may seal: 0 to 1."""
        return self.writes / self.most

    def count(self) -> None:
        """One slot more."""
        with self._lock:
            self.writes += 1
            if self.writes > self._noted:
                self._noted = self.writes + self._book.chunk
                self._book.note(self._fingerprint, self._noted)
            if not self._warned and self.writes * 2 > self.most:
                self._warned = True
                log.warning(
                    "the data key %s has sealed half of what it may: rotate it (g35 tenant rotate)",
                    self._fingerprint,
                )


class KeyUseBook:
    """The counts of one agent, in a file of its state folder. Safe from any thread."""

    def __init__(self, state: Path, chunk: int = CHUNK) -> None:
        self.chunk = chunk
        self._file = state / FILE
        self._lock = threading.Lock()
        try:
            found = json.loads(self._file.read_text())
            self._counts = {str(key): int(count) for key, count in found.items()}
        except FileNotFoundError:
            self._counts = {}
        except (ValueError, TypeError, AttributeError):
            # Too small a count would be a risk, a key that is rotated too early is none.
            log.warning(
                "%s cannot be read; it is begun anew, so rotate the keys (g35 tenant rotate)", self._file
            )
            self._counts = {}

    def use_of(self, fingerprint: bytes, most: int) -> KeyUse:
        return KeyUse(self, fingerprint.hex(), most)

    def noted(self, fingerprint: str) -> int:
        return self._counts.get(fingerprint, 0)

    def note(self, fingerprint: str, count: int) -> None:
        with self._lock:
            self._counts[fingerprint] = max(count, self._counts.get(fingerprint, 0))
            partial = self._file.with_suffix(".part")
            with open(partial, "w") as file:
                json.dump(self._counts, file)
                file.flush()
                os.fsync(file.fileno())
            partial.replace(self._file)
