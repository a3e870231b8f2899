"""Blocks of files that no flush has proven to be durable, so that fsync(2) knows what to look into.

A block is here from its put until all namespaces that it may lie on were flushed over a session that stood
since before the put (agent/pool/write/flush_tracking.py). With a later session the block is *in doubt*,
until it is read or deleted: the enclosure may have lost power meanwhile, and with it what it had
acknowledged.
"""

import logging
import threading
from collections import OrderedDict
from typing import NamedTuple

from agent.fs.files.block_store import StoreUnavailable
from agent.pool.counters import MissCause
from agent.pool.read.get import SlotReader
from agent.pool.steps import IoChannel, Steps
from agent.pool.volume.volume import Volume
from agent.pool.write.set_transaction import SetTransaction

log = logging.getLogger(__name__)

PIECE_BYTES = 1 << 20
"""A block is read again in pieces of this size."""
BLOCKS_MAX = 16384
"""The most blocks of each of the two kinds; some 4 MiB of memory. At this number a put flushes first."""


class Unsynced(NamedTuple):
    """A block, by the numbers of its writes (`first` to `last`) and the namespaces that it may lie on."""

    first: int
    last: int
    length: int
    namespaces: tuple[int, ...]


class UnsyncedBlocks:
    """The blocks that no flush has proven, by block id. Safe from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: OrderedDict[bytes, Unsynced] = OrderedDict()
        """The unproven blocks, in the order of their puts."""
        self._doubtful: OrderedDict[bytes, Unsynced] = OrderedDict()
        self._said = False

    def __len__(self) -> int:
        return len(self._open) + len(self._doubtful)

    @property
    def is_full(self) -> bool:
        return len(self._open) >= BLOCKS_MAX

    def add(self, block_id: bytes, block: Unsynced) -> None:
        """Note a block that was written, or found to stand, and that no flush has followed yet."""
        with self._lock:
            self._doubtful.pop(block_id, None)
            self._open[block_id] = block
            self._open.move_to_end(block_id)
            self._bound(self._open)

    def forget(self, block_id: bytes) -> None:
        with self._lock:
            self._open.pop(block_id, None)
            self._doubtful.pop(block_id, None)

    def drop_flushed(self, channel: IoChannel, *, all_of_them: bool = False) -> bool:
        """Forget those that were flushed since; whether any is in doubt.

        The oldest are looked at, up to the first that was not flushed, or `all_of_them`.
        """
        with self._lock:
            for block_id, block in list(self._open.items()):
                if any(channel.is_unflushed(each, block.first, block.last) for each in block.namespaces):
                    if all_of_them:
                        continue
                    break
                del self._open[block_id]
                if any(channel.doubtful(each) >= block.first for each in block.namespaces):
                    self._doubtful[block_id] = block
                    self._bound(self._doubtful)
            return bool(self._doubtful)

    def in_doubt(self, block_id: bytes) -> Unsynced | None:
        """What is known of a block that is in doubt; None: it is not."""
        with self._lock:
            return self._doubtful.get(block_id)

    def _bound(self, blocks: OrderedDict[bytes, Unsynced]) -> None:
        while len(blocks) > BLOCKS_MAX:
            blocks.popitem(last=False)
            if not self._said:
                self._said = True
                log.warning(
                    "more than %d blocks of files were written that no flush has proven to be durable: if an "
                    "enclosure loses power now, fsync may not tell of the oldest",
                    BLOCKS_MAX,
                )


def stands(volume: Volume, channel: IoChannel, block_id: bytes, length: int) -> Steps[bool]:
    """Whether a block is there, all of it, by what the enclosures say now; nothing remembered is believed.

    Raises `StoreUnavailable` where that cannot be told.
    """
    seconds = volume.timing.write_deadline
    pseudonym = volume.placement.pseudonym(block_id)
    with volume.borrowed(pseudonym) as sets:
        deadline = channel.now() + seconds
        with SetTransaction(volume, channel, *sets) as locked:
            if not (yield from locked.lock(deadline)):
                raise StoreUnavailable("block unavailable: the directory is being written all the time")
            trouble = yield from locked.load(deadline)
            found = any(each.cached.fault is None for each in volume.find(sets, pseudonym))
    if not found:
        if trouble is not None:
            raise StoreUnavailable(f"block unavailable: {trouble.name.lower()}")
        return False
    reading = SlotReader(volume, block_id)
    into = memoryview(bytearray(min(length, PIECE_BYTES)))
    try:
        for at in range(0, length, PIECE_BYTES):
            piece = into[: length - at]
            count = yield from reading.read(channel, at, piece, channel.now() + seconds)
            if reading.cause in (MissCause.LATE, MissCause.ENCLOSURE_DOWN):
                raise StoreUnavailable(f"block unavailable: {reading.cause.name.lower()}")
            if reading.cause is not None or count != len(piece):
                return False
    finally:
        reading.close()
    return True
