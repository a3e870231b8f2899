"""Blocks of files in volumes of the pool: the `BlockStore` that /fs stands on (agent/fs/files).

Blocks lie in volumes of kind `files`, one for each capacity. A block is never evicted: a set without a free
slot refuses, and the program gets ENOSPC. A block that does not prove itself is not served; several
examinations with time between find out whether it is lost (agent/pool/maintenance/loss_check.py).

An agent with an older pool map than others lacks keys that they seal with, and places. So a block is lost
only where it is not there by the newest map; until all namespaces were asked nothing is said of it. Nor is
anything where the map says that the volume was erased: an agent does not remove files because of a map.
"""

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final

from agent.fs.files.block_store import StoreFull, StoreUnavailable, StoreUnreached
from agent.fs.files.fsync_tracking import Unsynced, UnsyncedBlocks, stands
from agent.fs.files.metadata_pool import PoolOfNames, noted_home
from agent.pool.counters import MissCause
from agent.pool.errors import PutRefused
from agent.pool.maintenance.loss_check import Undecided, examine, set_aside
from agent.pool.read.get import SlotReader
from agent.pool.steps import IoChannel, Steps
from agent.pool.volume.volume import Volume
from agent.pool.write.delete_and_pin import delete_block
from agent.pool.write.flush_tracking import flush_written
from agent.pool.write.put import SlotWriter

log = logging.getLogger(__name__)

PIECE_BYTES: Final = 1 << 20
"""A block is sealed and sent in pieces of this size; a worker's buffer holds no more."""
OPEN_BLOCKS_MAX: Final = 1024
"""Blocks whose header is remembered, so that reading on in a block does not ask for it again."""

FLUSHES_MAX: Final = 3
"""The most flushes of one fsync, where ended sessions make it read blocks again."""

_MAY_COME_BACK: Final = (MissCause.LATE, MissCause.ENCLOSURE_DOWN)


def store_for(
    metadata: Path, pool_id: str, volumes: Sequence[Volume], channel: Callable[[], IoChannel]
) -> "tuple[PoolBlockStore, PoolOfNames]":
    """The store for the names in a metadata file, and what that is to note (agent/fs/files/metadata_pool.py).

    Of several volumes of one capacity it is the one that has the blocks that are named already, and for a
    new file the first.
    """
    noted = noted_home(metadata).volumes
    chosen: dict[int, Volume] = {}
    for volume in volumes:
        capacity, name = volume.settings.value_bytes, volume.settings.volume_id.hex()
        if capacity not in chosen or noted.get(capacity) == name:
            chosen[capacity] = volume
    home = PoolOfNames(pool_id, {size: each.settings.volume_id.hex() for size, each in chosen.items()})
    return PoolBlockStore(list(chosen.values()), channel), home


class PoolBlockStore:
    """The block store over `volumes`, all of kind `files` and each of a capacity of its own. Safe from any
    thread."""

    def __init__(self, volumes: Sequence[Volume], channel: Callable[[], IoChannel]) -> None:
        ordered = sorted(volumes, key=lambda volume: volume.settings.value_bytes)
        self._volumes = {volume.settings.value_bytes: volume for volume in ordered}
        self._channel = channel
        self._open: OrderedDict[bytes, SlotReader] = OrderedDict()
        self._lock = threading.Lock()
        self._unsynced = UnsyncedBlocks()

    @property
    def remembered(self) -> int:
        """Blocks whose header is remembered, and those that are not proven to be durable."""
        return len(self._open) + len(self._unsynced)

    @property
    def capacities(self) -> tuple[int, ...]:
        return tuple(self._volumes)

    def put(self, block_id: bytes, capacity: int, data: memoryview) -> Steps[None]:
        volume, channel = self._volumes[capacity], self._channel()
        first = channel.written() + 1
        writing = SlotWriter(volume, block_id, length=len(data), may_evict=False)
        try:
            for at in range(0, len(data), PIECE_BYTES):
                deadline = channel.now() + volume.timing.write_deadline
                yield from writing.write(channel, at, data[at : at + PIECE_BYTES], deadline)
        except PutRefused as refused:
            if refused.cause is None:
                raise StoreFull(str(refused)) from None
            if refused.cause is MissCause.ENCLOSURE_DOWN and not writing.received:
                raise StoreUnreached(str(refused)) from None
            raise StoreUnavailable(str(refused)) from None
        finally:
            if not writing.finished:
                writing.drop()
        namespaces = {place.namespace for place in volume.places(volume.placement.pseudonym(block_id))}
        self._unsynced.add(block_id, Unsynced(first, channel.written(), len(data), tuple(namespaces)))
        if self._unsynced.is_full:
            yield from flush_written(channel, self._members())
            self._unsynced.drop_flushed(channel, all_of_them=True)

    def places(self, block_id: bytes, capacity: int) -> Collection[int]:
        placement = self._volumes[capacity].placement
        return {place.namespace for place in placement.candidates(placement.pseudonym(block_id))}

    def examine(self, block_id: bytes, capacity: int) -> Steps[bytes | None]:
        # It was looked for by the newest map if that is the same, and this agent's, before and afterwards.
        volume, channel = self._volume(capacity), self._channel()
        before = yield from _map_in_force(volume, channel)
        try:
            against = yield from examine(volume, channel, block_id)
        except Undecided as reason:
            raise StoreUnavailable(f"block unavailable: {reason}") from None
        if against is not None and (yield from _map_in_force(volume, channel)) != before:
            raise StoreUnavailable("block unavailable: the pool map became another")
        return against

    def give_up(self, block_id: bytes, capacity: int) -> Steps[None]:
        volume = self._volumes.get(capacity)
        if volume is not None and not volume.erased:
            yield from set_aside(volume, self._channel(), block_id)

    def get(self, block_id: bytes, capacity: int, offset: int, into: memoryview) -> Steps[bool]:
        volume, channel = self._volume(capacity), self._channel()
        channel.has_patience()
        reading = self._reading(volume, block_id)
        for at in range(0, len(into), PIECE_BYTES):
            piece = into[at : at + PIECE_BYTES]
            # A file is not a cache: its reader waits as long as a writer would.
            deadline = channel.now() + volume.timing.write_deadline
            if reading.cause is not None:
                # Another worker's read of the block came late, or gave way. That is not this one's fault.
                self._forget(block_id)
                reading = self._reading(volume, block_id)
            count = yield from reading.read(channel, offset + at, piece, deadline)
            if count == len(piece):
                continue  # what is proven stays so, whatever another worker has found meanwhile
            if reading.cause is MissCause.EVICTED:
                # Since its header was read, the block was sealed anew, perhaps in another slot.
                self._forget(block_id)
                reading = self._reading(volume, block_id)
                count = yield from reading.read(channel, offset + at, piece, deadline)
            if reading.cause is not None:
                self._forget(block_id)
                if reading.cause in _MAY_COME_BACK:
                    raise StoreUnavailable(f"block unavailable: {reading.cause.name.lower()}")
                return False
            if count != len(piece):
                return False
        return True

    def comes_again(self) -> None:
        self._channel().comes_again()

    def delete(self, block_id: bytes, capacity: int) -> Steps[None]:
        volume, channel = self._volume(capacity), self._channel()
        self._forget(block_id)
        self._unsynced.forget(block_id)
        try:
            yield from delete_block(volume, channel, block_id, channel.now() + volume.timing.write_deadline)
        except PutRefused as refused:
            raise StoreUnavailable(str(refused)) from None

    def flush(self, blocks: Iterable[tuple[bytes, int]] | None = None) -> Steps[None]:
        channel = self._channel()
        channel.waits_for_slow()
        failed = yield from flush_written(channel, self._members())
        in_doubt = self._unsynced.drop_flushed(channel)
        if failed and blocks is None:
            raise StoreUnavailable(_not_flushed(failed))
        if blocks is None or not (failed or in_doubt):
            return
        blocks = list(blocks)
        for _ in range(FLUSHES_MAX):
            if not in_doubt or not (yield from self._read_again(channel, blocks)):
                break
            # What stands may have been written again since, and be in a cache once more.
            failed = yield from flush_written(channel, self._members())
            in_doubt = self._unsynced.drop_flushed(channel)
        else:
            raise StoreUnavailable("sessions to an enclosure end all the time")
        if failed:
            for name, capacity in blocks:
                if not (yield from self._lies_apart(name, capacity, failed)):
                    raise StoreUnavailable(_not_flushed(failed))

    def _read_again(self, channel: IoChannel, blocks: Iterable[tuple[bytes, int]]) -> Steps[int]:
        """Read those blocks that are in doubt; how many there were. Raises StoreUnavailable, once, where
        some are lost."""
        read = lost = 0
        for name, capacity in blocks:
            block = self._unsynced.in_doubt(name)
            if block is None:
                continue
            read += 1
            # The end of another session from now on brings new doubt.
            since = 1 + max(channel.doubtful(each) for each in block.namespaces)
            if (yield from stands(self._volume(capacity), channel, name, block.length)):
                self._unsynced.add(name, block._replace(first=since, last=max(since, channel.written())))
            else:
                self._unsynced.forget(name)
                self._forget(name)
                lost += 1
        if lost:
            log.warning(
                "%d block(s) of a file are lost: an enclosure had acknowledged them, and has not kept them "
                "until a flush; did it lose power? Its fsync fails, once",
                lost,
            )
            raise StoreUnavailable("blocks that no flush had followed are lost")
        if read:
            log.info("%d block(s) that were written before a session ended were read again: all stand", read)
        return read

    def _members(self) -> list[int]:
        return sorted(
            {extent.namespace for volume in self._volumes.values() for extent in volume.settings.extents}
        )

    def _lies_apart(self, block_id: bytes, capacity: int, namespaces: Collection[int]) -> Steps[bool]:
        """Whether a block is known to be on none of some namespaces."""
        volume, channel = self._volume(capacity), self._channel()
        pseudonym = volume.placement.pseudonym(block_id)
        with volume.borrowed(pseudonym) as sets:
            others = [cached for cached in sets if cached.namespace not in namespaces]
            if len(others) == len(sets):
                return True
            if not volume.find(others, pseudonym):
                stale = [cached for cached in others if not volume.is_fresh(cached, channel)]
                yield from volume.load(channel, stale, channel.now() + volume.timing.write_deadline)
            found = volume.find(sets, pseudonym)
            return bool(found) and found[0].cached.namespace not in namespaces

    def usage(self) -> tuple[int, int]:
        total = free = 0
        for volume in self._volumes.values():
            slots, taken = volume.usage()
            total += slots * volume.settings.value_bytes
            free += (slots - taken) * volume.settings.value_bytes
        return total, free

    def _volume(self, capacity: int) -> Volume:
        """Where a block is. Raises StoreUnavailable where its volume was erased before the start."""
        volume = self._volumes.get(capacity)
        if volume is None:
            raise StoreUnavailable(f"block unavailable: no volume for {capacity} bytes is served")
        return volume

    def _reading(self, volume: Volume, block_id: bytes) -> SlotReader:
        """The reader of a block. While another worker begins to read the block, a reader of its own: the
        worker would wait until that one's whole piece is served, and a header costs less than that."""
        with self._lock:
            reading = self._open.get(block_id)
            if reading is None:
                reading = self._open[block_id] = SlotReader(volume, block_id)
                if len(self._open) > OPEN_BLOCKS_MAX:
                    self._open.popitem(last=False)
            elif reading.length is None:
                return SlotReader(volume, block_id)
            else:
                self._open.move_to_end(block_id)
            return reading

    def _forget(self, block_id: bytes) -> None:
        with self._lock:
            self._open.pop(block_id, None)


def _map_in_force(volume: Volume, channel: IoChannel) -> Steps[int]:
    """The version of the map that all go by, where this agent does. Raises `StoreUnavailable`."""
    version: int | None = 0
    if volume.newest_map is not None:
        version = yield from volume.newest_map(channel, channel.now() + volume.timing.write_deadline)
    if volume.erased:
        raise StoreUnavailable(f"block unavailable: volume {volume.settings.name} is served no longer")
    if version is None:
        raise StoreUnavailable("block unavailable: there may be a newer pool map than the one that is known")
    return version


def _not_flushed(failed: Mapping[int, str]) -> str:
    return f"an enclosure did not flush: {next(iter(failed.values()))}"
