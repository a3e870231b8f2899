"""What lies under the key of a path: a file's identity, its length and where its chunks are, or a folder.

    0   magic "g35m"            28  mtime, ns u64          60  runs u16
    4   version u8              36  ctime, ns u64          62  bytes of the path u16
    5   kind u8 (1, 2)          44  identity (16 bytes)    64  bytes of content u32
    6   mode u16                                           68  chunk bytes u32
    8   uid u32                                            72  length u64
    12  gid u32                                            80  path, runs, content
    16  atime, ns u64, 24 zero u32

Numbers are little-endian. A chunk lies under the key of its *origin* and its number. The origin of most is
the identity of the file. A run names chunks that have another: those that an earlier content of the file left
to this one, those that were written twice, and those that were never written (`HOLE`: zeros that nobody
stores).

    run, 24 bytes: first chunk u32, number of chunks u32, origin (16 bytes)

A short file has its bytes here, and no chunks. The path is in it, so a manifest that was copied to the place
of another is no file there.
"""

import os
import struct
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import IntEnum
from typing import Final

from agent.fs.shared.paths import PATH_BYTES_MAX, chunk_key

MAGIC: Final = b"g35m"
VERSION: Final = 1
HEAD: Final = struct.Struct("<4sBBHIIQIQQ16sHHIIQ")
RUN: Final = struct.Struct("<II16s")
IDENTITY_BYTES: Final = 16
HOLE: Final = bytes(IDENTITY_BYTES)
"""The origin of chunks that were never written."""
MODE_BITS: Final = 0o7777
CHUNKS_MAX: Final = 1 << 32

assert HEAD.size == 80
assert RUN.size == 24


class ManifestError(Exception):
    """The bytes are no manifest."""


class Kind(IntEnum):
    """What a name leads to."""

    FILE = 1
    FOLDER = 2


@dataclass(frozen=True, slots=True)
class Run:
    """`count` chunks from `first` on whose origin is not the identity of the file."""

    first: int
    count: int
    origin: bytes


class Origins:
    """What the chunks of one content are stored under. The first is the identity of the content; the others
    are of chunks that were stored more than once."""

    def __init__(self, identity: bytes | None = None) -> None:
        self.identity: Final = identity or os.urandom(IDENTITY_BYTES)
        self._origins = [self.identity]
        self._times: dict[int, int] = {}
        """How often a chunk was stored: an origin is used once for each."""

    def were_given(self, number: int) -> bool:
        """Whether a chunk has had one."""
        return number in self._times

    def next_of(self, number: int) -> bytes:
        """The origin for a chunk that is to be stored, or stored again."""
        times = self._times.get(number, 0)
        self._times[number] = times + 1
        while len(self._origins) <= times:
            self._origins.append(os.urandom(IDENTITY_BYTES))
        return self._origins[times]


def runs_of(identity: bytes, origins: Iterable[bytes]) -> Iterator[Run]:
    """Out of the origins of all chunks of a file, in their order."""
    first = count = 0
    before = identity
    for number, origin in enumerate(origins):
        if origin != before:
            if before != identity:
                yield Run(first, count, before)
            first, count, before = number, 0, origin
        count += 1
    if before != identity:
        yield Run(first, count, before)


@dataclass(frozen=True, slots=True)
class Manifest:
    """A file or a folder. Times are nanoseconds since the epoch; lengths are bytes."""

    kind: Kind
    path: bytes
    mode: int
    """The permissions alone."""
    uid: int
    gid: int
    atime_ns: int
    mtime_ns: int
    ctime_ns: int
    identity: bytes = HOLE
    """16 random bytes of this content, which no other has; HOLE of a folder."""
    length: int = 0
    chunk_bytes: int = 0
    """0 of a folder."""
    runs: tuple[Run, ...] = ()
    """The runs of chunks, in order and without overlap."""
    content: bytes | None = None
    """The bytes of a short file. None: it has chunks, or no bytes."""

    @property
    def is_folder(self) -> bool:
        return self.kind is Kind.FOLDER

    @property
    def chunks(self) -> int:
        """How many chunks the file is long, holes among them."""
        if not self.chunk_bytes or self.content is not None:
            return 0
        return -(-self.length // self.chunk_bytes)

    def chunk_length(self, number: int) -> int:
        """Bytes of a chunk: all are full but the last."""
        return min(self.chunk_bytes, self.length - number * self.chunk_bytes)

    def origin(self, number: int) -> bytes:
        """What a chunk was written as part of; HOLE where it never was."""
        at = bisect_right(self.runs, number, key=_first) - 1
        if at >= 0 and number < self.runs[at].first + self.runs[at].count:
            return self.runs[at].origin
        return self.identity

    def stored(self) -> Iterator[tuple[bytes, int]]:
        """Origin and number of every chunk that lies in the pool."""
        for number in range(self.chunks):
            origin = self.origin(number)
            if origin != HOLE:
                yield origin, number

    def keys(self) -> list[bytes]:
        """The keys of those chunks."""
        return [chunk_key(origin, number) for origin, number in self.stored()]

    @property
    def size(self) -> int:
        """How long it is, encoded."""
        content = 0 if self.content is None else len(self.content)
        return HEAD.size + len(self.path) + len(self.runs) * RUN.size + content

    def encode(self) -> bytes:
        content = b"" if self.content is None else self.content
        head = HEAD.pack(
            MAGIC, VERSION, self.kind, self.mode & MODE_BITS, self.uid, self.gid, self.atime_ns, 0,
            self.mtime_ns, self.ctime_ns, self.identity, len(self.runs), len(self.path), len(content),
            self.chunk_bytes, self.length,
        )  # fmt: skip
        runs = b"".join(RUN.pack(run.first, run.count, run.origin) for run in self.runs)
        return head + self.path + runs + content


def _first(run: Run) -> int:
    return run.first


def decode_manifest_untrusted(raw: bytes | memoryview) -> Manifest:
    """The manifest that these bytes are. Raises ManifestError, and nothing else."""
    if len(raw) < HEAD.size:
        raise ManifestError("shorter than its head")
    (
        magic, version, kind, mode, uid, gid, atime_ns, zero, mtime_ns, ctime_ns, identity, runs, path_bytes,
        content_bytes, chunk_bytes, length,
    ) = HEAD.unpack_from(raw)  # fmt: skip
    if magic != MAGIC or version != VERSION:
        raise ManifestError("another format")
    if kind not in (Kind.FILE, Kind.FOLDER) or mode & ~MODE_BITS or zero:
        raise ManifestError("a field has a value that it cannot have")
    if path_bytes > PATH_BYTES_MAX:
        raise ManifestError("its path is too long")
    if len(raw) != HEAD.size + path_bytes + runs * RUN.size + content_bytes:
        raise ManifestError("its parts are not its length")
    runs_at = HEAD.size + path_bytes
    found = Manifest(
        Kind(kind), bytes(raw[HEAD.size : runs_at]), mode, uid, gid, atime_ns, mtime_ns, ctime_ns, identity,
        length, chunk_bytes, tuple(Run(*RUN.unpack_from(raw, runs_at + at * RUN.size)) for at in range(runs)),
        bytes(raw[runs_at + runs * RUN.size :]) if content_bytes else None,
    )  # fmt: skip
    _check(found)
    return found


def _check(found: Manifest) -> None:
    """Raises ManifestError for fields that contradict each other."""
    if found.is_folder:
        if found.length or found.chunk_bytes or found.runs or found.content or found.identity != HOLE:
            raise ManifestError("a folder with content")
        return
    if found.identity == HOLE or not found.chunk_bytes:
        raise ManifestError("a file without an identity, or without a size of chunks")
    if found.content is not None and (len(found.content) != found.length or found.runs):
        raise ManifestError("its content is not its length")
    if found.chunks > CHUNKS_MAX:
        raise ManifestError("longer than any file")
    end = 0
    for run in found.runs:
        if run.first < end or not run.count or run.first + run.count > found.chunks:
            raise ManifestError("its runs are out of order, or beyond its end")
        end = run.first + run.count


def time_told(before: int, told: int | None, touched: bool, now_ns: int) -> int:
    """The time of a file after utimensat(2), by what that call was told."""
    return now_ns if touched else before if told is None else told
