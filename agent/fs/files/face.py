"""The /fs face: the operations of a file system, in terms of inodes, names and blocks.

Read interface.py (one folder up) for the contract, then this file, then file_io.py for the bytes and
block_rows.py for how a crash is survived. The rooms:

    face           operations: arguments checked, metadata changed, bytes handed to content
    content        read, write, resize, punch, flush, last close
    sealing        staged block -> stored block -> current version; room in the store and in memory
    reclaiming     inodes nobody can reach, doomed blocks, eviction of whole files
    suspect_blocks blocks that did not prove themselves to a reader, and when a file is given up
    staging        buffers for blocks being written, and their bound
    open_files     open files, handles, lookup counts
    directories, inodes, extended_attributes, block_rows, schema: the tables of the metadata

Concurrency. Any number of worker threads call at once. There are five kinds of lock, taken in this order
and never in another:

1. `OpenFile.gate`, one a file: an operation that changes the file's bytes. Held across waits for the
   fabric, therefore acquired through `Acquire` steps, with a deadline. A second file's gate is only ever
   *tried* (`Sealer._victim`), so gates cannot wait for each other in a ring. Reads take no gate. Seals that
   go on after the answer to their writer (`OpenFile.under_way`) hold no gate and wait for none, but for
   earlier seals of the file: who holds the gate may wait for them.
2. `Reclaimer._sweep_gate`: who deletes doomed blocks. Held and acquired likewise; asks for no file's gate.
3. `OpenFiles.state`: everything in memory. Held for dictionary work and short copies, no steps inside.
   It encloses a transaction only where a file must not be opened meanwhile (reap, evict).
4. `Database`'s writer lock: one transaction at a time, no steps inside.
5. SQLite's own locks.

A question to the database takes none of them (metadata_database.py). `getattr` reads what an open file
knows before it reads the row: it sees a size that is committed in between in the row.

An inode exists while it has a name, while the kernel remembers it (`forget`) or while a handle is open; the
end of the last of the three reaps it. After a restart files without a name are swept.

The kernel, on a mount with `default_permissions`, checks permissions and the sticky bit, sends the offset of
O_APPEND, and knows O_RDONLY from O_RDWR.
"""

import errno
import os
import stat
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Final

from agent.fs.after_reply import AfterReply, after_reply_of
from agent.fs.files import directories, extended_attributes, inodes
from agent.fs.files.block_commit import Sealer
from agent.fs.files.block_rows import doomed_backlog
from agent.fs.files.block_store import BlockStore, block_id
from agent.fs.files.file_io import Content
from agent.fs.files.inodes import Inode, global_ino, local_ino
from agent.fs.files.metadata_database import Database, MetadataUnusable
from agent.fs.files.metadata_pool import NamesElsewhere, PoolOfNames
from agent.fs.files.open_files import HANDLES, OpenFile, OpenFiles
from agent.fs.files.options import FilesCounters, FilesGauges, FilesOptions
from agent.fs.files.sealed_reads import SealedReads
from agent.fs.files.space_reclaim import Reclaimer
from agent.fs.files.staging import Staging, StagingMemory
from agent.fs.interface import (
    NOBODY,
    Attributes,
    Caller,
    DirectoryEntry,
    Entry,
    FileSystem,
    FsError,
    LockOwner,
    Opened,
    SetAttributes,
    StatFs,
    check_same_face,
)
from agent.host_os.per_user_bounds import Bounds
from agent.pool.steps import Outcome, Steps

FALLOC_KEEP_SIZE: Final = 0x01
FALLOC_PUNCH_HOLE: Final = 0x02
FALLOC_ZERO_RANGE: Final = 0x10
STATFS_BLOCK_BYTES: Final = 4096
BACKLOG_ROWS_COUNTED: Final = 10_000
ATIME_STALE_NS: Final = 24 * 3600 * 10**9
"""As with relatime: an access time is renewed when it is a day old, or older than the last change."""

USED_STALE_NS: Final = 10**9
"""For eviction, files used within the same second are equally recent."""
_MODE_BITS: Final = 0o7777


class FilesFace(FileSystem):
    """An ordinary file system in a metadata file and a block store.

    `home`: where the store's blocks lie. `clock` is the clock of the steps' deadlines (seconds), `wall_ns`
    that of stored times. Raises what `schema.Database` does, and `ValueError` for impossible options.
    """

    def __init__(
        self,
        metadata: Path,
        store: BlockStore,
        options: FilesOptions | None = None,
        *,
        home: PoolOfNames | None = None,
        bounds: Bounds | None = None,
        clock: Callable[[], float] = time.monotonic,
        wall_ns: Callable[[], int] = time.time_ns,
        after_reply: AfterReply | None = None,
    ) -> None:
        self._options = options = options or FilesOptions()
        self._store = store
        self._wall_ns = wall_ns
        self._block_bytes = options.block_bytes_for(store.capacities)
        self.counters = FilesCounters()
        self._database = database = Database(metadata, home)
        try:
            [(largest,)] = database.query("SELECT COALESCE(MAX(block_bytes), 0) FROM inodes")
            largest = max(largest, self._block_bytes)
            if largest > store.capacities[-1]:
                raise NamesElsewhere(f"{metadata} names blocks of {largest} bytes, and no volume has such")
            sizes = {size for size in store.capacities if size < largest} | {largest}
            room = StagingMemory(options.staging_bytes, options.workers * largest, sorted(sizes))
            bounds, self._staging = bounds or Bounds(), Staging(room)
            self.after_reply = after_reply or after_reply_of(options.workers, bounds)
            self._open_files = OpenFiles(database, bounds.of(HANDLES, options.handles_max))
            self._reclaimer = Reclaimer(
                database, store, self._open_files, options, self.counters, clock, wall_ns
            )
            sealer = Sealer(database, store, self._open_files, self._staging, self._reclaimer, self.counters)
            self._content = Content(
                database, store, self._open_files, self._staging, self._reclaimer, sealer, self.after_reply
            )
            self._content.watch(bounds, options.files_max)
            inodes.ensure_root(database, options.root_mode, options.root_uid, options.root_gid, wall_ns())
            self._reclaimer.start()
        except BaseException as failure:
            database.close()
            if isinstance(failure, FsError):
                raise MetadataUnusable(f"{metadata}: {failure}") from failure
            raise

    # For the agent, beside the doors.
    def sealed_reads(self) -> SealedReads:
        """For who knows that nobody writes the files of the root that it reads, and keeps their names."""
        notes_use = self._options.on_full == "evict"
        return SealedReads(self._database, self._store, USED_STALE_NS if notes_use else None, self._wall_ns)

    def collect(self) -> Steps[bool]:
        """Look into suspects, delete some doomed blocks; True if more may be deletable. For a supervisor."""
        return self._content.collect()

    def seal_everything(self) -> Steps[int]:
        """Flush every open file before an orderly end. Returns how many files it could not flush."""
        failures = 0
        for file in self._open_files.files():
            try:
                yield from self._content.flush(file)
            except FsError:
                failures += 1
        return failures

    def orphans(self, stored: Iterable[bytes]) -> list[bytes]:
        """Of the block identifiers in the store, those that no file has and no deletion awaits.

        A crash makes none (block_rows.py); a metadata file restored from a backup does. Identifiers must be
        gathered before this is called, so that a block that is put meanwhile is not among them.
        """
        unknown = set(stored)
        for ino, position, version in self._database.each(
            "SELECT ino, position, version FROM blocks UNION ALL SELECT ino, position, version FROM doomed"
        ):
            unknown.discard(block_id(self._database.file_system_id, ino, position, version))
        return sorted(unknown)

    def gauges(self) -> FilesGauges:
        """What is held now, for metrics and `g35 status`."""
        doomed, doomed_bytes = doomed_backlog(self._database, BACKLOG_ROWS_COUNTED)
        opened, staged, lent = len(self._open_files.files()), len(self._staging), self._staging.memory.lent
        return FilesGauges(self._inodes(), opened, staged, lent, doomed, doomed_bytes)

    def close(self) -> None:
        """Close the metadata. No operation may be under way."""
        self._database.close()

    # Names.

    def lookup(self, caller: Caller, parent: int, name: bytes) -> Outcome[Entry]:
        return self._entry(directories.look_up(self._database, local_ino(parent), name))

    def forget(self, ino: int, lookups: int) -> None:
        try:
            local = local_ino(ino)
        except FsError:
            return
        if self._open_files.forgotten(local, lookups):
            self._reclaimer.reap(local)

    def mknod(self, caller: Caller, parent: int, name: bytes, mode: int, rdev: int) -> Outcome[Entry]:
        kind = stat.S_IFMT(mode) or stat.S_IFREG
        if kind == stat.S_IFDIR:
            raise FsError(errno.EPERM)
        if kind not in (stat.S_IFREG, stat.S_IFIFO, stat.S_IFSOCK, stat.S_IFCHR, stat.S_IFBLK):
            raise FsError(errno.EINVAL)
        return self._make(caller, parent, name, kind | mode & _MODE_BITS & ~caller.umask, rdev=rdev)

    def mkdir(self, caller: Caller, parent: int, name: bytes, mode: int) -> Outcome[Entry]:
        return self._make(caller, parent, name, stat.S_IFDIR | mode & _MODE_BITS & ~caller.umask)

    def symlink(self, caller: Caller, parent: int, name: bytes, target: bytes) -> Outcome[Entry]:
        if len(target) > directories.SYMLINK_BYTES_MAX:
            raise FsError(errno.ENAMETOOLONG)
        if not target:
            raise FsError(errno.ENOENT)
        return self._make(caller, parent, name, stat.S_IFLNK | 0o777, target=target)

    def _make(
        self, caller: Caller, parent: int, name: bytes, mode: int, rdev: int = 0, target: bytes | None = None
    ) -> Entry:
        self._check_inodes()
        with self._database.transaction() as tx:
            node = directories.make(
                tx,
                caller,
                local_ino(parent),
                name,
                mode,
                self._wall_ns(),
                block_bytes=self._block_bytes if stat.S_ISREG(mode) else 0,
                rdev=rdev,
                target=target,
            )
        return self._entry(node)

    def link(self, caller: Caller, ino: int, new_parent: int, new_name: bytes) -> Outcome[Entry]:
        check_same_face(ino, new_parent)
        with self._database.transaction() as tx:
            node = directories.add_link(tx, local_ino(ino), local_ino(new_parent), new_name, self._wall_ns())
        return self._entry(node)

    def unlink(self, caller: Caller, parent: int, name: bytes) -> Outcome[None]:
        with self._database.transaction() as tx:
            gone = directories.remove_file(tx, local_ino(parent), name, self._wall_ns())
        return self._lost_a_name(gone)

    def rmdir(self, caller: Caller, parent: int, name: bytes) -> Outcome[None]:
        with self._database.transaction() as tx:
            gone = directories.remove_directory(tx, local_ino(parent), name, self._wall_ns())
        return self._lost_a_name(gone)

    def rename(
        self, caller: Caller, parent: int, name: bytes, new_parent: int, new_name: bytes, flags: int
    ) -> Outcome[None]:
        check_same_face(parent, new_parent)
        old_home, new_home = local_ino(parent), local_ino(new_parent)
        with self._database.transaction() as tx:
            replaced = directories.rename(tx, old_home, name, new_home, new_name, flags, self._wall_ns())
        return None if replaced is None else self._lost_a_name(replaced)

    def _lost_a_name(self, ino: int) -> Outcome[None]:
        if self._reclaimer.reap(ino) and self._reclaimer.backlog_is_long():
            return self._reclaimer.tidy()
        return None

    def readlink(self, caller: Caller, ino: int) -> Outcome[bytes]:
        rows = self._database.query("SELECT target FROM inodes WHERE ino = ?", local_ino(ino))
        if not rows:
            raise FsError(errno.ESTALE)
        if rows[0][0] is None:
            raise FsError(errno.EINVAL)
        return bytes(rows[0][0])

    def opendir(self, caller: Caller, ino: int, flags: int) -> Outcome[Opened]:
        self._directory(ino)
        # A listing goes by cookies alone, so there is nothing to remember between open and close.
        return Opened(handle=0)

    def readdir(self, ino: int, handle: int, cookie: int) -> Outcome[Iterable[DirectoryEntry]]:
        return directories.listing(self._database, self._directory(ino), cookie)

    def fsyncdir(self, ino: int, handle: int, data_only: bool) -> Outcome[None]:
        self._directory(ino)
        self._database.sync()
        return None

    def _directory(self, ino: int) -> Inode:
        node = inodes.find(self._database, local_ino(ino))
        if not node.is_directory:
            raise FsError(errno.ENOTDIR)
        return node

    # Attributes.

    def getattr(self, caller: Caller, ino: int, handle: int | None) -> Outcome[Attributes]:
        return self._attributes(local_ino(ino))

    def _attributes(self, ino: int, node: Inode | None = None) -> Attributes:
        live = self._open_files.live(ino)
        if node is None or live is not None:
            node = inodes.find(self._database, ino)
        if live is not None:
            size, mtime_ns, staged_bytes = live
            node = replace(
                node,
                size=size,
                mtime_ns=node.mtime_ns if mtime_ns is None else mtime_ns,
                ctime_ns=max(node.ctime_ns, mtime_ns or 0),
                stored=node.stored + staged_bytes,
            )
        return node.attributes()

    def _entry(self, node: Inode) -> Entry:
        attributes = self._attributes(node.ino, node)
        self._open_files.looked_up(node.ino)
        seconds = self._options.cache_seconds
        return Entry(attributes, entry_seconds=seconds, attribute_seconds=seconds)

    def setattr(
        self, caller: Caller, ino: int, changes: SetAttributes, handle: int | None
    ) -> Outcome[Attributes]:
        local = local_ino(ino)
        if changes.size is None and not self._open_files.in_use(local):
            self._set_columns(local, changes)
            return self._attributes(local)
        return self._setattr_in_use(local, changes)

    def _setattr_in_use(self, ino: int, changes: SetAttributes) -> Steps[Attributes]:
        file = self._open_files.pin(ino)
        try:
            if changes.size is not None:
                yield from self._content.resize(file, changes.size, self._wall_ns())
            # With the gate, so that no seal commits the time of an older write over a time set here.
            with (yield from self._content.hold_quiet(file)):
                if self._set_columns(ino, changes):
                    with self._open_files.state:
                        file.mtime_ns = None
            return self._attributes(ino)
        finally:
            yield from self._content.let_go(file)

    def _set_columns(self, ino: int, changes: SetAttributes) -> bool:
        """Change what is neither size nor bytes; True if the time of modification was set."""
        now_ns = self._wall_ns()
        columns: dict[str, int] = {}
        if changes.uid is not None:
            columns["uid"] = changes.uid
        if changes.gid is not None:
            columns["gid"] = changes.gid
        if changes.touch_atime or changes.atime_ns is not None:
            columns["atime_ns"] = now_ns if changes.atime_ns is None else changes.atime_ns
        if changes.touch_mtime or changes.mtime_ns is not None:
            columns["mtime_ns"] = now_ns if changes.mtime_ns is None else changes.mtime_ns
        if columns or changes.mode is not None:
            with self._database.transaction() as tx:
                if changes.mode is not None:
                    kind = stat.S_IFMT(inodes.find_within(tx, ino).mode)
                    if kind == stat.S_IFLNK:
                        raise FsError(errno.EOPNOTSUPP)
                    columns["mode"] = kind | changes.mode & _MODE_BITS
                inodes.set_columns(tx, ino, ctime_ns=now_ns, **columns)
        return "mtime_ns" in columns

    def statfs(self, ino: int) -> Outcome[StatFs]:
        total, free = self._store.usage()
        _, doomed = doomed_backlog(self._database, BACKLOG_ROWS_COUNTED)
        free = max(0, min(total, free + doomed) - self._staging.reserved) // STATFS_BLOCK_BYTES
        inodes_left = max(0, self._options.files_max - self._inodes())
        return StatFs(
            blocks=total // STATFS_BLOCK_BYTES,
            blocks_free=free,
            blocks_available=free,
            files=self._options.files_max,
            files_free=inodes_left,
            block_size=STATFS_BLOCK_BYTES,
        )

    def _inodes(self) -> int:
        [(count,)] = self._database.query("SELECT value FROM facts WHERE name = 'inodes'")
        return int(count)

    def _check_inodes(self) -> None:
        if self._inodes() >= self._options.files_max:
            raise FsError(errno.ENOSPC, "as many files as the configuration allows")

    # Bytes.

    def open(self, caller: Caller, ino: int, flags: int) -> Steps[Opened]:
        number, file = self._open_files.open(local_ino(ino), flags & os.O_ACCMODE, caller.holder)
        if flags & os.O_TRUNC and file.size:
            try:
                yield from self._content.resize(file, 0, self._wall_ns())
            except BaseException:
                yield from self.release(ino, number)
                raise
        # Who only writes asks for each write(2) anyway, so the kernel's page cache would be one copy more.
        direct_writes = flags & os.O_ACCMODE == os.O_WRONLY and not file.size
        return Opened(handle=number, direct_writes=direct_writes)

    def create(
        self, caller: Caller, parent: int, name: bytes, mode: int, flags: int
    ) -> Steps[tuple[Entry, Opened]]:
        home = local_ino(parent)
        self._check_inodes()
        mode = stat.S_IFREG | mode & _MODE_BITS & ~caller.umask
        with self._database.transaction() as tx:
            node = None if flags & os.O_EXCL else directories.child_within(tx, home, name)
            if node is None:
                node = directories.make(
                    tx, caller, home, name, mode, self._wall_ns(), block_bytes=self._block_bytes
                )
        opened = yield from self.open(caller, global_ino(node.ino), flags)
        return self._entry(node), opened

    def read(self, ino: int, handle: int, offset: int, into: memoryview) -> Outcome[int]:
        used = self._open_files.handle(local_ino(ino), handle)
        if not used.readable or offset < 0:
            raise FsError(errno.EINVAL if used.readable else errno.EBADF)
        used.was_read = True
        return self._content.read(used.file, offset, into)

    def write(
        self, ino: int, handle: int, offset: int, data: memoryview, by: LockOwner = NOBODY
    ) -> Outcome[int]:
        file = self._writable(ino, handle, offset)
        return self._content.write(file, offset, data, self._wall_ns())

    def _writable(self, ino: int, handle: int, offset: int) -> OpenFile:
        used = self._open_files.handle(local_ino(ino), handle)
        if not used.writable or offset < 0:
            raise FsError(errno.EINVAL if used.writable else errno.EBADF)
        return used.file

    def fallocate(self, ino: int, handle: int, mode: int, offset: int, length: int) -> Outcome[None]:
        file = self._writable(ino, handle, offset)
        if length <= 0:
            raise FsError(errno.EINVAL)
        keep_size = bool(mode & FALLOC_KEEP_SIZE)
        now_ns = self._wall_ns()
        kind = mode & ~FALLOC_KEEP_SIZE
        if kind == 0:
            return self._content.reserve(file, offset, length, keep_size, now_ns)
        if kind == FALLOC_PUNCH_HOLE and keep_size:
            return self._content.punch(file, offset, length, now_ns)
        if kind == FALLOC_ZERO_RANGE:
            return self._zero_range(file, offset, length, keep_size, now_ns)
        raise FsError(errno.EOPNOTSUPP)

    def _zero_range(
        self, file: OpenFile, offset: int, length: int, keep_size: bool, now_ns: int
    ) -> Steps[None]:
        """Holes read as zeros, so zeroing is punching; then the room is asked for, as is promised."""
        yield from self._content.punch(file, offset, length, now_ns)
        yield from self._content.reserve(file, offset, length, keep_size, now_ns)

    def flush(self, ino: int, handle: int, by: LockOwner = NOBODY) -> Outcome[None]:
        return self._content.flush(self._open_files.handle(local_ino(ino), handle).file)

    def fsync(self, ino: int, handle: int, data_only: bool) -> Outcome[None]:
        return self._content.sync(self._open_files.handle(local_ino(ino), handle).file)

    def release(self, ino: int, handle: int) -> Steps[None]:
        local = local_ino(ino)
        used = self._open_files.drop_handle(local, handle)
        try:
            self._note_use(local, used.was_read)
        finally:
            yield from self._content.let_go(used.file)

    def _note_use(self, ino: int, was_read: bool) -> None:
        """Renew the access time and the time of use, but not for each of many closes."""
        now_ns = self._wall_ns()
        rows = self._database.query("SELECT used_ns, atime_ns, mtime_ns FROM inodes WHERE ino = ?", ino)
        if not rows:
            return
        used_ns, atime_ns, mtime_ns = rows[0]
        columns: dict[str, int] = {}
        if self._options.on_full == "evict" and now_ns - used_ns >= USED_STALE_NS:
            columns["used_ns"] = now_ns
        if was_read and (atime_ns <= mtime_ns or now_ns - atime_ns >= ATIME_STALE_NS):
            columns["atime_ns"] = now_ns
        if columns:
            with self._database.transaction() as tx:
                inodes.set_columns(tx, ino, **columns)

    # Extended attributes.

    def setxattr(self, caller: Caller, ino: int, name: bytes, value: bytes, flags: int) -> Outcome[None]:
        extended_attributes.set_value(self._database, local_ino(ino), name, value, flags, self._wall_ns())
        return None

    def getxattr(self, caller: Caller, ino: int, name: bytes, room: memoryview) -> Outcome[bytes]:
        return extended_attributes.get_value(self._database, local_ino(ino), name)

    def listxattr(self, caller: Caller, ino: int) -> Outcome[list[bytes]]:
        return extended_attributes.names(self._database, local_ino(ino))

    def removexattr(self, caller: Caller, ino: int, name: bytes) -> Outcome[None]:
        extended_attributes.remove(self._database, local_ino(ino), name, self._wall_ns())
        return None
