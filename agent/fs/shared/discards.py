"""Chunks that no file has any more, and that wait to be deleted: room that comes back before its time.

The operation that replaces or removes a file does not wait for this. What finds no place here stays in the
pool until it is evicted, as everything there is, so nothing depends on it.

Contents of a file that was written over in part have chunks in common. So a chunk is not deleted while this
agent has any content open that has it; nor later, where a content with it was published meanwhile.
"""

import contextlib
import threading
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Final

from agent.fs.shared.manifest import Manifest
from agent.fs.shared.paths import chunk_key
from agent.fs.shared.unnamed import TURN_SECONDS, WAIT_SECONDS
from agent.fs.shared.volume import Hold, SharedVolume
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
        self._waiting: deque[tuple[SharedVolume, bytes, int]] = deque()
        """Chunks by their origin and number, as below."""
        self._opens: dict[bytes, int] = {}
        """How often a content is open, by its identity."""
        self._of_origin: dict[bytes, dict[bytes, Manifest]] = {}
        """The contents that are open, by the origins of their chunks and their identity."""
        self._doomed: dict[tuple[bytes, int], SharedVolume] = {}
        """Chunks of contents that are open, which go with the last close of these."""
        self._under_way = 0
        self._lost = 0
        self._lock = threading.Lock()
        if bounds is not None:
            bounds.watch(DISCARDS, lambda: {"everybody": len(self)}, lambda: self._lost)

    def __len__(self) -> int:
        """Chunks that have not gone yet, with the one that is being deleted."""
        return len(self._waiting) + self._under_way

    def opened(self, manifest: Manifest) -> None:
        """Note that a manifest is in use: a reader reads it, or a writer's file begins with it. Chunks in
        use are not deleted."""
        with self._lock:
            before = self._opens.get(manifest.identity, 0)
            self._opens[manifest.identity] = before + 1
            if not before:
                for origin in _origins(manifest):
                    self._of_origin.setdefault(origin, {})[manifest.identity] = manifest

    def closed(self, manifest: Manifest) -> None:
        with self._lock:
            left = self._opens[manifest.identity] - 1
            if left:
                self._opens[manifest.identity] = left
                return
            del self._opens[manifest.identity]
            for origin in _origins(manifest):
                contents = self._of_origin[origin]
                del contents[manifest.identity]
                if not contents:
                    del self._of_origin[origin]
            if not self._doomed:
                return
            freed = [chunk for chunk in manifest.stored() if chunk in self._doomed]
            for chunk in freed:
                self._add(self._doomed.pop(chunk), *chunk)

    def replaced(self, volume: SharedVolume, manifest: Manifest, kept: Manifest | None = None) -> None:
        """No name leads to this content any more; its chunks go, but those that `kept` has as well, which a
        name leads to."""
        if manifest.is_folder or (kept is not None and kept.identity == manifest.identity):
            return
        still = set() if kept is None else set(kept.stored())
        if kept is not None and kept.runs:
            self._spare({chunk for chunk in still if chunk[0] != kept.identity})
        self.add(volume, (chunk for chunk in manifest.stored() if chunk not in still))

    def _spare(self, chunks: set[tuple[bytes, int]]) -> None:
        """Keep these chunks: a file has them again, by an earlier content that another process replaced
        meanwhile."""
        with self._lock:
            for chunk in chunks:
                self._doomed.pop(chunk, None)
            if chunks and self._waiting:
                self._waiting = deque(each for each in self._waiting if each[1:] not in chunks)

    def add(self, volume: SharedVolume, chunks: Iterable[tuple[bytes, int]]) -> None:
        """Delete these chunks: origin and number of each."""
        with self._lock:
            for origin, number in chunks:
                self._add(volume, origin, number)

    def _add(self, volume: SharedVolume, origin: bytes, number: int) -> None:
        if len(self._waiting) >= DISCARDS.most:
            self._lost += 1
        else:
            self._waiting.append((volume, origin, number))

    def collect(self, channel: IoChannel) -> Steps[bool]:
        """Delete some. True where more wait, and no enclosure kept this waiting."""
        until = channel.now() + TURN_SECONDS
        for _ in range(AT_ONCE):
            following = self._following()
            if following is None:
                return False
            volume, key = following
            try:
                deadline = channel.now() + min(volume.timing.write_deadline, WAIT_SECONDS)
                with contextlib.suppress(PutRefused):  # its enclosure is away; it is evicted in its time
                    yield from volume.chunks.delete(channel, key, deadline)
            finally:
                self._under_way = 0
            if channel.now() >= until:
                return False
        return bool(self._waiting)

    def _following(self) -> tuple[SharedVolume, bytes] | None:
        """The next chunk that is to be deleted, by its key."""
        with self._lock:
            while self._waiting:
                volume, origin, number = self._waiting.popleft()
                if volume.erased:
                    continue
                if self._is_open(origin, number):
                    self._doomed[origin, number] = volume
                    continue
                self._under_way = 1
                return volume, chunk_key(origin, number)
        return None

    def _is_open(self, origin: bytes, number: int) -> bool:
        return any(
            number < content.chunks and content.origin(number) == origin
            for content in self._of_origin.get(origin, {}).values()
        )


class BuiltOn:
    """The content that a file builds on which is written: it stays, for its chunks are those of the file."""

    def __init__(self, discards: Discards) -> None:
        self._discards: Final = discards
        self._content: Manifest | None = None
        self._holds: Sequence[Hold] = ()

    def hold(self, content: Manifest, holds: Sequence[Hold]) -> None:
        """Note the manifest that the file begins with. This agent does not evict its chunks meanwhile."""
        self._holds = holds
        self.go_on(content)

    def go_on(self, content: Manifest | None) -> None:
        """Note the published manifest from which the file goes on."""
        before, self._content = self._content, content
        if content is not None:
            self._discards.opened(content)
        if before is not None:
            self._discards.closed(before)

    def end(self) -> None:
        holds, self._holds = self._holds, ()
        for each in holds:
            each.let_go()
        self.go_on(None)


def _origins(manifest: Manifest) -> set[bytes]:
    """The origins of all chunks of a manifest, and maybe HOLE."""
    return {manifest.identity, *(run.origin for run in manifest.runs)}
