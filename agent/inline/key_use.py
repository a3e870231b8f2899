"""How often an agent has sealed under each data key, and where that has to end.

Counted are writes of slots. The state folder has the numbers, each ahead of the true one: after a crash the
count is too large, by `chunk_of` at most. An agent that ends notes the true ones. The limits:
docs/security.md.
"""

import json
import logging
import threading
from pathlib import Path
from typing import Final

from agent.host_os.whole_file import write_whole

log = logging.getLogger(__name__)

FILE: Final = "key_use.json"
CHUNK: Final = 1 << 20
"""Writes that are noted ahead at most: one write of the file for so many slots."""
CHUNKS_OF_A_KEY: Final = 1 << 10
"""What is noted ahead is no more than this part of what the key may seal."""
RETRY_WRITES: Final = 1 << 10
"""After a note that failed, for instance because the disk is full, so many slots pass before the next try."""
GCM_WRITES_MAX: Final = 1 << 42
XTS_BLOCKS_MAX: Final = 1 << 44
"""AES blocks, of 16 bytes, that one agent seals under one key."""
AGENTS: Final = 64
"""The limits leave room for so many agents on one pool."""


def writes_max(suite: str, value_bytes: int) -> int:
    """How many slots of so many bytes an agent may seal under one key."""
    if suite == "aes-256-xts+crc64":
        return XTS_BLOCKS_MAX // (value_bytes // 16)
    return GCM_WRITES_MAX


class KeyUse:
    """One key's count. Safe from any thread."""

    def __init__(self, book: "KeyUseBook", fingerprint: str, most: int) -> None:
        self._book = book
        self._fingerprint = fingerprint
        self.most = most
        self.writes = self._noted = book.noted(fingerprint)
        self._next_try = 0
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
        with self._lock:
            self.writes += 1
            if self.writes > self._noted and self.writes >= self._next_try:
                ahead = self.writes + self._book.chunk_of(self.most)
                if self._book.note(self._fingerprint, ahead):
                    self._noted = ahead
                else:
                    self._next_try = self.writes + RETRY_WRITES
            if not self._warned and self.writes * 2 > self.most:
                self._warned = True
                log.warning(
                    "the data key %s has sealed half of what it may: rotate it (g35 tenant rotate)",
                    self._fingerprint,
                )

    def true_count(self) -> int:
        """What was sealed. The next slot is noted ahead again."""
        with self._lock:
            self._noted = self.writes
            return self.writes


class KeyUseBook:
    """The counts of one agent, in a file of its state folder. Safe from any thread."""

    def __init__(self, state: Path, chunk: int = CHUNK) -> None:
        self._chunk = chunk
        self._file = state / FILE
        self._uses: dict[str, KeyUse] = {}
        self._lock = threading.Lock()
        self._has_failed = False
        try:
            self._counts = _counts_in(self._file.read_text())
        except FileNotFoundError:
            self._counts = {}
        except ValueError:
            # Too small a count would be a risk, a key that is rotated too early is none.
            log.warning(
                "%s cannot be read; it is begun anew, so rotate the keys (g35 tenant rotate)", self._file
            )
            self._counts = {}

    def chunk_of(self, most: int) -> int:
        """How many writes are noted ahead of a key that may do `most`."""
        return max(1, min(self._chunk, most // CHUNKS_OF_A_KEY))

    def use_of(self, fingerprint: bytes, most: int) -> KeyUse:
        """The count of a key: the same one, however often it is asked for."""
        with self._lock:
            use = self._uses.get(fingerprint.hex())
        if use is None:
            use = KeyUse(self, fingerprint.hex(), most)
            with self._lock:
                use = self._uses.setdefault(fingerprint.hex(), use)
        return use

    def noted(self, fingerprint: str) -> int:
        return self._counts.get(fingerprint, 0)

    def note(self, fingerprint: str, count: int) -> bool:
        """Write a count down. False: it could not be; a crash before the next try loses the count since."""
        with self._lock:
            self._counts[fingerprint] = max(count, self._counts.get(fingerprint, 0))
            return self._write()

    def forget(self, fingerprint: bytes) -> None:
        with self._lock:
            self._uses.pop(fingerprint.hex(), None)
            if self._counts.pop(fingerprint.hex(), None) is not None:
                self._write()

    def close(self) -> None:
        """Write down the true counts: at an end after which nothing is sealed."""
        with self._lock:
            uses = dict(self._uses)
        true = {fingerprint: use.true_count() for fingerprint, use in uses.items()}
        with self._lock:
            changed = {key: count for key, count in true.items() if self._counts.get(key, 0) != count}
            if changed:
                self._counts.update(changed)
                self._write()

    def _write(self) -> bool:
        try:
            write_whole(self._file, json.dumps(self._counts), durable=True)
        except OSError as error:
            if not self._has_failed:
                log.warning(
                    "%s cannot be written (%s): should the agent crash, its count is too low. Make room",
                    self._file,
                    error.strerror,
                )
            self._has_failed = True
            return False
        self._has_failed = False
        return True


def _counts_in(text: str) -> dict[str, int]:
    """Raises ValueError for what is no counts by fingerprint."""
    found = json.loads(text)
    if not isinstance(found, dict):
        raise ValueError("no counts")
    for count in found.values():
        if type(count) is not int or count < 0:
            raise ValueError(f"{count} is no count")
    return found
