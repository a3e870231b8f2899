"""Giving room back: inodes that nobody can reach any more, doomed blocks, and eviction of whole files.

A doomed block is deleted from the store only after what replaced it is durable, both on the enclosures
(`BlockStore.flush`) and in the metadata (`Database.sync`). Otherwise a machine that loses power could
come up with the older metadata, pointing at a block that is gone. Both cost something, so deletions are
done by the batch: when enough is doomed, when room is needed, and from `collect`, which a supervisor
calls now and then.
"""

from __future__ import annotations

import errno
import logging
import sqlite3
import threading
from collections.abc import Callable

from agent.fs.files import block_rows, directories
from agent.fs.files.block_store import BlockStore, StoreUnavailable, block_id
from agent.fs.files.open_files import OpenFile, OpenFiles
from agent.fs.files.options import FilesCounters, FilesOptions
from agent.fs.files.schema import Database
from agent.fs.interface import FsError
from agent.pool.steps import Acquire, Steps

log = logging.getLogger(__name__)

BACKLOG_BLOCKS = 64
BACKLOG_BYTES = 64 << 20
"""With this much doomed, the operation that finds it so deletes one batch before it returns."""

BATCH_BLOCKS = 64
"""Deletions that an operation may be charged with on behalf of others."""

CANDIDATES = 64


class Reclaimer:
    """Reaps, evicts and deletes. See face.py for the locks."""

    def __init__(
        self,
        database: Database,
        store: BlockStore,
        open_files: OpenFiles,
        options: FilesOptions,
        counters: FilesCounters,
        clock: Callable[[], float],
        wall_ns: Callable[[], int],
    ) -> None:
        self._database = database
        self._store = store
        self._open_files = open_files
        self._options = options
        self._counters = counters
        self._clock = clock
        self._wall_ns = wall_ns
        self._sweep_gate = threading.Lock()
        self._swept_to = 0
        self._deleted = 0

    def hold(self, lock: threading.Lock) -> Steps[None]:
        """Acquire a lock that may be held across waits; EIO when its holder outlasts all patience."""
        if lock.acquire(blocking=False):
            return
        if not (yield Acquire(lock, self._clock() + self._options.patience_seconds)):
            raise FsError(errno.EIO, "another operation on this file does not end")

    def start(self) -> int:
        """What a killed predecessor left: announced blocks and files without a name; how many files."""
        with self._database.transaction() as tx:
            block_rows.give_up_all(tx)
            unlinked = [row[0] for row in tx.execute("SELECT ino FROM inodes WHERE nlink = 0")]
            for ino in unlinked:
                block_rows.destroy(tx, ino)
        return len(unlinked)

    def reap(self, ino: int, *, lost: bool = False) -> bool:
        """Destroy the inode if it has no name and nobody can reach it; True if that was so.

        A lost file goes although the kernel remembers it: what the kernel believes of its name is to end
        in ESTALE and a fresh look. The row is read without the lock first, because nearly every inode that
        the kernel forgets has a name; then the lock keeps `OpenFiles.pin` out until the row is gone.
        """
        rows = self._database.query("SELECT nlink FROM inodes WHERE ino = ?", ino)
        if not rows or rows[0][0]:
            return False
        with self._open_files.state:
            if self._open_files.in_use(ino) or (self._open_files.known(ino) and not lost):
                return False
            with self._database.transaction() as tx:
                return block_rows.destroy(tx, ino)

    def lose(self, file: OpenFile) -> None:
        """A block of this file is gone for good, and so now are the file's names."""
        self._counters.blocks_lost += 1
        with self._open_files.state:
            if file.lost:
                return
            file.lost = True
        with self._database.transaction() as tx:
            directories.unlink_everywhere(tx, file.ino, self._wall_ns())
        self._counters.files_lost += 1
        log.warning("file with inode %d lost a block and was removed", file.ino)

    def tidy(self) -> Steps[None]:
        """Delete one batch if much is doomed: each operation that dooms blocks pays a little."""
        if self.backlog_is_long():
            yield from self.sweep(BATCH_BLOCKS)

    def backlog_is_long(self) -> bool:
        count, capacity = block_rows.doomed_backlog(self._database, BACKLOG_BLOCKS)
        return count >= BACKLOG_BLOCKS or capacity >= BACKLOG_BYTES

    def make_room(self) -> Steps[bool]:
        """Free something in the store: doomed blocks, or, where configured, a file. False: nothing."""
        if (yield from self.sweep(None)):
            return True
        # What is doomed and cannot be deleted lies on an enclosure that is away. Files evicted now might
        # lie there too, and an outage must not cost file after file for no room at all.
        if self._options.on_full != "evict" or self._is_backlog() or not self._evict_oldest():
            return False
        return (yield from self.sweep(None)) or not self._is_backlog()

    def _is_backlog(self) -> bool:
        return block_rows.doomed_backlog(self._database, 1)[0] > 0

    def sweep(self, limit: int | None) -> Steps[bool]:
        """Delete doomed blocks, `limit` at most; True if any went, by this sweep or one it waited for."""
        before = self._deleted
        yield from self.hold(self._sweep_gate)
        try:
            left = limit
            while left is None or left > 0:
                count = yield from self._sweep_batch(min(BATCH_BLOCKS, left or BATCH_BLOCKS))
                if left is not None:
                    left -= count
                if count < BATCH_BLOCKS:
                    break
            return self._deleted != before
        finally:
            self._sweep_gate.release()

    def _sweep_batch(self, limit: int) -> Steps[int]:
        batch = block_rows.doomed_after(self._database, self._swept_to, limit)
        if not batch and self._swept_to:
            self._swept_to = 0
            batch = block_rows.doomed_after(self._database, 0, limit)
        if not batch:
            return 0
        try:
            yield from self._store.flush()
        except StoreUnavailable as fault:
            # What an absent enclosure holds is not made safer by keeping old blocks at the others.
            log.info("flush before deletions: %s", fault)
        self._database.sync()
        gone: list[int] = []
        for block in batch:
            self._swept_to = block.seq
            name = block_id(self._database.file_system_id, block.ino, block.position, block.version)
            try:
                yield from self._store.delete(name, block.capacity)
            except StoreUnavailable as fault:
                # It stays doomed. The next sweep goes on behind it and comes back to it in the end.
                log.info("a doomed block could not be deleted yet: %s", fault)
                break
            gone.append(block.seq)
        if gone:
            with self._database.transaction() as tx:
                block_rows.deleted(tx, gone)
            self._deleted += len(gone)
            self._counters.blocks_deleted += len(gone)
        return len(gone)

    def _evict_oldest(self) -> bool:
        """Remove the least recently used file that nobody has open, under all its names."""
        skip = 0
        while True:
            rows = self._database.query(
                "SELECT ino FROM inodes WHERE stored > 0 AND nlink > 0 ORDER BY used_ns LIMIT ? OFFSET ?",
                CANDIDATES,
                skip,
            )
            if not rows:
                return False
            for (ino,) in rows:
                with self._open_files.state:
                    if self._open_files.in_use(ino):
                        continue
                    with self._database.transaction() as tx:
                        if not _evict(tx, ino, self._wall_ns()):
                            continue
                self._counters.files_evicted += 1
                log.info("file with inode %d was evicted to make room", ino)
                return True
            skip += len(rows)


def _evict(tx: sqlite3.Connection, ino: int, now_ns: int) -> bool:
    directories.unlink_everywhere(tx, ino, now_ns)
    return block_rows.destroy(tx, ino)
