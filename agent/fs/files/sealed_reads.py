"""Reads of files that are whole on flash, by one question to the metadata.

Who opens a file, reads it and closes it asks the metadata seven times. A caller who knows that nobody writes
a file any more, and who keeps its name meanwhile, needs nothing that an open file is for. Such a read renews
no access time. What is out of the ordinary goes the long way: a hole, a block that is not there.
"""

import errno
import time
from collections.abc import Callable
from typing import Final

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
        rows = self._database.query(_BLOCKS, ROOT_LOCAL, name, offset, offset + len(into) - 1)
        if not rows or (
            self._used_stale_ns is not None and self._wall_ns() - rows[0][2] >= self._used_stale_ns
        ):
            return False
        done = 0
        for ino, block_bytes, _, position, version, capacity, length in rows:
            start = offset + done - position * block_bytes
            count = min(len(into) - done, block_bytes - start)
            if start < 0 or start + count > length:
                return False
            name_of_block = block_id(self._database.file_system_id, ino, position, version)
            try:
                if not (
                    yield from self._store.get(name_of_block, capacity, start, into[done : done + count])
                ):
                    return False
            except StoreUnavailable as fault:
                raise FsError(errno.EIO, f"block not read: {fault}") from fault
            done += count
        return done == len(into)
