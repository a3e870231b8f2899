"""Giving room back: inodes that nobody can reach any more, doomed blocks, and eviction of whole files.

A doomed block is deleted only after its successor is durable, on the enclosures (`BlockStore.flush`) and in
the metadata (`Database.sync`): else a machine that loses power could come up with metadata that point at a
deleted block. Both cost something, so deletions are done by the batch: when enough is doomed, when room is
needed, and from `collect`, which a supervisor calls.

Sweeps go through doomed blocks in laps, oldest first, and past those that cannot be deleted, because an
enclosure is away, say. The next lap, some seconds later, tries these again.
"""

import errno
import logging
import sqlite3
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from agent.fs.files import block_rows, directories
from agent.fs.files.block_rows import DoomedBlock
from agent.fs.files.block_store import BlockStore, StoreUnavailable, block_id
from agent.fs.files.metadata_database import Database
from agent.fs.files.open_files import OpenFile, OpenFiles
from agent.fs.files.options import FilesCounters, FilesOptions
from agent.fs.interface import FsError
from agent.host_os.rate_limited_log import Complaints
from agent.pool.steps import Acquire, Held, Steps

log = logging.getLogger(__name__)

BACKLOG_BLOCKS = 64
BACKLOG_BYTES = 64 << 20
"""With this much doomed, the operation that finds it so deletes one batch before it returns."""

BATCH_BLOCKS = 64
"""Deletions that an operation may be charged with on behalf of others."""

RETRY_SECONDS = 5.0
"""The time from a block that could not be deleted to the beginning of the next lap."""

REFUSED_SECONDS = 1.0
"""A sweep ends when blocks that could not be deleted have taken so long; mostly they are refused at once."""

CANDIDATES = 64


@dataclass(slots=True, eq=False)
class Reclaimer:
    """Reaps, evicts and deletes. See face.py for the locks."""

    _database: Database
    _store: BlockStore
    _open_files: OpenFiles
    _options: FilesOptions
    _counters: FilesCounters
    clock: Callable[[], float]
    _wall_ns: Callable[[], int]
    _sweep_gate: threading.Lock = field(default_factory=threading.Lock)
    _swept_to: int = 0
    _deleted: int = 0
    # Of this lap: blocks that could not be deleted, their bytes, and when the next may begin for them.
    _kept: int = 0
    _kept_bytes: int = 0
    _again_at: float | None = None
    _complained: bool = False
    _complaints: Complaints = field(default_factory=lambda: Complaints(log))
    _was_slow: bool = False

    def hold(self, lock: threading.Lock) -> Steps[Held]:
        """Acquire a lock that may be held across waits; EIO when its holder outlasts all patience."""
        if not lock.acquire(blocking=False) and not (
            yield Acquire(lock, self.clock() + self._options.patience_seconds)
        ):
            raise FsError(errno.EIO, "another operation on this file does not end")
        return Held(lock)

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
        self._complaints.world("a file lost a block and was removed", f"inode {file.ino}")

    def tidy(self) -> Steps[None]:
        """Delete one batch if much is doomed: each operation that dooms blocks pays a little."""
        if self.backlog_is_long():
            yield from self.sweep(BATCH_BLOCKS)

    def backlog_is_long(self) -> bool:
        """Whether this lap has much before it. Operations do not try refused deletions again, so those
        do not count."""
        count, capacity = block_rows.doomed_backlog(self._database, BACKLOG_BLOCKS, self._swept_to)
        return count >= BACKLOG_BLOCKS or capacity >= BACKLOG_BYTES

    def collect(self) -> Steps[bool]:
        """Delete a batch; whether it is worth while to go on at once."""
        if (yield from self.sweep(BATCH_BLOCKS)):
            return True
        return not self._was_slow and self._is_ahead()

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
        """Try to delete doomed blocks, `limit` at most; True if any went, by this or one it waited for.

        Without a limit everything is tried, also what was refused a moment ago.
        """
        before = self._deleted
        with (yield from self.hold(self._sweep_gate)):
            left, self._was_slow, slow_seconds = limit, False, 0.0
            if left is None and not self._is_ahead():
                self._begin_lap()
            while left is None or left > 0:
                batch = self._next_batch(BATCH_BLOCKS if left is None else min(BATCH_BLOCKS, left))
                if not batch:
                    break
                slow_seconds += yield from self._sweep_batch(batch, REFUSED_SECONDS - slow_seconds)
                self._was_slow = slow_seconds >= REFUSED_SECONDS
                if self._was_slow:
                    break
                if left is not None:
                    left -= len(batch)
            return self._deleted != before

    def _is_ahead(self) -> bool:
        return block_rows.doomed_backlog(self._database, 1, self._swept_to)[0] > 0

    def _next_batch(self, limit: int) -> list[DoomedBlock]:
        """What comes next in this lap, or, where it is over, in the next one if that may begin."""
        batch = block_rows.doomed_after(self._database, self._swept_to, limit)
        if batch or not self._swept_to or (self._again_at is not None and self.clock() < self._again_at):
            return batch
        self._begin_lap()
        return block_rows.doomed_after(self._database, 0, limit)

    def _begin_lap(self) -> None:
        self._say_what_is_kept()
        self._swept_to, self._again_at = 0, None
        self._kept = self._kept_bytes = 0

    def _say_what_is_kept(self) -> None:
        """Log at the end of a lap which blocks stay."""
        if self._kept >= BACKLOG_BLOCKS and not self._complained:
            self._complained = True
            log.warning(
                "%d blocks that files have given up keep their room (%d MiB), for their enclosures do not "
                "answer; they are freed when these do",
                self._kept,
                self._kept_bytes >> 20,
            )
        elif not self._kept and self._complained:
            self._complained = False
            log.info("the blocks that had to keep their room are freed")
        elif self._kept:
            what = "doomed blocks could not be deleted yet"
            self._complaints.world(what, f"{self._kept} of them", logging.INFO)

    def _sweep_batch(self, batch: Sequence[DoomedBlock], patience: float) -> Steps[float]:
        """Delete those of a batch that can be; seconds that the others took, little over `patience`."""
        try:
            yield from self._store.flush()
        except StoreUnavailable as fault:
            # What an absent enclosure holds is not made safer by keeping old blocks at the others.
            log.debug("flush before deletions: %s", fault)
        self._database.sync()
        gone: list[int] = []
        taken = 0.0
        for block in batch:
            self._swept_to, begun = block.seq, self.clock()
            name = block_id(self._database.file_system_id, block.ino, block.position, block.version)
            try:
                yield from self._store.delete(name, block.capacity)
            except StoreUnavailable as fault:
                # It stays doomed, to the next lap.
                log.debug("a doomed block could not be deleted yet: %s", fault)
                now = self.clock()
                self._kept += 1
                self._kept_bytes += block.capacity
                if self._again_at is None:
                    self._again_at = now + RETRY_SECONDS
                taken += now - begun
                if taken >= patience:
                    break
                continue
            gone.append(block.seq)
        if gone:
            with self._database.transaction() as tx:
                block_rows.deleted(tx, gone)
            self._deleted += len(gone)
            self._counters.blocks_deleted += len(gone)
        return taken

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
                self._complaints.world("a file was evicted to make room", f"inode {ino}", logging.INFO)
                return True
            skip += len(rows)


def _evict(tx: sqlite3.Connection, ino: int, now_ns: int) -> bool:
    directories.unlink_everywhere(tx, ino, now_ns)
    return block_rows.destroy(tx, ino)
