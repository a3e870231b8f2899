"""The key-value face: `/kv/<volume>/<name>` is the value stored under that name.

A name of 32 hex digits is the key itself; any other name is hashed to one (control_wire.key_of_name).
Values are immutable: a file that exists is not opened for writing (EEXIST), a new one is complete when
it is first closed, and whoever writes on after that gets EIO and the value is removed again, so that
half a value is never served. An empty file stores nothing.

What lookup says is a hint from the directories, and costs no round trip while they are remembered; the
read proves the value. A value that went in between reads as an empty file: a miss, never an error. One
that is lost in the middle, when ranges of it were served, reads as EIO from there on: whoever reads to the
end must not take what came so far for a shorter value.
Directories list nothing: a key-value face that lists its keys would need an index, and would tell one
tenant what another one holds.
"""

from __future__ import annotations

import errno
import itertools
import os
import stat
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

from agent.bounds import SHARED, Bounds, Holder, Limit
from agent.fs.interface import (
    FACE_KV,
    FACE_SHIFT,
    ROOT_INODE,
    Attributes,
    Caller,
    DirectoryEntry,
    Entry,
    FsError,
    Opened,
    RefusesAll,
    SetAttributes,
    StatFs,
)
from agent.pool.continuing import INACTIVE, Continuer, Trail
from agent.pool.operations import (
    AnyReading,
    AnyVolume,
    AnyWriting,
    delete_value,
    find_length,
    new_reading,
    new_writing,
)
from agent.pool.prestage import PrestageCache
from agent.pool.steps import Acquire, Lanes, Outcome, Steps
from agent.pool.writing import BadPut, PutRefused, TooLong
from host_shim.control_wire import key_of_name

KV_ROOT: Final = FACE_KV << FACE_SHIFT | 1
_VOLUMES_FROM: Final = KV_ROOT + 1
_VALUES_FROM: Final = KV_ROOT + (1 << 16)

OPEN_VALUES: Final = Limit(
    "kv-open", "files of /kv that are open for reading", 131_072,
    by="user, guest", share=SHARED, refused="ENFILE", bytes_each=2048,
)  # fmt: skip
WRITERS: Final = Limit(
    "kv-writers", "values that are being written through files of /kv", 256,
    by="user, guest", share=SHARED, refused="ENFILE", bytes_each=2048,
)  # fmt: skip
"""Beside that each may hold one unit that is not yet full, which begun_puts.py bounds."""
NODES: Final = Limit(
    "kv-nodes", "values of /kv that kernels hold a reference to", 262_144,
    by="user, guest", share=SHARED, refused="one looked up long ago, and not open, goes", bytes_each=1024,
)  # fmt: skip
"""A kernel keeps them in its cache, and looks names up at each use: one that went has a new number then."""
LOOKS_FOR_ROOM: Final = 64
"""Nodes that are looked at for one that nobody has open."""
TRAILS_MAX: Final = 1024
"""Processes of which it is remembered which value they opened last, to learn what follows what."""
READ_BYTES_HINT: Final = 1 << 20
"""st_blksize of a value. A program that reads in small pieces would open the same unit over and over."""


def errno_of(refused: PutRefused) -> int:
    """A refused put as an errno: no room is ENOSPC, an enclosure that failed is EIO."""
    return errno.ENOSPC if refused.cause is None else errno.EIO


def _errno_of_either(refused: BadPut | PutRefused) -> int:
    if isinstance(refused, PutRefused):
        return errno_of(refused)
    return errno.EFBIG if isinstance(refused, TooLong) else errno.EINVAL


@dataclass(slots=True)
class _Value:
    """An inode: a key that the kernel holds a reference to."""

    volume: AnyVolume
    key: bytes
    holder: Holder
    """Who was told of it first."""
    lookups: int = 1
    length: int = 0
    opens: int = 0


@dataclass(slots=True)
class _Writer:
    writing: AnyWriting
    holder: Holder
    failed: int = 0
    """The errno of a write that was refused: from then on there is no value to be had from this file."""
    spoilt: bool = False
    lock: threading.Lock = field(default_factory=threading.Lock)


class KvFace(RefusesAll):
    """`/kv`. Safe from any thread: a lock guards the tables, handles are each guarded by their own.

    `lanes` gives the lanes of whoever drives the steps, so it is called inside of steps only.
    """

    def __init__(
        self,
        volumes: Sequence[AnyVolume],
        lanes: Callable[[], Lanes],
        prestage: PrestageCache | None = None,
        owner: tuple[int, int] = (0, 0),
        epoch: int = 0,
        continuer: Continuer = INACTIVE,
        bounds: Bounds | None = None,
    ) -> None:
        """`epoch`: values have other numbers in each, for a guest that outlives the agent."""
        bounds = bounds or Bounds()
        self._open_values, self._open_writers = bounds.of(OPEN_VALUES), bounds.of(WRITERS)
        self._nodes = bounds.of(NODES)
        self._opened_by: dict[int, Holder] = {}
        self._volumes = {_VOLUMES_FROM + number: volume for number, volume in enumerate(volumes)}
        self._volume_inodes = {volume.settings.name.encode(): ino for ino, volume in self._volumes.items()}
        self._lanes = lanes
        self._prestage = prestage
        self._owner = owner
        self._values: OrderedDict[int, _Value] = OrderedDict()
        """Those first that were looked up longest ago."""
        self._inode_of: dict[tuple[bytes, bytes], int] = {}
        self._continuer = continuer
        self._trails: OrderedDict[int, Trail] = OrderedDict()
        self._readers: dict[int, AnyReading] = {}
        self._writers: dict[int, _Writer] = {}
        self._numbers = itertools.count(_VALUES_FROM + (epoch << 32))
        self._handles = itertools.count(1)
        self._lock = threading.Lock()

    # -- names ----------------------------------------------------------------------------------

    def lookup(self, caller: Caller, parent: int, name: bytes) -> Outcome[Entry]:
        if parent == KV_ROOT:
            ino = self._volume_inodes.get(name)
            if ino is None or self._volumes[ino].erased:
                raise FsError(errno.ENOENT)
            return Entry(self._folder(ino), 60.0, 60.0)
        return self._lookup_value(caller.holder, self._volume(parent), name)

    def _lookup_value(self, holder: Holder, volume: AnyVolume, name: bytes) -> Steps[Entry]:
        key = _key(name)
        length = yield from find_length(volume, self._lanes(), key)
        if length is None:
            raise FsError(errno.ENOENT)
        ino = self._remember(holder, volume, key, length)
        # The kernel may not remember the name: another agent may remove or evict it.
        return Entry(self._file(ino, length), 0.0, 1.0)

    def _remember(self, holder: Holder, volume: AnyVolume, key: bytes, length: int) -> int:
        place = (volume.settings.volume_id, key)
        with self._lock:
            ino = self._inode_of.get(place)
            if ino is not None:
                value = self._values[ino]
                if value.holder != holder and self._nodes.take(holder):
                    # The last to ask is charged: another may keep it after the first has let go.
                    self._nodes.give_back(value.holder)
                    value.holder = holder
                value.lookups += 1
                value.length = length
                self._values.move_to_end(ino)
                return ino
            if not self._nodes.take(holder) and not self._took_anothers_place(holder):
                raise FsError(errno.ENFILE, "too many values are held open")
            ino = next(self._numbers)
            self._inode_of[place] = ino
            self._values[ino] = _Value(volume, key, holder, 1, length)
            return ino

    def _took_anothers_place(self, holder: Holder) -> bool:
        for _ in range(min(LOOKS_FOR_ROOM, len(self._values))):
            ino = next(iter(self._values))
            value = self._values[ino]
            if value.opens:
                self._values.move_to_end(ino)
                continue
            self._drop_node(ino, value)
            if self._nodes.take(holder):
                return True
        return False

    def _drop_node(self, ino: int, value: _Value) -> None:
        del self._values[ino]
        self._nodes.give_back(value.holder)
        self._inode_of.pop((value.volume.settings.volume_id, value.key), None)

    def _note_open(self, ino: int, change: int) -> None:
        """With the lock held."""
        value = self._values.get(ino)
        if value is not None:
            value.opens += change

    def forget(self, ino: int, lookups: int) -> None:
        with self._lock:
            value = self._values.get(ino)
            if value is None:
                return
            value.lookups -= lookups
            if value.lookups <= 0:
                self._drop_node(ino, value)

    def unlink(self, caller: Caller, parent: int, name: bytes) -> Outcome[None]:
        return self._unlink(self._volume(parent), _key(name))

    def _unlink(self, volume: AnyVolume, key: bytes) -> Steps[None]:
        lanes = self._lanes()
        if self._prestage is not None:
            self._prestage.discard(volume.settings.volume_id, volume.placement.pseudonym(key))
        try:
            there = yield from delete_value(volume, lanes, key, lanes.now() + volume.timing.write_deadline)
        except PutRefused as refused:
            raise FsError(errno.EIO, str(refused)) from None
        if not there:
            raise FsError(errno.ENOENT)

    # -- attributes -----------------------------------------------------------------------------

    def getattr(self, caller: Caller, ino: int, handle: int | None) -> Outcome[Attributes]:
        if ino == KV_ROOT:
            return self._folder(ino)
        if ino in self._volumes:
            self._volume(ino)
            return self._folder(ino)
        return self._file(ino, self._value(ino).length)

    def setattr(
        self, caller: Caller, ino: int, changes: SetAttributes, handle: int | None
    ) -> Outcome[Attributes]:
        if ino not in self._values:
            raise FsError(errno.EPERM)
        length = self._value(ino).length
        if changes.size is not None and changes.size != length:
            raise FsError(errno.EPERM, "a value is immutable")
        # Modes, owners and times are not kept: a key-value has no metadata beyond its slot.
        return self._file(ino, length)

    def statfs(self, ino: int) -> Outcome[StatFs]:
        volumes = [self._volumes[ino]] if ino in self._volumes else list(self._volumes.values())
        total = free = 0
        for volume in volumes:
            if volume.erased:
                continue
            slots, taken = volume.usage()
            blocks = volume.settings.value_bytes // 4096
            total += slots * blocks
            free += (slots - taken) * blocks
        return StatFs(total, free, free)

    def _folder(self, ino: int) -> Attributes:
        uid, gid = self._owner
        return Attributes(ino, stat.S_IFDIR | 0o755, nlink=2, uid=uid, gid=gid)

    def _file(self, ino: int, length: int) -> Attributes:
        uid, gid = self._owner
        blocks = -(-length // 512)
        return Attributes(
            ino, stat.S_IFREG | 0o644, length, uid=uid, gid=gid, blocks=blocks, block_size=READ_BYTES_HINT
        )

    def _value(self, ino: int) -> _Value:
        value = self._values.get(ino)
        if value is None or value.volume.erased:
            raise FsError(errno.ENOENT)
        return value

    def _volume(self, ino: int) -> AnyVolume:
        volume = self._volumes.get(ino)
        if volume is None:
            raise FsError(errno.EPERM if ino == KV_ROOT else errno.ENOTDIR)
        if volume.erased:
            raise FsError(errno.ENOENT)
        return volume

    # -- folders --------------------------------------------------------------------------------

    def opendir(self, caller: Caller, ino: int, flags: int) -> Outcome[Opened]:
        if ino != KV_ROOT and ino not in self._volumes:
            raise FsError(errno.ENOTDIR)
        return Opened(0)

    def readdir(self, ino: int, handle: int, cookie: int) -> Outcome[Iterable[DirectoryEntry]]:
        parent = ROOT_INODE if ino == KV_ROOT else KV_ROOT
        rows = [(b".", ino), (b"..", parent)]
        if ino == KV_ROOT:
            rows += [(name, at) for name, at in self._volume_inodes.items() if not self._volumes[at].erased]
        entries = [
            DirectoryEntry(name, number, stat.S_IFDIR, at) for at, (name, number) in enumerate(rows, 1)
        ]
        return entries[cookie:]

    # -- values ---------------------------------------------------------------------------------

    def open(self, caller: Caller, ino: int, flags: int) -> Outcome[Opened]:
        value = self._value(ino)
        if flags & os.O_ACCMODE != os.O_RDONLY or flags & os.O_TRUNC:
            raise FsError(errno.EEXIST, "a value is immutable; remove it first")
        handle = next(self._handles)
        with self._lock:
            if not self._open_values.take(caller.holder):
                raise FsError(errno.ENFILE)
            self._opened_by[handle] = caller.holder
            self._note_open(ino, 1)
            self._readers[handle] = new_reading(value.volume, value.key, self._prestage)
            trail = self._trail(caller.pid) if self._continuer.active else None
        if trail is not None:
            self._continuer.chain(value.volume, (value.key,), trail)
            self._continuer.reads(value.volume, value.key)
        return Opened(handle, direct_io=True, no_flush=True)

    def _trail(self, process: int) -> Trail:
        trail = self._trails.get(process)
        if trail is None:
            trail = self._trails[process] = Trail()
            if len(self._trails) > TRAILS_MAX:
                self._trails.popitem(last=False)
        else:
            self._trails.move_to_end(process)
        return trail

    def create(
        self, caller: Caller, parent: int, name: bytes, mode: int, flags: int
    ) -> Outcome[tuple[Entry, Opened]]:
        volume, key = self._volume(parent), _key(name)
        handle = next(self._handles)
        ino = self._remember(caller.holder, volume, key, 0)
        with self._lock:
            is_room = self._open_writers.take(caller.holder)
            if is_room:
                self._note_open(ino, 1)
                self._writers[handle] = _Writer(new_writing(volume, key), caller.holder)
        if not is_room:
            self.forget(ino, 1)
            raise FsError(errno.ENFILE)
        return Entry(self._file(ino, 0)), Opened(handle, direct_io=True)

    def read(self, ino: int, handle: int, offset: int, into: memoryview) -> Outcome[int]:
        reading = self._readers.get(handle)
        if reading is None:
            raise FsError(errno.EBADF, "a value being written is read after it is closed")
        return self._read(reading, offset, into)

    def _read(self, reading: AnyReading, offset: int, into: memoryview) -> Steps[int]:
        lanes = self._lanes()
        deadline = lanes.now() + reading.volume.timing.read_deadline
        count = yield from reading.read(lanes, offset, into, deadline)
        if reading.cause is not None and reading.length is not None:
            raise FsError(errno.EIO, f"the value was lost while it was read: {reading.cause.name.lower()}")
        return count

    def write(self, ino: int, handle: int, offset: int, data: memoryview) -> Outcome[int]:
        writer = self._writers.get(handle)
        if writer is None:
            raise FsError(errno.EBADF)
        return self._write(writer, ino, offset, data)

    def _write(self, writer: _Writer, ino: int, offset: int, data: memoryview) -> Steps[int]:
        writing, lanes = writer.writing, self._lanes()
        deadline = lanes.now() + writing.volume.timing.write_deadline
        if not (yield Acquire(writer.lock, deadline)):
            raise FsError(errno.EIO)
        try:
            if writer.failed:
                raise FsError(writer.failed, "an earlier write was refused")
            if writing.finished:
                yield from self._spoil(writer, lanes, deadline)
            try:
                yield from writing.write(lanes, offset, data, deadline)
            except (BadPut, PutRefused) as refused:
                writer.failed = _errno_of_either(refused)
                # What came before must not be sealed as if it were all there is.
                yield from writing.drop(lanes)
                raise FsError(writer.failed, str(refused)) from None
        finally:
            writer.lock.release()
        value = self._values.get(ino)
        if value is not None:
            value.length = writing.received
        return len(data)

    def _spoil(self, writer: _Writer, lanes: Lanes, deadline: float) -> Steps[None]:
        """Bytes after the close that completed the value: half of it must not stay behind."""
        # What this writer did not store, because it failed or came second, is not its to delete.
        if writer.writing.stored and not writer.spoilt:
            writer.spoilt = True
            try:
                yield from delete_value(writer.writing.volume, lanes, writer.writing.key, deadline)
            except PutRefused:
                # It may stay for as long as its enclosure is away; the writer is told EIO either way.
                writer.spoilt = False
        raise FsError(errno.EIO, "the value was complete at its first close")

    def flush(self, ino: int, handle: int) -> Outcome[None]:
        writer = self._writers.get(handle)
        if writer is None or not writer.writing.received:
            return None
        return self._finish(writer)

    def _finish(self, writer: _Writer) -> Steps[None]:
        writing, lanes = writer.writing, self._lanes()
        deadline = lanes.now() + writing.volume.timing.write_deadline
        if not (yield Acquire(writer.lock, deadline)):
            raise FsError(errno.EIO)
        try:
            if writer.failed:
                raise FsError(writer.failed, "a write was refused, so nothing is stored")
            first_close = not writing.finished
            yield from writing.finish(lanes, deadline)
        except (BadPut, PutRefused) as refused:
            raise FsError(_errno_of_either(refused), str(refused)) from None
        finally:
            writer.lock.release()
        if first_close and writing.already_there:
            raise FsError(errno.EEXIST, "the key was stored meanwhile; the first write stays")

    def release(self, ino: int, handle: int) -> Outcome[None]:
        with self._lock:
            reading = self._readers.pop(handle, None)
            writer = self._writers.pop(handle, None)
            holder = self._opened_by.pop(handle, None)
            if reading is not None or writer is not None:
                self._note_open(ino, -1)
        if reading is not None and holder is not None:
            reading.close()
            self._open_values.give_back(holder)
        if writer is not None:
            self._open_writers.give_back(writer.holder)
        if writer is None or writer.writing.finished:
            return None
        return self._drop(writer)

    def _drop(self, writer: _Writer) -> Steps[None]:
        yield from writer.writing.drop(self._lanes())


def _key(name: bytes) -> bytes:
    if len(name) > 255:
        raise FsError(errno.ENAMETOOLONG)
    return key_of_name(name)
