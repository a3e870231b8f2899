"""Blocks as files: what an engine does that knows a folder and no keys."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from host_shim.control_wire import Outcome
from host_shim.pool import Fetched


@dataclass(frozen=True, slots=True)
class FolderStore:
    """A file for each key, named by it. A get opens, reads and closes; a put creates, writes and closes. The
    close publishes the file whole (docs/shared.md).

    A file system has no causes: a file that was stored before and is gone counts as evicted.
    """

    folder: Path
    direct: int = os.O_DIRECT
    """How files are opened: past the page cache, so that each byte comes from the mount."""
    _stored: set[bytes] = field(default_factory=set)

    def lookup(self, keys: Sequence[bytes]) -> list[Outcome | None]:
        return [Outcome.HIT if os.path.exists(self._path(key)) else self._absent(key) for key in keys]

    def prestage(self, keys: Sequence[bytes]) -> list[bool]:
        return [False for _ in keys]

    def fetch(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> list[Fetched]:
        return [self._read(key, buffer) for key, buffer in zip(keys, buffers, strict=True)]

    def put(self, key: bytes, data: memoryview) -> bool:
        try:
            descriptor = os.open(self._path(key), os.O_WRONLY | os.O_CREAT | os.O_TRUNC | self.direct, 0o644)
            try:
                written = os.writev(descriptor, [data])
            finally:
                os.close(descriptor)
        except OSError:
            return False
        self._stored.add(key)
        return written == len(data)

    def _read(self, key: bytes, buffer: memoryview) -> Fetched:
        try:
            descriptor = os.open(self._path(key), os.O_RDONLY | self.direct)
            try:
                return Fetched(os.readv(descriptor, [buffer]), Outcome.HIT)
            finally:
                os.close(descriptor)
        except OSError:
            return Fetched(None, self._absent(key))

    def _path(self, key: bytes) -> str:
        return f"{self.folder}/{key.hex()}"

    def _absent(self, key: bytes) -> Outcome:
        return Outcome.EVICTED if key in self._stored else Outcome.NEVER_STORED
