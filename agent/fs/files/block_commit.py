"""From staged to stored: how a block gets into the store and becomes part of its file.

A block is never changed in place. Sealing announces a fresh version, puts it, and makes it current in
one transaction (block_rows.py). Killed before that transaction, the file has the old version; after it,
the new one.

Which capacity: the tightest that holds the block's valid bytes, or, when that volume is full, the next
larger one that has room. So all blocks of a large file but its tail lie in slots of the block size, and
a small file or a tail takes the smallest slot that fits.

A writer that has filled a block need not wait until the block is stored: the seal goes on beside the next
writes (`begin`), without the gate of the file. Bytes of several blocks are then under way at once. The
blocks become current in the order in which their seals began, so a file whose agent is killed has no hole
where the program wrote one block after the other. Where one fails, those behind it are not made current
either; all stay staged, and the next request tries again.
"""

import errno
import itertools
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from agent.fs.files import block_rows
from agent.fs.files.block_rows import SealedBlock
from agent.fs.files.block_store import (
    BlockStore,
    StoreFull,
    StoreUnavailable,
    StoreUnreached,
    block_id,
    fitting,
)
from agent.fs.files.metadata_database import Database
from agent.fs.files.open_files import OpenFile, OpenFiles, SealUnderWay
from agent.fs.files.options import FilesCounters
from agent.fs.files.space_reclaim import Reclaimer
from agent.fs.files.staging import StagedBlock, Staging
from agent.fs.interface import FsError
from agent.host_os.rate_limited_log import Complaints
from agent.pool.steps import Steps

log = logging.getLogger(__name__)

VERSIONS_PER_OPENING: Final = 1 << 32
"""A version is the number of this opening of the file system, then a count: never given out twice, not
even for a block that a killed process put without making it current."""

PLACES_TRIED: Final = 3
"""The places that one block tries while a place cannot be written. Each try ends within the volume's write
deadline."""

NAMES_DRAWN: Final = 256
"""The identifiers drawn for one that leads past enclosures known to be away. With one reached of 64, three
puts of 10,000 find none; with one of 8, none ever."""


@dataclass(eq=False)
class Sealer:
    """Seals, admits and finds memory. The caller holds the gate of the file it names; a `BlockSeal` that has
    begun needs none."""

    _database: Database
    _store: BlockStore
    _open_files: OpenFiles
    _staging: Staging
    _reclaimer: Reclaimer
    _counters: FilesCounters

    def __post_init__(self) -> None:
        self._complaints = Complaints(log)
        self._versions = itertools.count(self._database.opening * VERSIONS_PER_OPENING)

    def put(
        self, file: OpenFile, position: int, data: memoryview, earlier: Sequence[SealUnderWay] = ()
    ) -> Steps[None]:
        """Store `data` as the file's block at `position` and make it current, after `earlier` seals.

        ENOSPC when no volume has room, nor can be made to; EIO when the enclosure did not do it. The file
        keeps what it had in both cases.
        """
        sizes = fitting(self._store.capacities, len(data))
        while True:
            for capacity in sizes:
                if (yield from self._put_into(file, position, capacity, data, earlier)):
                    self._counters.blocks_sealed += 1
                    self._counters.bytes_sealed += len(data)
                    return
            if not (yield from self._reclaimer.make_room()):
                self._counters.seals_failed += 1
                raise FsError(errno.ENOSPC)

    def _put_into(
        self,
        file: OpenFile,
        position: int,
        capacity: int,
        data: memoryview,
        earlier: Sequence[SealUnderWay],
    ) -> Steps[bool]:
        """The same with slots of one capacity; False when none is free.

        Where the place that the block's name leads to cannot be written just now, because of its enclosure or
        of a write there whose fate is unknown, it gets another name, and with it most likely another place.
        What was never sent, because its name led to enclosures that are away, is no try: the next name leads
        to another. That ends, for each such name makes at least one more place known as away.
        """
        fault: StoreUnavailable | None = None
        away: set[int] = set()
        tries = 0
        while tries < PLACES_TRIED:
            drawn = self._draw(file, position, capacity, away)
            if drawn is None:
                break
            version, name = drawn
            try:
                return (yield from self._put_once(file, position, capacity, data, version, name, earlier))
            except StoreUnreached as unreached:
                fault = unreached
                away.update(self._store.places(name, capacity))
            except StoreUnavailable as refusal:
                fault = refusal
                tries += 1
        self._counters.seals_failed += 1
        raise FsError(errno.EIO, f"block not stored: {fault}") from fault

    def _draw(self, file: OpenFile, position: int, capacity: int, away: set[int]) -> tuple[int, bytes] | None:
        """A version that no block had, and the name that the block has with it, which leads past `away`."""
        for _ in range(NAMES_DRAWN):
            version = next(self._versions)
            name = block_id(self._database.file_system_id, file.ino, position, version)
            if not away or not away.issuperset(self._store.places(name, capacity)):
                return version, name
        return None

    def _put_once(
        self,
        file: OpenFile,
        position: int,
        capacity: int,
        data: memoryview,
        version: int,
        name: bytes,
        earlier: Sequence[SealUnderWay],
    ) -> Steps[bool]:
        with self._database.transaction() as tx:
            announced = block_rows.announce(tx, file.ino, position, version, capacity)
        try:
            yield from self._store.put(name, capacity, data)
            yield from self._wait_for(earlier)
            self._commit(file, announced, position, SealedBlock(version, capacity, len(data)))
        except (StoreFull, StoreUnreached) as refusal:
            with self._database.transaction() as tx:
                block_rows.take_back(tx, announced)
            if isinstance(refusal, StoreUnreached):
                raise
            return False
        except BaseException as fault:
            with self._database.transaction() as tx:
                block_rows.give_up(tx, announced)
            if not isinstance(fault, StoreUnavailable):
                self._counters.seals_failed += 1
            raise
        return True

    def _commit(self, file: OpenFile, announced: int, position: int, block: SealedBlock) -> None:
        """The new version is current, and size and time are at least what this block shows of them."""
        end = position * file.block_bytes + block.length
        with self._database.transaction() as tx:
            # Read within the transaction: that of another seal of this file stores what it reads later.
            mtime_ns = file.mtime_ns
            block_rows.take_back(tx, announced)
            block_rows.make_current(tx, file.ino, position, block, end, mtime_ns)
        with self._open_files.state:
            if file.mtime_ns == mtime_ns:
                file.mtime_ns = None
            file.committed_size = max(file.committed_size, end)
            file.size = max(file.size, end)

    def commit_pending(self, file: OpenFile) -> None:
        """Bring size and time of the last write into the database, after the blocks."""
        if file.pending:
            with self._database.transaction() as tx:
                block_rows.store_size(tx, file.ino, file.size, file.mtime_ns)
            with self._open_files.state:
                file.mtime_ns = None
                file.committed_size = file.size

    def seal(self, file: OpenFile, block: StagedBlock, *, keep: bool = False) -> Steps[None]:
        """Store a staged block, and drop it from memory unless it is to be kept, clean.

        It becomes current behind what is under way; so this worker may have put off none of that.
        """
        if block.dirty:
            with self._open_files.state:
                earlier = tuple(file.under_way.values())
            try:
                if block.length:
                    yield from self.put(file, block.position, block.memory[: block.length], earlier)
                else:
                    with self._database.transaction() as tx:
                        block_rows.drop(tx, file.ino, block.position, block.position)
            except FsError:
                file.failed = True
                raise
        with self._open_files.state:
            block.dirty = False
            self._staging.reserve(block, 0)
            if not keep:
                self.drop(file, block)

    def seal_all(self, file: OpenFile) -> Steps[None]:
        """Everything that was written is in the store and in the database, or this raises.

        What is under way is waited for, and not begun again.
        """
        yield from self.quiet(file)
        for block in file.dirty_blocks:
            yield from self.seal(file, block, keep=True)
        self.commit_pending(file)
        file.failed = False

    def begin(self, file: OpenFile, block: StagedBlock) -> "BlockSeal | None":
        """The seal of a staged block, which goes on without the gate; None where there is nothing to seal, or
        an earlier block of the file could not be sealed.

        Somebody has to run its steps, and to call `end` whether they ran or not.
        """
        with self._open_files.state:
            is_due = block.dirty and file.staged.get(block.position) is block
            if not is_due or block.position in file.under_way or file.failed:
                return None
            return self.begun(file, block)

    def begun(self, file: OpenFile, block: StagedBlock) -> "BlockSeal":
        """As `begin`, of a block that is due. `OpenFiles.state` is held."""
        earlier = tuple(file.under_way.values())
        under_way = file.under_way[block.position] = SealUnderWay()
        return BlockSeal(self, file, block, under_way, earlier)

    def run_begun(
        self, file: OpenFile, block: StagedBlock, under_way: SealUnderWay, earlier: Sequence[SealUnderWay]
    ) -> Steps[None]:
        """Store a block whose seal has begun, and drop it from memory.

        Where that fails the block stays staged, and `file.failed` makes the next request hear of it.
        """
        try:
            yield from self.put(file, block.position, block.memory[: block.length], earlier)
        except FsError as fault:
            self.complain(file, fault)
            return
        with self._open_files.state:
            block.dirty = False
            self.drop(file, block)
            under_way.failed = False

    def ended(self, file: OpenFile, block: StagedBlock, under_way: SealUnderWay) -> None:
        """A seal that had begun goes no further: those who wait for it go on."""
        with self._open_files.state:
            if under_way.is_over:
                return
            if under_way.failed:
                block.move_home()
                file.failed = True
            del file.under_way[block.position]
            under_way.end()

    def quiet(self, file: OpenFile, position: int | None = None) -> Steps[None]:
        """Wait until no seal of the file is under way, or none of its block at `position`. EIO when that
        takes too long. With the gate held none begins meanwhile."""
        while True:
            with self._open_files.state:
                if position is not None:
                    under_way = file.under_way.get(position)
                else:
                    under_way = next(iter(file.under_way.values()), None)
            if under_way is None:
                return
            with (yield from self._reclaimer.hold(under_way.ended)):
                pass

    def _wait_for(self, earlier: Sequence[SealUnderWay]) -> Steps[None]:
        """Wait until these seals have ended. EIO where one of them failed."""
        for each in earlier:
            with (yield from self._reclaimer.hold(each.ended)):
                pass
            if each.failed:
                raise FsError(errno.EIO, "an earlier block of the file could not be stored")

    def complain(self, file: OpenFile, fault: FsError) -> None:
        """The bytes stay staged; the next fsync or close tries again and reports."""
        what = "a staged block could not be sealed"
        self._complaints.world(what, f"inode {file.ino}, {fault}", logging.INFO)

    def drop(self, file: OpenFile, block: StagedBlock) -> None:
        """Forget a staged block. `OpenFiles.state` is held."""
        del file.staged[block.position]
        self._staging.remove(block)

    def discard(self, file: OpenFile) -> None:
        """Forget all that is staged; the file is again what the database says. `OpenFiles.state` is held."""
        for block in list(file.staged.values()):
            if block.dirty:
                self._counters.bytes_discarded += block.length
            self.drop(file, block)
        file.size = file.committed_size
        file.mtime_ns = None
        file.failed = False

    def admit(self, file: OpenFile, capacity: int) -> Steps[None]:
        """ENOSPC unless the store has room for `capacity` bytes of the file beside all that is staged.

        So a program mostly hears of a full store from write(2), which it checks, and not from close(2).
        """
        while True:
            _, free = self._store.usage()
            if free - self._staging.reserved >= capacity:
                return
            if file.under_way:
                # Such a block may have its slot already, and then counts twice.
                yield from self._first_end(file)
                continue
            if not (yield from self._reclaimer.make_room()):
                raise FsError(errno.ENOSPC)

    def buffer(self, file: OpenFile, size: int, position: int) -> Steps[memoryview]:
        """Memory for the file's block at `position`, taken from older blocks if need be.

        Clean blocks go first, then the oldest of this file's, then the oldest of a file whose gate is
        free: it is tried and never waited for, so two writers cannot wait for each other. Where neither is to
        be had, and blocks of this file are under way, the first of these is waited for: a worker is at it.
        """
        refused: dict[int, FsError] = {}
        while True:
            with self._open_files.state:
                memory = self._staging.memory.take(size)
            if memory is not None:
                return memory
            victim = self._victim(file, position, refused)
            if victim is None:
                if not file.under_way:
                    break
                yield from self._first_end(file)
                continue
            other, block = victim
            try:
                yield from self.seal(other, block)
            except FsError as fault:
                if other is file:
                    raise
                refused[other.ino] = fault
            finally:
                if other is not file:
                    other.gate.release()
        for refusal in refused.values():
            raise FsError(refusal.errno, "staging memory is full of blocks that cannot be stored")
        with self._open_files.state:
            memory = self._staging.memory.take(size, overdraw=True)
        if memory is None:
            raise FsError(errno.ENOMEM, "staging memory is full and every file is busy")
        return memory

    def _first_end(self, file: OpenFile) -> Steps[None]:
        """Wait until the seal that began first has ended."""
        with self._open_files.state:
            under_way = next(iter(file.under_way.values()), None)
        if under_way is not None:
            with (yield from self._reclaimer.hold(under_way.ended)):
                pass

    def _victim(
        self, file: OpenFile, position: int, refused: dict[int, FsError]
    ) -> tuple[OpenFile, StagedBlock] | None:
        """A block to give up; the gate of its file is held if that is another file."""
        own: StagedBlock | None = None
        with self._open_files.state:
            for block in self._staging.oldest():
                if block.ino == file.ino:
                    if block.position != position and block.position not in file.under_way:
                        if not block.dirty:
                            return file, block
                        own = own or block
                elif not block.dirty:
                    other = self._open_files.get(block.ino)
                    if other is not None and other.gate.acquire(blocking=False):
                        return other, block
            if own is not None:
                return file, own
            for block in self._staging.oldest():
                other = self._open_files.get(block.ino)
                if other is None or other is file or block.ino in refused:
                    continue
                if block.position in other.under_way:
                    continue
                if other.gate.acquire(blocking=False):
                    return other, block
        return None

    def settle_overdraft(self, file: OpenFile) -> Steps[None]:
        """Give back what was lent beyond the limit, before the request ends."""
        while self._staging.memory.overdrawn and not file.failed:
            with self._open_files.state:
                # What is under way comes back by itself.
                mine = (each for each in file.staged.values() if each.position not in file.under_way)
                block = next(mine, None)
            if block is None:
                return
            try:
                yield from self.seal(file, block)
            except FsError as fault:
                self.complain(file, fault)


class BlockSeal:
    """The seal of one block, begun (`Sealer.begin`): work that may be done after a reply (after_reply.py)."""

    def __init__(
        self,
        sealer: Sealer,
        file: OpenFile,
        block: StagedBlock,
        under_way: SealUnderWay,
        earlier: Sequence[SealUnderWay],
    ) -> None:
        self._sealer: Final = sealer
        self._file: Final = file
        self._block: Final = block
        self._under_way: Final = under_way
        self._earlier: Final = earlier

    def steps(self) -> Steps[None]:
        try:
            yield from self._sealer.run_begun(self._file, self._block, self._under_way, self._earlier)
        finally:
            self.end()

    def end(self) -> None:
        self._sealer.ended(self._file, self._block, self._under_way)
