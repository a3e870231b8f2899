"""The bytes of files: read, write, resize, punch, flush and the last close, as steps.

A file is cut into blocks of its block size. A block is a hole, or staged (staging.py), or sealed
(block_commit.py); where it is both of the latter, the staged bytes count. A block that a writer has filled is
sealed once the writer has its answer, beside the next writes (after_reply.py).

Reads take no gate: they copy staged bytes under `OpenFiles.state`, ask the database where the rest lies, and
fetch it straight into the caller's buffer. A block that is overwritten meanwhile can be deleted under a
reader; then the reader looks once more, with the gate held, when nothing can move. If the store misses the
block then as well, the reader gets EIO, and the block is a suspect (suspect_blocks.py): no reader removes
anything.
"""

import contextlib
import errno
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from agent.fs.after_reply import AfterReply
from agent.fs.files import block_rows
from agent.fs.files.block_commit import BlockSeal, Sealer
from agent.fs.files.block_rows import SealedBlock
from agent.fs.files.block_store import BlockStore, StoreUnavailable, block_id, fitting
from agent.fs.files.inodes import set_columns
from agent.fs.files.metadata_database import Database
from agent.fs.files.open_files import OpenFile, OpenFiles
from agent.fs.files.space_reclaim import Reclaimer
from agent.fs.files.staging import StagedBlock, Staging, fill_zero
from agent.fs.files.suspect_blocks import SUSPECTS_MAX, Suspects
from agent.fs.interface import FsError
from agent.host_os.per_user_bounds import ALL, Bounds, Limit
from agent.pool.steps import Held, Steps

FILE_BYTES_MAX: Final = (1 << 63) - 1
POSITION_MAX: Final = (1 << 63) - 1

STAGED: Final = Limit(
    "staging-bytes", "bytes of files that are not sealed yet (`[files] staging`)", 256 << 20,
    by="everybody", share=ALL, refused="the oldest block is sealed", bytes_each=0,
)  # fmt: skip
NODES: Final = Limit(
    "fs-nodes", "nodes of /fs that kernels hold a reference to", 4_000_000,
    by="everybody", share=ALL, refused="there are no more files", bytes_each=256,
)  # fmt: skip
SUSPECT_BLOCKS: Final = Limit(
    "suspect-blocks", "blocks of files that are looked into", SUSPECTS_MAX,
    by="everybody", share=ALL, refused="not noted until it is read again", bytes_each=1024,
)  # fmt: skip


@dataclass(eq=False)
class Content:
    """What the face does with the bytes of a pinned file."""

    _database: Database
    _store: BlockStore
    _open_files: OpenFiles
    _staging: Staging
    _reclaimer: Reclaimer
    _sealer: Sealer
    _after_reply: AfterReply

    def __post_init__(self) -> None:
        self.suspects = Suspects(
            self._database, self._store, self._open_files, self._reclaimer, self.let_go, self._reclaimer.clock
        )

    def watch(self, bounds: Bounds, files_max: int) -> None:
        """Show what these tables hold: they keep their bounds by themselves."""
        memory, suspects = self._staging.memory, self.suspects
        bounds.watch(NODES, lambda: {"all": self._open_files.nodes()}, most=files_max)
        bounds.watch(STAGED, lambda: {"all": memory.lent}, most=memory.limit + memory.overdraft)
        bounds.watch(SUSPECT_BLOCKS, lambda: {"all": len(suspects)})

    def collect(self) -> Steps[bool]:
        """Look into suspects, and delete some doomed blocks; True if more may be deletable."""
        yield from self.suspects.look()
        return (yield from self._reclaimer.collect())

    # Reading.

    def read(self, file: OpenFile, offset: int, into: memoryview) -> Steps[int]:
        """Fill `into` from `offset` on; how many bytes, fewer at the end of the file.

        EIO when a block cannot be had now, or does not prove itself.
        """
        size_of_block = file.block_bytes
        elsewhere: list[tuple[int, int, memoryview]] = []
        with self._open_files.state:
            count = max(0, min(len(into), file.size - offset))
            done = 0
            while done < count:
                position, start = divmod(offset + done, size_of_block)
                part = into[done : min(count, done + size_of_block - start)]
                block = file.staged.get(position)
                if block is not None:
                    block.read(start, part)
                else:
                    elsewhere.append((position, start, part))
                done += len(part)
        if elsewhere:
            self._store.comes_again()
            first, last = elsewhere[0][0], elsewhere[-1][0]
            sealed = block_rows.sealed_range(self._database, file.ino, first, last)
            for position, start, part in elsewhere:
                if not (yield from self._fetch(file, position, sealed.get(position), start, part)):
                    yield from self._read_again(file, position, start, part)
        return count

    def _fetch(
        self,
        file: OpenFile,
        position: int,
        sealed: SealedBlock | None,
        start: int,
        into: memoryview,
    ) -> Steps[bool]:
        """Fill `into` from one version of a block; False when the store does not have it whole."""
        count = 0 if sealed is None else max(0, min(len(into), sealed.length - start))
        if sealed is not None and count:
            name = block_id(self._database.file_system_id, file.ino, position, sealed.version)
            try:
                if not (yield from self._store.get(name, sealed.capacity, start, into[:count])):
                    return False
            except StoreUnavailable as fault:
                raise FsError(errno.EIO, f"block not read: {fault}") from fault
        fill_zero(into[count:])
        return True

    def _read_again(self, file: OpenFile, position: int, start: int, into: memoryview) -> Steps[None]:
        with (yield from self._reclaimer.hold(file.gate)):
            with self._open_files.state:
                block = file.staged.get(position)
                if block is not None:
                    block.read(start, into)
                    return
            sealed = block_rows.sealed_at(self._database, file.ino, position)
            if not (yield from self._fetch(file, position, sealed, start, into)):
                raise self._suspected(file, position, sealed)

    def _suspected(self, file: OpenFile, position: int, sealed: SealedBlock | None) -> FsError:
        if sealed is not None:
            self.suspects.note(file, position, sealed)
        return FsError(errno.EIO, "a block of this file does not prove itself; it is looked into")

    # Writing. From here on, methods with an underscore want the gate held.

    def hold_quiet(self, file: OpenFile) -> Steps[Held]:
        """The gate of the file, with no seal of it under way: nothing of the file moves meanwhile."""
        held = yield from self._reclaimer.hold(file.gate)
        try:
            yield from self._sealer.quiet(file)
        except BaseException:
            file.gate.release()
            raise
        return held

    def write(self, file: OpenFile, offset: int, data: memoryview, now_ns: int) -> Steps[int]:
        """Write at `offset`; how many bytes were taken, fewer than offered when the store became full midway.

        EFBIG past the largest size, ENOSPC, EIO: then nothing of this request was taken.
        """
        if offset + len(data) > FILE_BYTES_MAX:
            raise FsError(errno.EFBIG)
        with (yield from self._reclaimer.hold(file.gate)):
            if file.failed:
                # An older block could not be sealed. Better to hear it now than from close(2).
                yield from self._sealer.seal_all(file)
            done, part = 0, data
            filled: list[StagedBlock] = []
            while done < len(data):
                position, start = divmod(offset + done, file.block_bytes)
                part = data[done : done + file.block_bytes - start]
                try:
                    if len(part) == file.block_bytes:
                        yield from self._seal_filled(file, filled, may_wait=False)
                        yield from self._sealer.settle_overdraft(file)
                        is_last = done + len(part) == len(data)
                        yield from self._write_whole(file, position, part, now_ns, is_last)
                    else:
                        block = yield from self._write_part(file, position, start, part, now_ns)
                        if block is not None:
                            filled.append(block)
                except FsError:
                    if done == 0:
                        raise
                    break
                done += len(part)
            if len(part) != file.block_bytes:
                yield from self._sealer.settle_overdraft(file)
            yield from self._seal_filled(file, filled, may_wait=True)
            return done

    def _seal_filled(self, file: OpenFile, filled: list[StagedBlock], may_wait: bool) -> Steps[None]:
        """Seal the blocks that a writer is done with: the last after the answer, where it `may_wait`.

        What is put off comes last of a request, for this worker waits for other seals of the file. Where a
        seal fails, the bytes were taken all the same; the next request hears of it.
        """
        for block in filled:
            seal = self._sealer.begin(file, block)
            if seal is not None:
                yield from self._seal_begun(seal, may_wait=may_wait and block is filled[-1])
        filled.clear()

    def _seal_begun(self, seal: BlockSeal, may_wait: bool) -> Steps[None]:
        if not (may_wait and self._after_reply.put_off(seal)):
            yield from seal.steps()

    def _write_whole(
        self, file: OpenFile, position: int, part: memoryview, now_ns: int, is_last: bool
    ) -> Steps[None]:
        """A whole block needs no staging: it goes from the caller's buffer to the enclosure. The last of a
        request may go after the answer, for the buffer stays until then."""
        yield from self._sealer.quiet(file, position)
        if file.failed:
            yield from self._sealer.seal_all(file)
        yield from self._sealer.admit(file, self._capacity_for(len(part)))
        if is_last and self._after_reply.has_room():
            seal = self._begin_whole(file, position, part, now_ns)
            if seal is not None:
                yield from self._seal_begun(seal, may_wait=True)
                return
        with self._open_files.state:
            earlier = tuple(file.under_way.values())
            if file.failed:
                raise FsError(errno.EIO, "an earlier block of the file could not be stored")
        before, file.mtime_ns = file.mtime_ns, now_ns
        try:
            yield from self._sealer.put(file, position, part, earlier)
        except FsError:
            file.mtime_ns = before
            raise
        with self._open_files.state:
            if position in file.staged:
                self._sealer.drop(file, file.staged[position])

    def _begin_whole(self, file: OpenFile, position: int, part: memoryview, now_ns: int) -> BlockSeal | None:
        """The seal of a block out of the caller's buffer, begun; None where the block would have no memory to
        go to if the seal fails."""
        with self._open_files.state:
            if file.failed:
                return None
            spare = self._staging.memory.take(self._staging.memory.size_for(len(part)))
            if spare is None:
                return None
            if position in file.staged:
                self._sealer.drop(file, file.staged[position])
            block = StagedBlock(file.ino, position, part, len(part), spare)
            self._changed(file, block, now_ns)
            file.size = max(file.size, position * file.block_bytes + len(part))
            return self._sealer.begun(file, block)

    def _write_part(
        self, file: OpenFile, position: int, start: int, part: memoryview, now_ns: int
    ) -> Steps[StagedBlock | None]:
        """The block, where the writer has come to its end and it waits to be sealed."""
        block = yield from self._stage(file, position, start, len(part))
        with self._open_files.state:
            block.write(start, part)
            self._changed(file, block, now_ns)
            file.size = max(file.size, position * file.block_bytes + start + len(part))
        # Sequential writers are done with a block when they reach its end. One that writes here and there
        # reaches it seldom enough.
        return block if start + len(part) == file.block_bytes else None

    def _changed(self, file: OpenFile, block: StagedBlock, now_ns: int) -> None:
        """A staged block differs from what is sealed. `OpenFiles.state` is held."""
        block.dirty = True
        file.staged[block.position] = block
        file.mtime_ns = now_ns
        self._staging.touch(block)
        self._staging.reserve(block, self._capacity_for(max(1, block.length)))

    def _capacity_for(self, length: int) -> int:
        return fitting(self._store.capacities, length)[0]

    def _stage(self, file: OpenFile, position: int, start: int, count: int) -> Steps[StagedBlock]:
        """A staged block with room for `count` bytes at `start`, holding what the file has there.

        A new one becomes visible to readers by `_changed` only, together with the bytes that are written.
        """
        end = start + count
        yield from self._sealer.quiet(file, position)
        block = file.staged.get(position)
        if block is not None:
            wanted = self._capacity_for(max(end, block.length))
            if wanted > block.reserved:
                yield from self._sealer.admit(file, wanted - block.reserved)
            if end > len(block.memory):
                yield from self._enlarge(file, block, end)
            return block
        sealed = block_rows.sealed_at(self._database, file.ino, position)
        kept = 0 if sealed is None else sealed.length
        wanted = max(end, kept)
        yield from self._sealer.admit(file, self._capacity_for(wanted))
        # The first block of a file may be all of it, so it starts small; a later one will be full size.
        room = self._staging.memory.size_for(wanted if position == 0 else file.block_bytes)
        memory = yield from self._sealer.buffer(file, room, position)
        block = StagedBlock(file.ino, position, memory)
        if sealed is not None and not (start == 0 and end >= kept):
            try:
                if not (yield from self._fetch(file, position, sealed, 0, memory[:kept])):
                    raise self._suspected(file, position, sealed)
            except BaseException:
                with self._open_files.state:
                    self._staging.memory.give(memory)
                raise
            block.length = kept
        return block

    def _enlarge(self, file: OpenFile, block: StagedBlock, end: int) -> Steps[None]:
        size = self._staging.memory.size_for(end)
        memory = yield from self._sealer.buffer(file, size, block.position)
        with self._open_files.state:
            memory[: block.length] = block.memory[: block.length]
            self._staging.memory.give(block.memory)
            block.memory = memory

    # Size and holes.

    def resize(self, file: OpenFile, size: int, now_ns: int) -> Steps[None]:
        """Cut the file, or let it end in a hole. Committed at once."""
        if not 0 <= size <= FILE_BYTES_MAX:
            raise FsError(errno.EINVAL if size < 0 else errno.EFBIG)
        with (yield from self.hold_quiet(file)):
            self._set_size(file, size, now_ns)
        yield from self._reclaimer.tidy()

    def _set_size(self, file: OpenFile, size: int, now_ns: int) -> None:
        last, kept = divmod(size, file.block_bytes)
        with self._database.transaction() as tx:
            if size < file.size:
                block_rows.shorten(tx, file.ino, last, kept)
                block_rows.drop(tx, file.ino, last + 1, POSITION_MAX)
            set_columns(tx, file.ino, size=size, mtime_ns=now_ns, ctime_ns=now_ns)
        with self._open_files.state:
            for position in [position for position in file.staged if position >= last]:
                self._cut_staged(file, file.staged[position], kept if position == last else 0)
            file.size = file.committed_size = size
            file.mtime_ns = None

    def _cut_staged(self, file: OpenFile, block: StagedBlock, length: int) -> None:
        """From `length` on, a staged block reads as zero. `OpenFiles.state` is held."""
        if length == 0:
            self._sealer.drop(file, block)
        elif length < block.length:
            block.length = length
            if block.dirty:
                self._staging.reserve(block, self._capacity_for(length))

    def punch(self, file: OpenFile, offset: int, length: int, now_ns: int) -> Steps[None]:
        """Make a range read as zero; whole blocks in it give their room back."""
        with (yield from self.hold_quiet(file)):
            end = min(offset + length, file.size)
            if offset < end:
                yield from self._punch(file, offset, end, now_ns)
        yield from self._reclaimer.tidy()

    def _punch(self, file: OpenFile, offset: int, end: int, now_ns: int) -> Steps[None]:
        size = file.block_bytes
        first, start = divmod(offset, size)
        last, stop = divmod(end, size)
        if first == last:
            yield from self._zero(file, first, start, stop, now_ns)
            return
        if start:
            yield from self._zero(file, first, start, size, now_ns)
            first += 1
        if first < last:
            with self._database.transaction() as tx:
                block_rows.drop(tx, file.ino, first, last - 1)
                set_columns(tx, file.ino, mtime_ns=now_ns, ctime_ns=now_ns)
            with self._open_files.state:
                for position in [position for position in file.staged if first <= position < last]:
                    self._sealer.drop(file, file.staged[position])
        if stop:
            yield from self._zero(file, last, 0, stop, now_ns)

    def _zero(self, file: OpenFile, position: int, start: int, stop: int, now_ns: int) -> Steps[None]:
        block = file.staged.get(position)
        sealed = block_rows.sealed_at(self._database, file.ino, position)
        if block is None and sealed is None:
            return
        valid = block.length if block is not None else sealed.length if sealed is not None else 0
        if start >= valid:
            return
        stop = min(stop, valid)
        if stop == valid:
            # The end of what is valid: the row says where that is, so no byte moves.
            with self._database.transaction() as tx:
                block_rows.shorten(tx, file.ino, position, start)
                set_columns(tx, file.ino, mtime_ns=now_ns, ctime_ns=now_ns)
            if block is not None:
                with self._open_files.state:
                    self._cut_staged(file, block, start)
            return
        block = yield from self._stage(file, position, start, stop - start)
        with self._open_files.state:
            fill_zero(block.memory[start:stop])
            block.length = max(block.length, stop)
            self._changed(file, block, now_ns)

    def reserve(self, file: OpenFile, offset: int, length: int, keep_size: bool, now_ns: int) -> Steps[None]:
        """fallocate(2) without flags: ENOSPC if the holes of the range would not fit now.

        The store has no notion of a slot that is promised, so another writer may still take the room.
        """
        end = offset + length
        if end > FILE_BYTES_MAX:
            raise FsError(errno.EFBIG)
        with (yield from self.hold_quiet(file)):
            first, last = offset // file.block_bytes, (end - 1) // file.block_bytes
            with self._open_files.state:
                have = sum(first <= position <= last for position in file.staged)
            sealed = self._database.query(
                "SELECT COUNT(*) FROM blocks WHERE ino = ? AND position BETWEEN ? AND ?",
                file.ino,
                first,
                last,
            )
            missing = max(0, last - first + 1 - have - sealed[0][0])
            if missing:
                per_block = self._capacity_for(min(length, file.block_bytes))
                yield from self._sealer.admit(file, missing * per_block)
            if end > file.size and not keep_size:
                self._set_size(file, end, now_ns)

    # Making it last.

    def flush(self, file: OpenFile) -> Steps[None]:
        """close(2): all that was written is sealed and committed, or the errno says why it is not.

        What cannot be sealed stays staged, so that an fsync after the cause is gone still saves it; the
        last close discards it. A file without a name is not worth a write.
        """
        if not file.pending and not file.staged:
            return
        with (yield from self._reclaimer.hold(file.gate)):
            if not self._is_unlinked(file):
                yield from self._sealer.seal_all(file)
        yield from self._reclaimer.tidy()

    def sync(self, file: OpenFile) -> Steps[None]:
        """fsync(2): as `flush`, and durable against loss of power, blocks first, then what points at them."""
        yield from self.flush(file)
        try:
            yield from self._store.flush(self._blocks_of(file))
        except StoreUnavailable as fault:
            raise FsError(errno.EIO, f"enclosure did not flush: {fault}") from fault
        self._database.sync()

    def _blocks_of(self, file: OpenFile) -> Iterator[tuple[bytes, int]]:
        """Identifier and capacity of each block that the file has now."""
        of = self._database.file_system_id
        for position, block in block_rows.sealed_range(self._database, file.ino, 0, POSITION_MAX).items():
            yield block_id(of, file.ino, position, block.version), block.capacity

    def _is_unlinked(self, file: OpenFile) -> bool:
        rows = self._database.query("SELECT nlink FROM inodes WHERE ino = ?", file.ino)
        return not rows or not rows[0][0]

    def let_go(self, file: OpenFile) -> Steps[None]:
        """Undo one pin. The last one seals what is left, or discards what could not be sealed.

        Nobody can be told of a failure here: close(2) has had its answer from `flush`.
        """
        while True:
            try:
                yield from self.hold_quiet(file)
                break
            except FsError:
                # A pin that stayed would keep the file for good; the holder of the gate ends in the end.
                continue
        try:
            if (
                file.uses == 1
                and (file.staged or file.pending)
                and not file.failed
                and not self._is_unlinked(file)
            ):
                with contextlib.suppress(FsError):
                    yield from self._sealer.seal_all(file)
        finally:
            with self._open_files.state:
                if file.uses == 1:
                    self._sealer.discard(file)
            self._open_files.unpin(file)
            file.gate.release()
        self._reclaimer.reap(file.ino, lost=file.lost)
        yield from self._reclaimer.tidy()
