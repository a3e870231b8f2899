"""Which content a file that is written may take the place of.

A content that its writers wrote from the first byte to the last takes the place of any other: the newest
wins, whole. One with bytes that they did not write, those of the content it began with or zeros, takes the
place of what it began with alone. Else two hosts that each fill a part of one file would both hear that it is
stored, and the part of one would be zeros.
"""

import errno
import threading
from collections.abc import Callable, Collection, Iterable
from typing import Final

from agent.fs.interface import FsError
from agent.fs.shared.chunks import Staged
from agent.fs.shared.manifest import HOLE, Manifest, ManifestError, decode_manifest_untrusted
from agent.fs.shared.paths import path_key
from agent.fs.shared.volume import SharedVolume
from agent.pool.counters import MissCause
from agent.pool.steps import Acquire, IoChannel, Steps

EVICTED: Final = frozenset({MissCause.EVICTED, MissCause.NEVER_STORED})
"""Causes by which a chunk that was stored is there no more: another one has its room."""


CROSSING: Final = 0.05
CROSSING_MAX: Final = 0.5
"""Seconds after which a content is looked at again; in between, twice as long as it took to be stored."""


class Gaps:
    """Chunks of a file with bytes that its writers did not write. The file's lock guards it.

    Where a chunk is written piece by piece, and stored before it is covered, it counts for good.
    """

    def __init__(self, base: Manifest | None) -> None:
        """`base`: the content of others that the file begins with."""
        self.is_bare = False
        """Whether an open has made the file without emptying it, and nobody has written: it is there, and has
        no bytes of its own."""
        self._chunks: set[int] = set()
        self.are_left = base is not None and base.length > 0
        """Whether chunks that the file does not store itself have bytes of others."""

    def add(self, number: int) -> None:
        self._chunks.add(number)

    def filled(self, number: int) -> None:
        """A chunk was written whole."""
        self._chunks.discard(number)

    def stored(self, number: int, chunk: Staged, size: int) -> None:
        """The first bytes of a staged chunk are stored, or kept."""
        if chunk.covers(size):
            self._chunks.discard(number)
        elif not chunk.whole:
            self._chunks.add(number)

    def kept(self, chunk: Staged | None, before: bytes, length: int) -> None:
        """A short file is kept with its name: what is staged of it, else what it began with."""
        if chunk is not None:
            self.stored(0, chunk, length)
        elif self.are_left or not before:
            self._chunks.add(0)

    def cut(self, first: int) -> None:
        """The chunks from `first` on go."""
        self._chunks = {number for number in self._chunks if number < first}
        self.are_left = self.are_left and first > 0

    def has_any(self, manifest: Manifest, stored: Collection[int]) -> bool:
        """Whether a content has such bytes. `stored`: the chunks that the file has stored itself."""
        return (
            self.is_bare
            or bool(self._chunks)
            or any(
                self.are_left or manifest.origin(number) == HOLE
                for number in range(manifest.chunks)
                if number not in stored
            )
        )

    def only_over(
        self, manifest: Manifest, stored: Collection[int], identities: Collection[bytes]
    ) -> Callable[[bytes | None], bool] | None:
        """Which values of its name a content may take the place of, of these contents; None: any."""
        if not self.has_any(manifest, stored):
            return None
        return is_one_of(identities, or_nothing=not has_others(manifest, stored))


def stays(
    channel: IoChannel,
    volume: SharedVolume,
    manifest: Manifest,
    own: Iterable[tuple[bytes, int]],
    began: float,
) -> Steps[bool]:
    """Whether no other content has taken the place of one with bytes of others, which was stored at `began`.

    Two agents that store at once may each find the older content, and both are acknowledged. So each looks
    again, after longer than such a store takes. `own`: the chunks that it has stored, by origin and number; a
    content with one of them was built on this one. A single agent needs no look.
    """
    if volume.timing.directory_fresh:
        return True
    chunks, nobodys = set(own), threading.Lock()
    nobodys.acquire()
    yield Acquire(nobodys, channel.now() + min(CROSSING_MAX, max(CROSSING, 2 * (channel.now() - began))))
    there = yield from _there(channel, volume, manifest.path)
    if isinstance(there, MissCause):
        return True  # no other content is there: at worst the file is a miss, as any may become one
    if there is None:
        return False
    return there.identity == manifest.identity or not chunks.isdisjoint(there.stored())


def why_not_whole(cause: MissCause, *, is_crowded: bool) -> FsError:
    """Why a file is not published of which a chunk is not there, by the cause of that miss. `is_crowded`: the
    volume had no room to keep all of its chunks."""
    if cause in EVICTED and is_crowded:
        return FsError(errno.ENOSPC, "the volume has no room for all that is open in it")
    if cause in EVICTED or cause is MissCause.EXPIRED:
        return FsError(errno.EIO, f"a chunk of the file is gone: {cause.name.lower()}")
    return FsError(errno.EIO, "nobody says just now whether the whole file is there")


def has_others(manifest: Manifest, stored: Collection[int]) -> bool:
    """Whether a content has chunks of the one that it began with. Where its name leads nowhere any more, that
    one was renamed or removed: its chunks are another file's by now, or nobody's."""
    return any(number not in stored and manifest.origin(number) != HOLE for number in range(manifest.chunks))


def is_one_of(identities: Collection[bytes], or_nothing: bool = False) -> Callable[[bytes | None], bool]:
    """Whether the value of a name is one of these contents; `or_nothing`: or there is none."""

    def judged(value: bytes | None) -> bool:
        if value is None:
            return or_nothing
        found = _decoded(value)
        return found is not None and found.identity in identities

    return judged


def is_newest(channel: IoChannel, volume: SharedVolume, manifest: Manifest) -> Steps[bool]:
    """Whether a name leads to this content just now: another process has published one meanwhile."""
    there = yield from _there(channel, volume, manifest.path)
    return isinstance(there, Manifest) and there.identity == manifest.identity


def _there(channel: IoChannel, volume: SharedVolume, path: bytes) -> Steps[Manifest | MissCause | None]:
    """What a name leads to just now; None for bytes that are no manifest."""
    deadline = channel.now() + volume.timing.write_deadline
    found = yield from volume.names.newest(channel, path_key(path), deadline)
    return found if isinstance(found, MissCause) else _decoded(found)


def _decoded(value: bytes) -> Manifest | None:
    try:
        return decode_manifest_untrusted(value)
    except ManifestError:
        return None
