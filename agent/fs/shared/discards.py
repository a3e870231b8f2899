"""Chunks that no file has any more, and that wait to be deleted: room that comes back before its time.

The operation that replaces or removes a file does not wait for this. What finds no place here stays in the
pool until it is evicted, as everything there is, so nothing depends on it. A content that this agent has open
is not deleted before its last close.
"""

import contextlib
import threading
from collections import deque
from collections.abc import Iterable
from typing import Final

from agent.fs.shared.manifest import Manifest
from agent.fs.shared.paths import chunk_key
from agent.fs.shared.unnamed import TURN_SECONDS, WAIT_SECONDS
from agent.fs.shared.volume import SharedVolume
from agent.host_os.per_user_bounds import ALL, Bounds, Limit
from agent.pool.errors import PutRefused
from agent.pool.steps import IoChannel, Steps

DISCARDS: Final = Limit(
    "shared-discards", "chunks of files of /shared that wait to be deleted", 65_536,
    by="everybody", share=ALL, refused="it stays until it is evicted", bytes_each=512,
)  # fmt: skip
AT_ONCE: Final = 32
"""Chunks that one call deletes; fewer where enclosures let it wait."""


class Discards:
    """What all faces of an agent have given up. Safe from any thread."""

    def __init__(self, bounds: Bounds | None = None) -> None:
        self._waiting: deque[tuple[SharedVolume, bytes]] = deque()
        self._opens: dict[bytes, int] = {}
        """How often a content is open, by its identity."""
        self._doomed: dict[bytes, tuple[SharedVolume, Manifest, Manifest | None]] = {}
        """Contents that are open, and go with their last close."""
        self._under_way = 0
        self._lost = 0
        self._lock = threading.Lock()
        if bounds is not None:
            bounds.watch(DISCARDS, lambda: {"everybody": len(self)}, lambda: self._lost)

    def __len__(self) -> int:
        """Chunks that have not gone yet, with the one that is being deleted."""
        return len(self._waiting) + self._under_way

    def opened(self, manifest: Manifest) -> None:
        """It is read; what is open here is not deleted."""
        with self._lock:
            self._opens[manifest.identity] = self._opens.get(manifest.identity, 0) + 1

    def closed(self, manifest: Manifest) -> None:
        with self._lock:
            left = self._opens[manifest.identity] - 1
            if left:
                self._opens[manifest.identity] = left
                return
            del self._opens[manifest.identity]
            doomed = self._doomed.pop(manifest.identity, None)
        if doomed is not None:
            self._add_all(*doomed)

    def replaced(self, volume: SharedVolume, manifest: Manifest, kept: Manifest | None = None) -> None:
        """No name leads to this content any more; its chunks go, but those that `kept` has as well."""
        if manifest.is_folder or (kept is not None and kept.identity == manifest.identity):
            return
        with self._lock:
            if manifest.identity in self._opens:
                self._doomed[manifest.identity] = (volume, manifest, kept)
                return
        self._add_all(volume, manifest, kept)

    def _add_all(self, volume: SharedVolume, manifest: Manifest, kept: Manifest | None) -> None:
        still = set() if kept is None else set(kept.stored())
        self.add(volume, (chunk for chunk in manifest.stored() if chunk not in still))

    def add(self, volume: SharedVolume, chunks: Iterable[tuple[bytes, int]]) -> None:
        """Delete these chunks: origin and number of each."""
        for origin, number in chunks:
            if len(self._waiting) >= DISCARDS.most:
                self._lost += 1
                continue
            self._waiting.append((volume, chunk_key(origin, number)))

    def collect(self, channel: IoChannel) -> Steps[bool]:
        """Delete some. True where more wait, and no enclosure kept this waiting."""
        until = channel.now() + TURN_SECONDS
        for _ in range(min(AT_ONCE, len(self._waiting))):
            self._under_way = 1
            try:
                volume, key = self._waiting.popleft()
                if volume.erased:
                    continue
                deadline = channel.now() + min(volume.timing.write_deadline, WAIT_SECONDS)
                with contextlib.suppress(PutRefused):  # its enclosure is away; it is evicted in its time
                    yield from volume.chunks.delete(channel, key, deadline)
            finally:
                self._under_way = 0
            if channel.now() >= until:
                return False
        return bool(self._waiting)
