"""Reads of files that are whole on flash, by one question to the metadata.

Who opens a file, reads it and closes it asks the metadata seven times. A caller who knows that nobody writes
a file any more, and who keeps its name meanwhile, needs nothing that an open file is for. Such a read renews
no access time. What is out of the ordinary goes the long way: a hole, a block that is not there.
"""

import errno
import time
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple, Protocol

from agent.fs.files.block_store import BlockStore, StoreUnavailable, block_id
from agent.fs.files.metadata_database import ROOT_LOCAL, Database
from agent.fs.interface import FsError
from agent.pool.steps import Steps

_BLOCKS: Final = """
SELECT b.ino, i.block_bytes, i.used_ns, b.position, b.version, b.capacity, b.length
FROM entries AS e JOIN inodes AS i ON i.ino = e.child JOIN blocks AS b ON b.ino = i.ino
WHERE e.parent = ? AND e.name = ? AND b.position BETWEEN ? / i.block_bytes AND ? / i.block_bytes
ORDER BY b.position
"""


class BlockRange(NamedTuple):
    """A part of a block: `size` bytes from `start` on."""

    block_id: bytes
    capacity: int
    start: int
    size: int


class Blocks(Protocol):
    """What a read asks of a `BlockStore`."""

    def get(self, block_id: bytes, capacity: int, offset: int, into: memoryview) -> Steps[bool]:
        """See `BlockStore`."""


def read_ranges(store: Blocks, ranges: Sequence[BlockRange], into: memoryview) -> Steps[bool]:
    """Fill `into` from these, one behind the other. False where one is not there, or they end before. Raises
    `StoreUnavailable`."""
    done = 0
    for block, capacity, start, size in ranges:
        if not (yield from store.get(block, capacity, start, into[done : done + size])):
            return False
        done += size
    return done == len(into)


class SealedReads:
    """Safe from any thread."""

    def __init__(
        self,
        database: Database,
        store: BlockStore,
        used_stale_ns: int | None = None,
        wall_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        """`used_stale_ns`: the age from which on the long way notes the use of a file, for eviction."""
        self._database, self._store = database, store
        self._used_stale_ns, self._wall_ns = used_stale_ns, wall_ns

    def read(self, name: bytes, offset: int, into: memoryview) -> Steps[bool]:
        """Fill `into` from a file of the root. False: go the long way. Raises `FsError`, EIO."""
        ranges = self.ranges(name, offset, len(into))
        if ranges is None:
            return False
        try:
            return (yield from read_ranges(self._store, ranges, into))
        except StoreUnavailable as fault:
            raise FsError(errno.EIO, f"block not read: {fault}") from fault

    def ranges(self, name: bytes, offset: int, length: int) -> list[BlockRange] | None:
        """Which blocks hold `length` bytes of a file of the root, one or more. None: go the long way."""
        rows = self._database.query(_BLOCKS, ROOT_LOCAL, name, offset, offset + length - 1)
        if not rows or (
            self._used_stale_ns is not None and self._wall_ns() - rows[0][2] >= self._used_stale_ns
        ):
            return None
        return _ranges(rows, self._database.file_system_id, offset, length)


def _ranges(rows: list[Any], file_system_id: bytes, offset: int, length: int) -> list[BlockRange] | None:
    found: list[BlockRange] = []
    done = 0
    for ino, block_bytes, _, position, version, capacity, valid in rows:
        start = offset + done - position * block_bytes
        size = min(length - done, block_bytes - start)
        if start < 0 or start + size > valid:
            return None
        found.append(BlockRange(block_id(file_system_id, ino, position, version), capacity, start, size))
        done += size
    return found if done == length else None
